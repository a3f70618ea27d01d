// What the kernel has told so far, kept apart from what draws it: a view may come and go.

import { choose, watch } from "./chosen.js";
import { formatSeconds } from "./format.js";
import { Lines } from "./lines.js";
import { takeStrips } from "./rank_time.js";

/** @typedef {import("./types").Member} Member */
/** @typedef {import("./types").Series} Series */

// What JupyterLab calls a kernel that runs no cell any more.
const ENDS = new Set(["restarting", "autorestarting", "terminating", "dead"]);

export class Data {
  /** @type {Map<number, Member>} */
  members = new Map();
  /** @type {import("./types").Ensemble} */
  ensemble = {};
  /** @type {Map<number, import("./types").Tile>} */
  ranks = new Map();
  /** @type {Map<number, Series>} */
  series = new Map();
  /** @type {import("./types").Timings | null} */
  timings = null;
  /** @type {Map<number, import("./rank_time.js").RankTime>} */
  strips = new Map();
  /** @type {Map<string, string>} */
  sections = new Map();
  /** @type {Map<number, import("./types").Where>} */
  where = new Map();
  /** @type {Set<() => void>} */
  views = new Set();
  /** @type {string[]} */
  apart = [];
  stripsAt = 0;
  memory = "";
  seq = 0;
  key = "";
  mode = "";
  noun = "rank";
  title = "";
  said = "";
  elapsed = 0;
  began = 0;
  missed = false;
  ended = false;
  watched = false;
  withLogs = false;
  straggled = false;
  leaveKernel = () => {};
  /** @type {{ text: string, title: string }[]} */
  buttons = [];
  noted = "";
  answer = "";

  // `model` is the widget's, or null where there is no kernel to listen to.
  /** @param {import("./types").State} state @param {import("./types").Model | null} [model] */
  constructor({ points, ...state }, model = null) {
    this.model = model;
    // Below a panel that has come because of much text, that text stands too.
    this.settings = { closed: state.mode === "full" ? ["Timeline"] : ["Timeline", "Logs"], ...state.settings };
    this.lines = new Lines();
    this.greeted = 0;
    this.start(state, points);
    if (!model) return;
    watch(model);
    model.on("msg:custom", (message, buffers) => this.take(message, buffers));
    const changed = model.widget_manager?.kernel?.statusChanged;
    /** @param {unknown} _ @param {string} status */
    const look = (_, status) => { if (ENDS.has(status)) this.lose(); };
    changed?.connect(look);
    // The kernel outlives the cell: it would keep all its curves and logs in memory.
    this.leaveKernel = () => changed?.disconnect(look);
    this.greet();
  }

  // Listening begins here: the kernel sends all that there is, the logs from their beginning.
  greet() {
    this.greeted = Date.now();
    this.send({ kind: "ready" });
  }

  // Says something to the kernel, which listens until the cell ends.
  /** @param {object} message */
  send(message) { this.model?.send(message); }

  // What a reader chooses outlives the cell: the kernel keeps it with the picture.
  /** @param {import("./types").Settings} settings */
  set(settings) {
    Object.assign(this.settings, settings);
    if (this.ended) choose(this.key, this.settings);
    this.send({ kind: "settings", settings: this.settings });
  }

  get selected() { return this.settings.selected ?? null; }

  /** @param {import("./types").State} state @param {DataView | null | undefined} points */
  start(state, points) {
    this.seq = state.seq;
    this.key = state.key;
    this.missed = false;
    this.mode = state.mode;
    this.watched = Boolean(state.watched);  // the ranks are another notebook's
    this.noun = state.noun ?? "rank";
    this.title = state.title;
    this.members = new Map();
    this.ensemble = {};
    this.ranks = new Map();
    this.series = new Map();
    this.timings = null;
    this.straggled = false;
    this.strips = new Map();
    this.stripsAt = 0;
    this.memory = "";
    this.sections = new Map();
    this.merge(state, points);
  }

  /** @param {import("./types").Message} message @param {DataView[]} buffers */
  take(message, buffers) {
    if (message.anew) {
      this.lines.clear();
      this.start(/** @type {import("./types").State} */ (message), buffers[0]);
    } else if (message.seq > this.seq) {
      this.missed ||= message.seq > this.seq + 1;
      if (this.missed && Date.now() - this.greeted > 2000) this.greet();
      this.seq = message.seq;
      const left = [...buffers];
      this.merge(message, message.curves ? left.shift() : null);
      this.addLogs(message.logs ?? [], left);
    }
    this.changed();
  }

