"""``allranks export train.ipynb``: a notebook's distributed cells as a script.

It runs under ``mpiexec`` without Jupyter, or in a batch system, for which a file is written too.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import allranks
from allranks.cluster import launchers
from allranks.cluster.launchers.batch import parse_batch
from allranks.cluster.options import ClusterOptions
from allranks.command import batch_files
from allranks.command.notebook_cells import (
    ENSEMBLE,
    FEATURE,
    HEADING,
    NOTEBOOK,
    PUSH,
    RANKS,
    NotebookCell,
    Plain,
    cells_of,
    indented,
    plain_python,
    read_notebook,
)
from allranks.errors import UsageError
from allranks.records import ranks as rank_lists

_EXAMPLE = "--nodes 2 --ntasks-per-node 4 --time 1:00:00"
_RUNTIME = "deepspeed-distributed"
#: The functions that write files for batch systems, and the suffixes of these files.
TARGETS = {
    "slurm": (batch_files.slurm, ".sbatch"),
    "mpijob": (batch_files.mpijob, ".yaml"),
    "trainjob": (batch_files.trainjob, ".yaml"),
}

#: An upper bound, where the notebook names no number of ranks.
_MOST = 1_000_000
_SHOW = "allranks.batch.show"


def add_options(parser: argparse.ArgumentParser) -> None:
    put = parser.add_argument
    put("notebook", type=Path, metavar="NOTEBOOK.ipynb")
    put("-o", "--out", metavar="FILE", help="the file to write; default: the notebook's name")
    put("--to", choices=TARGETS, help="also write the file for this batch system")
    add_size(parser, "the notebook's")
    put("--nodes", type=int, metavar="N", help="number of hosts; default: the notebook's, or 1")
    put("--gpus-per-node", dest="gpus", type=int, default=0, metavar="N", help="GPUs per host")
    put("--time", metavar="H:MM:SS", help="time limit of the job")
    put("--image", help="container image with allranks, ssh and sshd: mpijob, trainjob")
    put("--script", metavar="PATH", help="path of the script in that image, if it is there")
    put("--runtime", default=_RUNTIME, help=f"Trainer's MPI runtime; default: {_RUNTIME}")
    parser.epilog = "With --to slurm, other options are sbatch's: --partition gpu."
    parser.set_defaults(act=_export, takes_more=True)


def add_size(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds ``-np``, the option of mpiexec; ``default`` is for its help."""
    help_ = f"number of ranks; default: {default}"
    parser.add_argument("-np", "-n", dest="size", type=_count, metavar="N", help=help_)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < len(text.lstrip("0")) < 10:
        raise argparse.ArgumentTypeError(f"expected a number of ranks from 1, found {text!r}")
    return int(text)


def _export(said: argparse.Namespace) -> int:
    path: Path = said.notebook
    if said.more and said.to != "slurm":
        raise UsageError(
            f"export expected no {said.more[0]}. Options of sbatch go with --to slurm; "
            "type for the others: allranks export --help"
        )
    cells = cells_of(read_notebook(path))
    typed = (path.name if word == str(path) else word for word in sys.argv[1:])
    command = shlex.join(["allranks", *typed])
    script = path.with_suffix(".py").name if said.to or not said.out else Path(said.out).name
    made = export_script(cells, path.name, script, command)
    if said.to is None:
        _write(Path(said.out or script), made.source, path)
    else:
        write, suffix = TARGETS[said.to]
        out = Path(said.out or path.with_suffix(suffix).name)
        job = _job(said, made.cluster.n, made.cluster.launcher or "", made.source)
        text = write(job)
        if said.to == "slurm":
            _write(out.with_name(script), made.source, path)
        _write(out, text.replace("FILE", out.name, 1), path)
    sys.stderr.write("".join(f"{note}\n" for note in made.notes))
    return 0


def _job(
    said: argparse.Namespace, size: int | None, launcher: str, source: str
) -> batch_files.JobFile:
    kind, *words = shlex.split(launcher) or [""]
    asked = parse_batch(words if launchers.takes_options(kind) else [], _EXAMPLE)
    nodes = said.nodes or asked.nodes
    size = said.size or (asked.size(size) if asked.ntasks_per_node or asked.ntasks else size)
    if size is None:
        raise UsageError(
            "expected a number of ranks, found none in the notebook. Type for example: -np 4"
        )
    if nodes < 1 or size < 1 or size % nodes:
        raise UsageError(
            f"expected the same number of ranks on each of {nodes} hosts, found {size} in all. "
            f"Type for example: -np {max(1, size // max(1, nodes)) * max(1, nodes)}"
        )
    if said.to != "slurm" and not said.image:
        raise UsageError(
            f"--to {said.to} expected --image, the name of a container's image that has allranks, "
            f"found none. Type for example: --to {said.to} --image registry.example.org/me/train:1"
        )
    return batch_files.JobFile(
        name=said.notebook.stem,
        file=f"{said.notebook.stem}.py",
        source=source,
        nodes=nodes,
        each=size // nodes,
        gpus=said.gpus,
        seconds=_seconds(said.time),
        image=said.image or "",
        inside=said.script or "",
        runtime=said.runtime,
        more=[*(asked.more if kind == "slurm" else ()), *said.more],
    )


