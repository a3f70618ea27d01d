"""A notebook's distributed cells as one script that runs under ``mpiexec``, without Jupyter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import allranks
from allranks.cluster.options import ClusterOptions
from allranks.command.notebook import (
    ENSEMBLE,
    HEADING,
    NOTEBOOK,
    PUSH,
    RANKS,
    Found,
)
from allranks.command.plain import Plain, indented, plain
from allranks.errors import UsageError
from allranks.records import ranks as rank_lists

_MOST = 1_000_000
"""More ranks than there are, where a notebook does not say how many."""
_SHOW = "allranks.batch.show"


@dataclass
class Exported:
    """A script, and what is known of how its ranks were started.

    Attributes:
        source: the script.
        cluster: what the notebook has asked for, the last word on each.
        notes: what the script cannot do that the notebook does.
    """

    source: str = ""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    notes: list[str] = field(default_factory=list)


def export(cells: Iterable[Found], name: str, file: str, command: str) -> Exported:
    """Returns the script of a notebook's cells.

    Args:
        cells: in order.
        name: the notebook's.
        file: the script's.
        command: what the script is written by, for who reads it.

    Raises:
        UsageError: a cell does what a script cannot do so; or no cell is for the ranks.
    """
    made = Exported()
    parts: list[str] = []
    future: dict[str, None] = {}
    for one in cells:
        made.cluster = one.options.cluster.over(made.cluster)
        if one.kind == RANKS and not one.fails:
            done = plain(one.source, one.where, _SHOW)
            made.notes += [f"{one.where}: {note}" for note in done.notes]
            future |= dict.fromkeys(done.future)
            parts.append(_cell(one, done, made.cluster.n))
        else:
            text, note = _comment(one)
            made.notes += [f"{one.where}: {note}"] if note else []
            parts += [text] if text else []
    if not any(part.startswith("# %%") for part in parts):
        raise UsageError(
            f"expected cells that begin with %%distributed, found none in {name}. "
            "Type it above what the ranks are to run."
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
    # A file may be called anything.
    told = "\n".join(about).replace("\\", r"\\").replace('"""', r"\"\"\"")
    head = [
        f'"""{told}',
        '"""',
        "",
        *future,
        "import allranks.batch",
        "from allranks.batch import *  # MPI starts here: rank, size, comm, allreduce, log …",
    ]
    made.source = "\n".join(head) + "\n\n" + "\n\n\n".join(parts) + "\n"
    return made


def _cell(one: Found, done: Plain, size: int | None) -> str:
    """A cell that ranks run: all of them have ended the one before."""
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


def _not_done(one: Found) -> Iterator[str]:
    """What options of a cell ask of the notebook."""
    options = one.options
    if options.timeout is not None:
        yield "--timeout: nothing interrupts a cell of a script; limit the job's time instead"
    if options.out is not None:
        yield f"-o {options.out}: there is no notebook to have the values of the last expression"
    if options.local:
        yield "--local: there is no notebook to run it in"


def _comment(one: Found) -> tuple[str, str]:
    """What a script has in place of a cell that it does not run, and what is said of that."""
    if one.kind == HEADING:
        return f"# {'─' * 4} {one.source}", ""
    if one.kind == PUSH:
        said = (
            f"left out: the notebook gave the ranks its {one.source}. A script has no notebook: "
            "make them in a cell of the ranks"
        )
        return f"# {one.magic}\n# {said}.", said
    if one.kind == ENSEMBLE:
        said = "left out: a notebook runs an ensemble, and its ranks keep no variable of it"
    elif one.kind == RANKS:
        said = "left out: its tag says that it may fail, which ends a script"
    elif not one.source:
        if one.magic.split()[1:2] == ["restart"]:
            said = "left out: the ranks keep the variables that a restart would have removed"
            return f"# {one.magic}\n# {said}.", said
        return "", ""
    else:
        said = "left out: it ran in the notebook, not on the ranks"
    lines = [one.magic] if one.magic else []
    lines += one.source.splitlines()
    quoted = "\n".join(f"#     {line}".rstrip() for line in lines)
    return f"# {one.where} is {said}:\n{quoted}", "" if one.kind == NOTEBOOK else said
