"""The connections between the first ranks of the hosts, which carry their `StatusExchange`.

Each of these ranks has a thread, connected to the hosts above and below its own in the tree. The
connections are encrypted (CURVE); the ranks exchange their public keys by MPI. The thread needs
neither MPI nor any rank's cooperation. The kernels of both ends notice a host that is cut off.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.mpi.status_exchange import (
    CHILDREN,
    PERIOD_SECONDS,
    HostLink,
    StatusExchange,
    children,
    subtree,
)
from allranks.errors import ClusterError
from allranks.records.config import lease_seconds, tcp_url
from allranks.records.ranks import label

if TYPE_CHECKING:
    from mpi4py import MPI

    from allranks.collectives.calls.rank_state import RankState

_NEWS_SECONDS = 1.0
_ESTABLISHED = 1
#: A message has at most as many bytes as this many copies of the states of all ranks.
_COPIES = 8
Key = tuple[bytes, bytes]
"""A public key and its secret key."""


class EncryptedLink(HostLink):
    """A link over ZeroMQ. ``frame`` is a message that was received from the other end. ``route`` is
    the other end's name on a `zmq.ROUTER`.
    """

    def __init__(
        self,
        channel: zmq.Socket[bytes],
        frame: zmq.Frame,
        at: Sequence[int],
        behind: Sequence[int],
        route: tuple[bytes, ...] = (),
    ) -> None:
        super().__init__(at, behind)
        self.channel, self.route = channel, route
        self.descriptor: int = frame.get(zmq.SRCFD)
        # ZeroMQ closes its descriptor, and then this one still shows how the connection has ended.
        self.tcp = socket.socket(fileno=os.dup(self.descriptor))
        watch_over(self.tcp)
        self.ended, self._ended_at = 0, 0.0

    def send(self, data: bytes) -> bool:
        try:
            self.channel.send_multipart([*self.route, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False  # its queue is full, or the connection has ended
        return True

    def end(self) -> None:
        silent_ms = 0
        with suppress(OSError, AttributeError, struct.error):
            # `tcpi_state` and `tcpi_last_ack_recv` of linux/tcp.h. The other end's kernel
            # acknowledges also while the rank there computes or is stopped.
            info = self.tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            if info[0] == _ESTABLISHED:
                return  # an earlier connection, which has ended, had the same descriptor
            (silent_ms,) = struct.unpack_from("=I", info, 56)
        self.tcp.close()
        self._ended_at = time.monotonic()
        self.ended = fields.SILENT if silent_ms > 500 * lease_seconds() else fields.ENDED

    def lose(self) -> None:
        """Counts it as lost; if a rank has ended, once the notebook had time to tell how."""
        if self.ended == fields.SILENT or time.monotonic() - self._ended_at > _NEWS_SECONDS:
            self.lost = self.ended


class StatusThread(threading.Thread):
    """Runs a host's `StatusExchange` over its connections."""

    def __init__(self, exchange: StatusExchange, connections: Sequence[EncryptedLink]) -> None:
        super().__init__(name="allranks-status", daemon=True)
        self.exchange, self.connections = exchange, list(connections)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False

    def wake(self) -> None:
        """Sends changes at once instead of after the poll interval."""
        try:
            os.write(self._woken, b"\0")
        except OSError:
            return  # the thread is about to read the board anyway

    def stop(self) -> None:
        """Returns when nothing more is written to the board."""
        self._stopping = True
        self.wake()
        self.join()

    def run(self) -> None:
        channels = list(dict.fromkeys(link.channel for link in self.connections))
        ends = [_ends_of(channel) for channel in channels]
        poller = zmq.Poller()
        for source in (self._wake, *channels, *ends):
            poller.register(source, zmq.POLLIN)
        while self.exchange.links and not self._stopping:
            ready = dict(poller.poll(int(PERIOD_SECONDS * 1000)))
            if self._wake in ready:
                os.read(self._wake, 4096)
            # First, because the last messages of a connection come before its end.
            ended = {end for one in ends for end in _ended(one)}
            for link in self.connections:
                if link.descriptor in ended and not link.ended:
                    link.end()
            for channel in channels:
                self._receive_all(channel)
            for link in self.connections:
                link.lose()
            self.exchange.step(time.monotonic())
        for channel in channels:
            channel.context.destroy()

    def _receive_all(self, channel: zmq.Socket[bytes]) -> None:
        links = {link.route: link for link in self.connections if link.channel is channel}
        with suppress(zmq.Again):
            while True:
                *route, data = channel.recv_multipart(zmq.NOBLOCK)
                link = links.get(tuple(route))
                if link is not None and data:
                    self.exchange.receive(link, data)


