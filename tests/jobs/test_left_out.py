"""The condition "left-out": models at a site that took no part in their training."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from tiny_jobs import TAGGER
from tiny_models import save_bert
from worker_runs import check_same_files, read_run

from fednotes.cli.display import make_result_tables, make_seeds_tables
from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.jobs import left_out
from fednotes.jobs.compare import compare
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.job import Job
from fednotes.jobs.job_check import check_job
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.left_out import (
    LeftOutSite,
    TrainedModel,
    TrainedModels,
    choose_best,
    count_votes,
)
from fednotes.jobs.parts import prepare
from fednotes.jobs.results import RunResult
from fednotes.jobs.seeds import summarise_runs
from fednotes.jobs.simulate import simulate
from fednotes.jobs.workers import pool
from fednotes.report.html import write_report
from fednotes.taggers.corpora import PreparedCorpus

NAMES = ("north", "south", "west")
DRUGS = ("zolvex", "mirtal", "pexor")
PARTS = ("train", "valid", "test")
NUMBERS = {"train": range(40), "valid": range(40, 52), "test": range(52, 72)}


def write_site(folder: Path, name: str, label: str = "Drug", drug: str = "") -> None:
    """Write the files of a site, whose mentions follow "took", but not "saw".

    Args:
        folder: Folder of the files.
        name: The site.
        label: The type of its mentions.
        drug: The start of its drugs' names; that of the site if empty.
    """
    start = drug or DRUGS[NAMES.index(name)]
    for part in PARTS:
        sentences = [
            f"Case O\n{n} O\ntook O\n{start}{n % 7} B-{label}\n. O\n\n"
            if n % 3
            else f"Case O\n{n} O\nsaw O\n{start}{n % 7} O\n. O\n\n"
            for n in NUMBERS[part]
        ]
        (folder / f"{name}-{part}.conll").write_text("".join(sentences))


def make_job(folder: Path, **changes: Any) -> Job:
    """Return a job of three sites, whose files are in a folder."""
    sites = {
        name: {part: f"{name}-{part}.conll" for part in PARTS}
        | {"public": "north-train.conll"}
        for name in NAMES
    }
    table = {
        "method": "fedner",
        "seed": 2,
        "conditions": ["federated", "left-out"],
        "training": {
            "epochs": 4,
            "batch_size": 12,
            "learning_rate": 0.02,
            "personal_epochs": 0,
        },
        "model": TAGGER,
        "left_out": {"sentences": [4, 10, 500], "steps": 12},
        "sites": sites,
        **changes,
    }
    return parse_job(table, "tiny", folder, "tiny.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of three sites."""
    place = tmp_path_factory.mktemp("sites")
    for name in NAMES:
        write_site(place, name)
    return place


@pytest.fixture(scope="module")
def finished_run(folder: Path) -> tuple[Path, RunResult]:
    """Return a finished run and its result."""
    result = simulate(make_job(folder), folder / "run")
    return folder / "run", result


def read_models(run: Path, *sites: str) -> dict[str, Any]:
    """Return the files of models that are trained while one of these is left out."""
    return {
        place: content
        for place, content in read_run(run).items()
        if place.endswith(".safetensors")
        and any(place.startswith(f"left-out/{site}/") for site in sites)
    }


# ---- what is trained, and on what ----------------------------------------------------


def test_each_site_in_turn_is_left_out_of_a_federation_of_the_others(folder) -> None:
    _, _, parts = prepare(make_job(folder))
    trained = {
        part.name: [site.id for site in part.sites] for part in parts if part.training
    }
    assert trained == {
        "left-out/north/federated": ["south", "west"],
        "left-out/north/pooled": ["pooled"],
        "left-out/south/federated": ["north", "west"],
        "left-out/south/pooled": ["pooled"],
        "left-out/west/federated": ["north", "south"],
        "left-out/west/pooled": ["pooled"],
    }
    for part in parts:
        if part.training == "pooled":
            texts = "".join(note.text for site in part.sites for note in site.train)
            for name, drug in zip(NAMES, DRUGS, strict=True):
                assert (drug in texts) == (name != part.site)


