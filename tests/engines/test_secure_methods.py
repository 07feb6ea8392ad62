"""Every method under the secure sum: each sum, and what the job ends with, against
plain sums (`compared_sums.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_sums import compare
from made_sites import made_notes, mentions, notes_of
from tiny_models import save_bert

from fednotes.core.types import SiteData, TagSet
from fednotes.data.synthetic import generate
from fednotes.encoders.language_model import LanguageModelConfig
from fednotes.methods import adversarial, distill, fedner, finetune, personal, pretrain
from fednotes.taggers.tagger import TaggerConfig
from fednotes.taggers.token_classifier import TokenClassifierConfig

TAGGER = TaggerConfig(
    char_dim=6,
    char_filters=8,
    cnn_filters=10,
    lstm_units=5,
    hashed_words=50,
    word_dim=4,
)


LOOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return [site.data for site in generate(num_sites=4, sentences_per_site=16, seed=5)]


@pytest.mark.parametrize(
    ("exchange", "words"), [("gradients", 50), ("weights", 50), ("gradients", 1500)]
)
def test_fedner(sites: list[SiteData], exchange: str, words: int) -> None:
    """The shares of the mini-batch follow from one sum, which must be exact, and so
    must marks."""
    tags = sites[0].tags
    for site in sites[1:]:
        tags = tags.union(site.tags)
    settings = fedner.Config(
        model=replace(TAGGER, hashed_words=words), batch_size=10, epochs=2, seed=3, tags=tags,
        exchange=exchange,
    )  # fmt: skip
    engine, *_ = compare(fedner.METHOD, sites, settings)
    assert {"count", "take_share", "evaluate", "finish"} <= {
        t for t, _, _ in engine.pairs
    }
    sizes = [len(site.train_set.lengths) for site in engine._sites]
    assert len(set(sizes)) > 1
    expected = [int(10 * size / sum(sizes) + 0.5) for size in sizes]
    assert [site.share for site in engine._sites] == [
        max(1, share) for share in expected
    ]
    assert [site.scores for site in engine._sites] != [{}] * 4


@pytest.mark.parametrize(
    "changes",
    [{"weighting": True}, {"weighting": False, "unannotated": "soft"}],
    ids=str,
)
def test_distill(sites: list[SiteData], changes: Mapping[str, Any]) -> None:
    """With weighting, a site takes its own part out of the sum that it is sent."""
    base = distill.Config(
        model=TAGGER, batch_size=8, rounds=2, seed=3, learning_rate=0.01
    )
    settings = distill.METHOD.configure(replace(base, **changes), sites)
    engine, plain, *_ = compare(distill.METHOD, sites, settings)
    if changes["weighting"]:
        for one, other in zip(engine._sites, plain, strict=True):
            assert not np.all(one.weights == 1)
            np.testing.assert_allclose(one.weights, other.weights, rtol=1e-5)


def test_adversarial(sites: list[SiteData]) -> None:
    base = adversarial.Config(
        model=TAGGER, rounds=2, seed=3, learning_rate=0.01, variant="peng"
    )
    compare(adversarial.METHOD, sites, adversarial.METHOD.configure(base, sites))


def test_pretrain_and_finetune(tmp_path: Path) -> None:
    """A tiny BERT: pre-trained by three sites with the server's optimizer and
    compression, then fine-tuned with private layers."""
    pytest.importorskip("transformers")
    bert = save_bert(tmp_path / "bert")
    model = LanguageModelConfig(encoder=str(bert))
    settings = pretrain.Config(
        model=model,
        cycles=2,
        batch_size=4,
        length=24,
        learning_rate=1e-3,
        seed=5,
        server="yogi",
    )
    text = [notes_of(f"s{seed}", made_notes(seed, 8 + 4 * seed)) for seed in range(3)]
    compare(pretrain.METHOD, text, settings, cache=tmp_path / "cache", close=LOOSE)
    own = [mentions(f"s{i}", i, 6 + 2 * i) for i in range(3)]
    base = finetune.Config(
        model=TokenClassifierConfig(encoder=str(bert)), cycles=2, batch_size=4,
        learning_rate=3e-3, seed=3, min_tokens=0, min_steps=0,
    )  # fmt: skip
    compare(finetune.METHOD, own, finetune.METHOD.configure(base, own), close=LOOSE)


@pytest.mark.parametrize("compression", ["none", "packed"])
def test_personal(tmp_path: Path, compression: Any) -> None:
    """Sites with one type in common, of which each sum says how many notes are behind
    it."""
    pytest.importorskip("transformers")
    model = TokenClassifierConfig(
        encoder=str(save_bert(tmp_path / "bert")), train="lora"
    )
    own = [mentions(f"s{i}", i, 6 + 2 * i) for i in range(4)]
    own[1:] = [
        replace(site, tags=TagSet(("drug", f"other{i % 2}")))
        for i, site in enumerate(own[1:])
    ]
    own[0] = replace(
        own[0],
        tags=TagSet(("other0",)),
        train=tuple(replace(d, spans=()) for d in own[0].train),
        test=(),
        valid=(),
    )
    base = personal.Config(
        model=model, cycles=2, batch_size=4, learning_rate=3e-3, compression=compression
    )
    settings = personal.METHOD.configure(base, own)
    assert settings.shared_tags == ("B-other0", "I-other0", "B-drug", "I-drug")
    step = {"rtol": 0.0, "atol": 1e-2}  # a number may round to the next of 25 levels
    engine, *_ = compare(
        personal.METHOD, own, settings, close=LOOSE if compression == "none" else step
    )
    asked = "train" if compression == "none" else "send"
    (counted, *_) = [
        total.tensors["counted"] for task, total, _ in engine.pairs if task == asked
    ]
    wanted = np.array([6 + 8 + 12, 6 + 8 + 12, 8 + 10 + 12, 8 + 10 + 12], np.float64)
    if compression == "packed":  # weighed by what of all notes is a site's
        wanted *= 4 / (6 + 8 + 10 + 12)
    np.testing.assert_allclose(counted.numpy(), wanted, rtol=1e-6)