def _seconds(time: str | None) -> int:
    if time is None:
        return 0
    if not re.fullmatch(r"(\d+:)?\d+:\d\d", time):
        raise UsageError(f"expected --time as H:MM:SS, found {time!r}. Type: --time 1:00:00")
    seconds = 0
    for part in time.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds


def _write(path: Path, text: str, notebook: Path) -> None:
    try:
        if path.exists() and path.samefile(notebook):
            raise UsageError(f"expected a file beside the notebook, found {path}. Type: -o FILE")
        # A comment may contain a lone surrogate, half of a character.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"expected a place to write to, found {error}. Type: -o FILE") from None
    sys.stderr.write(f"wrote {path}\n")


@dataclass
class Exported:
    """A script, and the options with which the notebook started its ranks.

    The last value of each option counts; ``notes`` are parts that the script cannot do.
    """

    source: str = ""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    notes: list[str] = field(default_factory=list)


def export_script(cells: Iterable[NotebookCell], name: str, file: str, command: str) -> Exported:
    """Returns the script of a notebook's cells; its docstring contains ``command``.

    Raises UsageError for a cell that a script cannot have, or a notebook without cells for ranks.
    """
    made = Exported()
    parts: list[str] = []
    future: dict[str, None] = {}
    for one in cells:
        if one.kind != FEATURE:
            made.cluster = one.options.cluster.over(made.cluster)
        if one.kind == RANKS and not one.fails:
            done = plain_python(one.source, one.where, _SHOW)
            made.notes += [f"{one.where}: {note}" for note in done.notes]
            future |= dict.fromkeys(done.future)
            parts.append(_cell(one, done, made.cluster.n))
        else:
            text, note = _comment(one)
            made.notes += [f"{one.where}: {note}"] if note else []
            parts += [text] if text else []
    if not any(part.startswith("# %%") for part in parts):
        raise UsageError(
            f"expected cells that begin with %%distributed, found none for a script in {name}. "
            f"{made.notes[0] if made.notes else 'Type it above what the ranks are to run'}."
        )
    size = made.cluster.n or "N"
    about = [
        f"The distributed cells of {name}, in order.",
        "",
        f"mpiexec -n {size} python {file}",
        f"allranks run -np {size} {file}",
        "",
        f"Written by: {command} (allranks {allranks.__version__})",
    ]
    # The name of a file may contain quotes and backslashes.
    docstring = "\n".join(about).replace("\\", r"\\").replace('"""', r"\"\"\"")
    head = [
        f'"""{docstring}',
        '"""',
        "",
        *future,
        "import allranks.batch",
        "from allranks.batch import *  # MPI starts here: rank, size, comm, allreduce, log …",
    ]
    made.source = "\n".join(head) + "\n\n" + "\n\n\n".join(parts) + "\n"
    return made


def _cell(one: NotebookCell, done: Plain, size: int | None) -> str:
    options = one.options
    lines = [f"# %% {one.where}", *([f"# {one.magic}"] if one.magic else [])]
    lines += [f"# {line}" for line in _not_done(one)]
    lines.append("allranks.batch.cell()  # waits until every rank has ended the cell before")
    source = done.source
    if options.ranks is not None and options.ranks.strip(" []") != "all":
        chosen = rank_lists.parse(options.ranks, size or _MOST)
        lines += [f"if allranks.batch.rank in {chosen}:", indented(source)]
    else:
        lines.append(source)
    return "\n".join(lines)


def _not_done(one: NotebookCell) -> Iterator[str]:
    options = one.options
    if options.timeout is not None:
        yield "--timeout: nothing interrupts a cell of a script; limit the job's time instead"
    if options.out is not None:
        yield f"-o {options.out}: a script has no notebook for the values of the last expression"
    if options.local:
        yield "--local: a script has no notebook to run it in"


def _comment(one: NotebookCell) -> tuple[str, str]:
    if one.kind == HEADING:
        return f"# {'─' * 4} {one.source}", ""
    if one.kind == PUSH:
        reason = (
            f"left out: the notebook gave the ranks its {one.source}. A script has no notebook: "
            "make them in a cell of the ranks"
        )
        return f"# {one.magic}\n# {reason}.", reason
    if one.kind == ENSEMBLE:
        reason = "left out: a notebook runs an ensemble, and its ranks keep no variable of it"
    elif one.kind == FEATURE:
        option = next(iter(one.options.for_running()))
        reason = (
            f"left out: with --{option} the ranks do not run it. Remove --{option} to export it"
        )
    elif one.kind == RANKS:
        reason = "left out: its tag says that it may fail, which ends a script"
    elif not one.source:
        if one.magic.split()[1:2] == ["restart"]:
            reason = "left out: the ranks keep the variables that a restart would have removed"
            return f"# {one.magic}\n# {reason}.", reason
        return "", ""
    else:
        reason = "left out: it ran in the notebook, not on the ranks"
    lines = [one.magic] if one.magic else []
    lines += one.source.splitlines()
    quoted = "\n".join(f"#     {line}".rstrip() for line in lines)
    return f"# {one.where} is {reason}:\n{quoted}", "" if one.kind == NOTEBOOK else reason
