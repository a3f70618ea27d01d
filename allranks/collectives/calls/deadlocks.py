"""Ranks that wait for each other: the first line of their error, and its class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from allranks.errors import CollectiveMismatch, Deadlock
from allranks.records.ranks import label

NEVER = "can go on"
"""A part of every such line."""
#: ``comm.Isend, Wait`` is a wait for a send.
_SENDS = re.compile(r"(?:comm\.)?i?[bsr]?send\b", re.IGNORECASE)
_RECEIVES = re.compile(r"(?:comm\.)?i?m?(?:recv|probe)\b", re.IGNORECASE)
_EXCHANGES = re.compile(r"(?:comm\.)?i?sendrecv", re.IGNORECASE)
_ADVICE = "Make the same calls in the same order on every rank."


class OtherTag(NamedTuple):
    """A message that has come, and the receive that waits for another tag. Ranks of the world."""

    receiver: int
    source: int
    sent: int
    wanted: int

    def __str__(self) -> str:
        return (
            f"Rank {self.source} has sent a message with tag {self.sent}, and rank {self.receiver} "
            f"waits for tag {self.wanted}"
        )


def text(ranks: Sequence[int], titles: Iterable[str], tags: Sequence[OtherTag] = ()) -> str:
    """Returns that the ranks wait for each other, and what to change in these calls."""
    if len(ranks) == 1:
        alone = advice_on(tags) or "A message to itself needs isend, irecv or sendrecv."
        return f"{label(ranks)} waits for itself, and never {NEVER}. {alone}"
    advice = advice_on(tags) or _advice(titles)
    return f"{label(ranks)} wait for each other, and none {NEVER}. {advice}"


def advice_on(tags: Sequence[OtherTag]) -> str:
    """Returns what to change if messages have come with other tags; "" if there are none."""
    if not tags:
        return ""
    said = "; ".join([str(tags[0]), *(f"{one}".replace("Rank", "rank", 1) for one in tags[1:3])])
    more = f"; and {len(tags) - 3} more" if len(tags) > 3 else ""
    return f"{said}{more}. Send and receive with the same tag."


def advice_alone(title: str, rank: int, partner: str) -> str:
    """Returns what to change where ``rank`` waits in a call for a message with a partner that has
    left, as ``rank 1``; "" if the call is none of messages.
    """
    same = ", with the same tag" if title.startswith("comm.") else ""
    if _RECEIVES.match(title):
        return f"Let {partner} send to rank {rank}{same}, or leave out this receive."
    if _SENDS.match(title):
        return f"Let {partner} receive from rank {rank}{same}, or leave out this send."
    if _EXCHANGES.match(title):
        return f"Let {partner} call sendrecv too, with rank {rank} as its partner."
    return ""


def advice_for_some(title: str) -> str:
    """Returns what to change if some ranks make a call that others do not make."""
    some = "Make the same calls on every rank. A call of some ranks alone needs"
    if title.startswith("comm."):
        return f"{some} a communicator of theirs, which all ranks make with comm.Split."
    return (
        f"{some} a process set: let every rank make s = add_process_set([0, 1]), and pass "
        "process_set=s."
    )


def error(said: str) -> CollectiveMismatch:
    """Returns the error with this text, whose first line is one of `text` or of a mismatch."""
    first = said.partition("\n")[0]
    return (Deadlock if NEVER in first and _ADVICE not in first else CollectiveMismatch)(said)


def _advice(titles: Iterable[str]) -> str:
    called = set(titles)
    kinds = (_SENDS, _RECEIVES, _EXCHANGES)
    sends, receives, exchanges = (set(filter(kind.match, called)) for kind in kinds)
    if called == sends:
        return "Let some ranks receive first, or use sendrecv."
    if called == receives:
        return "Let some ranks send first, or use sendrecv."
    if called == exchanges:
        return "Make the dest of each sendrecv a rank whose source it is, with the same tag."
    if called == sends | receives | exchanges:
        return "Make a receive for each send, with the same tag, or use sendrecv."
    return _ADVICE
