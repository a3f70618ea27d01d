// The player: play, step, scrub, and the choice of what the ranks run.

import { Circle, Stage, still } from "./circle.js";
import { Quiz } from "./quiz.js";
import { roundWords, savers } from "./saving.js";
import { make, put } from "../../widgets/front/elements.js";

const PAUSE_MS = 900;
const SPEEDS = [0.25, 0.5, 1, 2, 4];

export class Player {
  /** @param {import("../../widgets/front/types").Model} model */
  constructor(model) {
    this.model = model;
    this.at = 0;
    this.playing = false;
    this.said = "";
    /** @type {object} */
    this.turn = {};
    /** @type {Promise<boolean> | null} */
    this.flying = null;
    /** @type {HTMLElement | null} */
    this.focused = null;
    /** @type {import("./types").State} */
    this.state = model.get("state");
    this.title = make("b", {});
    this.cost = make("div", { className: "ar-cost" });
    this.algorithm = this.choice("algorithm", make("select", {}));
    this.ranks = this.choice("ranks", make("input", { type: "number", min: 1 }));
    this.size = this.choice("values", make("input", { type: "number", min: 1 }));
    this.problem = make("div", { className: "ar-problem", role: "alert" });
    this.stage = new Stage();
    this.circle = new Circle();
    this.speed = make("select", { "aria-label": "speed" },
      ...SPEEDS.map((speed) => make("option", { value: speed, selected: speed === 1 }, `${speed} ×`)));
    this.speed.addEventListener("change", () => { this.circle.speed = Number(this.speed.value); });
    this.quiz = new Quiz(this);
    this.toggle = this.button("", "", () => this.play(!this.playing));
    this.scrub = make("input", { type: "range", min: 0, step: 1, "aria-label": "round" });
    this.scrub.addEventListener("input", () => this.go(Number(this.scrub.value)));
    this.where = make("span", { className: "ar-said" });
    /** @param {string} kind @param {string} text */
    const key = (kind, text) => make("span", {}, make("i", { className: `ar-swatch ar-${kind}` }), text);
    const legend = make("div", { className: "ar-bar" }, key("added", "received value was added"),
      key("replaced", "received value replaced it"), key("share", "how many ranks a value is the sum of: full when complete"));
    this.words = make("p", { className: "ar-words", "aria-live": "polite" });
    const bar = make("div", { className: "ar-bar" },
      this.button("|◀", "to the start", () => this.go(0)),
      this.button("◀", "one round back", () => this.go(this.at - 1)),
      this.toggle,
      this.button("▶", "one round forward", () => this.step()),
      this.button("▶|", "to the end", () => this.go(this.last)),
      this.scrub, make("label", {}, "speed ", this.speed), this.quiz.toggle, ...savers(this), this.where);
    const views = make("div", { className: "ar-views" }, this.circle.element,
      make("div", { className: "ar-side" }, this.quiz.element, make("div", { className: "ar-wide" }, this.stage.element)));
    this.root = make("div", { className: "ar-dashboard ar-explainer", role: "group", tabIndex: 0,
      "aria-label": "allreduce, round by round: space plays, arrows step" },
      make("div", { className: "ar-head" }, this.title, this.algorithm.label, this.ranks.label, this.size.label,
        this.problem),
      this.cost, bar, views, legend, this.words);
    // JupyterLab's own keys must not act on the cell while somebody plays here.
    this.root.dataset.lmSuppressShortcuts = "true";
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focusin", (event) => { this.focused = /** @type {HTMLElement} */ (event.target); });
    this.root.addEventListener("focusout", (event) => { if (event.relatedTarget) this.focused = null; });
    new MutationObserver(() => { if (!this.playing) this.show(this.at); })
      .observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
    model.on("change:state", () => this.take());
    this.take();
  }

  get last() { return this.state.frames.length - 1; }

  /** @param {string} text @param {string} title @param {() => void} act */
  button(text, title, act) {
    const element = make("button", { type: "button", className: "ar-button", title, "aria-label": title }, text);
    element.addEventListener("click", act);
    return element;
  }

  /** @template {HTMLElement} T @param {string} name @param {T} control */
  choice(name, control) {
    control.addEventListener("change", () => this.ask());
    return { control, label: make("label", {}, `${name} `, control) };
  }

  ask() {
    this.play(false);
    const [ranks, size] = [this.ranks, this.size].map(({ control }) => control.valueAsNumber);
    const wrong = [this.ranks, this.size].map(({ control }) => this.refused(control)).filter(Boolean).join(" ");
    put(this.problem, wrong);
    if (wrong) { put(this.cost, this.state.cost); return; }
    put(this.cost, "Running on the ranks …");
    this.model.send({ kind: "run", algorithm: this.algorithm.control.value, ranks, size });
  }

