"""axe-core, which finds what keeps people from reading or using a page, in the page of a test.

It comes from npm, which the browser tests need for nothing else, and is kept for later runs.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.browser import firefox
from tests.browser.lab import Lab
from tests.missing import skip_missing

THEMES = ("JupyterLab Light", "JupyterLab Dark")
VERSION = "4.14.1"
#: What npm says of this version's package.
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
MISSING = f"axe-core {VERSION} is missing: npm could not fetch it"


def script() -> str | None:
    """Returns axe-core's source, fetched now if need be; None where it cannot be had."""
    kept = Path(tempfile.gettempdir()) / f"axe-core-{VERSION}.min.js"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            fetch = ["npm", "pack", "--silent", f"axe-core@{VERSION}"]
            try:
                subprocess.run(fetch, cwd=folder, capture_output=True, timeout=120, check=True)
            except (OSError, subprocess.SubprocessError):
                return None
            archive = next(Path(folder).glob("*.tgz"))
            digest = hashlib.sha512(archive.read_bytes()).digest()
            if base64.b64encode(digest).decode() != SHA512:
                raise ValueError(f"expected axe-core {VERSION} as it was, found another package")
            with tarfile.open(archive) as package:
                member = package.extractfile("package/axe.min.js")
                assert member is not None
                part = kept.with_suffix(f".{Path(folder).name}")
                part.write_bytes(member.read())
                part.replace(kept)
    return kept.read_text("utf-8")


def problems(page: Page, source: str, where: str) -> list[str]:
    if firefox.chosen():  # axe-core ends the process of the page there
        return []
    page.evaluate(source)
    # JupyterLab's body is 0 px high and hides what is outside of it, as it seems to axe-core: it
    # would look at no text at all.
    page.evaluate("document.body.style.height = '100vh'")
    found: dict[str, list[dict[str, Any]]] = page.evaluate(
        """async where => {
            const { violations, passes } = await axe.run(where);
            const nodes = ({ id, nodes }) => nodes.map(({ target, failureSummary }) =>
                ({ id, target: target[0], failureSummary }));
            return { violations: violations.flatMap(nodes), passes: passes.flatMap(nodes) };
        }""",
        where,
    )
    page.evaluate("document.body.style.height = ''")
    assert sum(one["id"] == "color-contrast" for one in found["passes"]) > 10, "no text was seen"
    return [f"{one['id']}: {one['target']}: {one['failureSummary']}" for one in found["violations"]]


def look(lab: Lab, when: str, where: str = ".ar-dashboard") -> list[str]:
    """Returns what axe-core finds in the page's panel, or elsewhere in it, in both themes.

    The page keeps the one that it did not have.
    """
    source = script()
    if source is None:
        skip_missing(MISSING)
    found = []
    now = lab.page.evaluate("() => document.body.dataset.jpThemeName")
    for theme in sorted(THEMES, key=lambda theme: theme != now):
        lab.choose_theme(theme)
        lab.wait_painted()
        lab.page.locator(where).first.scroll_into_view_if_needed()
        found += [f"{when}, {theme}: {one}" for one in problems(lab.page, source, where)]
    return found