def test_no_word_of_a_left_out_site_changes_what_the_others_train(
    tmp_path: Path, finished_run
) -> None:
    run, _ = finished_run
    for name in NAMES:
        write_site(tmp_path, name, drug="planted" if name == "west" else "")
    simulate(make_job(tmp_path), tmp_path / "run")
    models = read_models(run, "west")
    assert models
    assert models == read_models(tmp_path / "run", "west")
    # As a check of this test: the word changes what is trained with the site.
    assert read_models(run, "north") != read_models(tmp_path / "run", "north")


@pytest.mark.slow
def test_own_sentences_are_training_sentences_of_the_left_out_site(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, list[str]]] = []
    train = left_out.train_on_few_sentences

    def record(
        model: Any, corpus: PreparedCorpus, *, site: str, **settings: Any
    ) -> None:
        read.append((site, [note.text for note in corpus.encoded.documents]))
        train(model, corpus, site=site, **settings)

    monkeypatch.setattr(left_out, "train_on_few_sentences", record)
    result = simulate(make_job(folder), tmp_path / "run")
    sites, _, _ = prepare(make_job(folder))
    texts = {
        site.id: {text for note in site.train for text in note.text.split("\n")}
        for site in sites.data
    }
    assert [(site, len(own)) for site, own in read] == [
        (site, number) for site in NAMES for number in (4, 4, 10, 10)
    ]
    for site, own in read:
        assert {text.strip() for text in own} <= {each.strip() for each in texts[site]}
    # The fine-tuned model and the new one read the same, and more contains less.
    for start in range(0, len(read), 4):
        few, same_few, more, same_more = (
            set(own) for _, own in read[start : start + 4]
        )
        assert few == same_few < more == same_more
    assert any(
        "west has only 40 training sentences: no model is trained on 500" in note
        for note in result.notes
    )


@pytest.mark.slow
def test_gold_mentions_of_test_data_change_only_scores(
    folder: Path, tmp_path: Path, finished_run
) -> None:
    run, _ = finished_run
    for name in NAMES:
        write_site(tmp_path, name)
    test = tmp_path / "west-test.conll"
    test.write_text(test.read_text().replace(" O\n.", " B-Drug\n.", 5))
    simulate(make_job(tmp_path), tmp_path / "run")
    assert read_models(run, *NAMES) == read_models(tmp_path / "run", *NAMES)


def test_the_best_model_is_chosen_by_its_own_sites_validation_data() -> None:
    drug = frozenset({"Drug"})
    models = [
        TrainedModel(Path("a"), drug, 0.4),
        TrainedModel(Path("b"), drug, None),
        TrainedModel(Path("c"), drug, 0.6),
        TrainedModel(Path("d"), drug, 0.6),
    ]
    assert choose_best(models).folder == Path("c")


# ---- the scores ----------------------------------------------------------------------


def note(*spans: tuple[int, int, str]) -> Document:
    """Return a document with mentions."""
    return Document("1", "abcdefghij", tuple(Span(*span) for span in spans))


def test_a_mention_is_kept_if_most_models_that_know_its_type_find_it() -> None:
    votes = [
        [note((0, 2, "Drug"), (3, 5, "Drug"), (6, 7, "Dose"))],
        [note((0, 2, "Drug"), (3, 6, "Drug"))],
        [note((0, 2, "Drug"), (3, 5, "Drug"))],
        [note((0, 1, "Drug"))],
    ]
    types = [{"Drug", "Dose"}, {"Drug"}, {"Drug"}, {"Drug"}]
    # Drug: three of four find 0–2, two of four find 3–5. Dose: the only vote.
    (elected,) = count_votes(votes, types)
    assert [(s.start, s.end, s.label) for s in elected.spans] == [
        (0, 2, "Drug"),
        (6, 7, "Dose"),
    ]


def site_data(name: str, *types: str) -> SiteData:
    """Return a site with one test document of two drugs, a dose and a test."""
    gold = note((0, 2, "Drug"), (3, 5, "Drug"), (6, 7, "Dose"), (8, 9, "Test"))
    return SiteData(name, TagSet(types), (gold,), (), (gold,))


