// Words and numbers as people read them, and the colours of ranks.

import { PALETTE } from "./palette.js";

// With more ranks the same colours come again, in other dashes.
export const RANK_COLOURS = PALETTE.ranks.light.length;

/** @param {number} index @param {boolean} dark */
export const colour = (index, dark) => PALETTE.ranks[dark ? "dark" : "light"][index % RANK_COLOURS];

/** @param {number} value @param {number} [digits] */
export function formatNumber(value, digits = 4) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  // As Python's: where the digits do not reach the point.
  if (Number(size.toPrecision(digits)) >= 10 ** digits || size < 1e-4) return String(Number(value.toExponential(digits - 1)).toExponential()).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

// Different numbers as different words, with as few digits as that takes.
/** @param {number[]} values */
export function formatLabels(values) {
  /** @type {string[]} */
  let words = [];
  for (let digits = 4; digits < 17; digits++) {
    words = values.map((value) => formatNumber(Number(value.toPrecision(12)), digits));
    if (new Set(words).size === new Set(values).size) break;
  }
  // One notation: where one number has an exponent, all have.
  if (!words.some((word) => word.includes("e"))) return words;
  return values.map((value) => (value ? String(Number(value.toPrecision(12)).toExponential()).replace("e+", "e") : "0"));
}

/** @param {number} value */
export function formatSeconds(value) {
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${Number(value.toPrecision(3))} s`;
  if (value >= 1e-3) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return `${Math.round(value * 1e6)} µs`;
}

/** @type {[string, number][]} */
const UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

// A duration of a column whose longest is `most`: all have the same unit.
/** @param {number} value @param {number} most */
export function formatSecondsLike(value, most) {
  if (most >= 60) {
    const whole = Math.round(value);
    return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  }
  const [unit, size] = UNITS.find(([, size]) => most >= size) ?? UNITS[2];
  return `${(value / size).toFixed([10, 100].filter((bound) => most < bound * size).length)} ${unit}`;
}

/** @type {[string, number][]} */
const SIZES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

/** @param {number} value */
export function formatBytes(value) {
  for (const [unit, size] of SIZES) {
    if (value >= 0.9995 * size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** @param {number | null} value */
export const formatBandwidth = (value) => value === null ? "n/a" : `${formatBytes(value * 1e9)}/s`;

// Ranks as 0, 2–3.
/** @param {number[]} ranks @param {string} [noun] */
export function formatRanks(ranks, noun = "rank") {
  /** @type {[number, number][]} */
  const spans = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = spans[spans.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  const said = spans.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
  return `${noun}${ranks.length === 1 ? "" : "s"} ${said}`;
}
