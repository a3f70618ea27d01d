"""What differs between the checkout and the package.

The README's relative links are absolute in the package's metadata, which PyPI's page shows: they
lead to the tag of the version, at the address ``Repository`` under ``[project.urls]`` in
pyproject.toml. Without this address they stay as they are. The labs have no outputs in the wheel.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


class LabsHook(BuildHookInterface[Any]):
    """Adds the labs of ``notebooks/``, for `allranks labs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # the labs of the checkout are found
            return
        labs = Path(self.root) / "notebooks"
        self._folder = tempfile.TemporaryDirectory()
        for number, path in enumerate(sorted(labs.rglob("*"))):
            name = path.relative_to(labs)
            if not path.is_file() or any(part[0] in "._" for part in name.parts[:-1]):
                continue  # of Jupyter's and Python's own folders
            source = path
            if path.suffix == ".ipynb":
                source = Path(self._folder.name) / str(number)
                source.write_text(without_outputs(path.read_text(encoding="utf-8")), "utf-8")
            build_data["force_include"][str(source)] = f"allranks/labs/{name.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def without_outputs(notebook: str) -> str:
    """The text of a notebook whose cells have not run."""
    content = json.loads(notebook)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
