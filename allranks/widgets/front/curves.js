// Curves: one chart a metric, per rank or as mean and spread, with log scale and smoothing.

import { EDGE, MAX_MARKED_STEPS, blank, drawAxes, drawBand, drawLine, drawMarks, nearest, scales, smooth, spread } from "./chart.js";
import { Choice, isDark, make, put } from "./elements.js";
import { RANK_COLOURS, colour, formatNumber, formatRanks } from "./format.js";
import { dashed, groupsOf, parametersOf } from "./groups.js";

const MANY_CURVES = 16;

/** @typedef {import("./types").Series} Series */
/** @typedef {import("./types").SeriesLine} SeriesLine */
/** @typedef {import("./types").Column} Column */
/** @typedef {import("./types").Scale} Scale */

class CurvesPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    /** @type {Map<string, Chart>} */
    this.charts = new Map();
    this.said = "";
    const { log = false, mean = false, smoothing = 0 } = data.settings;
    this.smoothing = smoothing;
    this.log = make("input", { type: "checkbox", checked: log });
    this.mean = make("input", { type: "checkbox", checked: mean });
    this.slider = make("input", { type: "range", min: 0, max: 99, value: 100 * smoothing });
    this.legend = make("div", { className: "ar-legend" });
    this.grid = make("div", { className: "ar-charts" });
    this.element = make("div", {},
      make("div", { className: "ar-bar" },
        make("label", {}, this.mean, " mean and spread"),
        make("label", {}, this.log, " log scale"),
        make("label", {}, "smoothing ", this.slider),
        this.legend),
      this.grid);
    // Before the drawing that the same click leads to, which sets what nobody has chosen.
    this.mean.addEventListener("input", () => data.set({ mean: this.mean.checked }));
    for (const control of [this.log, this.mean, this.slider]) {
      control.addEventListener("input", () => {
        this.smoothing = this.slider.valueAsNumber / 100;
        data.set({ log: this.log.checked, smoothing: this.smoothing });
        this.draw();
      });
    }
  }

  get filled() { return this.data.series.size > 0; }

  draw() {
    const owners = this.data.owners(), dark = isDark();
    if (this.data.settings.mean === undefined) this.mean.checked = owners.size > MANY_CURVES;
    /** @type {Map<string, Series[]>} */
    const metrics = new Map();
    for (const series of this.data.series.values()) metrics.set(series.name, [...metrics.get(series.name) ?? [], series]);
    for (const [name, list] of metrics) {
      let chart = this.charts.get(name);
      if (!chart) {
        this.charts.set(name, chart = this.chart(name));
        this.grid.append(chart.element);
      }
      list.sort((a, b) => a.rank - b.rank || (a.member < b.member ? -1 : 1));
      chart.draw(list, owners, dark);
    }
    this.drawLegend(owners, dark);
  }

  /** @param {string} name */
  chart(name) { return new Chart(name, this); }

  /** @param {Map<string, number>} owners @param {boolean} dark */
  drawLegend(owners, dark) {
    const said = this.mean.checked
      ? `mean, minimum and maximum of ${owners.size}` : [...owners.keys()].join() + dark;
    if (said === this.said) return;
    this.said = said;
    if (this.mean.checked || owners.size > 2 * MANY_CURVES) {
      this.legend.replaceChildren(this.mean.checked ? said : `${owners.size} curves`);
      return;
    }
    this.legend.replaceChildren(...[...owners].map(([owner, index]) => {
      const mark = make("i", { "aria-hidden": "true", className: "ar-swatch" });
      mark.style.background = colour(index, dark);
      return make("span", {}, mark, `${this.data.noun} ${owner.trim()}`);
    }));
  }
}

/** @param {Series} one @param {Series} other */
const coincide = (one, other) => one.values.length === other.values.length && one.last[1] === other.last[1]
  && one.values.every((value, i) => value === other.values[i] && one.steps[i] === other.steps[i]);

