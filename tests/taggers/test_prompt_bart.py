"""The prompt-tuned pointer network on a tiny random BART."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednotes.core.types import Document, Span, TagSet
from fednotes.encoders.adapters import assign_prompts
from fednotes.taggers.pointer import END, find_first_position
from fednotes.taggers.prompt_bart import (
    Memory,
    PromptBart,
    PromptBartConfig,
    Sources,
    Stepper,
    Targets,
    build_prompt_bart,
    run_teacher_forced,
)

transformers = pytest.importorskip("transformers")

TAGS = TagSet(("Drug", "ADE", "Disease"))
TEXTS = (
    "Clozapine induced akathisia in children with schizophrenia .",
    "no pain",
    "akathisia with Clozapine in no schizophrenia , pain in the ankle and no disease at all .",
    "with",
    "no finding",
)


@pytest.fixture(scope="session")
def model(bart: Path) -> PromptBart:
    return build(bart)


def build(bart: Path, tagset: TagSet = TAGS, **settings: Any) -> PromptBart:
    sizes = {"prompts": 3, "prompt_hidden": 8} | settings
    model = build_prompt_bart(PromptBartConfig(backbone=str(bart), **sizes), tagset, 1)
    with torch.no_grad():  # so that the prompts matter as they do once they are trained
        model.prompts.w2 *= 4
    return model.eval()


def documents() -> list[Document]:
    """Return documents with nested entities, adjacent entities, and none."""
    mentions = (
        [
            ("Clozapine", "Drug"),
            ("akathisia", "ADE"),
            ("akathisia in children", "Disease"),
        ],
        [],
        [
            ("akathisia", "ADE"),
            ("Clozapine", "Drug"),
            ("pain", "ADE"),
            ("in the", "Drug"),
        ],
        [("with", "Disease")],
        [("no", "ADE"), ("finding", "Disease")],
    )
    return [
        Document(
            str(i),
            text,
            tuple(
                Span(text.index(w), text.index(w) + len(w), label) for w, label in spans
            ),
        )
        for i, (text, spans) in enumerate(zip(TEXTS, mentions, strict=True))
    ]


def inner(
    model: PromptBart, corpus: Any, chosen: Sequence[int], prompted: bool = True
) -> Any:
    """Return backbone, prompts, memory and targets of some sentences."""
    at = np.array(chosen)
    backbone, view = model.frozen.backbone, model.frozen.view
    attentions = model.frozen.attentions
    prompts = assign_prompts(attentions, model.prompts()) if prompted else None
    sources = Sources.of(corpus, at, backbone, "cpu")
    memory = Memory.of(view, sources, model._fixed, prompts, with_states=False)
    return view, prompts, sources, memory, Targets.of(corpus, at, "cpu")


def test_default_sizes_are_those_of_the_paper() -> None:
    """Wang et al. 2023, Appendix C: N_q = 10 and h = 400."""
    settings = PromptBartConfig()
    assert (settings.prompts, settings.prompt_hidden) == (10, 400)
    assert not settings.tune_cross_attention


@torch.no_grad()
def test_a_model_without_prompts_equals_stock_bart(
    bart: Path, model: PromptBart
) -> None:
    """Bit for bit transformers' own BartModel, on the embeddings that it is to read."""
    corpus = model.prepare(documents())
    view, _, sources, memory, targets = inner(model, corpus, [0, 1, 2], prompted=False)
    stock = transformers.BartModel.from_pretrained(bart).eval()
    assert stock.config._attn_implementation == "sdpa"
    result = stock(
        input_ids=sources.ids,
        attention_mask=sources.mask,
        decoder_inputs_embeds=memory.read(targets.inputs),
        use_cache=False,
    )
    torch.testing.assert_close(
        memory.states, result.encoder_last_hidden_state, rtol=0, atol=0
    )
    outputs = run_teacher_forced(view, memory, targets, None)
    torch.testing.assert_close(outputs, result.last_hidden_state, rtol=0, atol=0)


