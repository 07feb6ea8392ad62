"""The documentation site in a real browser, if `make docs` has built it.

Marked `network`: a browser and a server. Needs Chromium and its driver;
`npm install --no-save axe-core` for the check of accessibility.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import AXE, TOOLS, Browser, chromium

pytestmark = pytest.mark.network
SITE = Path(__file__).parents[1] / "build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler that prints no requests."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """The address of the site, which a thread serves."""
    if not PAGES:
        pytest.skip("`make docs` has not built the site")
    handler = functools.partial(QuietHandler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def browser(root: str) -> Iterator[Browser]:
    if not all(map(shutil.which, TOOLS)):
        pytest.skip("there is no Chromium here with its driver")
    with chromium() as opened:
        yield opened


def wait_for_scheme(browser: Browser, scheme: str) -> str:
    """Return the page's colour scheme, which its script sets some time after it loads.

    Args:
        browser: The browser.
        scheme: The scheme to wait for.
    """
    end = time.monotonic() + 10
    while True:
        current = browser.run("return document.body.dataset.mdColorScheme")
        if current == scheme or time.monotonic() > end:
            return str(current)
        time.sleep(0.1)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_only_minor_problems(browser: Browser, root: str, dark: bool) -> None:
    if not AXE.is_file():
        pytest.skip("npm install --no-save axe-core brings what looks for barriers")
    # The theme remembers its colours, and would do so again on one of its own pages.
    browser.go(f"{root}/site.css")
    browser.run("localStorage.clear()")
    browser.dark(dark)
    browser.go(f"{root}/index.html")
    scheme = "slate" if dark else "default"
    assert wait_for_scheme(browser, scheme) == scheme
    problems = {}
    for path in PAGES:
        browser.go(f"{root}/{path}")
        problems[path] = browser.accessibility_problems()
    assert {path: each for path, each in problems.items() if each} == {}


@pytest.mark.parametrize("width", [360, 1280])
def test_no_page_scrolls_sideways(browser: Browser, root: str, width: int) -> None:
    browser.resize(width)
    wide = []
    for path in PAGES:
        browser.go(f"{root}/{path}")
        if browser.scrolls_sideways():
            wide.append(path)
    browser.resize(1280)
    assert wide == []


def test_every_page_has_a_title_and_one_heading_of_the_first_level(
    browser: Browser, root: str
) -> None:
    for path in PAGES:
        browser.go(f"{root}/{path}")
        assert browser.run("return document.title"), path
        assert browser.run("return document.querySelectorAll('h1').length") == 1, path


def test_the_browser_contacts_no_other_host_and_logs_no_error(
    browser: Browser, root: str
) -> None:
    browser.messages()
    for path in PAGES:
        browser.go(f"{root}/{path}")
        requested = browser.run(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )
        assert requested, path
        assert all(address.startswith(f"{root}/") for address in requested), path
    assert browser.messages() == []


def test_the_search_finds_a_page(browser: Browser, root: str) -> None:
    browser.go(f"{root}/index.html")
    browser.run(
        "const field = document.querySelector('.md-search__input'); field.focus();"
        "field.value = 'secure sum';"
        "field.dispatchEvent(new Event('keyup', {bubbles: true}))"
    )
    browser.until(
        "return document.querySelectorAll('.md-search-result__link').length > 0"
    )
