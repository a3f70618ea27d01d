"""The service of a JupyterHub through which the notebooks of a class meet that share no folder.

python -P -m allranks.features.classroom.hub_service      # see docs/jupyterhub.md

A student's notebook sends its state once a second, with the token that the hub gave to its server.
The hub knows whose token it is, so no student can have the name of another. Only the teacher that
the student has named in ``%distributed join`` can read the state. It is kept in memory only.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tornado.httpclient import AsyncHTTPClient, HTTPClientError
from tornado.web import Application, HTTPError, RequestHandler

from allranks.features.classroom import door

#: A teacher's notebook asks once a second; without it for this long, the class is closed.
_CLASS_SECONDS = 30.0
#: The same of a student's notebook, which is then shown as one that has left.
_STUDENT_SECONDS = 15.0
#: For this long, a token that the hub has withdrawn is still accepted.
_TOKEN_SECONDS = 60.0
_MAX_STUDENTS, _MAX_NOTEBOOKS = 500, 4
#: Of a state without its panel.
_STATE_NBYTES = 50_000


@dataclass
class StudentState:
    """A student's notebook: its last state, as it was sent."""

    user: str
    state: dict[str, Any]
    sent: float = field(default_factory=time.monotonic)
    gone: bool = False


@dataclass
class HubClass:
    """The class of one teacher; of all panels, only the one that the teacher has opened is kept."""

    asked: float
    members: dict[str, StudentState] = field(default_factory=dict)
    opened: str = ""
    panel: str | None = None


class Users:
    """Asks the hub whose a token is."""

    def __init__(self, hub_url: str) -> None:
        self._url = f"{hub_url.rstrip('/')}/user"
        self._known: dict[str, tuple[str, float]] = {}

    async def name(self, token: str) -> str:
        """Returns the user of a token; '' if it is none of a user."""
        now = time.monotonic()
        self._known = {key: one for key, one in self._known.items() if one[1] > now}
        if token not in self._known:
            headers = {"Authorization": f"token {token}"}
            try:
                answer = await AsyncHTTPClient().fetch(self._url, headers=headers)
                found = json.loads(answer.body)
            except HTTPClientError as error:
                if error.code in (401, 403):
                    return ""
                raise
            if found.get("kind") != "user":
                return ""
            self._known[token] = str(found["name"]), now + _TOKEN_SECONDS
        return self._known[token][0]


class _Handler(RequestHandler):
    """What both kinds of requests need: the user, and the body."""

    user: str
    classes: dict[str, HubClass]

    def initialize(self, users: Users, classes: dict[str, HubClass]) -> None:
        self.users, self.classes = users, classes

    async def prepare(self) -> None:
        _, _, token = self.request.headers.get("Authorization", "").partition(" ")
        self.user = await self.users.name(token) if token else ""
        if not self.user:
            raise HTTPError(403)
        late = time.monotonic() - _CLASS_SECONDS
        for teacher in [name for name, one in self.classes.items() if one.asked < late]:
            del self.classes[teacher]

    def check_xsrf_cookie(self) -> None:
        """No cookie gives access here, only the token."""

    def body(self) -> dict[str, Any]:
        try:
            found = json.loads(self.request.body)
        except (ValueError, RecursionError):
            raise HTTPError(400) from None
        if not isinstance(found, dict):
            raise HTTPError(400)
        return found


class TeacherHandler(_Handler):
    """``POST`` opens the teacher's class, and returns its students; ``DELETE`` closes it."""

    def post(self) -> None:
        now = time.monotonic()
        found = self.classes.setdefault(self.user, HubClass(now))
        found.asked = now
        opened = str(self.body().get("opened") or "")
        if opened != found.opened:
            found.opened, found.panel = opened, None
        students = [
            {
                "key": key,
                "user": one.user,
                "seconds_ago": now - one.sent,
                "gone": one.gone or now - one.sent > _STUDENT_SECONDS,
                "state": one.state,
            }
            for key, one in found.members.items()
        ]
        self.write({"students": students, "panel": found.panel})

    def delete(self) -> None:
        self.classes.pop(self.user, None)


class StudentHandler(_Handler):
    """``POST`` sends the state of a notebook to a teacher's class; ``DELETE`` leaves it."""

    def post(self, teacher: str, notebook: str) -> None:
        found = self.classes.get(teacher)
        if found is None:
            raise HTTPError(404)
        state, key = self.body(), f"{self.user}/{notebook}"
        panel = state.pop("panel", None)
        if len(json.dumps(state)) > _STATE_NBYTES:
            raise HTTPError(413)
        own = [name for name, one in found.members.items() if one.user == self.user]
        if key not in own:
            # A student who comes again takes the place of the notebook that left.
            for name in own:
                if found.members[name].gone:
                    del found.members[name]
            if len(found.members) >= _MAX_STUDENTS or len(own) >= _MAX_NOTEBOOKS:
                raise HTTPError(429)
        found.members[key] = StudentState(self.user, state)
        if key == found.opened and isinstance(panel, str):
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
    about: dict[str, Any] = {"users": Users(hub_url), "classes": {}}
    return Application(
        [
            ("/class", TeacherHandler, about),
            (r"/class/([^/]+)/(\w{1,32})", StudentHandler, about),
        ]
    )


async def main() -> None:
    """Serves at ``ALLRANKS_CLASS_URL`` until the hub ends."""
    place = urlsplit(os.environ["ALLRANKS_CLASS_URL"])
    application(os.environ["JUPYTERHUB_API_URL"]).listen(
        place.port or 80,
        place.hostname or "",
        max_body_size=door.MAX_NBYTES + _STATE_NBYTES,
        max_buffer_size=door.MAX_NBYTES + 2 * _STATE_NBYTES,
        body_timeout=30.0,
        idle_connection_timeout=60.0,
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
