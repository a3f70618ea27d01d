// After the cell: the same view stays, of what this page has seen, or else of what the notebook has kept.

import { Data } from "./data.js";
import { make } from "./elements.js";
import { show } from "./view.js";

const KEPT_VIEWS = 20;

// The output that replaces a live view shows it on; `false` where this page does not know all of it.
/** @param {import("./data.js").Data} data @param {string} css */
export function offer(data, css) {
  const views = (globalThis.allranksViews ??= new Map());
  views.set(data.key, (box) => {
    if (!data.ended || data.missed) return false;
    const { cause } = box.dataset;
    if (cause && data.timings) data.timings = { ...data.timings, cause: decodeURIComponent(cause) };
    settle(data, box, css);
    return true;
  });
  for (const key of [...views.keys()].slice(0, -KEPT_VIEWS)) views.delete(key);
}

// Puts a view where the picture is that stands there without scripts.
/** @param {import("./data.js").Data} data @param {HTMLElement} box @param {string} css */
function settle(data, box, css) {
  box.replaceChildren(make("style", { textContent: css }));
  show(data, box);
}

// Makes a view of what the notebook has kept.
/** @param {HTMLElement} box @param {import("./types").KeptState} options @param {string} css */
export function revive(box, { curves, logs, ...state }, css) {
  const data = new Data({ ...state, curves: [] });
  data.apart = state.apart;
  for (const { steps, values, ...head } of curves) {
    const numbers = values.map((value) => value ?? NaN);
    data.series.set(head.number, { ...head, steps: steps.slice(0, -1), values: numbers.slice(0, -1),
      last: [steps.at(-1) ?? NaN, numbers.at(-1) ?? NaN] });
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
