// The widget: one store for each model, one tree of panels for each place it is shown.

import { Data } from "./data.js";
import { offer, revive } from "./kept.js";
import { show } from "./view.js";

export default () => {
  let data = null;
  return {
    // Not in render(): what comes before the first view is there would be lost.
    initialize({ model }) {
      data = new Data(model.get("state"), model);
      offer(data, model.get("_css"));
    },
    render({ el }) { return show(data, el); },
  };
};

export { revive };
