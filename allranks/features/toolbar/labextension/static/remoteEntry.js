// The container that JupyterLab and Notebook 7 load, written by hand: there is no build step. It
// passes on the application's own copies of the packages that ranks.js uses.
(() => {
  // Browsers keep these files for a year. The end of this address, which package.json sets, changes
  // with their contents.
  const address = /** @type {HTMLScriptElement} */ (document.currentScript).src;
  const file = (/** @type {string} */ name) => `${new URL(name, address).href}${new URL(address).search}`;
  const packages = [
    "@jupyterlab/apputils",
    "@jupyterlab/launcher",
    "@jupyterlab/notebook",
    "@jupyterlab/outputarea",
    "@jupyterlab/rendermime",
    "@jupyterlab/services",
    "@jupyterlab/translation",
    "@jupyterlab/ui-components",
    "@lumino/polling",
    "@lumino/signaling",
    "@lumino/widgets",
    "react",
  ];
  /** @type {Record<string, Record<string, any>>} what the applications share, by package and version */
  let scope;

  // The one that is in use already: a second copy would have other tokens.
  const load = async (/** @type {string} */ name) => {
    const versions = Object.values(scope[name] ?? {});
    const found = versions.find((version) => version.loaded) ?? versions[0];
    return found ? (await found.get())() : {};
  };

  const get = async () => {
    const [{ plugins }, ...loaded] = await Promise.all([
      ...["ranks.js", "cells.js", "chooser.js", "help.js", "notebook_ranks.js", "sidebar.js"].map((name) => import(file(name))),
      ...packages.map(load),
    ]);
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = file("ranks.css");
    document.head.append(style);
    return () => ({ __esModule: true, default: plugins(Object.assign({}, ...loaded)) });
  };

  const page = /** @type {{ _JUPYTERLAB?: Record<string, unknown> }} */ (window);
  (page._JUPYTERLAB ??= {}).allranks = { init: (/** @type {typeof scope} */ given) => { scope = given; }, get };
})();
