"""Imports the production code into the simulation, and replaces what has no model of its own.

What is replaced here touches the real machine in a way that other processes of the world cannot
see: memory, logs, cgroups, GPUs, the display of progress, and the check of a network by ports.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.simulated import models, system
from tests.simulated.kernel import INF, End, File, Process, World, pipe
from tests.simulated.sockets import open_file, this_process
from tests.simulated.system import MODELS, PROGRAMS

_LOGS = "/logs"
_CLOSE_SECONDS = 2.0
_CONTROLLER_SECONDS = 0.3


def _nothing(*_: object, **__: object) -> None: ...


class _Controller:
    client, engine = {"client": 1}, {"engine": 1}

    def run(self, complete: Callable[[], object], deaths: int) -> None:
        system.sleep(_CONTROLLER_SECONDS)
        complete()
        World.it.block(lambda: False, [], None)

    def free_ports(self) -> None: ...


class _RankFeature:
    @staticmethod
    def spare(config: Any, wake: int) -> models.Spare:
        return models.Spare(wake, config.size, len(config.seats))


def _fork(
    live: Callable[[], object],
    environment: dict[str, str],
    log: str,
    work_dir: str,
    keep: Iterable[int] = (),
) -> int:
    me = this_process()
    files = {number: File() for number in range(3)}
    files |= {fd: me.fds[fd] for fd in keep if fd in me.fds}
    child = World.it.spawn("child", me.host, live, me, files, environment, pdeath=True)
    return child.pid


def _shared_segments(pid: int, began: float = 0.0) -> set[str]:
    process, path = World.it.procs[pid], models.SHARED.format(pid)
    return {path} if process.alive and path in process.host.files else set()


def _end_of(path: str, nbytes: int, start: int = 0) -> str:
    log = open_file(path, "rb").read()
    return str(log[max(start, len(log) - nbytes) :].decode())


MODELS |= {
    "allranks.engine.rank": SimpleNamespace(
        Rank=models.Rank, log_path=lambda config, rank: f"{config.log_dir}/rank-{rank}.log"
    ),
    "allranks.engine.libraries": SimpleNamespace(
        ignore_warnings=_nothing,
        preload=_nothing,
        seed_anew=_nothing,
        share_cores=_nothing,
        visible_gpus=lambda: (),
    ),
    # All files of a simulated host are this user's.
    "allranks.own_files": SimpleNamespace(
        make_folder=lambda path: system.os.makedirs(path),
        make_folders=lambda path: system.os.makedirs(path),
        open_folder=lambda path, others=0: this_process().add(File()),
        open_file=lambda path: path,
        open_any_file=lambda path: path,
        check_owner=_nothing,
        check_peer=_nothing,
        peer=lambda visitor: (visitor.peer.pid if visitor.peer is not None else 0, 0),
        exposed_part=lambda path: "",
        remove_old_logs=_nothing,
        end_of=_end_of,
        is_own_folder=lambda path, others=0: True,
    ),
    "allranks.doors": SimpleNamespace(accept=lambda listener: listener.accept()[0]),
    "allranks.port_filter": SimpleNamespace(restrict_ports_of=_nothing),
}

from allranks.cluster import (  # noqa: E402
    cell_run,
    cells,
    cluster,
    connection,
    log_folder,
    options,
    session_folder,
    sockets,
)
from allranks.cluster.launchers import job  # noqa: E402
from allranks.cluster.launchers import launcher as launchers  # noqa: E402
from allranks.engine import processes  # noqa: E402
from allranks.engine.host import features, host_agent  # noqa: E402
from allranks.features.attach import attachment, caretaker, ownership  # noqa: E402
from allranks.features.attach.host import HostAttach  # noqa: E402
from allranks.features.hosts import port_test, relay  # noqa: E402


class _Clients(features.HostFeature):
    def controller(self, config: object) -> _Controller:
        return _Controller()


class _KeptFolders:
    """Nothing is kept after a cell: `Rank` models no collectives' own variables."""

    have_files = False

    def __init__(self, paths: Sequence[str] = (), on_several_hosts: bool = False) -> None:
        self.paths = tuple(paths) or ("/dev/shm/kept",)

    hold = stay = let_go = close = _nothing


class _Quiet:
    """Stands for what only shows or writes something."""

    def __init__(self, *_: object) -> None: ...

    show = end = write = close = _nothing


