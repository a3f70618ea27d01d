"""Where the ranks' log files go, and which old ones are swept away."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

#: Names another folder for the logs.
FOLDER = "ALLRANKS_LOG_DIR"
_KEPT_DAYS = 7


def make_folder() -> str:
    """Returns a new folder, mode 0700, for the logs of one cluster.

    It lies under ``$ALLRANKS_LOG_DIR``, else ``~/.local/state/allranks``, else, where the home is
    read-only, the temporary folder. Folders of more than seven days ago are removed.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local/state"
    )
    places = [os.environ.get(FOLDER, ""), os.path.join(state, "allranks")]
    places.append(os.path.join(tempfile.gettempdir(), f"allranks-logs-{os.getuid()}"))
    for place in filter(None, places):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            _sweep(Path(place))
            return tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=place)
        except OSError:
            continue
    return tempfile.mkdtemp(prefix="allranks-logs-")


def _sweep(place: Path) -> None:
    oldest = time.time() - _KEPT_DAYS * 86400
    for folder in place.iterdir():
        try:
            newest = max((f.stat().st_mtime for f in folder.iterdir()), default=0.0)
            if folder.is_dir() and max(newest, folder.stat().st_mtime) < oldest:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
