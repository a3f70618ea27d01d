"""%distributed class, join and leave: two notebooks on real ranks, and students who are hostile."""

from __future__ import annotations

import grp
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from allranks import own_files
from allranks.errors import UsageError
from allranks.features.classroom import board, door, states
from allranks.features.classroom import student as student_side
from tests.kernel import Kernel, wait_until

TEACHER = door.own_account()
_SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("class"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, folder) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("teacher"), {"ALLRANKS_CLASS_DIR": folder}) as kernel:
        kernel.run("%load_ext allranks")
        yield kernel


@pytest.fixture(scope="module")
def student(tmp_path_factory, folder) -> Iterator[Kernel]:
    environment = {"ALLRANKS_CLASS_DIR": folder, "JUPYTERHUB_USER": "zoe"}
    environment["JPY_SESSION_NAME"] = "/home/zoe/01_ranks.ipynb"
    with Kernel(tmp_path_factory.mktemp("student"), environment) as kernel:
        kernel.run("%load_ext allranks\n%distributed start -n 2")
        yield kernel


@pytest.fixture
def _class_is_open(teacher) -> None:
    teacher.run("%distributed class").ok()


def seen(teacher: Kernel, *texts: str) -> str:
    """Returns the teacher's list once it has these texts."""
    return until(lambda: teacher.run("%distributed class").text, *texts)


def waited(kernel: Kernel, expression: str, text: str) -> str:
    return until(lambda: kernel.run(f"print({expression})").text, text)


def until(read: Callable[[], str], *texts: str) -> str:
    """Returns what is read once it has these texts."""
    said = [""]

    def come() -> bool:
        said[0] = read()
        return all(text in said[0] for text in texts)

    wait_until(come, lambda: f"{texts} in {said[0]:.500}")
    return said[0]


def test_without_a_class_nobody_joins(student):
    said = student.run(f"%distributed join {TEACHER}")
    assert f"the class of {TEACHER} is not open. {TEACHER} types: %distributed class" in said.text
    assert "expected the account of your teacher" in student.run("%distributed join nobody1").text
    assert student.run("%distributed leave").text == "You are in no class.\n"


def test_nothing_is_seen_before_a_student_joins_and_after_leaving(teacher, student):
    assert f"Students type: %distributed join {TEACHER}" in teacher.run("%distributed class").text
    student.run("1 / 0")
    assert "No student has joined yet." in teacher.run("%distributed class").text
    assert "the first line of its error" in student.run(f"%distributed join {TEACHER}").text
    assert "zoe" in seen(teacher, "01_ranks.ipynb", "idle")
    assert student.run("%distributed leave").text.startswith(f"{TEACHER} no longer sees")
    assert "failed" not in seen(teacher, "left")
    student.run(
        "import threading\n"
        "def sends(): return [t for t in threading.enumerate() if 'allranks-class' in t.name]"
    )
    waited(student, "sends()", "[]")  # what sends has ended, so that nothing comes later
    student.run("raise ValueError('a secret')")
    assert student.value("sends()") == "[]"
    assert "secret" not in teacher.run("%distributed class").text


@pytest.mark.usefixtures("_class_is_open")
def test_a_teacher_sees_errors_and_who_waits_for_whom(teacher, student):
    student.run(f"%distributed join {TEACHER}")
    student.run("%%distributed\nif rank == 1: raise ValueError('no data')\nallreduce(1.0)")
    seen(teacher, "failed", "rank 1 of 2 at line 2: ValueError: no data")
    late = student.start(
        "%%distributed\nimport time\nif rank == 1:\n    time.sleep(600)\nallreduce(1.0)"
    )
    seen(teacher, "runs", "rank 0 is waiting in allreduce(Average) for rank 1 at")
    student.interrupt()
    late.wait()
    seen(teacher, "failed", "KeyboardInterrupt")
    assert student.run("%%distributed\nprint(allreduce(rank, op=Sum))").text == "ranks 0–1 │ 1\n"


