"""A JupyterLab and what Chromium caches for the whole run, a Chromium for each file, and pages.

ALLRANKS_TEST_FIREFOX names a Firefox that takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import BrowserContext, expect, sync_playwright

from tests.browser.chromium import MISSING, find_chromium
from tests.browser.firefox import chosen, program_of
from tests.browser.lab import CHROMIUM_ARGS, Lab, Server
from tests.missing import skip_missing

PICTURES = Path("test-results") / "browser"
VIEWPORT = {"width": 1280, "height": 900}

# Playwright's 5 s for what is expected and 30 s for all else are too few on a busy machine.
MOST_MS = 120_000
expect.set_options(timeout=MOST_MS)


@pytest.fixture(scope="session")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    path = chosen()
    return program_of(path, tmp_path_factory.mktemp("firefox")) if path else None


@pytest.fixture(scope="session")
def chromium(firefox: Path | None) -> str | None:
    if firefox:
        return None
    path = find_chromium()
    if path is None:
        skip_missing(MISSING)
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, chromium: str | None) -> Iterator[Server]:
    """One JupyterLab for all tests that want one."""
    with Server(tmp_path_factory.mktemp("jupyterlab")) as server:
        yield server


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the browser caches: JupyterLab's scripts, also as compiled."""
    return tmp_path_factory.mktemp("chromium")


# Playwright's loop counts as running in this thread until it is stopped, and would break every
# asyncio.run() in the other suites: so it ends with each file, which costs a second.
@pytest.fixture(scope="module")
def browser(chromium: str | None, firefox: Path | None, profile: Path) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        if firefox:
            browser = playwright.firefox.launch_persistent_context(
                profile, executable_path=firefox, channel="moz-firefox", viewport=VIEWPORT
            )
        else:
            browser = playwright.chromium.launch_persistent_context(
                profile, executable_path=chromium, args=CHROMIUM_ARGS, viewport=VIEWPORT
            )
        browser.set_default_timeout(MOST_MS)
        yield browser
        browser.close()


@contextmanager
def fresh_page(browser: BrowserContext, server: Server) -> Iterator[Lab]:
    server.clear()
    lab = Lab(browser.new_page(), server)
    yield lab
    lab.close()
    lab.page.close()


@contextmanager
def page_with_ranks(browser: BrowserContext, server: Server, *sources: str) -> Iterator[Lab]:
    with fresh_page(browser, server) as lab:
        lab.open(server.add(new_notebook(cells=[new_code_cell(source) for source in sources])))
        lab.start_ranks()
        yield lab


@pytest.fixture
def lab(browser: BrowserContext, server: Server, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with fresh_page(browser, server) as lab:
        yield lab
        lab.screenshot(PICTURES / f"{request.node.name}.png")
