// The container that JupyterLab and Notebook 7 load, written by hand: there is no build step. It
// passes on the application's own copies of the packages that ranks.js uses.
(() => {
  // Browsers keep these files for a year. The end of this address, which package.json sets, changes
  // with their contents.
  const address = document.currentScript.src;
  const file = (name) => `${new URL(name, address).href}${new URL(address).search}`;
  const packages = [
    "@jupyterlab/apputils",
    "@jupyterlab/launcher",
    "@jupyterlab/notebook",
    "@jupyterlab/outputarea",
    "@jupyterlab/services",
    "@jupyterlab/translation",
    "@jupyterlab/ui-components",
    "@lumino/polling",
    "@lumino/signaling",
    "@lumino/widgets",
    "react",
  ];
  let scope;

  // The one that is in use already: a second copy would have other tokens.
  const load = async (name) => {
    const versions = Object.values(scope[name] ?? {});
    const found = versions.find((version) => version.loaded) ?? versions[0];
    return found ? (await found.get())() : {};
  };

  const get = async () => {
    const [{ plugins }, ...loaded] = await Promise.all([
      ...["ranks.js", "cells.js", "chooser.js", "notebook_ranks.js", "sidebar.js"].map((name) => import(file(name))),
      ...packages.map(load),
    ]);
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = file("ranks.css");
    document.head.append(style);
    return () => ({ __esModule: true, default: plugins(Object.assign({}, ...loaded)) });
  };

  (window._JUPYTERLAB ??= {}).allranks = { init: (given) => { scope = given; }, get };
})();