  // Why a field's number is not asked of the ranks, beside it; empty where it is.
  /** @param {HTMLInputElement} control */
  refused(control) {
    const { min, max, valueAsNumber: found } = control, what = control === this.ranks.control ? "ranks" : "values";
    const fits = Number.isInteger(found) && found >= Number(min) && found <= Number(max);
    control.setAttribute("aria-invalid", String(!fits));
    if (fits) return "";
    return `Expected ${min} to ${max} ${what}, found ${Number.isFinite(found) ? found : "none"}.`;
  }

  // The kernel has run something, or has something to say.
  take() {
    this.state = this.model.get("state");
    const { frames, ...state } = this.state;
    const said = JSON.stringify(frames);
    put(this.title, state.title);
    put(this.cost, state.cost);
    put(this.problem, state.problem);
    const { algorithm, ranks, size } = this;
    if (!algorithm.control.length) {
      algorithm.control.append(...state.algorithms.map((name) => make("option", { value: name }, name)));
    }
    if (said !== this.said || state.problem === "") {
      algorithm.control.value = state.algorithm;
      Object.assign(ranks.control, { min: 2, max: state.mostRanks, value: frames[0].values.length });
      Object.assign(size.control, { max: state.mostValues, value: frames[0].values[0].length });
    }
    if (said === this.said) return;
    this.said = said;
    this.scrub.max = String(this.last);
    this.go(0);
  }

  /** @param {number} at */
  go(at) {
    this.play(false);
    this.show(Math.max(0, Math.min(this.last, at)));
  }

  /** @param {number} at */
  show(at) {
    this.at = at;
    this.stage.draw(this.state.frames[at], this.state.chunks);
    this.circle.show(this.state, at);
    this.tell();
    this.quiz.begin();
  }

  tell() {
    const frame = this.state.frames[this.at], text = roundWords(this.state, this.at);
    this.scrub.value = String(this.at);
    this.scrub.setAttribute("aria-valuetext", text);
    put(this.where, text);
    put(this.words, frame.words);
    put(this.toggle, this.playing ? "pause" : "play");
    this.toggle.title = this.playing ? "pause (space)" : "play (space)";
    this.toggle.setAttribute("aria-label", this.toggle.title);
    this.root.dataset.round = String(this.at);
    this.root.dataset.playing = String(this.playing);
  }

  // One round with what travels seen flying.
  async step() {
    this.play(false);
    if (await this.fly()) this.quiz.begin();
  }

  // True once what travels in the next round has arrived.
  async fly() {
    if (this.at >= this.last) return false;
    this.at += 1;
    this.tell();
    this.flying = this.circle.fly(this.state, this.at);
    if (!await this.flying) return false;
    this.flying = null;
    this.stage.draw(this.state.frames[this.at], this.state.chunks);
    return true;
  }

  /** @param {boolean} on */
  async play(on) {
    const turn = this.turn = {};
    if (!on) this.land();
    this.playing = on;
    if (!on) { this.tell(); return; }
    this.quiz.set(false);
    if (this.at >= this.last) this.show(0);
    this.tell();
    while (this.turn === turn && await this.fly()) {
      await new Promise((done) => setTimeout(done, (still() ? 2 * PAUSE_MS : PAUSE_MS) / this.circle.speed));
    }
    if (this.turn !== turn) return;
    this.playing = false;
    this.tell();
  }

  /** @param {any} event */
  key(event) {
    const { target } = event, typing = target.matches("select, input[type=number]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    /** @type {Record<string, (() => void) | null>} */
    const acts = {
      " ": target.matches("button") ? null : () => this.play(!this.playing),
      ArrowRight: () => this.step(),
      ArrowLeft: () => this.go(this.at - 1),
      Home: () => this.go(0),
      End: () => this.go(this.last),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // What was on its way has arrived.
  land() {
    if (!this.flying) return;
    this.flying = null;
    this.stage.draw(this.state.frames[this.at], this.state.chunks);
    this.circle.show(this.state, this.at);
  }
}

// The widget. What the notebook keeps is the still picture alone, so that it is there without a
// kernel; a player takes its place on every page that listens to the kernel.

class Places {
  /** @param {import("../../widgets/front/types").Model} model */
  constructor(model) {
    this.model = model;
    /** @type {Player[]} */
    this.players = [];
    this.waiting = 0;
    this.look = () => {
      cancelAnimationFrame(this.waiting);
      this.waiting = requestAnimationFrame(() => this.fill());
    };
    this.observer = new MutationObserver(this.look);
    this.observer.observe(document.body, { childList: true, subtree: true });
    model.on("change:state", this.look);
    this.fill();
  }

  fill() {
    for (const place of document.getElementsByClassName(this.model.get("state").place)) {
      if (place.querySelector(".ar-explainer")) continue;
      // A picture that has been replaced by a newer one leaves its player to it.
      let player = this.players.find(({ root }) => !root.isConnected);
      if (!player) this.players.push(player = new Player(this.model));
      place.replaceChildren(player.root);
      if (player.focused && document.activeElement === document.body) player.focused.focus();
    }
  }

  close() { this.observer.disconnect(); }
}

export default () => ({
  /** @param {any} options */
  initialize({ model }) {
    const places = new Places(model);
    return () => places.close();
  },
});
