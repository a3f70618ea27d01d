// The widget: one store for each model, one tree of panels for each place it is shown.

import { Data } from "./data.js";
import { offer, revive } from "./kept.js";
import { show } from "./view.js";

export default () => {
  /** @type {Data} */
  let data;
  return {
    // Not in render(): what comes before the first view is there would be lost.
    /** @param {{ model: import("./types").Model, el: HTMLElement }} options */
    initialize({ model }) {
      data = new Data(model.get("state"), model);
      offer(data, model.get("_css"));
    },
    /** @param {{ model: import("./types").Model, el: HTMLElement }} options */
    render({ el }) { return show(data, el); },
  };
};

export { revive };
