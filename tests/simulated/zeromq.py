"""A model of ZeroMQ: ROUTER, DEALER, PUSH, PULL, PAIR over connections that can be cut and closed.

What was on the way is lost with a connection; what a DEALER or PUSH has queued is kept; a ROUTER's
queue is lost. Handshakes need the IO thread of both ends; Python of neither.
"""

from __future__ import annotations

from tests.simulated.kernel import INF, Listener, Source, World

ROUTER, DEALER, PUSH, PULL, PAIR = range(1, 6)
POLLIN = NOBLOCK = 1
EVENT_HANDSHAKE_SUCCEEDED, EVENT_DISCONNECTED, EVENT_CLOSED = 1, 2, 4
EVENT_HANDSHAKE_FAILED_NO_DETAIL, EVENT_HANDSHAKE_FAILED_PROTOCOL = 8, 16
EVENT_HANDSHAKE_FAILED_AUTH, EVENT_CONNECTED = 32, 64
EHOSTUNREACH = 113
(
    LINGER,
    SNDHWM,
    RCVHWM,
    IPV6,
    ROUTER_MANDATORY,
    ROUTER_HANDOVER,
    IDENTITY,
    HEARTBEAT_IVL,
    HEARTBEAT_TIMEOUT,
    TCP_MAXRT,
    CONNECT_TIMEOUT,
    HANDSHAKE_IVL,
    RECONNECT_IVL,
    RECONNECT_IVL_MAX,
    TCP_KEEPALIVE,
    TCP_KEEPALIVE_IDLE,
    TCP_KEEPALIVE_INTVL,
    TCP_KEEPALIVE_CNT,
    USE_FD,
    MAXMSGSIZE,
) = range(100, 120)


class ZMQError(Exception):
    def __init__(self, errno=0, text=""):
        super().__init__(text or errno)
        self.errno = errno


class ContextTerminated(ZMQError):
    pass


class Again(ZMQError):
    def __init__(self):
        super().__init__(11, "Resource temporarily unavailable")


class Frame(bytes):
    @property
    def bytes(self):
        return bytes(self)

    def get(self, name):
        raise ZMQError(22, "no such property")

    @property
    def buffer(self):
        return memoryview(self)


def curve_keypair():
    r = World.it.rng
    return b"public%d" % r.getrandbits(40), b"secret%d" % r.getrandbits(40)


def proc():
    return World.it.thread.proc


class Context:
    def __init__(self):
        self.proc = proc()
        self.proc.contexts.append(self)
        self.sockets = []
        self.pairs = {}
        self.fewer = Source()

    def socket(self, kind):
        s = Socket(self, kind)
        self.sockets.append(s)
        return s

    def destroy(self, linger=0):
        for s in list(self.sockets):
            s.close(linger)
        self.term()

    def term(self):
        """Waits for sockets that still have something to send."""
        World.it.block(lambda: not any(s.lingers for s in self.sockets), [self.fewer])

    def process_died(self):
        for s in list(self.sockets):
            s._shut()


def _as_frames(parts):
    return [part if type(part) is Frame else Frame(part) for part in parts]


def _any_name():
    return b"\0" + World.it.rng.randbytes(4)


class Message(list):
    """The frames of a message, and the connection on which it came."""

    conn = None


