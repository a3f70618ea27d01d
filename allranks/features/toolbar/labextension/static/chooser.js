// A choice above an output of several ranks: all of them, with equal lines once, one rank, or all
// side by side. It is kept in the cell's metadata.

const KEY = "allranks";
const MOST_COLUMNS = 16;
const LOOK_MS = 500;
// As allranks prints a line: "ranks 0, 2–3 │ text"; "→" is before a value, "·" before a notice,
// "!" before standard error.
const LINE = /^(ranks? [\d–, ]+?|) *([│→·!]) ?(.*)$/;
const LABEL = /^ranks? ([\d–, ]+):$/;

export const ranksOf = (label) =>
  label.replace(/^ranks? /, "").split(",").flatMap((part) => {
    const [first, last = first] = part.split("–").map(Number);
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
  });

// The text of a stream, or of a display of labelled lines; null for other outputs.
const textOf = ({ output_type: type, text, data }) => {
  const found = type === "stream" ? text : type === "display_data" ? data["text/plain"] : null;
  const joined = Array.isArray(found) ? found.join("") : found;
  if (joined == null || type === "stream") return joined ?? null;
  const [first] = joined.split("\n");
  return LINE.test(first) || LABEL.test(first) ? joined : null;
};

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

export const makeChooser = ({ OutputAreaModel, SimplifiedOutputArea, Widget }) => {
  const views = new WeakMap();

  const render = ({ model: { trusted }, rendermime }, outputs) =>
    new SimplifiedOutputArea({ model: new OutputAreaModel({ values: outputs, trusted }), rendermime });

  const clear = (made) => {
    for (const area of made.areas) {
      // A cell that goes has taken it out of the page.
      if (!area.node.isConnected) area.clearFlag(Widget.Flag.IsAttached);
      area.dispose();
    }
    made.areas = [];
    made.grid.replaceChildren();
  };

  /** Draws the chosen view of a cell's outputs beside the outputs themselves. */
  const draw = (cell, made, found) => {
    const chosen = made.select.value;
    cell.outputArea.node.classList.toggle("jp-allranks-hidden", chosen !== "all");
    made.bar.classList.toggle("jp-mod-active", chosen !== "all");
    clear(made);
    if (chosen === "all") return;
    const ranks = chosen === "side" ? [...found.byRank.keys()].slice(0, MOST_COLUMNS) : [Number(chosen)];
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
    for (const rank of ranks) place(`rank ${rank}`, found.byRank.get(rank) ?? []);
    placeCommon(found.below);
  };

  const make = (cell) => {
    const select = document.createElement("select");
    select.setAttribute("aria-label", "Ranks whose output is shown");
    const bar = Object.assign(document.createElement("div"), { className: "jp-allranks-chooser" });
    bar.append(select);
    const grid = Object.assign(document.createElement("div"), { className: "jp-allranks-grid" });
    // Collapsed outputs are not in the page.
    cell.node.querySelector(".jp-Cell-outputCollapser").after(bar, grid);
    bar.parentElement.classList.add("jp-allranks-outputs");
    select.onchange = () => {
      if (select.value === "all") cell.model.deleteMetadata(KEY);
      else cell.model.setMetadata(KEY, { ranks: select.value });
      refresh(cell);
    };
    cell.disposed.connect(() => clear(made));
    const made = { bar, grid, select, areas: [] };
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
    const options = [["all", "all ranks"], ...ranks.map((rank) => [`${rank}`, `rank ${rank}`]), ["side", "side by side"]];
    // An open list would close.
    if (options.length !== made.select.length || options.some(([value], index) => value !== made.select[index].value)) {
      made.select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    }
    made.select.value = cell.model.getMetadata(KEY)?.ranks ?? "all";
    if (made.select.selectedIndex < 0) made.select.value = "all";
    draw(cell, made, found);
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
