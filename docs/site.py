"""Makes MkDocs build the site from all pages of the repository, with its version and its address.

Each page keeps its place in the tree. So a link from one page to another, such as
``../notebooks/01_ranks.ipynb``, is the same on GitHub, in an editor and in the site.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

# The pages of the site, and the pictures on them.
PAGES = ("*.md", "LICENSE", "docs/**/*.md", "docs/pictures/*", "notebooks/*.ipynb")


@event_priority(100)  # before mike, which adds the version to the site's address
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Shows the version beside the site's name, and links the repository."""
    tree = Path(config.config_file_path).parent
    found = re.search(r'__version__ = "(.+)"', (tree / "allranks" / "__init__.py").read_text())
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    config.copyright = f"allranks {found[1]}, BSD-3-Clause"
    config.repo_url = repository(tree)
    config.repo_name = "Repository"
    config.site_url = os.environ.get("ALLRANKS_SITE", "")  # links with an address, in the card
    return config


def repository(tree: Path) -> str | None:
    """Returns the repository's page: ``ALLRANKS_REPOSITORY``, or the page of the remote "origin".

    The address is not in a file, so that the site of a fork links the fork. Without a remote that
    has a page on the web, there is no link.
    """
    if named := os.environ.get("ALLRANKS_REPOSITORY"):
        return named
    command = ["git", "-C", str(tree), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    remote = re.sub(r"^(ssh://)?git@([^:/]+)[:/]", r"https://\2/", remote).removesuffix(".git")
    return remote if remote.startswith("https://") and "@" not in remote else None


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of ``docs`` by the pages of the tree; the theme's own files stay."""
    tree = Path(config.config_file_path).parent
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for pattern in PAGES for path in tree.glob(pattern)):
        name = path.relative_to(tree).as_posix()
        files.append(File(name, str(tree), config.site_dir, config.use_directory_urls))
    return files
