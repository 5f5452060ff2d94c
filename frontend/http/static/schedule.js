// Colours of depth, and the schedule as a picture. Needs no other file: `depthbatch bench trace --html` puts it into its
// output as it is.

const SVG = "http://www.w3.org/2000/svg";
// From one loop to all of them: straw, green, teal, blue, indigo. Lightness falls all the way, so the order is seen
// without the hues, too.
const ANCHORS = [[0xfb, 0xe8, 0xa6], [0xa6, 0xd3, 0x96], [0x4f, 0xac, 0xa0], [0x2f, 0x73, 0xa6], [0x40, 0x2f, 0x82]];
const STAGE_FILLS = { prefill: "#d4526e", prelude: "#b9bec6", coda: "#7d838c" };
const UNIT = 7; // pixels of a stage of median length
const HEIGHT = 120;
const WAITING_HEIGHT = 18;
const LEFT = 30;
const TOP = 6;
const MOST_GAP = 5 * UNIT;

function luminance([red, green, blue]) {
  const linear = [red, green, blue].map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/** The colour of a depth and, of black and white, the one to write on it (at least 4.5 : 1). */
export function depthColour(depth, maxLoops) {
  const share = maxLoops > 1 ? Math.min(1, Math.max(0, (depth - 1) / (maxLoops - 1))) : 1;
  const place = share * (ANCHORS.length - 1);
  const below = Math.min(ANCHORS.length - 2, Math.floor(place));
  const rgb = ANCHORS[below].map((value, i) => Math.round(value + (ANCHORS[below + 1][i] - value) * (place - below)));
  return { fill: `rgb(${rgb.join(",")})`, ink: luminance(rgb) > 0.179 ? "#000" : "#fff" };
}

/** A row of chips, one a depth; with many loops those between are left out. */
export function depthLegend(host, maxLoops) {
  const every = Math.max(1, Math.ceil(maxLoops / 16));
  const depths = Array.from({ length: maxLoops }, (_, i) => i + 1).filter(
    (depth) => depth === 1 || depth === maxLoops || depth % every === 0,
  );
  host.replaceChildren(
    ...depths.map((depth) => {
      const chip = document.createElement("span");
      const { fill, ink } = depthColour(depth, maxLoops);
      chip.className = "chip";
      chip.style.setProperty("background-color", fill);
      chip.style.setProperty("color", ink);
      chip.textContent = String(depth);
      return chip;
    }),
  );
}

function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  if (text !== undefined) element.textContent = text;
  return element;
}

const timed = (stage) => typeof stage.start_s === "number" && typeof stage.end_s === "number";

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

/** Left edge and width of every stage in pixels. Where all have times, widths follow them and idle time is a gap; long
 * stages and gaps are cut short. Else core steps are as wide as one another, and so are all other stages. */
export function layOut(stages) {
  const byTime = stages.length > 0 && stages.every(timed);
  const unit = median(stages.filter((s) => s.stage === "core" && byTime).map((s) => s.end_s - s.start_s));
  let x = 0;
  let before = null;
  const places = stages.map((stage) => {
    let width = stage.stage === "core" ? UNIT : UNIT / 2;
    let idle_s = 0;
    if (byTime && unit > 0) {
      width = Math.min(24 * UNIT, Math.max(1.5, (UNIT * (stage.end_s - stage.start_s)) / unit));
      idle_s = before === null ? 0 : Math.max(0, stage.start_s - before.end_s);
      x += Math.min(MOST_GAP, (UNIT * idle_s) / unit);
    }
    before = stage;
    const place = { x, width, idle_s };
    x += width;
    return place;
  });
  return { places, width: x, byTime: byTime && unit > 0 };
}

/** From the shallowest row up: [rows, fill] of each part of a stage's column. */
function parts(stage, maxLoops) {
  if (stage.stage !== "core" || !stage.depths) return [[stage.batch, STAGE_FILLS[stage.stage] ?? "#888"]];
  return Object.entries(stage.depths)
    .map(([loop, rows]) => [Number(loop), rows])
    .sort((a, b) => b[0] - a[0])
    .map(([loop, rows]) => [rows, depthColour(loop, maxLoops).fill]);
}