@torch.no_grad()
def test_cached_decoding_steps_equal_teacher_forcing(model: PromptBart) -> None:
    """Scores of each cached step as those of one pass over the true targets."""
    corpus = model.prepare(documents())
    view, prompts, _, memory, targets = inner(model, corpus, [2, 0, 4])
    expected = memory.score(run_teacher_forced(view, memory, targets, prompts))
    stepper = Stepper(view, memory, prompts)
    for step, ids in enumerate(targets.inputs.T):
        step_scores = stepper.step(ids)
        torch.testing.assert_close(step_scores, expected[:, step], rtol=0, atol=5e-5)
        assert torch.equal(step_scores == -torch.inf, expected[:, step] == -torch.inf)
    stepper = Stepper(view, memory, prompts)
    stepper.step(targets.inputs[:, 0])
    stepper.keep_rows(torch.tensor([0, 2]))
    step_scores = stepper.step(targets.inputs[[0, 2], 1])
    torch.testing.assert_close(step_scores, expected[[0, 2], 1], rtol=0, atol=5e-5)


def naive_loss(
    model: PromptBart, corpus: Any, sentence: int, known: set[str]
) -> list[float]:
    """Source and target of one sentence: NumPy over the words of the issue, nothing
    shared.

    The decoder is called once a target with all that came before; candidates are
    listed.
    """
    backbone, view = model.frozen.backbone, model.frozen.view
    attentions = model.frozen.attentions
    prompts = assign_prompts(attentions, model.prompts())
    table = view.shared.weight.detach().numpy().astype(np.float64)
    text = corpus.ids[corpus.bounds[sentence] : corpus.bounds[sentence + 1]].tolist()
    call: dict[str, Any] = {"prompts": prompts, "return_dict": True}
    encoded = view.encoder(torch.tensor([[0, *text, 2]]), **call).last_hidden_state
    label_ids = [
        backbone.tokenizer(" " + t.lower(), add_special_tokens=False)
        for t in TAGS.types
    ]
    labels = np.stack([table[i["input_ids"]].mean(axis=0) for i in label_ids])
    source = (encoded[0, 1:-1].detach().numpy() + table[text]) / 2
    candidates = np.concatenate([table[[2]], labels, source])  # END, types, positions
    inputs = np.concatenate([labels, table[text]])
    bounds = corpus.entity_bounds[sentence : sentence + 2]
    targets: list[tuple[int, bool]] = []
    for start, end, kind in corpus.entities[slice(*bounds)].tolist():
        pseudo = TAGS.types[kind] not in known
        targets += [(4 + start, pseudo), (4 + end, pseudo), (1 + kind, pseudo)]
    targets.append((0, False))
    sums, rows = [0.0, 0.0], [table[2]]
    for output, pseudo in targets:
        decoder_inputs = torch.tensor(np.stack(rows)[None], dtype=torch.float32)
        state = view.decoder(
            inputs_embeds=decoder_inputs, encoder_hidden_states=encoded, **call
        )
        scores = candidates @ state.last_hidden_state[0, -1].detach().numpy()
        sums[pseudo] += float(
            np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        )
        sums[pseudo] -= float(scores[output])
        rows.append(inputs[output - 1])
    return sums


def test_losses_equal_a_naive_program(model: PromptBart) -> None:
    """Each sentence against `naive_loss`, in a padded batch. [tagsets eq 3, eq 8, eq 9]"""
    corpus = model.prepare(documents())
    for known in ({"Drug"}, {"ADE", "Disease"}):
        losses = model.losses(model.annotate(corpus, documents(), known), range(5))
        expected = np.array([naive_loss(model, corpus, i, known) for i in range(5)])
        np.testing.assert_allclose(losses.source.detach(), expected[:, 0], rtol=1e-5)
        np.testing.assert_allclose(losses.target.detach(), expected[:, 1], rtol=1e-5)
        assert (losses.target > 0).tolist() == (expected[:, 1] > 0).tolist()


