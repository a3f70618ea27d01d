"""The folder of IPython's profile."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def profile_folder() -> Path | None:
    """Returns the folder of IPython's profile: this notebook's, else the default one.

    None if there can be none: IPython would make a new temporary folder for each call.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.profile_dir is not None:
        return Path(shell.profile_dir.location)
    place = Path(os.path.expanduser(os.environ.get("IPYTHONDIR", "~/.ipython")))
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        return None
    from IPython.paths import get_ipython_dir

    return Path(get_ipython_dir(), "profile_default")