const milliseconds = (seconds) => `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;

/** One line about a stage. */
export function describeStage(stage, place) {
  const words = [`${stage.stage}, ${stage.batch} ${stage.batch === 1 ? "row" : "rows"}`];
  if (stage.prompt_tokens !== undefined) words.push(`${stage.prompt_tokens} prompt tokens`);
  if (stage.depths) {
    const loops = Object.entries(stage.depths).sort((a, b) => a[0] - b[0]);
    words.push(loops.map(([loop, rows]) => `${rows} at loop ${loop}`).join(", "));
    if (stage.exits) words.push(`${stage.exits} leave`);
  }
  if (timed(stage)) words.push(milliseconds(stage.end_s - stage.start_s));
  if (place.idle_s > 1e-4) words.push(`after ${milliseconds(place.idle_s)} idle`);
  words.push(`${stage.q_p} waiting`);
  return words.join(" · ");
}

function stageLegend(host, maxLoops) {
  const depths = document.createElement("span");
  depths.className = "chips";
  depthLegend(depths, maxLoops);
  const entries = Object.entries(STAGE_FILLS).map(([name, fill]) => {
    const entry = document.createElement("span");
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.setProperty("background-color", fill);
    entry.append(swatch, name);
    return entry;
  });
  const core = document.createElement("span");
  core.append("core, at loop ", depths);
  host.append(core, ...entries);
}

/** Where each line of the picture starts and ends: [first stage, the one after the last]. */
function broken(places, room) {
  const lines = [];
  let first = 0;
  places.forEach((place, i) => {
    if (place.x + place.width - places[first].x <= room || i === first) return;
    lines.push([first, i]);
    first = i;
  });
  if (places.length) lines.push([first, places.length]);
  return lines;
}

/** One line of the picture; its columns start at LEFT. */
function drawLine(stages, places, [first, last], { tallest, longest, maxLoops }) {
  const scale = HEIGHT / tallest;
  const base = TOP + HEIGHT;
  const foot = base + 5 + WAITING_HEIGHT;
  const shift = LEFT - places[first].x;
  const end = places[last - 1].x + places[last - 1].width + shift;
  const picture = svg("svg", { width: Math.ceil(end) + 2, height: foot + 4, class: "schedule", "aria-hidden": "true" });
  for (const rows of new Set([0, Math.round(tallest / 2), tallest])) {
    const y = base - rows * scale;
    picture.append(svg("line", { x1: LEFT, x2: end, y1: y, y2: y, class: "grid" }));
    picture.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, rows));
  }
  let waiting = `M${LEFT} ${foot}`;
  for (let i = first; i < last; i++) {
    const { x, width } = places[i];
    let top = base;
    for (const [rows, fill] of parts(stages[i], maxLoops)) {
      top -= rows * scale;
      const inner = Math.max(1, width - (width > 3 ? 0.6 : 0));
      picture.append(svg("rect", { x: x + shift, y: top, width: inner, height: rows * scale, fill, class: "part" }));
    }
    const y = foot - ((stages[i].q_p ?? 0) / Math.max(1, longest)) * WAITING_HEIGHT;
    waiting += `H${(x + shift).toFixed(1)}V${y.toFixed(1)}h${width.toFixed(1)}`;
  }
  if (longest) {
    picture.append(svg("path", { d: `${waiting}V${foot}Z`, class: "waiting" }));
    picture.append(svg("text", { x: LEFT - 6, y: foot, "text-anchor": "end" }, longest));
  }
  const cursor = svg("rect", { y: TOP, width: 0, height: foot - TOP, class: "cursor" });
  picture.append(cursor);
  return { picture, cursor, shift, first, last };
}

/** Draws stages (objects as `--stage-trace` writes them) into host, which it empties, in as many lines as its width asks
 * for. Arrow keys go from stage to stage. */
export function drawSchedule(host, stages, maxLoops) {
  const { places, byTime } = layOut(stages);
  const scale = {
    tallest: Math.max(1, ...stages.map((stage) => stage.batch)), longest: Math.max(0, ...stages.map((stage) => stage.q_p ?? 0)),
    maxLoops,
  };
  const room = Math.max(200, (host.clientWidth || 900) - LEFT - 12);
  const lines = broken(places, room).map((line) => drawLine(stages, places, line, scale));
  const walk = document.createElement("div");
  walk.className = "strips";
  walk.tabIndex = 0;
  walk.setAttribute("role", "img");
  walk.setAttribute("aria-label", "The schedule: one column a stage, one row of it a sequence. Arrow keys go from stage to stage.");
  walk.append(...lines.map((line) => line.picture));

  const axis = byTime ? "time runs from left to right, gaps are idle time" : "stages in launch order, not to scale";
  const waits = scale.longest ? " · grey below: prompts that wait" : "";
  const hint = stages.length ? `${axis}${waits} · point at a stage, or walk with the arrow keys` : "No stage yet.";
  const note = document.createElement("p");
  note.className = "schedule-note";
  note.setAttribute("role", "status");
  note.textContent = hint;
  let at = -1;
  const show = (index) => {
    if (!stages.length) return;
    at = Math.min(stages.length - 1, Math.max(0, index));
    for (const line of lines) {
      const here = line.first <= at && at < line.last;
      line.cursor.setAttribute("width", here ? places[at].width : 0);
      if (here) line.cursor.setAttribute("x", places[at].x + line.shift);
      if (here && document.activeElement === walk) line.picture.scrollIntoView({ block: "nearest" });
    }
    note.textContent = `${at + 1}: ${describeStage(stages[at], places[at])}`;
  };
  for (const line of lines) {
    line.picture.addEventListener("pointermove", (event) => {
      const x = event.clientX - line.picture.getBoundingClientRect().left - line.shift;
      for (let i = line.first; i < line.last; i++) {
        if (x >= places[i].x && x < places[i].x + places[i].width) show(i);
      }
    });
  }
  walk.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stages.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
  const legend = document.createElement("p");
  legend.className = "legend";
  stageLegend(legend, maxLoops);
  host.replaceChildren(legend, note, walk);
}
