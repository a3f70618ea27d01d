// The strips on a canvas, and beside each what it comes to; a part of the time is looked at closer.

import { alike, mean, rowName } from "./alike.js";
import { blank, ticks } from "./chart.js";
import { isDark, make, put, putHtml } from "./elements.js";
import { formatLabels, formatNumber, formatRanks, formatSeconds, formatSecondsLike } from "./format.js";
import { PALETTE } from "./palette.js";
import { WAITING } from "./rank_time.js";

const STRIP = { left: 58, gap: 16, right: 72, top: 4, bottom: 20, step: 20, low: 7 };
const STRIP_COLUMN = 4;
// A wait that is as wide as this has room for the rank that was waited for.
const NUMBER_WIDTH = 16;
const LEAST_BINS = 4;

/** @typedef {import("./rank_time.js").RankTime} RankTime */
/** @typedef {[number[], number[], string]} TableRow ranks, their seconds of each kind, and why */

// In seconds, as the axis: of a long time minutes would not tell two moments apart.
/** @param {number[]} range */
const formatPart = (range) => formatLabels(range).map((value) => `${value} s`).join(" to ");

// Where a time stands, and a bar beside the strips.
/** @param {number[]} range @param {number} ranks @param {number} whole the width */
function stripScale([began, ended], ranks, whole) {
  const bar = Math.round(Math.min(190, whole / 5)), step = ranks <= 16 ? STRIP.step : STRIP.low;
  const width = Math.max(40, whole - STRIP.left - STRIP.gap - bar - STRIP.right);
  return {
    began, ended, step, width, height: STRIP.top + ranks * step, bar,
    x: (/** @type {number} */ time) => STRIP.left + (time - began) / (ended - began) * width,
    time: (/** @type {number} */ x) => began + (x - STRIP.left) / width * (ended - began),
    inside: (/** @type {number} */ x) => Math.max(STRIP.left, Math.min(STRIP.left + width, x)),
  };
}

// For whom a rank waited, and what it imported, without the seconds.
const names = (/** @type {string} */ why) => why.replace(/ [\d.]+ (min [\d.]+ )?(s|ms|µs)/g, "");

// Rows that are alike, as one: their means.
/** @param {TableRow[]} rows @returns {TableRow} */
function merged(rows) {
  const [[, sums, why]] = rows, whom = names(why), same = rows.every((row) => row[2] === why);
  return [rows.flatMap(([ranks]) => ranks), sums.map((_, kind) => mean(rows.map((row) => row[1][kind]))), same ? why : whom];
}

/** @param {number[]} values */
const sum = (values) => values.reduce((a, b) => a + b, 0);

class StripChart {
  /** @param {import("./data.js").Data} data @param {() => void} changed */
  constructor(data, changed) {
    this.data = data;
    this.changed = changed;
    this.canvas = make("canvas", { tabIndex: 0, role: "img", title: "drag over a part of the time to zoom in" });
    this.tip = make("div", { className: "ar-tip", hidden: true });
    this.picked = make("div", { className: "ar-picked", hidden: true });
    this.element = make("figure", { className: "ar-strips" }, this.canvas, this.picked, this.tip);
    this.scale = stripScale([0, 1], 1, 0);
    this.held = this.scale;
    /** @type {number | undefined} */
    this.from = undefined;
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => (this.from === undefined ? this.point(event) : this.pick(event)));
    canvas.addEventListener("pointerup", (event) => this.drop(event));
    canvas.addEventListener("pointercancel", () => this.let());
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get times() { return [...this.data.strips.values()].sort((a, b) => a.rank - b.rank); }

  get longest() { return Math.max(0, ...this.times.map((time) => time.seconds)) || 1; }

  // What is looked at: seconds from, and to.
  get range() { return this.data.settings.range ?? [0, this.longest]; }

