"""Commands, files and settings that the pages name exist, and every cell of a page is run."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from allranks.cluster import launchers
from allranks.command.main import main
from tests.notebook.test_pages import PAGES as RUN

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^((?:<!-- [^\n]* -->\n)*)```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
MAKEFILE = (REPOSITORY / "Makefile").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
#: The tests that run the cells of pages in other ways than `tests.notebook.pages`.
OTHERS = {
    "extending.md": ("tests/cluster/test_added_launchers.py", "tests/notebook/test_past.py"),
    "jupyterhub.md": ("tests/hub/hub.py",),
}


def every_page(test):
    return pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)(test)


@every_page
def test_each_cell_is_run_by_a_test(path):
    run = {getattr(page, "values", [page])[0] for page in RUN}
    for marks, language, source in BLOCK.findall(path.read_text()):
        if language != "python":
            continue
        named = re.findall(r"run by (\S+\.py)", marks) or OTHERS.get(path.name, ())
        assert named or path.name in run or f"../{path.name}" in run, source
        for test in named:
            assert path.name in (REPOSITORY / test).read_text(), f"{test} does not read {path.name}"


def commands_of(page: str) -> list[str]:
    """Lines of blocks without a language or of a shell, and code within the text."""
    blocks = BLOCK.findall(page)
    lines = [line for _, lang, text in blocks if lang in ("", "sh") for line in text.splitlines()]
    return [*lines, *INLINE.findall(BLOCK.sub("", page))]


@cache
def help_of(command: str) -> str:
    """What ``allranks COMMAND --help`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return said.getvalue()


def check_make(words: list[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        used = rf"\$\([^)]*\b{name}\b|^{name} *[:?]?=|^ifdef {name}\b"
        found = re.search(used if is_variable else f"^{name}:", MAKEFILE, re.MULTILINE)
        assert found, f"the Makefile has no {name}"


def check_allranks(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        return
    assert words[0] in help_of("").split(), words[0]
    own = words[1 : words.index("--on")] if "--on" in words else words[1:]
    if words[0] == "run":  # what follows belongs to the script
        own = own[: next((at for at, word in enumerate(own) if word.endswith(".py")), None)]
    if words[0] == "export" and "slurm" in own:  # what the export does not know goes to sbatch
        own = [word for word in own if word not in ("--partition", "--gpus-per-node")]
    for word in own:
        if word.startswith("-"):
            assert word.partition("=")[0] in re.split(r"[\s,\[\]]+", help_of(words[0])), word


def check_python(words: list[str]) -> None:
    if words[:1] == ["-m"] and words[1] == "benchmarks":
        for name in words[2:3]:
            assert (REPOSITORY / "benchmarks" / f"{name}.py").exists(), name
    elif words[:1] == ["-m"]:
        assert importlib.util.find_spec(words[1]), words[1]
    elif words and "/" in words[0]:
        assert (REPOSITORY / words[0]).exists(), words[0]


def check_pip(words: list[str]) -> None:
    for word in words[1:]:
        if found := re.fullmatch(r".*allranks\[([\w,-]+)\]", word):
            assert set(found[1].split(",")) <= {*PROJECT["optional-dependencies"]}, word


CHECKS = {
    "make": check_make,
    "allranks": check_allranks,
    "python": check_python,
    "python3": check_python,
    ".venv/bin/python": check_python,
    "pip": check_pip,
}


@every_page
def test_commands_of_a_shell_exist(path):
    for line in commands_of(path.read_text()):
        with contextlib.suppress(ValueError):  # text with a quote
            words = shlex.split(line, comments=True)
            if words and "…" not in line and words[0] in CHECKS:
                CHECKS[words[0]](words[1:])


@every_page
def test_commands_of_the_notebook_exist(path):
    # A page shows what a wrong command prints: a list of the others.
    failures = (DOCS / "failures.md").read_text()
    (listed,) = re.findall(r"found 'begin'. Type: %distributed (.*)", failures)
    known = {*listed.split(" | "), "stpo", "begin", "all"}  # the last is an answer to a prompt
    for command in re.findall(r"(?<!%)%distributed (\w[\w-]*)", path.read_text()):
        assert command in known, command


@every_page
def test_data_is_valid(path):
    read = {"toml": tomllib.loads, "json": json.loads}
    read["yaml"] = lambda text: [*yaml.safe_load_all(text)]
    for _, language, text in BLOCK.findall(path.read_text()):
        if language in read:
            read[language](text)


def test_places_and_launchers_of_the_page_on_hosts_can_be_made(tmp_path, monkeypatch):
    file = tmp_path / "allranks.toml"
    monkeypatch.setenv("ALLRANKS_SITES", str(file))
    # A launcher asks whether its program is there, and does not run it.
    for name in ("sbatch", "ssh", "srun", "kubectl", "docker", "flux"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")
    blocks = BLOCK.findall((DOCS / "hosts.md").read_text())
    for text in (text for _, language, text in blocks if language == "toml"):
        file.write_text(text)
        for name, place in tomllib.loads(text).items():
            launchers.named(name if "on" in place else f"{name}:h1:2,h2:2")


SOURCES = [
    path.read_text()
    for folder in ("allranks", "tests", "benchmarks", "notebooks")
    for path in (REPOSITORY / folder).rglob("*.py")
]
SETTINGS = set(re.findall(r"ALLRANKS_\w+", "\n".join([*SOURCES, MAKEFILE])))


@every_page
def test_settings_and_files_exist(path):
    page = path.read_text()
    assert set(re.findall(r"ALLRANKS_\w+[A-Z]", page)) <= SETTINGS
    folders = "tests|benchmarks|notebooks|allranks|docs|recipe"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+(?<!html|json))`", page):
        assert (REPOSITORY / name).exists(), name
