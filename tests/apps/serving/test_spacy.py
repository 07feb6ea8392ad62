"""A saved model in spaCy pipelines: the spans of `predict` on spaCy's tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_taggers import save_three_words

import fednotes as fn
from fednotes.core.errors import FednotesError
from fednotes.taggers.saving import load_model, save_model

spacy = pytest.importorskip("spacy")
TEXTS = (
    "No pain today. Took metoprolol 5mg twice; felt nausea.",
    "",
    "  \n",
    "Étude: 🙂 pain/nausea (metoprolol-succinate) doesn't help. Fever and cough with pain.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_three_words(tmp_path_factory.mktemp("spacy") / "model")


def offsets(spans: Any) -> list[tuple[int, int, str]]:
    return [(s.start_char, s.end_char, s.label_) for s in spans]


def with_model(path: Path, **config: Any) -> Any:
    nlp = spacy.blank("en")
    nlp.add_pipe("fednotes", config={"model": str(path), **config})
    return nlp


def test_entities_equal_those_of_the_model_with_their_confidence(folder: Path) -> None:
    """Spans by hand; the confidence is the model's own."""
    nlp, model = with_model(folder), fn.load(folder)
    docs = list(nlp.pipe(TEXTS, batch_size=2))
    assert [doc.text for doc in docs] == list(TEXTS)
    assert [[(ent.text, ent.label_) for ent in doc.ents] for doc in docs] == [
        [("pain", "ADR"), ("metoprolol", "Drug"), ("nausea", "ADR")],
        [],
        [],
        [("pain", "ADR"), ("nausea", "ADR"), ("metoprolol", "Drug"), ("pain", "ADR")],
    ]
    for doc, text in zip(docs, TEXTS, strict=True):
        sure = [ent._.confidence for ent in doc.ents]
        assert sure == pytest.approx([span.confidence for span in model(text).spans])
    assert docs[0].ents[2]._.confidence < docs[0].ents[0]._.confidence
    assert offsets(nlp(TEXTS[0]).ents) == offsets(docs[0].ents)
    assert nlp.get_pipe("fednotes").labels == ("ADR", "Drug")


def test_entities_can_go_into_a_span_group_above_a_threshold(folder: Path) -> None:
    docs = list(with_model(folder, spans_key="found").pipe(TEXTS))
    assert not any(doc.ents for doc in docs)
    scores = docs[0].spans["found"].attrs["scores"]
    assert scores.shape == (3,)
    assert scores.dtype == np.float32
    least = float(scores[2] + scores[0]) / 2
    doc = with_model(folder, spans_key="found", threshold=least)(TEXTS[0])
    assert [span.text for span in doc.spans["found"]] == ["pain", "metoprolol"]


@pytest.mark.parametrize(
    ("alignment", "lost"), [("strict", 2), ("contract", 2), ("expand", 1)]
)
def test_mentions_that_do_not_fit_tokens_are_counted(
    alignment: str, lost: int, folder: Path
) -> None:
    """One token for the whole text has room for one of its two mentions, if any."""
    nlp = with_model(folder, alignment=alignment)
    doc = spacy.tokens.Doc(nlp.vocab, words=["No-pain-today-took-metoprolol"])
    with pytest.warns(
        UserWarning, match=f"{lost} mention.* in 1 document.*'{alignment}'"
    ):
        assert len(nlp.get_pipe("fednotes")(doc).ents) == 2 - lost
    assert nlp.get_pipe("fednotes").lost == lost


def test_entities_of_other_components_are_kept(folder: Path) -> None:
    """A ruler before it keeps entities where the model finds nothing; one after it
    reads ents."""
    nlp = with_model(folder)
    ruler = nlp.add_pipe("entity_ruler", before="fednotes")
    ruler.add_patterns(
        [{"label": "MINE", "pattern": word} for word in ("twice", "felt nausea")]
    )
    nlp.add_pipe("merge_entities")
    doc = nlp(TEXTS[0])
    expected = [
        ("pain", "ADR"),
        ("metoprolol", "Drug"),
        ("twice", "MINE"),
        ("nausea", "ADR"),
    ]
    assert [(ent.text, ent.label_) for ent in doc.ents] == expected
    assert all(len(ent) == 1 for ent in doc.ents)


def test_a_saved_pipeline_refers_to_the_model_by_path(
    folder: Path, tmp_path: Path
) -> None:
    nlp = with_model(folder)
    nlp.to_disk(tmp_path / "nlp")
    again = spacy.load(tmp_path / "nlp")
    assert offsets(again(TEXTS[0]).ents) == offsets(nlp(TEXTS[0]).ents)
    nlp.from_bytes(nlp.to_bytes())
    shutil.copytree(folder, tmp_path / "moved")
    changed = {"components": {"fednotes": {"model": str(tmp_path / "moved")}}}
    assert spacy.load(tmp_path / "nlp", config=changed)(TEXTS[0]).ents
    model = load_model(folder)
    model.get_parameter("crf.project.bias").data[0] = 4.0
    save_model(model, tmp_path / "other")
    changed = {"components": {"fednotes": {"model": str(tmp_path / "other")}}}
    with pytest.raises(FednotesError, match="this is not the model"):
        spacy.load(tmp_path / "nlp", config=changed)


def test_a_wrong_folder_or_setting_is_reported_at_once(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(FednotesError, match="no model here"):
        with_model(tmp_path)
    with pytest.raises(Exception, match="alignment"):
        with_model(folder, alignment="sideways")
    with pytest.raises(FednotesError, match="threshold"):
        with_model(folder, threshold=2.0)(TEXTS[0])
