"""Launchers of other distributions: the example of docs/extending.md, and wrong ones."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributions import install
from tests.kernel import Kernel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
LAUNCHERS = "allranks.launchers"
HOST = socket.gethostname()
ON = f"--on docker:{HOST}:2"

#: What `docker exec -i NAME COMMAND` comes to where the container is this machine.
STAND_IN = '#!/bin/sh\n[ "$1 $2" = "exec -i" ] && shift 3 && exec "$@"\n'

WRONG = {
    "lost": ("allranks_lost:Launcher", "ModuleNotFoundError: No module named 'allranks_lost'"),
    "other": (
        "json:JSONDecoder",
        "json:JSONDecoder is neither a MultiHostLauncher nor a LocalLauncher",
    ),
    "ssh": ("allranks_docker:DockerLauncher", "TypeError: there is another launcher ssh"),
    "podman": ("allranks_docker:DockerLauncher", "has no name = 'podman'"),
}


def example(language: str) -> str:
    section = PAGE.read_text().partition("## Adding a launcher\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str | None]:
    project = tomllib.loads(example("toml"))["project"]
    site, programs = tmp_path / "site", tmp_path / "bin"
    site.mkdir()
    programs.mkdir()
    (site / "allranks_docker.py").write_text(example("python"))
    entries = project["entry-points"][LAUNCHERS]
    path = install(site, project["name"], group=LAUNCHERS, entries=entries)
    (programs / "docker").write_text(STAND_IN)
    (programs / "docker").chmod(0o755)
    return {
        "PYTHONPATH": path,
        "PATH": f"{programs}:/usr/bin:/bin",
        "ALLRANKS_ADDRESS": "127.0.0.1",
    }


@pytest.fixture
def kernel(tmp_path: Path, environment: dict[str, str | None]) -> Iterator[Kernel]:
    with Kernel(tmp_path, environment) as opened:
        opened.run("%load_ext allranks")
        yield opened


def python(source: str, environment: dict[str, str | None]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", source],
        env=os.environ | {name: value or "" for name, value in environment.items()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_launcher_of_the_docs_is_short_and_starts_ranks(kernel):
    assert len(example("python").splitlines()) <= 60
    cell = kernel.run(f"%%distributed {ON}\nallreduce(rank + 1.0, op=Sum)", timeout=120)
    assert cell.status == "ok", cell.text
    assert cell.text.endswith("ranks 0–1 → 3.0\n"), cell.text
    listed = kernel.run("%distributed launchers").text
    assert "\n  docker     --on docker:box1:2,box2:2  ranks in Docker containers\n" in listed
    assert kernel.run("%distributed stop").text == "The ranks are stopped.\n"


#: Writes what refuses a launcher's name.
REFUSED = """
def refused(name):
    try:
        allranks.Cluster(launcher=name)
    except allranks.errors.UsageError as error:
        return str(error)
"""


def test_a_program_can_name_it_and_what_it_does_not_take_is_refused(environment):
    refusals = {
        "docker": "expected a launcher, found 'docker'. Available: --on local, --on ssh:h1:2,h2:2",
        "docker:box1:0": "Type for example: --on docker:box1:2,box2:2",
        "docker:box1 --gpus all": "expected a launcher, found 'docker:box1 --gpus all'. Available",
    }
    said = python(
        f"import allranks, json\n{REFUSED}"
        f"with allranks.Cluster(launcher='docker:{HOST}:2') as cluster:\n"
        "    kept = list(cluster.run('rank * 10'))\n"
        f"print(json.dumps([kept, *map(refused, {list(refusals)})]))",
        environment,
    )
    kept, *found = json.loads(said.splitlines()[-1])
    assert kept == [0, 10]
    assert [error in text for error, text in zip(refusals.values(), found, strict=True)] == [
        True
    ] * len(refusals), found


def test_launchers_that_cannot_be_loaded_are_left_out_and_named(environment, tmp_path):
    entries = {name: value for name, (value, _) in WRONG.items()}
    install(tmp_path / "site", "wrong", group=LAUNCHERS, entries=entries)
    said = python(
        f"import allranks, json, warnings\n{REFUSED}"
        "from allranks.cluster.doctor import examine\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    found = {one.about: (one.state, one.found) for one in examine()}\n"
        "    local, lost = allranks.Cluster(1).launcher.name, refused('lost')\n"
        "print(json.dumps([found, [str(one.message) for one in caught], local, lost]))",
        environment,
    )
    found, warned, local, lost = json.loads(said)
    for name, (_, problem) in WRONG.items():
        expected = f"expected the launcher {name} of wrong to be loadable, found "
        (line,) = [line for line in warned if line.startswith(expected)]
        assert problem in line
        assert line.endswith("It is left out: install it again, or remove it")
    assert found["launcher lost"][0] == found["launcher ssh"][0] == "wrong"
    assert found["ssh"][0] in ("ok", "absent")
    assert found["docker"] == ["ok", "--on docker:box1:2,box2:2  ranks in Docker containers"]
    # They keep no other from starting.
    assert local == "local"
    assert "expected a launcher, found 'lost'" in lost