def test_scores_at_a_left_out_site_equal_those_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "a": note((0, 2, "Drug")),  # P 1, R 1/2: F1 2/3, of the type Drug alone
        "b": note((0, 2, "Drug"), (3, 5, "Drug"), (6, 8, "Dose")),  # 2 of 3: F1 2/3
        "c": note((3, 5, "Drug"), (6, 7, "Dose")),  # P 1, R 2/3: F1 4/5
        "joint": note((0, 2, "Drug"), (3, 5, "Drug"), (6, 7, "Dose")),  # F1 1
        "together": note((0, 1, "Drug")),  # F1 0
    }
    monkeypatch.setattr(
        left_out, "_predict", lambda model, *_: (found[model.folder.name],)
    )
    both = frozenset({"Drug", "Dose"})
    trained = TrainedModels(
        alone=[
            TrainedModel(Path("a"), frozenset({"Drug"}), 0.9),
            TrainedModel(Path("b"), both, 0.3),
            TrainedModel(Path("c"), both, 0.5),
            TrainedModel(Path("d"), frozenset({"Age"}), 1.0),  # knows nothing here
        ],
        federated=[TrainedModel(Path("joint"), both)],
        pooled=[TrainedModel(Path("together"), both)],
        own=[TrainedModel(Path("joint"), both | {"Test"})],
    )
    job = make_job(folder, left_out={"sentences": []})
    site = site_data("z", "Drug", "Dose", "Test")
    others = [site_data("b", "Drug", "Dose"), site_data("d", "Age")]
    outcome = LeftOutSite(job, site, others).score(trained)
    f1 = {name: each["strict"]["f1"] for name, each in outcome.models.items()}
    assert f1 == {
        "alone, mean": pytest.approx((2 / 3 + 2 / 3 + 4 / 5) / 3),
        "alone, best": pytest.approx(2 / 3),
        # Drug: two of three find each. Dose: one of two finds each, so none is kept.
        "alone, votes": pytest.approx(4 / 5),
        "federated": 1.0,
        "pooled": 0.0,
        "own model": 1.0,
    }
    assert outcome.types == ["Drug", "Dose"]  # no other site annotates Test
    types = {name: each["types"] for name, each in outcome.models.items()}
    assert types["alone, mean"] == types["alone, best"] == 1
    assert types["alone, votes"] == types["federated"] == 2
    assert outcome.scores["z"]["strict"]["f1"] == 1.0


