// One answer as it streams in: which text is whose token, how deep each went, and what is shown of a token at the pointer.

import { depthColour } from "./schedule.js";

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const logarithm = (value, digits) => value.toFixed(digits).replace(/^-(?=0\.0*$)/, "").replace("-", "−");

/** A token's text so that it can be seen: quotes are the caller's. */
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "→").replace(/[\u0000-\u001f\u007f]/g, "·");
}

export class Answer {
  /** host: where the tokens go; tip: the element that tells of one of them. */
  constructor(host, maxLoops, tip) {
    this.host = host;
    this.maxLoops = maxLoops;
    this.tip = tip;
    this.started_s = 0;
    this._tokenOf = new WeakMap();
    this.clear();
    this._listen();
  }

  clear() {
    this.tokens = [];
    this.chars = []; // of the whole text; offsets count characters, not halves of them
    this.usage = null;
    this.reason = null;
    this.first_s = null;
    this.last_s = null;
    this._firstCount = 0;
    this._settled = 0;
    this._decoder = new TextDecoder();
    this._cursor = 0; // of a chat's text: characters that have their token
    this.host.replaceChildren();
    this._hide();
  }

  get text() {
    return this.chars.join("");
  }

  /** Takes the news of one event. */
  add(choice, now_s) {
    const before = this.chars.length;
    this.chars.push(...(choice.text ?? choice.delta?.content ?? ""));
    const depths = choice.exit_depths ?? [];
    if (depths.length) {
      if (this.first_s === null) {
        this.first_s = now_s;
        this._firstCount = depths.length;
      }
      this.last_s = now_s;
    }
    depths.forEach((depth, i) => this._append({ id: choice.token_ids[i], depth, ...this._scores(choice, i, before) }));
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this._settle();
  }

  end() {
    this._settle();
    for (const token of this.tokens) token.node.classList.toggle("blank", !token.text);
    const last = this.tokens.at(-1);
    if (last && !last.text && this.reason === "stop") last.node.textContent = "end";
    this._describeAll();
  }

  /** Name, logprob, alternatives and where the text starts, in the shape of either route. */
  _scores(choice, i, before) {
    const scores = choice.logprobs;
    if (!scores) return { name: `token ${choice.token_ids[i]}`, start: i ? this.chars.length : before };
    if (scores.tokens) {
      const top = Object.entries(scores.top_logprobs[i] ?? {});
      return { name: scores.tokens[i], logprob: scores.token_logprobs[i], top, start: scores.text_offset[i] };
    }
    const entry = scores.content[i];
    const top = entry.top_logprobs.map((other) => [other.token, other.logprob]);
    return { name: entry.token, logprob: entry.logprob, top, start: this._place(entry) };
  }

  /** Where a chat's token starts. What is not in the text (a special token) takes no room there. */
  _place(entry) {
    const start = this._cursor;
    const said = entry.bytes ? [...this._decoder.decode(new Uint8Array(entry.bytes), { stream: true })] : [];
    if (said.every((char, i) => this.chars[start + i] === char)) this._cursor += said.length;
    return start;
  }

  _append(token) {
    const node = element("span", "tok");
    const { fill, ink } = depthColour(token.depth, this.maxLoops);
    node.style.setProperty("background-color", fill);
    node.style.setProperty("color", ink);
    node.dataset.depth = String(token.depth);
    node.tabIndex = this.tokens.length ? -1 : 0;
    if (!this.tokens.length) node.classList.add("prefill");
    this.host.append(node);
    this._tokenOf.set(node, token);
    this.tokens.push({ ...token, node, text: "", shown: "" });
    this._tokenOf.set(node, this.tokens.at(-1));
  }

  /** Gives each token its text as far as it is there; the last one's may still grow. */
  _settle() {
    for (let i = this._settled; i < this.tokens.length; i++) {
      const token = this.tokens[i];
      const end = i + 1 < this.tokens.length ? this.tokens[i + 1].start : this.chars.length;
      const text = this.chars.slice(token.start, end).join("");
      if (text !== token.text || !token.shown) {
        token.text = text;
        token.shown = text ? visible(text) : token.name;
        token.node.textContent = text.replaceAll("\n", "↵\n");
      }
    }
    this._settled = Math.max(0, this.tokens.length - 1);
  }

  _describeAll() {
    this.tokens.forEach((token, i) => {
      token.node.setAttribute("aria-label", `${token.shown}, ${token.depth} ${token.depth === 1 ? "loop" : "loops"}`);
      token.node.setAttribute("role", "img");
      token.place = i + 1;
    });
  }

