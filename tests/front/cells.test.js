import assert from "node:assert/strict";
import { test } from "node:test";

import { areFromRanks, runsOnRanks, unknownMagic } from "../../allranks/features/toolbar/labextension/static/cells.js";

const outputs = (...all) => ({ length: all.length, get: (at) => all[at] });

test("before allranks is loaded, its own magics are known, and %%px may be ipyparallel's", () => {
  for (const magic of ["%%distributed -n 4", "%%rank 1", "%%ensemble lr=1,2"]) assert.ok(runsOnRanks(`${magic}\n1`, null));
  assert.ok(!runsOnRanks("%%px\n1", null));
  assert.ok(!runsOnRanks("print(1)", null));
  assert.ok(runsOnRanks("%%px\n1", { every_cell: false, local: [] }));
});

test("a magic that was not found is known if it is one of allranks", () => {
  const said = (text) => [{ output_type: "stream", name: "stderr", text }];
  assert.equal(unknownMagic(said("UsageError: Cell magic `%%distributed` not found.\n")), "%%distributed");
  assert.equal(unknownMagic(said(["UsageError: Line magic function `%distributed` not found.\n"])), "%distributed");
  assert.equal(unknownMagic(said("UsageError: Cell magic `%%other` not found.\n")), "");
  assert.equal(unknownMagic([]), "");
});

test("outputs of ranks are known by their metadata", () => {
  assert.ok(areFromRanks(outputs({ metadata: {} }, { metadata: { allranks: { lines: [[[[0, 3]], 1]], indent: 13 } } })));
  assert.ok(!areFromRanks(outputs({ metadata: {} }, { metadata: undefined })));
  assert.ok(!areFromRanks(outputs()));
});

test("a cell that was deleted has no outputs of ranks", () => {
  assert.ok(!areFromRanks(null));
});