class Chart {
  /** @param {string} name @param {CurvesPanel} panel */
  constructor(name, panel) {
    this.name = name;
    this.panel = panel;
    /** @type {number | null} */
    this.at = null;
    /** @type {Series[] | null} */
    this.list = null;
    /** @type {Map<string, number>} */
    this.owners = new Map();
    this.dark = false;
    this.canvas = make("canvas", { tabIndex: 0, role: "img" });
    this.tip = make("div", { className: "ar-tip", hidden: true });
    this.note = make("span", { className: "ar-note" });
    this.broken = make("span", { className: "ar-problem" });
    this.element = make("figure", { className: "ar-chart" },
      make("figcaption", {}, make("span", {}, name), this.note, this.broken), this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const by = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      this.point((this.at ?? this.canvas.clientWidth / 2) + by * (event.shiftKey ? 40 : 8));
    });
  }

  /** @param {number | null} pixel */
  point(pixel) {
    const width = this.canvas.clientWidth;
    this.at = pixel === null ? null : Math.max(EDGE.left, Math.min(width - EDGE.right, pixel));
    if (this.list) this.draw(this.list, this.owners, this.dark);
  }

  /** @param {Series[]} list @param {Map<string, number>} owners @param {boolean} dark */
  draw(list, owners, dark) {
    this.list = list;
    this.owners = owners;
    this.dark = dark;
    const { canvas, panel } = this, width = canvas.clientWidth, height = canvas.clientHeight;
    const style = getComputedStyle(canvas), paint = blank(canvas);
    if (!paint) return;
    const log = panel.log.checked, selected = panel.data.selected;
    const lines = list.map((series) => ({
      series,
      xs: [...series.steps, series.last[0]],
      ys: smooth([...series.values, series.last[1]], panel.smoothing),
    }));
    const band = panel.mean.checked ? spread(lines) : [];
    const drawn = band.length ? lines.filter((line) => line.series.rank === selected) : lines;
    const marks = [...new Set(list.flatMap((one) => (one.broken ? [one.broken[0]] : [])))].slice(0, MAX_MARKED_STEPS);
    const scale = scales(band.length ? drawn : lines, band, width, height, log, marks);
    this.annotate(list);
    this.describe(list);
    if (!scale) return;
    const grid = style.getPropertyValue("--ar-line"), ink = style.color;
    drawAxes(paint, scale, width, height, log, ink, grid);
    drawMarks(paint, scale, marks, height, style.getPropertyValue("--ar-error"));
    if (band.length) {
      drawBand(paint, scale, band, colour(0, dark), log);
      const line = { colour: colour(0, dark), alpha: 1, width: 2, dash: [] };
      drawLine(paint, scale, band.map((c) => c.x), band.map((c) => c.mean), line, log);
    }
    for (const { series, xs, ys } of drawn) {
      const index = owners.get(`${series.rank} ${series.member}`) ?? 0;
      const chosen = selected === null || selected === series.rank;
      drawLine(paint, scale, xs, ys, {
        colour: band.length ? ink : colour(index, dark),
        alpha: chosen ? 1 : 0.2,
        width: selected === series.rank ? 2.5 : 1.5,
        dash: [[], [6, 3], [2, 2], [8, 3, 2, 3]][Math.floor(index / RANK_COLOURS) % 4],
      }, log);
    }
    this.drawTip(paint, scale, lines, band, height, ink);
  }

  /** @param {CanvasRenderingContext2D} paint @param {Scale} scale @param {SeriesLine[]} lines @param {Column[]} band @param {number} height @param {string} ink */
  drawTip(paint, scale, lines, band, height, ink) {
    const { panel } = this;
    this.tip.hidden = this.at === null;
    if (this.at === null) return;
    const x = scale.step(this.at);
    /** @type {[string, number][]} */
    let rows;
    let step;
    if (band.length) {
      const column = band[nearest(band.map((c) => c.x), x)];
      step = Math.round(column.x);
      rows = [["mean", column.mean], ["minimum", column.low], ["maximum", column.high]];
    } else {
      const picks = lines.map(({ series, xs, ys }) => {
        const i = nearest(xs, x);
        return { series, step: xs[i], value: ys[i] };
      });
      step = picks[0].step;
      rows = picks.slice(0, MANY_CURVES).map(({ series, value }) =>
        [`${panel.data.noun} ${series.rank} ${series.member}`.trim(), value]);
    }
    const at = Math.round(scale.x(step)) + 0.5;
    paint.strokeStyle = ink;
    paint.globalAlpha = 0.6;
    paint.beginPath(); paint.moveTo(at, EDGE.top); paint.lineTo(at, height - EDGE.bottom); paint.stroke();
    paint.globalAlpha = 1;
    this.tip.replaceChildren(make("b", {}, `step ${formatNumber(step)}`),
      ...rows.map(([who, value]) => make("div", {}, `${who}  ${formatNumber(value)}`)));
    this.tip.style.left = at < this.canvas.clientWidth / 2 ? `${at + 10}px` : "";
    this.tip.style.right = at < this.canvas.clientWidth / 2 ? "" : `${this.canvas.clientWidth - at + 10}px`;
  }

  // What stands beside the name.
  /** @param {Series[]} list */
  annotate(list) {
    // What the notebook has kept is rounded; that its curves differ was found before.
    const same = list.length > 1 && !this.panel.data.apart?.includes(this.name) && list.every((one) => coincide(one, list[0]));
    put(this.note, same ? `${list.length} curves coincide` : "");
    const broken = new Map();
    for (const { rank, broken: found } of list) {
      if (!found) continue;
      const what = `${found[1]} at step ${formatNumber(found[0])}`;
      broken.set(what, [...(broken.get(what) ?? []), rank]);
    }
    put(this.broken, [...broken].map(([what, who]) =>
      `${formatRanks(who, this.panel.data.noun)}: ${what}`).join("; "));
  }

  // What a screen reader says; also what tests read.
  /** @param {Series[]} list */
  describe(list) {
    const lasts = list.slice(0, MANY_CURVES).map(({ rank, member, last }) =>
      `${this.panel.data.noun} ${rank} ${member}`.trim() + ` ${formatNumber(last[1])} at step ${formatNumber(last[0])}`);
    this.canvas.setAttribute("aria-label", `${this.name}: ${lasts.join(", ")}`);
  }
}

