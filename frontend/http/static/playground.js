// The playground: a prompt, one or two settings, and what comes back, token by token in the colour of its depth.

import { events, request } from "./api.js";
import { Answer } from "./answer.js";
import { depthLegend } from "./schedule.js";

const ALTERNATIVES = 5;
const NAMES = ["A", "B"];
const by = (id) => document.getElementById(id);
const round = (value, digits) => String(Number(value.toFixed(digits)));

/** One column: its settings, and the answer to them. */
class Column {
  constructor(name, facts, card, tip) {
    this.name = name;
    this.card = card;
    this.root = by("column").content.cloneNode(true).firstElementChild;
    this.root.setAttribute("aria-label", `Setting ${name}`);
    this.root.dataset.column = name;
    this.controls = {};
    for (const control of this.root.querySelectorAll("[data-name]")) this.controls[control.dataset.name] = control;
    this.output = this.root.querySelector(".output");
    this.output.setAttribute("aria-label", `Answer ${name}`);
    this.errorLine = this.root.querySelector(".error");
    this.answer = new Answer(this.output, card.max_loops, tip);
    this.turns = []; // answers of the conversation, as text
    this._setUp(facts, card);
  }

  _setUp(facts, card) {
    const { gate, drafts } = this.controls;
    const server = new Option(`server's (${card.gate})`, "");
    const others = card.gates.filter((name) => name !== "replay").map((name) => new Option(name, name));
    gate.replaceChildren(server, ...others);
    drafts.parentElement.hidden = card.draft_lanes === 0;
    for (const control of Object.values(this.controls)) control.addEventListener("input", () => this.refresh());
    gate.addEventListener("change", () => this._useGate());
    this._useGate();
  }

  get gate() {
    return this.controls.gate.value || this.card.gate;
  }

  get takesThreshold() {
    return !["none", "fixed"].includes(this.gate);
  }

  /** A threshold is a distance of states with convergence, hence on a scale of powers of ten, and a probability elsewhere. */
  _useGate() {
    const { threshold, loops } = this.controls;
    const { card } = this;
    this.logarithmic = this.gate === "convergence";
    const range = this.logarithmic ? [-5, 0, 0.05] : [0, Math.max(1, card.exit_threshold), 0.01];
    [threshold.min, threshold.max, threshold.step] = range.map(String);
    const given = this.logarithmic ? Math.log10(Math.max(card.exit_threshold, 1e-5)) : card.exit_threshold;
    threshold.value = String(given);
    this.untouched = threshold.value;
    threshold.disabled = !this.takesThreshold;
    loops.min = String(this.takesThreshold ? card.min_loops : 1);
    loops.max = String(card.max_loops);
    loops.value = loops.max;
    this.refresh();
  }

  get threshold() {
    const value = Number(this.controls.threshold.value);
    return this.logarithmic ? Number((10 ** value).toPrecision(2)) : value;
  }

  refresh() {
    const says = {
      threshold: this.takesThreshold ? round(this.threshold, 5) : "no effect",
      loops: this.gate === "fixed" ? `exactly ${this.controls.loops.value}` : `at most ${this.controls.loops.value}`,
      temperature: this.controls.temperature.value === "0" ? "0, greedy" : this.controls.temperature.value,
    };
    for (const [name, text] of Object.entries(says)) {
      this.controls[name].parentElement.querySelector("output").textContent = text;
      this.controls[name].setAttribute("aria-valuetext", text);
    }
  }

  /** The fields of a request that are this column's. */
  fields() {
    const { controls, card } = this;
    const fields = { temperature: Number(controls.temperature.value) };
    const loops = Number(controls.loops.value);
    if (controls.gate.value) fields.gate = controls.gate.value;
    if (this.gate === "fixed") fields.num_loops = loops;
    else if (loops < card.max_loops) fields.max_loops = loops;
    if (this.takesThreshold && controls.threshold.value !== this.untouched) fields.exit_threshold = this.threshold;
    if (card.draft_lanes && !controls.drafts.checked) fields.speculation = false;
    return fields;
  }

