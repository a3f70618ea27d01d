// What is chosen after the cell goes into the notebook's file, where a page lets a widget see its notebook.

// A page has one of each, whichever view has made it: what was chosen, by the view's key, and the notebooks.
export const chosen = (globalThis.allranksChosen ??= new Map());
const notebooks = (globalThis.allranksNotebooks ??= new Set());

// JupyterLab's and Notebook's widgets know the notebook that they stand in.
/** @param {import("./types").Model} model */
export function watch(model) {
  const context = model?.widget_manager?.context;
  if (!context?.saveState?.connect || notebooks.has(context)) return;
  notebooks.add(context);
  context.disposed?.connect(() => notebooks.delete(context));
  // Before it is written: to change an output draws it anew, which must not happen at every click.
  context.saveState.connect((/** @type {any} */ _, /** @type {string} */ state) => { if (state === "started") write(context); });
}

/** @param {string} key @param {import("./types").Settings} settings */
export function choose(key, settings) {
  chosen.set(key, settings);
  for (const { model } of notebooks) if (outputs(model, key).length) model.dirty = true;
}

// Where a view stands in a notebook: the list of its outputs, its place there, and its page.
/** @param {any} model of a notebook @param {string} key @returns {[any, number, string][]} */
function outputs(model, key) {
  /** @type {[any, number, string][]} */
  const found = [];
  for (let at = 0; at < (model?.cells?.length ?? 0); at++) {
    const list = model.cells.get(at).outputs;
    for (let i = 0; i < (list?.length ?? 0); i++) {
      const html = [list.get(i).data["text/html"] ?? ""].flat().join("");
      if (html.startsWith(`<div data-allranks="${key}"`)) found.push([list, i, html]);
    }
  }
  return found;
}

/** @param {any} context of a notebook */
function write({ model }) {
  for (const [key, settings] of chosen) {
    const places = outputs(model, key);
    for (const [list, i, html] of places) {
      const output = list.get(i).toJSON(), said = encodeURIComponent(JSON.stringify(settings));
      const after = html.replace(/^<div [^>]*>/, `<div data-allranks="${key}" data-chosen="${said}">`);
      const focused = focusOf(key);
      list.set(i, { ...output, data: { ...output.data, "text/html": after } });
      if (focused >= 0) focusable(key)[focused]?.focus({ preventScroll: true });
    }
    if (places.length) chosen.delete(key);
  }
}

// The new drawing takes the focus of the old one.
/** @param {string} key */
const focusable = (key) => [.../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(`[data-allranks="${key}"] :is(button, input, select, [tabindex])`))];
/** @param {string} key */
const focusOf = (key) => focusable(key).findIndex((one) => one === document.activeElement);
