// Curves: one chart a metric, per rank or as mean and spread, with log scales, smoothing and zoom.

import {
  EDGE, blank, drawAxes, drawBand, drawLine, drawMarks, drawNames, nearest, scales,
} from "./chart.js";
import { Choice, isDark, make, put, shape } from "./elements.js";
import { colour, formatNumber, formatRanks } from "./format.js";
import { groupsOf, parametersOf } from "./groups.js";
import { PALETTE } from "./palette.js";
import { MANY_CURVES, groupDash, lastValues, lineDash, plotOf } from "./plot.js";

/** @typedef {import("./types").Series} Series */
/** @typedef {import("./types").Plot} Plot */

// In the legend and beside values: the colour, and where that is not enough the dashes.
/** @param {number} index @param {number} dash @param {boolean} dark */
function mark(index, dash, dark) {
  if (!dash) {
    const swatch = make("i", { "aria-hidden": "true", className: "ar-swatch" });
    swatch.style.background = colour(index, dark);
    return swatch;
  }
  return shape("svg", { class: "ar-dashed", width: 24, height: 8, "aria-hidden": "true" },
    shape("path", { d: "M0 4H24", stroke: colour(index, dark), "stroke-width": 2.5, "stroke-dasharray": PALETTE.dashes[dash].join(" ") }));
}

export class CurvesPanel {
  /** @param {import("./data.js").Data} data */
  constructor(data) {
    this.data = data;
    /** @type {Map<string, Chart>} */
    this.charts = new Map();
    /** @type {import("./types").Groups | null} */
    this.groups = null;
    this.said = "";
    // Where the pointer is: the chart and the step, which all charts show.
    /** @type {{ chart: Chart, step: number } | null} */
    this.hover = null;
    this.waiting = 0;
    const { mean = false, smoothing = 0 } = data.settings;
    this.mean = make("input", { type: "checkbox", checked: mean });
    this.slider = make("input", { type: "range", min: 0, max: 99, value: 100 * smoothing });
    this.by = new Choice("by", "each member", () => this.draw());
    this.whole = make("button", { type: "button", className: "ar-small", hidden: true }, "all steps");
    this.whole.addEventListener("click", () => this.zoom(null));
    this.legend = make("div", { className: "ar-legend" });
    this.grid = make("div", { className: "ar-charts" });
    this.element = make("div", {},
      make("div", { className: "ar-bar" },
        make("label", {}, this.mean, " mean and spread"),
        make("label", {}, "smoothing ", this.slider),
        this.whole, this.by.element, this.legend),
      this.grid);
    // Before the drawing that the same click leads to, which sets what nobody has chosen.
    this.mean.addEventListener("input", () => data.set({ mean: this.mean.checked }));
    this.slider.addEventListener("input", () => data.set({ smoothing: this.slider.valueAsNumber / 100 }));
    for (const control of [this.mean, this.slider]) control.addEventListener("input", () => this.draw());
  }

  get filled() { return this.data.series.size > 0; }

  // Which axes of a chart are logarithmic: each chart has its own switches.
  /** @param {string} name */
  logOf(name) {
    const own = this.data.settings.axes?.[name];
    return { x: own?.x ?? false, y: own?.y ?? false };
  }

  /** @param {string} name @param {"x" | "y"} axis */
  turn(name, axis) {
    const { axes = {} } = this.data.settings;
    this.data.set({ axes: { ...axes, [name]: { ...axes[name], [axis]: !this.logOf(name)[axis] } } });
    this.draw();
  }

  // The same steps in all charts; all of them for null.
  /** @param {[number, number] | null} steps */
  zoom(steps) {
    this.data.set({ steps });
    this.draw();
  }

  /** @param {Chart | null} chart @param {number} [step] */
  point(chart, step = NaN) {
    this.hover = chart && { chart, step };
    this.waiting ||= requestAnimationFrame(() => {
      this.waiting = 0;
      for (const one of this.charts.values()) one.paint();
    });
  }