  /** Asks and shows what comes; the error, if any, stands in the column. */
  async ask(path, body, signal, onNews) {
    this.answer.clear();
    this.errorLine.hidden = true;
    this.root.setAttribute("aria-busy", "true");
    this.answer.started_s = performance.now() / 1000;
    try {
      const answer = await request(path, { body: { ...body, ...this.fields() }, signal });
      for await (const event of events(answer)) {
        const now_s = performance.now() / 1000;
        for (const choice of event.choices) this.answer.add(choice, now_s);
        if (event.usage) this.answer.usage = event.usage;
        this._showFigures();
        onNews();
      }
    } catch (error) {
      if (error.name === "AbortError") this.answer.reason = "stopped";
      else this._fail(error.message);
    } finally {
      this.root.removeAttribute("aria-busy");
      this.answer.end();
      this._showFigures();
      onNews();
    }
  }

  _fail(message) {
    this.errorLine.hidden = false;
    this.errorLine.textContent = message;
  }

  _showFigures() {
    this.root.querySelector(".figures").replaceChildren(
      ...this.answer.figures().map(([name, value]) => {
        const entry = document.createElement("div");
        const term = document.createElement("dt");
        const data = document.createElement("dd");
        term.textContent = name;
        data.textContent = value;
        entry.append(term, data);
        return entry;
      }),
    );
    this.answer.drawDepths(this.root.querySelector(".depths"));
  }
}

/** Where two answers part: the first place at which their tokens differ; null while neither says another thing. */
export function parting(a, b, finished) {
  const shorter = Math.min(a.length, b.length);
  for (let i = 0; i < shorter; i++) if (a[i].id !== b[i].id) return i;
  return finished && a.length !== b.length ? shorter : null;
}

function showDifference(columns, finished) {
  const line = by("difference");
  const [a, b] = columns.map((column) => column.answer.tokens);
  for (const token of [...a, ...b]) token.node.classList.remove("parts");
  if (!a.length || !b.length) {
    line.textContent = "";
    return;
  }
  const at = parting(a, b, finished);
  if (at === null) {
    line.textContent = finished ? `The same ${a.length} tokens.` : "";
  } else {
    for (const tokens of [a, b]) tokens[at]?.node.classList.add("parts");
    const said = [a, b].map((tokens) => (tokens[at] ? `“${tokens[at].shown}”` : "the end"));
    line.textContent = `The texts part at token ${at + 1}: A says ${said[0]}, B ${said[1]}.`;
  }
  const loops = columns.map((column) => column.answer.usage?.loops);
  if (finished && loops[0] && loops[1]) {
    const change = Math.round(100 * (loops[1] / loops[0] - 1));
    line.textContent += ` B spent ${loops[1]} loops, A ${loops[0]}${change ? ` (${change > 0 ? "+" : "−"}${Math.abs(change)} %)` : ""}.`;
  }
}

class Playground {
  constructor(facts, card) {
    this.facts = facts;
    this.card = card;
    this.columns = NAMES.map((name) => new Column(name, facts, card, by("tip")));
    this.questions = []; // of the conversation
    this.stop = null;
    by("columns").replaceChildren(...this.columns.map((column) => column.root));
    depthLegend(by("legend"), card.max_loops);
    if (!facts.tokenizer) by("prompt-label").textContent = "Prompt, as token ids";
    by("mode").hidden = !facts.chat;
    this._listen();
    this.showColumns();
    by("run").disabled = false;
  }

  get compared() {
    return by("compare").checked;
  }

  get asked() {
    return this.compared ? this.columns : this.columns.slice(0, 1);
  }

  get chat() {
    return by("ask").elements.mode.value === "chat" && this.facts.chat;
  }

