"""Both ends of a class whose notebooks share no folder: they meet at a service of their JupyterHub.

`ClassBoard` and `Membership` are the same for notebooks of one machine.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

from allranks.errors import UsageError
from allranks.features.classroom import board, states

CLASS_URL = "ALLRANKS_CLASS_URL"
"""The environment variable with the address of the service; without it a class uses a socket."""

CLASS_CA = "ALLRANKS_CLASS_CA"
"""Names a file with the certificate of the service, if no known authority has signed it."""

#: Of an answer with the states of all students, and a panel.
_MAX_NBYTES = 32_000_000
_INTERVAL_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
#: After this many requests without an answer, a student has left.
_MAX_FAILURES = 30


def is_used() -> bool:
    return bool(os.environ.get(CLASS_URL))


def own_user() -> str:
    return os.environ.get("JUPYTERHUB_USER", "")


def check_url(url: str) -> None:
    """Raises UsageError if the tokens of users would cross a network without encryption."""
    place = urlsplit(url)
    if place.scheme != "https" and not is_loopback(place.hostname or ""):
        raise UsageError(
            f"expected {CLASS_URL} to begin with https:// or to name this machine, as "
            f"http://127.0.0.1:10101, found {url!r:.200}. Ask who runs the JupyterHub"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


def _ask(method: str, path: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
    check_url(os.environ[CLASS_URL])
    url = os.environ[CLASS_URL].rstrip("/") + path
    token = os.environ.get("JUPYTERHUB_API_TOKEN", "")
    data = None
    if message is not None:
        state = {name: value for name, value in message.items() if name != "panel"}
        lines = [state, *([message["panel"]] if "panel" in message else [])]
        data = "\n".join(map(json.dumps, lines)).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"token {token}"}, method=method)
    # Straight to it: no proxy may see the token.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        trusted = ssl.create_default_context(cafile=os.environ.get(CLASS_CA))
        handlers.append(urllib.request.HTTPSHandler(context=trusted))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=_ANSWER_SECONDS) as answer:
            found = json.loads(answer.read(_MAX_NBYTES) or b"{}")
    except urllib.error.HTTPError as error:
        raise _Refused(error.code) from None
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise states.RefusedMessage("expected an answer of the class")
    return found


def _checked(method: str, path: str, message: dict[str, Any], teacher: str) -> dict[str, Any]:
    """Asks. An error has the command that a user can type."""
    try:
        return _ask(method, path, message)
    except UsageError:
        raise
    except _Refused as refused:
        if refused.status == 404:
            raise UsageError(
                f"the class of {teacher} is not open. {teacher} types: %distributed class"
            ) from None
        if refused.status == 403:
            raise UsageError(
                "expected a notebook of this JupyterHub: it does not know the token of this one. "
                "Stop your server in the hub's control panel, and start it again"
            ) from None
        if refused.status == 503:
            raise UsageError(
                "expected a free service of the class, found that it has got too many unknown "
                f"tokens from this address. Type again in a minute: %distributed join {teacher}"
            ) from None
        raise UsageError(
            f"the class does not admit this notebook (status {refused.status}). Leave with your "
            "other notebooks: %distributed leave"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"expected the service of the class at {os.environ[CLASS_URL]}, found: {error}. Ask "
            "who runs the JupyterHub"
        ) from None


class HubBoard:
    """The teacher's side: asks the service for all students once a second."""

    def __init__(self) -> None:
        self._students: dict[str, board.Student] = {}
        self._opened = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.changed: Callable[[], None] = lambda: None
        try:
            self._take(_checked("POST", "/class", {"opened": ""}, own_user()))
        except states.RefusedMessage as refused:
            raise UsageError(
                f"{refused} from {os.environ[CLASS_URL]}, found another answer. Ask who runs the "
                "JupyterHub"
            ) from None
        self._thread = threading.Thread(target=self._receive, name="allranks-class", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        try:
            _ask("DELETE", "/class")
        except (OSError, ValueError, _Refused):
            pass  # without this notebook the service closes the class soon

    def students(self) -> list[board.Student]:
        """Returns all students, those who need help first."""
        with self._lock:
            return board.by_need(self._students.values())

    def ask_panel(self, student: board.Student) -> None:
        """Asks for a student's panel, which comes only if the student has allowed it."""
        with self._lock:
            self._opened = next((key for key, one in self._students.items() if one is student), "")

    def _receive(self) -> None:
        while not self._over.wait(_INTERVAL_SECONDS):
            try:
                self._take(_ask("POST", "/class", {"opened": self._opened}))
            except (OSError, ValueError, _Refused):
                continue  # the hub may be restarted meanwhile
            self.changed()

    def _take(self, answer: dict[str, Any]) -> None:
        students, panel = states.read_class(answer)
        with self._lock:
            before, self._students = self._students, {}
            for found in students:
                key = found["key"]
                one = self._students[key] = before.get(key) or board.Student(
                    found["user"], found["user"]
                )
                if not found["gone"]:
                    one.take(found["state"])
                    one.taken -= found["seconds_ago"]
                    one.gone = False
                    if key == self._opened and panel is not None:
                        one.panel = panel
                elif not one.gone:
                    one.take(found["state"])
                    one.leave()


class HubMembership:
    """The student's side: sends the notebook's state once a second, until `close`."""

    def __init__(
        self, teacher: str, shows_panel: bool, described: Callable[[bool], dict[str, Any]]
    ):
        self.teacher, self.shows_panel = teacher, shows_panel
        self._described = described
        self._path = f"/class/{quote(teacher, safe='')}/{secrets.token_hex(8)}"
        self._over = threading.Event()
        _checked("POST", self._path, {}, teacher)
        self._thread = threading.Thread(target=self._send, name="allranks-class-send", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._over.is_set()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_ANSWER_SECONDS)  # a state that is under way would come after the end
        try:
            _ask("DELETE", self._path)
        except (OSError, ValueError, _Refused):
            pass  # without this notebook the service forgets it soon

    def _send(self) -> None:
        wanted, failures = False, 0
        while not self._over.is_set():
            try:
                state = self._described(wanted and self.shows_panel)
                state["shows_panel"] = self.shows_panel
                answer = _ask("POST", self._path, state)
                wanted, failures = answer.get("want") == "panel", 0
            except (OSError, ValueError, _Refused) as error:
                wanted, failures = False, failures + 1  # the panel may be too large
                closed = isinstance(error, _Refused) and error.status == 404
                if closed or failures > _MAX_FAILURES:
                    self._over.set()
            self._over.wait(_INTERVAL_SECONDS)
