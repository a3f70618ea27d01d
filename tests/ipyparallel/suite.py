"""ipyparallel's own tests, which its wheel brings, with ranks in place of its engines."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "tests.ipyparallel.plugin"
FILES = (
    *("test_view.py", "test_view_broadcast.py", "test_lbview.py", "test_client.py"),
    *("test_asyncresult.py", "test_magics.py", "test_executor.py", "test_remotefunction.py"),
    *("test_dependency.py", "test_joblib.py"),
)
_STORE = "it needs a hub that stores results, --dictdb, which is not ipyparallel's default"
_MORE = "it adds engines, and the number of ranks is fixed"
WHY = {
    "TestClient.test_*get_*result": _STORE,
    "TestClient.test_db_query_*": _STORE,
    "TestClient.test_hub_history": _STORE,
    "TestClient.test_resubmit*": _STORE,
    "TestClient.test_purge_*hub_results": _STORE,
    "TestClient.test_purge_all_results": _STORE,
    "TestClient.test_purge_everything": _STORE,
    "TestAsyncResult.test_hubresult_timestamps": _STORE,
    "TestView.test_get_result": _STORE,
    "TestBroadcastViewCoalescing.test_get_result": _STORE,
    "TestParallelMagics.test_autopx_blocking": _STORE,
    "TestClient.test_ids": _MORE,
    "TestClient.test_lazy_all_targets": _MORE,
    "TestClient.test_wait_for_engines": _MORE,
}
"""Why a test cannot be compared, by a pattern of its class and name."""


def reason(test: str) -> str | None:
    """Why a test does not run; None where it should."""
    return next((why for pattern, why in WHY.items() if fnmatch(test, pattern)), None)


def play(folder: Path) -> dict[str, str]:
    """What became of each test: ok, skipped, or the error.

    Raises:
        OSError: they did not run to their end.
    """
    from ipyparallel import tests

    (source,) = tests.__path__
    report = folder / "report.xml"
    # Their own limits of time use the alarm, which pytest-timeout's default would take away.
    options = ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider", "-p", PLUGIN]
    options += ["--timeout=300", "--timeout-method=thread", f"--junitxml={report}"]
    files = [str(Path(source, file)) for file in FILES]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if not report.exists():
        raise OSError(f"ipyparallel's tests did not end:\n{ended.stdout[-3000:]}")
    return {
        f"{case.get('classname')}.{case.get('name')}": _told(case)
        for case in ElementTree.parse(report).getroot().iter("testcase")
    }


def _told(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (bad := case.find(kind)) is not None:
            return (bad.text or "").strip()[-1500:]
    return "ok" if case.find("skipped") is None else "skipped"