// Curves of an ensemble, told apart by a parameter.

export class GroupedCurves extends CurvesPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    super(data);
    this.said = "";
    /** @type {import("./types").Groups | null} */
    this.groups = null;
    this.by = new Choice("by", "each member", () => this.draw());
    this.legend.before(this.by.element);
  }

  draw() {
    const members = [...this.data.members.values()], names = parametersOf(members);
    this.by.element.hidden = !names.length;
    // Where curves are too many to be told apart, they are grouped unasked.
    const many = this.data.owners().size > MANY_CURVES;
    this.by.offer(names, many ? names[0] : "");
    this.groups = this.by.value ? groupsOf(members, this.by.value) : null;
    super.draw();
  }

  /** @param {string} name */
  chart(name) { return new GroupedChart(name, this); }

  /** @param {Map<string, number>} owners @param {boolean} dark */
  drawLegend(owners, dark) {
    if (!this.groups) { super.drawLegend(owners, dark); return; }
    const { name, labels, counts } = this.groups, said = JSON.stringify([this.groups.name, labels, counts, this.mean.checked, dark]);
    if (said === this.said) return;
    this.said = said;
    const what = this.mean.checked ? ["mean between minimum and maximum of"] : [];
    this.legend.replaceChildren(...what, ...labels.map((label, index) => {
      const mark = make("i", { "aria-hidden": "true", className: "ar-dashes" }, this.mean.checked ? dashed(index)[1] : "━━");
      mark.style.color = colour(index, dark);
      return make("span", {}, mark, `${name}=${label} (${counts[index]})`);
    }));
  }
}

