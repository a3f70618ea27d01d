// The view of one cell: its controls, its ranks and its sections.

import { AddedPanel } from "./added.js";
import { Controls } from "./controls.js";
import { CurvesPanel } from "./curves.js";
import { make } from "./elements.js";
import { LogsPanel } from "./logs.js";
import { MembersPanel } from "./members.js";
import { ParallelPanel } from "./parallel.js";
import { RanksPanel } from "./ranks.js";
import { TimePanel } from "./time_strips.js";
import { TimingsPanel } from "./timings.js";

/** @type {[string, new (data: import("./data.js").Data, name: string) => import("./types").Panel][]} */
const PANELS = [["Members", MembersPanel], ["Curves", CurvesPanel], ["Parameters", ParallelPanel],
  ["Communication", TimingsPanel], ["Timeline", TimePanel], ["Logs", LogsPanel]];
const ENSEMBLES = ["Members", "Parameters"];

/** @param {string} name @param {import("./types").Panel} panel @param {import("./data.js").Data} data */
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
  const element = make("div", { className: `ar-panel ar-panel-${name.toLowerCase().replace(/\W+/g, "-")}`, role: "group", "aria-label": name, hidden: true }, head, body);
  return { element, body };
}

/** @param {import("./data.js").Data} data @param {HTMLElement} el */
export function show(data, el) {
  const controls = new Controls(data), ranks = new RanksPanel(data);
  const added = [...data.sections.keys()].map((title) => /** @type {typeof PANELS[0]} */ ([title, AddedPanel]));
  const panels = [...PANELS, ...added].map(([name, Panel]) => {
    const panel = new Panel(data, name);
    return { name, panel, ...section(name, panel, data) };
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
    for (const { name, panel, element, body } of panels) {
      element.hidden = !(panel.filled || (data.mode === "full" && !data.ended && !ENSEMBLES.includes(name)));
      if (!element.hidden && !body.hidden) panel.draw();
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