  /** @param {number} began @param {number} ended */
  zoom(began, ended) {
    const least = LEAST_BINS * Math.min(...this.times.map((time) => time.width));
    const length = Math.max(ended - began, Math.min(least, this.longest));
    const middle = (began + ended) / 2;
    const from = Math.max(0, Math.min(middle - length / 2, this.longest - length));
    const whole = !Number.isFinite(length) || length >= this.longest * 0.999;
    this.data.set({ range: whole ? null : [from, from + length] });
    this.changed();
  }

  // Closer by a factor, about a time: by itself about the middle.
  /** @param {number} factor @param {number} [about] */
  closer(factor, about) {
    const [began, ended] = this.range, middle = about ?? (began + ended) / 2;
    this.zoom(middle - (middle - began) / factor, middle + (ended - middle) / factor);
  }

  /** @param {number} part */
  move(part) {
    const [began, ended] = this.range, by = part * (ended - began);
    this.zoom(began + by, ended + by);
  }

  whole() { this.zoom(0, Infinity); }

  /** @param {KeyboardEvent} event */
  key(event) {
    const part = event.shiftKey ? 0.5 : 0.1;
    /** @type {Record<string, () => void>} */
    const acts = {
      "+": () => this.closer(2), "=": () => this.closer(2), "-": () => this.closer(0.5),
      ArrowLeft: () => this.move(-part), ArrowRight: () => this.move(part),
      Home: () => this.whole(), Escape: () => this.whole(),
    };
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // Without a key the page scrolls.
  /** @param {WheelEvent} event */
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const turned = event.deltaY || event.deltaX;
    if (turned) this.closer(turned < 0 ? 1.4 : 1 / 1.4, this.scale.time(event.offsetX));
  }

  /** @param {PointerEvent} event */
  grab(event) {
    if (event.button || !this.data.strips.size) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.from = event.offsetX;
    // As it is now: strips go on growing meanwhile.
    this.held = this.scale;
    this.tip.hidden = true;
  }

  // Of what is being picked, from left to right.
  /** @param {PointerEvent} event */
  ends({ offsetX }) {
    return [this.from ?? offsetX, offsetX].map((x) => this.held.inside(x)).sort((one, other) => one - other);
  }

  /** @param {PointerEvent} event */
  pick(event) {
    const [a, b] = this.ends(event);
    Object.assign(this.picked.style, { left: `${a}px`, width: `${b - a}px`, height: `${this.held.height}px` });
    this.picked.hidden = b - a < 4;
  }

  /** @param {PointerEvent} event */
  drop(event) {
    if (this.from === undefined) return;
    const [a, b] = this.ends(event);
    const { held } = this;
    this.let();
    if (b - a >= 4) this.zoom(held.time(a), held.time(b));
  }

  let() {
    this.from = undefined;
    this.picked.hidden = true;
  }

  /** @param {any} options */
  point({ offsetX, offsetY }) {
    const { scale } = this, at = Math.floor((offsetY - STRIP.top) / scale.step);
    const time = this.times[at], moment = scale.time(offsetX);
    this.tip.hidden = !time || offsetX !== scale.inside(offsetX) || moment > time.seconds;
    if (this.tip.hidden) return;
    const half = (scale.ended - scale.began) * STRIP_COLUMN / 2 / scale.width;
    const { sums, whom } = time.between(moment - half, moment + half), all = sum(sums) || 1;
    const most = [...whom].sort((a, b) => b[1] - a[1])[0];
    const said = PALETTE.kinds.map((name, kind) => /** @type {const} */ ([name, sums[kind] / all, kind])).filter(([, share]) => share >= 0.005);
    this.tip.replaceChildren(make("b", {}, `rank ${time.rank}, ${formatNumber(moment)} s`), ...said.map(([name, share, kind]) =>
      make("div", {}, `${name}${kind === WAITING && most ? ` for rank ${most[0]}` : ""}  ${Math.round(100 * share)} %`)));
    const left = offsetX < this.canvas.clientWidth / 2;
    Object.assign(this.tip.style, { left: left ? `${offsetX + 12}px` : "", right: left ? "" : `${this.canvas.clientWidth - offsetX + 12}px`,
      top: `${STRIP.top + (at + 1) * scale.step + 2}px` });
  }

