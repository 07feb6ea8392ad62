"""The local web UI in a real browser: keys, accessibility, no foreign requests.

Marked `network`: two processes. Needs Chromium and its driver; `npm install --no-save
axe-core`.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from applications import has_app, needs_app
from browser import AXE, TOOLS, Browser, chromium
from tiny_jobs import TABLE

from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import SUMMARY
from fednotes.jobs.simulate import simulate

pytestmark = pytest.mark.network
PAGES = (
    "/runs",
    "/runs/0",
    "/runs/2",
    "/compare",
    "/errors",
    "/errors/0?kind=all",
    "/confusion",
    "/calibration",
    "/try",
    "/ledger",
    "/approvals",
    "/patients?run=clinics",
    "/patients/0?run=clinics",
    "/phenotype?run=clinics&phenotype=diabetes",
    "/nowhere",
)


def make_kit(folder: Path) -> Path:
    """Return the kit of a site where a job waits for approval."""
    needs_app("deployment")
    from kits import site_kit

    from fednotes.apps.deployment.rules.guard import NotApproved, require_approved
    from fednotes.apps.deployment.rules.policy import Policy

    kit = site_kit(folder / "north")
    job = {"name": "ner", "method": "fedner", "sites": ["north", "south", "east"]}
    with pytest.raises(NotApproved):
        require_approved(kit, "north", job, Policy())
    return kit


def make_patients(folder: Path) -> Path:
    """Return a run on patients."""
    table = {
        "method": "phenotype",
        "seed": 1,
        "conditions": ["federated"],
        "synthetic": {"sites": 2, "patients": 120},
        "model": {"representation": "none"},
        "training": {"classifier_cycles": 1},
    }
    simulate(parse_job(table, "tiny", folder, "test"), folder / "clinics")
    return folder / "clinics"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A trained model's page as a process, on generated notes; and where decisions are
    kept."""
    pytest.importorskip("uvicorn")
    folder = tmp_path_factory.mktemp("ui")
    simulate(parse_job(dict(TABLE), "tiny", folder, "test"), folder / "run")
    corrections = folder / "kept.json"
    shutil.copytree(folder / "run", folder / "again")
    model = next((folder / "run" / "federated").rglob("model"))
    shutil.copytree(folder / "run", folder / "live")
    (folder / "live" / SUMMARY).unlink()
    runs = ["run", "again", "live"]
    if has_app("phenotyping"):
        runs.append(make_patients(folder).name)
    kits = [str(make_kit(folder))] if has_app("deployment") else []
    command = [sys.executable, "-m", "fednotes", "ui", *runs, *kits, str(model)]
    command += ["--corrections", str(corrections)]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield address[0], corrections
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def live(page: tuple[str, Path]) -> Path:
    """The third run of the page, which has not finished."""
    return page[1].parent / "live"


@pytest.fixture(scope="module")
def browser(page: tuple[str, Path]) -> Iterator[Browser]:
    """A browser that has followed the address, once the notes are read."""
    if not all(map(shutil.which, TOOLS)):
        pytest.skip("there is no Chromium here with its driver")
    with chromium() as opened:
        opened.go(page[0])
        opened.go(page[0].split("/?")[0] + "/errors")
        opened.until("return document.body.innerText.includes('Errors in')")
        yield opened


def test_a_page_marks_its_section_after_loading_notes(browser: Browser) -> None:
    marked = "return document.querySelector('nav [aria-current]')?.textContent"
    assert browser.run(marked) == "Errors"


def test_keys_navigate_and_decide(browser: Browser, page: tuple[str, Path]) -> None:
    place, corrections = page
    root = place.split("/?")[0]
    browser.go(f"{root}/errors?kind=all")
    links = browser.run(
        "return [...document.querySelectorAll('.rows a')].map(a => a.href)"
    )
    assert len(links) > 2
    browser.go(links[0])
    for key, at in (("j", 1), ("j", 2), ("k", 1), ("x", 2)):
        browser.press(key)
        browser.until(
            f"return location.href == {links[at]!r} && document.readyState == 'complete'"
        )
    assert '"action": "delete"' in corrections.read_text("utf-8")
    browser.press("k")
    decided = "document.readyState == 'complete' && document.body.innerText.includes('Decided: no')"
    browser.until(f"return {decided}")
    browser.press("u")
    browser.until(f"return document.readyState == 'complete' && !({decided})")
    browser.press("e")
    assert browser.run("return document.activeElement.id") == "label"
    browser.press("jk")  # into the field, and nowhere else
    assert browser.run("return document.activeElement.value").endswith("jk")
    assert browser.run("return location.href").split("#")[0] == links[1].split("#")[0]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_only_minor_problems(
    browser: Browser, page: tuple[str, Path], dark: bool
) -> None:
    if not AXE.is_file():
        pytest.skip("npm install --no-save axe-core brings what looks for barriers")
    root = page[0].split("/?")[0]
    browser.dark(dark)
    for path in PAGES:
        browser.go(root + path)
        assert browser.accessibility_problems() == [], path


@pytest.mark.parametrize("width", [360, 1280])
def test_no_page_scrolls_sideways(
    browser: Browser, page: tuple[str, Path], width: int
) -> None:
    """Wide tables scroll by themselves, and the keyboard reaches them."""
    root = page[0].split("/?")[0]
    browser.resize(width)
    for path in PAGES:
        browser.go(root + path)
        assert not browser.scrolls_sideways(), path
        unreachable = browser.run(
            "return [...document.querySelectorAll('.wide')].filter("
            "box => box.scrollWidth > box.clientWidth && box.tabIndex < 0).length"
        )
        assert unreachable == 0, path
    browser.resize(1280)


def test_a_live_page_keeps_opened_sections_open(
    browser: Browser, page: tuple[str, Path], live: Path
) -> None:
    root = page[0].split("/?")[0]
    browser.go(f"{root}/runs/2")
    opened = "document.querySelector('main details').open"
    browser.run(f"{opened} = true; document.querySelector('main summary').focus()")
    line = '{"part": "federated", "condition": "federated", "round": 4321, "loss": 1}'
    with (live / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    browser.until("return document.querySelector('main').innerText.includes('4322')")
    assert browser.run(f"return {opened}")
    assert browser.run("return document.activeElement.tagName") == "SUMMARY"


def test_the_browser_blocks_nothing_and_contacts_no_other_host(
    browser: Browser, page: tuple[str, Path]
) -> None:
    root = page[0].split("/?")[0]
    browser.messages()
    for path in PAGES:
        browser.go(root + path)
        requested = browser.run(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )
        assert requested
        assert {address.split("/static/")[0] for address in requested} == {root}
    assert [line for line in browser.messages() if "404" not in line] == []