def _ended(ends: zmq.Socket[bytes]) -> Iterator[int]:
    while ends.poll(0):
        yield recv_monitor_message(ends)["value"]


def watch_over(connection: socket.socket) -> None:
    """Lets the kernel end a connection whose other end has not answered for the lease."""
    # The other end's kernel answers: a rank that computes, or is stopped for long, does not count
    # as lost.
    seconds = int(lease_seconds())
    # Each probe costs traffic at both ends, though nothing happens.
    pause = max(1, seconds // 3)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": max(1, seconds // pause - 1),
        # TCP doubles its pauses: a packet that was sent within the lease is sent again by then. An
        # idle connection, too, ends after this time on Linux.
        "TCP_USER_TIMEOUT": 1000 * (2 * seconds + 2),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_SIOCGIFADDR = 0x8915
_EVERYWHERE = 0
"""The scope of an IPv6 address in Linux's list."""
_ALL_SECONDS = 30


class HostLinks(NamedTuple):
    """A host's connections to other hosts; none on a rank that is not its host's first."""

    host_names: tuple[str, ...]
    above: EncryptedLink | None
    below: list[EncryptedLink]

    def end_before(self, own: RankState) -> None:
        """Ends the exchange on the connections before these, which writes to the same board."""
        if own.stop_exchange is not None:
            own.stop_exchange()
        own.wake_exchange = own.stop_exchange = None

    def start(self, own: RankState) -> None:
        """Starts a `StatusThread` on them."""
        own.host_names = self.host_names
        connections = [*([self.above] if self.above else ()), *self.below]
        if connections:
            here = next(ranks for ranks in own.sharing(range(own.size)) if own.rank in ranks)
            exchange = StatusExchange(own.board, here, self.above, self.below)
            thread = StatusThread(exchange, connections)
            own.wake_exchange, own.stop_exchange = thread.wake, thread.stop
            thread.start()


def connect_hosts(rank: int, shares: Sequence[int], base: MPI.Intracomm) -> HostLinks:
    """Connects the first ranks of all hosts in a tree. A rank accepts connections only from those
    below it, and only until all have connected. Collective over ``base``. ``shares`` has for every
    rank the first rank with which it shares memory.
    """
    firsts = sorted(set(shares))
    ranks_of = [[r for r, first in enumerate(shares) if first == of] for of in firsts]
    host, hosts = firsts.index(shares[rank]), len(firsts)

    def behind(other: int) -> list[int]:
        return [r for one in subtree(other, hosts) for r in ranks_of[one]]

    key = zmq.curve_keypair()
    # Public keys may be read on the network. A program that can change MPI's data can run code on
    # the ranks anyway.
    keys = base.allgather(key[0])
    below = {firsts[one]: one for one in children(host, hosts)} if rank in firsts else {}
    listening = Listening(key, len(shares)) if below else None
    offers = base.allgather((addresses(), listening.port) if listening is not None else None)
    above, found, problem = None, list[EncryptedLink](), ""
    first_above = firsts[(host - 1) // CHILDREN]
    where, port = offers[first_above] or ((), 0)
    try:
        # The tree grows from the root: a rank answers those below it once it has its own place.
        if rank in firsts and host:
            channel, frame = join(where, port, key, keys[first_above], rank)
            far = sorted(set(range(len(shares))) - set(behind(host)))
            above = EncryptedLink(channel, frame, ranks_of[firsts.index(first_above)], far)
        if listening is not None:
            of = {first: (ranks_of[one], behind(one)) for first, one in below.items()}
            found = listening.accept(keys, of)
    except OSError as error:
        problem = f"rank {rank}, on {socket.gethostname()}: {error}"
    problems = [each for each in base.allgather(problem) if each]
    if problems:
        raise ClusterError(
            "expected that the first rank of each host can connect to the host above it, rank "
            f"{first_above}'s, by one of its addresses {', '.join(where)}; {problems[0]}. Let "
            "hosts connect to each other's ports."
        )
    return HostLinks(tuple(base.allgather(socket.gethostname())), above, found)


def _channel(context: zmq.Context[zmq.Socket[bytes]], kind: int, key: Key) -> zmq.Socket[bytes]:
    channel = context.socket(kind)
    channel.setsockopt(zmq.LINGER, 0)
    channel.setsockopt(zmq.IPV6, 1)
    channel.curve_publickey, channel.curve_secretkey = key
    _ends_of(channel)
    return channel


def _ends_of(channel: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """The socket that reports the descriptors of connections that have ended."""
    return channel.get_monitor_socket(zmq.EVENT_DISCONNECTED)


class Listening:
    """Accepts the connections of ranks with known public keys. ``size`` is the number of ranks."""

    def __init__(self, key: Key, size: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # ZeroMQ asks here whether to accept a key, and accepts none once this socket is closed.
        self._asks = context.socket(zmq.REP)
        self._asks.bind("inproc://zeromq.zap.01")
        self.channel = _channel(context, zmq.ROUTER, key)
        self.channel.curve_server = True
        self.channel.setsockopt(zmq.ZAP_DOMAIN, b"allranks")
        self.channel.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.channel.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # ZeroMQ makes room for a message before it knows who sends it.
        self.channel.setsockopt(zmq.MAXMSGSIZE, _COPIES * size * fields.PAGE_BYTES)
        self.port = self.channel.bind_to_random_port("tcp://*")

    def accept(
        self, keys: Sequence[bytes], below: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    ) -> list[EncryptedLink]:
        """The connections to these ranks, once all have joined. ``keys`` are those of all ranks;
        ``below`` has for each the ranks of its host, and those behind it.
        """
        known, links = {keys[first] for first in below}, dict[int, EncryptedLink]()
        poller = zmq.Poller()
        poller.register(self._asks, zmq.POLLIN)
        poller.register(self.channel, zmq.POLLIN)
        end = time.monotonic() + _ALL_SECONDS
        while len(links) < len(below):
            if time.monotonic() > end:
                missing = sorted(below.keys() - links.keys())
                raise TimeoutError(f"no connection from {label(missing)} in {_ALL_SECONDS} s")
            for source, _ in poller.poll(100):
                if source is self._asks:
                    version, request, *_, key = self._asks.recv_multipart()
                    code = b"200" if z85.encode(key) in known else b"400"
                    self._asks.send_multipart([version, request, code, b"", b"", b""])
                else:
                    name, frame = self.channel.recv_multipart(copy=False)
                    first, route = int(name.bytes), (name.bytes,)
                    links[first] = EncryptedLink(self.channel, frame, *below[first], route)
                    self.channel.send_multipart([*route, b""])
        self._asks.close()
        return list(links.values())


def join(
    where: Sequence[str], port: int, key: Key, server_key: bytes, rank: int
) -> tuple[zmq.Socket[bytes], zmq.Frame]:
    """The connection to one of these addresses, and its first message. Tries all of them at once.

    Only the rank with the key ``server_key`` can answer.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    for address in where:
        channel = _channel(context, zmq.DEALER, key)
        channel.setsockopt(zmq.IDENTITY, str(rank).encode())
        channel.setsockopt(zmq.RECONNECT_IVL, -1)
        channel.curve_serverkey = server_key
        channel.connect(f"{tcp_url(address)}:{port}")
        channel.send(b"")
        poller.register(channel, zmq.POLLIN)
    answered = poller.poll(_ALL_SECONDS * 1000)
    if not answered:
        context.destroy()
        raise TimeoutError(f"no answer in {_ALL_SECONDS} s")
    channel = answered[0][0]
    for other, _ in list(poller.sockets):
        if other is not channel:
            ends = _ends_of(other)
            other.disable_monitor()
            ends.close()
            other.close()
    return channel, channel.recv(copy=False)


def addresses() -> list[str]:
    """This host's addresses, those of IPv6 after those of IPv4, and the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as listed:
        for line in listed:
            digits, _, _, scope, *_ = line.split()
            if int(scope, 16) == _EVERYWHERE:  # else they are valid on one link only, or here
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return sorted(found, key=lambda address: address.startswith("127."))