  _listen() {
    by("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    by("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        by("ask").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop?.abort();
    });
    by("stop").addEventListener("click", () => this.stop?.abort());
    by("compare").addEventListener("change", () => this.showColumns());
    by("numbers").addEventListener("change", () => by("columns").classList.toggle("numbered", by("numbers").checked));
    by("mode").addEventListener("change", () => this.showHistory());
    by("forget").addEventListener("click", () => {
      this.questions = [];
      for (const column of this.columns) column.turns = [];
      this.showHistory();
      by("prompt").focus();
    });
    this.columns.forEach((column) => column.root.addEventListener("input", () => this.clearDifference()));
  }

  clearDifference() {
    by("difference").textContent = "";
  }

  showColumns() {
    by("columns").classList.toggle("compared", this.compared);
    this.columns[1].root.hidden = !this.compared;
    this.clearDifference();
  }

  showHistory() {
    const shown = this.chat && this.questions.length > 0;
    by("history").hidden = !shown;
    by("forget").hidden = !shown;
    by("prompt-label").textContent = this.chat ? "Message" : this.facts.tokenizer ? "Prompt" : "Prompt, as token ids";
    const lines = [];
    this.questions.forEach((question, turn) => {
      lines.push(["user", question]);
      for (const column of this.asked) {
        if (column.turns[turn] !== undefined) lines.push([this.compared ? `assistant ${column.name}` : "assistant", column.turns[turn]]);
      }
    });
    by("history").replaceChildren(
      ...lines.map(([role, text]) => {
        const line = document.createElement("p");
        const who = document.createElement("b");
        who.textContent = role;
        line.append(who, " ", text);
        return line;
      }),
    );
  }

  /** The body that all columns share, but for the messages of a conversation. */
  body(column, text) {
    const shared = {
      model: this.card.id, max_tokens: Number(by("max-tokens").value), seed: Number(by("seed").value), stream: true,
      stream_options: { include_usage: true }, return_exit_depths: true, return_token_ids: true,
    };
    const alternatives = Math.min(ALTERNATIVES, this.card.max_logprobs);
    if (!this.chat) {
      const ids = this.facts.tokenizer ? text : text.split(/[\s,]+/).filter(Boolean).map(Number);
      return { ...shared, prompt: ids, ...(this.card.max_logprobs ? { logprobs: alternatives } : {}) };
    }
    const messages = this.questions.flatMap((question, turn) => [
      { role: "user", content: question },
      { role: "assistant", content: column.turns[turn] ?? this.columns[0].turns[turn] ?? "" },
    ]);
    messages.push({ role: "user", content: text });
    return { ...shared, messages, ...(this.card.max_logprobs ? { logprobs: true, top_logprobs: alternatives } : {}) };
  }

  async run() {
    if (this.stop) return;
    const text = by("prompt").value;
    if (!text.length) return;
    const { chat, asked } = this;
    this.stop = new AbortController();
    by("run").hidden = true;
    by("stop").hidden = false;
    this.clearDifference();
    const news = () => {
      if (asked.length === 2) showDifference(asked, false);
    };
    const path = chat ? "v1/chat/completions" : "v1/completions";
    const bodies = asked.map((column) => this.body(column, text));
    await Promise.all(asked.map((column, i) => column.ask(path, bodies[i], this.stop.signal, news)));
    if (asked.length === 2) showDifference(asked, true);
    by("said").textContent = asked.map((column) => `Answer ${column.name}: ${column.answer.text}`).join(". ");
    const hadFocus = document.activeElement === by("stop");
    by("stop").hidden = true;
    by("run").hidden = false;
    if (hadFocus) by("run").focus();
    this.stop = null;
    if (chat && asked[0].errorLine.hidden) {
      for (const column of asked) column.turns[this.questions.length] = column.answer.text;
      this.questions.push(text);
      by("prompt").value = "";
      this.showHistory();
    }
  }
}

export function startPlayground(facts, card) {
  return new Playground(facts, card);
}
