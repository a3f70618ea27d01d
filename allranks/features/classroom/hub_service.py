"""The service of a JupyterHub through which the notebooks of a class meet that share no folder.

python -P -m allranks.features.classroom.hub_service      # see docs/jupyterhub.md

A student's notebook sends its state once a second, with the token that the hub gave to its server.
The hub knows whose token it is, so no student can have the name of another. Only the teacher that
the student has named in ``%distributed join`` can read the state. It is kept in memory only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import ssl
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tornado.httpclient import AsyncHTTPClient, HTTPClientError
from tornado.httpserver import HTTPServer
from tornado.web import Application, HTTPError, RequestHandler, stream_request_body

from allranks.errors import UsageError
from allranks.features.classroom import states
from allranks.features.classroom.hub import CLASS_URL, check_url

CERTIFICATE = "ALLRANKS_CLASS_CERTIFICATE"
"""Names a file with the key and the certificate of the service, for an address with https."""

#: A teacher's notebook asks once a second; without it for this long, the class is closed.
_CLASS_SECONDS = 30.0
#: The same of a student's notebook, which is then shown as one that has left.
_STUDENT_SECONDS = 15.0
#: For this long, a token that the hub has withdrawn is still accepted.
_TOKEN_SECONDS = 60.0
#: For this long, it is known that the hub had confirmed a token.
_REMEMBERED_SECONDS = 600.0
#: A notebook of a student, or of a teacher, sends one request a second. As many tokens of one
#: address may be unknown to the hub.
_MAX_REQUESTS, _REQUESTS_SECONDS = 100, 10.0
#: Of all clients, and of one address; requests take milliseconds.
_MAX_CONNECTIONS, _MAX_OF_ADDRESS = 512, 256
#: For the hub, the files of Python, and a new connection before the oldest one is closed.
_OTHER_DESCRIPTORS = 64
_TOKEN_LENGTH = 200
_OPENED_LENGTH = 300
_CONNECTION_SECONDS, _BODY_SECONDS = 10.0, 30.0
_HEADER_NBYTES = 8192


@dataclass
class StudentState:
    """A student's notebook: the clean fields of its last state."""

    user: str
    state: dict[str, Any]
    sent: float = field(default_factory=time.monotonic)
    gone: bool = False

    def has_left(self, now: float) -> bool:
        """Whether the notebook has left, or has sent nothing for a while."""
        return self.gone or now - self.sent > _STUDENT_SECONDS


@dataclass
class HubClass:
    """The class of one teacher; of all panels, only the one that the teacher has opened is kept."""

    asked: float
    members: dict[str, StudentState] = field(default_factory=dict)
    opened: str = ""
    panel: str | None = None


class RequestCounter:
    """Counts the requests of each user, or of each address, in spells of ten seconds."""

    def __init__(self) -> None:
        self._began = 0.0
        self._counts: Counter[str] = Counter()

    def admits(self, user: str, now: float) -> bool:
        if now - self._began > _REQUESTS_SECONDS:
            self._began, self._counts = now, Counter()
        self._counts[user] += 1
        return self._counts[user] <= _MAX_REQUESTS

    def forgive(self, user: str) -> None:
        """Takes back the last request."""
        self._counts[user] -= 1


class Users:
    """Asks the hub whose a token is.

    One address gets a limited number of answers for tokens that the hub does not know. Tokens that
    it has confirmed before do not count: students may share an address with a sender of others.
    """

    def __init__(self, hub_url: str) -> None:
        self._url = f"{hub_url.rstrip('/')}/user"
        #: The user of each confirmed token, and when the hub has confirmed it.
        self._known: dict[str, tuple[str, float]] = {}
        self._unknown = RequestCounter()

    async def name(self, token: str, address: str) -> str:
        """Returns the user of a token; '' if it is none of a user."""
        now = time.monotonic()
        late = now - _REMEMBERED_SECONDS
        self._known = {key: one for key, one in self._known.items() if one[1] > late}
        known, confirmed = self._known.get(token, ("", 0.0))
        if known and confirmed > now - _TOKEN_SECONDS:
            return known
        if not known and not self._unknown.admits(address, now):
            raise HTTPError(503)
        found = await self._asked(token)
        if found:
            self._known[token] = found, now
            if not known:
                self._unknown.forgive(address)
        else:
            self._known.pop(token, None)
        return found

    async def _asked(self, token: str) -> str:
        headers = {"Authorization": f"token {token}"}
        try:
            answer = await AsyncHTTPClient().fetch(self._url, headers=headers)
        except HTTPClientError as error:
            if error.code in (401, 403):
                return ""
            raise
        found = json.loads(answer.body)
        return str(found["name"]) if found.get("kind") == "user" else ""


