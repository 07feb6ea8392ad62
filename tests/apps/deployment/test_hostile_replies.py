"""Replies of a hostile site: the server ends its run in bounded time and memory."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from applications import needs_app
from hospital_jobs import NAMES
from hospitals import OPEN, Hospitals
from nvflare.apis.shareable import make_reply

from fednotes.apps.deployment import server as module
from fednotes.apps.deployment import site_agreement
from fednotes.apps.deployment.nvflare import server as flare
from fednotes.apps.deployment.server import RunProgress, _fetch_shared_scores
from fednotes.apps.deployment.site_agreement import (
    Description,
    derive_config,
    pack_json,
    read_site_description,
)
from fednotes.apps.deployment.site_file import parse_site_job, read_site_file
from fednotes.core import bounds
from fednotes.core.cleaning import LINE
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.update import Tensors, Update
from fednotes.engines import launch
from fednotes.engines.requests import Event
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.results import RunResult, read_result
from fednotes.methods import fedner

GOOD = {"strict": {"f1": 0.5}}
NER = 'method = "fedner"\n[model]\ntagger = "cnn-clstm-crf"\n'


# scores


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


SCORES = {
    "half of a surrogate pair": rb'{"a":"\ud800"}',
    "half of a surrogate pair in a name": rb'{"\udc00":1}',
    "too deep for the summary": nested(62),
    "too long for the summary": b'{"a":"' + b"x" * (bounds.FILE - 100) + b'"}',
    "too many values": b'{"a":[' + b"1," * 2**17 + b"1]}",
    "pairs": b"[[1,2]]",
    "a number": b"1",
    "nothing": b"",
    "no JSON": b"\xff{",
}


def packed(raw: bytes) -> dict[str, torch.Tensor]:
    return {"scores": torch.tensor(bytearray(raw), dtype=torch.uint8)}


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(raw, id=name, marks=[pytest.mark.slow] if len(raw) > 2**20 else [])
        for name, raw in SCORES.items()
    ],
)
def test_unreadable_scores_of_one_site_do_not_affect_the_results_of_others(
    raw: bytes, tmp_path: Path
) -> None:
    """The summary can be written and read, and has the scores of the others."""
    answers = {"a": packed(raw), "b": {"scores": pack_json(GOOD)}, "c": {}}
    engine: Any = SimpleNamespace(collect_public_facts=lambda *_, **__: answers)
    scores = _fetch_shared_scores(engine)
    sites = {site: {"federated": site_scores} for site, site_scores in scores.items()}
    RunResult(version=1, sites=sites).write(tmp_path)
    assert read_result(tmp_path).sites == {"b": {"federated": GOOD}}


@pytest.mark.slow
def test_scores_of_many_sites_remain_readable(tmp_path: Path) -> None:
    """The largest that each of 40 sites may send."""
    size = module.MAX_ALL_SCORES // 40
    largest = {"a": [0.5] * (size - 10)}
    answers = {f"s{number}": {"scores": pack_json(largest)} for number in range(40)}
    engine: Any = SimpleNamespace(collect_public_facts=lambda *_, **__: answers)
    scores = _fetch_shared_scores(engine)
    assert len(scores) == 40
    sites = {site: {"federated": site_scores} for site, site_scores in scores.items()}
    RunResult(version=1, sites=sites).write(tmp_path)
    assert len(read_result(tmp_path).sites) == 40
    with mock.patch.object(module, "MAX_ALL_SCORES", module.MAX_ALL_SCORES // 2):
        assert _fetch_shared_scores(engine) == {}


# descriptions


def document_job(folder: Path, more: str = "") -> Any:
    path = folder / "job.toml"
    path.write_text(f"{NER}{more}" + "".join(f"[sites.{name}]\n" for name in "abc"))
    (folder / "notes.conll").write_text("Took\tO\naspirin\tB-Drug\n\n")
    site = folder / "site.toml"
    site.write_text('[data]\ntrain = "notes.conll"\ntest = "notes.conll"\n')
    return parse_site_job(load_declared(path)[1], "a", read_site_file(site))


def described(number: int) -> dict[str, Description]:
    """Return three sites, the last of which annotates many types."""
    honest = Description(types=("Drug",))
    many = tuple(f"t{place}" for place in range(number))
    return {"a": honest, "b": honest, "c": replace(honest, types=("Drug", *many))}


def test_entity_types_of_one_site_are_bounded(tmp_path: Path) -> None:
    """The soft targets of a sentence have a number for each pair of tags: 1,000 types
    would take 16 MB a sentence."""
    job = document_job(tmp_path)
    config = derive_config(job, described(site_agreement.MAX_TYPES - 1))
    assert len(config.tags.types) == 100
    with pytest.raises(ConfigError, match='"c" annotates 101 entity types'):
        derive_config(job, described(site_agreement.MAX_TYPES))


def test_a_job_may_name_any_number_of_types(tmp_path: Path) -> None:
    names = json.dumps(["Drug", *(f"t{place}" for place in range(1200))])
    job = document_job(tmp_path, f"[tags]\ntypes = {names}\n")
    assert len(derive_config(job, described(1200)).tags.types) == 1201


def test_a_site_adds_no_types_to_those_that_the_job_lists(tmp_path: Path) -> None:
    job = document_job(tmp_path, '[tags]\ntypes = ["Drug"]\n')
    derive_config(job, described(0))
    with pytest.raises(ConfigError, match=r'"c" annotates t0, which .* does not list'):
        derive_config(job, described(20_000))


def test_an_entity_type_that_cannot_be_saved_is_refused() -> None:
    table = {**asdict(Description(types=("Drug",))), "types": ["\ud800"]}
    with pytest.raises(ConfigError, match="the description that site 'c' sent"):
        read_site_description("c", {"description": pack_json(table)})


@pytest.mark.parametrize("width", [-1, 2**62, 2**63])
def test_an_impossible_number_of_features_is_refused_with_the_site(width: int) -> None:
    table = {**asdict(Description()), "width": width}
    with pytest.raises(ConfigError, match="the description that site 'c' sent"):
        read_site_description("c", {"description": pack_json(table)})


# numbers of patients

WRONG_COUNTS = {"below zero": -50.0, "half a patient": 0.5, "too many": 1e15}


@pytest.mark.parametrize("wrong", WRONG_COUNTS.values(), ids=WRONG_COUNTS.keys())
@pytest.mark.parametrize("name", ["absent", "patients"])
def test_wrong_numbers_of_patients_are_refused_with_the_site(
    name: str, wrong: float, tmp_path: Path
) -> None:
    """A number below zero would make the weights of classes negative at every site, so
    that all would learn the opposite of their labels."""
    needs_app("phenotyping")
    from patient_hospitals import PHENOTYPE, patients

    from fednotes.apps.phenotyping.site import Site

    data = {
        site: patients(tmp_path / site, number) for number, site in enumerate(NAMES)
    }
    hospitals = Hospitals(tmp_path / "job", PHENOTYPE, data, policy=OPEN)
    count = Site.count_labels
    hostile = NAMES[1]

    def count_wrongly(self: Site, tensors: Tensors) -> Update:
        update = count(self, tensors)
        if self.id != hostile:
            return update
        counts = {
            key: torch.full_like(value, wrong) if key == name else value
            for key, value in update.tensors.items()
        }
        metrics = {
            key: wrong if key == name else value
            for key, value in update.metrics.items()
        }
        return replace(update, tensors=counts, metrics=metrics)

    with (
        mock.patch.object(Site, "count_labels", count_wrongly),
        pytest.raises(
            TrainingError, match=rf"site '{hostile}'.*{name}.*whole numbers from 0 to"
        ),
    ):
        hospitals.run()


# reasons and events


def test_a_reason_without_a_reply_is_shown_in_one_short_line() -> None:
    exchange = flare.FlareExchange(("a", "b"))
    reasons = ["x" * 10**6 + "\x1b[2J\n", {"no": ["text"]}]
    for site, reason in zip("ab", reasons, strict=True):
        result = make_reply("EXECUTION_EXCEPTION", headers={flare.REASON: reason})
        task: Any = SimpleNamespace(client=SimpleNamespace(name=site), result=result)
        no_context: Any = None
        exchange.receive(task, no_context)
    assert set(exchange.failed) == {"a", "b"}
    for reason in exchange.failed.values():
        assert len(reason) <= LINE
        assert reason.isprintable()


def progress(folder: Path) -> tuple[RunProgress, list[Any]]:
    lines: list[Any] = []
    pipe: Any = SimpleNamespace(publish=lines.append)
    sites = ("a", "b", "c")
    setup = launch.Setup(folder, "", {}, "id", "r", sites, 3, folder, folder)
    job: Any = SimpleNamespace(
        federation=SimpleNamespace(secure_sum=False), config=fedner.Config()
    )
    return RunProgress(setup, pipe, job), lines


def test_a_site_with_ever_new_messages_does_not_fill_the_memory(
    tmp_path: Path,
) -> None:
    """Also after it has used up its lines, those of other sites are published."""
    reporter, lines = progress(tmp_path)
    with mock.patch.object(module, "MAX_EVENTS", 50):
        for number in range(500):
            reporter.record_event(Event("refused", number, f"reason {number}", "a"))
        assert len(lines) == 50
        assert len(reporter.refusals) == module.MAX_REFUSALS
        reporter.record_event(Event("refused", 500, "reason", "b"))
    assert lines[-1]["site"] == "b"
