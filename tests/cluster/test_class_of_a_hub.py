"""The service through which a hub's notebooks form a class, with a hub that only knows tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from allranks.features.classroom import hub_service
from tests.ports import free_port

KINDS = {"ana": "user", "eve": "user", "zoe": "user", "culler": "service"}
Ask = Callable[..., Coroutine[Any, Any, tuple[int, dict[str, Any]]]]


class FakeHub(RequestHandler):
    def get(self) -> None:
        name = self.request.headers["Authorization"].removeprefix("token of-")
        if name not in KINDS:
            self.set_status(403)
        else:
            self.write({"kind": KINDS[name], "name": name})


def with_service(steps: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        hub, service = free_port(), free_port()
        applications = {
            hub: Application([("/hub/api/user", FakeHub)]),
            service: hub_service.application(f"http://127.0.0.1:{hub}/hub/api"),
        }
        servers = [HTTPServer(one) for one in applications.values()]
        for server, port in zip(servers, applications, strict=True):
            server.listen(port, "127.0.0.1")

        async def ask(name: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            answer = await AsyncHTTPClient().fetch(
                f"http://127.0.0.1:{service}{path}",
                method=method,
                headers={"Authorization": f"token of-{name}"},
                body=None if method == "DELETE" else json.dumps(body or {}),
                raise_error=False,
            )
            return answer.code, json.loads(answer.body or b"{}") if answer.code == 200 else {}

        try:
            await steps(ask)
        finally:
            for server in servers:
                server.stop()
                await server.close_all_connections()

    asyncio.run(run())


def test_a_state_goes_to_the_teacher_who_was_named_and_to_no_other():
    async def steps(ask: Ask) -> None:
        assert (await ask("eve", "POST", "/class/ana/1", {"cell": 3}))[0] == 404
        await ask("ana", "POST", "/class")
        await ask("zoe", "POST", "/class")
        assert (await ask("eve", "POST", "/class/ana/1", {"cell": 3}))[0] == 200
        (student,) = (await ask("ana", "POST", "/class"))[1]["students"]
        assert (student["user"], student["state"]) == ("eve", {"cell": 3})
        assert (await ask("zoe", "POST", "/class"))[1]["students"] == []

    with_service(steps)


def test_leaving_removes_the_state_and_closing_the_class():
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        await ask("eve", "POST", "/class/ana/1", {"cell": 3, "error": "secret"})
        await ask("zoe", "DELETE", "/class/ana/1")  # not hers
        assert not (await ask("ana", "POST", "/class"))[1]["students"][0]["gone"]
        await ask("eve", "DELETE", "/class/ana/1")
        (student,) = (await ask("ana", "POST", "/class"))[1]["students"]
        assert (student["gone"], student["state"]) == (True, {"cell": 3})
        await ask("ana", "DELETE", "/class")
        assert (await ask("eve", "POST", "/class/ana/1"))[0] == 404

    with_service(steps)


def test_only_the_panel_that_the_teacher_opens_is_asked_for_and_kept():
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        assert (await ask("eve", "POST", "/class/ana/1", {"panel": "early"}))[1]["want"] == ""
        assert (await ask("ana", "POST", "/class", {"opened": "eve/1"}))[1]["panel"] is None
        assert (await ask("eve", "POST", "/class/ana/1", {}))[1]["want"] == "panel"
        await ask("eve", "POST", "/class/ana/1", {"panel": "<p>loss</p>"})
        assert (await ask("ana", "POST", "/class", {"opened": "eve/1"}))[1][
            "panel"
        ] == "<p>loss</p>"
        assert (await ask("ana", "POST", "/class"))[1]["panel"] is None

    with_service(steps)


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("nobody", {}, 403),
        ("culler", {}, 403),
        ("eve", ["no", "state"], 400),
        ("eve", {"error": "x" * 60_000}, 413),
    ],
    ids=["unknown", "service", "list", "length"],
)
def test_what_is_no_state_of_a_user_is_refused(name, body, status):
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        assert (await ask(name, "POST", "/class/ana/1", body))[0] == status
        assert (await ask("ana", "POST", "/class"))[1]["students"] == []

    with_service(steps)


def test_one_student_cannot_fill_the_class():
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        found = [(await ask("eve", "POST", f"/class/ana/{n}", {}))[0] for n in range(6)]
        assert found == [200] * 4 + [429] * 2
        assert (await ask("zoe", "POST", "/class/ana/1", {}))[0] == 200

    with_service(steps)
