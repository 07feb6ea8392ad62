"""Phenotyping under the secure sum: each sum, and what the job ends with, against plain
sums."""

from __future__ import annotations

import pytest
import torch
from compared_sums import compare
from phenotype_patients import config_of, sites_of

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig


@pytest.mark.parametrize("representation", ["", "none"])
def test_phenotype(representation: str) -> None:
    """Counts of patients are exact; stage 2 sends float64 sums; two stages share task
    names."""
    model = PhenotypeConfig(representation="none") if representation else None
    config = config_of(model=model) if model else config_of()
    own = sites_of(3)
    settings = phenotype.METHOD.configure(config, own)
    engine, _, secure, plain = compare(phenotype.METHOD, own, settings)
    assert dict(secure.facts) == dict(plain.facts)
    counted = [total for task, total, _ in engine.pairs if task.startswith("count_")]
    assert counted
    assert all(
        torch.equal(v, v.round()) for total in counted for v in total.tensors.values()
    )