@pytest.mark.usefixtures("_class_is_open")
def test_a_panel_is_shown_only_with_consent_and_runs_no_script(teacher, student):
    find = (
        "hooks = get_ipython().magics_manager.registry['DistributedMagics'].session.hooks\n"
        "view = next(f for f in hooks.features if type(f).__name__ == 'Classroom')._view\n"
    )
    student.run("%%distributed --view full\nlog(step=1, loss=rank)").ok()
    # The cells after it have no panel; HTML that a cell displays is output, which is not sent.
    html = "from IPython.display import HTML\nHTML('<b>a secret</b>')"
    student.run(f"%%distributed\n{html}").says("HTML")
    student.run("%%distributed\npass").ok()
    student.run(f"%distributed join {TEACHER}")
    seen(teacher, "idle")
    teacher.run(find).ok()
    waited(teacher, "len(view._choice.options) > 1", "True")
    teacher.run("view._choice.value = view._choice.options[1]").ok()
    shown = waited(teacher, "view._panel.value", "zoe")
    assert "shows no panel" in shown
    assert "<iframe" not in shown
    # A student who joins again stays open.
    student.run(f"%distributed join {TEACHER} panel")
    shown = waited(teacher, "view._panel.value", "loss")
    assert '<iframe sandbox=""' in shown
    assert "secret" not in shown
    student.run("1 / 0")
    seen(teacher, "ZeroDivisionError")
    student.run("%distributed leave")
    assert "ZeroDivisionError" not in seen(teacher, "left")
    assert "loss" not in waited(teacher, "view._panel.value", "has left")


@pytest.mark.usefixtures("_class_is_open")
def test_the_class_ends_with_its_teacher_and_can_be_opened_again(teacher, student, folder):
    assert teacher.run("%distributed class close").text == "The class is closed.\n"
    assert os.listdir(folder) == []
    assert student.run("%distributed leave").text == "You are in no class.\n"
    seen(teacher, "No student has joined yet.")
    assert "another notebook of yours has the class" in student.run("%distributed class").text
    teacher.run("%distributed class close")


@pytest.fixture
def opened(tmp_path, monkeypatch) -> Iterator[board.ClassBoard]:
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    found = board.ClassBoard(None)
    yield found
    found.close()


def test_a_student_stays_while_the_teacher_sends_nothing(opened, monkeypatch):
    connection = door.connect(TEACHER)
    monkeypatch.setattr(door, "connect", lambda teacher: connection)
    member = student_side.Membership(TEACHER, False, lambda with_panel: {"cell": 7})
    wait_until(lambda: any(one.cell == 7 for one in opened.students()))
    # There is a time limit for sending, and none for receiving.
    assert connection.gettimeout() is None
    limits = (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)
    found = [any(connection.getsockopt(socket.SOL_SOCKET, limit, 16)) for limit in limits]
    assert found == [True, False]
    assert member.is_open
    member.close()


def student_who_sends(opened: board.ClassBoard, line: bytes) -> list[board.Student]:
    with door.connect(TEACHER) as connection:
        connection.sendall(line)
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            found = opened.students()
            if any(one.cell == 7 for one in found):
                return found
            connection.settimeout(0.05)
            try:
                if not connection.recv(1):
                    return opened.students()
            except TimeoutError:
                pass
    raise AssertionError("expected an end or a state")


def test_a_student_cannot_write_html_into_the_teachers_notebook(opened):
    evil = "<img src=x onerror=alert(1)>"
    message = {"user": evil, "notebook": evil, "exercise": evil, "state": "failed", "error": evil}
    message |= {"cell": 7, "ranks": evil, "shows_panel": True}
    (one,) = student_who_sends(opened, json.dumps(message).encode() + b"\n")
    one.panel, one.gone = "", False  # its connection may have ended meanwhile
    assert "The panel of a running cell comes when the cell ends." in board.panel_html(one)
    one.panel = f'"></iframe>{evil}'
    assert "<img" not in board.as_html([one]) + board.ranks_html(one) + board.panel_html(one)


