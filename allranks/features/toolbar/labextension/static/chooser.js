// A choice beside an output of several ranks: all of them, with equal lines once, a tab for each, or
// all side by side, which is the default for figures and other rich output. Another choice is kept in the
// cell's metadata: "all", "side", or the rank whose tab is chosen.

const KEY = "allranks";
// The names of the views, and what the icons draw.
const VIEWS = [
  ["all", "all ranks", "M2 3h12v2H2zM2 7h12v2H2zM2 11h12v2H2z"],
  ["tabs", "tab per rank", "M1 2h6v3h8v9H1zM8 2h3v2H8zM12 2h3v2h-3z"],
  ["side", "side by side", "M2 2h5.5v5.5H2zM8.5 2H14v5.5H8.5zM2 8.5h5.5V14H2zM8.5 8.5H14V14H8.5z"],
];
const MOST_COLUMNS = 16;
const WIDGET = "application/vnd.jupyter.widget-view+json";
// A notebook may have any text as an output: a longer list of ranks is one of no cluster.
const MOST_RANKS = 16_384;
const LOOK_MS = 500;

/** @typedef {[number, number][]} Spans the first and the last rank of each run of neighbours */
/** @typedef {{ lines?: [Spans, number][], indent?: number, ranks?: Spans, title?: boolean }} Whose */

/** @param {Spans} spans */
export const ranksOf = (spans) => {
  const lengths = spans.map(([first, last]) => Math.max(0, last - first + 1));
  if (!(lengths.reduce((sum, length) => sum + length, 0) <= MOST_RANKS)) return [];
  return spans.flatMap(([first], index) => Array.from({ length: lengths[index] }, (_, at) => first + at));
};

/** @param {string | string[]} [text] */
const lines = (text = "") => [text].flat().join("").split("\n");

/**
 * Returns the outputs of each rank, as Jupyter's outputs; null if there are none of several ranks.
 * Whose they are is in the metadata of an output: of a text, the ranks of each run of lines.
 *
 * @param {any[]} outputs
 */
export const split = (outputs) => {
  /** @type {Map<number, any[]>} */
  const byRank = new Map();
  // Outputs of no rank: the line about the start above, errors of the cell below.
  /** @type {any[]} */
  const above = [];
  /** @type {any[]} */
  const below = [];
  const first = outputs.findIndex(({ metadata }) => metadata?.allranks);
  const of = (/** @type {number} */ rank) => byRank.get(rank) ?? byRank.set(rank, []).get(rank) ?? [];
  const add = (/** @type {number} */ rank, /** @type {string} */ text) => {
    const own = of(rank), last = own.at(-1);
    if (last?.output_type === "stream") last.text += text;
    else own.push({ output_type: "stream", name: "stdout", text });
  };
  outputs.forEach((output, at) => {
    /** @type {Whose | undefined} */
    const whose = output.metadata?.allranks;
    if (whose?.lines) {
      const left = lines(output.data["text/plain"]), indent = Number(whose.indent);
      for (const [spans, count] of whose.lines) {
        const text = left.splice(0, Number(count)).map((line) => `${line.slice(indent)}\n`).join("");
        for (const rank of ranksOf(spans)) add(rank, text);
      }
    } else if (whose?.ranks) {
      if (!whose.title) for (const rank of ranksOf(whose.ranks)) of(rank).push(output);
    } else {
      (at < first ? above : below).push(output);
    }
  });
  return byRank.size > 1 ? { byRank: new Map([...byRank].sort(([a], [b]) => a - b)), above, below, first } : null;
};

/**
 * Whether several ranks have figures, tables or other output of their own that is no text. A bar of all is none, and
 * a widget neither: a page that is loaded anew would not draw it a second time.
 *
 * @param {Found} found
 */
const isRich = ({ byRank }) => {
  if (byRank.size > MOST_COLUMNS) return false;
  const rich = [...byRank.values()].map((own) => own.filter(({ output_type: type, data }) => type !== "stream" && !data?.[WIDGET]));
  const isOwn = (/** @type {any} */ output) => rich.filter((some) => some.includes(output)).length < byRank.size;
  return rich.filter((own) => own.some(isOwn)).length > 1;
};

/**
 * @typedef {object} Made what stands beside the outputs of one cell
 * @property {HTMLElement} bar
 * @property {HTMLElement} view
 * @property {ResizeObserver} sizes
 * @property {HTMLElement} tabs
 * @property {HTMLElement} grid
 * @property {Map<string, HTMLElement>} buttons
 * @property {(ranks: string) => void} choose
 * @property {any[]} areas
 * @property {string} first
 * @property {string} chosen
 * @property {string} usual the view without a choice of the user
 * @property {number} at
 */
