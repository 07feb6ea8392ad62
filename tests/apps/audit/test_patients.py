"""Attacks on jobs on patients: they succeed without defences and fail with noise."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from applications import needs_app

from fednotes.apps.audit import Scene, load_attacks, open_target
from fednotes.apps.audit.attacks import membership, patient_counts, patient_updates
from fednotes.apps.audit.attacks.membership import identify_members
from fednotes.apps.audit.shadow import models
from fednotes.cli import app
from fednotes.core.errors import ConfigError
from fednotes.jobs.audit_result import Leak, read_audit
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.privacy import training as private

needs_app("phenotyping")
from patient_files import write, write_terms

from fednotes.apps.phenotyping import shadow

TABLE: dict[str, Any] = {
    "method": "phenotype",
    "preset": "paper",
    "seed": 2,
    "synthetic": {"sites": 3, "patients": 40},
    "concepts": {"most": 10_000},
    "training": {
        **{"cycles": 2, "classifier_cycles": 3, "batch_size": 8, "learning_rate": 0.01},
        **{
            "minimum": 3,
            "systems": ["icd9"],
            "least_occurrences": 0,
            "require_output": False,
        },
    },
    "model": {"network": {"embedding": 8, "hidden": 12, "length": 0}},
}
NONE = {"model": {"representation": "none"}}
SECURE = {"federation": {"secure_sum": True}}
PRIVATE = NONE | {
    "privacy": {"epsilon": 2.0, "delta": 1e-4, "unit": "patient", "rate": 0.5}
}

ATTACKS = (
    *patient_updates.CONCEPT_ATTACKS,
    patient_counts.PRESENCE_ATTACK,
    *patient_updates.OUTPUT_ATTACKS,
    patient_counts.EXACT_ATTACK,
)


def job(**tables: Any) -> Job:
    """Return a job on three generated hospitals; `tables` change it."""
    table = {**TABLE}
    for name, values in tables.items():
        table[name] = {**table.get(name, {}), **values}
    return parse_job(table, "job", Path(), "job")


@cache
def _scene(key: str) -> Scene:
    parsed = job(**json.loads(key))
    return Scene(parsed, load_sites(parsed))


def attack_patients(name: str, **tables: Any) -> Leak:
    """Run an attack on `job(**tables)`, which trains once for all attacks."""
    attack = next(a for a in load_attacks() if name in a.name and a.data != "notes")
    return attack.run(_scene(json.dumps(tables)))


def at_site(**tables: Any) -> Any:
    """Return the data of the audited site."""
    return _scene(json.dumps(tables)).sites.data[0]


# ---- concepts ------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [{}, SECURE])
def test_vectors_that_change_reveal_the_concepts_of_coded_patients(
    secure: dict[str, Any],
) -> None:
    """A secure sum hides whose concepts they are, but not which."""
    leak = attack_patients("concepts' vectors", **secure)
    assert leak.control == leak.success == 1.0
    site = at_site()
    coded = [p in site.codes for p in site.train.patients]
    assert leak.details["targets"] == len(
        np.unique(site.train.take(coded).bags.concepts)
    )
    assert not attack_patients("classifiers of concepts").applies


def test_weights_that_change_reveal_the_concepts_of_labelled_patients() -> None:
    """Patients whom the classifiers already get right move nothing."""
    leak = attack_patients("classifiers of concepts", **NONE)
    assert leak.control == leak.success is not None
    assert leak.success > 0.95
    site = at_site(**NONE).train
    labelled = (site.labels >= 0).any(1)
    assert leak.details["targets"] == len(np.unique(site.take(labelled).bags.concepts))
    assert not attack_patients("concepts' vectors", **NONE).applies


def test_the_shared_row_of_rare_concepts_is_not_attacked() -> None:
    """Concepts with their own row occur at some site: decoys are of other sites."""
    known = {"least_occurrences": 5}
    leak = attack_patients("concepts' vectors", training=known)
    scene = _scene(json.dumps({"training": known}))
    names = scene.get_audited_site().code_learner.known["known"].numpy()
    site = at_site(training=known)
    coded = [p in site.codes for p in site.train.patients]
    rare_concepts = np.intersect1d(names, site.train.take(coded).bags.concepts)
    assert 0 < len(rare_concepts) < len(names)
    assert leak.details["targets"] == len(rare_concepts)
    assert leak.success == 1.0


def test_robust_aggregation_does_not_hide_concepts() -> None:
    leak = attack_patients("concepts' vectors", training={"aggregation": "median"})
    assert leak.success == 1.0


# ---- counts --------------------------------------------------------------------------


def test_exact_counts_are_revealed_without_a_secure_sum() -> None:
    """A secure sum reveals which codes and concepts occur, but not how often."""
    for name in ("codes and concepts", "exact counts"):
        leak = attack_patients(name)
        assert leak.control == leak.success == 1.0
    assert attack_patients("codes and concepts", **SECURE).success == 1.0
    hidden = attack_patients("exact counts", **SECURE)
    assert hidden.control == 1.0
    assert hidden.success is not None
    assert hidden.success < 0.5


def test_two_sums_of_patients_reveal_a_site_s_counts() -> None:
    leak = attack_patients("two sums", federation={"secure_sum": True, "min_sites": 2})
    assert leak.success == leak.control == 1.0
    assert leak.chance < 0.5  # the most frequent number, although sites are similar
    assert not attack_patients("two sums", **SECURE).applies
    assert not attack_patients("two sums").applies


# ---- codes and labels ----------------------------------------------------------------


def test_the_gradient_of_one_patient_names_codes_and_labels() -> None:
    """The attack does not apply where every code occurs at the site."""
    for name in ("codes from biases", "labels from intercepts"):
        leak = attack_patients(name)
        assert leak.control == 1.0 or not leak.applies
    common = {"minimum": 20}
    assert (
        "nothing at the site differs"
        in attack_patients("codes from biases", training=common).why
    )


# ---- members -------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train fewer models, so that a test takes seconds."""
    monkeypatch.setattr(models, "MODELS", 2)
    monkeypatch.setitem(shadow.CONTROL_SETTINGS, "cycles", 3)
    models.train_shadow_models.cache_clear()


