"""Taggers: what they compute, share and refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from passages import passage
from tiny_taggers import HashEncoder

from fednotes.core.errors import ConfigError, FednotesError, ModelError
from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers import tagger as tagger_module
from fednotes.taggers.corpora import (
    ATTRIBUTES,
    TaggerCorpus,
    find_word_shape,
    hash_forms,
)
from fednotes.taggers.saving import load_model, save_model
from fednotes.taggers.tagger import (
    LAYERS,
    PRESETS,
    Tagger,
    TaggerConfig,
    build_tagger,
    read_tagger_config,
)

TAGS = TagSet(("ADR", "Drug"))
DRUGS = ("Zoloft", "aspirin", "Lexapro", "metformin", "Effexor-XR")
FINDINGS = ("headache", "dry mouth", "very bad nausea", "insomnia", "weight gain")
NEWER_KEYS = (
    "hashed_prefixes",
    "hashed_suffixes",
    "hashed_shapes",
    "hashes",
    "cnn_layers",
    "cnn_pieces",
)
SMALL = {"char_dim": 8, "char_filters": 12, "cnn_filters": 10, "lstm_units": 7}


def _documents(count: int = 24, seed: int = 0) -> tuple[Document, ...]:
    """Return sentences of 4 to 22 tokens with a drug and a finding."""
    rng = np.random.default_rng(seed)
    documents = []
    for number in range(count):
        drug, finding = str(rng.choice(DRUGS)), str(rng.choice(FINDINGS))
        filler = " ".join(
            rng.choice(["I", "took", "it", "daily", "and", "slept"], rng.integers(16))
        )
        text = f"{filler} {drug} gave me {finding}."
        first, second = text.index(drug), text.rindex(finding)
        spans = (
            Span(first, first + len(drug), "Drug"),
            Span(second, second + len(finding), "ADR"),
        )
        documents.append(
            Document(str(number), text, spans, sentences=((0, len(text)),))
        )
    return tuple(documents)


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    """Write vectors of 5 columns for some of the words."""
    words = [
        "took",
        "it",
        "daily",
        "and",
        "gave",
        "me",
        "headache",
        "aspirin",
        "nausea",
        ".",
    ]
    rng = np.random.default_rng(0)
    lines = (
        f"{w} {' '.join(f'{x:.4f}' for x in rng.standard_normal(5))}" for w in words
    )
    path = tmp_path / "glove.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _build(seed: int = 1, tagset: TagSet = TAGS, **settings: Any) -> Tagger:
    """Return a small tagger; layers that the preset leaves out stay out."""
    preset = PRESETS[settings.get("tagger", "elmoner")]
    small = {name: size for name, size in SMALL.items() if getattr(preset, name)}
    return build_tagger(read_tagger_config(small | settings), tagset, seed)


def _gradients(
    tagger: Tagger, prepared: TaggerCorpus, indices: Sequence[int]
) -> dict[str, Any]:
    tagger.zero_grad()
    loss = tagger.loss(prepared, indices) * len(indices)
    loss.backward()
    return {"loss": loss.detach()} | {
        n: p.grad.clone() for n, p in tagger.trainable().items()
    }


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("cnn-crf", "words cnn crf"),
        ("lstm-crf", "words lstm crf"),
        ("gram-cnn", "words characters cnn crf"),
        ("cnn-lstm-crf", "words characters lstm crf"),
        ("s-lstm-crf", "words lstm crf"),
        ("cnn-clstm-crf", "words characters cnn lstm crf"),
        ("elmoner", "words characters context cnn lstm crf"),
    ],
)
def test_each_preset_has_its_documented_layers(
    name: str, layers: str, glove: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of FedNER's section 4.2; parameters are named after them; all of them
    learn; the loss of a batch is the sum over its sentences, whatever the padding and
    the order."""
    monkeypatch.setattr(
        tagger_module, "load_encoder", lambda spec: HashEncoder(layers=3)
    )
    extra = {"contextual": "x"} if name == "elmoner" else {}
    tagger = _build(tagger=name, word_vectors=str(glove), **extra).eval()
    assert tagger.layers == tuple(layers.split())
    assert set(tagger.layers) <= set(LAYERS)
    trainable = tagger.trainable()
    assert list(trainable) == sorted(dict(tagger.named_parameters()))
    # frozen
    assert {n.split(".")[0] for n in trainable} == set(tagger.layers) - {"words"}
    assert set(tagger.state_dict()) == set(trainable)

    prepared = tagger.prepare(_documents())
    together = _gradients(tagger, prepared, range(24))
    order = np.random.default_rng(0).permutation(24)
    singles = [_gradients(tagger, prepared, [int(i)]) for i in order]
    for key, value in together.items():
        assert float(value.abs().max()) > 0, key
        summed = torch.stack([single[key] for single in singles]).sum(0)
        torch.testing.assert_close(summed, value, rtol=1e-4, atol=2e-4)
    mean = tagger.loss(prepared, order).item()
    assert mean == pytest.approx(together["loss"].item() / 24, rel=1e-5)


