"""Runs a notebook without a browser and prints what each cell says as soon as it has ended.

python notebooks/run.py notebooks/01_ranks.ipynb
python notebooks/run.py --write notebooks/01_ranks.ipynb    # keeps what they say in the file

Exercises and their checks, which fail until they are solved, run only with --write: the file has
what they say. Exits with 1 as soon as a cell fails, as "Run all" stops there; nothing is written
then.
"""

from __future__ import annotations

import argparse
import copy
import re
import socket
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
EMBEDDED = re.compile(r"(data:[^\"']*)")
#: The ids of an exercise and of its check begin so.
EXERCISE = ("exercise-", "check-")
LOGS = re.compile(r"[^\s<>]*/(?=allranks/\d{8}-\d{6}-\w+)")


def run(path: Path, timeout: float, write: bool = False) -> int:
    """Runs the notebook's cells in order, and returns the process's exit status."""
    notebook = nbformat.read(path, as_version=4)
    metadata = copy.deepcopy(notebook.metadata)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        # Every start warns that 127.0.0.1 is not encrypted: nothing that a reader could act on.
        extra_arguments=["--IPKernelApp.log_level=40"],
        # What a reader does not see stays out of the file.
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    heading, left_out = "", False
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "markdown":
                heading += headings(cell.source)
            if cell.cell_type != "code" or not cell.source.strip():
                continue
            if not write and cell.get("id", "").startswith(EXERCISE):
                heading, left_out = "", True
                continue
            say(heading + prompted(cell.source))
            heading = ""
            try:
                client.execute_cell(cell, index)
            except CellExecutionError:
                say(said(cell))
                return fail(f"{path}: the cell above failed")
            except (CellTimeoutError, DeadKernelError) as error:
                say(said(cell))
                return fail(f"{path}: {error}")
            say(said(cell))
    if write:
        notebook.metadata = metadata
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [anonymous(output) for output in cell.outputs]
        nbformat.write(notebook, path)
    if left_out:
        say(f"This lab has exercises for you. Open it in JupyterLab: make lab LAB={path.stem}\n")
    return 0


def anonymous(value: Any) -> Any:
    """An output, or a part of one, without this host's name and this user's folders."""
    if isinstance(value, dict):
        parts = ((k, v if k.startswith("image/") else anonymous(v)) for k, v in value.items())
        return type(value)(parts)
    if isinstance(value, list):
        return [anonymous(part) for part in value]
    if not isinstance(value, str):
        return value
    pieces = EMBEDDED.split(value)
    return "".join(piece if EMBEDDED.match(piece) else anonymous_text(piece) for piece in pieces)


def anonymous_text(text: str) -> str:
    """A text that names a laptop, whatever host it came from."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", text)
    return LOGS.sub("~/.local/state/", text).replace(str(Path.home()), "~")


def headings(markdown: str) -> str:
    """The headings of a markdown cell, each on a line of its own."""
    return "".join(f"\n{line}\n\n" for line in markdown.splitlines() if line.startswith("#"))


def prompted(source: str) -> str:
    """The cell's source as a terminal session shows it."""
    first, *rest = source.strip().splitlines()
    return "".join([f">>> {first}\n", *(f"... {line}\n" for line in rest)])


def said(cell: NotebookNode) -> str:
    """What a reader without HTML sees under a cell."""
    text = "".join(text_of(output) for output in cell.outputs)
    return f"{text}\n"


def text_of(output: NotebookNode) -> str:
    """One output as text that ends with a line's end, or '' where it has none."""
    if output.output_type == "stream":
        text = output.text
    elif output.output_type == "error":
        text = "\n".join(output.traceback)
    else:
        text = output.data.get("text/plain", "")
    return text if not text or text.endswith("\n") else f"{text}\n"


def say(text: str) -> None:
    """Writes to stdout at once; colours only where somebody sees them."""
    sys.stdout.write(text if sys.stdout.isatty() else COLOURS.sub("", text))
    sys.stdout.flush()


def fail(reason: str) -> int:
    """Says why on stderr and returns the exit status 1."""
    print(reason, file=sys.stderr)
    return 1


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="write the outputs into the file")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a cell (600)")
    options = parser.parse_args()
    if not options.notebook.is_file():
        parser.error(f"there is no notebook {options.notebook}")
    return run(options.notebook, options.timeout, options.write)


if __name__ == "__main__":
    sys.exit(main())
