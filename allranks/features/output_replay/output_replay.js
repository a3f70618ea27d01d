// A page that is opened on a notebook, perhaps in the middle of a cell: it asks for what it has missed,
// and puts it into the notebook, so that it is saved there too.

class Page {
  /** @param {import("../../widgets/front/types").Model} model */
  constructor(model) {
    this.model = model;
    this.asked = false;
    this.first = new Map();
    // The first page has seen everything; a later one hears nothing until it has been answered.
    this.listens = !model.get("state").later;
    model.on("msg:custom", (message) => this.take(message));
    if (!this.listens) model.send({ kind: "opened" });
  }

  /** @param {any} options */
  take({ all, cell, at, output, ended }) {
    if (all && !this.asked) {
      this.asked = this.listens = true;
      for (const one of all) this.put(one);
    }
    if (!this.listens) return;
    if (output && this.first.has(cell)) this.change(cell, at, output);
    if (ended?.outputs && this.first.has(ended.cell)) this.put(ended);
    else if (ended) this.model.send({ kind: "has", cell: ended.cell });
  }

  // Only where the page lets a widget see its notebook, as JupyterLab and Notebook do.
  /** @param {string} name */
  find(name) {
    const cells = this.model.widget_manager?.context?.model?.cells ?? [];
    for (let i = 0; i < cells.length; i++) if (cells.get(i).id === name) return cells.get(i);
    return null;
  }

  // All outputs of a cell: what stands above them, as what the kernel itself has printed, stays.
  /** @param {any} options */
  put({ cell: name, outputs, count }) {
    const cell = this.find(name);
    if (!cell) return;
    if (!this.first.has(name)) {
      const before = cell.outputs.toJSON();
      const above = before.findIndex((/** @type {{ output_type: string }} */ one) => one.output_type !== "stream");
      this.first.set(name, above < 0 ? before.length : above);
    }
    // As when the cell is run here: these come from its kernel.
    cell.trusted = true;
    const above = cell.outputs.toJSON().slice(0, this.first.get(name));
    cell.outputs.fromJSON([...above, ...outputs]);
    const { sharedModel } = cell;
    if ("executionState" in sharedModel) sharedModel.executionState = count === null ? "running" : "idle";
    if (count === null) return;
    cell.executionCount = count;
    this.first.delete(name);
    this.model.send({ kind: "has", cell: name });
  }

  /** @param {string} name @param {number} at @param {any} output */
  change(name, at, output) {
    const cell = this.find(name), index = this.first.get(name) + at;
    if (!cell) return;
    if (index < cell.outputs.length) cell.outputs.set(index, output);
    else cell.outputs.add(output);
  }
}

export default { initialize(/** @type {{ model: import("../../widgets/front/types").Model }} */ { model }) { new Page(model); } };
