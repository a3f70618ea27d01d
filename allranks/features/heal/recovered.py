"""What a recovery has brought back, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from allranks.features.heal.recovery import RecoveryState
from allranks.records.ranks import label

_SHOWN_NAMES = 5


def text_of(done: RecoveryState, seconds: float) -> str:
    """Returns what has come back, after a number of seconds."""
    if done.starts_again:
        return _text_of_start(done, seconds)
    gone = sorted(done.gone)
    left = [rank for rank in done.before if rank not in done.gone]
    moved = "".join(
        f"; rank {rank} is on {done.host_of[rank]} now"
        for rank in gone
        if done.host_of[rank] != done.before[rank]
    )
    kept = f"{label(left)} kept {'its' if len(left) == 1 else 'theirs'} " if left else ""
    return f"{text_of_new(done, gone)}{moved}; {kept}({seconds:.1f} s)"


def text_of_new(done: RecoveryState, ranks: Collection[int]) -> str:
    """Returns that ranks were replaced, and what they have."""
    are, had = "was" if len(ranks) == 1 else "were", kept_text(done)
    has = f", with {had}" if had else f" and {have(len(ranks))} no variables"
    return f"{label(sorted(ranks))} {are} replaced{has}{_but_not(done)}"


def text_of_kept(done: RecoveryState) -> str:
    """Returns what fresh ranks have of those before them; "" if nothing was kept."""
    if not done.kept:
        return "; ".join(done.unread)
    return f"{label(done.before)} {have(len(done.before))} {kept_text(done)}{_but_not(done)}"


def kept_text(done: RecoveryState) -> str:
    """Returns what new ranks have taken back, as ``model and step kept 12 s ago``; "" if nothing
    was kept.
    """
    found = list(done.kept.values())
    if not found:
        return ""
    seconds = max(content["seconds"] for content in found)
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{listed(found[0]['names'])} kept {ago} ago"


def _but_not(done: RecoveryState) -> str:
    why = "; ".join(done.unread)
    return f", but not all that was kept: {why}" if why and done.kept else f": {why}" if why else ""


def _text_of_start(done: RecoveryState, seconds: float) -> str:
    parts = []
    for host, there in done.places.items():
        came = [rank for rank in there if rank in done.gone and done.before[rank] != host]
        if came:
            before = len(there) - len(came)
            parts.append(f"{label(came)} on {host}, which has {len(there)} ranks, not {before}")
    moved = f": {', '.join(parts)}" if parts else ""
    why = _but_not(done) or ("" if done.kept else ": they had kept none")
    kept = f"with {kept_text(done)}" if done.kept else "without variables"
    said = f"{label(sorted(done.gone))} started again {kept}{why}{moved}. "
    back = [rank for rank in done.before if rank not in done.gone.keys() | done.not_saved.keys()]
    if back:
        said += f"{label(back)} {'has its' if len(back) == 1 else 'have their'} variables again"
        said += f", but not {names}" if (names := _names_of(done.left_out, back)) else ""
        said += ", in new processes. "
    for problem in dict.fromkeys(done.not_saved.values()):
        ranks = [rank for rank, why in done.not_saved.items() if why == problem]
        said += f"{label(ranks)} lost the variables that were not kept: {problem}. "
    lost = set(done.before.values()) - done.places.keys()
    again = "To use all hosts again, which deletes variables: %distributed restart "
    return f"{said}{again if lost else ''}({seconds:.1f} s)"


def _names_of(left_out: Mapping[int, Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Returns the names that are missing, with the reasons."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        for name, why in left_out.get(rank, {}).items():
            found.setdefault((name, why), []).append(rank)
    shown = [
        f"{name}{'' if len(there) == len(ranks) else f' of {label(there)}'} ({why})"
        for (name, why), there in list(found.items())[:_SHOWN_NAMES]
    ]
    more = len(found) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def have(count: int) -> str:
    return "has" if count == 1 else "have"


def listed(names: Sequence[str]) -> str:
    """Returns names as ``model, optimizer and step``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
