// A section that was added outside of this package: the kernel sends its tables and pictures as HTML.

import { make, putHtml } from "./elements.js";

export class AddedPanel {
  /** @param {import("./data.js").Data} data @param {string} title */
  constructor(data, title) {
    this.data = data;
    this.title = title;
    this.element = make("div", { className: "ar-memory" });
  }

  get filled() { return Boolean(this.data.sections.get(this.title)); }

  draw() { putHtml(this.element, this.data.sections.get(this.title)); }
}
