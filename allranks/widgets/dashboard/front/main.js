// The widget: one store for each model, one tree of panels for each place it is shown.

const PANELS = [["members", MembersPanel], ["curves", GroupedCurves], ["parameters", ParallelPanel], ["timings", TimingsPanel],
  ["time", TimePanel], ["logs", LogsPanel]];
const ENSEMBLES = ["members", "parameters"];

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
  return make("section", { className: `ar-panel ar-panel-${name}`, "aria-label": name, hidden: true }, head, body);
}

function show(data, el) {
  const controls = new Controls(data), ranks = new RanksPanel(data);
  const panels = PANELS.map(([name, Panel]) => {
    const panel = new Panel(data);
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
  const theme = new MutationObserver(soon);
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
