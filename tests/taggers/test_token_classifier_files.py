"""Token classifiers as Hugging Face directories: own, foreign and damaged ones."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rounding
import torch
from safetensors.torch import load_file, save_file
from small_classifiers import TAGS, build, loud, notes
from tiny_models import save_encoder

from fednotes.core.errors import ModelError
from fednotes.core.types import TagSet
from fednotes.taggers.saving import build_model, load_model, save_model
from fednotes.taggers.token_classifier import TokenClassifier, read_earlier_types

transformers = pytest.importorskip("transformers")

# ---- directories ---------------------------------------------------------------------


def auto(path: Path) -> Any:
    return transformers.AutoModelForTokenClassification.from_pretrained(path).eval()


def same_logits(
    model: TokenClassifier, reference: Any, rows: list[int] | None = None
) -> None:
    documents = notes(4)
    corpus = model.prepare(documents, gold=False)
    logits_here = model._read(corpus, np.arange(corpus.sentences)).logits
    words = [d.text[a:b].split() for d in documents for a, b in d.sentences]
    reference_rows = []
    for text in words:
        inputs = model.tokenizer(text, is_split_into_words=True, return_tensors="pt")
        first = [inputs.word_ids().index(i) for i in range(len(text))]
        with torch.no_grad():
            reference_rows.append(reference(**inputs).logits[0, first])
    logits = torch.cat(reference_rows)
    config = reference.config
    close = rounding.transformer(
        config.num_hidden_layers, config.hidden_size, float(logits.abs().max())
    )
    expected = logits if rows is None else logits[:, rows]
    torch.testing.assert_close(logits_here, expected, rtol=0, atol=close)


@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
def test_the_library_loads_a_saved_model_with_the_same_output(
    scheme: Any, tmp_path: Path
) -> None:
    """The same logits from `AutoModelForTokenClassification`, and whatever was set
    here."""
    bert = save_encoder(
        tmp_path / "bert", "BertForMaskedLM", max_position_embeddings=40
    )
    tags = TagSet(("Drug", "a-b"), scheme)
    settings = {
        "context": "document",
        "window": 30,
        "max_tokens": 50,
        "train": "top",
        "top": 1,
    }
    model = loud(build(bert, tags, **settings, dropout=0.2))
    save_model(model, tmp_path / "model")
    names = sorted(f.name for f in (tmp_path / "model").iterdir())
    assert names == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    assert facts["architectures"] == ["BertForTokenClassification"]
    assert [facts["id2label"][str(i)] for i in range(len(tags.tags))] == list(tags.tags)
    assert facts["label2id"] == {tag: i for i, tag in enumerate(tags.tags)}
    for name in ("config.json", "tokenizer_config.json"):
        assert str(tmp_path) not in (tmp_path / "model" / name).read_text()
    shutil.rmtree(bert)  # it is all in the folder
    reopened = auto(tmp_path / "model")
    for name, value in reopened.state_dict().items():
        assert torch.equal(value, model.library.state_dict()[name])
    state = torch.random.get_rng_state()
    loaded = load_model(tmp_path / "model")
    assert torch.equal(state, torch.random.get_rng_state())
    assert isinstance(loaded, TokenClassifier)
    assert not loaded.training
    assert loaded.tagset == tags
    assert replace(loaded.config, encoder=model.config.encoder) == model.config
    assert list(loaded.trainable()) == list(model.trainable())
    assert loaded.predict(notes(4)) == model.predict(notes(4))
    object.__setattr__(loaded.config, "context", "sentence")
    same_logits(loaded, reopened)
    again = build_model(loaded.config, TAGS, 3)  # its encoder for other tags
    assert torch.equal(
        dict(again.named_parameters())["encoder.encoder.layer.2.output.dense.weight"],
        reopened.bert.encoder.layer[2].output.dense.weight,
    )


def foreign(path: Path, labels: list[str], **changes: Any) -> Path:
    """Save a model as another program would."""
    named: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {n: i for i, n in enumerate(labels)},
    }
    named |= {"max_position_embeddings": 40}
    return save_encoder(path, "BertForTokenClassification", **named | changes)


@pytest.mark.parametrize(
    ("labels", "types", "scheme"),
    [
        (["I-Drug", "B-ADR", "O", "B-Drug", "I-ADR"], ("Drug", "ADR"), "BIO"),
        (["S-x", "O", "E-x", "I-x", "B-x"], ("x",), "BIOES"),
        (["I-ADR", "I-x-y", "O"], ("ADR", "x-y"), "IO"),
    ],
)
def test_labels_in_any_order_are_accepted(
    labels: list[str], types: tuple[str, ...], scheme: str, tmp_path: Path
) -> None:
    path = foreign(tmp_path / "theirs", labels)
    model = load_model(path)
    assert model.tagset == TagSet(types, scheme)  # type: ignore[arg-type]
    same_logits(model, auto(path), [labels.index(tag) for tag in model.tagset.tags])
    save_model(model, tmp_path / "ours")
    same_logits(load_model(tmp_path / "ours"), auto(tmp_path / "ours"))
    with pytest.raises(ModelError, match="is not a model's folder"):
        save_model(model, path)  # nobody's files are overwritten


@pytest.mark.parametrize(
    ("labels", "kept_rows"),
    [
        (["I-Drug", "B-ADR", "O", "B-Drug", "I-ADR"], {"O": 2, "B-ADR": 1, "I-ADR": 4}),
        (["O", "S-ADR", "B-ADR", "E-ADR", "I-ADR"], {"O": 0, "B-ADR": 2, "I-ADR": 4}),
        (["O", "B-Drug", "I-Drug"], {}),  # no type that both have
        (["I-ADR", "O"], {}),  # what I-ADR says there is said by two tags here
        ([f"LABEL_{i}" for i in range(5)], {}),
        (["NOUN", "O-x", "O"], {}),
    ],
)
def test_an_earlier_classifier_keeps_its_rows_by_tag(
    labels: list[str], kept_rows: dict[str, int], tmp_path: Path
) -> None:
    """Beside an encoder of the same weights, on which all rows start anew."""
    path, tags = foreign(tmp_path / "theirs", labels), TagSet(("Dose", "ADR"))
    earlier = load_file(path / "model.safetensors")
    earlier["classifier.bias"] += torch.arange(1.0, 1.0 + len(labels))
    save_file(earlier, path / "model.safetensors", {"format": "pt"})
    adapted = build(path, tags)
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(facts | {"architectures": ["BertModel"]})
    )
    anew = build(path, tags)
    for row, tag in enumerate(tags.tags):
        for part in ("weight", "bias"):
            adapted_row = getattr(adapted.classifier, part)[row]
            fresh_row = getattr(anew.classifier, part)[row]
            earlier_row = (
                earlier[f"classifier.{part}"][kept_rows[tag]]
                if tag in kept_rows
                else fresh_row
            )
            assert torch.equal(adapted_row, earlier_row), (tag, part)
            assert torch.equal(adapted_row, fresh_row) == (tag not in kept_rows)
    save_model(adapted, tmp_path / "ours")
    assert load_model(tmp_path / "ours").tagset == tags
    assert (read_earlier_types(path), read_earlier_types(tmp_path / "ours")) == (
        (),
        tags.types,
    )


def test_a_tag_that_a_foreign_model_lacks_is_not_predicted(tmp_path: Path) -> None:
    """The biases are so low that a tag which began at 0 would be predicted everywhere."""
    path = foreign(tmp_path / "theirs", ["O", "B-Drug", "B-ADR", "I-ADR"])
    weights = load_file(path / "model.safetensors")
    weights["classifier.bias"] -= 20
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    model = load_model(path)
    assert model.tagset.tags == ("O", "B-Drug", "I-Drug", "B-ADR", "I-ADR")
    corpus = model.prepare(notes(4), gold=False)
    logits = model._read(corpus, np.arange(corpus.sentences)).logits
    lowest = logits[:, [0, 1, 3, 4]].min(-1).values
    assert lowest.max() < 0
    assert (logits[:, 2] < lowest - 10).all()
    assert torch.isfinite(logits).all()


def damage(path: Path, kind: str) -> None:
    weights, config = path / "model.safetensors", path / "config.json"
    facts = json.loads(config.read_text())
    tensors = load_file(weights)
    name = "bert.encoder.layer.0.output.dense.weight"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif kind == "pickled":
        torch.save(tensors, path / "pytorch_model.bin")
        weights.unlink()
    elif kind == "nan":
        tensors["classifier.bias"][0] = float("nan")
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "missing":
        save_file(
            {n: v for n, v in tensors.items() if n != name}, weights, {"format": "pt"}
        )
    elif kind == "narrow":
        tensors["classifier.weight"] = tensors["classifier.weight"][:, 1:].contiguous()
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "no classifier":
        remaining = {n: v for n, v in tensors.items() if "classifier" not in n}
        save_file(remaining, weights, {"format": "pt"})
    elif kind == "not json":
        config.write_text("{")
    elif kind == "list":
        config.write_text("[]")
    elif kind == "no tokenizer":
        for file in path.glob("tokenizer*"):
            file.unlink()
    else:
        changes: dict[str, Any] = {
            "labels": {"id2label": {i: f"LABEL_{i}" for i in range(5)}},
            "no names": {"id2label": dict(enumerate((3, "B-a", "I-a", "B-b", "I-b")))},
            "half a character": {
                "id2label": dict(enumerate(("O", "B-\ud800", "I-\ud800", "B-b", "I-b")))
            },
            "twice": {"id2label": dict(enumerate(("O", "B-a", "I-a", "B-a", "I-b")))},
            "no outside": {
                "id2label": dict(enumerate(("B-a", "I-a", "B-b", "I-b", "B-c")))
            },
            "other kind": {"architectures": ["BertForMaskedLM"]},
            "window": {"fednotes": {"window": 900}},
            "settings": {"fednotes": {"contxt": "document"}},
            "no table": {"fednotes": 3},
            "vocabulary": {"vocab_size": 7},
        }[kind]
        config.write_text(json.dumps(facts | changes))


DAMAGES = {
    "truncated": "cannot be loaded",
    "pickled": "only pickled weights",
    "nan": "'classifier.bias' is not finite",
    "missing": "lack 'bert.encoder.layer.0.output.dense.weight'",
    "no classifier": "lack 'classifier.bias' and 1 more",
    "not json": "damaged",
    "list": "not a model's configuration",
    "no tokenizer": r"no tokenizer beside config\.json",
    "labels": "label 'LABEL_0' is not a tag",
    "no names": "label 3 is not a tag",
    "half a character": "is not a tag",
    "twice": "4 distinct labels, 2 of them entity types, for a classifier of 5 rows",
    "no outside": "one of them O",
    "narrow": "lack 'classifier.weight' and 0 more",
    "other kind": "holds a BertForMaskedLM, which does not find entities yet: fine-tune",
    "window": "window = 900: .* reads at most 40 sub-words",
    "settings": "unknown key 'contxt': did you mean 'context'",
    "no table": "'fednotes' is not a table",
    "vocabulary": "the tokenizer has 15 tokens, but the model's vocabulary has 7",
}


def test_a_damaged_model_is_refused_in_one_line(tmp_path: Path) -> None:
    bert = save_encoder(tmp_path / "bert", max_position_embeddings=40)
    save_model(build(bert), tmp_path / "whole")
    for kind, message in DAMAGES.items():
        path = tmp_path / kind
        shutil.copytree(tmp_path / "whole", path)
        damage(path, kind)
        with pytest.raises(ModelError, match=message) as caught:
            load_model(path)
        assert "\n" not in str(caught.value), kind
        assert str(path) in str(caught.value), kind
        # nor trained
        if kind not in ("labels", "other kind", "window", "settings", "no table"):
            with pytest.raises(ModelError, match=re.escape(str(path))):
                build(path)


def test_a_model_that_diverged_is_not_saved(bert: Path, tmp_path: Path) -> None:
    model = build(bert)
    save_model(model, tmp_path / "model")
    before = {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()}
    with torch.no_grad():
        model.classifier.bias[0] = float("inf")
    with pytest.raises(ModelError, match=r"'classifier\.bias' is not finite"):
        save_model(model, tmp_path / "model")
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == before


def test_a_configuration_of_a_huge_model_is_refused_before_it_is_built(
    tmp_path: Path,
) -> None:
    """A layer of 10^10 units over 32 would take 1.3 TB."""
    bert = save_encoder(
        tmp_path / "bert", "BertForMaskedLM", max_position_embeddings=40
    )
    folder = tmp_path / "classifier"
    save_model(build(bert, TAGS), folder)
    file = folder / "config.json"
    facts = json.loads(file.read_text())
    facts["intermediate_size"] = 10**10
    file.write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="far more than the folder holds"):
        load_model(folder)
