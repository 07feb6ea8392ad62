"""`min_batch` at a site that holds fewer examples than a mini-batch of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import Guarded
from tiny_taggers import MODEL

from fednotes.apps.deployment.rules.policy import Policy
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Update
from fednotes.methods import distill, finetune
from fednotes.taggers.token_classifier import TokenClassifierConfig

BATCH = 8
TAGS = TagSet(("Drug",))
RULES = Policy(
    secure_sum="off", freeze_embeddings=False, share_scores=True, min_batch=BATCH
)


def site_of(sentences: int) -> SiteData:
    """Return a site whose notes have one sentence each."""
    notes = [
        Document(str(number), "Aspirin helps", (Span(0, 7, "Drug"),))
        for number in range(sentences)
    ]
    return SiteData("b", TAGS, tuple(notes), (), ())


def averaged(bert: Path, data: SiteData, epochs: float) -> Any:
    config = finetune.Config(
        model=TokenClassifierConfig(encoder=str(bert)),
        batch_size=BATCH,
        local_epochs=epochs,
        tags=TAGS,
    )
    return finetune.Site(data, config)


def distilled(bert: Path, data: SiteData, epochs: float) -> Any:
    del bert
    config = distill.Config(
        model=MODEL,
        batch_size=BATCH,
        local_epochs=epochs,
        weighting=False,
        tags=TAGS,
    )
    return distill.Site(data, config)


@pytest.mark.parametrize("make", [averaged, distilled])
@pytest.mark.parametrize("examples", [BATCH - 1, BATCH, BATCH + 1])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_site_with_fewer_examples_than_min_batch_sends_no_update(
    make: Any, examples: int, epochs: int, bert: Path, tmp_path: Path
) -> None:
    """Its only mini-batch is all that it has, whatever size the job names."""
    member = make(bert, site_of(examples), epochs)
    assert member.num_examples == examples
    covered = member.count_covered("train")
    assert covered["batch"] == min(examples, BATCH)
    refusal = refusal_of(tmp_path, covered)
    assert refusal.startswith("refused by min_batch") == (examples < BATCH)
    assert (refusal == "") == (examples >= BATCH)


@pytest.mark.parametrize("make", [averaged, distilled])
def test_an_incomplete_mini_batch_counts_for_min_batch(
    make: Any, bert: Path, tmp_path: Path
) -> None:
    """A half of an epoch of 8 + 1 examples is one mini-batch, the first or the last."""
    covered = make(bert, site_of(BATCH + 1), 0.5).count_covered("train")
    assert (covered["steps"], covered["batch"]) == (1, 1)
    assert refusal_of(tmp_path, covered).startswith("refused by min_batch")


def refusal_of(folder: Path, covered: dict[str, int]) -> str:
    """Return why an update with so much behind it is refused; "" if it leaves."""
    site = Guarded(folder, RULES, [Update({"lstm.w": torch.ones(4)}, 2.0)])
    site.covered = covered
    return site.ask("train", 1).refusal