def score_federation(job: Job, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a left-out site's scores of a model of sites that know one of two drugs."""
    found = note((0, 2, "Drug"), (3, 5, "Drug"))
    monkeypatch.setattr(left_out, "_predict", lambda *_: (found,))
    model = TrainedModel(Path("model"), frozenset({"Drug"}))
    trained = TrainedModels([model], [model], [model], [model])
    known = note((0, 2, "Drug"))
    other = SiteData("other", TagSet(("Drug",)), (known,), (), (known,))
    site = site_data("z", "Drug")
    return LeftOutSite(job, site, [other]).score(trained).scores["z"]


def test_forms_that_the_other_sites_lack_are_unseen_at_a_left_out_site(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(folder, left_out={"sentences": []})
    scores = score_federation(job, monkeypatch)
    # Its own training data have both drugs.
    assert scores["unseen"] == {"precision": 1, "recall": 1, "f1": 1, "support": 1}


def test_unseen_forms_are_not_scored_at_a_left_out_site_with_differential_privacy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(folder, left_out={"sentences": []}, privacy={"epsilon": 8.0})
    scores = score_federation(job, monkeypatch)
    assert "strict" in scores
    assert "unseen" not in scores


def test_the_condition_has_the_scores_of_the_federation_of_the_others(
    finished_run,
) -> None:
    _, result = finished_run
    for site in NAMES:
        models = result.left_out[site]
        assert list(models) == [
            "alone, mean",
            "alone, best",
            "alone, votes",
            "federated",
            "pooled",
            "fine-tuned on 4",
            "from scratch on 4",
            "fine-tuned on 10",
            "from scratch on 10",
            "own model",
        ]
        assert models["own model"]["strict"] == result.sites[site]["alone"]["strict"]
        scores = result.sites[site]
        assert list(scores) == ["alone", "federated", "left-out"]
        assert scores["left-out"]["strict"] == models["federated"]["strict"]
        assert scores["federated"] != scores["left-out"]
    f1 = [result.left_out[site]["federated"]["strict"]["f1"] for site in NAMES]
    assert result.left_out_mean["federated"]["strict"]["f1"] == pytest.approx(mean(f1))
    assert result.mean["left-out"]["strict"]["f1"] == pytest.approx(mean(f1))
    assert set(result.valid["left-out"]["sites"]) == set()


def test_the_models_vote_alike_when_runs_are_compared(finished_run) -> None:
    run, result = finished_run
    compared = compare(run, condition="federated", against="left-out", samples=20)
    for site in NAMES:
        test = compared.tests[site]
        assert test.f1_a == result.sites[site]["federated"]["strict"]["f1"]
        assert test.f1_b == result.sites[site]["left-out"]["strict"]["f1"]


@pytest.mark.slow
def test_a_site_without_a_shared_type_is_not_left_out(tmp_path: Path) -> None:
    for name in NAMES:
        write_site(tmp_path, name, "Gene" if name == "west" else "Drug")
    job = make_job(tmp_path, left_out={"sentences": []})
    result = simulate(job, tmp_path / "run")
    assert list(result.left_out) == ["north", "south"]
    assert "left-out" not in result.sites["west"]
    assert "left-out" in result.mean
    note = "west is not left out: no other site annotates one of its types"
    assert note in result.notes
    # The other site without the type has a model that cannot find it.
    models = result.left_out["north"]
    assert models["alone, mean"]["strict"] == models["alone, best"]["strict"]


# ---- runs ----------------------------------------------------------------------------


class _StoppedError(Exception):
    """Stops a run as a kill would."""


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_result_of_an_uninterrupted_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished_run
) -> None:
    run, _ = finished_run
    train = left_out.train_on_few_sentences
    calls: list[str] = []

    def stop(*arguments: Any, site: str, **settings: Any) -> None:
        calls.append(site)
        if len(calls) == 6:  # at the second site, after two of its models
            raise _StoppedError
        train(*arguments, site=site, **settings)

    monkeypatch.setattr(left_out, "train_on_few_sentences", stop)
    job = make_job(folder)
    with pytest.raises(_StoppedError):
        simulate(job, tmp_path / "run")
    assert (tmp_path / "run" / "left-out" / "north" / "done.json").exists()
    assert not (tmp_path / "run" / "left-out" / "south" / "done.json").exists()
    calls[:] = ["none"] * 6
    simulate(job, tmp_path / "run", resume=True)
    assert calls[6:] == ["south"] * 4 + ["west"] * 4
    assert read_run(tmp_path / "run") == read_run(run)


@pytest.mark.slow
def test_a_finished_run_can_add_the_condition(folder: Path, tmp_path: Path) -> None:
    few = {"sentences": []}
    job = make_job(folder, conditions=["alone", "federated"], left_out=few)
    simulate(job, tmp_path / "run")
    conditions = ["alone", "federated", "left-out"]
    more = make_job(folder, conditions=conditions, left_out=few)
    result = simulate(more, tmp_path / "run", resume=True)
    assert list(result.left_out) == list(NAMES)


@pytest.mark.slow
def test_files_are_the_same_with_any_number_of_workers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "count_cores", lambda: 8)
    check_same_files(make_job(folder), tmp_path)


def test_seeds_have_means_and_deviations_of_each_model(finished_run) -> None:
    _, result = finished_run
    other = result.model_copy(update={"seed": 3})
    summary = summarise_runs([result, other])
    f1 = result.left_out["west"]["pooled"]["strict"]["f1"]
    assert summary.left_out["west"]["pooled"]["strict"]["f1"] == {
        "mean": f1,
        "std": 0.0,
        "n": 2,
    }
    table = make_seeds_tables(summary)[-1]
    assert list(table.columns[0].cells)[:3] == list(result.left_out["west"])[:3]
    assert list(table.columns[3].cells)[4] == f"{100 * f1:.1f} ± 0.0"


def test_the_terminal_and_the_report_show_the_models_at_left_out_sites(
    finished_run,
) -> None:
    run, result = finished_run
    table = make_result_tables(result)[-1]
    assert [column.header for column in table.columns][1:] == [*NAMES, "mean"] or [
        str(column.header) for column in table.columns
    ][1:] == [*NAMES, "mean"]
    assert "types that are scored: north: Drug" in str(table.caption)
    write_report(run)
    page = (run / "report.html").read_text()
    assert "At a site that took no part" in page
    assert "fine-tuned on 10" in page
    assert "left-out/west" not in (run / "metrics.jsonl").read_text()


