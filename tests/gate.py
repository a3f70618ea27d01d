"""Chooses what ``make test`` runs: what shows most faults of the core, and what a change can reach.

``make test-all`` runs everything. CI runs this choice, then the rest (`tests.rest`).
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parent.parent

_FAULTS = (
    *("announced", "bad_input", "death", "displays", "exceptions", "forks", "healing", "interrupt"),
    *("keep", "leaving", "magics", "map", "meeting", "memory", "misuse", "mpi", "output"),
    *("prompts", "replaced", "unreadable", "watch"),
)
#: What runs always: folders, files, and single tests.
CORE = (
    "tests/unit/",
    "tests/widgets/",
    "tests/lessons/",
    "tests/simulated/",
    # Cells from end to end, in a notebook that all files of a process share.
    *(f"tests/faults/test_{name}.py" for name in _FAULTS),
    "tests/notebook/test_cluster.py",
    "tests/notebook/test_px.py",
    "tests/notebook/test_run.py",
    # Real front ends, and hosts: what is used most, and a fault of each kind.
    "tests/browser/test_toolbar.py::test_from_the_toolbar_to_the_output_of_four_ranks",
    "tests/browser/test_panel.py::"
    "test_points_arrive_it_shows_where_the_ranks_are_and_interrupt_ends_the_cell",
    "tests/browser/test_output.py::test_a_start_has_a_bar_long_text_a_box_and_an_error_whole_words",
    "tests/hosts/test_ssh.py::test_ranks_run_on_the_hosts_that_are_named_and_know_their_places",
    "tests/hosts/test_faults.py::test_a_rank_that_is_killed_is_named_with_its_host_and_signal",
    "tests/hosts/test_faults.py::test_a_host_that_is_cut_off_is_named_within_its_lease",
    # Without a notebook: one and several hosts, and both MPIs.
    *(
        f"tests/mpi/test_under_mpiexec.py::test_ranks_keep_the_contract[{launch}]"
        for launch in ("2 ranks", "3 ranks", "3 ranks, .venv-mpich", "hosts of 2,1")
    ),
)


@dataclass(frozen=True)
class Area:
    """Tests that run only if a change can reach what they show.

    Attributes:
        tests: beginnings of their names.
        sources: what they show: packages and modules of allranks, and other paths. A change of
            what these import reaches them too.
    """

    tests: tuple[str, ...]
    sources: tuple[str, ...]


AREAS = {
    "torch": Area(("tests/torch/",), ("allranks.torch", "allranks.features.torch_jax")),
    "TensorFlow and Keras": Area(
        ("tests/tensorflow/", "tests/keras/", "tests/horovod/"),
        (
            "allranks.tensorflow",
            "allranks.keras",
            "allranks.horovod",
            "allranks.features.horovod_alias",
        ),
    ),
    "JupyterHub": Area(("tests/hub/",), ("allranks.features.classroom",)),
    "ensemble": Area(
        ("tests/notebook/test_ensemble.py", "tests/faults/test_ensemble.py"),
        ("allranks.features.ensemble",),
    ),
    "pytest": Area(("tests/features/test_pytest_plugin.py",), ("allranks.features.pytest",)),
    "pages of the docs": Area(("tests/notebook/test_pages.py",), ("docs/",)),
}

#: A change of one of these can reach everything.
_EVERYWHERE = ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", ".ci/")


def starts_alone(test: str) -> bool:
    """Whether a test starts its own ranks by mpiexec; others share what their file has started."""
    file = PurePosixPath(test.partition("::")[0])
    return file.parent.name == "mpi" or file.name == "test_under_mpiexec.py"


def area_of(test: str) -> str | None:
    return next((name for name, area in AREAS.items() if test.startswith(area.tests)), None)


def reached(changed: Collection[str] | None) -> list[str]:
    """Returns the areas that a change can reach.

    Args:
        changed: paths below the repository; None if they are not known.
    """
    if changed is None or any(path.startswith(_EVERYWHERE) for path in changed):
        return list(AREAS)
    return [name for name, area in AREAS.items() if any(_reaches(path, area) for path in changed)]


def _reaches(path: str, area: Area) -> bool:
    if path.startswith(area.tests) or path.startswith(area.sources):
        return True
    module = _module(path)
    if module is None:
        # What tests share lies beside their folders, or is not a test itself.
        return path.startswith("tests/") and PurePosixPath(path).parent == PurePosixPath("tests")
    if any(_within(module, source) for source in area.sources):
        return True
    other = any(_within(module, s) for a in AREAS.values() for s in a.sources)
    return module in _imported_by(area.sources) or not (
        other or _within(module, "allranks.features")
    )


def _module(path: str) -> str | None:
    """Returns the name of the module of allranks that a path has, or lies in; else None."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[:1] != ("allranks",):
        return None
    return ".".join(part for part in parts if part != "__init__")


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@cache
def _imported_by(sources: tuple[str, ...]) -> set[str]:
    """Returns the modules that these import, directly or through others."""
    import grimp

    graph = grimp.build_graph("allranks", cache_dir=None)
    within = {m for m in graph.modules if any(_within(m, source) for source in sources)}
    return within.union(*(graph.find_upstream_modules(module) for module in within))


def changes() -> set[str] | None:
    """Returns the paths that differ from where this branch left its remote.

    None if there is no such commit, or if nothing differs: then everything counts as changed.
    """
    if os.environ.get("CI"):
        return None
    for upstream in ("@{upstream}", "origin/HEAD", "origin/main"):
        base = _git("merge-base", "HEAD", upstream)
        if base:
            listed = _git("diff", "--name-only", base[0])
            return {*listed, *_git("ls-files", "--others", "--exclude-standard")} or None
    return None


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def choose(
    tests: Sequence[str], areas: Collection[str], changed: Collection[str] = ()
) -> dict[str, str]:
    """Returns the tests that are left out, each with the reason.

    If every area is reached, the first third of each file of an area runs: later tests of a file
    may need the state that earlier ones leave.

    Args:
        tests: the names of all tests, in their order.
        areas: what the change can reach.
        changed: paths; a changed file of tests runs.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    left = {}
    for file, inside in files.items():
        area = area_of(file)
        if file in changed:
            continue
        if area is None:
            left |= dict.fromkeys(inside, "they are not of the core")
        elif area not in areas:
            left |= dict.fromkeys(inside, "the change cannot reach them")
        elif len(areas) == len(AREAS):
            third = -(-len(inside) // 3)
            left |= dict.fromkeys(
                inside[third:], "a third of each file is enough for a change of the core"
            )
    return {test: why for test, why in left.items() if not any(_is_in(test, c) for c in CORE)}


def rest(tests: Sequence[str], left: Collection[str]) -> list[str]:
    """Returns what runs after a run without ``left``: those tests, and the others of their files,
    which may make what the later ones need. A launch of mpiexec needs nothing.
    """
    files = {test.partition("::")[0] for test in left}
    return [
        test
        for test in tests
        if test in left or (test.partition("::")[0] in files and not test.startswith("tests/mpi/"))
    ]


def _is_in(test: str, chosen: str) -> bool:
    return (
        test.startswith(chosen if chosen.endswith("/") else (f"{chosen}::", f"{chosen}["))
        or test == chosen
    )


def summary(left: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason: how many tests of which suites it leaves out."""
    suites: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for test, reason in left.items():
        suites[reason][PurePosixPath(test.partition("::")[0]).parent.as_posix()] += 1
    return [
        f"{sum(counts.values())}, because {reason}: "
        + ", ".join(f"{suite} {count}" for suite, count in sorted(counts.items()))
        for reason, counts in sorted(suites.items())
    ]
