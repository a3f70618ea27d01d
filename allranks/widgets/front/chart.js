// One chart on a canvas: lines, or a mean between the least and the greatest, and what the
// pointer is over.

import { formatLabels } from "./format.js";

// `left` is the least: the labels of an axis need as much as their longest.
export const EDGE = { left: 58, right: 10, top: 8, bottom: 22 };
// The width of a letter of a label, at most, and the room beside it.
const LETTER = 6.6, BESIDE = 12;
const COLUMNS = 240;

const STEPS = [[1, Math.sqrt(2)], [2, Math.sqrt(10)], [5, Math.sqrt(50)], [10, Infinity]];

// A canvas without anything on it, as sharp as the screen; null where it is not shown.
/** @param {HTMLCanvasElement} canvas */
export function blank(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
  const paint = canvas.getContext("2d");
  if (!width || !paint) return null;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.clearRect(0, 0, width, height);
  paint.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  return paint;
}

// Round numbers between two others, about `count` of them, as in the still picture.
/** @param {number} low @param {number} high @param {number} count */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  // The round step whose ratio to the wanted one is least.
  const step = size * (STEPS.find(([, bound]) => rough < bound * size) ?? STEPS[3])[0];
  const found = [];
  for (let n = Math.ceil(low / step); n <= high / step + 1e-9; n++) found.push(n * step);
  return found;
}

// Powers of ten, or 1, 2 and 5 times these, between two numbers whose log10 is given.
/** @param {number} low @param {number} high @param {number} count */
function logTicks(low, high, count) {
  if (high - low > count / 2) {
    return ticks(low, high, count).map((power) => Math.round(power * 1e6) / 1e6).filter(Number.isInteger).map((power) => 10 ** power);
  }
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) for (const m of [1, 2, 5]) found.push(m * 10 ** power);
  const inside = found.filter((value) => low <= Math.log10(value) && Math.log10(value) <= high);
  return inside.length > 1 ? inside : ticks(10 ** low, 10 ** high, count);
}

// An exponential mean that does not start at 0; 0 leaves values as they are.
/** @param {number[]} values @param {number} amount */
export function smooth(values, amount) {
  if (!amount) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

// Step, least, mean and greatest over lines, column by column.
/** @param {import("./types").Line[]} lines */
export function spread(lines) {
  let low = Infinity, high = -Infinity;
  for (const { xs } of lines) for (const x of xs) { low = Math.min(low, x); high = Math.max(high, x); }
  const columns = new Map(), width = (high - low) || 1;
  for (const { xs, ys } of lines) {
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(ys[i])) continue;
      const at = Math.min(COLUMNS - 1, Math.floor((xs[i] - low) / width * COLUMNS));
      const column = columns.get(at) ?? { x: 0, n: 0, sum: 0, low: Infinity, high: -Infinity };
      column.x += xs[i]; column.n += 1; column.sum += ys[i];
      column.low = Math.min(column.low, ys[i]); column.high = Math.max(column.high, ys[i]);
      columns.set(at, column);
    }
  }
  return [...columns].sort((a, b) => a[0] - b[0]).map(([, c]) =>
    ({ x: c.x / c.n, low: c.low, mean: c.sum / c.n, high: c.high }));
}

