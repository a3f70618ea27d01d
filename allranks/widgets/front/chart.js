// One chart on a canvas: lines, or a mean between the least and the greatest, and what the
// pointer is over.

import { formatLabels } from "./format.js";

// `left` is the least: the labels of an axis need as much as their longest.
export const EDGE = { left: 58, right: 10, top: 8, bottom: 22 };
// The width of a letter of a label, at most, and the room beside it.
const LETTER = 6.6, BESIDE = 12;
const COLUMNS = 240;
// At most this many steps with infinite values or NaN are marked.
export const MAX_MARKED_STEPS = 20;

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

// Where values land on the canvas.
/** @param {import("./types").Line[]} lines @param {import("./types").Column[]} band @param {number} width @param {number} height @param {boolean} log @param {number[]} [marks] */
export function scales(lines, band, width, height, log, marks = []) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  /** @param {any} x @param {number} y */
  const see = (x, y) => {
    if (!Number.isFinite(x) || !Number.isFinite(y) || (log && y <= 0)) return;
    x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
  };
  for (const { xs, ys } of lines) xs.forEach((x, i) => see(x, ys[i]));
  for (const { x, low, high } of band) { see(x, low); see(x, high); }
  if (x0 > x1) return null;
  for (const x of marks) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
  if (log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 0.5; y0 -= room; y1 += room; }
  const room = (y1 - y0) * 0.04;
  y0 -= room; y1 += room;
  const heights = (log ? logTicks : ticks)(y0, y1, 5), beside = formatLabels(heights);
  const left = Math.max(EDGE.left, BESIDE + LETTER * Math.max(...beside.map((text) => text.length)));
  const across = (width - left - EDGE.right) / (x1 - x0);
  const up = (height - EDGE.top - EDGE.bottom) / (y1 - y0);
  /** @type {import("./types").Scale} */
  const scale = {
    x0, x1, y0, y1, left, heights, beside,
    x: (value) => left + (value - x0) * across,
    y: (value) => height - EDGE.bottom - ((log ? Math.log10(value) : value) - y0) * up,
    step: (pixel) => x0 + (pixel - left) / across,
  };
  return scale;
}

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {number} width @param {number} height @param {boolean} log @param {string} ink @param {string} grid */
export function drawAxes(paint, scale, width, height, log, ink, grid) {
  paint.fillStyle = ink;
  paint.strokeStyle = grid;
  paint.lineWidth = 1;
  paint.textBaseline = "middle";
  paint.textAlign = "right";
  const { heights, beside, left } = scale;
  heights.forEach((value, i) => {
    const y = Math.round(scale.y(value)) + 0.5;
    paint.beginPath(); paint.moveTo(left, y); paint.lineTo(width - EDGE.right, y); paint.stroke();
    paint.fillText(beside[i], left - 6, y);
  });
  paint.textAlign = "center";
  const steps = ticks(scale.x0, scale.x1, Math.max(2, Math.min(5, width / 105))), below = formatLabels(steps);
  steps.forEach((step, i) => {
    const middle = Math.min(scale.x(step), width - paint.measureText(below[i]).width / 2);
    paint.fillText(below[i], middle, height - 9);
  });
}

// The first steps of curves whose values are infinite or NaN.
/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {number[]} marks @param {number} height @param {string} colour */
export function drawMarks(paint, scale, marks, height, colour) {
  paint.strokeStyle = colour;
  paint.lineWidth = 1;
  paint.setLineDash([4, 3]);
  for (const step of marks) {
    const x = Math.round(scale.x(step)) + 0.5;
    paint.beginPath(); paint.moveTo(x, EDGE.top); paint.lineTo(x, height - EDGE.bottom); paint.stroke();
  }
  paint.setLineDash([]);
}

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {number[]} xs @param {number[]} ys @param {import("./types").LineStyle} style @param {boolean} log */
export function drawLine(paint, scale, xs, ys, style, log) {
  paint.strokeStyle = style.colour;
  paint.globalAlpha = style.alpha;
  paint.lineWidth = style.width;
  paint.setLineDash(style.dash);
  paint.lineJoin = "round";
  paint.beginPath();
  let drawing = false;
  for (let i = 0; i < xs.length; i++) {
    const ok = Number.isFinite(ys[i]) && !(log && ys[i] <= 0);
    if (ok && drawing) paint.lineTo(scale.x(xs[i]), scale.y(ys[i]));
    else if (ok) paint.moveTo(scale.x(xs[i]), scale.y(ys[i]));
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

/** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {import("./types").Column[]} band @param {string} fill @param {boolean} log @param {number} [alpha] */
export function drawBand(paint, scale, band, fill, log, alpha = 0.25) {
  const floor = log ? 10 ** scale.y0 : -Infinity;
  const edge = [...band.map((c) => [c.x, c.high]), ...band.map((c) => [c.x, c.low]).reverse()];
  paint.beginPath();
  for (const [x, y] of edge) paint.lineTo(scale.x(x), scale.y(Math.max(y, floor)));
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
