"""Every method under the secure sum: each sum, and what the job ends with, against
plain sums.

The plain sum (`Total.of`, float64) is the independent program: the secure one rounds
each weight · value to a grid first, so the two differ by at most half a step of it a
site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_sites import made_notes, mentions, notes_of
from phenotype_patients import config_of, sites_of
from tiny_models import save_bert

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Total, Update
from fednotes.data.synthetic import generate
from fednotes.encoders.language_model import LanguageModelConfig
from fednotes.engines.inprocess import InProcess
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


class Compared(InProcess):
    """Under the secure sum, and each total beside the plain one of the same updates."""

    def __init__(self, sites: Sequence[Any]) -> None:
        super().__init__(sites, secure=True)
        self.own: list[Update] = []
        self.pairs: list[tuple[str, Total, Total]] = []

    def run(self, *arguments: Any) -> Update:
        update = super().run(*arguments)
        tensors = {
            name: value.detach().clone() for name, value in update.tensors.items()
        }
        self.own.append(replace(update, tensors=tensors))
        return update

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        self.own = []
        total = super().sum(task, tensors, **options)
        self.pairs.append((task, total, Total.of(self.own)))
        return total


def check_sums(engine: Compared) -> None:
    """Weights, counts, integers: equal. Other numbers: S steps of a grid of 2^-29 at
    first, and of 2^-47 of the largest sum once there is a last total."""
    seen: dict[tuple[str, str], float] = {}
    names = [site.id for site in engine._sites]
    for task, secure, plain in engine.pairs:
        assert secure.included == tuple(names)
        assert secure.sites == plain.sites
        assert secure.weight == pytest.approx(plain.weight, rel=1e-15)
        assert list(secure.metrics) == list(plain.metrics)
        for name, number in plain.metrics.items():
            if number == int(number):
                assert secure.metrics[name] == number, (task, name)
            assert secure.metrics[name] == pytest.approx(number, rel=1e-14, abs=1e-15)
        assert list(secure.tensors) == list(plain.tensors)
        for name, value in plain.tensors.items():
            assert secure.tensors[name].dtype == torch.float64
            step = seen.get((task, name), 2.0**-29)
            largest = float(value.abs().max()) if value.numel() else 0.0
            torch.testing.assert_close(
                secure.tensors[name],
                value,
                rtol=1e-15,
                atol=len(names) * step,
                msg=f"{task} {name}",
            )
            if torch.equal(value, value.round()):
                assert torch.equal(secure.tensors[name], value), (task, name)
            seen[task, name] = 2.0**-44 * largest if largest else 2.0**-29


def compare(
    method: Any, data: Sequence[Any], settings: Any, **options: Any
) -> tuple[Compared, list[Any], Any, Any]:
    """The job under both; what it returns must be close. options: of a site, and
    `close`."""
    close = options.pop("close", {"rtol": 1e-5, "atol": 1e-6})
    engine, plain = (
        make([method.make_site(own, settings, **options) for own in data])
        for make in (Compared, InProcess)
    )
    ends = [method.train(each, settings) for each in (engine, plain)]
    check_sums(engine)
    assert ends[0].round == ends[1].round
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, value in ends[1].tensors.items():
        torch.testing.assert_close(ends[0].tensors[name], value, **close, msg=name)
    return engine, list(plain._sites), *ends


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
