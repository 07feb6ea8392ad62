"""The Python API: jobs, runs and corpora give the same results as the commands."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import DOCUMENTS, LABELS, WORDS, make
from tiny_jobs import TABLE, corpus
from typer.testing import CliRunner

import fednotes as fn
from fednotes.cli.app import app
from fednotes.core.errors import ConfigError, DataError, FednotesError, MissingExtra
from fednotes.core.types import Span
from fednotes.data.formats import jsonl
from fednotes.taggers.saving import save_model

pytestmark = pytest.mark.usefixtures("few_sentences")

ROUNDS: list[tuple[str, int]] = []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fn.RunResult]:
    folder = tmp_path_factory.mktemp("api")
    table = TABLE | {"conditions": ["alone", "federated"], "synthetic": {"sites": 2}}
    job = fn.job(table, seed=5, synthetic={"sentences": 30}, training={"epochs": 1})
    note_round = lambda part, result: ROUNDS.append((part, result.round))  # noqa: E731
    result = fn.simulate(job, folder / "run", progress=note_round)
    return folder, result


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that learnt six notes by heart, and 60 others of which a third of the
    mentions is not annotated: it is too sure of itself."""
    folder = tmp_path_factory.mktemp("sure")
    model = make("tagger", folder, stirred=False, dropout=0.0)
    notes = model.prepare(DOCUMENTS)
    adam = torch.optim.Adam(model.trainable().values(), lr=0.02)
    for _ in range(150):
        adam.zero_grad()
        model.losses(notes, range(len(DOCUMENTS))).source.mean().backward()
        adam.step()
    save_model(model.eval(), folder / "model")
    rng, documents = np.random.default_rng(2), []
    for number in range(60):
        words = rng.choice(WORDS[:5], 8).tolist()
        ends = np.cumsum([len(word) + 1 for word in words])
        spans = [
            Span(int(e) - 1 - len(w), int(e) - 1, LABELS[w])
            for w, e in zip(words, ends, strict=True)
            if w in LABELS and rng.random() < 0.67
        ]
        documents.append(fn.Document(str(number), " ".join(words), tuple(spans)))
    jsonl.write(documents, folder / "notes.jsonl")
    return folder / "model", folder / "notes.jsonl"


def test_a_job_is_the_same_from_a_table_a_file_and_keywords(tmp_path: Path) -> None:
    """All three are one; what is wrong is told by its key."""
    lines = [
        'method = "fedner"',
        "seed = 4",
        "[synthetic]",
        "sites = 2",
        "[training]",
        "epochs = 3",
    ]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    job = fn.job(tmp_path / "own.toml")
    tables: Any = {"synthetic": {"sites": 2}, "training": {"epochs": 3}}
    of_keywords = fn.job(method="fedner", seed=4, **tables)
    assert isinstance(job, fn.Job)
    assert (
        job.table
        == of_keywords.table
        == fn.job({"method": "fedner", "seed": 4}, **tables).table
    )
    assert job.config == of_keywords.config
    assert fn.job("demo", seed=9).seed == 9
    assert fn.job(tmp_path / "own.toml", training={"batch_size": 7}).table[
        "training"
    ] == {
        "epochs": 3,
        "batch_size": 7,
    }
    sites = {"a": {"path": tmp_path / "a.conll"}}
    assert (
        fn.job(method="fedner", sites=sites)
        .table["sites"]["a"]["path"]
        .endswith("a.conll")
    )
    for wrong, message in (
        ({"trainig": {}}, "did you mean 'training'"),
        ({"training": {"epoch": 3}}, "'epochs'"),
        ({"title": {3}}, "a job cannot hold a value of type set"),
    ):
        with pytest.raises(ConfigError, match=message):
            fn.job(method="fedner", **wrong, synthetic={})
    with pytest.raises(ConfigError, match="no such job file"):
        fn.job("demoo")


