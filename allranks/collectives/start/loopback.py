"""A whole world in one process: each rank is a thread. Runs anywhere, without MPI.

For unit tests and for teaching: the functions, the guard, the blocks and the windows are the
real ones, over memory that the threads share. There is no `comm` and no send or recv.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from allranks.collectives import world as worlds
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.callsite import of_traceback
from allranks.collectives.host.channel import Channel
from allranks.collectives.host.memory import Segment
from allranks.collectives.host.window import Window
from allranks.collectives.world.world import World

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
    results: list[Any] = [None] * ranks
    failures: list[tuple[float, BaseException]] = []

    def body(world: World) -> None:
        worlds.set_thread(world)
        world.main_thread = threading.get_ident()
        world.enter("the program", None, 0)
        try:
            results[world.rank] = function(*arguments)
            world.depart("it ended", False, "")
        except BaseException as error:
            failures.append((len(failures), error))
            reason = f"raised {type(error).__name__}: {error}"
            world.depart(reason, True, str(of_traceback(error.__traceback__)))
        finally:
            worlds.set_thread(None)

    threads = [
        threading.Thread(target=body, args=(world,), name=f"rank {world.rank}", daemon=True)
        for world in worlds_of(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0][1]
    return results
