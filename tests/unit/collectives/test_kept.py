"""A version of what ranks keep is valid once all of them have written it, and not before."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from traceback import walk_stack

import numpy as np
import pytest

from allranks.collectives.ops import keeping as kept
from allranks.collectives.ops.keeping import VersionedFiles, pieces_of, snapshot
from tests.kernel import wait_until


def write(series: VersionedFiles, version: int, **values: object) -> None:
    series.write(version, {series.rank: pieces_of(snapshot(values, 0, copy=True))})
    series.wait()


def two(folder: Path) -> tuple[VersionedFiles, VersionedFiles]:
    return VersionedFiles([str(folder)], "cells", 0, 2, None), VersionedFiles(
        [str(folder)], "cells", 1, 2, None
    )


def test_the_last_rank_makes_a_version_valid_and_removes_those_before(tmp_path):
    first, second = two(tmp_path)
    write(first, 1, x=1)
    assert (first.newest(), second.newest(), second.load()) == (0, 0, None)
    write(second, 1, x=2)
    write(second, 2, x=3)
    found = [series.load() for series in (first, second)]
    assert [value for _, value in filter(None, found)] == [{"x": 1}, {"x": 2}]
    write(first, 2, x=4)
    assert first.newest() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells-2-0-of-2", "cells-2-1-of-2"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_arrays_come_back_as_they_were_and_can_be_written_to(tmp_path):
    series = VersionedFiles([str(tmp_path)], "cells", 0, 1, None)
    array = np.arange(1000.0)
    parts = snapshot({"x": array, "y": array}, 0, copy=True)
    array[:] = 0
    series.write(1, {0: pieces_of(parts)})
    series.wait()
    found = series.load()
    assert found is not None
    values = found[1]
    assert values["x"] is values["y"]
    values["x"] += 1
    np.testing.assert_array_equal(values["x"], np.arange(1000.0) + 1)


def test_where_one_folder_has_no_room_the_next_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(kept, "_SPARED_NBYTES", 1 << 62)
    folders = [tmp_path / "memory", tmp_path / "disk"]
    for folder in folders:
        folder.mkdir(0o700)
    series = VersionedFiles([str(folder) for folder in folders], "cells", 0, 1, None)
    write(series, 1, x=1)
    assert [len(list(folder.iterdir())) for folder in folders] == [0, 1]
    assert series.newest() == 1


def test_what_could_not_be_written_is_said_and_leaves_the_version_before(tmp_path):
    gone = VersionedFiles([str(tmp_path / "gone")], "cells", 0, 1, None)
    write(gone, 1, x=1)
    assert "No such file" in gone.settle()
    assert gone.settle() == ""
    assert gone.newest() == 0


def test_a_folder_in_memory_that_is_gone_is_said_too(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    monkeypatch.setattr(kept, "_MEMORY", str(gone))
    monkeypatch.setattr(kept, "_WAITED_FOR_NBYTES", 0)
    series = VersionedFiles([str(gone)], "cells", 0, 1, None)
    series.write(1, {0: pieces_of(snapshot({"x": 1}, 0, copy=True))})
    assert "No such file or directory" in series.settle()


def test_a_file_under_way_is_waited_for_also_after_an_interrupt(tmp_path, monkeypatch):
    series, goes_on = VersionedFiles([str(tmp_path)], "cells", 0, 1, None), threading.Event()
    monkeypatch.setattr(series, "_write_file", lambda *_: goes_on.wait() and "written late")
    monkeypatch.setattr(kept, "_WAITED_FOR_NBYTES", 0)
    series.write(1, {0: pieces_of(snapshot({"x": 1}, 0, copy=True))})
    main = threading.get_ident()

    def waits() -> bool:
        frames = walk_stack(sys._current_frames()[main])
        return any(frame.f_code is VersionedFiles.wait.__code__ for frame, _ in frames)

    def once_it_waits(act: Callable[[], object]) -> None:
        wait_until(lambda: waits() or goes_on.is_set())
        act()

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    interrupt = (lambda: signal.pthread_kill(main, signal.SIGUSR1),)
    try:
        threading.Thread(target=once_it_waits, args=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            series.wait()
        threading.Thread(target=once_it_waits, args=(goes_on.set,)).start()
        assert series.settle() == "written late"
    finally:
        goes_on.set()
        signal.signal(signal.SIGUSR1, before)


RAN: list[int] = []
NOBODY = 65534


class Runs:
    """A value whose pickle runs code, as that of an attacker does."""

    def __reduce__(self):
        return RAN.append, (1,)


def owned_by_another(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(path, NOBODY, NOBODY)


def linked(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize("taken", ["folder", "file"])
@pytest.mark.parametrize("how", [owned_by_another, linked, lambda path: path.chmod(0o777)])
def test_what_another_user_may_have_written_is_not_unpickled(tmp_path, taken, how):
    folder = tmp_path / "kept"
    folder.mkdir(0o700)
    series = VersionedFiles([str(folder)], "cells", 0, 1, None)
    write(series, 1, x=Runs())
    how(folder if taken == "folder" else folder / "cells-1-0-of-1")
    refused = pytest.raises(OSError, match=r"to be yours|for you alone|symbolic links")
    with refused if taken == "file" else nullcontext():
        assert series.load() is None
    assert RAN == []


def test_a_link_that_waits_under_the_next_name_is_not_followed(tmp_path):
    (tmp_path / "diary").write_text("private")
    folder = tmp_path / "kept"
    folder.mkdir(0o700)
    series = VersionedFiles([str(folder)], "cells", 0, 1, None)
    (folder / "cells-1-0-of-1.part").symlink_to(tmp_path / "diary")
    write(series, 1, x=1)
    assert (series.newest(), (tmp_path / "diary").read_text()) == (1, "private")