@pytest.mark.parametrize(
    "line",
    [b"no json\n", b"[]\n", b"[" * 100_000 + b"\n", b"x" * (states.PANEL_NBYTES + 70_000)],
    ids=["text", "list", "depth", "length"],
)
def test_a_student_who_sends_something_else_is_disconnected(opened, line):
    try:
        assert student_who_sends(opened, line) == []
    except (BrokenPipeError, ConnectionResetError):
        assert opened.students() == []


def test_wrong_types_of_a_state_are_replaced(opened):
    message = {"cell": 7, "seconds": "long", "error": ["x"], "state": None, "notebook": {}}
    (one,) = student_who_sends(opened, json.dumps(message).encode() + b"\n")
    assert (one.error, one.notebook, one.seconds) == ("", "", 0.0)


def test_one_account_cannot_take_all_places_and_students_who_share_the_teachers_can():
    own, other = os.getuid(), os.getuid() + 1
    assert board.refusal(other, [other] * 3) == ""
    assert "your account has 4 notebooks in it" in board.refusal(other, [other] * 4)
    assert board.refusal(other, [own] * 499) == ""
    assert board.refusal(own, [own] * 499) == ""
    assert "it has 500 notebooks" in board.refusal(own, [own] * 500)


def test_a_notebook_that_is_one_too_many_is_refused_with_the_reason(opened, monkeypatch):
    monkeypatch.setattr(board, "_places_of", lambda uid: states.MAX_NOTEBOOKS)
    with ExitStack() as ends:
        for _ in range(4):
            ends.enter_context(door.connect(TEACHER))
        with pytest.raises(UsageError, match=r"your account has 4 notebooks.*distributed leave"):
            student_side.Membership(TEACHER, False, lambda with_panel: {})


def test_the_panel_that_comes_unasked_ends_its_connection_and_the_one_asked_for_is_kept(opened):
    with door.connect(TEACHER) as connection:
        door.send(connection, {"cell": 7})
        wait_until(opened.students)
        (one,) = opened.students()
        opened.ask_panel(one)
        door.send(connection, "<p>" + "x" * 3_000_000)
        wait_until(lambda: one.panel is not None)
        door.send(connection, "<p>second")
        wait_until(lambda: one.panel == "<p>second")
        door.send(connection, "<p>third")
        wait_until(lambda: one.gone)
    assert one.panel is None


@pytest.mark.parametrize(("group", "mode"), [(None, 0o666), (os.getgid(), 0o660)])
def test_the_door_admits_every_account_or_a_group_and_its_folder_only_this_one(
    group, mode, tmp_path, monkeypatch
):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    name = None if group is None else grp.getgrgid(group).gr_name
    with door.listen(name):
        folder = door.folder_of(TEACHER)
        assert stat.S_IMODE((folder / "door").stat().st_mode) == mode
        assert (folder / "door").stat().st_gid == os.getgid()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o711