// Where values land on the canvas; null if there are none.
/** @param {import("./types").Plot} plot @param {number} width @param {number} height @returns {import("./types").Scale | null} */
export function scales({ lines, bands, marks, log, range, named }, width, height) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  const inside = (/** @type {number} */ x) => !(log.x && x <= 0) && (!range || (range[0] <= x && x <= range[1]));
  const see = (/** @type {number} */ x, /** @type {number} */ y) => {
    if (!Number.isFinite(x) || !Number.isFinite(y) || (log.y && y <= 0) || !inside(x)) return;
    x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
  };
  for (const { xs, ys } of lines) xs.forEach((x, i) => see(x, ys[i]));
  for (const { columns } of bands) for (const { x, low, high } of columns) { see(x, low); see(x, high); }
  if (x0 > x1) return null;
  for (const x of marks.filter(inside)) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
  if (range) [x0, x1] = [Math.max(range[0], log.x ? x0 : -Infinity), range[1]];
  const first = x0, last = x1, across = log.x ? Math.log10 : Number, up = log.y ? Math.log10 : Number;
  [x0, x1, y0, y1] = [across(x0), across(x1), up(y0), up(y1)];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 0.5; y0 -= room; y1 += room; }
  const room = (y1 - y0) * 0.04;
  y0 -= room; y1 += room;
  const heights = (log.y ? logTicks : ticks)(y0, y1, 5), beside = formatLabels(heights);
  const left = Math.max(EDGE.left, BESIDE + LETTER * Math.max(...beside.map((text) => text.length)));
  const names = named ? (bands.length ? bands : lines).map(({ label }) => label.length) : [];
  const right = width - (names.length ? Math.min(width / 4, BESIDE + LETTER * Math.max(...names)) : EDGE.right);
  const wide = (right - left) / (x1 - x0), tall = (height - EDGE.top - EDGE.bottom) / (y1 - y0);
  return {
    x0, x1, y0, y1, first, last, left, right, top: EDGE.top, bottom: height - EDGE.bottom, heights, beside,
    x: (value) => left + (across(value) - x0) * wide,
    y: (value) => height - EDGE.bottom - (up(value) - y0) * tall,
    step: (pixel) => { const at = x0 + (pixel - left) / wide; return log.x ? 10 ** at : at; },
  };
}

/**
 * @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {import("./types").Plot} plot
 * @param {number} width @param {number} height @param {string} ink @param {string} grid
 */
export function drawAxes(paint, scale, { xName, log }, width, height, ink, grid) {
  paint.fillStyle = ink;
  paint.strokeStyle = grid;
  paint.lineWidth = 1;
  paint.textBaseline = "middle";
  paint.textAlign = "right";
  const { heights, beside, left, right } = scale;
  heights.forEach((value, i) => {
    const y = Math.round(scale.y(value)) + 0.5;
    paint.beginPath(); paint.moveTo(left, y); paint.lineTo(right, y); paint.stroke();
    paint.fillText(beside[i], left - 6, y);
  });
  paint.textAlign = "center";
  const steps = (log.x ? logTicks : ticks)(scale.x0, scale.x1, Math.max(2, Math.min(5, width / 105))), below = formatLabels(steps);
  let begin = left - 14;
  steps.forEach((step, i) => {
    const middle = Math.min(scale.x(step), width - paint.measureText(below[i]).width / 2);
    begin = Math.min(begin, middle - paint.measureText(below[i]).width / 2 - 8);
    paint.fillText(below[i], middle, height - 9);
  });
  // The name of the axis stands before its numbers.
  paint.textAlign = "right";
  paint.fillText(xName, begin, height - 9);
}

// Names beside the right ends of what they name.
/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {import("./types").Plot} plot @param {(index: number) => string} colourOf */
export function drawNames(paint, scale, { lines, bands }, colourOf) {
  const ends = bands.length ? bands.map(({ label, index, columns }) => ({ label, index, value: columns[columns.length - 1].mean }))
    : lines.map(({ label, index, ys }) => ({ label, index, value: ys[ys.length - 1] }));
  const bounds = [scale.top, scale.bottom];
  const heights = ends.map(({ value }) => (Number.isFinite(scale.y(value)) ? scale.y(value) : bounds[1]));
  paint.textAlign = "left";
  apart(heights, 12, bounds[0] + 4, bounds[1] - 4).forEach((y, i) => {
    paint.fillStyle = colourOf(ends[i].index);
    paint.fillText(ends[i].label, scale.right + 6, y);
  });
}