  draw() {
    const owners = this.data.owners(), dark = isDark(), { settings, selected, noun } = this.data;
    const members = [...this.data.members.values()], names = parametersOf(members);
    this.by.element.hidden = !names.length;
    // Where curves are too many to be told apart, they are grouped unasked.
    this.by.offer(names, owners.size > MANY_CURVES ? names[0] : "");
    this.groups = this.by.value ? groupsOf(members, this.by.value) : null;
    if (settings.mean === undefined) this.mean.checked = owners.size > MANY_CURVES;
    this.whole.hidden = !settings.steps;
    /** @type {Map<string, Series[]>} */
    const metrics = new Map();
    for (const series of this.data.series.values()) metrics.set(series.name, [...metrics.get(series.name) ?? [], series]);
    for (const [name, list] of metrics) {
      let chart = this.charts.get(name);
      if (!chart) {
        this.charts.set(name, chart = new Chart(name, this));
        this.grid.append(chart.element);
      }
      list.sort((a, b) => a.rank - b.rank || (a.member < b.member ? -1 : 1));
      const choice = { owners, noun, groups: this.groups, mean: this.mean.checked, smoothing: this.slider.valueAsNumber / 100,
        selected, log: this.logOf(name), range: settings.steps ?? null };
      chart.show(plotOf(name, list, choice), list, dark);
    }
    this.drawLegend(owners, dark);
  }

  /** @param {Map<string, number>} owners @param {boolean} dark */
  drawLegend(owners, dark) {
    const { groups, mean: { checked: mean } } = this, { noun, selected } = this.data;
    const said = JSON.stringify([groups && [groups.name, groups.labels, groups.counts], mean, dark, selected, [...owners.keys()]]);
    if (said === this.said) return;
    this.said = said;
    if (groups) {
      const what = mean ? ["mean between minimum and maximum of"] : [];
      this.legend.replaceChildren(...what, ...groups.labels.map((label, index) =>
        make("span", {}, mark(index, mean ? groupDash(index) : 0, dark), `${groups.name}=${label} (${groups.counts[index]})`)));
    } else if (mean) {
      this.legend.replaceChildren(`mean, minimum and maximum of ${owners.size}`);
    } else if (owners.size > 2 * MANY_CURVES) {
      this.legend.replaceChildren(`${owners.size} curves`);
    } else {
      this.legend.replaceChildren(...[...owners].map(([owner, index]) => this.owner(owner, index, selected, dark, noun)));
    }
  }

  // An owner in the legend, which selects it as its tile does.
  /** @param {string} owner @param {number} index @param {import("./types").Selected} selected @param {boolean} dark @param {string} noun */
  owner(owner, index, selected, dark, noun) {
    const rank = parseInt(owner, 10);
    const element = make("button", { type: "button", className: "ar-owner", "aria-pressed": String(rank === selected) },
      mark(index, lineDash(index), dark), `${noun} ${owner.trim()}`);
    element.addEventListener("click", () => this.data.select(rank));
    return element;
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
    /** @type {Plot | null} */
    this.plot = null;
    /** @type {import("./types").Scale | null} */
    this.scale = null;
    this.dark = false;
    // Where the pointer has gone down, to zoom in, and the scale there: that of a cell that runs changes.
    /** @type {number | null} */
    this.from = null;
    /** @type {import("./types").Scale | null} */
    this.held = null;
    this.canvas = make("canvas", { tabIndex: 0, role: "img", title: "drag over some steps to zoom in, double-click to show all" });
    this.tip = make("div", { className: "ar-tip", hidden: true });
    this.picked = make("div", { className: "ar-picked", hidden: true });
    this.note = make("span", { className: "ar-note" });
    this.broken = make("span", { className: "ar-problem" });
    this.lasts = make("span", { className: "ar-lasts" });
    this.axes = { x: this.axis("x"), y: this.axis("y") };
    this.element = make("figure", { className: "ar-chart" },
      make("figcaption", {}, make("span", { className: "ar-name" }, name), this.note, this.broken, this.axes.x, this.axes.y, this.lasts), this.canvas, this.picked, this.tip);
    this.listen(this.canvas);
  }

  /** @param {"x" | "y"} axis */
  axis(axis) {
    const button = make("button", { type: "button", className: "ar-axis", "aria-label": `log ${axis} of ${this.name}` }, `log ${axis}`);
    button.addEventListener("click", () => this.panel.turn(this.name, axis));
    return button;
  }