OTHER_ACCOUNT = 65534
AS_ANOTHER = """
import os, socket, sys
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
connection = socket.socket(socket.AF_UNIX)
connection.connect({path!r})
connection.sendall(b'{{"cell": 7, "user": "root"}}\\n')
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="not root: nobody else's account can be tried")
def test_the_system_says_who_a_student_is_and_a_group_keeps_others_out(monkeypatch):
    folder = Path("/tmp") / f"allranks-test-class-{os.getpid()}"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(folder))
    path = str(door.folder_of(TEACHER) / "door")
    command = [sys.executable, "-c", AS_ANOTHER.format(uid=OTHER_ACCOUNT, path=path)]
    try:
        opened = board.ClassBoard(None)
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            wait_until(lambda: any(one.cell for one in opened.students()))
            (one,) = opened.students()
            assert (one.uid, one.name) == (OTHER_ACCOUNT, "root (nobody)")
            assert process.stdin is not None
            process.stdin.close()
        opened.close()
        opened = board.ClassBoard("root")
        refused = subprocess.run(command, input=b"", capture_output=True, check=False)
        assert b"PermissionError" in refused.stderr
        opened.close()
    finally:
        shutil.rmtree(folder)


def test_a_class_that_has_no_descriptor_for_a_notebook_is_not_called_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    with door.listen(None) as listener:
        closes = threading.Thread(target=lambda: listener.accept()[0].close())
        closes.start()
        with pytest.raises(UsageError, match=r"has closed the connection: .* too many files open"):
            door.connect(TEACHER)
        closes.join()


def test_an_answer_of_another_program_is_no_class(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))

    def answer() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(b"SSH-2.0\n")

    with door.listen(None) as listener:
        answers = threading.Thread(target=answer)
        answers.start()
        with pytest.raises(UsageError, match="found another program's"):
            door.connect(TEACHER)
        answers.join()


def test_without_the_account_of_a_connection_there_is_no_class(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    monkeypatch.delattr(socket, "SO_PEERCRED")
    for begin in (lambda: door.listen(None), lambda: door.connect(TEACHER)):
        with pytest.raises(UsageError, match="a class needs Linux"):
            begin()
    assert list(tmp_path.iterdir()) == []


def test_a_class_of_another_account_is_not_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    other = "nobody" if TEACHER != "nobody" else "root"
    folder = door.folder_of(other)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(folder / "door"))
        impostor.listen()
        with pytest.raises(UsageError, match="opened by another account"):
            door.connect(other)


def full(path: Path, ends: ExitStack) -> None:
    """Makes a socket that accepts no more connections."""
    door = ends.enter_context(socket.socket(socket.AF_UNIX))
    door.bind(str(path))
    door.listen(0)
    with suppress(BlockingIOError):
        while True:
            visitor = ends.enter_context(socket.socket(socket.AF_UNIX))
            visitor.setblocking(False)
            visitor.connect(str(path))


def test_a_socket_that_another_account_keeps_full_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    other = "nobody" if TEACHER != "nobody" else "root"
    folder = door.folder_of(other)
    folder.mkdir()
    with ExitStack() as ends:
        full(folder / "door", ends)
        with pytest.raises(UsageError, match="opened by another account"):
            door.connect(other)


def test_a_class_that_many_students_join_at_once_says_so_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(tmp_path))
    monkeypatch.setattr(door, "_CONNECT_SECONDS", 1)
    with ExitStack() as ends:
        ends.enter_context(door.listen(None))
        os.unlink(door.folder_of(TEACHER) / "door")
        full(door.folder_of(TEACHER) / "door", ends)
        with pytest.raises(UsageError, match="too many students that join at once"):
            door.connect(TEACHER)


@pytest.mark.parametrize("taken", ["by another account", "for all to write", "as a link"])
def test_a_name_that_another_account_has_taken_prevents_no_class(
    tmp_path_factory, monkeypatch, taken
):
    place = tmp_path_factory.mktemp("c")  # the path of a socket is short
    monkeypatch.setenv("ALLRANKS_CLASS_DIR", str(place))
    folder = door.folder_of(TEACHER)
    if taken == "as a link":
        folder.symlink_to(place)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    if taken == "by another account":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, OTHER_ACCOUNT, OTHER_ACCOUNT)
    (place / f"{folder.name}-more").symlink_to(place)
    opened = board.ClassBoard(None)
    connection = door.connect(TEACHER)
    assert own_files.peer(connection) == (os.getpid(), os.getuid())
    connection.close()
    with pytest.raises(UsageError, match="another notebook of yours has the class"):
        door.listen(None)
    opened.close()
    assert [path for path in place.iterdir() if path.is_dir() and not path.is_symlink()] == [
        *([folder] if taken != "as a link" else [])
    ]
