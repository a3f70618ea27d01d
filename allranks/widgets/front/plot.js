// What one chart shows, from the curves of a metric and what a reader has chosen; chart.js draws it.

import { smooth, spread } from "./chart.js";
import { RANK_COLOURS } from "./format.js";
import { PALETTE } from "./palette.js";

/** @typedef {import("./types").Series} Series */
/** @typedef {import("./types").Plot} Plot */

// More curves than this are drawn as their mean, between the least and the greatest.
export const MANY_CURVES = 16;
// So many curves or groups are named beside their lines.
const NAMED_LINES = 8;
// At most this many steps with infinite values or NaN are marked.
const MAX_MARKED_STEPS = 20;

// Of the curves of one owner: after all colours come the same ones, dashed.
/** @param {number} index */
export const lineDash = (index) => Math.floor(index / RANK_COLOURS) % PALETTE.dashes.length;

// Of groups: the fifth colour resembles the first, so they differ in their dashes too.
/** @param {number} index */
export const groupDash = (index) => (index + Math.floor(index / PALETTE.dashes.length)) % PALETTE.dashes.length;

/**
 * @param {string} name
 * @param {Series[]} list
 * @param {import("./types").PlotChoice} choice
 * @returns {Plot}
 */
export function plotOf(name, list, { owners, noun, groups, mean, smoothing, selected, log, range }) {
  const lines = list.map((series) => {
    const owner = owners.get(`${series.rank} ${series.member}`) ?? 0;
    const index = groups ? groups.of.get(series.rank) ?? groups.labels.length : owner;
    return {
      label: `${noun} ${series.rank} ${series.member}`.trim(), rank: series.rank, index, dash: groups ? 0 : lineDash(index),
      faint: selected !== null && selected !== series.rank, strong: selected === series.rank, last: series.last[1],
      xs: [...series.steps, series.last[0]], ys: smooth([...series.values, series.last[1]], smoothing),
    };
  });
  const parts = groups ? groups.labels.map((label, index) => ({ label: `${groups.name}=${label}`, index, count: groups.counts[index],
    those: lines.filter((line) => line.index === index) })) : [{ label: "mean", index: 0, count: lines.length, those: lines }];
  const bands = mean ? parts.map(({ label, index, count, those }) =>
    ({ label, index, count, dash: groups ? groupDash(index) : 0, columns: spread(those),
      last: those.reduce((sum, line) => sum + line.last, 0) / those.length })).filter(({ columns }) => columns.length) : [];
  const drawn = bands.length ? lines.filter(({ strong }) => strong) : lines;
  const named = groups ? bands.length <= NAMED_LINES && bands.length > 0 : noun === "member" && !mean && lines.length <= NAMED_LINES && lines.length > 1;
  const marks = [...new Set(list.flatMap((one) => (one.broken ? [one.broken[0]] : [])))].slice(0, MAX_MARKED_STEPS);
  return { name, xName: "step", log, range, lines: drawn, bands, marks, named };
}

/**
 * The last values that stand below the name of a chart. Groups stand beside their bands instead.
 *
 * @param {Plot} plot
 * @param {boolean} same whether all curves coincide
 */
export function lastValues({ lines, bands }, same) {
  if (bands.length) {
    return bands.filter(({ label }) => label === "mean");
  }
  if (same) return lines.slice(0, 1);
  return lines.length <= RANK_COLOURS ? lines : [];
}
