"""Ranks of one host write files of magics one after the other."""

import fcntl
import os
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magics.osm import OSMagics

from allranks.features.shared_files import take_turns

CYTHON = "Cython.Build.IpythonMagic"
#: FAKE Cython: its magic loads the library that the first rank compiles.
MAGICS = """
def load_dynamic(name, path):
    return load(name)

class CythonMagics:
    def cython(self, line, cell):
        return meet(load_dynamic(meet(cell), "library"))
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    before = list(sys.meta_path)
    made = InteractiveShell()
    monkeypatch.setattr(OSMagics, "writefile", OSMagics.writefile)
    take_turns(made, str(tmp_path))
    yield made
    sys.meta_path[:] = before
    made.history_manager.end_session()


def test_writefile_does_not_touch_a_file_that_another_rank_has_written(shell, tmp_path, capsys):
    file = tmp_path / "module.py"
    shell.run_cell_magic("writefile", "module.py", "x = 1\n")
    os.utime(file, (1, 1))
    shell.run_cell_magic("writefile", "module.py", "x = 1\n")
    assert file.stat().st_mtime == 1
    shell.run_cell_magic("file", "'module.py'", "x = 2\n")
    shell.run_cell_magic("writefile", "-a module.py", "y = 2\n")
    assert file.read_text() == "x = 2\ny = 2\n"
    shown = ["Writing module.py", *["Overwriting module.py"] * 2, "Appending to module.py"]
    assert capsys.readouterr().out.splitlines() == shown


def test_cython_compiles_on_one_rank_at_a_time_and_loads_on_all(shell, tmp_path, monkeypatch):
    parent = tmp_path / "Cython" / "Build"
    parent.mkdir(parents=True)
    for folder in (parent.parent, parent):
        (folder / "__init__.py").touch()
    (parent / "IpythonMagic.py").write_text(MAGICS)
    monkeypatch.syspath_prepend(tmp_path)
    from Cython.Build import IpythonMagic

    def meet(cell: str) -> str:
        # As another rank, which must wait.
        with open(tmp_path / "magics") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cell

    def load(name: str) -> str:
        # Another rank, for which the library's code may wait, compiles meanwhile.
        with open(tmp_path / "magics") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name

    IpythonMagic.meet, IpythonMagic.load = meet, load
    assert IpythonMagic.CythonMagics().cython("", "compiled") == "compiled"
    with open(tmp_path / "magics") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again
    for name in ("Cython", "Cython.Build", CYTHON):
        sys.modules.pop(name)
