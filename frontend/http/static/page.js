// The frame of the page: which view is shown, what the server is, and the view of the schedule.

import { request, serverFacts } from "./api.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";
import { drawSchedule } from "./schedule.js";

const VIEWS = ["playground", "live", "schedule"];
const SCHEDULE_MS = 1000;
const NO_TRACE =
  "This server writes no stages down. Start it with --stage-trace FILE to see them here; " +
  "depthbatch bench trace FILE --html OUT.html draws the same from the file.";

const by = (id) => document.getElementById(id);

/** Calls work again and again while a view is shown; one call at a time. */
function whileShown(view, every_ms, work) {
  let running = false;
  const tick = async () => {
    if (running || document.hidden || by(view).hidden) return;
    running = true;
    try {
      await work();
    } finally {
      running = false;
    }
  };
  setInterval(tick, every_ms);
  window.addEventListener("hashchange", tick);
  tick();
}

function showView() {
  const view = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const name of VIEWS) by(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function describe(card) {
  const gate = card.gates.length ? `gate ${card.gate}` : "no gate";
  return `${card.id} · ${card.max_loops} loops · ${gate} · ${card.max_model_len} positions`;
}

function startSchedule(facts, card) {
  const state = by("schedule-state");
  if (!facts.stage_trace) {
    state.textContent = NO_TRACE;
    return;
  }
  let last = "";
  whileShown("schedule", SCHEDULE_MS, async () => {
    const host = by("stages");
    if (by("hold").checked || host.contains(document.activeElement)) return; // whoever walks through it keeps it
    try {
      const text = await (await request("stage_trace")).text();
      state.textContent = "";
      if (text === last) return;
      last = text;
      drawSchedule(host, JSON.parse(text).stages, card.max_loops);
    } catch (error) {
      state.textContent = `No schedule: ${error.message}`;
    }
  });
}

async function start() {
  showView();
  window.addEventListener("hashchange", showView);
  try {
    const facts = await serverFacts();
    whileShown("live", 1000, startLive(by("cards"), by("live-state")));
    const [card] = (await (await request("v1/models")).json()).data;
    by("model").textContent = describe(card);
    startPlayground(facts, card);
    startSchedule(facts, card);
  } catch (error) {
    by("model").textContent = error.message;
  }
}

start();
