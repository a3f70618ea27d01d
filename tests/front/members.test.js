import assert from "node:assert/strict";
import { test } from "node:test";

import { MembersPanel } from "../../allranks/widgets/front/members.js";

test("the heading names the best member, and what orders the members where nobody has chosen", () => {
  const order = "by the highest result; another order: --metric acc, or runs.best('acc')";
  const members = new Map([[3, { metric: 1.464, parameters: { lr: 0.1 } }]]);
  /** @param {object} ensemble */
  const heading = (ensemble) => MembersPanel.prototype.heading.call({ data: { members, ensemble } }, 3);
  assert.equal(heading({ metric: "result", order: "" }), "★ best: result 1.464 at lr=0.1 (member 3)");
  assert.equal(heading({ metric: "result", order }), `★ best: result 1.464 at lr=0.1 (member 3), ${order}`);
});