  /** @param {import("./types").Message} message @param {DataView | null | undefined} points */
  merge(message, points) {
    if (message.elapsed !== undefined) {
      this.elapsed = message.elapsed;
      this.began = Date.now() - 1000 * message.elapsed;
    }
    if (message.ended) this.end();
    if (message.withLogs !== undefined) this.withLogs = message.withLogs;
    for (const tile of message.ranks ?? []) this.ranks.set(tile.rank, tile);
    if (message.said !== undefined) this.said = message.said;
    if (message.timings) {
      this.timings = message.timings;
      this.straggled ||= Boolean(message.timings.straggler);
    }
    if (message.strips) {
      takeStrips(this.strips, message.strips);
      this.stripsAt++;
    }
    if (message.memory !== undefined) this.memory = message.memory;
    for (const [title, html] of Object.entries(message.sections ?? {})) this.sections.set(title, html);
    this.buttons = message.buttons ?? this.buttons;
    if (message.noted !== undefined) this.noted = message.noted;
    if (message.answer !== undefined) this.answer = message.answer;
    if (message.members) {
      const { rows, ...ensemble } = message.members;
      this.ensemble = ensemble;
      for (const row of rows) this.members.set(row.number, { ...row, at: Date.now() });
    }
    if (message.where) {
      const { rank, ...said } = message.where;
      this.where.set(rank, { ...this.where.get(rank), ...said });
    }
    this.addPoints(message.curves ?? [], points);
  }

  // The cell has ended: there is nobody left who listens.
  end() {
    this.ended = true;
    this.model = null;
    this.leaveKernel();
  }

  // The kernel has ended in the cell: no more comes, and what the ranks do now is not known.
  lose() {
    if (this.ended) return;
    this.elapsed = (Date.now() - this.began) / 1000;
    this.title = `the notebook's kernel ended after ${formatSeconds(this.elapsed)}; below is what came before`;
    for (const [rank, tile] of this.ranks) {
      if (tile.look) continue; // it has left the cell
      this.ranks.set(rank, { ...tile, state: "unseen", mark: "", doing: "last seen", cpu_percent: -1 });
    }
    this.end();
    this.changed();
  }

  /** @param {import("./types").SeriesHead[]} heads @param {DataView | null | undefined} points */
  addPoints(heads, points) {
    if (!heads.length || !points) return;
    // A buffer may begin anywhere; numbers of eight bytes may not.
    const end = points.byteOffset + points.byteLength;
    const pairs = new Float64Array(points.buffer.slice(points.byteOffset, end));
    let at = 0;
    for (const { number, name, rank, member, count, anew, stride, broken } of heads) {
      let series = this.series.get(number);
      if (!series || anew) {
        series = { number, name, rank, member, stride, broken: null, steps: [], values: [], last: [NaN, NaN] };
        this.series.set(number, series);
      }
      series.stride = stride;
      series.broken = broken ?? null;
      for (const end = at + 2 * count; at < end; at += 2) {
        series.steps.push(pairs[at]);
        series.values.push(pairs[at + 1]);
      }
      series.last = [pairs[at], pairs[at + 1]];
      at += 2;
    }
  }

  /** @param {import("./types").LogHead[]} heads @param {DataView[]} buffers */
  addLogs(heads, buffers) {
    if (heads.length) this.withLogs = true;
    heads.forEach(({ rank, spans, skipped }, index) => {
      const { buffer, byteOffset, byteLength } = buffers[index];
      this.lines.feed(rank, new Uint8Array(buffer, byteOffset, byteLength), spans, skipped);
    });
  }

  // The seconds of the cell: on the ranks' own clocks, which may be simulated, where these are known.
  get seconds() {
    const longest = Math.max(0, ...[...this.strips.values()].map((time) => time.seconds));
    return longest || (this.ended ? this.elapsed : Math.max(0, (Date.now() - this.began) / 1000));
  }

  // One colour a rank, or a rank and member, in every chart: that of the rank's tile.
  owners() {
    const keys = [...this.series.values()], alone = !keys.some(({ member }) => member);
    keys.sort((a, b) => a.rank - b.rank || (a.member < b.member ? -1 : a.member > b.member ? 1 : 0));
    /** @type {Map<string, number>} */
    const found = new Map();
    for (const { rank, member } of keys) {
      const key = `${rank} ${member}`;
      if (!found.has(key)) found.set(key, alone ? rank : found.size);
    }
    return found;
  }

  // Whether all has gone well, and nothing is left to say of single ranks.
  get finished() {
    return this.ended && [...this.ranks.values()].every(({ look }) => look === "well");
  }

  // The line about the last rank may come and go with each message: while the cell runs, it keeps its place.
  get placeOfStraggler() { return this.straggled && !this.ended; }

  get tilesShown() { return this.settings.tiles ?? !this.finished; }

  // A tile of a rank that runs a member stands for that member.
  /** @param {import("./types").Tile} tile */
  owner({ rank, member }) { return this.noun === "member" ? member : rank; }

  /** @param {import("./types").Selected} rank */
  select(rank) {
    this.set({ selected: this.selected === rank ? null : rank });
    this.changed();
  }

  changed() {
    for (const view of this.views) view();
  }
}