def test_models_without_noise_remember_patients(few: None) -> None:
    """Only the control, with four models, to save time."""
    for part in ("codes", "labels"):
        trial = identify_members(_scene("{}").get_control(), part)
        assert trial.details["auc"] > 0.75
        assert trial.low > trial.chance


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{}, NONE, PRIVATE])
def test_noise_makes_models_forget_patients(tables: dict[str, Any]) -> None:
    """The control succeeds; with noise, no membership attack is above chance."""
    for attack in membership.PATIENT_ATTACKS:
        leak = attack.run(
            _scene(json.dumps({**tables, "synthetic": {"sites": 3, "patients": 150}}))
        )
        if leak.applies and "membership" in leak.attack:
            assert leak.proven
            assert leak.low is not None
            if "privacy" in tables:
                assert leak.low <= leak.chance + 0.02
                assert leak.details["auc"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow
def test_noise_hides_concepts_if_nothing_is_counted() -> None:
    """The mean of several trials: with fifteen decoys, a single one varies much."""
    assert attack_patients("classifiers of concepts", **PRIVATE).proven
    private_job = job(**PRIVATE)
    sites = load_sites(private_job)
    attack = next(a for a in ATTACKS if "classifiers of concepts" in a.name)
    trials = [attack.trial(Scene(private_job, sites)) for _ in range(6)]
    assert np.mean([trial.success for trial in trials]) < 0.3
    areas = [trial.details["auc"] for trial in trials]
    assert np.mean(areas) == pytest.approx(0.5, abs=0.2)
    for name in ("codes and concepts", "exact counts", "codes from biases", "two sums"):
        assert not attack_patients(name, **PRIVATE).applies


@pytest.mark.slow
def test_noisy_counts_are_attacked() -> None:
    """Much noise hides what occurs; with next to none, counts reveal it.

    The noise is drawn from a secret, so the success is a mean over eight draws of it.
    """
    noise = {"noise": 1.0, "delta": 1e-4, "rate": 0.5, "counted": 5.0, "counts": 8.0}
    private_job = job(**NONE, privacy=noise)
    sites = load_sites(private_job)
    attacks = [a for a in load_attacks() if a.data != "notes"]
    attack = next(a for a in attacks if "from counts" in a.name)
    leaks = [attack.run(Scene(private_job, sites)) for _ in range(8)]
    assert all(leak.control == 1.0 for leak in leaks)
    hidden = float(np.mean([leak.success for leak in leaks]))
    assert hidden <= 0.3

    little = noise | {"where": "site", "counts": 0.1, "counted": 0.5}
    assert attack_patients("from counts", **NONE, privacy=little).success > hidden + 0.3


@pytest.mark.slow
def test_noise_hides_a_learnt_representation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without noise most concepts are named, so failing gradients hide nothing.

    The control predicts the codes that the job names, however few patients have them.
    """
    names = [
        "icd9:030",
        "icd9:039",
        "icd9:041",
        "icd9:053",
        "icd9:083",
        "icd9:118",
        "icd9:042",
    ]
    tables = {"training": {"outputs": names, "minimum": 1001}}
    leak = attack_patients(
        "concepts' vectors", **tables, privacy={**PRIVATE["privacy"], "epsilon": 1.0}
    )
    assert leak.proven
    assert leak.success is not None
    assert leak.success < 0.5
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)
    for name in ("concepts' vectors", "codes from biases"):
        bare = attack_patients(
            name, **tables, privacy={**PRIVATE["privacy"], "epsilon": 100.0}
        )
        assert bare.proven
        assert bare.success is not None
        assert bare.success > 0.8
    assert "gradients" not in caplog.text


@pytest.mark.slow
def test_an_attack_on_pure_noise_is_reported_as_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all gradients fail, the update is noise, which would look like a defence."""

    def fails(site: Any, indices: Any) -> Any:
        raise AttributeError("labels")

    monkeypatch.setattr(private.DPSite, "clip_gradient", fails)
    private_job = job(**PRIVATE)
    for attack in (*ATTACKS, *membership.PATIENT_ATTACKS):
        leak = attack.run(Scene(private_job, load_sites(private_job)))
        assert not leak.applies or "could not be tried" in leak.why
        assert leak.success is None


@pytest.mark.slow
def test_noise_hides_concepts_in_both_stages() -> None:
    """The last rounds, which belong to the second stage, are observed, too."""
    plain = _scene("{}")
    assert plain.observe()
    outputs = [*plain.get_audited_site().code_learner.outputs[:8]]
    tables = {"training": {"outputs": outputs}, "privacy": PRIVATE["privacy"]}
    leaked_concepts = attack_patients("concepts' vectors", **tables)
    assert leaked_concepts.control == 1.0
    assert leaked_concepts.details["auc"] == pytest.approx(0.5, abs=0.2)
    observations = [
        s for s in _scene(json.dumps(tables)).observe() if s.task == "noisy_gradients"
    ]
    assert {"svm.weight" in s.tensors for s in observations} == {True, False}
    for name in ("codes from biases", "labels from intercepts"):
        leak = attack_patients(name, **tables)
        assert not leak.applies or leak.proven


# ---- the command ---------------------------------------------------------------------


def test_attacks_on_notes_do_not_apply_to_patients() -> None:
    assert {*ATTACKS} <= {*load_attacks()}
    leak = next(a for a in load_attacks() if a.name == "membership").run(_scene("{}"))
    assert not leak.applies
    assert "not of patients" in leak.why


JOB = """method = "phenotype"
[synthetic]
sites = 3
patients = 40
[training]
cycles = 2
classifier_cycles = 2
minimum = 3
systems = ["icd9"]
min_patients = 0
[model.network]
embedding = 8
hidden = 12
"""


def test_the_command_audits_a_job_on_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """No patient is named in what is written or printed."""
    monkeypatch.setattr("fednotes.apps.audit.run.load_attacks", lambda: ATTACKS[:4])
    path, out = tmp_path / "job.toml", tmp_path / "out"
    path.write_text(JOB)
    monkeypatch.setattr("sys.argv", ["fednotes", "audit", str(path), "--out", str(out)])
    app.main()
    saved_audit = read_audit(out)
    assert saved_audit is not None
    assert [leak.attack for leak in saved_audit.attacks] == [
        a.name for a in ATTACKS[:4]
    ]
    output = capsys.readouterr().out
    assert "concepts from" in output
    assert "100.0 to 100.0" not in output  # no interval: not a sample
    assert "(100.0–100.0)" not in (out / "report.html").read_text()
    assert any(
        leak.success == leak.low == leak.high == 1.0 for leak in saved_audit.attacks
    )
    output += (out / "audit.json").read_text() + (out / "report.html").read_text()
    parsed = parse_job(tomllib.loads(JOB), "job", tmp_path, "job")
    assert not [p for p in load_sites(parsed).data[0].train.patients if p in output]


def test_a_site_audits_with_only_its_own_patients(tmp_path: Path) -> None:
    """Parts of them stand for other sites, so means differ from its counts."""
    needs_app("deployment")
    write_terms(tmp_path, "pain", "fever", "cough", "rash", "unseen")
    terms = ("pain", "fever", "cough", "rash")
    notes = (f"{at},Has {terms[at % 4]} and {terms[at % 3]}." for at in range(40))
    write(tmp_path / "notes.csv", "patient,text", notes)
    codes = (f"{at},icd9,{('4019', '25000', '4280')[at % 3]}" for at in range(40))
    write(tmp_path / "codes.csv", "patient,system,code", codes)
    tables = (
        "[sites.north]\n[sites.south]\n[sites.west]\n[federation]\nsecure_sum = true\n"
    )
    small = JOB.replace("[synthetic]\nsites = 3\npatients = 40\n", "")
    (tmp_path / "job.toml").write_text(
        f'{small}[concepts]\ndictionary = "terms.tsv"\n{tables}'
    )
    data = 'notes = "notes.csv"\ncodes = "codes.csv"\ncodes_format = "table"\n'
    files = '[files]\ndictionary = "terms.tsv"\n'
    (tmp_path / "site.toml").write_text(f"[data]\n{data}{files}")
    at = (str(tmp_path / "job.toml"), (), "north", tmp_path / "site.toml")
    target_job, *_ = open_target(*at, 90, tmp_path / "out")
    sites = load_sites(target_job).data
    assert [site.id for site in sites] == ["north", "south", "west"]
    own_patients = {*sites[0].train.patients}
    assert [len(site.train) < len(own_patients) for site in sites[1:]] == [True, True]
    assert sites[1].train.patients != sites[2].train.patients
    assert all({*site.train.patients} < own_patients for site in sites[1:])
    attack = next(a for a in ATTACKS if "vectors" in a.name)
    leak = attack.run(Scene(target_job, load_sites(target_job), "north"))
    assert leak.control == leak.success == 1.0
    assert (leak.details["targets"], leak.details["decoys"]) == (4.0, 1.0)
    with pytest.raises(ConfigError, match="alone has"):
        load_sites(open_target(*at, 9, tmp_path / "out")[0])