def test_the_result_table_of_a_run_equals_its_summary(
    run: tuple[Path, fn.RunResult],
) -> None:
    """The table has what the summary has; in a notebook whatever a name says is text."""
    folder, result = run
    assert {part for part, _ in ROUNDS} == {
        "alone/discharge",
        "alone/reports",
        "federated",
    }
    summary = json.loads((folder / "run" / "summary.json").read_text())
    rows = {(row["site"], row["condition"]): row for row in result.table()}
    assert len(rows) == 2 * 3
    for (site, condition), row in rows.items():
        place = summary["mean"] if site == "mean" else summary["sites"][site]
        assert row["strict_f1"] == place[condition]["strict"]["f1"]
        assert row["relaxed_recall"] == place[condition]["relaxed"]["recall"]
    page = result._repr_html_()
    assert f"<td>{rows['mean', 'federated']['strict_f1']:.3f}</td>" in page
    hostile_names = fn.RunResult(title="<script>&", sites={"<b>\x1b[1m": {"alone": {}}})
    assert "<script>" not in hostile_names._repr_html_()
    assert "<b>" not in hostile_names._repr_html_()
    assert "\x1b" not in hostile_names._repr_html_()
    assert fn.RunResult().table() == []
    assert "<table>" in fn.RunResult()._repr_html_()


