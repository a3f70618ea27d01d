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
// A notebook may have any text as an output: a longer list of ranks is one of no cluster.
const MOST_RANKS = 16_384;
const LOOK_MS = 500;
// As allranks prints a line: "ranks 0, 2–3 │ text"; "→" is before a value, "·" before a notice,
// "!" before standard error.
const LINE = /^(ranks? [\d–, ]+?|) *([│→·!]) ?(.*)$/;
const LABEL = /^ranks? ([\d–, ]+):$/;

export const ranksOf = (label) => {
  const parts = label.replace(/^ranks? /, "").split(",").map((part) => part.split("–").map(Number));
  const lengths = parts.map(([first, last = first]) => Math.max(0, last - first + 1));
  if (!(lengths.reduce((sum, length) => sum + length, 0) <= MOST_RANKS)) return [];
  return parts.flatMap(([first], index) => Array.from({ length: lengths[index] }, (_, at) => first + at));
};

// The text of a stream, or of a display of labelled lines; null for other outputs.
const textOf = ({ output_type: type, text, data }) => {
  const found = type === "stream" ? text : type === "display_data" ? data["text/plain"] : null;
  const joined = Array.isArray(found) ? found.join("") : found;
  if (joined == null || type === "stream") return joined ?? null;
  const [first] = joined.split("\n");
  return LINE.test(first) || LABEL.test(first) ? joined : null;
};

/** Whether ranks have figures, tables or other output that is no text. */
const isRich = ({ byRank }) => [...byRank.values()].flat().some(({ output_type: type }) => type !== "stream");

/** Returns the outputs of each rank, as Jupyter's outputs; null if they are not labelled. */
export const split = (outputs) => {
  const byRank = new Map();
  // Outputs of no rank: the line about the start above, errors of the cell below.
  const above = [];
  const below = [];
  const addCommon = (output) => (byRank.size ? below : above).push(output);
  let ranks = [];
  const add = (rank, text) => {
    const own = byRank.get(rank) ?? byRank.set(rank, []).get(rank);
    const last = own.at(-1);
    if (last?.output_type === "stream") last.text += text;
    else own.push({ output_type: "stream", name: "stdout", text });
  };
  for (const output of outputs) {
    const text = textOf(output);
    if (text !== null) {
      for (const line of text.replace(/\n$/, "").split("\n")) {
        const found = LINE.exec(line);
        const label = LABEL.exec(line);
        if (label) ranks = ranksOf(label[1]);
        else if (found?.[1]) ranks = ranksOf(found[1]);
        if (found && ranks.length) for (const rank of ranks) add(rank, `${found[3]}\n`);
        else if (!label) addCommon({ output_type: "stream", name: "stdout", text: `${line}\n` });
      }
    } else if (output.output_type === "display_data" && ranks.length && Object.values(output.data).join("")) {
      for (const rank of ranks) (byRank.get(rank) ?? byRank.set(rank, []).get(rank)).push(output);
    } else {
      addCommon(output);
    }
  }
  return byRank.size > 1 ? { byRank: new Map([...byRank].sort(([a], [b]) => a - b)), above, below } : null;
};

export const makeChooser = ({ OutputAreaModel, SimplifiedOutputArea, Widget }, trans) => {
  const views = new WeakMap();
  const isRunning = (cell) => cell.model.executionState === "running";

  const render = ({ model: { trusted }, rendermime }, outputs) =>
    new SimplifiedOutputArea({ model: new OutputAreaModel({ values: outputs, trusted }), rendermime });

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

  /** Draws the chosen view of a cell's outputs beside the outputs themselves. */
  const draw = (cell, made, found, rank) => {
    const { chosen } = made;
    cell.outputArea.node.classList.toggle("jp-allranks-hidden", chosen !== "all");
    clear(made);
    if (chosen === "all") return;
    made.grid.classList.toggle("jp-mod-rich", chosen === "side" && isRich(found));
    made.grid.style.setProperty("--jp-allranks-columns", Math.ceil(Math.sqrt(Math.min(found.byRank.size, MOST_COLUMNS))));
    const ranks = chosen === "side" ? [...found.byRank.keys()].slice(0, MOST_COLUMNS) : [rank];
    const place = (title, outputs) => {
      const area = render(cell.outputArea, outputs);
      const part = document.createElement("section");
      if (title) part.append(Object.assign(document.createElement("h4"), { textContent: title }));
      made.grid.append(part);
      Widget.attach(area, part);
      made.areas.push(area);
      return part;
    };
    const placeCommon = (outputs) => outputs.length && place("", outputs).classList.add("jp-allranks-common");
    placeCommon(found.above);
    for (const one of ranks) place(chosen === "side" ? trans.__("rank %1", one) : "", found.byRank.get(one));
    placeCommon(found.below);
  };

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
    // Collapsed outputs are not in the page.
    cell.node.querySelector(".jp-Cell-outputCollapser").after(bar, view);
    bar.parentElement.classList.add("jp-allranks-outputs");
    const choose = (ranks) => {
      if (ranks === made.usual) cell.model.deleteMetadata(KEY);
      else cell.model.setMetadata(KEY, { ranks });
      refresh(cell);
    };
    cell.disposed.connect(() => clear(made));
    const made = { bar, tabs, grid, buttons, choose, areas: [], first: "", chosen: "all", usual: "all" };
    return made;
  };

  /** Shows, updates or removes the choice, as the cell's outputs require. */
  const refresh = (cell) => {
    if (cell.isDisposed) return;
    const found = split(cell.outputArea.model.toJSON());
    let made = views.get(cell);
    if (!made && !found) return;
    if (!made) views.set(cell, (made = make(cell)));
    made.bar.hidden = !found;
    if (!found) {
      clear(made);
      cell.outputArea.node.classList.remove("jp-allranks-hidden");
      return;
    }
    const ranks = [...found.byRank.keys()];
    made.first = `${ranks[0]}`;
    // Not while the cell runs: what is drawn again loses its state.
    made.usual = isRich(found) && !isRunning(cell) ? "side" : "all";
    const chosen = cell.model.getMetadata(KEY)?.ranks ?? made.usual;
    const rank = ranks.find((one) => `${one}` === chosen);
    made.chosen = rank === undefined ? "all" : "tabs";
    if (chosen === "side") made.chosen = "side";
    for (const [value, button] of made.buttons) button.setAttribute("aria-pressed", value === made.chosen);
    const focused = made.tabs.contains(document.activeElement);
    draw(cell, made, found, rank);
    if (made.chosen === "tabs") drawTabs(made, ranks, rank, focused);
  };

  const drawTabs = (made, ranks, chosen, focused) => {
    for (const rank of ranks) {
      const tab = Object.assign(document.createElement("button"), {
        textContent: trans.__("rank %1", rank),
        onclick: () => made.choose(`${rank}`),
      });
      tab.setAttribute("aria-pressed", rank === chosen);
      made.tabs.append(tab);
      if (focused && rank === chosen) tab.focus({ preventScroll: true });
    }
  };

  const watched = new WeakSet();

  /** Follows the outputs of a cell, once it is in the page. */
  return async (cell) => {
    if (cell.model.type !== "code" || watched.has(cell)) return;
    watched.add(cell);
    await cell.ready;
    let scheduled = false;
    const look = () => {
      scheduled = false;
      refresh(cell);
    };
    const schedule = () => {
      if (!scheduled) setTimeout(look, LOOK_MS);
      scheduled = true;
    };
    // Not the signals of the outputs: text that is appended has none.
    cell.model.sharedModel.changed.connect((_, { sourceChange }) => sourceChange || schedule());
    refresh(cell);
  };
};
