"""What is installed in one clone's environment is there in another's, and works from there."""

import os
import subprocess
import venv

import pytest

from tests.environments import main


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "allranks-environments"


@pytest.fixture
def requirements(tmp_path):
    file = tmp_path / "requirements.txt"
    file.write_text("tool==1\n")
    return file


def new_environment(clone):
    folder = clone / ".venv"
    venv.create(folder, symlinks=True)
    return folder


def packages(folder):
    (found,) = folder.glob("lib/python*/site-packages")
    return found


@pytest.fixture
def installed(tmp_path):
    """An environment with a program, a module, a stamp, and the clone itself."""
    folder = new_environment(tmp_path / "first")
    (packages(folder) / "tool.py").write_text("version = 1\n")
    (packages(folder) / "_clone.pth").write_text(str(folder.parent))
    (folder.parent / "clone.py").write_text("print('the first')\n")
    program = folder / "bin" / "tool"
    program.write_text(f"#!{folder}/bin/python\nimport sys, tool, clone\nprint(sys.prefix)\n")
    program.chmod(0o755)
    (folder / ".made").touch()
    return folder


def restored(clone, *what):
    folder = new_environment(clone)
    code = main("restore", str(folder), *what)
    return folder if code == 0 else None


def test_a_second_clone_has_the_programs_and_itself_as_the_package(
    tmp_path, installed, requirements
):
    assert main("keep", str(installed), "extra", str(requirements)) == 0
    second = restored(tmp_path / "second", "extra", str(requirements))
    (second.parent / "clone.py").write_text("print('the second')\n")
    said = subprocess.run([second / "bin" / "tool"], capture_output=True, text=True, check=True)
    assert said.stdout == f"the second\n{second}\n"
    assert os.path.samefile(packages(second) / "tool.py", packages(installed) / "tool.py")
    assert not (second / ".made").exists()
    said = subprocess.run([installed / "bin" / "tool"], capture_output=True, text=True, check=True)
    assert said.stdout == f"the first\n{installed}\n"


def test_other_requirements_and_words_have_nothing(tmp_path, installed, requirements):
    main("keep", str(installed), "extra", str(requirements))
    assert restored(tmp_path / "second", "other", str(requirements)) is None
    requirements.write_text("tool==2\n")
    assert restored(tmp_path / "third", "extra", str(requirements)) is None


def test_what_an_environment_has_is_not_replaced(tmp_path, installed, requirements):
    main("keep", str(installed), str(requirements))
    folder = new_environment(tmp_path / "second")
    (packages(folder) / "tool.py").write_text("version = 2\n")
    assert main("restore", str(folder), str(requirements)) == 1
    assert (packages(folder) / "tool.py").read_text() == "version = 2\n"


def test_a_restoration_that_is_cut_short_leaves_the_environment_new(
    tmp_path, installed, requirements, monkeypatch
):
    main("keep", str(installed), str(requirements))
    folder = new_environment(tmp_path / "second")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main("restore", str(folder), str(requirements))
    assert [*packages(folder).iterdir()] == []
    assert main("restore", str(folder), str(requirements)) == 0
    assert (packages(folder) / "tool.py").exists()


def test_what_was_not_used_for_a_month_is_removed(tmp_path, cache, installed, requirements):
    main("keep", str(installed), "old")
    (old,) = cache.iterdir()
    os.utime(old, (0, 0))
    main("keep", str(installed), "new")
    assert old not in cache.iterdir()
    assert len([*cache.iterdir()]) == 1


def test_a_cache_that_cannot_be_written_is_said_and_stops_nothing(
    cache, installed, requirements, capsys
):
    cache.parent.write_text("a file")
    assert main("keep", str(installed), str(requirements)) == 0
    assert capsys.readouterr().err.endswith("It is installed in each clone.\n")