def test_source_and_target_losses_add_up_to_the_total_loss(model: PromptBart) -> None:
    """Source and target make the whole; all types known: no target at all. [tagsets eq
    6]"""
    corpus = model.prepare(documents())
    undivided = model.losses(corpus, range(5))
    assert not undivided.target.any()
    for known in ({"Drug"}, {"ADE", "Disease"}, set()):
        parts = model.losses(model.annotate(corpus, documents(), known), range(5))
        torch.testing.assert_close(parts.source + parts.target, undivided.source)


def naive_decode(
    model: PromptBart, corpus: Any, sentence: int
) -> tuple[list[int], list[float]]:
    """The best of what may come, by a list of all entities and a fresh pass at every
    step; and how probable each was among what could come."""
    words = slice(corpus.encoded.bounds[sentence], corpus.encoded.bounds[sentence + 1])
    first, last = corpus.first[words].tolist(), corpus.last[words].tolist()
    candidates = [(s, -e, t) for s in first for e in last if s <= e for t in range(3)]
    shift, decoded, sure = find_first_position(3), [], []
    view, prompts, _, memory, _ = inner(model, corpus, [sentence])
    for _ in first:  # no more entities than words
        options = {(s + shift, -e + shift, t + 3) for s, e, t in candidates}
        for place in range(3):
            ids = torch.tensor([[*decoded, END]])
            prefix = Targets(ids, ids > 0, ids < 0)
            scores = memory.score(run_teacher_forced(view, memory, prefix, prompts))[
                0, -1
            ]
            ahead = {entity[place] for entity in options} | (
                {END} if place == 0 else set()
            )
            best = max(ahead, key=lambda i: float(scores[i]))
            if best == END:
                return decoded, sure
            decoded.append(best)
            sure.append(float(scores[best].exp() / scores[sorted(ahead)].exp().sum()))
            options = {entity for entity in options if entity[place] == best}
        chosen = (decoded[-3] - shift, shift - decoded[-2], decoded[-1] - 3)
        candidates = [entity for entity in candidates if entity > chosen]
    return decoded, sure


@torch.no_grad()
def test_decoding_equals_a_naive_program(model: PromptBart) -> None:
    """Cached and batched against `naive_decode`, sentence by sentence. [tagsets eq 4]"""
    corpus = model.prepare(documents())
    assert corpus.sentences == 6  # one is cut
    order = np.array([2, 4, 1, 5, 0, 3])
    decoded, sure = model._decode(corpus, order, model.prompts())
    naive = [naive_decode(model, corpus, s) for s in order.tolist()]
    assert [f.tolist() for f in decoded] == [sequence for sequence, _ in naive]
    for row, (sequence, each) in zip(sure, naive, strict=True):
        assert row[: len(sequence)] == pytest.approx(each, rel=1e-3)
    predicted = model.predict(corpus, confidence=True)
    products = sorted(
        float(np.prod(each[n : n + 3]))
        for _, each in naive
        for n in range(0, len(each), 3)
    )
    assert sorted(s.confidence for d in predicted for s in d.spans) == pytest.approx(
        products, rel=1e-3
    )
    assert len({len(f) for f in decoded}) > 1


def test_gradients_per_sentence_equal_those_of_a_loop(bart: Path) -> None:
    """One backward pass against a loop over sentences, float64; they sum to the
    batch's."""
    for tuned in (False, True):
        model = build(bart, tune_cross_attention=tuned, dropout=0.5).double()
        model.frozen = copy.deepcopy(
            model.frozen, {id(m): m for m in getattr(model, "cross", ())}
        )
        model.frozen.view.double()
        model.train()
        corpus = model.annotate(model.prepare(documents()), documents(), {"ADE"})
        order = [2, 0, 1, 4]
        source, target = model.gradients(corpus, order)
        assert model.training
        assert all(p.grad is None for p in model.parameters())
        model.eval()
        q = model.trainable()[model.transfer]
        assert source.shape == (4, q.numel())
        for row, sentence in zip(source, order, strict=True):
            (alone,) = torch.autograd.grad(
                model.losses(corpus, [sentence]).source.sum(), q
            )
            torch.testing.assert_close(row, alone.flatten(), rtol=1e-9, atol=1e-9)
        losses = model.losses(corpus, order)
        for gradient, loss in ((source.sum(0), losses.source), (target, losses.target)):
            (batch,) = torch.autograd.grad(loss.sum(), q, retain_graph=True)
            torch.testing.assert_close(gradient, batch.flatten(), rtol=1e-9, atol=1e-9)
        assert source.abs().max() > 1e-3 < target.abs().max()
        complete = model.annotate(corpus, documents(), TAGS.types)
        assert not model.gradients(complete, order)[1].any()