@stream_request_body
class _Handler(RequestHandler):
    """What both kinds of requests need: the user, and the body, which is read after the token."""

    user: str
    classes: dict[str, HubClass]

    def initialize(
        self,
        users: Users,
        classes: dict[str, HubClass],
        requests: RequestCounter,
        senders: dict[str, float],
    ) -> None:
        self.users, self.classes, self.requests = users, classes, requests
        #: The users whose panel is on its way, and since when.
        self.senders = senders
        self._body = bytearray()

    def most_nbytes(self) -> int:
        """Returns the longest body of this request."""
        return states.STATE_NBYTES

    async def prepare(self) -> None:
        _, _, token = self.request.headers.get("Authorization", "").partition(" ")
        fits = 0 < len(token) <= _TOKEN_LENGTH
        address = str(self.request.remote_ip)
        self.user = await self.users.name(token, address) if fits else ""
        if not self.user:
            raise HTTPError(403)
        if not self.requests.admits(self.user, time.monotonic()):
            raise HTTPError(429)
        most = self.most_nbytes()
        length = self.request.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length[:12]) > most:
            raise HTTPError(413)
        # tornado's type of it names what HTTP/1 and others have in common.
        connection: Any = self.request.connection
        connection.set_max_body_size(most)
        late = time.monotonic() - _CLASS_SECONDS
        for teacher in [name for name, one in self.classes.items() if one.asked < late]:
            del self.classes[teacher]

    def check_xsrf_cookie(self) -> None:
        """No cookie gives access here, only the token."""

    def data_received(self, chunk: bytes) -> None:
        self._body += chunk


def read_opened(body: bytes) -> str:
    """Returns the student whose panel a teacher has opened."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HTTPError(400)
    return states.one_line(found.get("opened"), _OPENED_LENGTH)


def read_body(body: bytes) -> tuple[dict[str, Any], str | None]:
    """Returns the clean state of a student, and the panel, if one was sent."""
    line, _, rest = body.partition(b"\n")
    if len(line) > states.STATE_NBYTES:
        raise HTTPError(413)
    try:
        return states.read_state(line), states.read_panel(rest) if rest else None
    except states.RefusedMessage:
        raise HTTPError(400) from None


def admit(classes: dict[str, HubClass], found: HubClass, user: str, key: str, now: float) -> bool:
    """Whether a notebook of a user may be in a class.

    Those of this user that have left make room. All classes count, because the states of each are
    kept in memory.
    """
    if key in found.members:
        return True
    count = 0
    for one in classes.values():
        own = [name for name, member in one.members.items() if member.user == user]
        for name in own:
            if one.members[name].has_left(now):
                del one.members[name]
            else:
                count += 1
    return count < states.MAX_NOTEBOOKS and len(found.members) < states.MAX_STUDENTS


class TeacherHandler(_Handler):
    """``POST`` opens the teacher's class, and returns its students; ``DELETE`` closes it."""

    def post(self) -> None:
        now = time.monotonic()
        opened = read_opened(bytes(self._body))
        found = self.classes.setdefault(self.user, HubClass(now))
        found.asked = now
        if opened != found.opened:
            found.opened, found.panel = opened, None
        students = [
            {
                "key": key,
                "user": one.user,
                "seconds_ago": now - one.sent,
                "gone": one.has_left(now),
                "state": one.state,
            }
            for key, one in found.members.items()
        ]
        self.write({"students": students, "panel": found.panel})

    def delete(self) -> None:
        self.classes.pop(self.user, None)


class StudentHandler(_Handler):
    """``POST`` sends the state of a notebook to a teacher's class; ``DELETE`` leaves it."""

    _sends = False

    def most_nbytes(self) -> int:
        teacher, notebook = self.path_args
        found = self.classes.get(teacher)
        opened = found is not None and found.opened == f"{self.user}/{notebook}"
        now = time.monotonic()
        # One at a time: unfinished ones on many connections would take all memory.
        if not opened or now - self.senders.get(self.user, -math.inf) < _BODY_SECONDS:
            return states.STATE_NBYTES
        self.senders[self.user] = now
        self._sends = True
        return states.STATE_NBYTES + states.PANEL_NBYTES

    def on_finish(self) -> None:
        """Lets the user send another panel."""
        if self._sends:
            self.senders.pop(self.user, None)
            self._sends = False

    def on_connection_close(self) -> None:
        """Does the same if the client has gone before the end of its request."""
        super().on_connection_close()
        self.on_finish()

    def post(self, teacher: str, notebook: str) -> None:
        found = self.classes.get(teacher)
        if found is None:
            raise HTTPError(404)
        key = f"{self.user}/{notebook}"
        state, panel = read_body(bytes(self._body))
        if not admit(self.classes, found, self.user, key, time.monotonic()):
            raise HTTPError(429)
        found.members[key] = StudentState(self.user, state)
        if key == found.opened and panel is not None:
            found.panel = panel
        self.write({"want": "panel" if key == found.opened else ""})

    def delete(self, teacher: str, notebook: str) -> None:
        found = self.classes.get(teacher)
        member = found.members.get(f"{self.user}/{notebook}") if found is not None else None
        if member is not None:
            # The name stays, nothing else.
            member.gone, member.state = True, {"cell": member.state.get("cell")}


