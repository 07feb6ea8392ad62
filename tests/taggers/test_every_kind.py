"""What methods require of a model, tested with every kind of tagger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import (
    DOCUMENTS,
    KINDS,
    SAMPLE_KINDS,
    TAGS,
    add_sample_kinds,
    dropout,
    make,
)
from other_packages import leave_out_others

from fednotes.core.errors import ConfigError, DataError, ModelError, TrainingError
from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers.saving import find_config_class, list_model_kinds

pytest.importorskip("transformers")
SMALL_MODELS = KINDS | SAMPLE_KINDS  # the samples too, which have few settings
every_kind = pytest.mark.parametrize("kind", SMALL_MODELS)
ORDER = [4, 0, 2, 5, 1, 3]


@pytest.fixture(scope="module", autouse=True)
def sample_kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the sample kinds beside the others, as a contributor does."""
    with pytest.MonkeyPatch.context() as patch:
        add_sample_kinds(tmp_path_factory.mktemp("samples"), patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the encoders of the small models."""
    return tmp_path_factory.mktemp("backbones")


def partly(model: Any, known: tuple[str, ...] = ("Drug",)) -> Any:
    """Return the corpus of a site that annotates only the known types."""
    return model.annotate(model.prepare(DOCUMENTS), DOCUMENTS, known)


def test_every_kind_of_tagger_has_a_small_model() -> None:
    tested = {small.settings["kind"] for small in SMALL_MODELS.values()}
    missing = set(leave_out_others("taggers", list_model_kinds())) - tested
    assert not missing, f"add {missing} to KINDS in tests/helpers/every_kind.py"


@every_kind
def test_the_losses_of_a_sentence_do_not_depend_on_other_sentences(
    kind: str, folder: Path
) -> None:
    """Losses and predictions of a sentence do not depend on the other sentences.

    The source and target parts add up to the loss of a site that annotates all types,
    which has no target part.
    """
    model = make(kind, folder).eval()
    corpus, complete = partly(model), model.losses(model.prepare(DOCUMENTS), ORDER)
    together = model.losses(corpus, ORDER)
    assert not complete.target.any()
    assert not complete.target.requires_grad or not SMALL_MODELS[kind].tags_words
    torch.testing.assert_close(together.source + together.target, complete.source)
    for place, sentence in enumerate(ORDER):
        alone = model.losses(corpus, [sentence])
        torch.testing.assert_close(together.source[place], alone.source[0])
        torch.testing.assert_close(together.target[place], alone.target[0])
    assert bool((together.target > 0.1).any())
    assert (
        together.hidden,
        together.outputs,
        together.is_added,
        together.score_states,
    ) == (
        (),
        *[None] * 3,
    )
    predicted = model.predict(DOCUMENTS)
    assert predicted == model.predict(model.prepare(DOCUMENTS, gold=False))
    assert predicted == tuple(model.predict([d])[0] for d in DOCUMENTS)
    bare = tuple(Document(d.id, d.text, sentences=d.sentences) for d in DOCUMENTS)
    assert predicted == model.predict(bare)


@pytest.mark.parametrize(
    "kind", [kind for kind, small in SMALL_MODELS.items() if small.tags_words]
)
@pytest.mark.parametrize("soft", [False, True])
def test_gradients_equal_those_of_a_loop_over_sentences(
    kind: str, soft: bool, folder: Path
) -> None:
    """`gradients` returns what autograd through `losses` gives sentence by sentence.

    It ignores dropout in training mode and accumulates nothing in `grad`.
    `test_prompt_bart.py` tests the kinds that do not tag words, in float64.
    """
    model = make(kind, folder, **dropout(kind, 0.3))
    teacher = make(kind, folder, seed=2)
    close = {}
    if SMALL_MODELS[kind].in_double:
        model = model.double()
    else:
        close = {"atol": 1e-4, "rtol": 1e-4}
    weight = model.get_parameter(model.transfer)
    for known in ((), ("Drug",), TAGS.types):
        corpus = partly(model, known)
        if soft:
            corpus = teacher.soften(corpus)
            again = teacher.train().soften(corpus)
            assert teacher.training
            if known != TAGS.types:
                np.testing.assert_array_equal(corpus.soft.unary, again.soft.unary)
        each, total = model.train().gradients(corpus, ORDER)
        assert model.training
        assert all(p.grad is None for p in model.parameters())
        model.eval()
        summed = torch.zeros_like(total)
        for row, sentence in zip(each, ORDER, strict=True):
            losses = model.losses(corpus, [sentence])
            (expected,) = torch.autograd.grad(
                losses.source.sum(), weight, retain_graph=True
            )
            torch.testing.assert_close(row, expected.flatten(), **close)
            if losses.target.requires_grad:
                summed += torch.autograd.grad(losses.target.sum(), weight)[0].flatten()
        torch.testing.assert_close(total, summed, **close)
        assert (bool(each.any()), bool(total.any())) == (
            bool(known),
            known != TAGS.types,
        )
    none, total = model.gradients(corpus, [])
    assert none.shape == (0, len(total))


@every_kind
def test_the_seed_determines_the_initial_parameters(kind: str, folder: Path) -> None:
    """The seed alone determines the initial parameters.

    The global random state does not change, and the loss depends on every parameter.
    """
    state = torch.random.get_rng_state()
    first, again, reseeded = (
        make(kind, folder, seed, stirred=False) for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.random.get_rng_state())
    names = list(first.trainable())
    assert names == sorted(names)
    for name, parameter in first.trainable().items():
        assert torch.equal(parameter, again.trainable()[name])
    moved = [
        not torch.equal(p, reseeded.trainable()[name])
        for name, p in first.trainable().items()
    ]
    assert any(moved)
    model = make(kind, folder)
    model.losses(model.prepare(DOCUMENTS), ORDER).source.sum().backward()
    assert not [name for name, p in model.trainable().items() if p.grad is None]


@every_kind
def test_losses_return_states_for_distillation(kind: str, folder: Path) -> None:
    """`losses` returns the hidden states and outputs that distillation compares."""
    model = make(kind, folder).eval()
    losses = model.losses(partly(model), ORDER, with_states=True)
    assert [h.shape for h in losses.hidden] == [(6, width) for width in model.widths]
    assert (
        losses.outputs.shape == (len(losses.is_added), model.output_width)
        or not SMALL_MODELS[kind].tags_words
    )
    assert bool(losses.is_added.any())
    assert not losses.is_added.all()
    assert len(losses.score_states(losses.outputs)) == len(losses.is_added)


RATES = {kind: small.learning_rate for kind, small in SMALL_MODELS.items()}


@pytest.mark.parametrize("kind", [kind for kind, rate in RATES.items() if rate])
def test_a_model_learns_its_training_notes_by_heart(kind: str, folder: Path) -> None:
    """A trained model predicts the gold spans of its training notes.

    Prediction leaves the model in training mode. The number of steps that training
    takes depends on the processor.
    """
    model = make(kind, folder, stirred=False, **dropout(kind, 0.0))
    corpus = model.prepare(DOCUMENTS)
    assert model.predict(DOCUMENTS) != DOCUMENTS
    adam = torch.optim.Adam(model.trainable().values(), lr=RATES[kind])
    loss, steps = float("inf"), 0
    while loss > 0.01 and steps < 2000:
        adam.zero_grad()
        mean_loss = model.losses(corpus, ORDER).source.mean()
        mean_loss.backward()
        adam.step()
        loss, steps = float(mean_loss.detach()), steps + 1
    model.train()
    assert model.predict(corpus) == DOCUMENTS
    assert model.predict(DOCUMENTS) == DOCUMENTS
    assert model.training


@every_kind
def test_wrong_corpora_and_settings_are_refused(kind: str, folder: Path) -> None:
    model = make(kind, folder)
    corpus = model.prepare(DOCUMENTS)
    with pytest.raises(ModelError, match="another kind of model"):
        model.losses(object(), [0])
    with pytest.raises(TrainingError, match="without sentences"):
        model.losses(corpus, [])
    with pytest.raises(ConfigError, match="no entity types"):
        make(kind, folder, tagset=TagSet(()))
    with pytest.raises(DataError, match="'Sign' is not in the tag set"):
        model.prepare([Document("a", "pain", (Span(0, 4, "Sign"),))])
    with pytest.raises(ConfigError, match="'Drugs'"):
        model.annotate(corpus, DOCUMENTS, ["Drugs"])
    setting = SMALL_MODELS[kind].setting
    with pytest.raises(ConfigError, match=f"did you mean '{setting}'"):
        make(kind, folder, **{setting[:-1]: 0.1})
    assert model.predict([]) == ()
    texts = ("", " \n\t ", "\u200b \u200b", "\x00")
    predicted = model.predict([Document(str(i), text) for i, text in enumerate(texts)])
    assert [d.text for d in predicted] == list(texts)
    assert not any(d.spans for d in predicted[:2])


@every_kind
def test_mentions_that_may_overlap_are_read_or_refused(kind: str, folder: Path) -> None:
    """A nested mention adds to the loss of a kind that can find it."""
    tagset = TagSet(TAGS.types, overlaps=True)
    small = SMALL_MODELS[kind]
    if not find_config_class(small.settings["kind"]).finds_overlaps:
        with pytest.raises(ConfigError, match=r"cannot find them: use .*type-scorer"):
            make(kind, folder, tagset=tagset)
        return

    text = "took aspirin ."
    outer, inner = Span(0, 12, "ADR"), Span(5, 12, "Drug")
    model = make(kind, folder, tagset=tagset).eval()
    nested = model.prepare([Document("1", text, (outer, inner))])
    losses = [
        model.losses(corpus, [0]).source
        for corpus in (
            nested,
            model.annotate(nested, [Document("1", text, (outer,))], TAGS.types),
            model.annotate(nested, nested.documents, TAGS.types),
        )
    ]
    assert not torch.allclose(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])