  /** @param {HTMLCanvasElement} canvas */
  listen(canvas) {
    canvas.addEventListener("pointermove", ({ offsetX }) => { this.pick(offsetX); this.point(offsetX); });
    canvas.addEventListener("pointerleave", () => this.panel.point(null));
    canvas.addEventListener("blur", () => this.panel.point(null));
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.from = event.offsetX;
      this.held = this.scale;
    });
    canvas.addEventListener("pointerup", ({ offsetX }) => {
      const { from, held: scale } = this, [a, b] = [from ?? offsetX, offsetX].sort((one, other) => one - other);
      this.drop();
      if (!scale || b - a < 4) return;
      const [first, last] = [a, b].map((at) => Math.max(scale.first, Math.min(scale.last, scale.step(at))));
      // Beside the axes there are no steps.
      if (first < last) this.panel.zoom([first, last]);
    });
    canvas.addEventListener("pointercancel", () => this.drop());
    canvas.addEventListener("dblclick", () => this.panel.zoom(null));
    canvas.addEventListener("keydown", (event) => {
      const by = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
      if (!by && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      if (!by) { this.panel.zoom(null); return; }
      const { hover } = this.panel, at = hover && this.scale ? this.scale.x(hover.step) : canvas.clientWidth / 2;
      this.point(at + by * (event.shiftKey ? 40 : 8));
    });
  }

  /** @param {number} pixel */
  pick(pixel) {
    if (this.from === null) return;
    const [a, b] = [this.from, pixel].sort((one, other) => one - other);
    Object.assign(this.picked.style, { left: `${a}px`, width: `${b - a}px`, top: `${this.canvas.offsetTop}px`, height: `${this.canvas.clientHeight - EDGE.bottom}px` });
    this.picked.hidden = b - a < 4;
  }

  drop() {
    this.from = null;
    this.picked.hidden = true;
  }

  /** @param {number} pixel */
  point(pixel) {
    const { scale } = this;
    if (scale) this.panel.point(this, scale.step(Math.max(scale.left, Math.min(scale.right, pixel))));
  }

  /** @param {Plot} plot @param {Series[]} list @param {boolean} dark */
  show(plot, list, dark) {
    this.plot = plot;
    this.dark = dark;
    for (const axis of /** @type {const} */ (["x", "y"])) this.axes[axis].setAttribute("aria-pressed", String(plot.log[axis]));
    this.annotate(plot, list);
    this.describe(plot, list);
    this.paint();
  }

  paint() {
    const { canvas, plot, dark } = this, style = getComputedStyle(canvas), paint = plot && blank(canvas);
    if (!paint) return;
    const width = canvas.clientWidth, height = canvas.clientHeight, ink = style.color;
    const scale = this.scale = scales(plot, width, height);
    if (!scale) return;
    drawAxes(paint, scale, plot, width, height, ink, style.getPropertyValue("--ar-line"));
    drawMarks(paint, scale, plot.marks, height, style.getPropertyValue("--ar-error"));
    for (const { columns, index } of plot.bands) drawBand(paint, scale, columns, colour(index, dark), plot.bands.length > 1 ? 0.15 : 0.25);
    for (const { columns, index, dash } of plot.bands) {
      drawLine(paint, scale, columns.map((c) => c.x), columns.map((c) => c.mean), { colour: colour(index, dark), alpha: 1, width: 2, dash: PALETTE.dashes[dash] });
    }
    for (const { xs, ys, index, dash, faint, strong } of plot.lines) {
      drawLine(paint, scale, xs, ys, { colour: plot.bands.length ? ink : colour(index, dark), alpha: faint ? 0.2 : 1, width: strong ? 2.5 : 1.5, dash: PALETTE.dashes[dash] });
    }
    if (plot.named) drawNames(paint, scale, plot, (index) => colour(index, dark));
    this.drawTip(paint, scale, plot, ink);
  }

  /** @param {CanvasRenderingContext2D} paint @param {import("./types").Scale} scale @param {Plot} plot @param {string} ink */
  drawTip(paint, scale, plot, ink) {
    const { hover } = this.panel;
    this.tip.hidden = hover?.chart !== this;
    if (!hover) return;
    const [first] = [...plot.bands.map(({ columns }) => columns.map((c) => c.x)), ...plot.lines.map(({ xs }) => xs)];
    const step = first ? first[nearest(first, hover.step)] : hover.step;
    const at = Math.round(scale.x(hover.chart === this ? step : hover.step)) + 0.5;
    if (at < scale.left || at > scale.right) return;
    paint.strokeStyle = ink;
    paint.globalAlpha = 0.6;
    paint.beginPath(); paint.moveTo(at, EDGE.top); paint.lineTo(at, this.canvas.clientHeight - EDGE.bottom); paint.stroke();
    paint.globalAlpha = 1;
    if (this.tip.hidden) return;
    const shown = plot.bands.length ? Math.round(step) : step;
    this.tip.replaceChildren(make("b", {}, `step ${formatNumber(shown)}`), ...this.values(plot, hover.step).map(([sign, who, value]) =>
      make("div", {}, ...sign, `${who}  ${value}`)));
    // Below the last values, which may be on several lines.
    this.tip.style.top = `${this.canvas.offsetTop}px`;
    const left = at < this.canvas.clientWidth / 2;
    this.tip.style.left = left ? `${at + 10}px` : "";
    this.tip.style.right = left ? "" : `${this.canvas.clientWidth - at + 10}px`;
  }

  // The marks, names and values at a step.
  /** @param {Plot} plot @param {number} step @returns {[Element[], string, string][]} */
  values({ bands, lines }, step) {
    if (!bands.length) {
      return lines.slice(0, MANY_CURVES).map(({ label, index, dash, xs, ys }) => [[mark(index, dash, this.dark)], label, formatNumber(ys[nearest(xs, step)])]);
    }
    const at = bands.map(({ columns }) => columns[nearest(columns.map((c) => c.x), step)]);
    if (!this.panel.groups) return [[[], "mean", formatNumber(at[0].mean)], [[], "minimum", formatNumber(at[0].low)], [[], "maximum", formatNumber(at[0].high)]];
    return bands.map(({ label, index, dash }, i) =>
      [[mark(index, dash, this.dark)], label, `${formatNumber(at[i].mean)}  (${formatNumber(at[i].low)} to ${formatNumber(at[i].high)})`]);
  }

  // What stands beside the name: what is wrong, and the last values.
  /** @param {Plot} plot @param {Series[]} list */
  annotate(plot, list) {
    // What the notebook has kept is rounded; that its curves differ was found before.
    const same = list.length > 1 && !this.panel.data.apart.includes(this.name) && list.every((one) => coincide(one, list[0]));
    put(this.note, same ? `${list.length} curves coincide` : "");
    const broken = new Map();
    for (const { rank, broken: found } of list) {
      if (!found) continue;
      const what = `${found[1]} at step ${formatNumber(Number(found[0]))}`;
      broken.set(what, [...(broken.get(what) ?? []), rank]);
    }
    put(this.broken, [...broken].map(([what, who]) =>
      `${formatRanks(who, this.panel.data.noun)}: ${what}`).join("; "));
    const few = lastValues(plot, same);
    const said = JSON.stringify([few.map(({ label, last, index, dash }) => [label, last, index, dash]), this.dark]);
    if (said === this.lasts.dataset.said) return;
    this.lasts.dataset.said = said;
    this.lasts.replaceChildren(...few.map(({ label, last, index, dash }) => make("span", { title: `${label}: the last value` },
      ...(few.length === 1 ? [] : [mark(index, dash, this.dark)]), `${label === "mean" ? "mean " : ""}${formatNumber(last)}`)));
  }

  // What a screen reader says; also what tests read.
  /** @param {Plot} plot @param {Series[]} list */
  describe({ bands }, list) {
    const { groups, data: { noun } } = this.panel;
    const said = groups && bands.length ? bands.map(({ label, count, columns }) => {
      const { mean, low, high } = columns[columns.length - 1];
      return `${label}, ${count} members: mean ${formatNumber(mean)}, ${formatNumber(low)} to ${formatNumber(high)}`;
    }).join("; ") : list.slice(0, MANY_CURVES).map(({ rank, member, last }) =>
      `${noun} ${rank} ${member}`.trim() + ` ${formatNumber(last[1])} at step ${formatNumber(last[0])}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.name}: ${said}`);
  }
}
