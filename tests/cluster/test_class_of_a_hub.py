"""The service through which a hub's notebooks form a class, with a hub that only knows tokens."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from allranks.errors import UsageError
from allranks.features.classroom import hub, hub_service
from tests.kernel import wait_until
from tests.missing import skip_missing
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


def lines(body: Any) -> str:
    """Returns the body of a request: a state, and the panel below it."""
    if not isinstance(body, dict) or "panel" not in body:
        return json.dumps(body)
    return json.dumps({}) + "\n" + json.dumps(body["panel"])


def with_service(steps: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
    with_port(lambda _, ask: steps(ask))


def with_port(steps: Callable[[int, Ask], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        hub, service = free_port(), free_port()
        applications = {
            hub: Application([("/hub/api/user", FakeHub)]),
            service: hub_service.application(f"http://127.0.0.1:{hub}/hub/api"),
        }
        servers = [HTTPServer(applications[hub]), hub_service.ClassServer(applications[service])]
        for server, port in zip(servers, applications, strict=True):
            server.listen(port, "127.0.0.1")

        async def ask(name: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            answer = await AsyncHTTPClient().fetch(
                f"http://127.0.0.1:{service}{path}",
                method=method,
                headers={"Authorization": f"token of-{name}"},
                body=None if method == "DELETE" else lines(body or {}),
                raise_error=False,
            )
            return answer.code, json.loads(answer.body or b"{}") if answer.code == 200 else {}

        try:
            await steps(service, ask)
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


def test_a_student_whose_notebook_has_left_joins_again_at_once():
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        for n in range(4):
            await ask("eve", "POST", f"/class/ana/{n}", {})
        await ask("eve", "DELETE", "/class/ana/0")
        assert (await ask("eve", "POST", "/class/ana/new", {}))[0] == 200

    with_service(steps)


def test_notebooks_that_have_ended_without_leaving_make_room_in_every_class():
    now, long_ago = 1000.0, 900.0
    ana, ben = hub_service.HubClass(now), hub_service.HubClass(now)
    for n, one in enumerate([ana, ana, ben, ben]):
        one.members[f"eve/{n}"] = hub_service.StudentState("eve", {}, sent=now)
    classes = {"ana": ana, "ben": ben}
    assert not hub_service.admit(classes, ana, "eve", "eve/new", now)
    assert hub_service.admit(classes, ana, "eve", "eve/0", now)
    assert hub_service.admit(classes, ana, "zoe", "zoe/0", now)
    ben.members["eve/3"].sent = long_ago
    assert hub_service.admit(classes, ana, "eve", "eve/new", now)


def test_each_client_has_limits_and_leaves_room_for_the_others(monkeypatch):
    requests = hub_service.RequestCounter()
    found = [requests.admits("eve", 100.0) for _ in range(200)]
    assert (found.count(True), requests.admits("zoe", 100.0)) == (100, True)
    assert requests.admits("eve", 111.0)
    connections = hub_service.OpenConnections()
    closed = [connections.add(("one", n), "10.0.0.1") for n in range(300)]
    assert closed == [None] * 256 + [("one", n) for n in range(44)]
    closed = [connections.add(("each", n), f"10.0.1.{n}") for n in range(257)]
    assert closed == [None] * 256 + [("one", 44)]
    connections.remove(("each", 0))
    assert connections.add("next", "10.0.0.2") is None


def test_no_more_connections_are_accepted_than_there_are_descriptors_for():
    limits = 10, 100, 256, 1024, 1 << 20, resource.RLIM_INFINITY
    found = [hub_service.most_connections(limit) for limit in limits]
    assert found == [1, 36, 192, 512, 512, 512]
    connections = hub_service.OpenConnections(2)
    assert [connections.add(n, f"10.0.0.{n}") for n in range(4)] == [None, None, 0, 1]


def test_unknown_tokens_cost_the_hub_little_and_keep_out_no_token_that_it_knows(monkeypatch):
    asked: list[str] = []
    confirm = FakeHub.get

    def get(handler: FakeHub) -> None:
        asked.append(handler.request.headers["Authorization"])
        confirm(handler)

    monkeypatch.setattr(FakeHub, "get", get)
    # A token is confirmed anew each time, and all are in one spell.
    monkeypatch.setattr(hub_service, "_TOKEN_SECONDS", -1.0)
    monkeypatch.setattr(hub_service, "_REQUESTS_SECONDS", 1000.0)

    async def steps(ask: Ask) -> None:
        assert (await ask("ana", "POST", "/class"))[0] == 200
        found = [(await ask(f"guess-{n}", "POST", "/class"))[0] for n in range(150)]
        assert found == [403] * 100 + [503] * 50
        assert len(asked) == 101
        assert (await ask("ana", "POST", "/class"))[0] == 200
        assert (await ask("eve", "POST", "/class/ana/1"))[0] == 503

    with_service(steps)


def test_connections_without_a_request_keep_nobody_out():
    async def run() -> None:
        port = free_port()
        service = hub_service.ClassServer(hub_service.application("http://127.0.0.1:1/hub/api"))
        service.listen(port, "127.0.0.1")
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        try:
            url = f"http://127.0.0.1:{port}/"
            assert (await AsyncHTTPClient().fetch(url, raise_error=False)).code == 404
        finally:
            for _, writer in idle:
                writer.close()
            service.stop()
            await service.close_all_connections()

    asyncio.run(run())


@pytest.mark.parametrize("url", ["http://hub:10101", "http://10.1.0.1:80", "ftp://h", "x", ""])
def test_no_token_crosses_a_network_without_encryption(url, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_URL", url)
    with pytest.raises(UsageError, match="expected ALLRANKS_CLASS_URL to begin with https"):
        hub_service.certificate(url)
    with pytest.raises(UsageError, match="begin with https"):
        hub.HubBoard()


def test_an_address_of_this_machine_needs_no_certificate_and_others_do(monkeypatch, tmp_path):
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        assert hub_service.certificate(url) is None
    monkeypatch.setenv("ALLRANKS_CLASS_CERTIFICATE", str(tmp_path / "none.pem"))
    with pytest.raises(UsageError, match="expected a file with a key and a certificate"):
        hub_service.certificate("https://hub:10101")


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    """A key and a certificate for 127.0.0.1, which the service has and notebooks trust."""
    if shutil.which("openssl") is None:
        skip_missing("a certificate is made by openssl: apt-get install openssl")
    key, found = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=class", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(found)]
    subprocess.run(command, check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + found.read_text())
    monkeypatch.setenv("ALLRANKS_CLASS_CERTIFICATE", str(both))
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "of-ana")
    return found


def described(with_panel: bool) -> dict[str, Any]:
    return {"cell": 7} | ({"panel": "<p>loss</p>"} if with_panel else {})


def test_notebooks_meet_over_https_and_only_at_a_service_that_they_trust(certificates, monkeypatch):
    monkeypatch.setattr(hub, "_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(hub_service, "_MAX_REQUESTS", 10_000)

    async def run() -> None:
        ports = free_port(), free_port()
        url = f"https://127.0.0.1:{ports[1]}"
        monkeypatch.setenv("ALLRANKS_CLASS_URL", url)
        fake = HTTPServer(Application([("/hub/api/user", FakeHub)]))
        made = hub_service.application(f"http://127.0.0.1:{ports[0]}/hub/api")
        service = hub_service.ClassServer(made, ssl_options=hub_service.certificate(url))
        for server, port in zip((fake, service), ports, strict=True):
            server.listen(port, "127.0.0.1")
        try:
            with pytest.raises(UsageError, match="CERTIFICATE_VERIFY_FAILED"):
                await asyncio.to_thread(hub.HubBoard)
            monkeypatch.setenv("ALLRANKS_CLASS_CA", str(certificates))
            opened = await asyncio.to_thread(hub.HubBoard)
            assert opened.students() == []
            member = await asyncio.to_thread(hub.HubMembership, "ana", True, described)
            await asyncio.to_thread(wait_until, opened.students)
            (one,) = opened.students()
            opened.ask_panel(one)
            await asyncio.to_thread(wait_until, lambda: one.panel == "<p>loss</p>")
            await asyncio.to_thread(member.close)
            await asyncio.to_thread(opened.close)
        finally:
            for server in (fake, service):
                server.stop()
                await server.close_all_connections()

    asyncio.run(run())


def test_the_body_of_a_client_without_a_token_is_not_read():
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        large = {"panel": "x" * 3_000_000}
        assert (await ask("nobody", "POST", "/class/ana/1", large))[0] == 403
        assert (await ask("eve", "POST", "/class/ana/1", large))[0] == 413
        await ask("ana", "POST", "/class", {"opened": "eve/1"})
        assert (await ask("eve", "POST", "/class/ana/1", large))[0] == 200

    with_service(steps)


def test_a_user_sends_one_panel_at_a_time():
    """Unfinished ones on many connections could take all memory of the service."""

    async def steps(port: int, ask: Ask) -> None:
        await ask("ana", "POST", "/class", {"opened": "eve/1"})
        panel = {"panel": "x" * 100_000}
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /class/ana/1 HTTP/1.1", "Host: class", "Content-Length: 99999"
        head = *head, "Authorization: token of-eve", "Expect: 100-continue", "", ""
        writer.write("\r\n".join(head).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        assert (await ask("eve", "POST", "/class/ana/1", panel))[0] == 413
        assert (await ask("eve", "POST", "/class/ana/1", {"cell": 1}))[0] == 200
        writer.write(b"{}".ljust(99_999))
        await reader.readline()
        writer.close()
        assert (await ask("eve", "POST", "/class/ana/1", panel))[0] == 200

    with_port(steps)


def test_clients_without_a_token_write_nothing_into_the_log(caplog):
    async def steps(port: int, ask: Ask) -> None:
        for name, path in (("nobody", "/class"), ("eve", "/class/none/1"), ("eve", "/x")):
            assert (await ask(name, "POST", path))[0] in (403, 404)

    with_port(steps)
    logged = [one.getMessage() for one in caplog.records]
    assert [line for line in logged if "/hub/api" not in line] == []  # that is the hub's


def test_one_student_cannot_fill_the_class():
    async def steps(ask: Ask) -> None:
        await ask("ana", "POST", "/class")
        found = [(await ask("eve", "POST", f"/class/ana/{n}", {}))[0] for n in range(6)]
        assert found == [200] * 4 + [429] * 2
        assert (await ask("zoe", "POST", "/class/ana/1", {}))[0] == 200

    with_service(steps)
