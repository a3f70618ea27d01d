"""Makes the README's relative links absolute in the package's metadata, which PyPI's page shows.

They lead to the tag of the version, at the address ``Repository`` under ``[project.urls]`` in
pyproject.toml. Without this address they stay as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)")
_PICTURE = re.compile(r'(?<= src=")(?![a-z]+:)')


class ReadmeHook(MetadataHookInterface):
    """Sets the field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address := metadata.get("urls", {}).get("Repository"):
            tag = f"v{metadata['version']}"
            text = _LINK.sub(f"{address}/blob/{tag}/", text)
            text = _PICTURE.sub(f"{address}/raw/{tag}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
