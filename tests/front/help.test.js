import assert from "node:assert/strict";
import { readdirSync, readFileSync, existsSync } from "node:fs";
import { test } from "node:test";
import { anchorOf, target } from "../../allranks/features/toolbar/labextension/static/help.js";

test("a link leads to an installed page and its heading", () => {
  assert.deepEqual(target("output.md#long-output", "docs/cells.md"), { page: "docs/output.md", anchor: "long-output" });
  assert.deepEqual(target("../README.md", "docs/cells.md"), { page: "README.md", anchor: "" });
  assert.deepEqual(target("#options", "docs/cells.md"), { page: "docs/cells.md", anchor: "options" });
});

test("other links lead out of the installed pages", () => {
  for (const href of ["../notebooks/01_ranks.ipynb", "api/errors.md", "../../README.md.txt", "https://example.org/docs/a.md"]) {
    assert.equal(target(href, "docs/cells.md"), null, href);
  }
});

test("a heading has the name that links use", () => {
  assert.equal(anchorOf("Tab and Shift-Tab"), "tab-and-shift-tab");
  assert.equal(anchorOf("`%%distributed`: every option"), "distributed-every-option");
});

test("each link between the pages leads to a page and a heading that exist", () => {
  const root = new URL("../../", import.meta.url);
  const pages = ["README.md", ...readdirSync(new URL("docs", root)).filter((name) => name.endsWith(".md")).map((name) => `docs/${name}`)];
  let count = 0;
  for (const page of pages) {
    const text = readFileSync(new URL(page, root), "utf8").replace(/```.*?```|`[^`\n]*`/gs, "");
    for (const [, href] of text.matchAll(/\]\(([^)\s]+)\)/g)) {
      const place = target(href, page);
      if (!place) continue;
      count += 1;
      assert.ok(existsSync(new URL(place.page, root)), `${page}: ${href}`);
      const headings = readFileSync(new URL(place.page, root), "utf8").matchAll(/^#+ (.+)$/gm);
      const names = [...headings].map(([, heading]) => anchorOf(heading.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1")));
      assert.ok(!place.anchor || names.includes(place.anchor), `${page}: ${href}`);
    }
  }
  assert.ok(count > 100);
});