class _SshJob(job.Job):
    """A relay on each host, and an ssh on the notebook's machine that ends with it."""

    def __init__(
        self, hosts: Sequence[Any], invitation: Any, tell: Callable[[str, str], object]
    ) -> None:
        world, me = World.it, this_process()
        self._hosts = hosts
        self._ssh: dict[str, Process] = {}
        self._inputs: list[int] = []
        for host in hosts:
            lifeline, there = pipe()
            own = dataclasses.replace(invitation, host=host.name)
            files: dict[int, File] = {0: lifeline, 1: File(), 2: File()}
            remote = world.spawn(
                "relay", world.hosts[host.name], _relay(own), None, files, {"PATH": ""}
            )
            here, mine = pipe()
            self._inputs.append(me.add(mine))
            files = {0: here, 1: File(), 2: File(), 3: there}
            ssh = world.spawn("ssh", me.host, _ssh(remote, here, there), me, files)
            self._ssh[host.name] = ssh
            watch = system.SimulatedThread(_watch_ssh, (ssh, host.name, tell), name="ssh")
            watch.start()

    def give_up(self, host: str) -> None:
        self._ssh[host].signal(9)

    def outlives(self) -> dict[str, Any]:
        return {"yes": True}

    def close(self) -> None:
        world = World.it
        for fd in self._inputs:
            this_process().close(fd)
        end = world.now + _CLOSE_SECONDS
        for ssh in self._ssh.values():
            world.block(lambda ssh=ssh: not ssh.alive, [ssh.ended], max(0.0, end - world.now))
            ssh.signal(9)


def _relay(invitation: Any) -> system.Main:
    def main() -> None:
        raise SystemExit(relay.Relay(invitation, invitation.host, lifeline=0).run())

    return main


def _ssh(remote: Process, here: End, there: End) -> system.Main:
    return lambda: models.ssh(remote, here, there)


def _watch_ssh(ssh: Process, host: str, tell: Callable[[str, str], object]) -> None:
    World.it.block(lambda: not ssh.alive, [ssh.ended])
    tell(host, f"was lost: ssh ended with exit code {ssh.code}")


class _TakenJob(job.Job):
    def __init__(self, hosts: Sequence[Any]) -> None:
        self._hosts = hosts

    def close(self) -> None: ...


class SimulatedHosts(launchers.MultiHostLauncher):
    """The launcher of ranks on hosts of the world."""

    name = "simulated"
    outlives_hosts = True

    def __init__(self, places: Sequence[tuple[str, int]]) -> None:
        super().__init__("hosts")
        self._places = [job.Host(name, count) for name, count in places]

    def size(self, n: int | None) -> int:
        return sum(host.ranks for host in self._places)

    def address(self) -> str:
        return this_process().host.address

    def environment(self) -> dict[str, str]:
        return {}

    def why_not_replaced(self) -> str:
        return ""

    def command(self, hosts: Sequence[Any], spares: int = 0) -> list[str]:
        where = ",".join(f"{host.name}:{host.ranks + spares}" for host in hosts)
        count = sum(host.ranks + spares for host in hosts)
        return ["mpiexec", "--host", where, "-n", str(count)]

    def run(self, invitation: Any, log_dir: str, tell: Callable[[str, str], None]) -> _SshJob:
        return _SshJob(self._places, invitation, tell)

    def take_over(self, hosts: Sequence[Any], job: object) -> _TakenJob:
        return _TakenJob(hosts)


class ThisMachine(launchers.LocalLauncher):
    """The launcher of ranks on the notebook's own machine."""

    name = "simulated-here"

    def environment(self) -> dict[str, str]:
        return {}

    def why_not_replaced(self) -> str:
        return ""

    def command(self, size: int) -> list[str]:
        return ["mpiexec", "-n", str(size)]


def launcher(world: Any) -> launchers.Launcher:
    """Returns the launcher of ranks in this world."""
    return ThisMachine() if world.is_one_machine else SimulatedHosts(world.places)


