"""A run: its folder, summary, restarts, refusals and pooled condition."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from forked import Command
from safetensors.torch import load_file
from tiny_jobs import TABLE, corpus

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.data import synthetic
from fednotes.jobs.card import render_card
from fednotes.jobs.compare import compare
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import RunResult, read_result
from fednotes.jobs.simulate import simulate
from fednotes.report.html import write_report
from fednotes.taggers.saving import load_model

pytestmark = pytest.mark.usefixtures("few_sentences")
SITES = ("discharge", "reports", "posts")


def job(folder: Path, **changes: Any) -> Job:
    table = {**TABLE, **changes}
    return parse_job(
        {k: v for k, v in table.items() if v is not None}, "tiny", folder, "tiny.toml"
    )


def files(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    paths = [path for path in folder.rglob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def lines(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the times."""
    rows = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("runs")
    result = simulate(job(folder), folder / "run")
    write_report(folder / "run")
    return folder / "run", result


@pytest.mark.slow
def test_the_verdict_of_a_run_equals_that_of_compare(finished_run) -> None:
    """`compare` opens the saved models and tags the test data again: the same test of
    the same documents, to the last bit."""
    out, result = finished_run
    compared = compare(out, out)
    for site in SITES:
        test, verdict = compared.tests[site], result.verdict(site)
        assert verdict is not None
        assert (verdict.gain, verdict.low, verdict.high, verdict.p_value) == (
            test.difference,
            test.low,
            test.high,
            test.p_value,
        )
        scores = result.sites[site]
        assert compared.scores[site] == (
            scores["federated"]["strict"],
            scores["alone"]["strict"],
        )
    run_verdict = result.verdict()
    assert run_verdict is not None
    f1 = {c: result.mean[c]["strict"]["f1"] for c in ("alone", "federated")}
    assert run_verdict.gain == pytest.approx(f1["federated"] - f1["alone"])
    assert run_verdict.paired
    assert read_result(out) == result


def test_a_comparison_of_two_runs_shows_their_names(
    finished_run, tmp_path: Path
) -> None:
    out, _ = finished_run
    again = tmp_path / "again"
    shutil.copytree(out, again)
    of_two = compare(out, again, "pooled", "pooled", samples=20)
    assert of_two.runs == (out.name, "again")
    assert compare(out, samples=20).runs == ()


def test_a_run_without_both_conditions_has_no_paired_test(tmp_path: Path) -> None:
    result = simulate(job(tmp_path, conditions=["federated"]), tmp_path / "run")
    assert (result.paired, result.paired_mean) == ({}, {})
    assert result.verdict() is None


def test_a_run_leaves_the_documented_files(finished_run) -> None:
    out, _ = finished_run
    assert {path.name for path in out.iterdir()} == {
        "job.json", "metrics.jsonl", "summary.json", "report.html", "alone", "federated", "pooled"
    }  # fmt: skip
    parts = {f"alone/{site}": [site] for site in SITES}
    parts |= {"federated": list(SITES), "pooled": ["pooled"]}
    for part, sites in parts.items():
        assert (out / part / "done.json").is_file()
        # private modules do not stay about
        assert not (out / part / "checkpoints").exists()
        for site in sites:
            folder = out / part / "sites" / site
            assert {p.name for p in folder.iterdir()} == {"model", "scores.json"}
            assert load_model(folder / "model").predict([]) == ()
    record = json.loads((out / "job.json").read_text())
    assert record["table"]["seed"] == 2
    assert record["versions"]["torch"] == torch.__version__
    assert not [
        path
        for path in out.rglob("*")
        if path.suffix in {".tmp", ".old", ".pkl", ".pt"}
    ]


