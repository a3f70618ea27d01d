"""The notebook's kernel stays light: no MPI, no GPU library, no TensorFlow."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENT_ROOMS = [
    f"allranks.{room}"
    for room in ("cluster", "command", "magics", "widgets")
    if (REPOSITORY / "allranks" / room / "__init__.py").exists()
]
# Importing mpi4py.MPI calls MPI_Init; the others take seconds and hundreds of megabytes.
RANK_SIDE = {"cupy", "cupyx", "keras", "mpi4py", "tensorflow", "torch"}

PACKAGES = "print(*{name.partition('.')[0] for name in sys.modules})"
IMPORT_ROOM = """
import importlib, pkgutil, sys
room = importlib.import_module({room!r})
for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def loaded_by(source: str) -> set[str]:
    """The packages that a fresh process has imported after ``source``."""
    program = f"import sys\n{source}\n{PACKAGES}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


def test_no_file_of_the_client_imports_what_belongs_in_a_rank():
    rooms = "".join(IMPORT_ROOM.format(room=room) for room in CLIENT_ROOMS)
    assert loaded_by(f"{rooms}\nimport allranks.collectives") & RANK_SIDE == set()


def test_importing_allranks_imports_nothing_heavy():
    heavy = RANK_SIDE | {"IPython", "ipykernel", "ipyparallel", "ipywidgets", "numpy", "zmq"}
    assert loaded_by("import allranks") & heavy == set()
    assert "jax" not in loaded_by("import allranks.collectives")


def test_the_modules_for_several_hosts_are_imported_only_for_these():
    names = "print(*(name for name in sys.modules if name.startswith('allranks.features.hosts')))"
    source = f"import sys, allranks; allranks.Cluster(2); {names}"
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    side = "allranks.features.hosts"
    assert set(answer.stdout.split()) == {side, f"{side}.notebook"}, answer.stderr


def test_a_script_that_starts_ranks_keeps_what_its_name_horovod_means():
    source = "import sys, allranks; allranks.Cluster; print('allranks.horovod' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert answer.stdout == "False\n", answer.stderr


def test_the_records_need_the_standard_library_only():
    extra = loaded_by(IMPORT_ROOM.format(room="allranks.records")) - loaded_by("") - {"allranks"}
    assert extra <= sys.stdlib_module_names


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in (REPOSITORY / "allranks").rglob("*.py")}
    unseen = [folder for folder in folders if not (folder / "__init__.py").exists()]
    assert unseen == [], "the import contract does not look into these: add an __init__.py"


def imports_of(path: Path, files: dict[str, Path]) -> set[str]:
    """The package's files that a file imports, those for types only and within functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & files.keys() or {node.module}
    return found & files.keys()


def test_no_two_files_import_each_other_in_a_circle():
    files = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (REPOSITORY / "allranks").rglob("*.py")
    }
    graph = {name: imports_of(path, files) - {name} for name, path in files.items()}
    assert sum(map(len, graph.values())) > len(files)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        pytest.fail(f"{circle}: the lower of the two says what it needs as a protocol")
