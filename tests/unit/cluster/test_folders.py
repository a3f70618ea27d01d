"""Where a cluster keeps what it needs, and what is swept away."""

import os
import pwd
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from allranks import own_files
from allranks.cluster import kept_folders, log_folder, session_folder
from allranks.cluster.launchers import mpiexec
from allranks.errors import UsageError
from allranks.launched import SHARED_FILES
from tests.kernel import wait_until
from tests.mpi import launch


@pytest.fixture(autouse=True)
def private_places(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(log_folder.FOLDER, raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


def age(folder: Path, days: float) -> None:
    past = time.time() - days * 86400
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (past, past))


def test_logs_lie_in_the_home_or_in_the_temporary_folder_and_are_the_owners(tmp_path, monkeypatch):
    folder = Path(log_folder.make_log_folder())
    assert folder.parent == tmp_path / "home" / ".local" / "state" / "allranks"
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert Path(log_folder.make_log_folder()).is_relative_to(tmp_path / "tmp")


def test_logs_of_more_than_a_week_ago_are_removed_and_other_old_folders_stay(tmp_path, monkeypatch):
    made = Path(log_folder.make_log_folder())
    old, recent = (made.with_name(f"20260102-03040{n}-ab_1cd2e") for n in (5, 6))
    new = made.with_name(f"{made.name}x")  # by its name it is of now, so nothing looks into it
    for folder in (old, recent, new):
        folder.mkdir()
        (folder / "rank-0.log").touch()
        age(folder, days=6 if folder == recent else 8)
    log_folder.make_log_folder()
    assert (old.exists(), recent.exists(), new.exists()) == (False, True, True)
    thesis = tmp_path / "mine" / "thesis"
    thesis.mkdir(parents=True)
    (thesis / "chapter.tex").touch()
    age(thesis, days=400)
    monkeypatch.setenv(log_folder.FOLDER, str(tmp_path / "mine"))
    assert Path(log_folder.make_log_folder()).parent == tmp_path / "mine"
    assert (thesis / "chapter.tex").exists()


@pytest.mark.parametrize("made", ["by another user", "for all to write", "as a link"])
def test_a_folder_for_logs_that_others_have_made_is_not_used(tmp_path, monkeypatch, made):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    place = tmp_path / "tmp" / f"allranks-logs-{os.getuid()}"
    if made == "as a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir(mode=0o700)
        place.chmod(0o777 if made == "for all to write" else 0o700)
    if made == "by another user":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(place, 65534, 65534)
    folder = Path(log_folder.make_log_folder())
    assert folder.parent.parent == tmp_path / "tmp"
    assert {each.stat().st_mode & 0o777 for each in (folder, folder.parent)} == {0o700}
    assert folder.parent != place
    assert list(place.iterdir()) == []
    # The next start finds the same one, not what others have made, and removes old logs there.
    folder = folder.rename(folder.with_name("20260102-030405-ab_1cd2e"))
    (folder / "rank-0.log").touch()
    age(folder, days=8)
    Path(f"{place}-").mkdir(mode=0o755)
    Path(f"{place}- ").symlink_to(tmp_path)
    again = Path(log_folder.make_log_folder())
    assert again.parent == folder.parent
    assert list(folder.parent.iterdir()) == [again]


def by_another(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a folder away")
    os.chown(path, 65534, 65534)


EXPOSES = {
    "it belongs to another user": by_another,
    "all can write": lambda path: path.chmod(0o777),
    "a group can write, as to a lab's project folder": lambda path: (
        path.chmod(0o2770),
        os.chown(path, -1, 65534) if not os.getuid() else pytest.skip("needs another group"),
    ),
}


@pytest.mark.parametrize("below", ["lab", "lab/logs", "link"])
@pytest.mark.parametrize("expose", EXPOSES.values(), ids=EXPOSES)
def test_logs_are_not_where_others_can_exchange_a_part_of_the_path(
    tmp_path, monkeypatch, expose, below
):
    lab = tmp_path / "lab"
    lab.mkdir()
    (tmp_path / "link").symlink_to(lab)
    expose(lab)
    monkeypatch.setenv(log_folder.FOLDER, str(tmp_path / below))
    folder = Path(log_folder.make_log_folder())
    assert folder.parent == tmp_path / "home" / ".local" / "state" / "allranks"
    assert list(lab.iterdir()) == []
    refused = log_folder.refused_log_folder()
    assert "\n" not in refused
    assert f"because other users can write to {lab}. They are in {folder.parent}" in refused


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o775])
def test_logs_are_where_others_can_exchange_nothing(tmp_path, monkeypatch, mode):
    """As below /tmp, below a folder that others may read, and where the user's own group writes."""
    user = pwd.getpwuid(os.getuid()).pw_name
    own = SimpleNamespace(gr_name=user, gr_mem=[])
    monkeypatch.setattr("grp.getgrgid", lambda gid: own)
    monkeypatch.setattr(own_files, "_users_with_group", lambda gid: {user})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(mode)
    monkeypatch.setenv(log_folder.FOLDER, str(tmp_path / "mine" / "logs"))
    assert Path(log_folder.make_log_folder()).parent == tmp_path / "mine" / "logs"
    assert log_folder.refused_log_folder() == ""
    own.gr_mem.append("eve")
    assert bool(log_folder.refused_log_folder()) == (mode == 0o775)
    # Nor a member whom the group's list does not name, because it is the member's first group.
    own.gr_mem.clear()
    monkeypatch.setattr(own_files, "_users_with_group", lambda gid: {user, "eve"})
    assert bool(log_folder.refused_log_folder()) == (mode == 0o775)


