"""Confidence of predicted spans, compared with enumeration of all tag sequences."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import DOCUMENTS, WORDS, make
from sequences import Enumerated, masked

from fednotes.core.errors import DataError, ModelError
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.taggers.crf import CRF, TorchOps

pytest.importorskip("transformers")
TEXT = "took aspirin no pain ."  # 5 words
TYPES = ("ADR", "Drug")
Found = set[tuple[int, int, str]]


def spans_of(tags: list[str]) -> Found:
    """Read a tag sequence as conlleval does: (first word, word after the last,
    type)."""
    spans, start = set(), None
    for at, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        before, _, last = (tags[at - 1] if at else "O").partition("-")
        ends = start is not None and (prefix in "OBS" or before in "ES" or kind != last)
        if ends:
            spans.add((start, at, last))
            start = None
        if prefix != "O" and start is None:
            start = at
    return spans


def summed(
    paths: Any, chances: Any, tagset: TagSet
) -> dict[tuple[int, int, str], float]:
    """Return the probability of each span over all sequences, and of "O"."""
    total: defaultdict[tuple[int, int, str], float] = defaultdict(float)
    for path, chance in zip(paths, chances, strict=True):
        tags = [tagset.tags[i] for i in path]
        for span in spans_of(tags):
            total[span] += chance
        for a, b in itertools.combinations(range(len(tags) + 1), 2):
            total[a, b, "O"] += chance if set(tags[a:b]) == {"O"} else 0.0
    return total


def talking(kind: str, folder: Path, **settings: Any) -> Any:
    """Return a model that finds mentions in these notes."""
    model = make(kind, folder, **settings).eval()
    if kind == "token-classifier":
        with torch.no_grad():
            model.classifier.bias[0] -= 2.0
    return model


def words_of(text: str) -> list[tuple[int, int]]:
    ends = np.cumsum([len(word) + 1 for word in text.split()])
    return [
        (e - 1 - len(w), e - 1)
        for w, e in zip(text.split(), ends.tolist(), strict=True)
    ]


def every_alternative(model: Any, text: str) -> dict[tuple[int, int, str], float]:
    """Return what `alternatives` says of all stretches of words."""
    chances, words = {}, words_of(text)
    document = Document("1", text, sentences=((0, len(text)),))
    for a, b in itertools.combinations(range(len(words) + 1), 2):
        span = Span(words[a][0], words[b - 1][1], "ADR")
        for label, chance in model.compute_alternatives(document, span).items():
            chances[a, b, label] = chance
    return chances


def agree(model: Any, expected: dict[tuple[int, int, str], float]) -> None:
    """Check all stretches with all labels, and the confidences of the predictions."""
    chances = every_alternative(model, TEXT)
    assert len(chances) == 15 * 3
    for place, chance in chances.items():
        assert chance == pytest.approx(expected.get(place, 0.0), rel=1e-4, abs=1e-6), (
            place
        )
    document = Document("1", TEXT, sentences=((0, len(TEXT)),))
    (predicted,) = model.predict([document], confidence=True)
    assert predicted.spans
    starts = {start: n for n, (start, _) in enumerate(words_of(TEXT))}
    ends = {end: n + 1 for n, (_, end) in enumerate(words_of(TEXT))}
    for span in predicted.spans:
        place = starts[span.start], ends[span.end], span.label
        assert span.confidence == pytest.approx(chances[place], rel=1e-4)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
def test_confidences_of_a_crf_are_marginals(
    scheme: Scheme, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the sum over all sequences that the scheme allows and that are read as
    this span."""
    if backend == "torch":
        monkeypatch.setattr(CRF, "_choose_recursions", lambda self, device: TorchOps())
    model = make("tagger", tmp_path, tagset=TagSet(TYPES, scheme)).eval()
    corpus = model.prepare([Document("1", TEXT)], gold=False)
    with torch.no_grad():
        emissions = (
            model._read(corpus, np.array([0])).compute_emissions()[0].double().numpy()
        )
    every = Enumerated.of(emissions, *masked(model.crf.crf))
    agree(model, summed(every.paths, every.p, model.tagset))


@pytest.mark.parametrize("scheme", ["BIO", "IO"])
def test_confidences_of_a_token_classifier_are_products(
    scheme: Scheme, tmp_path: Path
) -> None:
    """Words are independent, so a sequence's probability is a product; an I- may begin
    a span."""
    model = talking("token-classifier", tmp_path, tagset=TagSet(TYPES, scheme))
    corpus = model.prepare([Document("1", TEXT)], gold=False)
    chances = (
        torch.from_numpy(model.compute_emissions(corpus)).double().softmax(-1).numpy()
    )
    paths = list(itertools.product(range(chances.shape[1]), repeat=len(chances)))
    each = [
        float(np.prod([row[tag] for row, tag in zip(chances, p, strict=True)]))
        for p in paths
    ]
    agree(model, summed(paths, each, model.tagset))


@pytest.mark.parametrize("kind", ["tagger", "lora", "token-classifier", "prompt-bart"])
def test_confidences_do_not_change_spans_and_do_not_depend_on_other_documents(
    kind: str, tmp_path: Path
) -> None:
    """With confidences or without; a document's are its own, whoever is read beside it."""
    model = talking(kind, tmp_path)
    many = [Document(str(n), " ".join(WORDS[: 1 + n % 7])) for n in range(12)]
    for documents in (DOCUMENTS, tuple(many)):
        predicted = model.predict(documents, confidence=True)
        assert predicted == model.predict(documents)
        sure = [span.confidence for d in predicted for span in d.spans]
        assert sure
        assert all(0 <= c <= 1 for c in sure)
        assert {s.confidence for d in model.predict(documents) for s in d.spans} == {
            None
        }
        alone = [model.predict([d], confidence=True)[0] for d in documents]
        assert [s.confidence for d in alone for s in d.spans] == pytest.approx(
            sure, rel=1e-4
        )
    assert model.predict([], confidence=True) == ()


def test_a_span_outside_the_text_or_a_sentence_cannot_be_explained(
    tmp_path: Path,
) -> None:
    model = make("tagger", tmp_path)
    text = "took aspirin\n\n\nno pain"
    document = Document("1", text, sentences=((0, 12), (15, 22)))
    for span in (
        Span(12, 15, "ADR"),
        Span(3, 3, "ADR"),
        Span(0, 99, "ADR"),
        Span(-5, 2, "ADR"),
    ):
        with pytest.raises(DataError, match="no word"):
            model.compute_alternatives(document, span)
    with pytest.raises(DataError, match="two sentences"):
        model.compute_alternatives(document, Span(5, 17, "ADR"))
    assert (
        sum(model.compute_alternatives(document, Span(5, 12, "x")).values()) <= 1 + 1e-9
    )
    with pytest.raises(ModelError, match="pointer network"):
        make("prompt-bart", tmp_path).compute_alternatives(document, Span(0, 4, "ADR"))
