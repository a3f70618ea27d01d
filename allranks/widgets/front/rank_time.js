// How each rank has spent its time, in bins: the same sums as in the picture without scripts.

// Of PALETTE.kinds.
export const WAITING = 3;

/**
 * @typedef {object} Times
 * @property {number} width seconds of a bin
 * @property {number} seconds
 * @property {number[]} steps
 * @property {import("./types").Pairs<number>} waits
 * @property {import("./types").Pairs<string>} importing
 * @property {number[][]} shares
 * @property {number[]} whom
 */

export class RankTime {
  /** @param {number} rank @param {Times} options */
  constructor(rank, { width, seconds, steps, waits, importing, shares, whom }) {
    this.rank = rank;
    this.width = width;
    this.seconds = seconds;
    this.steps = steps;
    this.waits = waits;
    this.importing = importing;
    this.shares = shares;
    this.whom = whom;
    const firstAt = steps[1] ?? 0;
    this.bins = whom.map((_, at) => {
      const start = at * width;
      // The time ends within its last bin.
      const length = Math.max(0, Math.min(width, seconds - start));
      const said = shares.map((kind) => (kind[at] / 255) * width);
      const busy = said.reduce((a, b) => a + b, 0);
      // Calls of several threads at once take more than the time that there is.
      const [importing, waiting, transfer] = said.map((value) => value * (busy ? Math.min(1, length / busy) : 1));
      const rest = Math.max(0, length - importing - waiting - transfer);
      const before = Math.min(rest, Math.max(0, firstAt - start));
      return [before, importing, rest - before, waiting, transfer];
    });
  }

  // Seconds of each kind between two times, a bin counted by the part of it; and for whom it waited.
  /** @param {number} began @param {number} ended */
  between(began, ended) {
    const sums = [0, 0, 0, 0, 0];
    /** @type {Map<number, number>} */
    const whom = new Map();
    const last = Math.min(this.bins.length, Math.ceil(ended / this.width));
    for (let at = Math.max(0, Math.floor(began / this.width)); at < last; at++) {
      const start = at * this.width;
      // What is known of the last bin lies within the part of it that has been.
      const length = Math.min(this.width, this.seconds - start) || this.width;
      const part = Math.max(0, Math.min(ended, start + length) - Math.max(began, start)) / length;
      this.bins[at].forEach((value, kind) => { sums[kind] += value * part; });
      if (this.whom[at] >= 0) whom.set(this.whom[at], (whom.get(this.whom[at]) ?? 0) + this.bins[at][WAITING] * part);
    }
    return { sums, whom };
  }

  // What a step took, as a mean from the first one that was logged to the last; null where there are none.
  get step() {
    const [first, firstAt, last, lastAt] = this.steps;
    if (!(last > first)) return null;
    const [before, importing, computing, waiting, transfer] = this.between(firstAt, lastAt).sums.map((one) => one / (last - first));
    // Within the bin of the first step the two are not told apart.
    return { count: last - first, sums: [0, importing, before + computing, waiting, transfer] };
  }
}

// Takes in what the kernel tells: all bins of a rank, or those that have changed.
/** @param {Map<number, RankTime>} found @param {import("./types").StripsMessage} told */
export function takeStrips(found, { rows, bins }) {
  const bytes = Uint8Array.from(atob(bins), (one) => one.charCodeAt(0)), view = new DataView(bytes.buffer);
  let at = 0;
  for (const [rank, first, count, width, seconds, steps, waits, importing] of rows) {
    const old = found.get(rank), begin = at;
    at += 5 * count;
    if (first && !(old && old.width === width && old.whom.length >= first)) continue;
    const kept = first && old ? old : null;
    const shares = [0, 1, 2].map((kind) =>
      [...(kept ? kept.shares[kind].slice(0, first) : []), ...bytes.subarray(begin + kind * count, begin + (kind + 1) * count)]);
    const whom = kept ? kept.whom.slice(0, first) : [];
    for (let i = 0; i < count; i++) whom.push(view.getInt16(begin + 3 * count + 2 * i, true));
    found.set(rank, new RankTime(rank, { width, seconds, steps, waits, importing, shares, whom }));
  }
}
