import assert from "node:assert/strict";
import { test } from "node:test";

import { makeNotebookRanks } from "../../allranks/features/toolbar/labextension/static/notebook_ranks.js";

const signal = () => ({ connect: () => {}, disconnect: () => {} });

class Signal {
  static clearData() {}
  connect() {}
  emit() {}
}

/** Returns the ranks of a notebook whose cells are in these states, what the kernel gets, and how often it is interrupted. */
const notebook = (...states) => {
  const sent = [], interrupts = [];
  const comm = { send: (data) => sent.push(data), dispose: () => {} };
  const kernel = { createComm: () => comm, interrupt: () => interrupts.push("kernel") };
  const sessionContext = {
    statusChanged: signal(), kernelChanged: signal(), iopubMessage: signal(), ready: new Promise(() => {}), session: { kernel },
  };
  const cells = states.map((executionState) => ({ executionState }));
  const NotebookRanks = makeNotebookRanks({ Signal });
  const ranks = new NotebookRanks({ sessionContext, disposed: signal(), model: { cells } }, {}, () => true);
  ranks.connect(kernel);
  return { ranks, sent, interrupts };
};

test("what ranks do while the kernel is idle is interrupted on the ranks", async () => {
  const { ranks, sent, interrupts } = notebook("idle");
  ranks.take({ size: 2, is_busy: true });
  assert.equal(ranks.busyBeside, true);
  ranks.interrupt();
  assert.deepEqual([sent, interrupts], [[{ interrupt: true }], []]);
});

test("a cell that runs is interrupted by the kernel", () => {
  const { ranks, sent, interrupts } = notebook("idle", "running");
  ranks.take({ size: 2, is_busy: true });
  assert.equal(ranks.busyBeside, false);
  ranks.interrupt();
  assert.deepEqual([sent, interrupts], [[], ["kernel"]]);
});

test("variables are compared of idle ranks only", async () => {
  const { ranks, sent } = notebook();
  ranks.take({ size: 2, is_busy: true });
  await ranks.ask();
  ranks.take({ size: 2, is_busy: false });
  await ranks.ask();
  assert.deepEqual(sent, [{}, {}, { variables: true }]);
});
