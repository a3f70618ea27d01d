"""Prepares a release: ``make release VERSION=0.2.0``.

Asks for the project's address and contact if pyproject.toml has none, and ends without them. Writes
the version into each file that has it, dates the changelog, and removes what says that it is not
published. Builds the sdist and the wheel into ``dist/``. Installs the wheel in an empty
environment of each Python from 3.11 on that is found, and the sdist in one; there the command, the
doctor and a cell on two ranks run. Builds the documentation. Commits and publishes nothing: the
last lines name the commands that do. It can be repeated with the same version.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from tests.pythons import candidates, found

TREE = Path(__file__).resolve().parent.parent
#: Each file that has the version, with the text around it.
PLACES = {
    "allranks/__init__.py": r'(?m)(?<=^__version__ = ").+(?="$)',
    "CITATION.cff": r"(?m)(?<=^version: ).+$",
    "recipe/recipe.yaml": r'(?m)(?<=^  version: ").+(?="$)',
    "allranks/features/toolbar/labextension/package.json": r'(?<="version": ").+(?=")',
}
#: What is true only before the first publication, and the pages that say it.
UNPUBLISHED = re.compile(r"<!-- until published -->\n.*?<!-- /until published -->\n\n?", re.DOTALL)
SAY_SO = (
    "README.md",
    *(f"docs/{page}.md" for page in ("gpu", "install", "jupyterhub", "teaching", "tutorial")),
)
#: What a publication needs, and the question for it. Links of the README lead to the repository.
ADDRESS = "the repository's address, for instance https://github.com/OWNER/allranks"
CONTACT = "an address for mail about the project, for instance allranks@example.org"
AUTHORS = 'authors = [{ name = "allranks developers" }]'
SCRIPTS = "[project.scripts]"
CELL = """
import allranks

def total():
    from allranks.collectives import Sum, allreduce, rank
    return int(allreduce(rank() + 1, op=Sum))

if __name__ == "__main__":
    with allranks.Cluster(n=2) as cluster:
        found = cluster.run(total)
    assert list(found) == [3, 3], found
    print("a cell on two ranks: right")
"""


def complete(tree: Path, ask: Callable[[str], str] | None) -> None:
    """Writes the project's address and its contact into pyproject.toml, unless they are there.

    ``ask`` returns the answer to a question; without it, or without an answer, the release ends.
    """
    file = tree / "pyproject.toml"
    text = file.read_text()
    project = tomllib.loads(text)["project"]
    answers = {}
    if "Repository" not in project.get("urls", {}):
        answers[ADDRESS] = r"https://\S+"
    if not any("email" in author for author in project["authors"]):
        answers[CONTACT] = r"[^@\s\"]+@[^@\s\"]+"
    for what, form in answers.items():
        answer = ask(f"{what}: ").strip() if ask is not None else ""
        if not re.fullmatch(form, answer):
            raise SystemExit(
                f"expected {what}, found {answer or 'none in pyproject.toml'!r}. Type make release "
                "in a terminal, which asks for it, or add [project.urls] with Repository, and the "
                "email of an author."
            )
        if what == ADDRESS:
            lines = f'[project.urls]\nRepository = "{answer}"\nIssues = "{answer}/issues"\n\n'
            text = text.replace(SCRIPTS, lines + SCRIPTS, 1)
        else:
            text = text.replace(AUTHORS, AUTHORS.replace(" }]", f', email = "{answer}" }}]'), 1)
    file.write_text(text)


def prepare(tree: Path, version: str, today: str) -> None:
    """Writes the version into its places, dates its section of the changelog, and removes what is
    no longer true.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise SystemExit(f"expected a version such as 0.2.0, found {version!r}.")
    changelog = tree / "CHANGELOG.md"
    text = changelog.read_text()
    head = re.search(rf"(?m)^## {re.escape(version)} \((.+)\)$", text)
    if head is None:
        raise SystemExit(
            f"CHANGELOG.md has no section '## {version} (not released)'. Write it first."
        )
    if not text[head.end() :].partition("\n## ")[0].strip():
        raise SystemExit(f"The section of {version} in CHANGELOG.md is empty. Write it first.")
    for name, pattern in PLACES.items():
        before = (tree / name).read_text()
        after, count = re.subn(pattern, version, before, count=1)
        if not count:
            raise SystemExit(f"{name} has no version that matches {pattern}.")
        (tree / name).write_text(after)
    for name in SAY_SO:
        (tree / name).write_text(UNPUBLISHED.sub("", (tree / name).read_text()))
    changelog.write_text(f"{text[: head.start(1)]}{today}{text[head.end(1) :]}")


def check(python: str, built: Path) -> None:
    """Installs a wheel or an sdist in an empty environment, and runs allranks there."""
    with tempfile.TemporaryDirectory(prefix="allranks-release-") as folder:
        environment = Path(folder) / "venv"
        _run([python, "-m", "venv", str(environment)])
        inside = environment / "bin"
        pip = [str(inside / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
        _run([*pip, "--quiet", "--constraint", str(TREE / "constraints.txt"), str(built)], folder)
        _run([str(inside / "allranks"), "--version"], folder)
        # The doctor fails where this machine lacks something; its lines are for the reader.
        _run([str(inside / "allranks"), "doctor"], folder, may_fail=True)
        (Path(folder) / "cell.py").write_text(CELL)
        _run([str(inside / "python"), "cell.py"], folder)


def _run(command: Sequence[str], folder: str | None = None, may_fail: bool = False) -> None:
    print("$", " ".join(command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder or TREE, env=environment, check=False)
    if done.returncode and not may_fail:
        raise SystemExit(f"exit status {done.returncode}: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="for instance 0.2.0")
    version = parser.parse_args().version
    complete(TREE, input if sys.stdin.isatty() else None)
    prepare(TREE, version, date.today().isoformat())
    _run(["make", "dist"])
    (wheel,) = (TREE / "dist").glob(f"allranks-{version}-*.whl")
    sdist = TREE / "dist" / f"allranks-{version}.tar.gz"
    pythons = found(candidates())
    for kind, python in pythons.items():
        print(f"── Python {'.'.join(map(str, kind))}: {python}", flush=True)
        check(python, wheel)
    check(sys.executable, sdist)
    _run(["make", "docs"])
    missing = [f"3.{minor}" for minor in range(11, 15) if (3, minor) not in pythons]
    print(f"\ndist/ has allranks {version}, checked with Python {', '.join(_names(pythons))}.")
    if missing:
        print(f"Not found here, so not checked: Python {', '.join(missing)}.")
    print(
        "make test is not part of this. To publish, type:\n"
        f"  git commit --all --message 'Release {version}'\n"
        f"  git tag v{version}\n"
        f"  git push origin HEAD v{version}"
    )


def _names(pythons: dict[tuple[int, ...], str]) -> list[str]:
    return [".".join(map(str, kind)) for kind in pythons]


if __name__ == "__main__":
    main()