/** @typedef {NonNullable<ReturnType<typeof split>>} Found */

// JupyterLab's own classes, which have no types here.
/** @param {Record<string, any>} packages @param {any} trans */
export const makeChooser = ({ OutputAreaModel, SimplifiedOutputArea, Widget }, trans) => {
  const views = new WeakMap();
  const isRunning = (/** @type {any} */ cell) => cell.model.executionState === "running";

  /** @param {any} area @param {any[]} outputs */
  const render = ({ model: { trusted }, rendermime }, outputs) =>
    new SimplifiedOutputArea({ model: new OutputAreaModel({ values: outputs, trusted }), rendermime });

  /** @param {Made} made */
  const clear = (made) => {
    for (const area of made.areas) {
      // A cell that goes has taken it out of the page.
      if (!area.node.isConnected) area.clearFlag(Widget.Flag.IsAttached);
      area.dispose();
    }
    made.areas = [];
    made.tabs.replaceChildren();
    made.grid.replaceChildren();
  };

  /**
   * Puts the choice where the outputs of the ranks begin: above them may be a panel, with buttons there.
   *
   * @param {any} cell @param {Made} made
   */
  const place = (cell, made) => {
    const first = made.chosen === "all" ? cell.outputArea.widgets[made.at]?.node
      : made.grid.querySelector(":scope > section:not(.jp-allranks-common)");
    const top = made.tabs.childElementCount ? made.tabs : first;
    if (top) made.bar.style.top = `${top.getBoundingClientRect().top - (made.bar.parentElement?.getBoundingClientRect().top ?? 0)}px`;
  };

  /**
   * Draws the chosen view of a cell's outputs beside the outputs themselves.
   *
   * @param {any} cell @param {Made} made @param {Found} found @param {number} [rank]
   */
  const draw = (cell, made, found, rank) => {
    const { chosen } = made;
    cell.outputArea.node.classList.toggle("jp-allranks-hidden", chosen !== "all");
    clear(made);
    if (chosen === "all") return;
    made.grid.classList.toggle("jp-mod-rich", chosen === "side" && isRich(found));
    const columns = Math.ceil(Math.sqrt(Math.min(found.byRank.size, MOST_COLUMNS)));
    made.grid.style.setProperty("--jp-allranks-columns", String(columns));
    const ranks = chosen === "side" ? [...found.byRank.keys()].slice(0, MOST_COLUMNS) : [rank];
    const put = (/** @type {string} */ title, /** @type {any[]} */ outputs) => {
      const area = render(cell.outputArea, outputs);
      const part = document.createElement("section");
      if (title) part.append(Object.assign(document.createElement("h4"), { textContent: title }));
      made.grid.append(part);
      Widget.attach(area, part);
      made.areas.push(area);
      return part;
    };
    const placeCommon = (/** @type {any[]} */ outputs) => outputs.length && put("", outputs).classList.add("jp-allranks-common");
    placeCommon(found.above);
    for (const one of ranks) put(chosen === "side" ? trans.__("rank %1", one) : "", found.byRank.get(one ?? -1) ?? []);
    placeCommon(found.below);
  };

  /** @param {any} cell @returns {Made} */
  const make = (cell) => {
    const bar = Object.assign(document.createElement("div"), { className: "jp-allranks-chooser" });
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", trans.__("View of the ranks' output"));
    const buttons = new Map();
    for (const [value, text, path] of VIEWS) {
      const button = Object.assign(document.createElement("button"), {
        title: trans.__(text),
        onclick: () => choose(value === "tabs" ? made.first : value),
        innerHTML: `<svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true"><path fill="currentColor" d="${path}"/></svg>`,
      });
      button.setAttribute("aria-label", trans.__(text));
      buttons.set(value, button);
      bar.append(button);
    }
    const tabs = Object.assign(document.createElement("div"), { className: "jp-allranks-tabs" });
    tabs.setAttribute("role", "group");
    tabs.setAttribute("aria-label", trans.__("Rank whose output is shown"));
    const grid = Object.assign(document.createElement("div"), { className: "jp-allranks-grid" });
    const view = Object.assign(document.createElement("div"), { className: "jp-allranks-view" });
    view.append(tabs, grid);
    const choose = (/** @type {string} */ ranks) => {
      // The usual view may be another one at the end of the cell.
      if (ranks === made.usual && !isRunning(cell)) cell.model.deleteMetadata(KEY);
      else cell.model.setMetadata(KEY, { ranks });
      refresh(cell);
    };
    // A panel grows, and images come late.
    const sizes = new ResizeObserver(() => place(cell, made));
    cell.disposed.connect(() => {
      sizes.disconnect();
      clear(made);
    });
    /** @type {Made} */
    const made = { bar, view, sizes, tabs, grid, buttons, choose, areas: [], first: "", chosen: "all", usual: "all", at: 0 };
    return made;
  };

  /**
   * Puts what is beside the outputs into the page, where it is not there: JupyterLab may have drawn the cell anew.
   *
   * @param {any} cell @param {Made} made
   */
  const attach = (cell, { bar, view, sizes }) => {
    // Collapsed outputs are not in the page.
    const collapser = cell.node.querySelector(".jp-Cell-outputCollapser");
    if (!collapser || bar.parentElement === collapser.parentElement) return;
    collapser.after(bar, view);
    collapser.parentElement.classList.add("jp-allranks-outputs");
    sizes.disconnect();
    sizes.observe(collapser.parentElement);
  };

  /**
   * Shows, updates or removes the choice, as the cell's outputs require.
   *
   * @param {any} cell
   */
  const refresh = (cell) => {
    if (cell.isDisposed || !cell.outputArea || !cell.node.querySelector(".jp-Cell-outputCollapser")) return;
    let found = null;
    try {
      found = split(cell.outputArea.model.toJSON());
    } catch {
      // A notebook may have any metadata: this is not allranks'.
    }
    let made = views.get(cell);
    if (!made && !found) return;
    if (!made) views.set(cell, (made = make(cell)));
    attach(cell, made);
    made.bar.hidden = !found;
    if (!found) {
      clear(made);
      cell.outputArea.node.classList.remove("jp-allranks-hidden");
      return;
    }
    const ranks = [...found.byRank.keys()];
    made.first = `${ranks[0]}`;
    made.at = found.first;
    // Not while the cell runs: what is drawn again loses its state. More ranks than fit would be hidden.
    made.usual = isRich(found) && !isRunning(cell) ? "side" : "all";
    const chosen = cell.model.getMetadata(KEY)?.ranks ?? made.usual;
    const rank = ranks.find((one) => `${one}` === chosen);
    made.chosen = rank === undefined ? "all" : "tabs";
    if (chosen === "side") made.chosen = "side";
    for (const [value, button] of made.buttons) button.setAttribute("aria-pressed", String(value === made.chosen));
    const focused = made.tabs.contains(document.activeElement);
    draw(cell, made, found, rank);
    if (made.chosen === "tabs") drawTabs(made, ranks, rank, focused);
    place(cell, made);
  };

  /** @param {Made} made @param {number[]} ranks @param {number | undefined} chosen @param {boolean} focused */
  const drawTabs = (made, ranks, chosen, focused) => {
    for (const rank of ranks) {
      const tab = Object.assign(document.createElement("button"), {
        textContent: trans.__("rank %1", rank),
        onclick: () => made.choose(`${rank}`),
      });
      tab.setAttribute("aria-pressed", String(rank === chosen));
      made.tabs.append(tab);
      if (focused && rank === chosen) tab.focus({ preventScroll: true });
    }
  };

  const watched = new WeakSet();

  /**
   * Follows the outputs of a cell, once it is in the page.
   *
   * @param {any} cell
   */
  return (cell) => {
    if (cell.model.type !== "code" || watched.has(cell)) return;
    watched.add(cell);
    let scheduled = false;
    const look = () => {
      scheduled = false;
      refresh(cell);
    };
    const schedule = () => {
      if (!scheduled) setTimeout(look, LOOK_MS);
      scheduled = true;
    };
    // Text that is appended is told by the shared model only, a display that is updated by the outputs only.
    const { outputs, sharedModel } = cell.model;
    const changed = (/** @type {any} */ _, /** @type {any} */ { sourceChange }) => sourceChange || schedule();
    sharedModel.changed.connect(changed);
    outputs.changed.connect(schedule);
    cell.disposed.connect(() => {
      sharedModel.changed.disconnect(changed);
      outputs.changed.disconnect(schedule);
    });
    refresh(cell);
    // Of a cell that shows nothing yet. While outputs stream in, that may take long: these look by themselves.
    void cell.ready?.then(look);
  };
};