  /** @param {boolean} dark */
  draw(dark) {
    const { canvas, times } = this, ranks = Math.max(times.length, Math.min(this.data.ranks.size, 128));
    const scale = stripScale(this.range, ranks, canvas.clientWidth), { step } = scale, height = scale.height + STRIP.bottom;
    canvas.style.height = `${height}px`;
    const paint = blank(canvas), style = getComputedStyle(canvas);
    if (!paint) return;
    this.scale = scale;
    paint.textBaseline = "middle";
    const colours = PALETTE.time[dark ? "dark" : "light"], { selected } = this.data;
    const names = times.length ? times.map(({ rank }) => rank) : [...this.data.ranks.keys()].slice(0, ranks);
    names.forEach((rank, row) => {
      const y = STRIP.top + row * step;
      paint.globalAlpha = 1;
      paint.fillStyle = style.color;
      paint.textAlign = "right";
      if (step === STRIP.step || row % 8 === 0) paint.fillText(`rank ${rank}`, STRIP.left - 6, y + (step - 3) / 2);
      if (!times.length) return;
      paint.globalAlpha = selected === null || selected === rank ? 1 : 0.3;
      this.drawStrip(paint, times[row], y, step - 3, colours);
      this.drawBar(paint, times[row], y, step - 3, colours, style.color);
    });
    paint.globalAlpha = 1;
    this.drawAxis(paint, height, style.color);
    this.describe(times);
  }

  // In each column the kinds stand one upon the other.
  /** @param {CanvasRenderingContext2D} paint @param {RankTime} time @param {number} y @param {number} height @param {string[]} colours */
  drawStrip(paint, time, y, height, colours) {
    const { scale } = this, columns = Math.floor(scale.width / STRIP_COLUMN);
    const each = (scale.ended - scale.began) / columns, edge = (/** @type {number} */ at) => Math.round(STRIP.left + at * scale.width / columns);
    for (let at = 0; at < columns; at++) {
      const start = scale.began + at * each;
      if (start + each / 2 > time.seconds) break;
      const { sums } = time.between(start, start + each), all = sum(sums) || 1;
      let upto = 0, top = 0;
      sums.forEach((value, kind) => {
        upto += value / all;
        const bottom = Math.round(upto * height);
        paint.fillStyle = colours[kind];
        if (bottom > top) paint.fillRect(edge(at), y + top, edge(at + 1) - edge(at), bottom - top);
        top = bottom;
      });
    }
    if (height > STRIP.low) this.drawNumbers(paint, time, y + height / 2 + 0.5);
  }

  // For whom the rank waits, where it does little else for long enough to be read.
  /** @param {CanvasRenderingContext2D} paint @param {RankTime} time @param {number} y */
  drawNumbers(paint, time, y) {
    const { scale } = this, whose = (/** @type {number} */ at) => {
      const bin = time.bins[at];
      return bin && bin[WAITING] > sum(bin) / 2 ? time.whom[at] : -1;
    };
    paint.fillStyle = "#000000";
    paint.textAlign = "center";
    for (let begun = 0, at = 1; at <= time.bins.length; at++) {
      if (whose(at) === whose(begun) && at < time.bins.length) continue;
      const rank = whose(begun), [a, b] = [begun, at].map((one) => scale.inside(scale.x(one * time.width)));
      if (rank >= 0 && b - a >= NUMBER_WIDTH) paint.fillText(String(rank), (a + b) / 2, y);
      begun = at;
    }
  }

