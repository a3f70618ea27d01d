"""``allranks doctor --on``: whether hosts can connect to this machine, and to each other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping

from allranks.cluster.agents import HostsContext
from allranks.cluster.doctor import OK, WRONG, Finding
from allranks.cluster.features import NotebookHooks
from allranks.cluster.host_agent import open_sockets
from allranks.cluster.launchers import registry
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.sockets import EventQueue, FromHostAgent
from allranks.errors import UsageError
from allranks.features.hosts.agents import MultiHostAgents
from allranks.records.agent import Event, HostLeft

_COME_SECONDS = 60.0
_TEST_SECONDS = 10.0
#: How often a job in a queue is looked at.
_QUEUE_SECONDS = 0.1


def examine_hosts(on: str, tell: Callable[[str], None]) -> list[Finding]:
    """Checks the hosts that ``on`` names: that they reach this machine, and each other.

    ``tell`` is called with the reason while a job waits in a queue.
    """
    launcher = registry.named(on)
    if not isinstance(launcher, MultiHostLauncher):
        raise UsageError(f"expected other hosts, found {on}. Type: allranks doctor")
    size, lost, inbox = launcher.size(None), dict[str, str](), EventQueue()

    def deliver(event: Event, host: str) -> None:
        if isinstance(event, HostLeft):
            lost[host] = event.why
        inbox.put(FromHostAgent(event, host))

    wire, config = open_sockets(launcher, size, (), (), (), inbox, NotebookHooks(()), settings={})
    try:
        agents = MultiHostAgents(HostsContext(launcher, config, wire, deliver))
        try:
            came = _came(agents, lost, tell, wire.commands_url, inbox)
            return [*came, *_network(agents, inbox)]
        finally:
            agents.stop()
    finally:
        wire.close()
        shutil.rmtree(config.log_dir, ignore_errors=True)


def _came(
    agents: MultiHostAgents,
    lost: Mapping[str, str],
    tell: Callable[[str], None],
    url: str,
    inbox: EventQueue,
) -> Iterator[Finding]:
    said, deadline = "", time.monotonic() + _COME_SECONDS
    while True:
        hosts = [host.name for host in agents.job.hosts()]
        missing = set(hosts) - set(agents.addresses) - set(lost)
        left = deadline - time.monotonic()
        if hosts and (not missing or left <= 0):
            break
        if not hosts:  # a job in a queue
            left, deadline = _QUEUE_SECONDS, time.monotonic() + _COME_SECONDS
            if (waits := agents.job.waits()) != said:
                said = waits
                tell(said)
        inbox.wait(left)
    for host in hosts:
        if host in lost:
            yield Finding(host, WRONG, lost[host])
        elif host in missing:
            found = f"no connection within {_COME_SECONDS:g} s. It must reach {url}"
            yield Finding(host, WRONG, found)
        else:
            found = f"connects to this machine, from {agents.addresses[host]}"
            yield Finding(host, OK, found)


def _network(agents: MultiHostAgents, inbox: EventQueue) -> Iterator[Finding]:
    if not agents.addresses:
        return
    test, deadline = agents.test_network(), time.monotonic() + _TEST_SECONDS
    while not test.over and (left := deadline - time.monotonic()) > 0:
        inbox.wait(left)
    problems = test.problems()
    for problem in problems:
        found = f"{problem}. MPI's processes listen on any port: allow them in the firewall"
        yield Finding("network", WRONG, found)
    if not test.over:
        yield Finding("network", WRONG, f"no result of the test within {_TEST_SECONDS:g} s")
    elif not problems:
        yield Finding("network", OK, "each host can connect to each other host")
