// Members: the table of an ensemble, one row a member, and the control that adds more.

import { make, put } from "./elements.js";
import { parameterWords } from "./groups.js";
import { formatNumber, formatSecondsLike } from "./format.js";

/** @typedef {import("./types").Member} Member */

// Around one column a parameter, whose keys begin with "=".
/** @type {[string, string | null][]} */
const BEFORE = [["member", "number"]];
/** @type {[string, string | null][]} */
const AFTER = [["state", "state"], ["rank", "rank"], ["metric", "metric"], ["time", "seconds"], ["", null]];
const PAGE_ROWS = 100;
/** @type {Record<string, string>} */
const MEMBER_MARKS = { waiting: "·", running: "▶", finished: "✓", failed: "✗", stopped: "■", "stopped early": "▽" };

/**
 * @typedef {object} Row
 * @property {HTMLTableCellElement[]} cells
 * @property {HTMLButtonElement} choose
 * @property {HTMLButtonElement} stop
 * @property {HTMLElement} element
 */

export class MembersPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    /** @type {[string, string | null][]} */
    this.columns = [];
    /** @type {Set<string | null>} */
    this.words = new Set();
    /** @type {ReturnType<MembersPanel["head"]>[]} */
    this.heads = [];
    this.names = this.order = "";
    this.longest = 0;
    /** @type {Map<number, Row>} */
    this.rows = new Map();
    // Until somebody chooses: as they came, and when all have ended the best first.
    const { sorted = null, down = false } = data.settings;
    this.chosen = sorted;
    this.chosenDown = down;
    this.page = 0;
    this.back = make("button", { type: "button", className: "ar-button", "aria-label": "previous members" }, "‹");
    this.next = make("button", { type: "button", className: "ar-button", "aria-label": "next members" }, "›");
    this.where = make("span", { className: "ar-said", role: "status" });
    this.pages = make("div", { className: "ar-bar" }, this.back, this.where, this.next);
    this.back.addEventListener("click", () => this.turn(-1));
    this.next.addEventListener("click", () => this.turn(1));
    this.field = make("input", { type: "text", placeholder: "lr=0.03 seed=0:4", "aria-label": "values of members to add" });
    const add = make("button", { type: "button", className: "ar-button", title: "add members with these values" }, "Add");
    this.answer = make("span", { className: "ar-answer", role: "status" });
    const ask = () => {
      if (!this.field.value.trim()) return;
      data.answer = "";
      data.send({ kind: "add", what: this.field.value });
    };
    add.addEventListener("click", ask);
    this.field.addEventListener("keydown", (event) => { if (event.key === "Enter") ask(); });
    this.body = make("tbody", {});
    this.headRow = make("tr", {});
    this.star = make("p", { className: "ar-star" });
    const table = make("table", { className: "ar-members" }, make("thead", {}, this.headRow), this.body);
    this.more = make("div", { className: "ar-bar" }, make("label", {}, "add ", this.field), add, this.answer);
    this.element = make("div", {}, this.star, this.more,
      make("div", { className: "ar-scroll ar-high", tabIndex: 0, role: "region", "aria-label": "table of members" }, table), this.pages);
  }

  /** @param {number} pages */
  turn(pages) {
    this.page += pages;
    this.draw();
  }

  get filled() { return this.data.members.size > 0; }

  get sorted() { return this.chosen ?? (this.data.ended ? "metric" : "number"); }

  get down() { return this.chosen === null ? this.data.ended && !this.data.ensemble.lower : this.chosenDown; }

  // The columns follow the parameters, which may be others after members were added.
  /** @param {Map<number, Member>} members */
  arrange(members) {
    const rows = [...members.values()], names = [...new Set(rows.flatMap((row) => Object.keys(row.parameters)))];
    const said = names.join();
    if (said === this.names && this.columns.length) return;
    this.names = said;
    this.columns = [...BEFORE, ...names.map((name) => /** @type {[string, string]} */ ([name, `=${name}`])), ...AFTER];
    this.words = new Set(["state", ...names.filter((name) =>
      rows.some((row) => typeof row.parameters[name] === "string")).map((name) => `=${name}`)]);
    this.heads = this.columns.map(([name, key]) => this.head(name, key));
    this.headRow.replaceChildren(...this.heads.map(({ cell }) => cell));
    this.rows.clear();
    this.order = "";
  }

  /** @param {Member} row @param {string} key */
  value(row, key) { return (key.startsWith("=") ? row.parameters[key.slice(1)] : row[/** @type {keyof Member} */ (key)]) ?? null; }

  /** @param {string} name @param {string | null} key */
  head(name, key) {
    // What stands over the buttons is no heading.
    const cell = key ? make("th", { scope: "col", className: this.words.has(key) ? "ar-left" : "" }) : make("td");
    const button = make("button", { type: "button", className: "ar-sort", hidden: !key }, name);
    button.addEventListener("click", () => {
      if (!key) return;
      const down = this.chosen === key && !this.chosenDown;
      this.page = 0;
      this.chosen = key;
      this.chosenDown = down;
      this.data.set({ sorted: key, down });
      this.draw();
    });
    cell.append(button);
    return { cell, button, key };
  }

  draw() {
    const { members, ensemble } = this.data;
    this.arrange(members);
    // An ensemble that has ended takes no more members; their line stays, so that nothing moves.
    this.more.style.visibility = this.data.ended ? "hidden" : "";
    put(this.answer, this.data.answer ?? "");
    for (const { cell, button, key } of this.heads) {
      if (key === "metric") put(button, ensemble.metric || "metric");
      if (key === this.sorted) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    const best = this.best();
    put(this.star, best === null ? "" : this.heading(best));
    this.longest = [...members.values()].reduce((most, row) => Math.max(most, row.seconds ?? 0), 0);
    const sorted = [...members.values()].sort((a, b) => this.compare(a, b));
    const last = Math.max(0, Math.ceil(sorted.length / PAGE_ROWS) - 1);
    this.page = Math.min(Math.max(0, this.page), last);
    const first = this.page * PAGE_ROWS, shown = sorted.slice(first, first + PAGE_ROWS);
    this.pages.hidden = last === 0 && !ensemble.missing;
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page === last;
    const kept = sorted.length.toLocaleString("en"), all = (sorted.length + (ensemble.missing ?? 0)).toLocaleString("en");
    put(this.where, `rows ${first + 1}–${first + shown.length} of ${kept}${ensemble.missing ? `, the best of ${all} members` : ""}`);
    const elements = shown.map((row) => {
      let parts = this.rows.get(row.number);
      if (!parts) this.rows.set(row.number, parts = this.parts(row.number));
      this.fill(parts, row, row.number === best);
      return parts.element;
    });
    const said = shown.map((row) => row.number).join();
    if (said !== this.order) {
      this.order = said;
      this.body.replaceChildren(...elements);
    }
  }

  // The best of those that have finished.
  /** @param {number} number */
  heading(number) {
    const { members, ensemble } = this.data, { metric = null, parameters = {} } = members.get(number) ?? {};
    const at = Object.entries(parameters).map(([name, value]) => `${name}=${parameterWords(value)}`).join(", ");
    return `★ best: ${ensemble.metric} ${formatNumber(metric ?? NaN)}${at ? ` at ${at}` : ""} (member ${number})${ensemble.order ? `, ${ensemble.order}` : ""}`;
  }

  best() {
    /** @type {[number, number] | null} */
    let best = null;
    for (const { number, state, metric } of this.data.members.values()) {
      if (state !== "finished" || metric === null || !Number.isFinite(metric)) continue;
      if (best === null || (this.data.ensemble.lower ? metric < best[1] : metric > best[1])) best = [number, metric];
    }
    return best && best[0];
  }

  /** @param {Member} a @param {Member} b */
  compare(a, b) {
    const x = this.value(a, this.sorted), y = this.value(b, this.sorted), way = this.down ? -1 : 1;
    if (x === y) return a.number - b.number;
    // What has no value stands last, whichever way.
    if (x === null || y === null) return x === null ? 1 : -1;
    const below = typeof x === typeof y ? x < y : String(x) < String(y);
    return (below ? -1 : 1) * way;
  }

  /** @param {number} number */
  parts(number) {
    const cells = this.columns.slice(0, -1).map(([, key]) =>
      make("td", { "data-column": (key ?? "").replace("=", ""), className: this.words.has(key) ? "ar-left" : "" }));
    const choose = make("button", { type: "button", className: "ar-choose", title: "show its curve" }, String(number));
    choose.addEventListener("click", () => this.data.select(number));
    cells[0].append(choose);
    const stop = make("button", { type: "button", className: "ar-small", "aria-label": `stop member ${number}` }, "stop");
    stop.addEventListener("click", () => {
      stop.classList.add("ar-pressed");
      this.data.send({ kind: "stop", what: number });
    });
    return { cells, choose, stop, element: make("tr", {}, ...cells, make("td", {}, stop)) };
  }

  /** @param {Row} parts @param {Member} row @param {boolean} best */
  fill({ cells, choose, stop, element }, row, best) {
    const { state, error, metric } = row;
    const since = state === "running" ? (Date.now() - row.at) / 1000 : 0;
    element.dataset.state = state;
    element.classList.toggle("ar-best", best);
    choose.setAttribute("aria-pressed", String(this.data.selected === row.number));
    const [how, where, what, took] = cells.slice(-4);
    this.columns.slice(1, -AFTER.length).forEach(([name], index) => {
      const value = row.parameters[name] ?? "";
      put(cells[1 + index], typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value));
    });
    put(how, `${MEMBER_MARKS[state] ?? ""} ${state}${error ? `: ${error}` : ""}`);
    how.title = error;
    put(where, row.rank === null ? "" : String(row.rank));
    put(what, metric === null ? "" : `${formatNumber(metric)}${best ? " ★" : ""}`);
    put(took, row.seconds === null ? "" : formatSecondsLike(row.seconds + since, Math.max(this.longest, row.seconds + since)));
    stop.hidden = this.data.ended || (state !== "running" && state !== "waiting");
  }
}