def test_a_run_converts_to_a_pandas_frame(
    run: tuple[Path, fn.RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    frame = run[1].to_pandas()
    assert frame.shape[0] == 6
    assert (
        frame.set_index(["site", "condition"]).loc[("mean", "alone"), "strict_f1"]
        == (run[1].mean["alone"]["strict"]["f1"])
    )
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[pandas\]"):
        run[1].to_pandas()


def test_scores_equal_those_of_the_commands(sure: tuple[Path, Path]) -> None:
    """Of the same model on the same notes."""
    place, notes = sure
    model = fn.load(place)
    assert isinstance(model, fn.MentionModel)
    evaluation = fn.evaluate(model, notes)
    command = CliRunner().invoke(app, ["evaluate", str(place), str(notes), "--json"])
    assert json.loads(command.stdout) == json.loads(json.dumps(evaluation.to_dict()))
    assert 0.6 < evaluation.scores["strict"]["precision"] < 0.75
    assert fn.evaluate(model, fn.read(notes)) == evaluation
    assert fn.evaluate(sure[0], notes) == evaluation
    with pytest.raises(ConfigError, match="expected a model's folder, not NoneType"):
        fn.evaluate(None, notes)
    assert repr(model) == f"<MentionModel tagger: {[*model.types]}>"
    with pytest.raises(ConfigError, match="finds mentions"):
        fn.evaluate(model, notes, labels="labels.csv")
    with pytest.raises(DataError, match=r"^nowhere: no such file or folder$"):
        fn.evaluate(model, "nowhere")
    with pytest.raises(DataError, match="rename labels with `label_map`"):
        fn.evaluate(model, [replace(d, spans=()) for d in fn.read(notes)])


def test_an_opened_model_is_accepted_in_place_of_its_folder(
    sure: tuple[Path, Path],
) -> None:
    """Wherever a model is named; what is neither is refused, no number too."""
    place, notes = sure
    model = fn.load(place)
    assert isinstance(model, fn.MentionModel)
    with pytest.raises(DataError, match="5 are needed"):
        fn.calibrate(model, fn.read(notes)[:2])
    for wrong in (None, fn.MentionModel(model.model)):
        with pytest.raises(
            ConfigError, match=f"expected .*, not {type(wrong).__name__}$"
        ):
            fn.calibrate(wrong, notes)  # type: ignore[arg-type]
    for threshold in ("a", None, [0.5]):
        with pytest.raises(ConfigError, match="expected a number from 0 to 1"):
            model("No pain.", threshold=threshold)  # type: ignore[arg-type]
    assert model("No pain.", threshold=np.float32(1)).spans == ()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an integer of at least 1"):
        model.stream(["No pain."], batch="x")  # type: ignore[arg-type]


def test_a_value_of_another_type_than_a_path_is_refused_in_one_line(
    sure: tuple[Path, Path],
) -> None:
    calls: list[tuple[Any, ...]] = [
        (fn.read, None),
        (fn.job, 5),
        (fn.simulate, "demo", None),
    ]
    calls += [(fn.compare, None), (fn.write_report, None)]
    calls += [(fn.convert, None, "out", "jsonl"), (fn.convert, "in", None, "jsonl")]
    for call, *arguments in [*calls, (fn.evaluate, sure[0], 5)]:
        with pytest.raises(
            FednotesError, match=r"^expected (a|annotated) .*, not (int|NoneType)"
        ):
            call(*arguments)


def test_an_unknown_value_is_refused_in_one_line(
    sure: tuple[Path, Path],
) -> None:
    place, notes = sure
    wrong_kind: Any = 5
    with pytest.raises(ConfigError, match="expected a corpus to compare with, not int"):
        fn.check(notes, against=wrong_kind)
    with pytest.raises(ConfigError, match="unknown format 5: known: aci-bench, ade, "):
        fn.read(notes, format=wrong_kind)
    with pytest.raises(
        ConfigError, match="expected a table of labels and new names, not int"
    ):
        fn.evaluate(place, notes, label_map=wrong_kind)
    for call in (fn.read, fn.check, lambda *a, **o: fn.evaluate(place, *a, **o)):
        with pytest.raises(
            ConfigError, match=r"on_error = 'skipp': did you mean 'skip'\?"
        ):
            call(notes, on_error="skipp")


def test_runs_are_compared(run: tuple[Path, fn.RunResult]) -> None:
    """A run's conditions, as the command's default is."""
    folder, _ = run
    compared = fn.compare(folder / "run", samples=20)
    assert set(compared.tests) == {"discharge", "reports"}
    assert (compared.condition, compared.against) == ("federated", "alone")


def test_a_run_has_a_report_page_and_model_cards(
    run: tuple[Path, fn.RunResult], tmp_path: Path
) -> None:
    """A simulation leaves a card beside each model; the page is written where one says.
    A room that is called stays a room."""
    import fednotes.report.html

    place = run[0] / "run"
    assert len([*place.rglob("model/README.md")]) == 4
    page = fn.write_report(str(place), tmp_path / "page.html")
    assert page.read_text() == fn.write_report(place).read_text()
    assert fn.write_report(place) == place / "report.html"
    command = CliRunner().invoke(app, ["report", str(place)])
    assert command.stdout == f"report: {place / 'report.html'}\n"
    assert fednotes.report.html.write_report(place) == place / "report.html"


def test_an_unavailable_device_is_refused_by_name(
    run: tuple[Path, fn.RunResult], tmp_path: Path
) -> None:
    model = run[0] / "run" / "federated" / "sites" / "reports" / "model"
    calls: list[Any] = [
        lambda: fn.load(model, "gpu"),
        lambda: fn.simulate("demo", tmp_path / "out", device="gpu"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="device 'gpu' is not available here"):
            call()
    assert not (tmp_path / "out").exists()


def test_a_model_can_be_calibrated_with_the_users_own_notes(
    sure: tuple[Path, Path], tmp_path: Path
) -> None:
    """Kept, used by `load` and by `predict`, and said; the order of spans stays."""
    place, notes = sure
    raw = fn.load(place)
    assert isinstance(raw, fn.MentionModel)
    runner = CliRunner()
    call = ["calibrate", str(place), str(notes), "--plot"]
    refused = runner.invoke(app, [*call, "a.gif"])
    assert (
        str(refused.exception)
        == "a.gif: unsupported kind of picture: use a name that ends in .png, .svg, .pdf"
    )
    assert not (place / "calibration.json").exists()
    command = runner.invoke(app, [*call, str(tmp_path / "a.svg")])
    assert command.exit_code == 0, command.output
    assert (tmp_path / "a.svg").read_text().count("ECE") == 2
    assert "after, by cross-validation" in command.stdout
    assert "calibration.json" in command.stdout.replace("\n", "")
    model = fn.load(place)
    assert isinstance(model, fn.MentionModel)
    assert model.calibration is not None
    assert "calibrated on" in model.confidence
    before, after = fn.reliability(raw, notes), fn.reliability(model, notes)
    assert after.ece < 0.1 < 0.2 < before.ece
    assert after.log_loss < before.log_loss
    texts = [d.text for d in fn.read(notes)[:30]]
    raw_confidences = np.array([s.confidence for d in raw(texts) for s in d.spans])
    calibrated_confidences = np.array(
        [s.confidence for d in model(texts) for s in d.spans]
    )
    order = np.argsort(raw_confidences, kind="stable")
    assert (np.diff(calibrated_confidences[order]) >= 0).all()
    assert (calibrated_confidences[raw_confidences > 0.9] < 0.9).all()
    prediction = runner.invoke(app, ["predict", str(place), "--text", texts[0]])
    assert [
        s["confidence"] for s in json.loads(prediction.stdout)["spans"]
    ] == pytest.approx([s.confidence for s in model(texts[0]).spans], abs=1e-6)
    check = runner.invoke(
        app, ["calibrate", str(place), str(notes), "--report-only", "--json"]
    )
    assert json.loads(check.stdout)["ece"] == pytest.approx(after.ece)
    again = fn.calibrate(place, notes)
    assert again.before == before
    assert again.calibration == model.calibration
    assert fn.calibrate(place, fn.read(notes)) == again
    assert fn.reliability(place, notes) == after
    with pytest.raises(DataError, match="expected annotated Documents, not str"):
        fn.reliability(place, texts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no label 'Sign'"):
        fn.calibrate(place, notes, label_map={"Sign": "ADR"})
    with pytest.raises(DataError, match="5 are needed"):
        fn.calibrate(place, fn.read(notes)[:3])


def test_functions_that_read_convert_and_check_accept_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus(tmp_path / "a.conll", "ADR", "pain")
    (tmp_path / "note.txt").write_text("No pain.")
    documents = fn.read(tmp_path / "a.conll")
    conversion = fn.convert(tmp_path / "a.conll", tmp_path / "a.xml", "bioc")
    assert (conversion.documents, conversion.lost, conversion.problems.number) == (
        len(documents),
        {},
        0,
    )
    assert fn.read(tmp_path / "a.xml", "bioc") == documents
    with pytest.raises(fn.FednotesError, match="already exists"):
        fn.convert(tmp_path / "a.conll", tmp_path / "a.xml", "bioc")
    assert fn.read(tmp_path / "a.conll", "conll") == documents
    assert [d.text for d in fn.read(tmp_path / "note.txt")] == ["No pain."]
    assert fn.check(tmp_path / "a.conll").wrong == ()
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert str(fn.check(tmp_path / "bad.jsonl").wrong[0]).startswith(
        f"{tmp_path}/bad.jsonl:2"
    )
    with pytest.raises(DataError, match=r"bad.jsonl:2"):
        fn.read(tmp_path / "bad.jsonl")
    assert len(fn.read(tmp_path / "bad.jsonl", on_error="skip")) == 1
    assert fn.check("demo", settings=["synthetic.sentences=20"]).job is not None
    monkeypatch.chdir(tmp_path)
    for targets, message in (
        ((), "give a corpus"),
        (("demo", "a.conll"), "is a job: check it alone"),
        (("nowhere",), "no such file"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            fn.check(*targets)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("compare", (None,), "a run's folder, not NoneType"),
        ("compare", (5, "run"), "a run's folder, not int"),
        ("evaluate", (None, "notes"), "a model's folder, not NoneType"),
        ("calibrate", (None, "notes"), "a model's folder, not NoneType"),
        ("reliability", (None, "notes"), "a model's folder, not NoneType"),
        ("load", (None,), "a model's folder, not NoneType"),
        ("read", (None,), "a file or folder of notes, not NoneType"),
        ("convert", (None, "out", "brat"), "a corpus, not NoneType"),
        ("convert", ("notes", 5, "brat"), "a path to write, not int"),
        ("write_report", (None,), "a run's folder, not NoneType"),
        ("job", (5,), "a job's file, name or table, not int"),
        ("check", (None,), "a corpus or a job, not NoneType"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_expected(
    name: str, arguments: tuple[Any, ...], expected: str
) -> None:
    with pytest.raises(fn.FednotesError, match=f"expected {expected}"):
        getattr(fn, name)(*arguments)
