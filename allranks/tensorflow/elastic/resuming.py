"""A training whose ranks have died goes on where it is started again. Runs in every rank.

Its commits are kept beside the ranks until it has ended: what is there when it begins was left by a
rank's death.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from allranks import collectives
from allranks.collectives import world
from allranks.errors import RankLeft
from allranks.tensorflow.elastic.state import State


@contextmanager
def resumed(state: State, name: str) -> Iterator[None]:
    """Within, the state's commits are kept for the training of that name.

    Where one is there already, of a training of that name that a rank's death has ended, the state
    begins with it. Collective over all ranks.
    """
    this = world.current()
    if this.keeps is None:
        yield
        return
    series = this.keeps.of_training
    series.settle()
    _begin(this, state, name)
    state.of_training = name
    try:
        yield
        collectives.barrier()  # until all have done it, one that dies takes it back
    except RankLeft:
        this.keeps.cut_off()
        raise
    except BaseException:
        series.drop()
        raise
    else:
        series.drop()
    finally:
        state.of_training = ""


def _begin(this: world.World, state: State, name: str) -> None:
    """Takes up the commit that is there, on all ranks or on none, and says so."""
    assert this.keeps is not None
    series = this.keeps.of_training
    found, why = None, ""
    try:
        found = series.load()
    except Exception as error:  # an object's own way to be unpickled may do anything
        why = f"rank {this.rank} cannot read it: {type(error).__name__}: {error}"
    at, kept = found or (time.time(), {})
    own = kept.get("training") == name
    if own:
        state.save()
    before = state.saved()
    fits = own and state.take_up(kept["saved"])
    if own and not fits:
        why = f"it does not fit the state of rank {this.rank}"
    told = collectives.allgather_object((fits, why))
    if all(fits for fits, _ in told):
        said = f"{name} continues from its last commit, {time.time() - at:.0f} s ago"
    else:
        if fits:
            state.take_up(before)
        series.drop()
        whys = [why for _, why in told if why]
        said = (
            f"{name} starts from the beginning: its last commit cannot be used: {whys[0]}"
            if whys
            else ""
        )
    if said and this.rank == 0:
        this.notice(said)
