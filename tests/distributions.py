"""What pip leaves beside the modules of a distribution that it installs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def install(
    site: Path, name: str, version: str = "1.0", group: str = "", entries: Mapping[str, str] = {}
) -> str:
    """Makes a distribution seem installed in a folder, with entry points of a group.

    Returns:
        what PYTHONPATH is with that folder.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if group:
        lines = [f"{entry} = {value}" for entry, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
