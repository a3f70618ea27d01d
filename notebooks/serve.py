"""Opens JupyterLab on copies of the labs without what their cells have said.

python notebooks/serve.py 01_ranks --port 9000    # what follows the lab goes to JupyterLab

The copies are the reader's: one that is there already is left as it is. So the checkout stays
clean, and no answer stands below its question.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

LABS = Path(__file__).resolve().parent
QUIET = [
    # Only what needs an answer: its address, and what goes wrong.
    "--Application.log_level=WARN",
    # Its defaults: it does not ask whether to fetch news, nor look for newer versions of itself.
    f"--LabApp.app_settings_dir={LABS / 'jupyterlab'}",
    # Of these the server says that they are not made for it; the labs do not need them.
    "--ServerApp.jpserver_extensions={'ipyparallel': False, 'jupyterlab_jupytext': False}",
    # A kernel warns where what it says to the page's server is not encrypted.
    "--KernelManager.transport_encryption=auto",
    # As long as the interval between pings: the server's own default is longer, of which it warns.
    "--ServerApp.tornado_settings={'ws_ping_timeout': 30000}",
]


def clear(lab: Path, copy: Path) -> None:
    """Writes a copy of a lab whose cells have not run."""
    notebook = nbformat.read(lab, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, copy)
    # The server warns of what its user has not run, and there is nothing in it to distrust.
    NotebookNotary().sign(notebook)


def copies(folder: Path) -> list[str]:
    """Puts a copy of each lab into a folder; returns those that were there already."""
    folder.mkdir(exist_ok=True)
    found = []
    for lab in sorted(LABS.glob("*.ipynb")):
        copy = folder / lab.name
        if copy.exists():
            found.append(copy.name)
        else:
            clear(lab, copy)
    return found


def main(name: str = "01_ranks", *options: str) -> None:
    """Makes the copies and becomes JupyterLab."""
    folder = LABS.parent / "labs"
    found = copies(folder)
    print(f"Your copies of the labs are in {folder}.", end=" ")
    print("Remove one to begin it anew." if found else "", flush=True)
    lab = Path(name).stem
    if not (folder / f"{lab}.ipynb").exists():
        known = ", ".join(path.stem for path in sorted(LABS.glob("*.ipynb")))
        sys.exit(f"expected one of {known}; found {name}")
    where = [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{lab}.ipynb"]
    # Running as root is what containers do; JupyterLab wants it said.
    root = ["--allow-root"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "jupyterlab", *root, *QUIET, *where, *options]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
