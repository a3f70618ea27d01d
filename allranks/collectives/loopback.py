"""A whole world in one process: each rank is a thread. Runs anywhere, without MPI.

For unit tests and for teaching: the functions, the guard, the blocks and the windows are the
real ones, over memory that the threads share. There is no `comm` and no send or recv.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from allranks.collectives import world as worlds
from allranks.collectives.calls.rank_state import Board
from allranks.collectives.calls.sites import of_traceback
from allranks.collectives.host.memory import Segment, Window
from allranks.collectives.host.shared_memory import Channel
from allranks.collectives.world.world import World

S = TypeVar("S")
T = TypeVar("T")


def worlds_of(ranks: int) -> list[World]:
    """The worlds of this number of ranks on one host, with shared memory."""
    everybody, hosts = tuple(range(ranks)), (0,) * ranks
    board, shared = Segment(Board.nbytes(ranks)), Segment(Channel.nbytes(ranks))
    made = []
    for rank in everybody:
        world = World(rank, hosts, Board(board.memory, everybody, rank))
        world.window = Window(world.board)
        # Threads share one interpreter: one that spins keeps the others from running.
        world.spins, world.spin_seconds = 0, 0.0
        world.open(0, everybody, shared.memory)
        made.append(world)
    # Only the descriptors: the mappings of the ranks stay.
    board.close()
    shared.close()
    return made


def run(ranks: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Calls a function on every rank of a loopback world and returns the ranks' results.

    Inside it, the functions of `allranks.collectives` are that rank's.

    Raises:
        BaseException: the error of the first rank to fail; ranks that waited for it fail later.
    """

    def body(world: World) -> T:
        worlds.set_thread(world)
        # The thread whose line is shown when other ranks wait for this one.
        world.main_thread = threading.get_ident()
        world.begin()
        result = function(*arguments)
        world.depart("it ended", False, "")
        return result

    def failed(world: World, error: BaseException) -> None:
        reason = f"raised {type(error).__name__}: {error}"
        world.depart(reason, True, of_traceback(error.__traceback__).place)

    return together(worlds_of(ranks), body, failed)


def together(
    ranks: Sequence[S], body: Callable[[S], T], failed: Callable[[S, BaseException], None]
) -> list[T]:
    """Runs ``body`` for each rank in a thread of its own, and returns the results.

    ``failed`` reports a rank's error to the other ranks. Once all have ended, the first error is
    raised here.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run_one(place: int, rank: S) -> None:
        try:
            results[place] = body(rank)
        except BaseException as error:
            failures.append(error)
            failed(rank, error)

    threads = [
        threading.Thread(target=run_one, args=each, name=f"rank {each[0]}", daemon=True)
        for each in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[place] for place in range(len(ranks))]
