// Controls: interrupt, and where each rank is now, while the cell runs; save, also after it.

import { curvesAsCsv, download } from "./csv.js";
import { make, part, put } from "./elements.js";
import { formatRanks, formatSeconds } from "./format.js";

export class Controls {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    this.asked = false;
    this.said = this.drawn = "";
    this.fold = make("button", { type: "button", className: "ar-fold", "aria-label": "tiles of the ranks" });
    this.fold.addEventListener("click", () => {
      data.set({ tiles: !data.tilesShown });
      data.changed();
    });
    this.status = make("span", { className: "ar-status", role: "status" });
    this.interrupt = this.button("Interrupt", "interrupt the cell; a second click kills the ranks that are still in it", () => this.press());
    this.where = this.button("Where are they?", "show the line and the stack of every rank", () => {
      this.asked = true;
      data.send({ kind: "where" });
    });
    this.added = data.buttons.map(({ text, title }) => this.button(text, title, () => data.send({ kind: "press", what: text })));
    this.noted = make("p", { className: "ar-note ar-noted", role: "status" });
    this.save = this.button("Save values (CSV)", "download the curves as a file", () => download("curves.csv", curvesAsCsv(data)));
    this.stacks = make("div", { className: "ar-where", hidden: true, role: "group", "aria-label": "where each rank is now" });
    this.stop = this.button("Stop all", "stop running and waiting members; finished ones stay", () => {
      this.stop.classList.add("ar-pressed");
      data.send({ kind: "stop", what: null });
    });
    this.bar = make("div", { className: "ar-track ar-progress", role: "progressbar", "aria-label": "members that have ended",
      "aria-valuemin": 0 });
    this.element = make("div", {},
      make("div", { className: "ar-head" }, this.fold, this.status, this.stop, this.interrupt, this.where, ...this.added, this.save),
      this.bar, this.noted, this.stacks);
  }

  /** @param {string} text @param {string} title @param {() => void} act */
  button(text, title, act) {
    const element = make("button", { type: "button", className: "ar-button", title }, text);
    element.addEventListener("click", act);
    return element;
  }

  // The server interrupts the kernel, however busy it is; elsewhere the kernel does it itself.
  press() {
    const kernel = this.data.model?.widget_manager?.kernel;
    if (kernel?.interrupt) kernel.interrupt();
    else this.data.send({ kind: "interrupt" });
    this.interrupt.classList.add("ar-pressed");
  }

  draw() {
    const { ended } = this.data;
    this.bar.hidden = !this.data.members.size;
    this.stop.hidden = this.bar.hidden || ended;
    this.interrupt.hidden = this.where.hidden = ended || Boolean(this.data.watched);
    for (const button of this.added) button.hidden = ended;
    put(this.noted, this.data.noted);
    this.noted.hidden = !this.data.noted;
    this.save.hidden = !this.data.series.size;
    if (!this.bar.hidden) this.drawBar([...this.data.members.values()].map(({ state }) => state));
    const elapsed = Math.max(0, Math.floor((Date.now() - this.data.began) / 1000));
    const who = this.data.members.size ? this.data.ensemble.said ?? ""
      : `${formatRanks([...this.data.ranks.keys()])}: ${this.data.said}`;
    this.fold.setAttribute("aria-expanded", String(this.data.tilesShown));
    const took = ended ? formatSeconds(this.data.elapsed) : formatSeconds(elapsed || 0).replace("0 µs", "0 s");
    const { title, finished, members } = this.data;
    if (finished && !title && !members.size) put(this.status, `${countRanks([...this.data.ranks.keys()])} ✓ ${took}`);
    else put(this.status, title || (members.size && !ended ? `${who} · ${took} so far` : `${who}, ${took}`));
    this.status.title = this.status.textContent;
    if (this.asked && this.data.where.size) this.drawStacks();
  }

  /** @param {string[]} states */
  drawBar(states) {
    const failed = states.filter((state) => state === "failed").length;
    const ended = states.filter((state) => state !== "waiting" && state !== "running").length;
    const said = `${ended} of ${states.length} ended${failed ? `, ${failed} failed` : ""}`;
    if (said === this.said) return;
    this.said = said;
    this.bar.title = said;
    this.bar.setAttribute("aria-valuemax", String(states.length));
    this.bar.setAttribute("aria-valuenow", String(ended));
    this.bar.setAttribute("aria-valuetext", said);
    this.bar.replaceChildren(part("done", (ended - failed) / states.length), part("lost", failed / states.length));
  }

  drawStacks() {
    const rows = [...this.data.where].sort((a, b) => a[0] - b[0]);
    const said = JSON.stringify(rows);
    if (said === this.drawn) return;
    this.drawn = said;
    this.stacks.hidden = false;
    this.stacks.replaceChildren(...rows.map(([rank, { line, activity, text }]) =>
      make("details", {},
        make("summary", {}, make("b", {}, `rank ${rank} `), `${line ?? ""} ${activity ? `(${activity})` : ""}`),
        make("pre", {}, text ?? "…"))),
      this.button("Close", "close", () => { this.stacks.hidden = true; this.asked = false; this.data.where.clear(); }));
  }
}

// All ranks by their number, others by their names.
/** @param {number[]} ranks */
const countRanks = (ranks) => (ranks.every((rank, at) => rank === at) ? `${ranks.length} rank${ranks.length === 1 ? "" : "s"}` : formatRanks(ranks));
