"""Runs outside the notebook's kernel: relays in actors of Dask or Ray, one on each host.

A process of its own, because both systems start threads, and Ray handles signals. The launcher
(`ray_dask`) starts it, and talks with it in lines of JSON. First this process sends the ``nodes``;
then it gets an `Order`, and sends ``waits`` if it takes long, ``hosts`` once all relays run, and
``ended`` for each host whose relay has ended. At the end of its standard input it ends the actors.

    python -P -m allranks.cluster.launchers.actors dask tcp://h1:8786
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from allranks.records import limits

_CONNECT_SECONDS = 30.0
#: Dask tries again until then, also if the connection is refused.
_DASK_SECONDS = 10.0
#: Dask and Ray do not report that a process of an actor has ended: the actors are asked.
_POLL_SECONDS = 0.5
_SHOWN_LINES = 5
#: Dask and Ray limit each of their own processes to few threads. Ranks share the host's cores.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class ActorNode:
    """A host of Dask or Ray, with the CPUs and GPUs that the system counts, also those in use."""

    host: str
    address: str
    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Order:
    """What is to run: one relay for each of the numbers of ``ranks``, each on a host of its own."""

    ranks: tuple[int, ...]
    gpus: int
    relay: tuple[str, ...]
    invitation: dict[str, Any]


class RelayActor:
    """Runs the relay on the host of its worker. The relay ends with this object or its process.

    The constructor raises no exception: Dask would log its arguments, and so the key.
    """

    def __init__(self, relay: Sequence[str], invitation: dict[str, Any]) -> None:
        self._host = socket.gethostname()
        self._problem = ""
        self._written = tempfile.TemporaryFile()  # noqa: SIM115
        # Ray blocks signals in this thread, and ranks, which inherit that, need interrupts.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            self._relay = subprocess.Popen(
                relay,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._written,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in _THREADS},
            )
        except OSError as error:
            self._problem = str(error)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._relay.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its last lines have the reason
            line = json.dumps(invitation | {"host": self._host})
            self._relay.stdin.write(line.encode() + b"\n")
            self._relay.stdin.flush()

    def host(self) -> str:
        return self._host

    def ended(self) -> str:
        """Returns why the relay has ended, or did not start; empty while it runs."""
        if self._problem or (code := self._relay.poll()) is None:
            return self._problem
        self._written.seek(0)
        lines = self._written.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join([f"exit code {code}", *lines[-_SHOWN_LINES:]])

    def close(self) -> None:
        if not self._problem:
            end_by_input(self._relay, limits.ACTOR_SECONDS)  # its ranks end with it


def end_by_input(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Closes the input of a process, which ends with that; kills one that takes longer."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class DaskActors:
    """Actors on workers of Dask. They need no thread: Dask does not count the ranks."""

    waits = "Dask has not started the host agents of the ranks: its workers may be busy"

    def __init__(self, address: str) -> None:
        from distributed import Client

        where = {"scheduler_file" if address.startswith("/") else "address": address}
        self._client = Client(**where, timeout=_DASK_SECONDS)
        self._workers: dict[str, list[str]] = {}
        self._futures: list[Any] = []

    def nodes(self) -> list[ActorNode]:
        from distributed.comm import get_address_host

        threads = self._client.nthreads()
        for worker, host in sorted(self._client.run(socket.gethostname).items()):
            self._workers.setdefault(host, []).append(worker)
        return [
            ActorNode(host, get_address_host(its[0]), sum(threads.get(worker, 1) for worker in its))
            for host, its in self._workers.items()
        ]

    def place(self, order: Order) -> None:
        # The hosts with most threads get most ranks.
        hosts = sorted(self.nodes(), key=lambda node: -node.cpus)
        of_largest = dict(zip(_largest_first(order.ranks), hosts, strict=False))
        for number in range(len(order.ranks)):
            workers = self._workers[of_largest[number].host]
            more = {"workers": workers, "allow_other_workers": False, "pure": False}
            made = self._client.submit(
                RelayActor, order.relay, order.invitation, actor=True, **more
            )
            self._futures.append(made)

    def started(self) -> list[Any]:
        """Returns the actors once all of them run; raises the exception of one that failed."""
        if not all(made.done() for made in self._futures):
            return []
        return [made.result() for made in self._futures]

    def call(self, actors: Sequence[Any], method: str) -> list[Any]:
        """Returns the results of a method of each actor, or the exceptions."""
        return _results(lambda actor: getattr(actor, method)(), lambda one: one.result(), actors)

    def close(self) -> None:
        self._client.close()


class RayActors:
    """Actors on nodes of Ray, in a placement group that has a CPU for each rank."""

    waits = "Ray has not started the host agents of the ranks: their CPUs may be in use"

    def __init__(self, address: str) -> None:
        import ray

        self._ray = ray
        ray.init(address or "auto", log_to_driver=False, logging_level="ERROR")
        self._actors: list[Any] = []
        self._named: list[Any] = []

    def nodes(self) -> list[ActorNode]:
        found: dict[str, ActorNode] = {}
        for node in self._ray.nodes():
            if node["Alive"]:
                host = node["NodeManagerHostname"]
                counts = [int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU")]
                found.setdefault(host, ActorNode(host, node["NodeManagerAddress"], *counts))
        return list(found.values())

    def place(self, order: Order) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = [{"CPU": ranks, "GPU": order.gpus} for ranks in order.ranks]
        bundles = [{name: n for name, n in need.items() if n} for need in needs]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        kind = self._ray.remote(RelayActor)
        for number, ranks in enumerate(order.ranks):
            place = PlacementGroupSchedulingStrategy(self._group, number)
            made = kind.options(num_cpus=ranks, num_gpus=order.gpus, scheduling_strategy=place)
            self._actors.append(made.remote(order.relay, order.invitation))
        self._named = [actor.host.remote() for actor in self._actors]

    def started(self) -> list[Any]:
        """Returns the actors once all of them run; raises the exception of one that failed."""
        done, waited = self._ray.wait(self._named, num_returns=len(self._named), timeout=0)
        self._ray.get(done)
        return [] if waited else self._actors

    def call(self, actors: Sequence[Any], method: str) -> list[Any]:
        """Returns the results of a method of each actor, or the exceptions."""
        return _results(lambda actor: getattr(actor, method).remote(), self._ray.get, actors)

    def close(self) -> None:
        # The actors and their placement group end with this job of Ray.
        self._ray.shutdown()


SYSTEMS: dict[str, type[DaskActors | RayActors]] = {"dask": DaskActors, "ray": RayActors}


def _largest_first(ranks: Sequence[int]) -> list[int]:
    return sorted(range(len(ranks)), key=lambda number: -ranks[number])


def _results(
    ask: Callable[[Any], Any], get: Callable[[Any], Any], actors: Sequence[Any]
) -> list[Any]:
    # Each is asked before the first answers. Also asking raises: Dask's actor, once its worker is
    # lost.
    asked = [_or_exception(ask, actor) for actor in actors]
    return [one if isinstance(one, Exception) else _or_exception(get, one) for one in asked]


def _or_exception(act: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return act(argument)
    except Exception as error:
        return error


def _serve(actors: DaskActors | RayActors, say: Callable[..., None]) -> None:
    say(nodes=[dataclasses.astuple(node) for node in actors.nodes()])
    line = sys.stdin.readline()
    if not line:
        return
    order = Order(**json.loads(line))
    actors.place(order)
    began = time.monotonic()
    while not (running := actors.started()):
        if time.monotonic() > began + 2 * _POLL_SECONDS:
            say(waits=actors.waits)
            began = float("inf")
        if _ended(_POLL_SECONDS / 5):
            return
    hosts = actors.call(running, "host")
    for lost in hosts:
        if isinstance(lost, Exception):
            raise lost
    # Ray places them in any order: so ranks are on the same hosts at each start.
    say(hosts=sorted(zip(hosts, order.ranks, strict=True)))
    left = dict(zip(hosts, running, strict=True))
    while not _ended(_POLL_SECONDS):
        for host, why in zip(list(left), actors.call(list(left.values()), "ended"), strict=True):
            if why:
                say(ended=[host, _first_line(why) if isinstance(why, Exception) else why])
                del left[host]
    actors.call(list(left.values()), "close")


def _ended(seconds: float) -> bool:
    # Nothing but its end comes on the standard input now.
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def main(system: str, address: str) -> None:
    # Dask and Ray print: only lines of this module go to the launcher.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    connected = threading.Event()

    def watch() -> None:
        # Both systems may wait for minutes, and the launcher may end meanwhile.
        if not _ended(_CONNECT_SECONDS) and not connected.is_set():
            say(failed=f"no answer within {_CONNECT_SECONDS:g} s")
        if not connected.is_set():
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    actors = None
    try:
        actors = SYSTEMS[system](address)
        connected.set()
        _serve(actors, say)
    except BrokenPipeError:
        pass  # the launcher has ended
    except Exception as error:
        say(failed=_first_line(error))
    finally:
        if actors is not None:
            actors.close()


if __name__ == "__main__":
    # Workers import classes from this module by its name, which is not __main__.
    from allranks.cluster.launchers import actors as itself

    itself.main(*sys.argv[1:])