def _unreachable(targets: Iterable[Any], seconds: float = 2.5) -> dict[str, str]:
    """Finds out which hosts answer, as TCP does: it tries again after 1 s, and after 2 s more."""
    world: Any = World.it
    here = this_process().host.name
    problems, waits = {}, 0.0
    for target in targets:
        there = world.host_of_address(target.address)
        cut, still = world.blocked.get((here, there), 0), world.still.get(there, 0)
        wait = max(cut, still) - world.now
        answered = 0.0 if wait <= 0 else 1.0 if wait <= 1 else 3.0
        if answered + 2 * world.delay(here, there) > seconds:
            problems[target.host] = f"no answer within {seconds:g} s"
            waits = seconds
        else:
            waits = max(waits, answered)
    system.sleep(waits)
    return problems


def _listen(address: str, listen: Callable[[str], Any] = port_test.listen) -> Any:
    world: Any = World.it
    world.trigger("listens")
    return listen(address)


def _tell(self: Any, event: Any, tell: Callable[..., None] = host_agent.HostAgent.tell) -> None:
    world: Any = World.it
    tell(self, event)
    world.trigger(f"agent {event.name}")


def _send_by_relays(
    self: Any,
    ranks: Iterable[int],
    frames: Any,
    send: Callable[..., None] = sockets.RankSockets._send_by_relays,
) -> None:
    world: Any = World.it
    if b'"heal"' in frames[0] and world.awaits("heal sent to one rank"):
        first, *ranks = ranks
        send(self, [first], frames)
        world.trigger("heal sent to one rank")
        system.sleep(0)  # this process may end now
    send(self, ranks, frames)


def _begin(self: Any, config: Any, begin: Callable[..., None] = relay.Relay._begin) -> None:
    begin(self, config)
    world: Any = World.it
    world.trigger(f"relay of {self.host} begins")


def _listen_for_ranks(
    self: Any, *urls: str, listen: Callable[..., None] = relay.Relay._listen
) -> None:
    listen(self, *urls)
    world: Any = World.it
    world.trigger(f"relay of {self.host} listens")


def _sign_of(pid: int) -> str:
    process = World.it.procs.get(pid)
    return str(process.started) if process is not None and process.alive else ""


_numbers = itertools.count(1)


def _name_session_folder(where: str = "") -> str:
    return f"/tmp/allranks-session-{this_process().pid}-{next(_numbers):08x}"


def _replace(module: Any, **names: Any) -> None:
    for name, value in names.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, value)


_replace(
    processes,
    adopt_orphans=lambda: setattr(this_process(), "subreaper", True),
    fork=_fork,
    shared_memory_left=lambda: INF,
    shared_segments=_shared_segments,
    segments_since=lambda began: set(),
    write_to=_nothing,
    _group_of=lambda pid: None,
    _of_the_system=lambda: float("nan"),
)
_replace(processes.ExitReports, _memory=lambda self, group, nbytes: "")
_replace(sockets.RankSockets, _send_by_relays=_send_by_relays)
_replace(relay.Relay, _begin=_begin, _listen=_listen_for_ranks)
_replace(relay, _own_address=lambda url: this_process().host.address)
_replace(port_test, unreachable=_unreachable, listen=_listen)
_replace(host_agent.HostAgent, tell=_tell)
_replace(attachment, sign_of=_sign_of)
_replace(log_folder, make_log_folder=lambda: _LOGS)
_replace(session_folder, name_session_folder=_name_session_folder, session_folders=lambda: [])
_replace(connection, name_session_folder=_name_session_folder)
_replace(cluster, ProgressLine=_Quiet, check_open_files=_nothing)
_replace(cells, KeptFolders=_KeptFolders, refused_log_folder=lambda: "")
_replace(ownership, KeptFolders=_KeptFolders)
_replace(cell_run, front_end=lambda: "text", of_this_process=lambda: None)
_replace(options, max_ranks=lambda: None)


def _agent(words: list[str]) -> system.Main:
    def agent() -> None:
        sides: dict[str, list[Any]] = {"host": [_Clients, HostAttach], "rank": [_RankFeature]}
        host_agent.main(sides.__getitem__)

    return agent


def _caretaker(words: list[str]) -> system.Main:
    def caretaker_() -> None:
        caretaker.main()

    caretaker_.__name__ = "caretaker"
    return caretaker_


PROGRAMS |= {
    "allranks.agent": _agent,
    "allranks.features.attach.caretaker": _caretaker,
    "prted": models.prted,
    "mpiexec": models.mpiexec,
}
