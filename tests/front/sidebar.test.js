import assert from "node:assert/strict";
import { test } from "node:test";

import { makeSidebar } from "../../allranks/features/toolbar/labextension/static/sidebar.js";

class Widget {}

const createElement = (name, properties, ...children) => ({ name, properties, children });
const Sidebar = makeSidebar({ ReactWidget: Widget, SidePanel: Widget, createElement });

/** Returns the elements of the sidebar's head, each with its text. */
const head = (ranks) => {
  const commands = { isEnabled: (id) => id === "allranks:interrupt", label: () => "", execute: () => {} };
  const sidebar = Object.assign(Object.create(Sidebar.prototype), {
    app: { commands }, trans: { __: (text) => text }, current: () => ({ context: { localPath: "a.ipynb" }, ...ranks }),
  });
  const flat = (element) => (element?.children ? [element, ...element.children.flat(Infinity).flatMap(flat)] : []);
  return flat(sidebar.renderHead()).map(({ name, children }) => [name, children.join("")]);
};

test("ranks that do not react can be interrupted again, and what that does is said", () => {
  const said = "rank 1 does not react";
  const shown = head({ python: true, size: 2, place: "2 ranks on h1", busyBeside: true, state: { interrupt: said } });
  assert.ok(shown.some(([name, text]) => name === "button" && text === "Interrupt"));
  assert.ok(shown.some(([name, text]) => name === "p" && text === said));
});

test("nothing is said of interrupts where nobody has made one", () => {
  const shown = head({ python: true, size: 2, place: "2 ranks on h1", busyBeside: true, state: { interrupt: "" } });
  assert.deepEqual(shown.filter(([name]) => name === "p"), [["p", "2 ranks on h1"]]);
});