def test_the_users_of_a_group_are_also_those_whose_first_group_it_is(monkeypatch):
    users = [SimpleNamespace(pw_name=name, pw_gid=gid) for name, gid in (("ana", 7), ("eve", 7))]
    monkeypatch.setattr("pwd.getpwall", lambda: [*users, SimpleNamespace(pw_name="x", pw_gid=8)])
    assert own_files._users_with_group.__wrapped__(7) == {"ana", "eve"}


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="needs access control lists of Linux")
def test_a_user_whom_an_access_control_list_names_can_write(tmp_path, monkeypatch):
    monkeypatch.setattr(own_files, "_is_own_group", lambda gid: True)
    path = tmp_path / "file"
    path.touch(mode=0o660)
    path.chmod(0o660)
    with path.open() as file:
        assert not own_files.others_can_write(path.stat(), str(path))
        # The version; then tag, rights and user of: owner, user 65534, group, mask, others.
        none = 0xFFFFFFFF
        entries = [(1, 6, none), (2, 6, 65534), (4, 6, none), (16, 6, none), (32, 0, none)]
        packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)
        try:
            os.setxattr(path, "system.posix_acl_access", packed)
        except OSError as error:
            pytest.skip(f"this file system has no access control lists: {error}")
        assert own_files.others_can_write(path.stat(), str(path))
        assert own_files.others_can_write(path.stat(), file.fileno())
        path.chmod(0o600)
        assert not own_files.others_can_write(path.stat(), str(path))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
@pytest.mark.parametrize("leads_to", ["mine", "home", "mine/../mine", "own link"])
def test_a_link_of_another_user_on_the_way_is_exposed(tmp_path, leads_to):
    (tmp_path / "mine").mkdir(mode=0o700)
    own, other = tmp_path / "own link", tmp_path / "link"
    own.symlink_to(tmp_path / "mine")
    other.symlink_to(leads_to)
    assert own_files.exposed_part(str(other / "logs")) == ""
    os.lchown(other, 65534, 65534)
    assert own_files.exposed_part(str(other / "logs")) == str(other)
    own.unlink()
    own.symlink_to("link")
    assert own_files.exposed_part(str(own)) == str(other)


