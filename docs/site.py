"""Has MkDocs make the site of the whole tree's pages, each in the place that it has there.

So a link from one page to another, as ``../notebooks/01_ranks.ipynb``, is the same on GitHub, in an
editor and in the site.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

PAGES = ("*.md", "LICENSE", "docs/**/*.md", "docs/pictures/*", "notebooks/*.ipynb")
"""What is a page of the site, or shown on one."""


@event_priority(100)  # before what makes pages of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what was found in ``docs`` by what the tree has; the theme's own files stay."""
    tree = Path(config.config_file_path).parent
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for pattern in PAGES for path in tree.glob(pattern)):
        name = path.relative_to(tree).as_posix()
        files.append(File(name, str(tree), config.site_dir, config.use_directory_urls))
    return files
