"""The log of a rank takes no more of the disk than it may, and a full disk is said."""

import errno
import os
import re
import subprocess
from contextlib import suppress

import pytest

from allranks.engine import transcript
from tests.faults.notebook import Notebook

LIMIT = 2_000_000
#: The first block has a note, the last ones are not full, and one more is kept free for the next.
BLOCKS = 4 * transcript._BLOCK_NBYTES
FLOOD = "for i in range({lines}): print('flood', i, 'x' * 90)"


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    env = {"ALLRANKS_LOG_LIMIT": "2 MB"}
    with Notebook(tmp_path_factory.mktemp("limited"), env) as notebook:
        notebook.on_ranks("rank", "-n 2")
        yield notebook


def disk_nbytes(log):
    return log.stat().st_blocks * 512


def test_a_flood_takes_no_more_than_the_limit_and_its_end_is_whole(limited):
    cell = limited.on_ranks(FLOOD.format(lines=100_000), "-r 0").ok()
    assert cell.text.count("the log has reached 2 MB (ALLRANKS_LOG_LIMIT)") == 1
    assert "flood 99999" in cell.text
    log = limited.logs()["rank-0.log"]
    assert log.stat().st_size > 5 * LIMIT
    assert disk_nbytes(log) <= LIMIT + BLOCKS
    said = log.read_bytes()
    gone = int(
        re.match(rb"allranks: this log .* its first ([\d,]+) bytes", said)[1].replace(b",", b"")
    )
    kept = [int(n) for n in re.findall(rb"^flood (\d+) x{90}$", said[gone:], re.MULTILINE)]
    assert kept == list(range(kept[0], 100_000))
    assert len(said) - gone >= LIMIT // 2


def test_a_process_that_a_cell_has_started_goes_on_writing_to_a_log_that_is_cut(limited):
    cell = limited.on_ranks(
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'read go; echo from the child'], stdin=-1)\n"
        f"{FLOOD.format(lines=50_000)}\nchild.communicate(b'go')\nprint('the end')",
        "-r 1",
    ).says("ALLRANKS_LOG_LIMIT", "│ from the child\n")
    assert cell.text.rstrip().endswith(("│ the end", "part is removed."))
    assert limited.on_ranks("print('little')").text == "ranks 0–1 │ little\n"


def test_a_limit_that_is_no_size_is_refused_with_what_to_type(limited):
    cell = limited.run("%env ALLRANKS_LOG_LIMIT=much\n%distributed restart")
    limited.run("%env ALLRANKS_LOG_LIMIT=2 MB")
    cell.fails("StartFailed", "expected ALLRANKS_LOG_LIMIT to be a size", "found 'much'")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"needs a mount of its own: {error}")
    if done.returncode:
        pytest.skip(f"needs a mount of its own: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_in_the_cell_and_ends_when_there_is_room(limited, small_disk):
    notebook = limited
    notebook.run(f"%distributed stop\n%env ALLRANKS_LOG_DIR={small_disk}")
    assert notebook.on_ranks("import os", "-n 2").status == "ok"
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    cell = notebook.on_ranks("os.system('head -c 20000 /dev/zero | tr \"\\\\0\" x');", "-r 0")
    assert f"no space left for {small_disk}" in cell.text
    assert "rank-0.log: output is lost" in cell.text
    notebook.on_ranks("print('x' * 20_000)", "-r 1").fails("CellFailed", "No space left on device")
    filler.unlink()
    assert notebook.on_ranks("print('room')", "-r 0").text.endswith("│ room\n")
    assert "no space left" not in notebook.on_ranks("print('room')").text


def test_a_log_that_is_closed_is_not_a_full_disk(tmp_path):
    log = tmp_path / "rank-0.log"
    log.touch()
    room = transcript.LogRoom(str(log), LIMIT)
    # In its place stands what can take no block, as where a cell has closed it.
    instead = os.open("/proc/self/status", os.O_RDONLY)
    os.dup2(instead, room.file)
    os.close(instead)
    assert os.fstatvfs(room.file).f_bavail == 0
    assert not room.is_full()
    os.close(room.file)


def test_a_file_system_without_holes_on_demand_lets_all_of_a_log_go(tmp_path, monkeypatch):
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"old\n" * 1_000_000)
    monkeypatch.setattr(transcript, "_allocate", lambda *_: errno.EOPNOTSUPP)
    room = transcript.LogRoom(str(log), LIMIT)
    assert room.cut(log.stat().st_size)
    assert not room.cut(log.stat().st_size)
    assert log.stat().st_size == 4_000_000
    assert disk_nbytes(log) <= LIMIT
    with log.open("ab") as file:
        file.write(b"new\n")
    assert log.read_bytes()[4_000_000:] == b"new\n"
    assert not room.is_full()