def test_the_tagger_of_hashes_needs_no_file_and_all_of_it_learns() -> None:
    tagger = build_tagger(read_tagger_config({"tagger": "hash-cnn"}), TAGS, 1).eval()
    assert tagger.layers == ("words", "cnn", "crf")
    gradients = _gradients(tagger, tagger.prepare(_documents()), range(24))
    assert all(float(value.abs().max()) > 0 for value in gradients.values())


def test_any_text_can_be_predicted() -> None:
    """Nothing, blanks, one sentence of 3,000 tokens, characters outside the inventory."""
    long = Document("long", "word " * 3000, sentences=((0, 15000),))
    odd_note = Document("odd", "患者は頭痛 \U0001f600 é" + "x" * 400)
    documents = (Document("empty", ""), Document("blank", " \n "), long, odd_note)
    tagger = _build(max_tokens=50)
    result = tagger.predict(documents)
    assert [d.id for d in result] == ["empty", "blank", "long", "odd"]
    assert result[0].spans == result[1].spans == ()
    for document in result:
        for span in document.spans:
            assert 0 <= span.start < span.end <= len(document.text)
            assert span.label in TAGS.types
    assert tagger.predict([]) == ()


def test_shared_layers_start_equal_at_all_sites() -> None:
    """Sites with other tag sets and schemes: all layers below the CRF are bitwise
    equal."""
    first_site = _build(hashed_words=16).trainable()
    second_site = _build(
        hashed_words=16, tagset=TagSet(("Disease", "Symptom"), "BIOES")
    ).trainable()
    shared = [name for name in first_site if not name.startswith("crf.")]
    assert {n.split(".")[0] for n in shared} == {"words", "characters", "cnn", "lstm"}
    assert all(torch.equal(first_site[name], second_site[name]) for name in shared)
    assert (
        first_site["crf.project.weight"].shape
        != second_site["crf.project.weight"].shape
    )
    changed = _build(seed=2, hashed_words=16).trainable()
    assert not torch.equal(first_site["cnn.weight_3"], changed["cnn.weight_3"])


def test_frozen_word_vectors_are_shared_and_trained_ones_copied(glove: Path) -> None:
    """Frozen vectors are one table in the process and no state; trained ones are a
    copy."""
    first = _build(word_vectors=str(glove))
    second = _build(seed=9, word_vectors=str(glove))
    assert first.vectors is second.vectors
    assert not [name for name in first.state_dict() if name.startswith("words")]
    trained = _build(word_vectors=str(glove), train_words=True)
    weight = trained.trainable()["words.weight"]
    assert torch.equal(weight, first.vectors.table)
    prepared = trained.prepare(_documents())
    assert torch.equal(
        first.eval().loss(first.prepare(_documents()), range(24)),
        trained.eval().loss(prepared, range(24)),
    )
    trained.loss(prepared, range(24)).backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    with torch.no_grad():
        weight += 1.0
    assert not torch.equal(weight, first.vectors.table)