class Conn:
    """A TCP connection between a client's socket and a server's."""

    def __init__(self, client, server, a, b):
        self.client, self.server, self.hosts = client, server, (a, b)
        self.up = True  # for the client
        self.served = True  # for the server
        self.last = [0.0, 0.0]
        self.flight = [[], []]  # to server, to client
        self.name = client.identity or _any_name()

    def send(self, to_client, frames):
        w = World.it
        ours = self.served if to_client else self.up
        if not ours:
            return
        src, dst = (self.hosts[1], self.hosts[0]) if to_client else self.hosts
        at = max(w.now + w.delay(src, dst), self.last[to_client])
        self.last[to_client] = at
        self.flight[to_client].append((at, frames))
        w.at(at, self.pump, to_client)

    def pump(self, to_client):
        w = World.it
        src, dst = (self.hosts[1], self.hosts[0]) if to_client else self.hosts
        if w.cut(src, dst):
            return  # on_heal pumps again
        line = self.flight[to_client]
        end = self.client if to_client else self.server
        other = self.up if to_client else self.served
        while line and line[0][0] <= w.now:
            _, frames = line.pop(0)
            if other and end.open:
                if end.most_nbytes < max(map(len, frames)):
                    self.drop_server()
                    self.break_client()
                    return
                end.deliver(frames, self)

    # ends
    def break_client(self):
        """The client's end closes it: what is on the way is lost."""
        if not self.up:
            return
        self.up = False
        w = World.it
        w.log("BROKEN", self.client, self.hosts)
        self.flight = [[], []] if w.cut(*self.hosts) else self.flight
        if self.client.open:
            self.client.conn = None
            self.client.emit(EVENT_DISCONNECTED)
            w.after(self.client.reconnect, self.client.try_connect)
        if not w.cut(*self.hosts):
            w.after(w.delay(*self.hosts), self.drop_server)

    def drop_server(self):
        if self.served:
            self.served = False
            if self.server.peers.get(self.name) is self:
                del self.server.peers[self.name]
            self.server.conns.pop(self, None)
            if self.server.open:
                self.server.emit(EVENT_DISCONNECTED)

    def server_gone(self):
        """The server's end was closed."""
        self.served = False
        w = World.it
        if not w.cut(*self.hosts):
            # After what it has sent.
            w.at(max(self.last[1], w.now) + w.delay(*self.hosts), self.break_client)
        else:
            w.socks_to_break.append(self)


