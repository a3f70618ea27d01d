"""Runs a notebook without a browser and prints what each cell says as soon as it has ended.

python notebooks/run.py notebooks/01_ranks.ipynb

Exits with 1 as soon as a cell fails, as "Run all" stops there.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run(path: Path, timeout: float) -> int:
    """Runs the notebook's cells in order, and returns the process's exit status."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        # Every start warns that 127.0.0.1 is not encrypted: nothing that a reader could act on.
        extra_arguments=["--IPKernelApp.log_level=40"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "markdown":
                say(headings(cell.source))
            if cell.cell_type != "code" or not cell.source.strip():
                continue
            say(prompted(cell.source))
            try:
                client.execute_cell(cell, index)
            except CellExecutionError:
                say(said(cell))
                return fail(f"{path}: the cell above failed")
            except (CellTimeoutError, DeadKernelError) as error:
                say(said(cell))
                return fail(f"{path}: {error}")
            say(said(cell))
    return 0


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
    parser.add_argument("--timeout", type=float, default=600, help="seconds a cell (600)")
    options = parser.parse_args()
    if not options.notebook.is_file():
        parser.error(f"there is no notebook {options.notebook}")
    return run(options.notebook, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