def test_only_sentences_with_a_target_take_a_second_backward_pass(
    bart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(bart)
    corpus = model.annotate(model.prepare(documents()), documents(), {"ADE"})
    order = [2, 0, 1, 4]
    with_target = int((model.losses(corpus, order).target > 0).sum())
    assert 0 < with_target < len(order)

    rows_of_passes = []
    compute_gradients = torch.autograd.grad

    def record_rows(
        loss: torch.Tensor, leaves: Sequence[torch.Tensor], **options: Any
    ) -> Any:
        rows_of_passes.append(len(leaves[0]))
        return compute_gradients(loss, leaves, **options)

    monkeypatch.setattr(torch.autograd, "grad", record_rows)
    model.gradients(corpus, order)
    without_target = len(order) - with_target
    assert sorted(rows_of_passes) == sorted([with_target, with_target, without_target])


def test_states_are_means_over_sub_words(model: PromptBart) -> None:
    """Means over sub-words, decoder states and their scores; the loss follows from
    them."""
    corpus = model.annotate(model.prepare(documents()), documents(), {"Drug"})
    losses = model.losses(corpus, [2, 1], with_states=True)
    assert (
        [tuple(h.shape) for h in losses.hidden]
        == [(2, w) for w in model.widths]
        == [(2, 32)] * 2
    )
    view, attentions = model.frozen.view, model.frozen.attentions
    text = corpus.ids[corpus.bounds[1] : corpus.bounds[2]].tolist()
    prompts = assign_prompts(attentions, model.prompts())
    alone = view.encoder(
        torch.tensor([[0, *text, 2]]), prompts=prompts, output_hidden_states=True
    )
    for states, layer in zip(losses.hidden, alone.hidden_states[1:], strict=True):
        torch.testing.assert_close(
            states[1], layer[0, 1:-1].mean(0), rtol=1e-4, atol=1e-5
        )
    assert losses.outputs is not None
    assert losses.is_added is not None
    assert losses.score_states is not None
    assert losses.outputs.shape == (3 * 4 + 1 + 1, 32)
    in_order = ("ADE", "Drug", "ADE", "Drug")
    assert (
        losses.is_added.tolist()
        == [t == "ADE" for t in in_order for _ in "set"] + [False] * 2
    )
    scores = losses.score_states(losses.outputs)
    targets = Targets.of(corpus, np.array([2, 1]), "cpu")
    nll = (
        -scores.log_softmax(-1).gather(1, targets.ids[targets.real][:, None]).squeeze(1)
    )
    torch.testing.assert_close(nll[losses.is_added].sum(), losses.target.sum())
    torch.testing.assert_close(nll[~losses.is_added].sum(), losses.source.sum())
    assert (scores[-1] > -torch.inf).sum() == 1 + 3 + corpus.lengths[1]


def test_long_sentences_are_split_and_joined(model: PromptBart) -> None:
    """Beyond the backbone's 38 sub-words: nothing is lost, nothing cut inside an
    entity."""
    text = " ".join(TEXTS[2].replace(" .", " ,") for _ in range(3)) + " Clozapine"
    spans = [
        Span(m, m + 9, "Drug")
        for m in range(len(text))
        if text.startswith("Clozapine", m)
    ]
    spans += [Span(s.start - 5, s.end + 3, "ADE") for s in spans[:-1]]
    long_documents = [Document("long", text, tuple(sorted(spans)))]
    corpus = model.prepare(long_documents)
    assert corpus.sentences > 3
    assert corpus.lengths.max() <= model.limits.subwords == 38
    joined_spans = [
        span
        for s, (a, b) in enumerate(pairwise(corpus.entity_bounds))
        for span in corpus.make_spans(s, corpus.entities[a:b])
    ]
    assert sorted(joined_spans) == sorted(spans)
    assert corpus.encoded.offsets[-1, 1] == len(text)
    assert torch.isfinite(model.losses(corpus, range(corpus.sentences)).source).all()
    assert model.predict(long_documents)[0].text == text


def test_the_backbone_is_shared_and_never_changed(bart: Path) -> None:
    """Models share one copy of the weights, train on it, and leave every byte as it
    was."""
    before = transformers.BartModel.from_pretrained(bart).state_dict()
    prompts_only, cross_tuned = build(bart), build(bart, tune_cross_attention=True)
    tables = [
        m.frozen.view.shared.weight.data_ptr() for m in (prompts_only, cross_tuned)
    ]
    assert tables[0] == tables[1]
    assert set(prompts_only.trainable()) == {"prompts.q", "prompts.w1", "prompts.w2"}
    assert {n.split(".")[0] for n in cross_tuned.trainable()} == {"prompts", "cross"}
    assert set(prompts_only.state_dict()) == set(prompts_only.trainable())
    assert set(cross_tuned.state_dict()) == set(cross_tuned.trainable())
    attention = 2 * 4 * (32 * 32 + 32)
    prompts, frozen = (
        4 * 8 * 3 * 32 + 3 * 32,
        sum(v.numel() for v in prompts_only.frozen.backbone.model.parameters()),
    )
    sizes = [
        sum(p.numel() for p in model.trainable().values())
        for model in (prompts_only, cross_tuned)
    ]
    assert sizes == [prompts, prompts + attention]
    assert (prompts_only.count_frozen(), cross_tuned.count_frozen()) == (
        frozen,
        frozen - attention,
    )
    assert frozen == sum({v.data_ptr(): v.numel() for v in before.values()}.values())
    first = prompts_only.predict(documents())
    fit(cross_tuned, cross_tuned.prepare(documents()), steps=3)
    assert prompts_only.predict(documents()) == first
    for name, value in prompts_only.frozen.backbone.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def fit(model: PromptBart, corpus: Any, steps: int, rate: float = 0.02) -> float:
    optimizer = torch.optim.Adam(model.trainable().values(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.losses(corpus, range(corpus.sentences)).source.sum()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize(("tuned", "rate"), [(True, 0.003), (False, 0.01)])
def test_a_model_learns_two_sentences_by_heart(
    bart: Path, tuned: bool, rate: float
) -> None:
    """Overfitted, with or without its cross-attentions, it predicts what it was given."""
    model = build(bart, tune_cross_attention=tuned, prompts=10)
    pair = [documents()[0], documents()[4]]
    corpus = model.prepare(pair)
    assert model.predict(pair) != tuple(pair)
    assert fit(model, corpus, steps=200, rate=rate) < 4
    assert [sorted(d.spans) for d in model.predict(pair)] == [
        sorted(d.spans) for d in pair
    ]


def test_dropout_applies_only_in_training(bart: Path) -> None:
    """Only where the configuration has it, only in training, from torch's generator
    alone."""
    without, model = build(bart).train(), build(bart, dropout=0.3)
    corpus = model.prepare(documents())
    still = model.losses(corpus, [0, 2]).source
    torch.testing.assert_close(without.losses(corpus, [0, 2]).source, still)
    model.train()
    torch.manual_seed(3)
    first = model.losses(corpus, [0, 2]).source
    assert not torch.allclose(first, model.losses(corpus, [0, 2]).source)
    torch.manual_seed(3)
    assert torch.equal(first, model.losses(corpus, [0, 2]).source)
    assert model.predict(documents()) == without.predict(documents())
    assert model.training
