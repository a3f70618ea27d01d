// The ranks' lines: a ring that forgets its oldest, and the part of it that is looked at.

const KEPT_LINES = 600_000;
const FOLDED_LINES = 50_000;
const LINE_LENGTH = 2000;
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;

class Lines {
  constructor() {
    this.query = "";
    this.only = null;
    this.fold = true;
    this.clear();
  }

  clear() {
    this.texts = [];
    this.ranks = [];
    this.kinds = [];      // 0 out, 1 err, 2 a note of ours
    this.open = new Map();
    this.forgotten = 0;
    this.skipped = 0;     // bytes
    this.look();
  }

  get count() { return this.texts.length; }

  // Takes in bytes of one rank; spans are those of standard error.
  feed(rank, bytes, spans, skipped) {
    if (skipped) this.push(rank, `… ${formatBytes(skipped)} are in the log file only`, 2);
    this.skipped += skipped;
    let tail = this.open.get(rank);
    if (!tail) this.open.set(rank, tail = { decoder: new TextDecoder(), text: "", kind: 0 });
    let at = 0;
    for (const [start, end] of [...spans, [bytes.length, bytes.length]]) {
      this.text(rank, tail, bytes.subarray(at, start), 0);
      this.text(rank, tail, bytes.subarray(Math.max(at, start), end), 1);
      at = Math.max(at, end);
    }
    if (this.count > KEPT_LINES) this.forget(this.count - KEPT_LINES + KEPT_LINES / 10);
    this.extend();
  }

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

  push(rank, raw, kind) {
    let line = raw;
    if (line.includes("\r")) line = line.replace(/\r$/, "").replace(/^.*\r/s, "");
    if (line.includes("\u001b")) line = line.replace(ESCAPES, "");
    if (line.length > LINE_LENGTH) line = `${line.slice(0, LINE_LENGTH)} …`;
    this.texts.push(line);
    this.ranks.push(rank);
    this.kinds.push(kind);
  }

  forget(count) {
    for (const list of [this.texts, this.ranks, this.kinds]) list.splice(0, count);
    this.forgotten += count;
    this.look();
  }

  // Looks at other lines: those of one rank, those that hold a text.
  look({ query = this.query, only = this.only, fold = this.fold } = {}) {
    Object.assign(this, { query, only, fold });
    this.pattern = query ? new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i") : null;
    this.rows = [];
    this.seen = new Map();
    this.times = new Map();
    this.sharers = new Map();
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

  row(index) {
    const i = this.rows[index];
    return { ranks: this.sharers.get(i) ?? [this.ranks[i]], text: this.texts[i], kind: this.kinds[i] };
  }
}

// One chart on a canvas: lines, or a mean between the least and the greatest, and what the
// pointer is over.

const EDGE = { left: 58, right: 10, top: 8, bottom: 22 };
const COLUMNS = 240;
// At most this many steps with infinite values or NaN are marked.
const MAX_MARKED_STEPS = 20;

// Round numbers between two others, about `count` of them, as in the still picture.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  // The round step whose ratio to the wanted one is least.
  const step = size * [1, 2, 5, 10].find((m, i) => rough < Math.sqrt([2, 10, 50, Infinity][i]) * size);
  const found = [];
  for (let n = Math.ceil(low / step); n <= high / step + 1e-9; n++) found.push(n * step);
  return found;
}

// Powers of ten, or 1, 2 and 5 times these, between two numbers whose log10 is given.
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
function smooth(values, amount) {
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
function spread(lines) {
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
function scales(lines, band, width, height, log, marks = []) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
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
  const across = (width - EDGE.left - EDGE.right) / (x1 - x0);
  const up = (height - EDGE.top - EDGE.bottom) / (y1 - y0);
  return {
    x0, x1, y0, y1,
    x: (value) => EDGE.left + (value - x0) * across,
    y: (value) => height - EDGE.bottom - ((log ? Math.log10(value) : value) - y0) * up,
    step: (pixel) => x0 + (pixel - EDGE.left) / across,
  };
}

function drawAxes(paint, scale, width, height, log, ink, grid) {
  paint.fillStyle = ink;
  paint.strokeStyle = grid;
  paint.lineWidth = 1;
  paint.textBaseline = "middle";
  paint.textAlign = "right";
  const heights = (log ? logTicks : ticks)(scale.y0, scale.y1, 5), beside = formatLabels(heights);
  heights.forEach((value, i) => {
    const y = Math.round(scale.y(value)) + 0.5;
    paint.beginPath(); paint.moveTo(EDGE.left, y); paint.lineTo(width - EDGE.right, y); paint.stroke();
    paint.fillText(beside[i], EDGE.left - 6, y);
  });
  paint.textAlign = "center";
  const steps = ticks(scale.x0, scale.x1, Math.max(2, Math.min(5, width / 105))), below = formatLabels(steps);
  steps.forEach((step, i) => {
    const middle = Math.min(scale.x(step), width - paint.measureText(below[i]).width / 2);
    paint.fillText(below[i], middle, height - 9);
  });
}

// The first steps of curves whose values are infinite or NaN.
function drawMarks(paint, scale, marks, height, colour) {
  paint.strokeStyle = colour;
  paint.lineWidth = 1;
  paint.setLineDash([4, 3]);
  for (const step of marks) {
    const x = Math.round(scale.x(step)) + 0.5;
    paint.beginPath(); paint.moveTo(x, EDGE.top); paint.lineTo(x, height - EDGE.bottom); paint.stroke();
  }
  paint.setLineDash([]);
}

function drawLine(paint, scale, xs, ys, style, log) {
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

function drawBand(paint, scale, band, fill, log, alpha = 0.25) {
  const floor = log ? 10 ** scale.y0 : -Infinity;
  const edge = [...band.map((c) => [c.x, c.high]), ...band.map((c) => [c.x, c.low]).reverse()];
  paint.beginPath();
  edge.forEach(([x, y], i) => {
    const point = [scale.x(x), scale.y(Math.max(y, floor))];
    if (i) paint.lineTo(...point); else paint.moveTo(...point);
  });
  paint.fillStyle = fill;
  paint.globalAlpha = alpha;
  paint.fill();
  paint.globalAlpha = 1;
}

// The index of the value nearest to x; steps mostly grow, so the search starts by halves.
function nearest(xs, x) {
  let best = -1, distance = Infinity;
  for (let i = 0; i < xs.length; i++) {
    const here = Math.abs(xs[i] - x);
    if (here <= distance) { best = i; distance = here; }
  }
  return best;
}