def test_a_group_may_write_below_the_home_and_others_may_not(tmp_path, monkeypatch):
    """Volumes of some clusters give all files of a home to a group."""
    monkeypatch.setattr(own_files, "_is_own_group", lambda gid: False)
    (tmp_path / "home" / ".local").mkdir(parents=True)
    (tmp_path / "home" / ".local").chmod(0o2775)
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert own_files.exposed_part(str(tmp_path / "home" / ".local" / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert own_files.exposed_part(str(tmp_path / "home" / ".local" / "state")) == ""
    (tmp_path / "home" / ".local").chmod(0o777)
    assert own_files.exposed_part(str(tmp_path / "home" / ".local" / "state"))


def test_a_folder_of_logs_where_this_user_may_not_look_ends_no_start(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(log_folder.FOLDER, str(tmp_path / "file" / "logs"))
    assert log_folder.refused_log_folder() == ""
    assert Path(log_folder.make_log_folder()).is_dir()


def test_a_path_of_links_without_an_end_is_an_error(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match="symbolic links"):
        own_files.exposed_part(str(tmp_path / "link"))


def test_logs_are_not_in_a_state_folder_that_others_can_exchange(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_STATE_HOME", str(shared))
    assert Path(log_folder.make_log_folder()).parent.parent == tmp_path / "tmp"
    assert list(shared.iterdir()) == []
    assert f"write to {shared}. They are in the temporary folder" in log_folder.refused_log_folder()


def test_folders_above_the_logs_give_others_no_rights_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = Path(log_folder.make_log_folder())
    finally:
        os.umask(before)
    above = [part for part in folder.parents if tmp_path / "home" in part.parents]
    assert folder.parent == tmp_path / "home" / ".local" / "state" / "allranks"
    assert {part.stat().st_mode & 0o777 for part in (folder, *above)} == {0o700}


def test_what_is_trusted_later_is_not_in_a_temporary_folder_that_others_can_exchange(tmp_path):
    purpose = f"test-{os.getpid()}"  # in /tmp, others test at the same time
    place = tmp_path / "tmp" / f"allranks-{purpose}-{os.getuid()}"
    assert own_files.temporary_folder(purpose) == str(place)
    (tmp_path / "tmp").chmod(0o777)
    found = Path(own_files.temporary_folder(purpose))
    found.rmdir()
    assert found.parent == Path("/tmp")


def test_a_link_on_the_way_to_the_logs_is_not_followed_later(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    monkeypatch.setenv(log_folder.FOLDER, str(tmp_path / "link"))
    assert Path(log_folder.make_log_folder()).parent == tmp_path / "mine"


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path):
    script = "import os; from allranks.cluster import session_folder\n"
    script += "path = session_folder.name_session_folder(); os.mkdir(path); print(path)"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    left, mine = Path(done.stdout.strip()), Path(session_folder.name_session_folder())
    mine.mkdir()
    age(left, days=1)
    age(mine, days=1)
    session_folder.name_session_folder()
    assert (left.exists(), mine.exists()) == (False, True)
    mine.rmdir()  # it may lie in /tmp, where the temporary folder has a long name


def test_a_temporary_folder_without_space_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    free = {tmp_path: 64 << 10, Path("/tmp"): 1 << 30}
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free[place]))
    assert Path(session_folder.name_session_folder()).parent == Path("/tmp")
    free[Path("/tmp")] = 0
    with pytest.raises(UsageError, match=r"found /tmp full.*%env TMPDIR="):
        session_folder.name_session_folder()


def test_a_name_is_used_again_only_if_something_was_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_folders, "_MEMORY", str(tmp_path / "tmp"))
    kept = kept_folders.KeptFolders()
    (path,) = kept.paths
    assert not kept.have_files
    os.mkdir(path, 0o700)
    kept.hold()
    assert not kept.have_files
    os.rmdir(path)  # by the host agent: nothing was kept
    os.mkdir(path)
    Path(path, "cells-1-0-of-1").touch()  # by another user, who has taken the name
    assert not kept.have_files
    kept.hold()
    assert not kept.have_files  # others may use it, so it is not held
    os.chmod(path, 0o700)
    kept.hold()
    assert kept.have_files
    kept.close()


def test_without_a_home_mpi_reads_settings_from_a_folder_of_this_user_alone(monkeypatch):
    """Open MPI loads the libraries that a file there names."""
    monkeypatch.setattr(mpiexec, "is_open_mpi", lambda: True)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("HOME")
    home = Path(mpiexec.mpi_environment()["HOME"])
    assert home.stat().st_mode & 0o777 == 0o700
    assert mpiexec.mpi_environment()["HOME"] == str(home)
    home.chmod(0o777)  # another user has taken its name
    other = Path(mpiexec.mpi_environment()["HOME"])
    assert other != home
    assert other.stat().st_mode & 0o777 == 0o700


def test_what_another_user_puts_where_folders_are_swept_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_folders, "_MEMORY", str(tmp_path / "tmp"))
    os.mkfifo(tmp_path / "tmp" / "allranks-kept-0")  # whose opening waits for a writer
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    (tmp_path / "tmp" / "allranks-kept-1").symlink_to(tmp_path / "mine")
    age(tmp_path / "mine", days=1)
    kept_folders.KeptFolders()
    assert (tmp_path / "mine" / "thesis").exists()


