"""Runs in the local web UI: reports, comparisons, errors in test notes, and ledgers."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from applications import needs_app
from pages import Tree
from tiny_jobs import TABLE

from fednotes.apps.ui.access import Access
from fednotes.apps.ui.content import Content, load_content
from fednotes.apps.ui.pages import create_app
from fednotes.core.errors import ConfigError
from fednotes.core.store import LOCK, reserving_folder
from fednotes.core.wording import format_duration
from fednotes.jobs.compare import compare
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.metrics_file import METRICS
from fednotes.jobs.results import SUMMARY, read_result
from fednotes.jobs.simulate import simulate

pytest.importorskip("starlette")
from starlette.testclient import TestClient

ROOT = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a copy of it, and one that has not finished.

    Tests only read them.
    """
    folder = tmp_path_factory.mktemp("runs")
    table = {**TABLE, "title": "Two sites", "conditions": ["alone", "federated"]}
    table["synthetic"] = {"sites": 2, "sentences": 20}
    simulate(parse_job(table, "tiny", folder, "test"), folder / "one")
    for name in ("two", "live"):
        shutil.copytree(folder / "one", folder / name)
    (folder / "live" / SUMMARY).unlink()
    return folder


def browse(content: Content) -> TestClient:
    """Return a browser of the pages, with the cookie."""
    access = Access()
    browser = TestClient(
        create_app(content, access),
        base_url=ROOT + access.root,
        headers={"origin": ROOT},
    )
    assert browser.get(f"/?token={access.token}").status_code == 200
    return browser


def rows_by_name(text: str) -> dict[str, list[str]]:
    """Return the cells after the name of each run in the list, by its name."""
    rows = [row for row in Tree(text).rows[1:] if row[-1].startswith("20")]
    return {row[-8].removesuffix("Two sites"): row[-7:] for row in rows}


def wait_for_page(browser: TestClient, path: str) -> str:
    """Return a page once the work that it waits for is done."""
    for _ in range(200):
        text = browser.get(path).text
        if "data-poll" not in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} is still waiting")


def test_the_page_of_a_run_equals_its_report(runs: Path) -> None:
    text = browse(load_content([runs / "one"])).get("/runs").text
    report = (runs / "one" / "summary.json").read_text("utf-8")
    f1 = json.loads(report)["mean"]["federated"]["strict"]["f1"]
    assert "<h1>Two sites</h1>" in text
    assert f"<dd>{100 * f1:.1f} %<small>mean strict F1" in text
    assert "Did federation help?" in text
    assert 'aria-labelledby="mean-f1-t' in text  # a curve
    assert "data-poll" not in text
    Tree(text)