def test_the_summary_has_the_documented_keys(finished_run) -> None:
    out, summary = finished_run
    saved = json.loads((out / "summary.json").read_text())
    assert saved == summary.model_dump(mode="json", exclude_defaults=True)
    assert read_result(out) == summary
    assert {"version", "method", "seed", "seconds", "bytes_up", "sites", "mean"} <= set(
        saved
    )
    assert (summary.method, summary.seed) == ("fedner", 2)
    assert list(summary.sites) == list(SITES)
    for by_condition in summary.sites.values():
        assert list(by_condition) == ["alone", "federated", "pooled"]
        for score in by_condition.values():
            assert {"strict", "relaxed", "by_type"} <= set(score)
            for kind in ("strict", "relaxed"):
                assert set(score[kind]) == {"precision", "recall", "f1"}
                assert all(0 <= value <= 1 for value in score[kind].values())
    spent = summary.conditions
    federated = spent["federated"]
    assert (summary.bytes_up, summary.bytes_down) == (
        federated["bytes_up"],
        federated["bytes_down"],
    )
    for kind in ("strict", "relaxed"):  # plain means over sites
        for key, value in summary.mean["pooled"][kind].items():
            each = [summary.sites[site]["pooled"][kind][key] for site in SITES]
            assert value == pytest.approx(mean(each), abs=1e-15)
    # |N_i| is proportional to |S_i|: an epoch alone has about as many rounds as one of all sites.
    assert abs(spent["alone"]["rounds"] - 3 * federated["rounds"]) <= 3


def test_scores_of_a_pooled_model_that_is_trained_less_are_marked(finished_run) -> None:
    """The preset's five personal epochs; in the summary, on the page and in the pooled
    card."""
    out, summary = finished_run
    remark = "without the 5 personal epochs at the end of alone and federated"
    assert [*summary.marks] == ["pooled"]
    model = out / "pooled" / "sites" / "pooled" / "model"
    federated_card = render_card(out / "federated" / "sites" / "reports" / "model")
    for text in (
        summary.marks["pooled"],
        (out / "report.html").read_text(),
        render_card(model),
    ):
        assert remark in text
    assert remark not in federated_card


def test_validation_scores_belong_to_the_kept_models(finished_run) -> None:
    """F1 of exact (start, end, type) on each site's validation data, counted as sets."""
    out, summary = finished_run
    for site in load_sites(job(out.parent)).data:
        for condition in ("alone", "federated"):
            part = (
                out / condition / site.id if condition == "alone" else out / condition
            )
            predicted = load_model(part / "sites" / site.id / "model").predict(
                site.valid
            )
            gold, predicted_mentions = (
                {
                    (n, s.start, s.end, s.label)
                    for n, d in enumerate(documents)
                    for s in d.spans
                }
                for documents in (site.valid, predicted)
            )
            f1 = (
                2
                * len(gold & predicted_mentions)
                / (len(gold) + len(predicted_mentions))
            )
            assert summary.valid[condition]["sites"][site.id] == pytest.approx(
                f1, abs=1e-12
            )
    for validation in summary.valid.values():
        assert validation["mean"] == pytest.approx(
            mean(validation["sites"].values()), abs=1e-12
        )
    assert list(summary.valid["pooled"]["sites"]) == ["pooled"]


def test_the_log_has_a_line_for_each_evaluation(finished_run) -> None:
    """Two epochs of each part, by the part's own rounds; every site's F1 on its own
    line."""
    out, summary = finished_run
    rows = lines(out)
    parts = [*(f"alone/{site}" for site in SITES), "federated", "pooled"]
    assert [row["part"] for row in rows] == [part for part in parts for _ in range(2)]
    for row in rows:
        assert {
            "condition",
            "round",
            "loss",
            "valid_f1",
            "bytes_up",
            "bytes_down",
        } <= set(row)
        known = {
            "alone": {row.get("site")},
            "federated": set(SITES),
            "pooled": {"pooled"},
        }
        assert set(row["sites"]) == known[row["condition"]]
    federated = [row for row in rows if row["part"] == "federated"]
    assert federated[-1]["round"] + 1 == summary.conditions["federated"]["rounds"]
    # the last counts travel after it
    assert federated[-1]["bytes_up"] < summary.bytes_up


def test_the_same_job_gives_the_same_result(finished_run, tmp_path: Path) -> None:
    out, summary = finished_run
    again = simulate(job(tmp_path, conditions=["federated"]), tmp_path / "run")
    for site in SITES:
        assert again.sites[site]["federated"] == summary.sites[site]["federated"]
    assert files(tmp_path / "run" / "federated", "*.safetensors") == files(
        out / "federated", "*.safetensors"
    )


# restarts