class GroupedChart extends Chart {
  /** @param {string} name @param {GroupedCurves} panel */
  constructor(name, panel) {
    super(name, panel);
    this.grouped = panel;
  }

  /** @param {Series[]} list @param {Map<string, number>} owners @param {boolean} dark */
  draw(list, owners, dark) {
    const { groups, mean } = this.grouped;
    if (!groups) { super.draw(list, owners, dark); return; }
    /** @param {number} rank */
    const group = (rank) => groups.of.get(rank) ?? groups.labels.length;
    const mapped = new Map([...owners.keys()].map((owner) => [owner, group(parseInt(owner, 10))]));
    if (!mean.checked) { super.draw(list, mapped, dark); return; }
    super.draw([], mapped, dark); // an empty chart of the right size
    this.list = list;
    this.annotate(list);
    this.drawBands(list, groups, dark);
  }

  /** @param {Series[]} list @param {import("./types").Groups} groups @param {boolean} dark */
  drawBands(list, groups, dark) {
    const { canvas, panel } = this, width = canvas.clientWidth, height = canvas.clientHeight;
    const log = panel.log.checked, paint = canvas.getContext("2d"), style = getComputedStyle(canvas);
    if (!paint) return;
    const lines = list.map((series) => ({ series, xs: [...series.steps, series.last[0]],
      ys: smooth([...series.values, series.last[1]], panel.smoothing) }));
    const bands = groups.labels.map((label, index) => ({ label, index,
      band: spread(lines.filter(({ series }) => groups.of.get(series.rank) === index)) })).filter(({ band }) => band.length);
    const scale = width ? scales([], bands.flatMap(({ band }) => band), width, height, log) : null;
    this.describeBands(groups, bands);
    if (!scale) return;
    drawAxes(paint, scale, width, height, log, style.color, style.getPropertyValue("--ar-line"));
    for (const { index, band } of bands) drawBand(paint, scale, band, colour(index, dark), log, 0.15);
    for (const { index, band } of bands) {
      drawLine(paint, scale, band.map((c) => c.x), band.map((c) => c.mean),
        { colour: colour(index, dark), alpha: 1, width: 2, dash: dashed(index)[0] }, log);
    }
    for (const { series, xs, ys } of lines) {
      if (series.rank === panel.data.selected) drawLine(paint, scale, xs, ys, { colour: style.color, alpha: 1, width: 2.5, dash: [] }, log);
    }
    this.tip.hidden = this.at === null || !bands.length;
    if (this.at === null || !bands.length) return;
    this.drawTip(paint, scale, [], bands[0].band, height, style.color);
    const x = scale.step(this.at), rows = bands.map(({ label, band }) => {
      const { mean, low, high } = band[nearest(band.map((c) => c.x), x)];
      return make("div", {}, `${groups.name}=${label}  ${formatNumber(mean)}  (${formatNumber(low)} to ${formatNumber(high)})`);
    });
    this.tip.replaceChildren(...[...this.tip.children].slice(0, 1), ...rows);
  }

  // What a screen reader says: where each group stands now.
  /** @param {import("./types").Groups} groups @param {{ label: string, index: number, band: Column[] }[]} bands */
  describeBands(groups, bands) {
    const said = bands.map(({ label, index, band }) => {
      const { mean, low, high } = band[band.length - 1];
      return `${groups.name}=${label}, ${groups.counts[index]} members: mean ${formatNumber(mean)}, ${formatNumber(low)} to ${formatNumber(high)}`;
    });
    this.canvas.setAttribute("aria-label", `${this.name}: ${said.join("; ")}`);
  }
}
