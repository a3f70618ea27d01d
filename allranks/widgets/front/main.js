// The curves as a file, which goes where the browser puts what is downloaded.

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

function curvesAsCsv(data) {
  const second = data.noun === "member" ? "rank" : "member";
  const rows = [["name", data.noun, second, "step", "value"].join()];
  const before = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const series = [...data.series.values()].sort((a, b) =>
    before(a.name, b.name) || a.rank - b.rank || before(a.member, b.member));
  for (const { name, rank, member, steps, values, last } of series) {
    const head = [quoted(name), rank, quoted(member)].join();
    steps.forEach((step, i) => rows.push(`${head},${step},${values[i]}`));
    // Thinning may have taken the last one.
    if (steps.at(-1) !== last[0]) rows.push(`${head},${last.join()}`);
  }
  return `${rows.join("\n")}\n`;
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  make("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

// Controls: interrupt, and where each rank is now, while the cell runs; save, also after it.

class Controls {
  constructor(data) {
    this.data = data;
    this.status = make("span", { className: "ar-status", role: "status" });
    this.interrupt = this.button("Interrupt", "interrupt the cell; a second click kills the ranks", () => this.press());
    this.where = this.button("Where are they?", "show the line and the stack of every rank", () => {
      this.asked = true;
      data.send({ kind: "where" });
    });
    this.profile = this.button("Profile", "draw a flame graph of the next 5 seconds", () => data.send({ kind: "profile" }));
    this.profiled = make("p", { className: "ar-note ar-profiled", role: "status" });
    this.save = this.button("Save", "download the curves as CSV", () => download("curves.csv", curvesAsCsv(data)));
    this.stacks = make("div", { className: "ar-where", hidden: true, role: "group", "aria-label": "where each rank is now" });
    this.stop = this.button("Stop all", "stop running and waiting members; finished ones stay", () => {
      this.stop.classList.add("ar-pressed");
      data.send({ kind: "stop", what: null });
    });
    this.bar = make("div", { className: "ar-track ar-progress", role: "progressbar", "aria-label": "members that have ended",
      "aria-valuemin": 0 });
    this.element = make("div", {},
      make("div", { className: "ar-head" }, this.status, this.stop, this.interrupt, this.where, this.profile, this.save),
      this.bar, this.profiled, this.stacks);
  }

  button(text, title, act) {
    const element = make("button", { type: "button", className: "ar-button", title }, text);
    element.addEventListener("click", act);
    return element;
  }

  // The server interrupts the kernel, however busy it is; elsewhere the kernel does it itself.
  press() {
    const kernel = this.data.model?.widget_manager?.kernel;
    if (kernel?.interrupt) kernel.interrupt();
    else this.data.send({ kind: "interrupt" });
    this.interrupt.classList.add("ar-pressed");
  }

  draw() {
    const { ended } = this.data;
    this.bar.hidden = !this.data.members.size;
    this.stop.hidden = this.bar.hidden || ended;
    this.interrupt.hidden = this.where.hidden = ended || Boolean(this.data.watched);
    this.profile.hidden = ended || !this.data.profiles;
    put(this.profiled, this.data.profiled ?? "");
    this.profiled.hidden = !this.data.profiled;
    this.save.hidden = !this.data.series.size;
    if (!this.bar.hidden) this.drawBar([...this.data.members.values()].map(({ state }) => state));
    const elapsed = Math.max(0, Math.floor((Date.now() - this.data.began) / 1000));
    const who = this.data.members.size ? this.data.ensemble.said
      : `${formatRanks([...this.data.ranks.keys()])}: ${this.data.said}`;
    const took = ended ? formatSeconds(this.data.elapsed) : formatSeconds(elapsed || 0).replace("0 µs", "0 s");
    put(this.status, this.data.title ? this.data.title : (this.data.members.size && !ended ? `${who} · ${took} so far` : `${who}, ${took}`));
    this.status.title = this.status.textContent;
    if (this.asked && this.data.where.size) this.drawStacks();
  }

  drawBar(states) {
    const failed = states.filter((state) => state === "failed").length;
    const ended = states.filter((state) => state !== "waiting" && state !== "running").length;
    const said = `${ended} of ${states.length} ended${failed ? `, ${failed} failed` : ""}`;
    if (said === this.ended) return;
    this.ended = said;
    this.bar.title = said;
    this.bar.setAttribute("aria-valuemax", states.length);
    this.bar.setAttribute("aria-valuenow", ended);
    this.bar.setAttribute("aria-valuetext", said);
    this.bar.replaceChildren(part("done", (ended - failed) / states.length), part("lost", failed / states.length));
  }

  drawStacks() {
    const rows = [...this.data.where].sort((a, b) => a[0] - b[0]);
    const said = JSON.stringify(rows);
    if (said === this.drawn) return;
    this.drawn = said;
    this.stacks.hidden = false;
    this.stacks.replaceChildren(...rows.map(([rank, { line, activity, text }]) =>
      make("details", {},
        make("summary", {}, make("b", {}, `rank ${rank} `), `${line ?? ""} ${activity ? `(${activity})` : ""}`),
        make("pre", {}, text ?? "…"))),
      this.button("Close", "close", () => { this.stacks.hidden = true; this.asked = false; this.data.where.clear(); }));
  }
}

// After the cell: the same view stays, of what this page has seen, or else of what the notebook has kept.

const KEPT_VIEWS = 20;

// The output that replaces a live view shows it on; `false` where this page does not know all of it.
function offer(data, css) {
  const views = (globalThis.allranksViews ??= new Map());
  views.set(data.key, (box) => {
    if (!data.ended || data.missed) return false;
    settle(data, box, css);
    return true;
  });
  for (const key of [...views.keys()].slice(0, -KEPT_VIEWS)) views.delete(key);
}

// Puts a view where the picture is that stands there without scripts.
function settle(data, box, css) {
  box.replaceChildren(make("style", { textContent: css }));
  show(data, box);
}

// Makes a view of what the notebook has kept.
export function revive(box, { curves, logs, ...state }, css) {
  const data = new Data({ ...state, curves: [] });
  data.apart = state.apart;
  for (const { steps, values, ...head } of curves) {
    const numbers = values.map((value) => value ?? NaN);
    data.series.set(head.number, { ...head, steps: steps.slice(0, -1), values: numbers.slice(0, -1),
      last: [steps.at(-1), numbers.at(-1)] });
  }
  for (const { rank, skipped, pieces } of logs) {
    data.lines.feed(rank, new Uint8Array(), [], skipped);
    for (const [text, isError] of pieces) {
      const bytes = new TextEncoder().encode(text);
      data.lines.feed(rank, bytes, isError ? [[0, bytes.length]] : [], 0);
    }
  }
  data.end();
  settle(data, box, css);
  offer(data, css);
}

// The widget: one store for each model, one tree of panels for each place it is shown.

const PANELS = [["members", MembersPanel], ["curves", GroupedCurves], ["parameters", ParallelPanel], ["timings", TimingsPanel],
  ["time", TimePanel], ["logs", LogsPanel]];
const ENSEMBLES = ["members", "parameters"];

// A section that was added outside of this package: the kernel sends its tables and pictures as HTML.
class AddedPanel {
  constructor(data, title) {
    this.data = data;
    this.title = title;
    this.element = make("div", { className: "ar-memory" });
  }

  get filled() { return Boolean(this.data.sections.get(this.title)); }

  draw() { putHtml(this.element, this.data.sections.get(this.title)); }
}

function section(name, panel, data) {
  const body = make("div", { className: "ar-body", id: `ar-${Math.random().toString(36).slice(2)}` }, panel.element);
  body.hidden = (data.settings.closed ?? []).includes(name);
  const head = make("button", { type: "button", className: "ar-title", "aria-expanded": String(!body.hidden), "aria-controls": body.id }, name);
  head.addEventListener("click", () => {
    body.hidden = !body.hidden;
    head.setAttribute("aria-expanded", String(!body.hidden));
    const others = (data.settings.closed ?? []).filter((one) => one !== name);
    data.set({ closed: body.hidden ? [...others, name] : others });
    panel.draw();
  });
  // Not a <section>: a page with many panels would have many landmarks of the same name.
  return make("div", { className: `ar-panel ar-panel-${name.replace(/\W+/g, "-")}`, role: "group", "aria-label": name, hidden: true }, head, body);
}

function show(data, el) {
  const controls = new Controls(data), ranks = new RanksPanel(data);
  const added = [...data.sections.keys()].map((title) => [title, AddedPanel]);
  const panels = [...PANELS, ...added].map(([name, Panel]) => {
    const panel = new Panel(data, name);
    return { name, panel, element: section(name, panel, data) };
  });
  const root = make("div", { className: "ar-dashboard", role: "group", "aria-label": "live view of the ranks" },
    controls.element, ranks.element, ...panels.map(({ element }) => element));
  // JupyterLab's own keys must not act on the cell while somebody types or scrolls here.
  root.dataset.lmSuppressShortcuts = "true";
  el.append(root);

  let waiting = 0;
  const draw = () => {
    waiting = 0;
    controls.draw();
    ranks.draw();
    for (const { name, panel, element } of panels) {
      element.hidden = !(panel.filled || (data.mode === "full" && !ENSEMBLES.includes(name)));
      if (!element.hidden && !element.lastElementChild.hidden) panel.draw();
    }
  };
  const soon = () => { waiting ||= requestAnimationFrame(draw); };
  data.views.add(soon);
  const clock = setInterval(() => { if (!data.ended) soon(); }, 1000);
  const sizes = new ResizeObserver(soon);
  sizes.observe(root);
  // One picture later: JupyterLab hides everything when it changes its theme, and what is hidden has no size.
  const theme = new MutationObserver(() => requestAnimationFrame(soon));
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  // At once: what replaces a live view must be as high in the very next picture.
  draw();
  return () => {
    data.views.delete(soon);
    clearInterval(clock);
    cancelAnimationFrame(waiting);
    sizes.disconnect();
    theme.disconnect();
  };
}

export default () => {
  let data = null;
  return {
    // Not in render(): what comes before the first view is there would be lost.
    initialize({ model }) {
      data = new Data(model.get("state"), model);
      offer(data, model.get("_css"));
    },
    render({ el }) { return show(data, el); },
  };
};