@pytest.mark.slow
def test_a_run_of_a_light_tagger_does_not_import_the_compiler_of_torch(
    tmp_path: Path,
) -> None:
    """Its import takes almost a second and 70 MiB in each process."""
    code = (
        "import sys, json, pathlib\n"
        "from fednotes.jobs.job_file import parse_job\n"
        "from fednotes.jobs.simulate import simulate\n"
        "table, folder = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "simulate(parse_job(table, 'job', folder, 'job'), folder / 'run', workers=1)\n"
        "assert 'torch' in sys.modules\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])\n"
    )
    table = {**TABLE, "conditions": ["federated"]}
    ended = subprocess.run(
        [sys.executable, "-c", code, json.dumps(table), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout == "[]\n"


def test_resuming_a_finished_run_changes_nothing(finished_run) -> None:
    out, summary = finished_run
    before = files(out)
    assert simulate(job(out.parent), out, resume=True).sites == summary.sites
    after = files(out)
    assert {k: v for k, v in after.items() if k != "report.html"} == {
        k: v for k, v in before.items() if k != "report.html"
    }


LONG = TABLE | {
    "conditions": ["alone", "federated"],
    "training": {"epochs": 12, "patience": 12, "batch_size": 24, "learning_rate": 0.01},
    "synthetic": {"sites": 2, "sentences": 30},
}


def as_toml(table: dict[str, Any], path: Path) -> Path:
    inner = [key for key, value in table.items() if isinstance(value, dict)]
    rows = [f"{k} = {json.dumps(v)}" for k, v in table.items() if k not in inner]
    for key in inner:
        rows += [f"[{key}]", *(f"{k} = {json.dumps(v)}" for k, v in table[key].items())]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_result_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a real process once the federated part has a checkpoint."""
    monkeypatch.setattr(synthetic, "MIN_PART_SIZES", (1, 40, 200))  # as in that process
    file = as_toml(LONG, tmp_path / "tiny.toml")
    killed = tmp_path / "killed"
    command = Command(tmp_path, "simulate", str(file), "--out", str(killed))
    deadline = time.monotonic() + 120
    while not list(killed.glob("federated/checkpoints/round-*")):
        assert command.is_alive(), command.wait()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    command.end()
    assert not (killed / "federated" / "done.json").exists()
    assert not (killed / "summary.json").exists()
    with (killed / "metrics.jsonl").open("a") as log:
        # what a kill in the middle of a line leaves
        log.write('{"part": "federated", "rou')
    uninterrupted = simulate(job(tmp_path, **LONG), tmp_path / "whole")
    again = simulate(job(tmp_path, **LONG), killed, resume=True)
    assert again.sites == uninterrupted.sites
    assert again.mean == uninterrupted.mean
    assert again.conditions["federated"]["bytes_up"] == uninterrupted.bytes_up
    assert again.bytes_down == uninterrupted.bytes_down
    models = files(tmp_path / "whole", "tagger.safetensors")
    assert len(models) == 4
    assert files(killed, "tagger.safetensors") == models
    assert lines(killed) == lines(tmp_path / "whole")


class Stop(Exception):
    pass


@pytest.mark.slow
def test_no_line_of_the_log_is_lost_or_written_twice(
    tmp_path: Path, monkeypatch
) -> None:
    """Killed at the worst moments: before a checkpoint is saved, and right after."""
    simulated_job = job(tmp_path, **LONG | {"conditions": ["federated"]})
    simulate(simulated_job, tmp_path / "whole")
    from fednotes.engines import rounds

    real, saves_before_kill = rounds.save_state, [3, 1, 2, 1]

    def save(path: Path, *values: Any) -> None:
        saves_before_kill[0] -= 1
        if saves_before_kill[0] == 0 and len(saves_before_kill) % 2:
            raise Stop  # not saved
        real(path, *values)
        if saves_before_kill[0] == 0:
            raise Stop

    for _ in range(4):
        monkeypatch.setattr(rounds, "save_state", save)
        with pytest.raises(Stop):
            simulate(simulated_job, tmp_path / "run", resume=True)
        saves_before_kill.pop(0)
    monkeypatch.setattr(rounds, "save_state", real)
    simulate(simulated_job, tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


class StopsBefore(ProgressListener):
    """Stops a run before one of its parts, and notes its warnings.

    Attributes:
        part: Number of the part, from 1; 0 stops none.
        warnings: The warnings.
    """

    def __init__(self, part: int = 0) -> None:
        self.part = part
        self.warnings: list[str] = []

    def begin(self, *_: Any) -> None:
        self.part -= 1
        if self.part == 0:
            raise Stop

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def stop(job: Job, out: Path, *, part: int) -> None:
    with pytest.raises(Stop):
        simulate(job, out, listener=StopsBefore(part))


@pytest.mark.parametrize("part", [1, 2])
def test_a_run_is_resumed_only_by_the_same_job(tmp_path: Path, part: int) -> None:
    """Also before its first evaluation, and if somebody has emptied its log."""
    out = tmp_path / "run"
    both = {"conditions": ["alone", "federated"]}
    stop(quick(tmp_path, **both), out, part=part)
    (out / "metrics.jsonl").write_text("")
    before = files(out)
    other_jobs = {
        r"~ seed: 2 → 3\)": quick(tmp_path, seed=3, **both),
        r"~ training\.epochs: 2 → 5": quick(tmp_path, training={"epochs": 5}, **both),
        r"~ model\.word_dim: 4 → 5\)": quick(
            tmp_path, model=TABLE["model"] | {"word_dim": 5}, **both
        ),
    }
    for difference, other_job in other_jobs.items():
        with pytest.raises(ConfigError, match=rf"a run of another job.*{difference}"):
            simulate(other_job, out, resume=True)
    record = out / "job.json"
    for command, shown in (
        ("", "`$"),
        ("fednotes simulate x", r"first command: .* x$"),
    ):
        kept = json.loads(record.read_text()) | {"command": command}
        record.write_text(json.dumps(kept))
        with pytest.raises(ConfigError, match=shown):
            simulate(quick(tmp_path, seed=3, **both), out, resume=True)
    record.write_bytes(before["job.json"])
    assert files(out) == before
    assert simulate(quick(tmp_path, **both), out, resume=True).seed == 2


def test_conditions_can_be_added_to_a_run(tmp_path: Path) -> None:
    """The models of the first call stay, and the result is that of one call."""
    out = tmp_path / "run"
    simulate(quick(tmp_path, conditions=["federated"]), out)
    weights = files(out / "federated", "*.safetensors")
    first = lines(out)
    both = quick(tmp_path, conditions=["alone", "federated"])
    result = simulate(both, out, resume=True)
    assert files(out / "federated", "*.safetensors") == weights
    assert [line for line in lines(out) if line["part"] == "federated"] == first
    in_one_call = simulate(both, tmp_path / "whole")
    assert result.sites == in_one_call.sites
    assert files(out, "*.safetensors") == files(tmp_path / "whole", "*.safetensors")
    assert simulate(both, out, resume=True).sites == result.sites


@pytest.mark.parametrize(
    ("before", "after"),
    [(["alone", "federated"], ["federated"]), (None, ["federated"])],
)
def test_no_condition_of_a_run_is_taken_away(
    tmp_path: Path, before: list[str] | None, after: list[str]
) -> None:
    out = tmp_path / "run"
    changes = {} if before is None else {"conditions": before}
    stop(quick(tmp_path, **changes), out, part=1)
    with pytest.raises(ConfigError, match="you may only add conditions"):
        simulate(quick(tmp_path, conditions=after), out, resume=True)


@pytest.mark.parametrize("part", [1, 2])
def test_a_run_is_not_resumed_with_other_notes_or_word_vectors(
    tmp_path: Path, part: int
) -> None:
    corpus(tmp_path / "a.conll", "DRUG", "asp")
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("took 1 2 3 4\nasp 4 3 2 1\n")
    model = {key: TABLE["model"][key] for key in TABLE["model"] if "word" not in key}
    of_files = job(
        tmp_path,
        conditions=["alone", "federated"],
        synthetic=None,
        sites={"a": {"path": "a.conll"}},
        model=model | {"word_vectors": "vectors.txt"},
    )
    out = tmp_path / "run"
    stop(of_files, out, part=part)

    vectors.write_text("took 1 2 3 4\nasp 4 3 2 2\n")
    with pytest.raises(
        ConfigError, match=r"given as model\.word_vectors .* has changed"
    ):
        simulate(of_files, out, resume=True)
    vectors.write_text("took 1 2 3 4\nasp 4 3 2 1\n")
    corpus(tmp_path / "a.conll", "DRUG", "tyl")
    with pytest.raises(ConfigError, match="the notes of site 'a' have changed"):
        simulate(of_files, out, resume=True)
    corpus(tmp_path / "a.conll", "DRUG", "asp")
    assert "federated" in simulate(of_files, out, resume=True).conditions


def test_resuming_without_an_earlier_run_warns_and_starts(tmp_path: Path) -> None:
    """A batch system may repeat one command, whenever the run was stopped."""
    out = tmp_path / "run"
    listener = StopsBefore()
    result = simulate(quick(tmp_path), out, resume=True, listener=listener)
    (warning,) = [text for text in listener.warnings if "resume" in text]
    assert warning.startswith(f"there is no run in {out} to resume, so training starts")
    assert warning in result.notes
    again = StopsBefore()
    result = simulate(quick(tmp_path), out, resume=True, listener=again)
    assert warning not in (*again.warnings, *result.notes)


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "auto"])
def test_emulated_bfloat16_is_warned_about(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    has_instructions: bool,
) -> None:
    """On a processor without instructions for it, a step takes several times as long."""
    monkeypatch.setattr(
        "fednotes.training.precision.has_bfloat16", lambda _: has_instructions
    )
    training = {"epochs": 1, "patience": 1, "precision": precision}
    job = quick(tmp_path, training=training)
    listener = StopsBefore(part=1)
    with pytest.raises(Stop):
        simulate(job, tmp_path / "run", listener=listener)
    is_slow = precision == "bfloat16" and not has_instructions
    assert any("no instructions" in text for text in listener.warnings) == is_slow


# refusals


def test_a_folder_with_other_files_is_left_unchanged(
    finished_run, tmp_path: Path
) -> None:
    """It may hold an earlier run, a run of another job, or no run at all."""
    out, _ = finished_run
    before = files(out)
    with pytest.raises(
        ConfigError, match="holds a run already: give another `out`, `resume`"
    ):
        simulate(job(out.parent), out)
    with pytest.raises(ConfigError, match="a run of another job"):
        simulate(job(out.parent, seed=3), out, resume=True)
    assert files(out) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("x")
    for place in (tmp_path / "mine", tmp_path / "mine" / "letter.txt"):
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(
                ConfigError, match="neither the folder of a run nor empty"
            ):
                simulate(job(tmp_path), place, **options)
    assert files(tmp_path) == {"mine/letter.txt": b"x"}


def quick(folder: Path, **changes: Any) -> Job:
    table = {
        "conditions": ["alone"],
        "synthetic": {"sites": 1, "sentences": 12},
        **changes,
    }
    return job(folder, **table)


def test_overwriting_keeps_the_earlier_run_in_another_folder(tmp_path: Path) -> None:
    out, previous = tmp_path / "run", tmp_path / "run.previous"
    simulate(quick(tmp_path), out)
    first = files(out)
    simulate(quick(tmp_path, seed=3), out, overwrite=True)
    assert files(previous) == first
    assert json.loads((out / "summary.json").read_text())["seed"] == 3
    second = files(out)
    (out / "summary.json").unlink()  # as if it had been killed
    simulate(quick(tmp_path, seed=4), out, overwrite=True)
    assert files(previous) == first != second
    simulate(quick(tmp_path, seed=5), out, overwrite=True)
    assert json.loads((previous / "summary.json").read_text())["seed"] == 4


def test_a_job_that_fails_at_once_leaves_its_folder_free(tmp_path: Path) -> None:
    """A missing file, then a missing model: the corrected job may use the same folder."""
    out = tmp_path / "run"
    bad = job(tmp_path, synthetic=None, sites={"a": {"path": "nothing"}})
    with pytest.raises(DataError):
        simulate(bad, out)
    assert not out.exists()
    with pytest.raises(FednotesError):
        simulate(quick(tmp_path, model={"word_vectors": "/no/vectors.txt"}), out)
    assert simulate(quick(tmp_path), out).seed == 2
    before = files(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        simulate(bad, out, overwrite=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_record_of_a_job_is_refused(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    simulate(quick(tmp_path), out)
    (out / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run"):
        simulate(quick(tmp_path), out, resume=True)


# pooled


def site(
    folder: Path, name: str, labels: tuple[str, str], first: int
) -> dict[str, Any]:
    """Write CoNLL files of sentences `Case <i> took <drug> and had <finding> .`"""
    drugs, findings = (
        "aspirin statin insulin".split(),
        "rash nausea cough fever".split(),
    )
    for part, start, number in (("train", 0, 24), ("valid", 24, 8), ("test", 32, 8)):
        rows = []
        for i in range(first + start, first + start + number):
            words = f"Case {i} took {drugs[i % 3]} and had {findings[i % 4]} .".split()
            tags = ["O", "O", "O", f"B-{labels[0]}", "O", "O", f"B-{labels[1]}", "O"]
            rows += [f"{word} {tag}" for word, tag in zip(words, tags, strict=True)] + [
                ""
            ]
        (folder / f"{name}-{part}").write_text("\n".join(rows) + "\n")
    return {part: f"{name}-{part}" for part in ("train", "valid", "test")}


def tag_sets(out: Path) -> dict[str, list[str]]:
    model_files = out.glob("pooled/sites/*/model/tagger.json")
    return {
        p.parts[-3]: json.loads(p.read_text())["tagset"]["types"] for p in model_files
    }


def two_sites(
    folder: Path, drug: str, finding: str = "ADE", **second_settings: Any
) -> dict[str, Any]:
    """Return a job's sites, of which the second one has these labels."""
    second = site(folder, "b", (drug, finding), 50) | second_settings
    return {
        "synthetic": None,
        "sites": {"a": site(folder, "a", ("Drug", "ADE"), 0), "b": second},
    }


def test_equal_tag_sets_are_pooled_into_one_model(tmp_path: Path) -> None:
    pooled_job = job(tmp_path, **two_sites(tmp_path, "Drug"), conditions=["pooled"])
    summary = simulate(pooled_job, tmp_path / "run")
    assert tag_sets(tmp_path / "run") == {"pooled": ["ADE", "Drug"]}
    assert set(summary.sites) == {"a", "b"}
    assert all(s["pooled"]["support"] == 16 for s in summary.sites.values())


def test_different_tag_sets_are_pooled_with_a_head_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last checkpoint, which is kept here, only the CRF is private."""
    monkeypatch.setattr("fednotes.jobs.simulate.shutil.rmtree", lambda *_, **__: None)
    pooled_job = job(tmp_path, **two_sites(tmp_path, "Chemical"), conditions=["pooled"])
    simulate(pooled_job, tmp_path / "run")
    assert tag_sets(tmp_path / "run") == {
        "a": ["ADE", "Drug"],
        "b": ["ADE", "Chemical"],
    }
    last = max((tmp_path / "run" / "pooled" / "checkpoints").glob("round-*"))
    names = load_file(last / "tensors.safetensors")
    shared = {
        n.removeprefix("server/shared.").split(".")[0] for n in names if "/shared." in n
    }
    private = {n.split("private.")[1].split(".")[0] for n in names if "/private." in n}
    assert (shared, private) == ({"words", "characters", "cnn", "lstm"}, {"crf"})


def test_sites_without_a_common_type_train(tmp_path: Path) -> None:
    tables = two_sites(tmp_path, "Chemical", "Disease", scheme="BIOES")
    summary = simulate(job(tmp_path, **tables), tmp_path / "run")
    assert set(summary.mean) == {"alone", "federated", "pooled"}


@pytest.mark.parametrize("number", [1, 2])
def test_generated_pooled_data_have_types_that_no_site_annotates(
    tmp_path: Path, number: int
) -> None:
    generated_job = job(
        tmp_path, synthetic={"sites": number, "sentences": 20}, conditions=["pooled"],
        training={"epochs": 1},
    )  # fmt: skip
    summary = simulate(generated_job, tmp_path / "run")
    for name, scores in summary.sites.items():
        model_types = load_model(
            tmp_path / "run" / "pooled/sites/pooled/model"
        ).tagset.types
        assert set(scores["pooled"]["by_type"]) < set(model_types), name


def test_a_site_without_held_out_data_is_trained(tmp_path: Path) -> None:
    table = site(tmp_path, "a", ("Drug", "ADE"), 0)
    sites = {"a": {"path": table["train"], "valid_fraction": 0, "test_fraction": 0}}
    summary = simulate(
        job(tmp_path, synthetic=None, sites=sites, conditions=["federated"]),
        tmp_path / "run",
    )
    assert summary.sites["a"]["federated"]["support"] == 0
    assert summary.valid["federated"] == {"mean": None, "sites": {"a": None}}
