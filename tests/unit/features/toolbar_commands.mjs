// Calls the extension's command "start" with arguments that a notebook's button could pass, and
// prints the source that the kernel gets for each.
import { readFile } from "node:fs/promises";

const [folder, given] = process.argv.slice(2);
const load = async (name) => {
  const source = await readFile(`${folder}/${name}`, "utf8");
  return import(`data:text/javascript,${encodeURIComponent(source)}`);
};
const { plugins } = await load("ranks.js");
const cells = await load("cells.js");
const { makeNotebookRanks } = await load("notebook_ranks.js");

const signal = () => ({ connect: () => {}, disconnect: () => {} });
const style = { toggle: () => {}, add: () => {} };
const made = () => ({ classList: style, append: () => {}, setAttribute: () => {}, replaceChildren: () => {}, matches: () => false });
Object.defineProperty(globalThis, "sessionStorage", { value: { getItem: () => null, setItem: () => {}, removeItem: () => {} } });
globalThis.document = { createElement: made, activeElement: null, hidden: true };

class Signal {
  static clearData() {}
  connect() {}
  emit() {}
}
class Sidebar {
  title = {};
  refresh() {}
}
const format = (text, ...values) => text.replace(/%(\d)/g, (_, at) => values[at - 1]);
const trans = { __: format, _n: (one, several, n, ...values) => format(n === 1 ? one : several, ...values) };

const sent = [];
const kernel = {
  name: "python3",
  spec: Promise.resolve({ language: "python" }),
  status: "idle",
  requestCommInfo: async () => ({ content: { comms: {} } }),
  requestExecute: ({ code }) => {
    sent.push(code);
    return { done: Promise.resolve({ content: { status: "ok" } }) };
  },
};
const sessionContext = {
  statusChanged: signal(), kernelChanged: signal(), iopubMessage: signal(), ready: Promise.resolve(), session: { kernel },
};
const context = { sessionContext, disposed: signal(), localPath: "a.ipynb", model: { cells: [] } };
const panel = {
  context, content: { widgets: [], model: { cells: { changed: signal() } } }, disposed: signal(), revealed: Promise.resolve(),
  toggleClass: () => {},
};

const executed = [], notices = [];
const packages = {
  Signal,
  Widget: class { node = made(); addClass() {} },
  Poll: class { start() {} stop() {} },
  makeNotebookRanks,
  makeSidebar: () => Sidebar,
  nullTranslator: { load: () => trans },
  LabIcon: class { element() { return made(); } },
  MenuSvg: class { constructor() { this.aboutToClose = signal(); } addItem() {} },
  NotebookActions: { executed: { connect: (slot) => executed.push(slot) }, executionScheduled: signal() },
  Notification: { error: () => "", dismiss: () => {}, info: (text, { actions }) => notices.push([text, actions[0]]) },
  KernelMessage: {},
  ...cells,
  caretDownIcon: { element: made },
  makeChooser: () => () => {},
  makeHelp: () => () => {},
  Dialog: { cancelButton: () => {}, okButton: () => {} },
  showDialog: async () => ({ button: { accept: true }, value: JSON.parse(given).typed }),
};
const commands = new Map();
const app = {
  commands: {
    addCommand: (id, command) => commands.set(id, command),
    notifyCommandChanged: () => {},
    isEnabled: () => false,
  },
  shell: { add: () => {} },
};
const widgetAdded = { all: [], connect: (slot) => widgetAdded.all.push(slot) };
const tracker = { widgetAdded, currentWidget: panel, currentChanged: signal(), forEach: () => {}, find: () => panel };
plugins(packages)[0].activate(app, tracker, null, null, null, null);
for (const slot of widgetAdded.all) slot(tracker, panel);
await new Promise((resolve) => setTimeout(resolve));

const results = [];
for (const args of JSON.parse(given).arguments) {
  sent.length = 0;
  const { execute, isEnabled } = commands.get("allranks:start");
  const enabled = isEnabled(args);
  const refused = await execute(args).then(() => "", (error) => error.message);
  results.push({ enabled, refused, sent: [...sent] });
}
const runs = JSON.parse(given).cells.map(([source, state]) => cells.runsOnRanks(source, state));
const starts = JSON.parse(given).sources.map((source) => cells.startsRanks(source));
const written = [];
const failed = { model: { type: "code", outputs: { toJSON: () => JSON.parse(given).outputs } } };
const sharedModel = { insertCell: (place, { source }) => written.push([place, source]) };
const notebook = { widgets: [{}, failed], model: { sharedModel }, activate() {}, scrollToItem() {} };
for (const slot of executed) slot(null, { notebook, cell: failed, success: false });
for (const [, { callback }] of notices) callback();
const said = notices.map(([text]) => text);
process.stdout.write(JSON.stringify({ results, runs, starts, first: cells.firstCells("-n 4"), said, written }));