def application(hub_url: str) -> Application:
    """Returns the service, for the hub's API at this address."""
    about: dict[str, Any] = {
        "users": Users(hub_url),
        "classes": {},
        "requests": RequestCounter(),
        "senders": {},
    }
    return Application(
        [
            ("/class", TeacherHandler, about),
            (r"/class/([^/]+)/(\w{1,32})", StudentHandler, about),
        ],
        # Requests need no token to be refused, and a line for each would fill the hub's log.
        log_function=lambda handler: None,
    )


def most_connections(descriptors: int) -> int:
    """Returns how many connections a process accepts that may have this many descriptors.

    tornado would try again without end to accept one for which no descriptor is left.
    """
    if descriptors == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, descriptors - _OTHER_DESCRIPTORS))


class OpenConnections:
    """The connections that are open, each with its address; ``most`` at the same time."""

    def __init__(self, most: int = _MAX_CONNECTIONS) -> None:
        self._most = most
        self._open: dict[Any, str] = {}

    def add(self, connection: Any, address: str) -> Any:
        """Adds a connection; returns the one that is closed to make room for it, or None.

        That is the oldest one. A request takes milliseconds, but a sender without a token can keep
        connections without any request: else those would keep all others out.
        """
        same = [one for one, its in self._open.items() if its == address]
        oldest = None
        if len(same) >= _MAX_OF_ADDRESS:
            oldest = same[0]
        elif len(self._open) >= self._most:
            oldest = next(iter(self._open))
        self.remove(oldest)
        self._open[connection] = address
        return oldest

    def remove(self, connection: Any) -> None:
        """Forgets a connection that has been closed."""
        self._open.pop(connection, None)


class ClassServer(HTTPServer):
    """A server with limits for connections."""

    def initialize(self, service: Application, ssl_options: ssl.SSLContext | None = None) -> None:  # type: ignore[override]
        """Sets the limits of each connection."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open = OpenConnections(most_connections(descriptors))
        super().initialize(
            service,
            ssl_options=ssl_options,
            max_buffer_size=2 * states.STATE_NBYTES,
            max_header_size=_HEADER_NBYTES,
            max_body_size=states.STATE_NBYTES,
            body_timeout=_BODY_SECONDS,
            idle_connection_timeout=_CONNECTION_SECONDS,
        )

    def handle_stream(self, stream: Any, address: Any) -> None:
        """Serves a connection, and closes the oldest one if there are too many."""
        if oldest := self._open.add(stream, address[0]):
            oldest.close()
        super().handle_stream(stream, address)

    def on_close(self, server_conn: Any) -> None:
        """Makes room for another connection."""
        super().on_close(server_conn)
        self._open.remove(server_conn.stream)


def certificate(url: str) -> ssl.SSLContext | None:
    """Returns what encrypts the connections; None at an address of this machine with http."""
    check_url(url)
    if urlsplit(url).scheme != "https":
        return None
    found = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    path = os.environ.get(CERTIFICATE, "")
    try:
        found.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"expected a file with a key and a certificate in {CERTIFICATE}, found {path!r}: "
            f"{error}. Name one: docs/jupyterhub.md says how it is made"
        ) from None
    return found


async def main() -> None:
    """Serves at ``ALLRANKS_CLASS_URL`` until the hub ends."""
    url = os.environ[CLASS_URL]
    place, encryption = urlsplit(url), certificate(url)
    # It would warn of each connection that does not speak TLS.
    logging.getLogger("tornado.general").setLevel(logging.ERROR)
    server = ClassServer(application(os.environ["JUPYTERHUB_API_URL"]), ssl_options=encryption)
    server.listen(place.port or (80 if encryption is None else 443), place.hostname or "")
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except UsageError as error:
        sys.exit(str(error))