  /** @param {CanvasRenderingContext2D} paint @param {RankTime} time @param {number} y @param {number} height @param {string[]} colours @param {string} ink */
  drawBar(paint, time, y, height, colours, ink) {
    const { scale } = this, { sums } = time.between(scale.began, scale.ended);
    let x = STRIP.left + scale.width + STRIP.gap;
    sums.forEach((value, kind) => {
      const wide = value / (scale.ended - scale.began) * scale.bar;
      paint.fillStyle = colours[kind];
      paint.fillRect(x, y, wide, height);
      x += wide;
    });
    if (height < STRIP.low) return;
    paint.globalAlpha = 1;
    paint.fillStyle = ink;
    paint.textAlign = "left";
    paint.fillText(formatSeconds(sum(sums)), x + 6, y + height / 2);
  }

  /** @param {CanvasRenderingContext2D} paint @param {number} height @param {string} ink */
  drawAxis(paint, height, ink) {
    const { scale } = this, marks = ticks(scale.began, scale.ended, Math.max(2, Math.min(6, scale.width / 90))), said = formatLabels(marks);
    paint.fillStyle = ink;
    marks.forEach((value, i) => {
      paint.textAlign = value > scale.began ? "center" : "left";
      paint.fillText(`${said[i]} s`, scale.x(value), height - 8);
    });
    paint.textAlign = "left";
    paint.fillText(this.data.settings.range ? "this part together" : "all together", STRIP.left + scale.width + STRIP.gap, height - 8);
  }

  // What a screen reader says; also what tests read.
  /** @param {RankTime[]} times */
  describe(times) {
    const { began, ended } = this.scale;
    const each = times.slice(0, 16).map((time) => {
      const { sums } = time.between(began, ended), all = sum(sums) || 1;
      const said = PALETTE.kinds.map((name, kind) => /** @type {const} */ ([name, Math.round(100 * sums[kind] / all)])).filter(([, share]) => share);
      return `rank ${time.rank} ${said.map(([name, share]) => `${name} ${share} %`).join(", ")}`;
    });
    const what = `each rank's time from ${formatPart([began, ended])}`;
    this.canvas.setAttribute("aria-label", `${what}: ${each.join("; ") || "no times yet"}`);
  }
}

// Where each rank's time and memory goes: live for as long as this is open, and when the cell has ended.

const TIME_ROWS = 16;
const NAMED = 3;

