"""A lying server asks a phenotyping site to calibrate more models than allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from applications import needs_app
from fault_toy import JOB

from fednotes.apps.deployment.rules.guard import SiteGuard, settle_job
from fednotes.apps.deployment.rules.policy import Policy as Rules
from fednotes.core.messages import Reply, Request, decode_reply, encode_message
from fednotes.engines.host import SiteHost

needs_app("phenotyping")
from phenotype_patients import DISEASES, VOCABULARY, sites_of, without_stage_1

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT

SITES = ("s0", "s1", "s2")
TABLE = {"name": "toy", "sites": list(SITES), "min_sites": 3}
OPEN = Rules(min_sites=2, secure_sum="off", freeze_embeddings=False, share_scores=True)


class Calibrated:
    """One site of the phenotyping method, prepared for a calibration, with its rules."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        (data,) = sites_of(1)
        config = phenotype.METHOD.configure(without_stage_1(calibrate=True), (data,))
        guard = SiteGuard(
            folder, "s0", "run", TABLE, lambda: rules, secure=False, threshold=3
        )
        settle_job(folder, TABLE, approve=True, by="a test")

        def make() -> Any:
            site = phenotype.Site(data, config)
            guard.count_covered, guard.find_model_digest = (
                site.count_covered,
                site.find_model_digest,
            )
            return site

        self.host = SiteHost(make, folder / "state", job=JOB, name="s0", guard=guard)
        self.svms = LinearSVMs(
            [(ABSENT, PRESENT)] * len(DISEASES), VOCABULARY, config.model.classifier
        )
        self.number = 0
        self.ask(
            "prepare",
            {
                "classes": torch.tensor([[1.0, 1.0, 0.0]] * len(DISEASES)),
                "idf": torch.ones(VOCABULARY, dtype=torch.float64),
            },
        )
        self.prepared = self.number

    def ask(self, task: str, tensors: Any, counted: int = 0) -> Reply:
        """Ask for a task after the request with the number `counted`."""
        self.number += 1
        at = dict.fromkeys(SITES, counted)
        request = Request(
            JOB, 1, self.number, task, tensors=tensors, counted=at, first=True
        )
        return decode_reply(self.host.handle(encode_message(request)))

    def calibrate(self, concept: int, slope: float, counted: int) -> Reply:
        """Ask about classifiers that score patients by one concept."""
        sent = self.svms.to_float32()
        sent["svm.weight"][concept] = 1.0
        platt = torch.tensor([[slope, 0.0]] * len(DISEASES), dtype=torch.float64)
        return self.ask("calibrate", {**sent, "platt": platt}, counted)


def test_a_resumed_run_calibrates_one_model(tmp_path: Path) -> None:
    site = Calibrated(tmp_path, OPEN)
    first = site.calibrate(7, slope=1.0, counted=site.prepared)
    assert first.update is not None
    last = site.number
    second = site.calibrate(8, slope=1.0, counted=last)
    assert second.update is None
    assert "a run can calibrate only one model" in second.refusal
    again = site.calibrate(7, slope=2.0, counted=last)
    assert again.update is not None


def test_a_server_that_rewinds_a_site_calibrates_at_most_one_model_per_round(
    tmp_path: Path,
) -> None:
    """Otherwise each model could tell one held-out patient apart from the others."""
    rules = replace(OPEN, max_rounds=2)
    site = Calibrated(tmp_path, rules)
    replies = [
        site.calibrate(concept, slope=1.0, counted=site.prepared)
        for concept in range(5)
    ]
    answered = [reply.update is not None for reply in replies]
    assert answered == [True, True, False, False, False]
    assert "refused by max_rounds" in replies[-1].refusal
    known = site.calibrate(1, slope=2.0, counted=site.prepared)
    assert known.update is not None