  /** Name and value of what the answer cost, as far as it is known. */
  figures() {
    const { tokens, usage } = this;
    if (!tokens.length) return [];
    const later = tokens.length - this._firstCount;
    const rate = later > 0 && this.last_s > this.first_s ? later / (this.last_s - this.first_s) : null;
    const loops = tokens.reduce((sum, token) => sum + token.depth, 0);
    const decoded = tokens.length - 1;
    const mean = usage ? usage.mean_exit_depth : decoded ? (loops - tokens[0].depth) / decoded : null;
    const out = [
      ["tokens", number(tokens.length)],
      ["tokens/s", rate === null ? "–" : number(rate, 1)],
      ["first token", `${number(1000 * (this.first_s - this.started_s))} ms`],
      ["loops spent", number(usage?.loops ?? loops)],
      ["mean depth", mean === null ? "–" : mean.toFixed(2)],
    ];
    const drafts = usage?.completion_tokens_details;
    if (drafts && drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens > 0) {
      out.push(["drafts accepted", number(drafts.accepted_prediction_tokens)]);
      out.push(["drafts dropped", number(drafts.rejected_prediction_tokens)]);
    }
    if (this.reason) out.push(["ended by", this.reason]);
    return out;
  }

  /** A strip of the depths: how many tokens left after each loop. */
  drawDepths(host) {
    const counts = new Map();
    for (const { depth } of this.tokens) counts.set(depth, (counts.get(depth) ?? 0) + 1);
    host.replaceChildren(
      ...[...counts].sort((a, b) => a[0] - b[0]).map(([depth, count]) => {
        const part = element("span", "", count / this.tokens.length > 0.06 ? `${count}` : "");
        const { fill, ink } = depthColour(depth, this.maxLoops);
        part.style.setProperty("background-color", fill);
        part.style.setProperty("color", ink);
        part.style.setProperty("flex-grow", String(count));
        return part;
      }),
    );
  }

  // --- the token at the pointer or with the focus

  _listen() {
    const { host } = this;
    host.addEventListener("pointerover", (event) => this._show(event.target));
    host.addEventListener("pointerleave", () => this._hide());
    host.addEventListener("focusin", (event) => this._show(event.target));
    host.addEventListener("focusout", () => this._hide());
    host.addEventListener("keydown", (event) => this._walk(event));
    window.addEventListener("scroll", () => this._hide(), { passive: true });
  }

  _walk(event) {
    const at = this.tokens.findIndex((token) => token.node === document.activeElement);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (event.key === "Escape") this._hide();
    if (at < 0 || next === undefined || !this.tokens[next]) return;
    event.preventDefault();
    this.tokens[at].node.tabIndex = -1;
    this.tokens[next].node.tabIndex = 0;
    this.tokens[next].node.focus({ preventScroll: false });
  }

  _show(node) {
    const token = this._tokenOf.get(node);
    if (!token) {
      this._hide();
      return;
    }
    const { tip } = this;
    tip.replaceChildren(...this._told(token));
    tip.hidden = false;
    node.setAttribute("aria-describedby", "tip");
    const at = node.getClientRects()[0] ?? node.getBoundingClientRect();
    const left = Math.min(at.left, window.innerWidth - tip.offsetWidth - 8);
    const under = at.bottom + 6 + tip.offsetHeight < window.innerHeight;
    tip.style.setProperty("left", `${Math.max(8, left)}px`);
    tip.style.setProperty("top", `${Math.max(8, under ? at.bottom + 6 : at.top - tip.offsetHeight - 6)}px`);
  }

  _hide() {
    this.tip.hidden = true;
  }

  _told(token) {
    const first = this.tokens[0] === token;
    const loops = `${token.depth} of ${this.maxLoops} loops`;
    const parts = [
      element("p", "tip-text", token.shown),
      element("p", "tip-depth", first ? `${loops}, from prefill` : loops),
    ];
    if (token.logprob !== undefined && token.logprob !== null) {
      const share = 100 * Math.exp(token.logprob);
      parts.push(element("p", "", `logprob ${logarithm(token.logprob, 3)} · ${share.toFixed(1)} %`));
    }
    if (token.top?.length) {
      const list = element("ol", "tip-top");
      for (const [name, logprob] of [...token.top].sort((a, b) => b[1] - a[1])) {
        const line = element("li", name === token.name ? "chosen" : "");
        const share = Math.exp(logprob);
        const bar = element("span", "filled");
        bar.style.setProperty("width", `${(100 * share).toFixed(1)}%`);
        const track = element("span", "track");
        track.append(bar);
        line.append(element("span", "tip-name", visible(name)), track, element("span", "", logarithm(logprob, 2)));
        list.append(line);
      }
      parts.push(list);
    }
    return parts;
  }
}