export class TimePanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    this.chart = new StripChart(data, () => this.draw());
    const button = (/** @type {string} */ text, /** @type {() => void} */ act) => {
      const element = make("button", { type: "button", className: "ar-small" }, text);
      element.addEventListener("click", act);
      return element;
    };
    this.drawn = "";
    this.key = make("span", { className: "ar-legend ar-kinds" });
    this.said = make("span", { role: "status" });
    this.bar = make("div", { className: "ar-bar" },
      button("zoom in", () => this.chart.closer(2)), button("zoom out", () => this.chart.closer(0.5)),
      button("earlier", () => this.chart.move(-0.5)), button("later", () => this.chart.move(0.5)),
      button("whole cell", () => this.chart.whole()), this.said, this.key);
    this.cause = make("p", { className: "ar-cause" });
    this.tables = make("div", {});
    this.memory = make("div", { className: "ar-memory" });
    this.element = make("div", { className: "ar-time" }, this.cause, this.bar, this.chart.element, this.tables, this.memory);
  }

  // From the beginning, closed: a heading that came at the end would move what stands below.
  get filled() {
    const { noun, strips, memory, timings, ended } = this.data;
    return noun === "rank" && Boolean(strips.size || memory || timings?.cause || !ended);
  }

  draw() {
    const { data } = this, dark = isDark();
    put(this.cause, data.timings?.cause ?? "");
    putHtml(this.memory, data.memory ?? "");
    const said = JSON.stringify([data.stripsAt, data.settings.range, data.selected, dark, this.element.clientWidth, data.ranks.size]);
    if (said === this.drawn) return;
    this.drawn = said;
    this.bar.hidden = this.chart.element.hidden = data.ended && !data.strips.size;
    this.chart.draw(dark);
    const { range } = data.settings;
    put(this.said, range ? formatPart(range) : "");
    const colours = PALETTE.time[dark ? "dark" : "light"];
    this.key.replaceChildren(...PALETTE.kinds.map((name, kind) => {
      const mark = make("i", { "aria-hidden": "true", className: "ar-swatch" });
      mark.style.background = colours[kind];
      return make("span", {}, mark, kind === WAITING ? "waiting, for the rank of that number" : name);
    }));
    this.drawTables();
  }

  drawTables() {
    const { times, range } = this.chart, zoomed = Boolean(this.data.settings.range);
    if (!times.length) return;
    const parts = [this.table(`time of each rank${zoomed ? " in this part of the cell" : ""}`, times.map((time) => {
      const { sums, whom } = time.between(...range);
      const waits = zoomed ? [...whom].sort((a, b) => b[1] - a[1]) : time.waits;
      return [[time.rank], sums, this.why(time, waits, zoomed ? [] : time.importing, range)];
    }))];
    const steps = times.flatMap((time) => (time.step ? [{ time, ...time.step }] : []));
    if (steps.length) {
      const count = Math.max(...steps.map((step) => step.count));
      parts.push(this.table(`a step, mean of ${formatNumber(count)}`, steps.map(({ time, sums }) => [[time.rank], sums, ""])));
    }
    this.tables.replaceChildren(...parts.flat());
  }

  // For whom a rank waited most, and what it imported.
  /** @param {RankTime} time @param {[number, number][]} waits @param {[string, number][]} importing @param {number[]} range */
  why(time, waits, importing, [began, ended]) {
    const length = Math.min(ended, time.seconds) - began;
    const named = (/** @type {[number | string, number][]} */ pairs, /** @type {string} */ prefix, /** @type {string} */ name) => {
      const longest = Math.max(0, ...pairs.map(([, value]) => value));
      const found = pairs.slice(0, NAMED).filter(([, value]) => value >= 0.1 * longest && value >= 0.01 * length);
      return found.length ? [`${prefix} ${found.map(([one, value]) => `${name}${one} ${formatSeconds(value)}`).join(", ")}`] : [];
    };
    return [...named(waits.filter(([rank]) => rank >= 0), "waits for", "rank "), ...named(importing, "imports", "")].join("; ");
  }

  // Without the kinds that nobody has spent time in.
  /** @param {string} title @param {TableRow[]} every @returns {HTMLElement[]} */
  table(title, every) {
    const groups = alike(every, TIME_ROWS, ([, sums]) => sums, ([, , why]) => names(why)), left = groups.slice(TIME_ROWS).flat().flatMap(([ranks]) => ranks);
    const rows = groups.slice(0, TIME_ROWS).map((group) => merged(group));
    /** @param {any} sums */
    const most = Math.max(...rows.map(([, sums]) => sum(sums)));
    const kinds = PALETTE.kinds.map((_, kind) => kind).filter((kind) => rows.some(([, sums]) => sums[kind] > 0));
    const head = ["rank", "all", ...kinds.map((kind) => PALETTE.kinds[kind]), "for whom, and what"].map((text) => make("th", { scope: "col" }, text));
    const body = rows.map(([ranks, sums, why]) => make("tr", {}, make("th", { scope: "row" }, rowName(ranks)),
      ...[sum(sums), ...kinds.map((kind) => sums[kind])].map((value) => make("td", {}, formatSecondsLike(value, most))), make("td", {}, why)));
    const whys = rows.some(([, , why]) => why);
    if (!whys) {
      head.pop();
      for (const row of body) row.lastChild?.remove();
    }
    const table = make("table", { className: "ar-table ar-times", "aria-label": title }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
    table.classList.toggle("ar-whys", whys);
    const note = left.length ? [make("p", { className: "ar-note" }, `${formatRanks(left)} not in this table`)] : [];
    return [make("p", { className: "ar-caption" }, title), table, ...note];
  }
}
