"""``allranks export train.ipynb``: a notebook's distributed cells for a batch system."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from allranks.cluster.launchers.batch import parse_batch
from allranks.command import notebook, targets
from allranks.command.parsers import add_command, add_size
from allranks.command.script import export
from allranks.errors import UsageError

_EXAMPLE = "--nodes 2 --ntasks-per-node 4 --time 1:00:00"
_RUNTIME = "deepspeed-distributed"
#: What each writes for a batch system, and the end of that file's name.
TARGETS = {
    "slurm": (targets.slurm, ".sbatch"),
    "mpijob": (targets.mpijob, ".yaml"),
    "trainjob": (targets.trainjob, ".yaml"),
}


def add(parsers: Any) -> None:
    """Adds ``export``."""
    about = "writes a script of a notebook's distributed cells, for mpiexec or a batch system"
    parser = add_command(parsers, "export", about)
    put = parser.add_argument
    put("notebook", type=Path, metavar="NOTEBOOK.ipynb")
    put("-o", "--out", metavar="FILE", help="the file to write; default: the notebook's name")
    put("--to", choices=TARGETS, help="also write the file for this batch system")
    add_size(parser, default="the notebook's")
    put("--nodes", type=int, metavar="N", help="number of hosts; default: the notebook's, or 1")
    put("--gpus-per-node", dest="gpus", type=int, default=0, metavar="N", help="GPUs per host")
    put("--time", metavar="H:MM:SS", help="time limit of the job")
    put("--image", help="container image with allranks, ssh and sshd: mpijob, trainjob")
    put("--script", metavar="PATH", help="path of the script in that image, if it is there")
    put("--runtime", default=_RUNTIME, help=f"Trainer's MPI runtime; default: {_RUNTIME}")
    parser.epilog = "With --to slurm, other options are sbatch's: --partition gpu."
    parser.set_defaults(act=act, takes_more=True)


def act(said: argparse.Namespace) -> int:
    """Writes the files; what a script cannot do is said."""
    path: Path = said.notebook
    if said.more and said.to != "slurm":
        raise UsageError(
            f"export expected no {said.more[0]}. Options of sbatch go with --to slurm; "
            "type for the others: allranks export --help"
        )
    typed = (path.name if word == str(path) else word for word in sys.argv[1:])
    command = shlex.join(["allranks", *typed])
    script = path.with_suffix(".py").name if said.to or not said.out else Path(said.out).name
    made = export(notebook.found(notebook.read(path)), path.name, script, command)
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


def _job(said: argparse.Namespace, size: int | None, launcher: str, source: str) -> targets.Job:
    """Returns how many ranks there are to be where: as typed, else as the notebook has it."""
    kind, *words = shlex.split(launcher) or [""]
    asked = parse_batch(words if kind in ("slurm", "pbs", "lsf") else [], _EXAMPLE)
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
    return targets.Job(
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
        # Half a character may stand in what is a comment.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"expected a place to write to, found {error}. Type: -o FILE") from None
    sys.stderr.write(f"wrote {path}\n")