def test_the_page_of_an_unfinished_run_refreshes_itself(runs: Path) -> None:
    """Its curves show the complete lines of metrics.jsonl; half a line is ignored."""
    with (runs / "live" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 99, "los')
    job = runs / "live" / "job.json"
    record = json.loads(job.read_text("utf-8")) | {"command": "fednotes simulate x"}
    job.write_text(json.dumps(record), "utf-8")
    newest = json.loads(
        (runs / "one" / "metrics.jsonl").read_text("utf-8").splitlines()[-1]
    )
    text = browse(load_content([runs / "live"])).get("/runs").text
    assert 'data-poll="5"' in text
    assert (
        f"has not finished. Its latest evaluation was in round {newest['round'] + 1}."
        in text
    )
    assert "<h1>Two sites</h1>" in text
    assert f"Seed {record['table']['seed']}" in text
    assert "<code>fednotes simulate x</code>" in text
    assert 'aria-labelledby="mean-f1-t' in text
    listed = browse(load_content([runs / "one", runs / "live"])).get("/runs").text
    names = [row[1].removesuffix("Two sites") for row in Tree(listed).rows[1:]]
    assert names == ["live", "one"]  # the newest one first
    assert "not finished" in listed


def test_a_folder_of_runs_lists_each_run_with_its_facts(
    runs: Path, tmp_path: Path
) -> None:
    """Runs that appear later are listed too, and each keeps its address."""
    folder = tmp_path / "runs"
    shutil.copytree(runs / "one", folder / "seeds" / "seed-1")
    shutil.copytree(runs / "live", folder / "live")
    content = load_content([folder])
    browser = browse(content)
    rows = rows_by_name(browser.get("/runs").text)
    result = read_result(runs / "one")
    score = f"{100 * result.mean['federated']['strict']['f1']:.1f} %"
    assert rows["seeds/seed-1"][:4] == [
        "finished",
        "fedner",
        "2",
        f"{score}test strict F1, federated",
    ]
    assert result.seconds is not None
    assert rows["seeds/seed-1"][4] == format_duration(result.seconds)
    assert rows["live"][:3] == ["not finished", "fedner", "2"]
    assert "validation F1" in rows["live"][3]
    addresses = dict(content.runs)
    shutil.copytree(runs / "one", folder / "another")
    assert {*rows_by_name(browser.get("/runs").text)} == {*rows, "another"}
    assert [*content.runs][:2] == [*addresses]
    assert browser.get("/runs/2").status_code == 200


def test_a_run_in_a_held_folder_is_in_progress(runs: Path, tmp_path: Path) -> None:
    """A lock file that a killed process left behind is no lock."""
    shutil.copytree(runs / "live", tmp_path / "runs" / "live")
    run = tmp_path / "runs" / "live"
    browser = browse(load_content([run.parent]))

    def state() -> str:
        return rows_by_name(browser.get("/runs").text)["live"][0]

    assert state() == "not finished"
    (run / LOCK).write_text("process 1 on another host")
    assert state() == "not finished"
    assert "No command is training it" in browser.get("/runs/0").text
    with reserving_folder(run):
        assert state() == "in progress"
        assert "No command is training it" not in browser.get("/runs/0").text


def test_a_damaged_run_is_listed_with_its_problem(runs: Path, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        shutil.copytree(runs / "one", tmp_path / name)
    (tmp_path / "bad" / SUMMARY).write_text("{")
    rows = rows_by_name(browse(load_content([tmp_path])).get("/runs").text)
    assert rows["good"][0] == "finished"
    assert rows["bad"][0].startswith("cannot be read")
    assert SUMMARY in rows["bad"][0]


def test_an_odd_value_of_one_run_hides_no_other_run(runs: Path, tmp_path: Path) -> None:
    for name in ("good", "odd"):
        shutil.copytree(runs / "live", tmp_path / name)
    (tmp_path / "odd" / METRICS).write_text('{"part": {}, "round": 0, "seconds": 1}\n')
    rows = rows_by_name(browse(load_content([tmp_path])).get("/runs").text)
    assert rows["good"][0] == rows["odd"][0] == "not finished"


@pytest.mark.parametrize("line", ["{}", '{"round": null}', '{"round": "<b>"}'])
def test_a_line_without_a_round_does_not_hide_an_unfinished_run(
    line: str, runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "live", tmp_path / "live")
    (run / METRICS).write_text(f"{line}\n")
    page = browse(load_content([run])).get("/runs/0")
    assert page.status_code == 200
    assert "This run has not finished." in page.text
    assert "Its latest evaluation" not in page.text


def test_the_list_links_to_the_comparison_of_two_runs(
    runs: Path, tmp_path: Path
) -> None:
    for name in ("one", "two", "three"):
        shutil.copytree(runs / "one", tmp_path / name)
    browser = browse(load_content([tmp_path]))
    text = browser.get("/compare?run=two&run=three").text
    assert "<title>two and three</title>" in text
    for query in ("run=two", "run=two&run=three&run=one", "run=two&run=%3Cb%3E"):
        answer = browser.get(f"/compare?{query}")
        assert answer.status_code == 400
        assert "choose two runs in the list" in answer.text


def test_a_comparison_shows_the_result_of_the_command(
    runs: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    browser = browse(load_content([runs / "one", runs / "two"]))
    query = "/compare?a=one&b=two&metric=relaxed_one_to_one&test=1"
    text = wait_for_page(browser, query)
    code, printed, _ = run_cli(
        "compare",
        runs / "one",
        runs / "two",
        "--condition",
        "federated",
        "--other-condition",
        "federated",
        "--metric",
        "relaxed_one_to_one",
    )
    assert code == 0
    comparison = compare(
        runs / "one",
        runs / "two",
        condition="federated",
        against="federated",
        metric="relaxed_one_to_one",
    )
    assert comparison.title in text
    assert comparison.title in " ".join(printed.split())
    answer = browser.get("/compare?a=one&b=two&metric=fly&test=1")
    assert "runs on documents are compared by" in answer.text


def test_conditions_of_one_or_two_runs_are_compared(runs: Path) -> None:
    browser = browse(load_content([runs / "one", runs / "two"]))
    sites = read_result(runs / "one").sites

    rows = Tree(
        browser.get("/compare?a=one&b=one&condition=federated&against=alone").text
    ).rows
    assert "one, federated" in rows[0]
    assert "one, alone" in rows[0]
    for site, scores in sites.items():
        first, second = (
            scores[name]["strict"]["f1"] for name in ("federated", "alone")
        )
        change = f"{100 * (first - second):+.1f}"
        values = [f"{100 * first:.1f}", f"{100 * second:.1f}", change]
        assert [site, "Strict F1", *values] in rows

    query = "a=one&b=two&condition=alone&against=federated&test=1"
    comparison = compare(
        runs / "one", runs / "two", condition="alone", against="federated"
    )
    tested = Tree(wait_for_page(browser, f"/compare?{query}")).rows
    for site, test in comparison.tests.items():
        (row,) = [row for row in tested if row[0] == site and len(row) == 7]
        assert row[1] == f"{100 * test.f1_a:.1f}"
        assert row[3] == f"{100 * test.difference:+.1f}"

    same = browser.get("/compare?a=one&b=one")
    assert same.status_code == 400
    assert "choose another run or another condition" in same.text
    unknown = browser.get("/compare?a=one&b=two&condition=%3Cb%3E&against=nothing")
    assert "<title>one and two</title>" in unknown.text


def test_curves_are_also_tables(runs: Path) -> None:
    """Each evaluation over all sites is a row, as in metrics.jsonl."""
    rows = Tree(browse(load_content([runs / "one"])).get("/runs").text).rows
    lines = [
        json.loads(line)
        for line in (runs / "one" / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    federated = [line for line in lines if line["condition"] == "federated"]
    assert federated
    for line in federated:
        assert [
            str(line["round"] + 1),
            f"{round(100 * line['valid_f1'], 1):.4g}",
        ] in rows


def test_two_runs_are_compared_and_their_difference_is_tested(runs: Path) -> None:
    """A run and its copy do not differ at any site."""
    browser = browse(load_content([runs / "one", runs / "two"]))
    result = read_result(runs / "one")
    rows = Tree(browser.get("/compare").text).rows
    for site, scores in result.sites.items():
        f1 = f"{100 * scores['federated']['strict']['f1']:.1f}"
        assert [site, "Strict F1", f1, f1, "+0.0"] in rows
    tested = Tree(wait_for_page(browser, "/compare?a=one&b=two&test=1")).rows
    assert [row[3:] for row in tested if row[0] in result.sites and len(row) == 7] == [
        ["+0.0", "+0.0 to +0.0", "1.0000", "no difference shown"] for _ in result.sites
    ]
    assert browser.get("/compare?a=%3Cb%3E&b=none").status_code == 200
    assert browser.get("/runs/2").status_code == 400
    assert browse(load_content([runs / "one"])).get("/compare").status_code == 400


def test_errors_of_a_run_agree_with_its_counts(runs: Path) -> None:
    """summary.json has each site's counts of correct, annotated and predicted ones."""
    content = load_content([runs / "one"])
    browser = browse(content)
    wait_for_page(browser, "/errors")
    assert content.review is not None
    review = content.review.get()
    assert review is not None
    for place, (site, scores) in enumerate(read_result(runs / "one").sites.items()):
        assert review.sources[place].name == site
        items = [item for item in review.items if item.source == place]
        kinds = Counter(item.kind for item in items)
        counts = scores["federated"]["counts"]
        assert kinds["correct"] == counts["strict"]
        assert sum(item.gold is not None for item in items) == counts["gold"] > 0
        assert sum(item.predicted is not None for item in items) == counts["predicted"]
    assert review.file == runs / "one.corrections.json"
    assert browser.get("/errors?site=none").text.count("<li>") == 0


def test_each_run_of_a_folder_has_a_separate_page_of_errors(
    runs: Path, tmp_path: Path
) -> None:
    """Decisions about a run are saved beside it."""
    folder = tmp_path / "runs"
    for name in ("one", "two"):
        shutil.copytree(runs / "one", folder / name)
    browser = browse(load_content([folder]))
    (address,) = re.findall(
        r'href="/[\w-]{22}(/errors\?run=two)"', browser.get("/runs/1").text
    )
    text = wait_for_page(browser, address)
    assert "Errors in two, federated" in text
    assert '<input type="hidden" name="run" value="two">' in text
    addresses = re.findall(r'href="/[\w-]{22}(/errors[^"]*|/export[^"]*)"', text)
    assert addresses
    assert all("run=two" in address for address in addresses)
    for path in ("/confusion", "/calibration"):
        assert "in two, federated" in browser.get(f"{path}?run=two").text
    browser.post("/errors/0?kind=all&run=two", data={"action": "delete"})
    assert [path.name for path in folder.glob("*.json")] == ["two.corrections.json"]
    assert browser.get("/export/jsonl?run=two").status_code == 200
    assert browser.get("/errors?run=three").status_code == 400
    assert browser.get("/errors").status_code == 400


def test_a_run_without_models_is_reported_and_read_again_on_request(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "one", tmp_path / "run")
    for folder in ("alone", "federated"):
        (tmp_path / "run" / folder).rename(tmp_path / folder)
    browser = browse(load_content([tmp_path / "run"]))
    assert "has no federated model" in wait_for_page(browser, "/errors")
    for folder in ("alone", "federated"):
        (tmp_path / folder).rename(tmp_path / "run" / folder)
    assert "Errors in run, federated" in wait_for_page(browser, "/errors")


def test_a_run_of_patients_has_no_section_of_errors(runs: Path, tmp_path: Path) -> None:
    table = json.loads((runs / "one" / SUMMARY).read_text("utf-8"))
    (tmp_path / SUMMARY).write_text(json.dumps({**table, "holds": "patients"}), "utf-8")
    assert [name for _, name in load_content([tmp_path]).list_sections()] == ["Runs"]
    assert [name for _, name in load_content([runs / "one"]).list_sections()] == [
        "Runs",
        "Errors",
    ]


def test_the_page_of_a_ledger_shows_whether_it_is_intact(tmp_path: Path) -> None:
    needs_app("deployment")
    from ledgers import MESSAGE, lines_of, write_ledger

    from fednotes.apps.deployment.nvflare.kit import KIT_FILE
    from fednotes.apps.deployment.rules.ledger import Ledger

    kit = tmp_path / "north"
    kit.mkdir()
    (kit / KIT_FILE).write_text("{}")
    Ledger.in_kit(kit).path.parent.mkdir()
    ledger = write_ledger(Ledger.in_kit(kit).path, 119)
    ledger.append(replace(MESSAGE, round=119, update="ab" * 32))
    browser = browse(load_content([kit]))
    text = browser.get("/ledger").text
    assert ["run-1", "train", "120", "480 B", "0"] in Tree(text).rows
    assert "120 lines, unbroken" in text
    assert "The newest 100 messages" in text
    (newest,) = (row for row in Tree(text).rows if row[0] == "120")
    assert newest[4] == "0"  # tensors
    lines = lines_of(Ledger.in_kit(kit).path)
    Ledger.in_kit(kit).path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    assert 'role="alert"' in browser.get("/ledger").text
    without_task = lines[3].replace(b'"task":', b'"tusk":')
    Ledger.in_kit(kit).path.write_bytes(
        b"".join([*lines[:3], without_task, *lines[4:]])
    )
    text = browser.get("/ledger").text
    assert 'role="alert"' in text
    assert "The newest 3 messages" in text


def test_paths_that_do_not_fit_together_are_refused(runs: Path, tmp_path: Path) -> None:
    models = [
        next((runs / name / "federated").rglob("model")) for name in ("one", "two")
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    for paths in ([runs / "nothing"], [empty], models):
        with pytest.raises(ConfigError, match="fednotes ui MODEL NOTES"):
            load_content(paths)


def test_names_of_runs_and_sites_are_escaped(runs: Path, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "one", tmp_path / hostile)
    summary = tmp_path / hostile / SUMMARY
    table = json.loads(summary.read_text("utf-8"))
    table["title"] = hostile
    table["sites"] = {hostile: next(iter(table["sites"].values()))}
    summary.write_text(json.dumps(table), "utf-8")
    browser = browse(load_content([runs / "one", tmp_path / hostile]))
    for path in ("/runs", "/runs/1", "/compare"):
        text = browser.get(path).text
        assert "&lt;img src=x onerror=alert(1)&gt;" in text
        assert "<img" not in text