class Socket:
    def __init__(self, context, kind):
        self.context, self.kind = context, kind
        self.proc = context.proc
        self.open = True
        self.queue = []
        self.source = Source()
        self.identity = b""
        self.peers = {}
        # Not a set: the order of one with equal names would depend on addresses in memory.
        self.conns = {}
        self.listener = None
        self.listeners = []
        self.url = None
        self.conn = None
        self.waiting = []
        self.monitor = None
        self.maxrt = INF
        self.handshake_s = 30.0
        self.reconnect = 0.1
        self.heartbeat = INF
        self.mandatory = False
        self.other = None
        self.use = None
        self.trying = self.lingers = False
        self.linger_ms, self.most_waiting, self.most_nbytes = -1, 1000, INF
        self.less = Source()
        self.curve_server = False
        self.curve_serverkey = self.curve_publickey = self.curve_secretkey = b""

    def __repr__(self):
        return f"<{self.kind} {self.identity} of {self.proc}>"

    def __hash__(self):
        return id(self)

    def setsockopt(self, option, value):
        if option == IDENTITY:
            self.identity = value
        elif option == TCP_MAXRT:
            self.maxrt = value / 1000
        elif option == HANDSHAKE_IVL:
            self.handshake_s = value / 1000
        elif option == RECONNECT_IVL:
            self.reconnect = value / 1000
        elif option == HEARTBEAT_TIMEOUT:
            self.heartbeat = value / 1000
        elif option == ROUTER_MANDATORY:
            self.mandatory = bool(value)
        elif option == USE_FD:
            self.use = value
        elif option == LINGER:
            self.linger_ms = value
        elif option == SNDHWM:
            self.most_waiting = value or INF
        elif option == MAXMSGSIZE:
            self.most_nbytes = value

    def get_monitor_socket(self, events):
        self.events = events
        self.monitor = Socket(self.context, PAIR)
        self.context.sockets.append(self.monitor)
        return self.monitor

    def disable_monitor(self):
        self.monitor = None

    def emit(self, event):
        if self.monitor is not None and self.events & event:
            self.monitor._arrive([b"%d" % event])

    # addresses
    def bind(self, url):
        w = World.it
        if url.startswith("inproc"):
            self.context.pairs[url] = self
            return
        if self.use is not None:
            self.listener = self.proc.fds[self.use].incref()
            self.proc.close(self.use)  # ours from now on
        else:
            where = url if url.startswith("tcp") else (self.proc.host.name, url)
            # A path is taken from the socket that has it.
            if where in w.listeners and url.startswith("tcp"):
                raise ZMQError(98, f"Address already in use {where}")
            self.listener = w.listeners[where] = Listener(where).incref()
        self.listener.acceptor = self
        self.listeners.append(self.listener)
        w.log("BIND", self, self.listener.where)
        if getattr(self.listener, "pending", None):
            for client in self.listener.pending:
                w.after(0.001, client.try_connect)
            self.listener.pending = []

    def bind_to_random_port(self, address, low, high):
        port = next(self.proc.host.ports)
        self.bind(f"{address}:{port}")
        return port

    def connect(self, url):
        w = World.it
        if url.startswith("inproc"):
            self.other = self.context.pairs[url]
            self.other.other = self
            return
        self.url = url
        w.after(w.latency(), self.try_connect)

    def try_connect(self):
        w = World.it
        if not self.open or self.conn is not None or not self.proc.alive or self.trying:
            return
        if self.proc.frozen_io_until > w.now:
            w.at(self.proc.frozen_io_until, self.try_connect)
            return
        ipc = self.url.startswith("ipc")
        where = (self.proc.host.name, self.url) if ipc else self.url
        listener = w.listeners.get(where)
        here = self.proc.host.name
        there = here if ipc else w.host_of_url(self.url)
        if w.cut(here, there):
            w.after(2.0 + self.reconnect, self.try_connect)
            return
        if listener is None:
            self.refused()
            return
        self.trying = True
        w.after(w.delay(here, there), self.connected, listener, here, there)

    def refused(self):
        self.emit(EVENT_CLOSED)
        World.it.after(self.reconnect, self.try_connect)

    def connected(self, listener, here, there):
        w = World.it
        self.trying = False
        if not self.open or not self.proc.alive:
            return
        if listener.refs <= 0:
            self.refused()
            return
        self.trying = True
        self.emit(EVENT_CONNECTED)
        w.after(2 * w.delay(here, there), self.handshake, listener, here, there, w.now)

    def handshake(self, listener, here, there, began):
        w = World.it
        self.trying = False
        if not self.open or self.conn is not None or not self.proc.alive:
            return
        server = listener.acceptor
        if listener.refs <= 0:
            self.fail_handshake()
            return
        ready = server is not None and server.open and server.proc.alive
        if ready and not w.cut(here, there) and server.proc.frozen_io_until <= w.now:
            self.conn = conn = Conn(self, server, here, there)
            server.conns[conn] = None
            if server.kind == ROUTER:
                old = server.peers.get(self.identity)
                if old is not None and old.up and old.client is not self and old.client.open:
                    pass  # handover: the old one is closed
                if old is not None:
                    old.served = False
                server.leave_name(self.identity, old)
                server.peers[conn.name] = conn
            server.emit(EVENT_HANDSHAKE_SUCCEEDED)
            self.emit(EVENT_HANDSHAKE_SUCCEEDED)
            w.log("CONNECTED", self, there)
            waiting, self.waiting = self.waiting, []
            for frames in waiting:
                conn.send(False, frames)
            self.less.notify()
            if self.lingers:
                self._shut()
            # A server that stands still does not answer heartbeats.
            return
        if w.now - began > self.handshake_s:
            self.fail_handshake()
            return
        self.trying = True
        w.after(0.05, self.handshake, listener, here, there, began)

    def fail_handshake(self):
        self.emit(EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        self.emit(EVENT_DISCONNECTED)
        World.it.after(self.reconnect, self.try_connect)

    def leave_name(self, name, old):
        """Another client takes a name over: unread messages of the one before are lost if it is
        connected, else they get another name.
        """
        before = [m for m in self.queue if m.conn is not None and m.conn.name == name]
        another = Frame(_any_name())
        for message in before:
            if message.conn is old:
                self.queue.remove(message)
            else:
                message[0] = another

    # messages
    def send(self, data, copy=True):
        self.send_multipart([data])

    def send_multipart(self, frames, flags=0, copy=True):
        w = World.it
        if not self.open or self.lingers:
            raise ZMQError(88, "not a socket")
        frames = _as_frames(frames)
        w.yield_point()
        if self.kind == PAIR:
            self.other._arrive(frames)
        elif self.kind == ROUTER:
            conn = self.peers.get(frames[0])
            if conn is None:
                if self.mandatory:
                    raise ZMQError(EHOSTUNREACH, "Host unreachable")
                return
            conn.send(True, frames[1:])
        elif self.conn is not None and self.conn.up:
            self.conn.send(False, frames)
        else:
            if not self.has_room() and flags & NOBLOCK:
                raise Again
            w.block(self.has_room, [self.less])
            self.waiting.append(frames)

    def has_room(self):
        return self.url is not None and len(self.waiting) < self.most_waiting

    def deliver(self, frames, conn):
        if self.kind == ROUTER:
            frames = [Frame(conn.name), *frames]
        self._arrive(frames, conn)

    def _arrive(self, frames, conn=None):
        message = Message(_as_frames(frames))
        message.conn = conn
        self.queue.append(message)
        self.source.notify()

    def readable(self):
        return bool(self.queue)

    def poll(self, ms=None):
        World.it.yield_point()
        if self.queue or ms == 0:
            return bool(self.queue)
        return World.it.block(self.readable, [self.source], None if ms is None else ms / 1000)

    def recv_multipart(self, flags=0, copy=True):
        if not self.queue:
            if flags & NOBLOCK:
                raise Again
            World.it.block(self.readable, [self.source])
        return self.queue.pop(0)

    def recv(self):
        return self.recv_multipart()[0]

    def close(self, linger=None):
        if not self.open or self.lingers:
            return
        milliseconds = self.linger_ms if linger is None else linger
        if milliseconds and self.waiting and self.conn is None:
            self.lingers = True
            if milliseconds > 0:
                World.it.after(milliseconds / 1000, self._shut)
        else:
            self._shut()

    def _shut(self):
        if not self.open:
            return
        w = World.it
        self.open = self.lingers = False
        self.context.fewer.notify()
        if self in self.context.sockets:
            self.context.sockets.remove(self)
        if self.listeners:
            for listener in self.listeners:
                if listener.acceptor is self:
                    listener.acceptor = None
                listener.decref()
            self.listeners = []
            for conn in sorted(self.conns, key=lambda c: c.name):
                conn.server_gone()
            self.conns.clear()
        if self.conn is not None:
            conn, self.conn = self.conn, None
            # What was sent is in the system's buffers, and arrives.
            conn.up = False
            last = conn.last[0]
            w.at(max(last, w.now) + w.delay(*conn.hosts), conn.drop_server)


class Poller:
    def __init__(self):
        self.items = {}

    def register(self, item, flags=POLLIN):
        self.items[self._key(item)] = item

    def unregister(self, item):
        del self.items[self._key(item)]

    @staticmethod
    def _key(item):
        return item if isinstance(item, int) else id(item)

    def poll(self, ms=None):
        p = proc()
        pairs = [
            (item, p.fds[item] if isinstance(item, int) else item) for item in self.items.values()
        ]

        def ready():
            return [(item, POLLIN) for item, thing in pairs if thing.readable()]

        seconds = None if ms is None or ms < 0 else ms / 1000
        sources = [*(thing.source for _, thing in pairs), p.child_ended]
        return World.it.block(ready, sources, seconds) or []


def recv_monitor_message(socket):
    return {"event": int(socket.recv_multipart()[0])}


def on_partition(w, a, b, until):
    """Connections that are cut are closed by their clients when nothing is acknowledged."""
    for s in w.all_sockets():
        conn = s.conn
        if conn is None or not conn.up or set(conn.hosts) != {a, b}:
            continue
        wait = w.rng.random() + s.maxrt
        if wait < INF:

            def look(conn=conn, began=w.now):
                if conn.up and w.cut(*conn.hosts):
                    conn.break_client()

            w.after(wait, look)


def on_heal(w, a, b):
    if w.cut(a, b):
        return
    for s in w.all_sockets():
        conn = s.conn
        if conn is not None and conn.up and set(conn.hosts) == {a, b}:
            # TCP repeats what was lost only after a while.
            wait = w.rng.random() * 1.0
            for to_client in (False, True):
                conn.last[to_client] = max(conn.last[to_client], w.now + wait)
                conn.flight[to_client] = [
                    (max(at, w.now + wait), frames) for at, frames in conn.flight[to_client]
                ]
                w.after(wait + 1e-6, conn.pump, to_client)
    broken, w.socks_to_break = w.socks_to_break, []
    for conn in broken:
        if w.cut(*conn.hosts):
            w.socks_to_break.append(conn)
        else:
            w.after(0.2, conn.break_client)


def on_frozen_server(w, p, seconds):
    """The heartbeats of clients are not answered while a process is stopped."""
    for s in w.all_sockets():
        conn = s.conn
        if conn is None or not conn.up or conn.server.proc is not p or s.heartbeat == INF:
            continue

        def look(conn=conn, began=w.now):
            if conn.up and p.frozen_io_until > w.now:
                conn.break_client()

        w.after(s.heartbeat + w.rng.random(), look)