def test_sockets_are_not_where_others_can_exchange_their_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(session_folder, "_LONGEST_NBYTES", 1000)
    tmp_path.chmod(0o1777)
    assert Path(session_folder.name_session_folder()).parent == tmp_path
    tmp_path.chmod(0o777)
    assert Path(session_folder.name_session_folder()).parent == Path("/tmp")


@pytest.mark.parametrize("whose", ["another user's", "this user's"])
def test_a_socket_that_accepts_nothing_delays_no_start(monkeypatch, whose):
    with ExitStack() as ends:
        # Not tmp_path: the path of a socket is short.
        place = Path(ends.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        monkeypatch.setattr(session_folder, "_session_place", lambda where: place)
        folder = place / f"allranks-session-{2**22 + 1}-0badcafe"
        folder.mkdir(0o700)
        door = ends.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(folder / "notebook"))
        door.listen(0)
        with suppress(BlockingIOError):
            while True:
                visitor = ends.enter_context(socket.socket(socket.AF_UNIX))
                visitor.setblocking(False)
                visitor.connect(str(folder / "notebook"))
        age(folder, days=1)
        if whose == "another user's":
            if os.getuid():
                pytest.skip("only root can give a folder away")
            os.chown(folder, 65534, 65534)
            monkeypatch.setattr(
                session_folder, "answers", lambda path: pytest.fail(f"{path} was asked")
            )
        session_folder.name_session_folder()
        assert folder.exists()


def test_mpi_whose_launcher_has_died_leaves_its_files_in_the_folder_of_the_session(tmp_path):
    temporary, session, said = (tmp_path / name for name in ("temporary", "session", "said"))
    temporary.mkdir()
    session.mkdir()
    source = f"""
import os, signal
from pathlib import Path
from allranks.engine import libraries
from tests.kernel import wait_until
launcher = os.getppid()
os.kill(launcher, signal.SIGKILL)
wait_until(lambda: os.getppid() != launcher)
os.environ["TMPDIR"] = {str(temporary)!r}
with libraries.mpi_files_in({str(session)!r}):
    from mpi4py import MPI
Path({str(said)!r}).write_text(os.environ["TMPDIR"] + "\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The host agent sets this variable.
    launch.mpiexec(1, "-c", source, **{SHARED_FILES: str(session)})
    # The rank outlives its launcher.
    wait_until(lambda: said.exists() and said.read_text() == f"{temporary}\n")
    assert list(temporary.iterdir()) == []
    left = sorted(each.name.partition(".")[0] for each in session.iterdir())
    assert left == ["ompi", "sm_segment"]
