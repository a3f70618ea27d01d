// The ranks' lines: a ring that forgets its oldest, and the part of it that is looked at.

import { formatBytes } from "./format.js";

const KEPT_LINES = 600_000;
const FOLDED_LINES = 50_000;
const LINE_LENGTH = 2000;
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;

/** @typedef {{ decoder: TextDecoder, text: string, kind: number }} Tail */
/** @typedef {{ query?: string, only?: number | null, fold?: boolean }} Look */

export class Lines {
  constructor() {
    this.query = "";
    /** @type {number | null} */
    this.only = null;
    this.fold = true;
    /** @type {string[]} */
    this.texts = [];
    /** @type {number[]} */
    this.ranks = [];
    /** @type {number[]} */
    this.kinds = [];      // 0 out, 1 err, 2 a note of ours
    /** @type {Map<number, Tail>} */
    this.open = new Map();
    /** @type {number[]} */
    this.rows = [];
    /** @type {RegExp | null} */
    this.pattern = null;
    this.looked = this.among = this.forgotten = this.skipped = 0;
    this.forgetSeen();
  }

  clear() {
    this.texts = [];
    this.ranks = [];
    this.kinds = [];
    this.open = new Map();
    this.forgotten = 0;
    this.skipped = 0;     // bytes
    this.look();
  }

  get count() { return this.texts.length; }

  // Takes in bytes of one rank; spans are those of standard error.
  /** @param {number} rank @param {Uint8Array} bytes @param {import("./types").Point[]} spans @param {number} skipped */
  feed(rank, bytes, spans, skipped) {
    if (skipped) this.push(rank, `… ${formatBytes(skipped)} are in the log file only`, 2);
    this.skipped += skipped;
    let tail = this.open.get(rank);
    if (!tail) this.open.set(rank, (tail = { decoder: new TextDecoder(), text: "", kind: 0 }));
    let at = 0;
    for (const [start, end] of [...spans, [bytes.length, bytes.length]]) {
      this.text(rank, tail, bytes.subarray(at, start), 0);
      this.text(rank, tail, bytes.subarray(Math.max(at, start), end), 1);
      at = Math.max(at, end);
    }
    if (this.count > KEPT_LINES) this.forget(this.count - KEPT_LINES + KEPT_LINES / 10);
    this.extend();
  }

  /** @param {number} rank @param {Tail} tail @param {Uint8Array} bytes @param {number} kind */
  text(rank, tail, bytes, kind) {
    if (!bytes.length) return;
    const pieces = tail.decoder.decode(bytes, { stream: true }).split("\n");
    const last = pieces.length - 1;
    for (let i = 0; i < last; i++) {
      const line = i || !tail.text ? pieces[i] : tail.text + pieces[i];
      this.push(rank, line, i || !tail.text ? kind : tail.kind);
      if (!i) tail.text = "";
    }
    if (!tail.text) tail.kind = kind;
    tail.text = (tail.text + pieces[last]).slice(-LINE_LENGTH);
  }

  /** @param {number} rank @param {string} raw @param {number} kind */
  push(rank, raw, kind) {
    let line = raw;
    if (line.includes("\r")) line = line.replace(/\r$/, "").replace(/^.*\r/s, "");
    if (line.includes("\u001b")) line = line.replace(ESCAPES, "");
    if (line.length > LINE_LENGTH) line = `${line.slice(0, LINE_LENGTH)} …`;
    this.texts.push(line);
    this.ranks.push(rank);
    this.kinds.push(kind);
  }

  /** @param {number} count */
  forget(count) {
    for (const list of [this.texts, this.ranks, this.kinds]) list.splice(0, count);
    this.forgotten += count;
    this.look();
  }

  forgetSeen() {
    /** @type {Map<string, number>} */
    this.seen = new Map();
    /** @type {Map<string, number>} */
    this.times = new Map();
    /** @type {Map<number, number[]>} */
    this.sharers = new Map();
  }

  // Looks at other lines: those of one rank, those that hold a text.
  /** @param {Look} [change] */
  look({ query = this.query, only = this.only, fold = this.fold } = {}) {
    Object.assign(this, { query, only, fold });
    this.pattern = query ? new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i") : null;
    this.rows = [];
    this.forgetSeen();
    this.looked = 0;
    this.among = 0;       // lines of all ranks, or of the one
    this.extend();
  }

  // Brings the rows up to date with the lines that have come since.
  extend() {
    const { texts, ranks, rows, only, pattern } = this;
    for (let i = this.looked; i < texts.length; i++) {
      if (only !== null && ranks[i] !== only) continue;
      this.among++;
      if (pattern && !pattern.test(texts[i])) continue;
      if (this.fold && only === null && rows.length < FOLDED_LINES && this.joins(i)) continue;
      rows.push(i);
    }
    this.looked = texts.length;
  }

  // Whether another rank wrote this line, for the same time, so that the two are shown as one.
  /** @param {any} i */
  joins(i) {
    const text = this.texts[i], rank = this.ranks[i];
    const mine = `${rank} ${text}`;
    const time = (this.times.get(mine) ?? 0) + 1;
    this.times.set(mine, time);
    const key = `${time} ${this.kinds[i]} ${text}`;
    const first = this.seen.get(key);
    if (first === undefined) {
      this.seen.set(key, i);
      return false;
    }
    const sharers = this.sharers.get(first) ?? [this.ranks[first]];
    sharers.push(rank);
    this.sharers.set(first, sharers);
    return true;
  }

  /** @param {number} index */
  row(index) {
    const i = this.rows[index];
    return { ranks: this.sharers.get(i) ?? [this.ranks[i]], text: this.texts[i], kind: this.kinds[i] };
  }
}