// Heights, moved apart until the words there do not cover each other.
/** @param {number[]} heights @param {number} room @param {number} top @param {number} bottom */
export function apart(heights, room, top, bottom) {
  const order = heights.map((_, at) => at).sort((a, b) => heights[a] - heights[b]), found = [...heights];
  let free = top;
  for (const at of order) free = (found[at] = Math.max(found[at], free)) + room;
  let most = bottom;
  for (const at of order.reverse()) most = (found[at] = Math.min(found[at], most)) - room;
  return found;
}

// The first steps of curves whose values are infinite or NaN.
/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {number[]} marks @param {number} height @param {string} colour */
export function drawMarks(paint, scale, marks, height, colour) {
  paint.strokeStyle = colour;
  paint.lineWidth = 1;
  paint.setLineDash([4, 3]);
  for (const step of marks) {
    const x = Math.round(scale.x(step)) + 0.5;
    if (!(x >= scale.left && x <= scale.right)) continue;
    paint.beginPath(); paint.moveTo(x, EDGE.top); paint.lineTo(x, height - EDGE.bottom); paint.stroke();
  }
  paint.setLineDash([]);
}

// Draws within the axes: of a part of the steps, lines go on beyond it.
/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {() => void} draw */
function within(paint, { left, right, top, bottom }, draw) {
  paint.save();
  paint.beginPath(); paint.rect(left - 1, top - 3, right - left + 2, bottom - top + 6); paint.clip();
  draw();
  paint.restore();
}

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {number[]} xs @param {number[]} ys @param {import("./types").LineStyle} style */
export function drawLine(paint, scale, xs, ys, style) {
  within(paint, scale, () => strokeLine(paint, scale, xs, ys, style));
}

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {number[]} xs @param {number[]} ys @param {import("./types").LineStyle} style */
function strokeLine(paint, scale, xs, ys, style) {
  paint.strokeStyle = style.colour;
  paint.globalAlpha = style.alpha;
  paint.lineWidth = style.width;
  paint.setLineDash(style.dash);
  paint.lineJoin = "round";
  paint.beginPath();
  let drawing = false;
  for (let i = 0; i < xs.length; i++) {
    // Of what is not positive there is no logarithm.
    const x = scale.x(xs[i]), y = scale.y(ys[i]), ok = Number.isFinite(x) && Number.isFinite(y);
    if (ok && drawing) paint.lineTo(x, y);
    else if (ok) paint.moveTo(x, y);
    drawing = ok;
  }
  paint.stroke();
  // The last value is always there once more.
  if (drawing && xs.every((x, i) => x === xs[0] && ys[i] === ys[0])) {
    paint.beginPath(); paint.arc(scale.x(xs[0]), scale.y(ys[0]), 2.5, 0, 7);
    paint.fillStyle = style.colour; paint.fill();
  }
  paint.setLineDash([]);
  paint.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {import("./types").Column[]} band @param {string} fill @param {number} alpha */
export function drawBand(paint, scale, band, fill, alpha) {
  within(paint, scale, () => fillBand(paint, scale, band, fill, alpha));
}

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {import("./types").Column[]} band @param {string} fill @param {number} alpha */
function fillBand(paint, scale, band, fill, alpha) {
  const edge = [...band.map((c) => [c.x, c.high]), ...band.map((c) => [c.x, c.low]).reverse()];
  paint.beginPath();
  for (const [x, y] of edge) {
    const height = scale.y(y);
    paint.lineTo(scale.x(x), Number.isFinite(height) ? height : scale.bottom);
  }
  paint.fillStyle = fill;
  paint.globalAlpha = alpha;
  paint.fill();
  paint.globalAlpha = 1;
}

// The index of the value nearest to x; steps mostly grow, so the search starts by halves.
/** @param {number[]} xs @param {any} x */
export function nearest(xs, x) {
  let best = -1, distance = Infinity;
  for (let i = 0; i < xs.length; i++) {
    const here = Math.abs(xs[i] - x);
    if (here <= distance) { best = i; distance = here; }
  }
  return best;
}
