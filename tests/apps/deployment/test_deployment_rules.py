"""What a site permits, and what becomes of a stopped run, over an in-memory pipe.

A run with faults is compared with one without them, to the last bit; refusals with the
rule that was broken.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from applications import needs_app
from hospital_jobs import (
    FEDERATION,
    FEDNER,
    FINETUNE,
    NAMES,
    QUICK,
    SECURE,
    SHORT,
    SITES,
    SMALL,
)
from hospitals import OPEN, Hospitals
from tiny_models import save_bert

from fednotes.apps.deployment.problems import (
    LastProblem,
    read_last_problem,
    record_line,
)
from fednotes.apps.deployment.rules.guard import read_pending_jobs
from fednotes.apps.deployment.site_agreement import (
    Description,
    compute_agreement_fingerprint,
    describe_site,
    encode_descriptions,
    explain_mismatch,
)
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.messages import decode_reply
from fednotes.core.store import write_json
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.results import read_result

CLOSED = OPEN.replace("share_scores = true\n", "")  # the default


# stopped and resumed


@pytest.fixture(scope="module")
def undisturbed(
    site_notes: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, int]:
    """Return the models of a run without faults, and its number of answers."""
    hospitals = Hospitals(tmp_path_factory.mktemp("whole"), FEDNER, site_notes)
    hospitals.run()
    return hospitals.ends(), len(hospitals.network.frames) // 2


@pytest.mark.parametrize("who", ["discharge", "posts", "server"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_killed_process_does_not_change_the_result(
    seed: int, who: str, site_notes: Any, undisturbed: tuple[Any, int], tmp_path: Path
) -> None:
    """Killed right after an answer, which is lost where it was a site's; begun again
    from disk."""
    expected, answers = undisturbed
    hospitals = Hospitals(tmp_path, FEDNER, site_notes)
    answer = random.Random(f"{who}{seed}").randrange(1, answers)
    hospitals.network.kill = (who, answer)
    hospitals.run()
    assert hospitals.network.kill[0] == ""
    assert hospitals.ends() == expected


@pytest.mark.slow
def test_a_paused_run_continues(
    site_notes: Any, undisturbed: tuple[Any, int], tmp_path: Path
) -> None:
    """As the server's watch asks when a lost site is back; another submission finishes
    it."""
    hospitals = Hospitals(tmp_path, FEDNER, site_notes)
    network = hospitals.network

    network.meanwhile = lambda: (
        network.pause.set() if len(hospitals.lines("round")) == 3 else None
    )
    hospitals.run()
    assert not (hospitals.server / "summary.json").exists()
    assert hospitals.lines("end") == []
    network.meanwhile, network.lines = (lambda: None), []
    network.pause.clear()
    network.members.clear()
    hospitals.run()
    assert hospitals.ends() == undisturbed[0]
    assert network.lines[-1]["kind"] == "end"


def test_watchers_receive_the_progress(site_notes: Any, tmp_path: Path) -> None:
    """The plan, rounds with numbers of sums alone, the end; the file has the evaluated
    rounds."""
    hospitals = Hospitals(tmp_path, FEDNER, site_notes)
    hospitals.run()
    plans, rounds = hospitals.lines("plan"), hospitals.lines("round")
    assert plans[0]["rounds"] == 0
    assert (
        plans[-1]["rounds"]
        == len(rounds)
        == rounds[-1]["round"] + 1
        == hospitals.network.lines[-1]["rounds"]
    )
    lines = (hospitals.server / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [
        line["round"] for line in rounds if line["evaluated"]
    ]
    assert not any("sites" in line for line in rounds)


# approval


def problem_after(
    records: Iterable[logging.LogRecord], beginning: str, kit: Path
) -> LastProblem | None:
    """Return the problem that a site's status shows after lines that begin so.

    There is at least one such line.
    """
    lines = [record for record in records if record.getMessage().startswith(beginning)]
    assert lines
    for record in lines:
        record_line(kit, record)
    return read_last_problem(kit)


def test_an_unapproved_job_waits_until_a_person_approves(
    site_notes: Any, tmp_path: Path
) -> None:
    hospitals = Hospitals(tmp_path, SHORT, site_notes, approve=False)

    def approve_later() -> None:
        for name in hospitals.names if hospitals.network.exchanges == 4 else ():
            (pending,) = read_pending_jobs(hospitals.setups[name].kit)
            assert pending.table == hospitals.table
            hospitals.approve(name)

    hospitals.network.meanwhile = approve_later
    hospitals.run()
    assert "site 'posts' has not approved this job" in hospitals.texts()
    assert "fednotes site approve KIT" in hospitals.texts()
    # A missing approval is published by itself.
    assert not any(line["is_problem"] for line in hospitals.lines("event"))
    assert not read_pending_jobs(hospitals.setups["posts"].kit)
    assert hospitals.ends()


@pytest.mark.slow
def test_the_server_reports_whose_approval_is_missing(
    site_notes: Any, tmp_path: Path
) -> None:
    """By the names of the run's own list, shorter each time that a site approves."""
    hospitals = Hospitals(tmp_path, QUICK, site_notes, approve=False)

    def approve_one_by_one() -> None:
        if hospitals.network.exchanges in (3, 5, 7):
            hospitals.approve(hospitals.names[hospitals.network.exchanges // 2 - 1])

    hospitals.network.meanwhile = approve_one_by_one
    hospitals.run()
    lists = [list(line["since"]) for line in hospitals.lines("approvals")]
    names = list(hospitals.names)
    assert lists == [names, names[1:], names[2:], []]
    first = hospitals.lines("approvals")[0]["text"]
    assert first.startswith(
        f"waiting for the approval of: {names[0]} (less than 1 min), "
    )


def test_a_reported_problem_is_distinguished_from_silence(
    site_notes: Any, tmp_path: Path
) -> None:
    """One site cannot read its notes until they are back; another is not there."""
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    train = site_notes["posts"]["train"]
    missing = str(Path(train).with_name("missing.conll"))
    hospitals.change("posts", train, missing)
    hospitals.network.down = {"reports"}

    def mend() -> None:
        if hospitals.network.exchanges == 3:
            hospitals.network.down = set()
            hospitals.change("posts", missing, train)

    hospitals.network.meanwhile = mend
    hospitals.run()
    problems = {
        line["site"]: line["is_problem"]
        for line in hospitals.lines("event")
        if line["site"] in ("posts", "reports") and "is there" not in line["text"]
    }
    assert problems == {"posts": True, "reports": False}


@pytest.mark.slow
def test_the_time_of_a_run_starts_at_its_first_start(
    site_notes: Any, tmp_path: Path
) -> None:
    """Which its state keeps over a restart."""
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    hospitals.run()
    costs = read_result(hospitals.server).conditions["federated"]
    assert costs["elapsed"] >= 0
    path = hospitals.setups[""].state / "started.json"
    first_start = json.loads(path.read_text())["time"]
    assert time.time() - 600 < first_start <= time.time()
    again = Hospitals(tmp_path / "again", SHORT, site_notes)
    write_json(again.setups[""].state / "started.json", {"time": first_start - 5000})
    again.run()
    assert read_result(again.server).conditions["federated"]["elapsed"] > 5000


def test_a_withdrawn_approval_stops_the_site(
    site_notes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a run; with two sites enough it goes on without that one."""
    hospitals = Hospitals(tmp_path, QUICK, site_notes, least=2)
    reject = partial(hospitals.approve, "posts", yes=False)
    hospitals.network.meanwhile = lambda: reject() if hospitals.lines("round") else None
    caplog.set_level("INFO")
    hospitals.run()
    assert problem_after(caplog.records, "refused ", tmp_path) is None
    rounds = [line["took_part"] for line in hospitals.lines("round")]
    assert rounds == [3, 2]
    assert not (hospitals.results("posts") / "model").exists()


# policy


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        ("secure_sum", "freeze_embeddings = false\nshare_scores = true"),
        ("secure_sum", "secure_sum = 'required'\nshare_scores = true"),
        ("share_scores", CLOSED),
        ("freeze_embeddings", "secure_sum = 'off'\nshare_scores = true"),
        ("min_sites", OPEN.replace("min_sites = 2", "min_sites = 4")),
        ("max_rounds", OPEN + "max_rounds = 3"),
        ("methods", OPEN + "methods = ['distill']"),
        ("denied_layers", OPEN + "denied_layers = ['cnn']"),
        ("allowed_layers", OPEN + "allowed_layers = ['characters']"),
        ("min_steps", OPEN + "min_steps = 2"),
        ("min_tokens", OPEN + "min_tokens = 10"),
        ("min_patients", OPEN + "min_patients = 5"),
        ("max_bytes", OPEN + "max_bytes = 2000"),
        ("max_stored_bytes", OPEN + "max_stored_bytes = 1200000"),
    ],
)
def test_a_refusal_names_the_broken_rule(
    rule: str, policy: str, site_notes: Any, tmp_path: Path
) -> None:
    refusal = Hospitals(tmp_path, FEDNER, site_notes, policy=policy).refusal()
    assert f"refused by {rule} of this site's policy" in refusal
    assert str(tmp_path) not in refusal


@pytest.mark.slow
def test_a_run_without_disk_space_at_a_site_ends_and_can_continue(
    site_notes: Any,
    undisturbed: tuple[Any, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the bits of a run that was never stopped."""
    hospitals = Hospitals(tmp_path, FEDNER, site_notes)
    caplog.set_level("INFO")
    key = "max_stored_bytes"

    def fill_up() -> None:
        if len(hospitals.lines("round")) == 3:
            hospitals.change("posts", "[policy]", f"[policy]\n{key} = 1100000")

    hospitals.network.meanwhile = fill_up
    refused = rf"refused by {key} of this site's policy"
    with pytest.raises(TrainingError, match=refused):
        hospitals.run()
    assert not any((hospitals.results(name) / "model").exists() for name in NAMES)
    assert re.search(
        rf"store 1,\d+,\d+ bytes for this run; this site allows at most 1,100,000\. "
        rf"Only the site can change this: {key} in",
        caplog.text,
    )

    hospitals.network.meanwhile = lambda: None
    hospitals.change("posts", f"{key} = 1100000", f"{key} = 9000000")
    hospitals.run()
    assert hospitals.ends() == undisturbed[0]


def test_a_calibration_of_too_few_patients_is_refused_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With enough training patients; of 90, a fifth is held out, and not all of these
    have a label."""
    needs_app("phenotyping")
    from patient_hospitals import PHENOTYPE, patients

    data = {name: patients(tmp_path / name, n) for n, name in enumerate(NAMES)}
    policy = f"{OPEN}min_patients = 30\n"
    hospitals = Hospitals(tmp_path, PHENOTYPE, data, policy=policy)
    assert "refused by min_patients of this site's policy" in hospitals.refusal()
    assert not hospitals.network.members  # no site has joined
    match = re.search(
        r"the calibration would cover (\d+) held-out patients with a label for one of the "
        r"phenotypes; this site allows 30 or more \(hold out more patients, or set "
        r"training\.calibrate = false in the job\)",
        caplog.text,
    )
    assert match is not None
    assert 0 < int(match[1]) <= 18


def test_a_site_that_shares_no_scores_joins_no_plain_sum(
    site_notes: Any, tmp_path: Path
) -> None:
    """Before its notes are read; what the job can do about it is said."""
    refusal = Hospitals(tmp_path, SHORT, site_notes, policy=CLOSED).refusal()
    assert "[federation] secure_sum = true, with three sites or more" in refusal
    kits = [path.name for path in tmp_path.rglob("journal")]
    assert kits == []


def test_a_site_that_stops_sharing_scores_stops_during_the_run(
    site_notes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No count of an evaluation leaves it after that, of whatever task."""
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    at: list[int] = []

    def close() -> None:
        failures = hospitals.network.failed.values()
        log_text = hospitals.texts()
        if "share_scores" in log_text or any(
            "share_scores" in text for text in failures
        ):
            raise KeyboardInterrupt
        if not at and hospitals.lines("round"):
            at.append(len(hospitals.network.frames))
            hospitals.change("posts", "share_scores = true", "")

    hospitals.network.meanwhile = close
    caplog.set_level("INFO")
    with pytest.raises((KeyboardInterrupt, TrainingError)):
        hospitals.run()
    after = [decode_reply(reply) for reply in hospitals.network.frames[at[0] + 1 :: 2]]
    posts = [reply for reply in after if reply.site == "posts"]
    problem = problem_after(caplog.records, "refused ", tmp_path)
    assert problem is not None
    assert "share_scores in [policy] of site.toml" in problem.text
    assert any("refused by share_scores" in reply.refusal for reply in posts)
    assert not any(reply.update and reply.update.metrics for reply in posts)
    # of other sites
    assert any(reply.update and reply.update.metrics for reply in after)


def test_a_run_waits_outside_the_permitted_hours(
    site_notes: Any, tmp_path: Path
) -> None:
    hospitals = Hospitals(
        tmp_path, SHORT, site_notes, policy=f"{OPEN}hours = '03:00-03:01'\n"
    )

    def open_up() -> None:
        for name in hospitals.names if hospitals.network.exchanges == 4 else ():
            hospitals.change(name, "03:00-03:01", "00:00-24:00")

    hospitals.network.meanwhile = open_up
    hospitals.run()
    assert hospitals.network.exchanges > 4
    assert hospitals.ends()


@pytest.mark.slow
def test_scores_stay_at_the_site_unless_the_policy_shares_them(
    site_notes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the secure sum, where a site that shares none can take part."""
    pytest.importorskip("cryptography")
    hospitals = Hospitals(tmp_path, SECURE, site_notes)
    for name in ("discharge", "reports"):
        hospitals.change(name, "share_scores = true\n", "")
    caplog.set_level("INFO")
    hospitals.run()
    assert problem_after(caplog.records, "refused ", tmp_path) is None
    summary = json.loads((hospitals.server / "summary.json").read_text())
    scores = json.loads((hospitals.results("posts") / "scores.json").read_text())
    assert {s: x["federated"] for s, x in summary["sites"].items() if x} == {
        "posts": scores
    }


# agreement


def test_an_error_names_types_that_differ_from_the_declared_ones(
    site_notes: Any, tmp_path: Path
) -> None:
    """The job says what a site annotates, its file says otherwise."""
    types = ["Drug", "Disease"]
    job = SHORT.replace("[sites.posts]", f"[sites.posts]\ntypes = {json.dumps(types)}")
    site_data = {**site_notes, "posts": {**site_notes["posts"], "types": types[:1]}}
    hospitals = Hospitals(tmp_path, job, site_data)
    with pytest.raises(ConfigError, match=r"the job has .*the site has .*label_map"):
        hospitals.run()


def test_a_site_that_changes_its_labels_refuses(
    site_notes: Any, tmp_path: Path
) -> None:
    """After the server has gathered all descriptions, before it has told them."""
    hospitals = Hospitals(tmp_path, SHORT, site_notes)

    def change() -> None:
        if (hospitals.setups[""].state / "agreement.json").exists():
            hospitals.change("posts", "[data]", "[data]\nlabel_map = {Drug = 'Med'}")
            hospitals.network.members.pop("posts", None)

    hospitals.network.meanwhile = change
    with pytest.raises(
        ConfigError, match=r'site "posts": this site has .*Med.*label_map'
    ):
        hospitals.run()


def test_an_error_names_sites_with_different_encoders(
    site_notes: Any, tmp_path: Path
) -> None:
    """By the digests of both; a copy elsewhere is no other one (`test_deployment.py`)."""
    pytest.importorskip("transformers")
    bert = save_bert(tmp_path / "bert", max_position_embeddings=512)
    job = FINETUNE.replace("BERT", str(bert))
    files = f"[files]\nencoder = '{bert}'\n"
    hospitals = Hospitals(tmp_path, job, site_notes, files=files)
    for name in hospitals.names:
        encoder = shutil.copytree(bert, tmp_path / f"{name} bert")
        hospitals.change(name, str(bert), str(encoder))
    facts = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(facts | {"hidden_act": "relu"}))
    digest = r"\([0-9a-f]{64}\)"
    message = rf'site "{name}" has a different encoder {digest} than this machine {digest}: give every'
    with pytest.raises(ConfigError, match=message):
        hospitals.run()
    assert not hospitals.lines("round")


SERVER, MANY = (
    "fednotes.apps.deployment.server",
    {f"none-{n}": Description() for n in range(50)},
)


@pytest.mark.parametrize(
    ("more", "agreed", "match"),
    [
        (
            {},
            lambda j, f: "0" * 64,
            "a different configuration of this job than the server does",
        ),
        # With 50 sites that are none, FedNER's least part of a mini-batch would be a
        # sentence.
        (
            MANY,
            lambda j, f: compute_agreement_fingerprint(j, {**f, **MANY}),
            "the server lists 53 sites that agree, but the",
        ),
    ],
    ids=["fingerprint", "sites"],
)
def test_a_server_that_adds_sites_is_refused(
    more: Any, agreed: Any, match: str, site_notes: Any, tmp_path: Path
) -> None:
    """Or of the true sites with the fingerprint of another agreement."""
    with (
        mock.patch(
            f"{SERVER}.encode_descriptions",
            lambda descriptions: encode_descriptions({**descriptions, **more}),
        ),
        mock.patch(f"{SERVER}.compute_agreement_fingerprint", agreed),
        pytest.raises(ConfigError, match=match),
    ):
        Hospitals(tmp_path, SHORT, site_notes).run()


def test_an_error_names_different_dictionaries(tmp_path: Path) -> None:
    needs_app("phenotyping")
    from patient_hospitals import patients

    job = f"""
method = "phenotype"
{FEDERATION}
[concepts]
dictionary = "terms.tsv"
[training]
minimum = 5
min_patients = 5
[phenotypes]
back = ["icd9:722"]
[sites.s0]
[sites.s1]
"""
    data = {f"s{n}": patients(tmp_path / f"s{n}", n) for n in range(2)}
    hospitals = Hospitals(tmp_path, job, data)
    for name, terms in (("s0", "asthma"), ("s1", "gout")):
        place = tmp_path / f"{name}.tsv"
        place.write_text(f"C0000001\t{terms}\nC0000002\tfever\n")
        hospitals.change(name, "[data]", f"[files]\ndictionary = '{place}'\n[data]")
    with pytest.raises(
        Exception, match="'s0' and 's1' read notes with different dictionaries"
    ):
        hospitals.run()


def test_an_error_names_a_different_fednotes_version(
    site_notes: Any, tmp_path: Path
) -> None:
    def older(job: Any, data: Any) -> Any:
        description = describe_site(job, data)
        return (
            replace(description, version="0.0.1") if data.id == "posts" else description
        )

    with (
        mock.patch("fednotes.apps.deployment.site.describe_site", older),
        pytest.raises(ConfigError, match=r"posts 0\.0\.1.*install the same version"),
    ):
        Hospitals(tmp_path, SHORT, site_notes).run()


# jobs that only a simulation can run


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[silos]\nnumber = 3", "redistributes all notes"),
        ('[tags]\ndesign = "disjoint"', "draws the sites' types"),
    ],
)
def test_a_job_that_needs_all_notes_is_refused(
    table: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'method = "distill"\n{SMALL}{SITES}{table}\n')
    with pytest.raises(ConfigError, match=message):
        load_declared(path)
    path.write_text(f'method = "distill"\n{SMALL}{SITES}mask_overlap = 0.2\n')
    with pytest.raises(ConfigError, match="mask_overlap compares the sites' notes"):
        load_declared(path)
    with pytest.raises(ConfigError, match="generates notes"):
        load_declared("demo")


def test_paths_of_notes_and_conditions_are_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'method = "distill"\nconditions = ["alone", "federated", "pooled"]\n[sites.a]\npath = "/data/a"\ntypes = ["Drug"]\n'
    )
    job, declared = load_declared(path)
    assert declared == {
        "name": "job",
        "job": {"method": "distill", "sites": {"a": {"types": ["Drug"]}}},
    }
    assert tuple(job.sites) == ("a",)


@pytest.mark.parametrize(
    ("site_labels", "message"),
    [
        ({}, ""),
        (
            {"types": ("Drug", "Pain")},
            'site "a": the job has {Drug, ADR}, the site has {Drug, Pain} (only the job: ADR; '
            "only the site: Pain): map the labels in label_map, or correct types, on one side",
        ),
        (
            {"types": ("ADR", "Drug")},
            'site "a": the job has {Drug, ADR}, the site has {ADR, Drug}: the order differs, and '
            "a tag's id is its position: give types in the same order on both sides",
        ),
        (
            {"scheme": "BIOES"},
            'site "a": the job has {Drug, ADR}, the site has {Drug, ADR}, written as BIO and as '
            "BIOES: set the same scheme on both sides",
        ),
        (
            {"overlaps": True},
            'site "a": the site keeps overlapping mentions (flatten = "keep"), the job does not: '
            "set the same `flatten` on both sides",
        ),
        (
            {"label_map": {"AE": "", "DI": "Drug"}},
            'site "a": the job has {Drug, ADR}, the site has {Drug, ADR}, but label_map differs '
            '("AE" → "ADR" at the job, dropped at the site; "DI" → not mapped at the job, "Drug" '
            "at the site): make it the same on both sides",
        ),
    ],
    ids=["equal", "types", "order", "scheme", "overlaps", "label_map"],
)
def test_an_error_shows_how_the_labels_of_job_and_site_differ(
    site_labels: dict[str, Any], message: str
) -> None:
    job_labels = Description(types=("Drug", "ADR"), label_map={"AE": "ADR"})
    assert (
        explain_mismatch(
            "a",
            job_labels,
            replace(job_labels, **site_labels),
            names=("the job", "the site"),
        )
        == message
    )


# few other notes than before


@pytest.mark.slow
def test_a_second_job_with_one_sentence_less_is_refused(
    site_notes: Any, tmp_path: Path
) -> None:
    """The same kits: a run with 12 sentences, the same again, one with 11, and one with
    7."""
    strict = f"{OPEN}min_difference = 5\n"

    def submit(number: int, run: str) -> Hospitals:
        site_table = f"[sites.posts]\nmax_sentences = {number}\n"
        job = SHORT.replace("[sites.posts]\n", site_table)
        # it knows one run
        shutil.rmtree(tmp_path / "kits" / "server", ignore_errors=True)
        return Hospitals(tmp_path, job, site_notes, policy=strict, run=run)

    submit(12, "run1").run()
    submit(12, "run2").run()

    refused = submit(11, "run3")
    refusal = refused.refusal()
    assert "refused by min_difference of this site's policy" in refusal
    # how few is in the site's own log
    assert not any(character.isdigit() for character in refusal)

    record = refused.setups["posts"].kit / "rules" / "examples" / "record.json"
    joined = [entry["run"] for entry in json.loads(record.read_text())["runs"]]
    assert joined == ["run1", "run2"]
    last = submit(7, "run4")
    last.run()
    assert last.ends()