BERT_MODEL = {"train": "lora", "rank": 2}
METHODS: dict[str, dict[str, Any]] = {
    "distill": {
        "model": TAGGER,
        "training": {"rounds": 1, "weighting": False, "unannotated": "marginal"},
    },
    "adversarial": {
        "model": TAGGER,
        "training": {"rounds": 1, "unannotated": "outside"},
    },
    "finetune": {"training": {"cycles": 1}},
    "personal": {"training": {"cycles": 1}},
    "fedmd": {
        "model": TAGGER,
        "training": {"rounds": 1, "first_epochs": 1, "local_epochs": 1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sites_can_be_left_out_with_every_method_for_mentions(
    method: str, folder: Path, tmp_path: Path
) -> None:
    tables = METHODS[method]
    if "model" not in tables:
        pytest.importorskip("transformers")
        bert = save_bert(tmp_path / "bert", max_position_embeddings=512)
        tables = {**tables, "model": {"encoder": str(bert), **BERT_MODEL}}
    few = {"sentences": [4], "steps": 2}
    changes = {"method": method, "conditions": ["left-out"], "left_out": few}
    job = make_job(folder, **changes, **tables)
    result = simulate(job, tmp_path / "run")
    assert list(result.left_out) == list(NAMES)
    for models in result.left_out.values():
        assert {"federated", "pooled", "fine-tuned on 4"} <= models.keys()
    compared = compare(tmp_path / "run", condition="left-out", samples=5)
    for site, test in compared.tests.items():
        assert test.f1_a == result.sites[site]["left-out"]["strict"]["f1"]


# ---- refusals ------------------------------------------------------------------------


def test_two_sites_are_too_few(tmp_path: Path) -> None:
    table = {"synthetic": {"sites": 2, "sentences": 30}, "sites": None}
    job = _job_of(tmp_path, table)
    with pytest.raises(ConfigError, match=r"2 sites: it needs 3 or more"):
        prepare(job)


def _job_of(folder: Path, changes: dict[str, Any]) -> Job:
    """Return the job with other tables; those that are None are left out."""
    table = {**make_job(folder).table, **changes}
    present = {key: value for key, value in table.items() if value is not None}
    return parse_job(present, "tiny", folder, "tiny.toml")


def test_more_numbers_of_sentences_than_a_table_can_show_are_refused(
    tmp_path: Path,
) -> None:
    numbers = list(range(1, 22))
    with pytest.raises(ConfigError, match="sentences has 21 numbers: give at most 20"):
        make_job(tmp_path, left_out={"sentences": numbers})
    make_job(tmp_path, left_out={"sentences": numbers[:20]})


def test_sites_without_a_common_type_are_refused(tmp_path: Path) -> None:
    for name, label in zip(NAMES, ("Drug", "Gene", "Test"), strict=True):
        write_site(tmp_path, name, label)
    with pytest.raises(
        ConfigError, match=r"no site can be left out: north .* label_map"
    ):
        prepare(make_job(tmp_path))


def test_a_secure_sum_needs_three_sites_beside_the_left_out_one(folder: Path) -> None:
    job = make_job(folder, federation={"secure_sum": True})
    with pytest.raises(
        ConfigError, match=r"left-out/north: 2 sites are left when one is left out"
    ):
        prepare(job)


def test_a_check_does_not_miss_test_data_of_files_that_are_missing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'method = "fedner"\nconditions = ["left-out"]\n'
        + "".join(f'[sites.{name}]\npath = "{name}"\n' for name in NAMES)
    )
    problems = check_job(str(file)).problems
    assert len(problems) == len(NAMES)
    assert all("no such file" in problem.message for problem in problems)


def test_methods_without_annotated_documents_are_refused(tmp_path: Path) -> None:
    table = {
        "method": "pretrain",
        "conditions": ["left-out"],
        "synthetic": {"sites": 3, "sentences": 30},
    }
    with pytest.raises(ConfigError, match=r"needs sites with annotated documents"):
        parse_job(table, "tiny", tmp_path, "tiny.toml")


def test_real_sites_do_not_receive_the_table(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'method = "fedner"\nconditions = ["left-out"]\n[left_out]\nsteps = 5\n'
        + "".join(f"[sites.{name}]\n" for name in NAMES)
    )
    declaration = load_declared(file).declaration
    assert declaration["job"].keys() == {"method", "sites", "federation"}
