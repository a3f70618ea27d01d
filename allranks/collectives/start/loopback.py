"""A whole world in one process: each rank is a thread. Runs anywhere, without MPI.

For unit tests and for teaching: the functions, the guard, the blocks and the windows are the
real ones, over memory that the threads share. There is no `comm` and no send or recv.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from allranks.collectives import world as worlds
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.callsite import of_traceback
from allranks.collectives.host.channel import Channel
from allranks.collectives.host.memory import Segment
from allranks.collectives.host.window import Window
from allranks.collectives.world.world import World

S = TypeVar("S")
T = TypeVar("T")


def worlds_of(ranks: int) -> list[World]:
    """The worlds of so many ranks on one host, their memory shared."""
    everybody, hosts = tuple(range(ranks)), (0,) * ranks
    board, shared = Segment(Board.nbytes(ranks)), Segment(Channel.nbytes(ranks))
    made = []
    for rank in everybody:
        world = World(rank, hosts, Board(board.memory, everybody, rank))
        world.window = Window(world.board)
        # Threads share one interpreter: who spins keeps the others from running.
        world.spins, world.spin_seconds = 0, 0.0
        world.open(0, everybody, shared.memory)
        made.append(world)
    board.close()
    shared.close()
    return made


def run(ranks: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Calls a function on every rank of a loopback world and returns the ranks' results.

    Inside it, the functions of `allranks.collectives` are that rank's.

    Raises:
        BaseException: what the first rank to fail raised; ranks that only waited for it come
            after it.
    """

    def body(world: World) -> T:
        worlds.set_thread(world)
        world.main_thread = threading.get_ident()
        world.begin()
        result = function(*arguments)
        world.depart("it ended", False, "")
        return result

    def failed(world: World, error: BaseException) -> None:
        reason = f"raised {type(error).__name__}: {error}"
        world.depart(reason, True, str(of_traceback(error.__traceback__)))

    return together(worlds_of(ranks), body, failed)


def together(
    ranks: Sequence[S], body: Callable[[S], T], failed: Callable[[S, BaseException], None]
) -> list[T]:
    """What ``body`` returns for each rank, in a thread of its own.

    ``failed`` tells the other ranks of one that has raised. What the first to fail raised is raised
    here, once all have ended.
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