def test_hashes_of_words_are_the_same_on_every_machine() -> None:
    """zlib's CRC-32 of "123456789" is the published check value 0xCBF43926."""
    assert hash_forms(["123456789"], 1 << 32).tolist() == [[0xCBF43926]]
    assert (
        hash_forms(["Aspirin", "ASPIRIN"], 97).tolist()
        == hash_forms(["aspirin"] * 2, 97).tolist()
    )


FORMS = (
    "Aspirin",
    "HbA1c",
    "x",
    "",
    "IL-2",
    "AAAAAA",
    "12.500",
    "µg",
    "患者",
    "ab" * 40,
)


@pytest.mark.parametrize("attribute", sorted(ATTRIBUTES))
def test_rows_of_hashed_tables_follow_their_definition(attribute: str) -> None:
    """A plain program on Python's integers: CRC-32 bit by bit, then SplitMix64."""
    rows = hash_forms(FORMS, 1009, attribute=attribute, hashes=4)
    for form, row in zip(FORMS, rows.tolist(), strict=True):
        code = _plain_crc32(_plain_attribute(form, attribute).encode())
        numbers = [code, *_plain_split_mix(code, 3)]
        assert row == [number % 1009 for number in numbers], form


def test_the_plain_generator_gives_the_published_numbers() -> None:
    """The first numbers of SplitMix64 from 1234567, as Rosetta Code lists them."""
    assert _plain_split_mix(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def _plain_attribute(form: str, attribute: str) -> str:
    if attribute == "hashed":
        return form.lower()
    if attribute == "prefixes":
        return "".join(c for i, c in enumerate(form) if i < 3)
    if attribute == "suffixes":
        return "".join(c for i, c in enumerate(form) if i >= len(form) - 3)
    shape: list[str] = []
    for c in form:
        sign = "d" if c.isdigit() else c
        if c.isalpha():
            sign = "X" if c.isupper() else "x"
        if shape[-4:] != [sign] * 4:
            shape.append(sign)
    return "".join(shape)


def _plain_crc32(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0xEDB88320 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def _plain_split_mix(state: int, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        numbers.append(z ^ z >> 31)
    return numbers


def test_shapes_of_words_are_as_documented() -> None:
    shapes = {"Metformin-500": "Xxxxx-ddd", "HbA1c": "XxXdx", "...... ": ".... "}
    assert {form: find_word_shape(form) for form in shapes} == shapes


def test_a_word_is_the_sum_of_its_rows_in_each_hashed_table() -> None:
    """A loop over words, tables and rows; with the gradient of every table."""
    tables = {"hashed": 11, "prefixes": 5, "suffixes": 7, "shapes": 3}
    sizes = {f"hashed_{name}": rows for name, rows in tables.items()}
    sizes["hashed_words"] = sizes.pop("hashed_hashed")
    tagger = _build(**sizes, hashes=3, word_dim=4, characters=False)
    corpus = tagger.prepare(_documents(3))
    tokens = np.arange(len(corpus.encoded.form))
    parts = dict(zip(tables, tagger._represent(corpus, tokens), strict=True))
    for name, part in parts.items():
        table = tagger.get_parameter(f"words.{name}")
        rows = hash_forms(corpus.encoded.forms, tables[name], attribute=name, hashes=3)
        expected = torch.zeros_like(part)
        counts = torch.zeros(len(table))
        for token, form in enumerate(corpus.encoded.form.tolist()):
            for row in rows[form].tolist():
                expected[token] += table[row].detach()
                counts[row] += 1
        torch.testing.assert_close(part, expected)
        (gradient,) = torch.autograd.grad(part.sum(), table)
        torch.testing.assert_close(gradient, counts[:, None].expand(-1, 4))
    read = tagger.find_word_rows(corpus, np.arange(corpus.sentences))
    assert read.keys() == {f"words.{name}" for name in tables}
    assert all(len(rows) == 3 * len(tokens) for rows in read.values())


def test_convolutions_have_the_documented_widths(glove: Path) -> None:
    """GRAM-CNN's are of 2, 3 and 4 words side by side, all others' of 3."""
    for name, widths in (
        ("gram-cnn", (2, 3, 4)),
        ("cnn-crf", (3,)),
        ("cnn-clstm-crf", (3,)),
    ):
        parameters = _build(tagger=name, word_vectors=str(glove)).trainable()
        shapes = {
            n: p.shape[0] for n, p in parameters.items() if n.startswith("cnn.weight")
        }
        assert shapes == {f"cnn.weight_{width}": width for width in widths}, name


def test_dropout_applies_to_each_part_of_a_representation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On each part of a word's representation, after the CNN and after the LSTM: by the
    widths of what it is given, and each result goes on into the layer above."""
    calls: list[tuple[int, float, bool]] = []

    def zeros(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
        calls.append((x.shape[1], rate, training))
        return x * (len(calls) != blocked)

    monkeypatch.setattr(tagger_module, "dropout", zeros)
    sizes = {"hashed_words": 9, "word_dim": 4, "char_filters": 5, "cnn_filters": 6}
    tagger = _build(**sizes, lstm_units=7, dropout=0.4).train()
    prepared, outputs = tagger.prepare(_documents()), []
    for blocked in (0, 1, 2, 3, 4):  # noqa: B007 - `zeros` reads it
        calls.clear()
        outputs.append(float(tagger.loss(prepared, range(24)).detach()))
        assert calls == [
            (4, 0.4, True),
            (5, 0.4, True),
            (6, 0.4, True),
            (14, 0.4, True),
        ]
    assert outputs[3] == outputs[4]  # an LSTM that reads zeros gives zeros at first
    assert len(set(outputs)) == 4


def test_dropout_follows_the_global_generator() -> None:
    tagger = _build(dropout=0.5)
    prepared = tagger.prepare(_documents())
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(tagger.loss(prepared, range(24)).item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(("layers", "project"), [(1, 0), (1, 4), (3, 0), (3, 4)])
def test_contextual_features_equal_equation_1_of_peters_et_al(
    layers: int, project: int
) -> None:
    """Peters et al. 2018, Eq. 1 in NumPy: γ Σ softmax(s)_j h_j, then the projection."""
    config = read_tagger_config(
        SMALL
        | {"contextual": "x", "project": project, "characters": False, "dropout": 0.0}
    )
    encoder = HashEncoder(layers=layers)
    tagger = Tagger(config, TAGS, 1, None, encoder)
    names = {n for n in tagger.trainable() if n.startswith("context.")}
    expected = {"context.mix", "context.gamma"} if layers > 1 else set()
    assert names == expected | (
        {"context.project", "context.bias"} if project else set()
    )
    features = encoder.encode([passage(["a", "b", "c"])]).astype(np.float32)
    mixed = features[:, 0]
    if layers > 1:
        scores = np.array([0.3, -1.0, 0.5], np.float32)
        with torch.no_grad():
            tagger.context.mix.copy_(torch.from_numpy(scores))
            tagger.context.gamma.fill_(1.7)
        weights = np.exp(scores) / np.exp(scores).sum()
        mixed = 1.7 * np.einsum("l,tld->td", weights, features)
    if project:
        mixed = mixed @ tagger.context.project.detach().numpy().T
    np.testing.assert_allclose(
        tagger.context(torch.from_numpy(features)).detach().numpy(),
        mixed,
        rtol=1e-5,
        atol=1e-6,
    )
    prepared = tagger.prepare(_documents())
    assert prepared.context is not None
    assert prepared.context.dtype == np.float16
    assert all(
        float(g.abs().max()) > 0
        for g in _gradients(tagger, prepared, range(24)).values()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tagger": "elmonner"}, "did you mean 'elmoner'"),
        ({"lstm_unit": 3}, "model: unknown key 'lstm_unit': did you mean 'lstm_units'"),
        ({"lstm_units": "3"}, "model lstm_units = '3': expected a whole number"),
        ({"lstm_units": True}, "lstm_units = True: expected a whole number"),
        ({"characters": 1}, "characters = 1: expected true or false"),
        ({"cnn_widths": [3, "5"]}, "cnn_widths = '5': expected a whole number"),
        ({"cnn_widths": 3}, "cnn_widths = 3: expected a list"),
        ({"dropout": "0.1"}, "dropout = '0.1': expected a number"),
        ({"cnn_widths": [3, 3]}, "distinct widths"),
        ({"cnn_widths": []}, "distinct widths"),
        ({"cnn_filters": -1}, "cnn_filters = -1: expected at least 0"),
        ({"char_max": 2}, "char_max = 2: expected at least 3"),
        ({"dropout": 1.0}, "dropout = 1.0: expected less than 1"),
        ({"train_words": True}, "needs word_vectors"),
        ({"project": 5}, "needs contextual"),
        ({"tagger": ["elmoner"]}, "unknown tagger"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tagger_config(settings)


def test_settings_override_the_preset() -> None:
    config = read_tagger_config(
        {"tagger": "lstm-crf", "dropout": 0, "cnn_widths": [5, 3]}
    )
    assert config == replace(PRESETS["lstm-crf"], dropout=0.0, cnn_widths=(5, 3))
    with pytest.raises(ConfigError, match="'cnn-crf' has no input"):
        build_tagger(PRESETS["cnn-crf"], TAGS, 1)
    with pytest.raises(ConfigError, match="no entity types"):
        build_tagger(TaggerConfig(), TagSet(()), 1)


# --- saved taggers --------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, glove: Path) -> tuple[Tagger, Path]:
    tagger = _build(word_vectors=str(glove), hashed_words=32)
    with torch.no_grad():
        for parameter in tagger.parameters():
            parameter.mul_(3.0)
    save_model(tagger, tmp_path / "model")
    return tagger, tmp_path / "model"


def test_word_vectors_may_have_moved_but_not_changed(
    saved: tuple[Tagger, Path],
) -> None:
    tagger, path = saved
    moved = path.parent / "moved.txt"
    shutil.move(path.parent / "glove.txt", moved)
    with pytest.raises(ModelError, match=r"glove\.txt: cannot read word vectors"):
        load_model(path)
    loaded = load_model(path, word_vectors=moved)
    assert loaded.predict(_documents()) == tagger.predict(_documents())
    moved.write_text(moved.read_text().replace("took", "take"))
    with pytest.raises(ModelError, match="other content: put the right file there"):
        load_model(path, word_vectors=moved)


def test_another_encoder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tagger_module, "load_encoder", lambda spec: HashEncoder())
    tagger = _build(contextual="here")
    save_model(tagger, tmp_path / "model")
    specs = []

    def load(spec: str) -> HashEncoder:
        specs.append(spec)
        return HashEncoder(fingerprint="hash-1" if spec == "there" else "hash-2")

    monkeypatch.setattr(tagger_module, "load_encoder", load)
    with pytest.raises(ModelError, match="'here' has a different encoder"):
        load_model(tmp_path / "model")
    assert load_model(tmp_path / "model", backbone="there").config.contextual == "there"
    assert specs == ["here", "there"]


def test_a_description_without_newer_keys_is_read(saved: tuple[Tagger, Path]) -> None:
    """A tagger that was saved before a key was added has the key's default."""
    tagger, path = saved
    file = path / "tagger.json"
    facts = json.loads(file.read_text())
    for key in NEWER_KEYS:
        assert facts["config"].pop(key) == getattr(TaggerConfig(), key)
    file.write_text(json.dumps(facts))
    loaded = load_model(path)
    assert loaded.config == tagger.config
    assert loaded.predict(_documents()) == tagger.predict(_documents())


def test_a_full_disk_leaves_the_earlier_tagger(
    saved: tuple[Tagger, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tagger, path = saved
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    def full(folder: Path, files: dict[str, bytes]) -> None:
        name, data = next(iter(files.items()))
        (folder / name).write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fednotes.taggers.saving._fill_folder", full)
    with pytest.raises(FednotesError, match="No space left"):
        save_model(tagger, path)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []
