"""The text of a mismatch: the first difference between the calls of the ranks."""

from __future__ import annotations

import re

from allranks.collectives.calls.sites import Site
from allranks.collectives.calls.specs import Spec
from allranks.records.ranks import label

_FACTORS = ("prescale", "postscale", "compression")
_WORDS = {
    "op": "operation",
    **dict.fromkeys(_FACTORS, "factors and options"),
    "elements": "number of elements",
    "device": "kind of memory",
    "nbytes": "number of bytes",
    "refused": "earlier calls",
    "in_place": "kind of send buffer",
    "order": "order in memory",
}
"""The names of a spec's fields in a message, where the field's own does not say it."""
_ADVICE = {
    "op": "Make the same calls in the same order on every rank; look for an `if` on the rank",
    "reduction": "Pass the same op= on every rank",
    "dtype": "Convert with astype() before the call",
    "shape": "Check the last batch, or drop the remainder",
    "root": "Pass the same root on every rank; it is a rank of the world, in a process set too",
    **dict.fromkeys(_FACTORS, "Pass the same factors and options on every rank"),
    "elements": "Pass the same number of tensors on every rank",
    "transport": "Pass the same transport= on every rank, and set ALLRANKS_ALLREDUCE to the same "
    "value",
    "nbytes": "Pass buffers of the same type and length on every rank",
    "refused": "Data of the call that a rank refused may still be on its way. Let its error end "
    "the cell; in a script call allranks.collectives.renew() on every rank",
    "in_place": "Pass MPI.IN_PLACE, or the receive buffer as send buffer, on every rank or on none",
    "order": "MPI moves memory as it lies, and a transposed array is in Fortran's order. Send "
    "np.ascontiguousarray(x), and receive into an array in C order",
    "device": "Move the array first (cupy.asarray(x), x.get()), or pass device='/cpu:0'",
}


_ORDERS = {"": "C order", "F": "Fortran's", "C+F": "both"}
_OF_CALLS = ("shape", "dtype", "elements", "reduction", "nbytes")
"""Fields that often differ because the ranks are in different calls."""
_LABELLED = re.compile("'(index|columns) ")
_OF_RANKS = ("add_process_set", "new_group", "split_group")
"""Calls whose shape is a list of ranks."""


def mismatch_text(brought: dict[int, tuple[Spec, Site]]) -> str:
    """The first difference between the calls, its ranks and their lines."""
    specs = [spec for spec, _ in brought.values()]
    field = next((f for f in Spec._fields if len({getattr(s, f) for s in specs}) > 1), "op")
    title = specs[0].title if field != "op" else "a collective"
    if len({spec.client for spec in specs}) > 1:
        return _apart_text(brought)
    if field == "mistake":
        rank, wrong = next((r, s.mistake) for r, (s, _) in sorted(brought.items()) if s.mistake)
        sites = list_sites({rank: site for rank, (_, site) in brought.items()})
        return "\n".join([f"{title} needs, on {label((rank,))}, {wrong}.", *sites])
    if field == "reduction":
        title = specs[0].op
    found = _group({r: _value(s, field) for r, (s, _) in brought.items()})
    said = ", ".join(
        f"{label(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in found
    )
    word, advice = _WORDS.get(field, field), _ADVICE[field]
    if field == "shape" and specs[0].op.startswith("grouped_"):
        advice = "Pass the same arrays in the same order on every rank: those of the same model"
    if field == "shape" and any(_LABELLED.search(str(spec.shape)) for spec in specs):
        word = "shape and labels"
        advice = "Values are combined by their places. Sort them alike on "
        advice += "every rank: x.reindex(labels), or x.sort_index(); or pass x.to_numpy()"
    if field == "shape" and title in _OF_RANKS:
        word, advice = "ranks", "Pass the same list on every rank, also on those that are not in it"
    if field in _OF_CALLS and title not in _OF_RANKS and _are_other_lines(brought, field):
        advice = f"These are calls of different lines. {_ADVICE['op']}"
    lines = [f"{title} needs the same {word} on every rank: {said}. {advice}."]
    lines += list_sites({rank: site for rank, (_, site) in brought.items()})
    return "\n".join(lines)


def _apart_text(brought: dict[int, tuple[Spec, Site]]) -> str:
    """As `mismatch_text`, where some ranks are in a request of a client, and others in a cell or in
    one of another client.
    """
    clients = {rank: spec.client for rank, (spec, _) in sorted(brought.items())}
    there = [rank for rank, client in clients.items() if client]
    other, advice = "a cell", "before the cell"
    if len(there) == len(clients):
        there = [rank for rank, client in clients.items() if client == clients[there[0]]]
        other, advice = "one of another client", "before the other client makes one"
    others = [rank for rank in clients if rank not in there]
    are = "is" if len(there) == 1 else "are"
    return "\n".join(
        [
            f"{label(there)} {are} in a request of a client, {label(others)} in {other}: a call of "
            "the one would be taken for a call of the other. Wait for the answer to the request "
            f"{advice}, or let the other ranks run the request, too.",
            *list_sites({rank: site for rank, (_, site) in brought.items()}),
        ]
    )


def _are_other_lines(brought: dict[int, tuple[Spec, Site]], field: str) -> bool:
    """Whether no line was called with two values of the field."""
    values: dict[Site, set[str]] = {}
    for spec, site in brought.values():
        values.setdefault(site, set()).add(_value(spec, field))
    return len(values) > 1 and all(len(own) == 1 for own in values.values())


def list_sites(sites: dict[int, Site]) -> list[str]:
    return [
        f"  {label(ranks)} at {site}"
        for site, ranks in _group({rank: str(site) for rank, site in sites.items()})
    ]


def _value(spec: Spec, field: str) -> str:
    value = getattr(spec, field)
    if field in _FACTORS:
        if spec.prescale == spec.postscale == 1.0 and not spec.compression:
            return "none"
        return (
            f"prescale={spec.prescale}, postscale={spec.postscale}, "
            f"compression={spec.compression or None}"
        )
    if field == "op":
        return str(value)
    if field == "refused":
        return f"refused {value}"
    if field == "in_place":
        return "the receive buffer" if value else "another buffer"
    if field == "order":
        return _ORDERS[spec.order]
    if field == "device":
        return "an array on a GPU" if value else "one in host memory"
    if value in ("", -1, ()):
        return "()" if field == "shape" else "none"
    return str(value).replace("None", "any")


def _group(values: dict[int, str]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    # The fewest ranks first: they are the likely cause.
    return sorted(found.items(), key=lambda item: (len(item[1]), item[1][0]))
