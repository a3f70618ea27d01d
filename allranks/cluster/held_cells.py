"""The words about a cell that ranks cannot begin, because they run requests of clients.

An interrupt of such a cell ends the requests of this notebook that it waits for, too. Those of
other notebooks go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from allranks.records.ranks import label

#: By rank, the request that it runs: see `allranks.engine.epochs.RankEpochs.in_request`.
Requests = Mapping[int, Mapping[str, str]]


def what_waits(held: Requests, own: Collection[str], request: str) -> str:
    """Returns for which ranks a cell waits, and what an interrupt ends; ``own`` are the clients of
    this notebook, and ``request`` is what they make.
    """
    ours, others = _by_notebook(held, own)
    said = [f"{label(ours)} must first answer {request}; interrupt to end both"] if ours else []
    for notebook, ranks in others.items():
        said.append(
            f"{label(ranks)} must first answer {request} of {notebook}; interrupt to leave the "
            "cell out, and to end the request as well, type then: ranks.interrupt()"
        )
    return "\n".join(said)


def what_ended(held: Requests, own: Collection[str], request: str) -> str:
    """Returns what an interrupt of that cell has ended beside it, and what goes on."""
    ours, others = _by_notebook(held, own)
    said = [f"{request} on {label(ours)} was interrupted, too"] if ours else []
    for notebook, ranks in others.items():
        goes = "goes" if len(ranks) == 1 else "go"
        said.append(
            f"{label(ranks)} {goes} on with {request} of {notebook}; to end it, type: "
            "ranks.interrupt()"
        )
    return "; ".join(said)


def _by_notebook(held: Requests, own: Collection[str]) -> tuple[list[int], dict[str, list[int]]]:
    """Returns the ranks that run requests of this notebook, and those of others by their names."""
    ours, others = list[int](), dict[str, list[int]]()
    for rank, request in sorted(held.items()):
        if request["client"] in own:
            ours.append(rank)
        else:
            name = f" ({request['notebook']})" if request["notebook"] else ""
            others.setdefault(f"another notebook{name}", []).append(rank)
    return ours, others
