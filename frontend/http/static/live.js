// The live view: everything in it comes from /metrics, which is parsed here.

import { request } from "./api.js";
import { depthColour } from "./schedule.js";

const PREFIX = "depthbatch:";
const KEPT = 120; // scrapes
const WINDOW = 5; // scrapes that a rate looks back
const SVG = "http://www.w3.org/2000/svg";
const QUEUES = { q_p: "wait for prefill", q_d: "wait for prelude", q_r: "ready for a loop", q_c: "wait for coda" };

/** Prometheus text as a map: name -> [{labels, value}]; names without the prefix. */
export function parseMetrics(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const match = /^([^\s{#]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    }
    const name = match[1].replace(PREFIX, "");
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({ labels, value: Number(match[3].replace("Inf", "Infinity")) });
  }
  return families;
}

class Scrape {
  constructor(text, at_s) {
    this.families = parseMetrics(text);
    this.at_s = at_s;
  }

  /** The sum of the samples whose labels fit. */
  sum(name, labels = {}) {
    const fits = (sample) => Object.entries(labels).every(([key, value]) => sample.labels[key] === value);
    return (this.families.get(name) ?? []).filter(fits).reduce((sum, sample) => sum + sample.value, 0);
  }

  has(name) {
    return this.families.has(name);
  }

  values(name, label) {
    return [...new Set((this.families.get(name) ?? []).map((sample) => sample.labels[label]))].filter(Boolean);
  }

  /** Rows of a histogram with one bucket a depth: [depth, count]. */
  depths() {
    const buckets = (this.families.get("exit_depth_bucket") ?? [])
      .map((sample) => [Number(sample.labels.le.replace("+Inf", "Infinity")), sample.value])
      .filter(([bound]) => Number.isFinite(bound))
      .sort((a, b) => a[0] - b[0]);
    return buckets.map(([bound, count], i) => [bound, count - (i ? buckets[i - 1][1] : 0)]);
  }
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function bar(share, fill) {
  const track = element("span", "track");
  const filled = element("span", "filled");
  filled.style.setProperty("width", `${100 * Math.min(1, Math.max(0, share || 0))}%`);
  if (fill) filled.style.setProperty("background-color", fill);
  track.append(filled);
  return track;
}

function table(headings, rows) {
  const made = element("table");
  const head = element("tr");
  head.append(...headings.map((text) => element("th", "", text)));
  if (headings.some(Boolean)) made.append(head);
  for (const cells of rows) {
    const row = element("tr");
    row.append(
      ...cells.map((cell) => {
        const data = element("td");
        data.append(cell);
        return data;
      }),
    );
    made.append(row);
  }
  return made;
}

function sparkline(values) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", `0 0 ${KEPT - 1} 32`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("class", "sparkline");
  picture.setAttribute("aria-hidden", "true");
  const most = Math.max(1e-9, ...values);
  const first = KEPT - values.length;
  const points = values.map((value, i) => `${first + i},${(31 - (29 * value) / most).toFixed(1)}`);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  picture.append(line);
  return picture;
}

const number = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";
const percent = (share) => (Number.isFinite(share) ? `${number(100 * share, 1)} %` : "–");
const milliseconds = (seconds) => (Number.isFinite(seconds) ? `${number(1000 * seconds, 1)} ms` : "–");

/** The difference of two scrapes, never below zero: a process that was started again counts anew. */
function since(before, now) {
  const seconds = now.at_s - before.at_s;
  const grown = (name, labels) => Math.max(0, now.sum(name, labels) - before.sum(name, labels));
  return {
    seconds,
    grown,
    rate: (name, labels) => grown(name, labels) / seconds,
    mean: (name, labels) => grown(`${name}_sum`, labels) / grown(`${name}_count`, labels),
  };
}

function figures(pairs) {
  const list = element("dl", "figures");
  for (const [name, value] of pairs) {
    const entry = element("div");
    entry.append(element("dt", "", name), element("dd", "", value));
    list.append(entry);
  }
  return list;
}

function tokensCard(now, recent, rates) {
  const big = element("p", "big", number(rates.at(-1), 1));
  const front = { process: "frontend" };
  return [
    big, sparkline(rates),
    figures([
      ["time to first token", milliseconds(recent.mean("time_to_first_token_seconds", front))],
      ["between tokens", milliseconds(recent.mean("inter_token_latency_seconds", front))],
      ["since start", number(now.sum("generation_tokens_total", front))],
    ]),
  ];
}

function queuesCard(now) {
  const rows = Object.entries(QUEUES)
    .filter(([queue]) => now.values("queue_length", "queue").includes(queue))
    .map(([queue, what]) => [queue, what, now.sum("queue_length", { queue })]);
  const most = Math.max(1, ...rows.map(([, , rows_]) => rows_));
  return [
    figures([
      ["running", number(now.sum("num_requests_running"))],
      ["waiting", number(now.sum("num_requests_waiting"))],
      ["preempted since start", number(now.sum("num_preemptions_total"))],
    ]),
    table(
      ["queue", "", "rows"],
      rows.map(([queue, what, length]) => [`${queue}, ${what}`, bar(length / most), number(length)]),
    ),
  ];
}

function stagesCard(now, recent) {
  const busy = recent.grown("worker_busy_seconds_total");
  const rows = now.values("stage_steps_total", "stage").map((stage) => [
    stage,
    number(recent.mean("stage_batch_size", { stage }), 1),
    number(recent.rate("stage_steps_total", { stage }), 1),
    bar(recent.grown("stage_seconds_total", { stage }) / busy),
  ]);
  return [table(["stage", "rows", "per s", "device time"], rows)];
}

function deviceCard(recent) {
  const parts = [
    ["busy", recent.grown("worker_busy_seconds_total"), "var(--busy)"],
    ["idle, scheduler late", recent.grown("worker_idle_seconds_total", { cause: "scheduler" }), "var(--late)"],
    ["idle, no work", recent.grown("worker_idle_seconds_total", { cause: "no_work" }), "var(--idle)"],
  ];
  const all = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  return [table(["", "", ""], parts.map(([name, s, fill]) => [name, bar(s / all, fill), percent(s / all)]))];
}

function depthsCard(now, before) {
  const older = new Map(before.depths());
  let depths = now.depths().map(([depth, count]) => [depth, Math.max(0, count - (older.get(depth) ?? 0))]);
  const recent = depths.some(([, count]) => count > 0);
  if (!recent) depths = now.depths();
  const all = depths.reduce((sum, [, count]) => sum + count, 0);
  const mean = depths.reduce((sum, [depth, count]) => sum + depth * count, 0) / all;
  const most = Math.max(1, ...depths.map(([, count]) => count));
  const last = depths.length ? depths.at(-1)[0] : 1;
  const shown = depths.length > 20 ? depths.filter(([, count]) => count > 0) : depths;
  return [
    figures([[recent ? "mean of the last minute" : "mean since start", number(mean, 2)]]),
    table(
      ["loops", "", "tokens"],
      shown.map(([depth, count]) => [String(depth), bar(count / most, depthColour(depth, last).fill), percent(count / all)]),
    ),
  ];
}

function cacheCard(now, recent) {
  const used = now.sum("kv_cache_usage_perc");
  const rows = [["KV blocks in use", bar(used), percent(used)]];
  if (now.has("prefix_cache_queries_total")) {
    const hits = now.sum("prefix_cache_hits_total") / now.sum("prefix_cache_queries_total");
    rows.push(["prefix cache hits", bar(hits), percent(hits)]);
  } else {
    rows.push(["prefix cache", "off", ""]);
  }
  return [table(["", "", ""], rows), figures([["prompt tokens/s", number(recent.rate("prompt_tokens_total"), 1)]])];
}

function draftsCard(now) {
  const rows = now.values("spec_decode_num_draft_tokens_total", "depth").map((depth) => {
    const right = now.sum("spec_decode_num_accepted_tokens_total", { depth });
    const wrong = now.sum("spec_decode_num_rejected_tokens_total", { depth });
    return [depth, number(now.sum("spec_decode_num_draft_tokens_total", { depth })), bar(right / (right + wrong)),
            percent(right / (right + wrong))];
  });
  return [table(["read at loop", "drafts", "", "accepted"], rows)];
}

/** Returns what draws the view anew from a fresh scrape. */
export function startLive(host, state) {
  const scrapes = [];
  const rates = [];
  return async () => {
    let now;
    try {
      const answer = await request("metrics", { open: true });
      now = new Scrape(await answer.text(), performance.now() / 1000);
      state.classList.remove("error");
      state.textContent = "From /metrics, once a second; rates are those of the last five.";
    } catch (error) {
      state.classList.add("error");
      state.textContent = `No metrics: ${error.message}`;
      return;
    }
    scrapes.push(now);
    if (scrapes.length > KEPT) scrapes.shift();
    const before = scrapes.at(-1 - WINDOW) ?? scrapes[0];
    const recent = since(before, now);
    rates.push(recent.seconds > 0 ? recent.rate("generation_tokens_total", { process: "frontend" }) : 0);
    if (rates.length > KEPT) rates.shift();
    const cards = [
      ["Tokens/s", tokensCard(now, recent, rates)],
      ["Depth", depthsCard(now, scrapes.at(-61) ?? scrapes[0])],
      ["Stages", stagesCard(now, recent)],
      ["Device", deviceCard(recent)],
      ["Requests", queuesCard(now)],
      ["Memory", cacheCard(now, recent)],
    ];
    if (now.values("spec_decode_num_draft_tokens_total", "depth").length) cards.push(["Drafts", draftsCard(now)]);
    host.replaceChildren(
      ...cards.map(([title, content]) => {
        const card = element("article", "card");
        card.dataset.card = title;
        card.append(element("h2", "", title), ...content);
        return card;
      }),
    );
  };
}
