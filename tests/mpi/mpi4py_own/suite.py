"""mpi4py's own tests of the pinned version, with our communicators in the place of its own.

``python tests/mpi/mpi4py_own/suite.py 2 3 4`` runs them on so many ranks, and prints the table of
docs/mpi.md.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from launch import ROOT, mpiexec  # noqa: E402  it stands in the folder above

MODULES = {
    "communicators": ("test_comm", "test_comm_topo", "test_comm_inter", "test_attributes"),
    "point to point": (
        *("test_p2p_buf", "test_p2p_obj", "test_p2p_buf_matched", "test_p2p_obj_matched"),
        *("test_p2p_buf_part", "test_request", "test_msgspec", "test_msgzero"),
    ),
    "collectives": ("test_cco_buf", "test_cco_vec", "test_cco_obj"),
    "non-blocking collectives": ("test_cco_nb_buf", "test_cco_nb_vec"),
    "persistent collectives": ("test_cco_pr_buf", "test_cco_pr_vec", "test_cco_pr_ngh_buf"),
    "neighbours": ("test_cco_ngh_buf", "test_cco_ngh_obj"),
    "intercommunicators": ("test_cco_buf_inter", "test_cco_vec_inter", "test_cco_obj_inter"),
    "windows": ("test_win", "test_rma", "test_rma_nb"),
    "files": ("test_file", "test_io"),
    "mpi4py.util": ("test_util_pkl5", "test_util_sync", "test_util_pool"),
    "classes": ("test_subclass", "test_objmodel", "test_handle", "test_pickle", "test_threads"),
}
FEW = ("test_comm", "test_p2p_obj", "test_cco_obj", "test_cco_ngh_obj", "test_request")
"""Those that show most in the shortest time."""

_SUBCLASS = "they ask for mpi4py's own class, and find the guarded one, which is a subclass"
_PLAIN = "a plain communicator is not pickled by the name of the guarded one"
WHY = {
    "testCommLock": "it looks at a lock inside mpi4py, which the guarded calls do not need",
    "TestCommSelf.testPickle": _PLAIN,
    "TestCommWorld.testPickle": _PLAIN,
    "TestP2PBuf*.testConstructor": _SUBCLASS,
    "TestTopo*": _SUBCLASS,
    "TestObjModel.testCAPI": _SUBCLASS,
    "TestObjModel.testHandle": _SUBCLASS,
    "TestObjModel.testReduce": "mpi4py's own class of requests is not found under its name",
    "TestObjModel.testSafeFreeConstant": "it frees the communicator of all ranks, which we keep",
}
"""Why a test that does not pass does not."""


def download(folder: Path) -> Path:
    """The folder of mpi4py's tests, as its source has them.

    Raises:
        OSError: the source cannot be had.
    """
    wanted = f"mpi4py=={version('mpi4py')}"
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "mpi4py", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    done = subprocess.run([*pip, *options, wanted], capture_output=True, text=True, check=False)
    found = next(folder.glob("mpi4py-*.tar.gz"), None)
    if found is None:
        raise OSError(f"pip download {wanted} gave no source: {done.stderr.strip()[-300:]}")
    with tarfile.open(found) as source:
        # An attribute instead of filter="data": Python 3.11.2, as Debian 12 has it, has no filters.
        source.extraction_filter = getattr(tarfile, "data_filter", None)
        source.extractall(folder)
    return folder / found.name.removesuffix(".tar.gz") / "test"


def play(tests: Path, ranks: int, *modules: str, timeout: float = 300) -> dict[str, str]:
    """What became of each test on the rank where it fared worst: ok, skipped: …, or the error.

    Raises:
        subprocess.TimeoutExpired: they hung.
    """
    files = [str(tests / f"{module}.py") for module in modules]
    with tempfile.TemporaryDirectory() as folder:
        # Each test is a scope, as a cell is: one that fails on a rank does not strand the others.
        arguments = (str(HERE.parent / "run.py"), *files, "-pconftest", "-Wdefault")
        arguments += (f"--rootdir={tests}",)
        env = {
            "PYTHONPATH": f"{ROOT}:{tests}",
            "ALLRANKS_TEST_GUARDED": "yes",
            "ALLRANKS_TEST_REPORT": f"{folder}/",
        }
        ended = mpiexec(ranks, *arguments, timeout=timeout, **env)
        told = [_told(path) for path in sorted(Path(folder).iterdir())]
        if len(told) != ranks:
            raise OSError(f"{', '.join(modules)} on {ranks} ranks:\n{ended.stdout[-3000:]}")
    worst: dict[str, str] = {}
    for name in told[0]:
        all_told = [one.get(name, "it did not run on every rank") for one in told]
        failed = [text for text in all_told if text != "ok" and not text.startswith("skipped")]
        worst[name] = (failed or all_told)[0]
    return worst


def _told(path: Path) -> dict[str, str]:
    told: dict[str, str] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        told.setdefault(name, "ok")
        if (skipped := case.find("skipped")) is not None:
            told[name] = f"skipped: {skipped.get('message')}"
        for bad in (case.find("failure"), case.find("error")):
            if bad is not None:
                told[name] = (bad.text or "").strip()[-1500:]
    return told


def reason(test: str) -> str | None:
    """Why a test does not pass; None where it should."""
    for pattern, why in WHY.items():
        kind, _, name = pattern.rpartition(".")
        if pattern.endswith("*"):
            kind, name = pattern, ""
        own_kind, own_name = test.split(".")[-2:]
        fits = own_kind.startswith(kind[:-1]) if kind.endswith("*") else kind in ("", own_kind)
        if fits and name in ("", own_name):
            return why
    return None


def failures(told: dict[str, str]) -> dict[str, str]:
    """The tests that failed."""
    return {t: w for t, w in told.items() if w != "ok" and not w.startswith("skipped")}


def main() -> None:
    """Prints the table."""
    sizes = [int(word) for word in sys.argv[1:]] or [2]
    with tempfile.TemporaryDirectory() as folder:
        tests = download(Path(folder))
        heads = "".join(f" {size} ranks |" for size in sizes)
        print(f"| tests of mpi4py {version('mpi4py')} |{heads} the rest |")
        print(f"| --- |{' --- |' * len(sizes)} --- |", flush=True)
        for title, modules in MODULES.items():
            cells, whys = "", {}
            for size in sizes:
                told: dict[str, str] = {}
                for module in modules:
                    told |= play(tests, size, module)
                skipped = sum(text.startswith("skipped") for text in told.values())
                failed = failures(told)
                passed = len(told) - skipped - len(failed)
                cells += f" {passed} of {len(told) - skipped} |"
                whys |= {
                    reason(test) or f"{test}: {text[-200:]}": 1 for test, text in failed.items()
                }
            print(f"| {title} |{cells} {'; '.join(whys)} |", flush=True)


if __name__ == "__main__":
    main()
