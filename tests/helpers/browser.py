"""A headless Chromium that reaches 127.0.0.1 alone, controlled by the WebDriver
protocol, and the checks of a page that every page must pass."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage "
    "--no-proxy-server --force-color-profile=srgb"
).split()
REST = '--host-resolver-rules="MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"'.replace('"', "")
TOOLS = ("chromium", "chromedriver")
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
_RUN_AXE = """
return axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(
    one => one.impact + " " + one.id + ": " + one.nodes.map(node => node.html).join(" | ")))
"""
_HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # of no proxy


class Browser:
    """One session. address: of its driver's."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, method: str, path: str, **values: Any) -> Any:
        """One command of the protocol."""
        data = json.dumps(values).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.address}{path}", data, method=method)
        with _HERE.open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def go(self, url: str) -> None:
        """Open a page."""
        self.ask("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns; a promise's value."""
        return self.ask("POST", "/execute/sync", script=script, args=list(arguments))

    def until(self, script: str) -> None:
        """Wait until a script says yes: what a key begins ends later."""
        for _ in range(200):
            with suppress(urllib.error.HTTPError):  # between two pages
                if self.run(script):
                    return
            time.sleep(0.1)
        raise AssertionError(script)

    def press(self, keys: str) -> None:
        """Keys, as a person gives them to the page."""
        for key in keys:
            key_actions = [
                {"type": kind, "value": key} for kind in ("keyDown", "keyUp")
            ]
            self.ask(
                "POST",
                "/actions",
                actions=[{"type": "key", "id": "k", "actions": key_actions}],
            )

    def dark(self, dark: bool) -> None:
        """Which colours the page is asked for."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command = {
            "cmd": "Emulation.setEmulatedMedia",
            "params": {"features": [feature]},
        }
        self.ask("POST", "/goog/cdp/execute", **command)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page, in CSS pixels."""
        command = {
            "cmd": "Emulation.setDeviceMetricsOverride",
            "params": {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": False,
            },
        }
        self.ask("POST", "/goog/cdp/execute", **command)

    def accessibility_problems(self) -> list[str]:
        """Return what axe-core finds on the page, but for minor problems.

        Tests that call this skip where the file `AXE` is missing.
        """
        self.run(AXE.read_text("utf-8"))
        return [line for line in self.run(_RUN_AXE) if not line.startswith("minor")]

    def scrolls_sideways(self) -> bool:
        """Return whether the page is wider than the window."""
        return bool(
            self.run("return document.documentElement.scrollWidth > innerWidth")
        )

    def messages(self) -> list[str]:
        """What the browser complained of since it was last asked."""
        return [each["message"] for each in self.ask("POST", "/se/log", type="browser")]


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a new profile; both processes, and the profile, go however this
    ends."""
    profile = tempfile.mkdtemp(prefix="fednotes-browser-")
    options = {
        "binary": shutil.which(TOOLS[0]),
        "args": [
            *ARGUMENTS,
            REST,
            f"--window-size={width},{height}",
            f"--user-data-dir={profile}",
        ],
    }
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    driver = subprocess.Popen([TOOLS[1], "--port=0"], stdout=subprocess.PIPE, text=True)
    browser = None
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "successfully on port" in line)
        root = f"http://127.0.0.1:{line.rpartition(' ')[2].strip().rstrip('.')}"
        session = {"capabilities": {"alwaysMatch": capabilities}}
        created = Browser(root).ask("POST", "/session", **session)
        browser = Browser(f"{root}/session/{created['sessionId']}")
        yield browser
    finally:
        try:
            if browser is not None:
                browser.ask("DELETE", "")
        finally:
            driver.terminate()
            driver.communicate(timeout=20)
            shutil.rmtree(Path(profile), ignore_errors=True)
