// Calls the extension's command "start" with arguments that a notebook's button could pass, and
// prints the source that the kernel gets for each.
import { readFile } from "node:fs/promises";

const [folder, given] = process.argv.slice(2);
const load = async (name) => {
  const source = await readFile(`${folder}/${name}`, "utf8");
  return import(`data:text/javascript,${encodeURIComponent(source)}`);
};
const { plugins } = await load("ranks.js");

const signal = () => ({ connect: () => {} });
const style = { toggle: () => {}, add: () => {} };
const made = () => ({ classList: style, append: () => {}, setAttribute: () => {}, replaceChildren: () => {}, matches: () => false });
globalThis.document = { createElement: made, activeElement: null, hidden: true };
globalThis.setInterval = () => 0;

class Widget {
  constructor() {
    this.node = { ...made(), contains: () => false };
    this.title = {};
  }
  addClass() {}
  setHidden() {}
}

const sent = [];
const kernel = {
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
const context = { sessionContext, localPath: "a.ipynb", model: { cells: [] } };
const panel = {
  context, content: { widgets: [], model: { cells: { changed: signal() } } }, disposed: signal(), revealed: Promise.resolve(),
  toolbar: { insertBefore: () => {} }, toggleClass: () => {},
};

const packages = {
  Widget,
  LabIcon: class { element() { return made(); } },
  MenuSvg: class { constructor() { this.aboutToClose = signal(); } addItem() {} },
  NotebookActions: { executed: signal() },
  Notification: { error: () => "", dismiss: () => {} },
  KernelMessage: {},
  makeChooser: () => () => {},
  InputDialog: { getText: async () => ({ button: { accept: true }, value: JSON.parse(given).typed }) },
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
const tracker = { widgetAdded, currentWidget: panel, currentChanged: signal() };
plugins(packages)[0].activate(app, tracker, null, null);
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
process.stdout.write(JSON.stringify({ results }));
