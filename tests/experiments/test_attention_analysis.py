"""The attention analysis whole: tiny models, notes in files, the table and the pictures."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

from fednotes.core.errors import ConfigError, DataError, FednotesError, ModelError
from fednotes.experiments.attention import (
    analyse,
    attention_maps,
    embed,
    markdown,
    measure,
    named_models,
    run_attention,
    stretches,
    turned,
)

transformers = pytest.importorskip("transformers")

WORDS = "no pain nausea aspirin the patient has severe chest metoprolol .".split()
TEXTS = ["the patient has no pain .", "severe chest pain . no nausea .", "aspirin"]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """save(seed, **changes) writes a BERT of 2 layers of 4 heads, 40 positions."""

    def write(seed: int, **changes: Any) -> Path:
        path: Path = tmp_path_factory.mktemp("bert")
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
        (path / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizerFast(vocab=str(path / "vocab.txt")).save_pretrained(path)
        settings: dict[str, Any] = {
            "vocab_size": len(words),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "max_position_embeddings": 40,
            "initializer_range": 0.5,
        }
        torch.manual_seed(seed)
        config = transformers.BertConfig(**settings | changes)
        transformers.BertModel(config).save_pretrained(path)
        return path

    return write


@pytest.fixture(scope="module")
def models(save: Callable[..., Path]) -> dict[str, Path]:
    return {"base": save(0), "central": save(1), "federated": save(2)}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Twelve notes of forty sentences each; of each word it is known which note has it."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(12):
        lines = [f"The patient has pain number{number}x{k} and takes aspirin." for k in range(40)]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def test_numbers_of_the_table(models: dict[str, Path]) -> None:
    """SciPy's rank correlation and distances of each two models that are measured alone."""
    found = analyse(models, TEXTS, length=20)
    alone = {n: measure(attention_maps(path, TEXTS, 20)) for n, path in models.items()}
    entropies = np.array([each.entropy.ravel() for each in alone.values()])
    matrices = np.array([each.divergence.ravel() for each in alone.values()])
    expected = spearmanr(entropies, axis=1).statistic
    np.testing.assert_allclose(found.spearman, expected, atol=1e-12)
    total = cdist(matrices, matrices, "cityblock")
    np.testing.assert_allclose(found.distance_sum, total, atol=1e-12)
    np.testing.assert_allclose(found.distance_mean, total / 8**2, atol=1e-12)
    tokens = 8 + 9 + 3
    np.testing.assert_allclose(found.distance_over_tokens, tokens * total / 8**2, atol=1e-12)
    assert (found.tokens, found.texts, found.models) == (tokens, 3, tuple(models))
    for name, each in alone.items():
        trend = spearmanr([0] * 4 + [1] * 4, each.entropy.ravel()).statistic
        assert found.trend[name] == pytest.approx(trend)


def test_a_model_and_itself(models: dict[str, Path]) -> None:
    """Correlation 1 and distance 0, exactly; another model has neither."""
    same = analyse({"one": models["base"], "two": models["base"]}, TEXTS, length=20)
    assert same.spearman.tolist() == [[1, 1], [1, 1]]
    assert not same.distance_mean.any()
    assert not same.distance_sum.any()
    other = analyse({"one": models["base"], "two": models["central"]}, TEXTS, length=20)
    assert other.spearman[0, 1] < 0.99
    assert other.distance_mean[0, 1] > 0.01


def test_uniform_heads(save: Callable[..., Path]) -> None:
    """Zero query weights attend to all n tokens alike: log n each, no rank correlation."""
    path = save(0)
    model = transformers.BertModel.from_pretrained(path)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".query." in name:
                value.zero_()
    model.save_pretrained(path)
    found = analyse({"flat": path}, ["the patient has no pain ."], length=20)
    np.testing.assert_allclose(found.heads["flat"].entropy, math.log(8), atol=1e-6)
    np.testing.assert_allclose(found.heads["flat"].divergence, 0, atol=1e-6)


def test_dictionary_is_numbers(models: dict[str, Path]) -> None:
    found = analyse(models, TEXTS, length=20, seed=4)
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (facts["seed"], facts["layers"], facts["heads"]) == (4, 2, 4)
    np.testing.assert_allclose(facts["distance_sum"], found.distance_sum, atol=1e-6)
    for name, heads in found.heads.items():
        np.testing.assert_allclose(facts["entropy"][name], heads.entropy, atol=1e-6)
        np.testing.assert_allclose(facts["divergence"][name], heads.divergence, atol=1e-6)
        np.testing.assert_allclose(facts["entropy_by_depth"][name], heads.by_depth, atol=1e-6)
    assert not any(word in json.dumps(facts) for word in WORDS[:-1])


def test_markdown_has_the_papers_shape(models: dict[str, Path]) -> None:
    found = analyse(models, TEXTS, length=20, seed=4)
    lines = markdown(found).splitlines()
    s, mean = found.spearman, found.distance_mean
    assert f"| federated | {s[2, 0]:.3f} | {s[2, 1]:.3f} | 1 |" in lines
    assert f"| central | {mean[1, 0]:.5f} | 0 |  |" in lines
    assert "| Fed_ClinicalBERT | 0.96 | 0.27 | 1 |" in lines
    assert "| Fed_ClinicalBERT | 8153.26 | 314.38 | 0 |" in lines
    depth = " | ".join(f"{heads.by_depth[1]:.3f}" for heads in found.heads.values())
    assert f"| 2 | {depth} |" in lines


def test_progress_counts_texts(models: dict[str, Path]) -> None:
    told: list[tuple[str, int, int]] = []
    analyse(models, TEXTS, length=20, progress=lambda *event: told.append(event))
    assert told == [(name, 3, 3) for name in models]


def test_another_architecture_is_refused_before_work(
    models: dict[str, Path], save: Callable[..., Path]
) -> None:
    deeper = {"base": models["base"], "deep": save(0, num_hidden_layers=3)}
    told: list[str] = []
    with pytest.raises(ConfigError, match="'base' has 2 layers of 4 heads, 'deep' 3 of 4"):
        analyse(deeper, TEXTS, length=20, progress=lambda name, *_: told.append(name))
    assert told == []
    with pytest.raises(ConfigError, match="at least one model"):
        analyse({}, TEXTS)
    with pytest.raises(DataError, match="at least one text"):
        analyse(models, [])


def test_run_writes_all(models: dict[str, Path], notes: Path, tmp_path: Path) -> None:
    """Files are whole, and the same again from the same seed."""
    pytest.importorskip("matplotlib")
    named = [f"{name}={path}" for name, path in models.items()]
    written = []
    for out in (tmp_path / "a", tmp_path / "b"):
        run_attention(named, [notes], out, sample=5, length=20, seed=3)
        assert sorted(p.name for p in out.iterdir()) == [
            "attention.json", "attention.md", "entropy_by_depth.png", "js_heads.png",
        ]  # fmt: skip
        written.append((out / "attention.json").read_text())
        for picture in out.glob("*.png"):
            head = picture.read_bytes()[:24]
            assert head[:8] == b"\x89PNG\r\n\x1a\n"
            assert min(struct.unpack(">2I", head[16:])) > 400
    assert written[0] == written[1]
    facts = json.loads(written[0])
    assert (facts["texts"], facts["tokens"], facts["seed"]) == (5, 100, 3)
    assert "Plots: entropy_by_depth.png, js_heads.png." in (out / "attention.md").read_text()


def test_run_without_matplotlib(
    models: dict[str, Path], notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are there all the same, and the page says what brings the pictures."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run_attention([f"base={models['base']}"], [notes], tmp_path / "out", sample=2, length=20)
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".json", ".md"}
    assert "pip install 'fednotes[plot]'" in (tmp_path / "out" / "attention.md").read_text()


def test_run_refuses(models: dict[str, Path], notes: Path, tmp_path: Path) -> None:
    base, out = f"base={models['base']}", tmp_path / "out"
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    ruled = tmp_path / "ruled.txt"
    ruled.write_text("--------\n________\n")
    with pytest.raises(ModelError, match="no such directory"):
        run_attention(["base=absent"], [notes], out)
    for nothing in (empty, ruled):
        with pytest.raises(DataError, match=rf"no note with text in .*{nothing.name}"):
            run_attention([base], [nothing], out)
    with pytest.raises(DataError, match="no such file"):
        run_attention([base], [tmp_path / "absent"], out)
    with pytest.raises(ConfigError, match="sample=0"):
        run_attention([base], [notes], out, sample=0)
    with pytest.raises(ConfigError, match="reads 1 to 40 tokens"):
        run_attention([base], [notes], out, length=41)
    with pytest.raises(FednotesError, match=r"empty\.txt: cannot be written"):
        run_attention([base], [notes], empty)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "at least one model"),
        (["minilm"], "write NAME=DIR"),
        (["=minilm"], "write NAME=DIR"),
        (["a="], "write NAME=DIR"),
        (["a|b=minilm"], "write NAME=DIR"),
        (["a=x", "b=y", "a=z"], "two models are called 'a'"),
    ],
)
def test_models_named_wrongly(pairs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_models(pairs)


def test_models_named_well() -> None:
    assert named_models(["a=minilm", " b c = d=e "]) == {"a": "minilm", "b c": "d=e"}


def test_stretches_are_consecutive_sentences(notes: Path) -> None:
    """Each holds consecutive numbers of one note; none comes twice; no note before its turn."""
    texts = [path.read_text() for path in sorted(notes.iterdir())]
    drawn = stretches(texts, 30, 25, seed=1)
    assert len(set(drawn)) == 30
    owners = []
    for text in drawn:
        marks = [word[6:].split("x") for word in text.split() if word.startswith("number")]
        assert len({note for note, _ in marks}) == 1
        places = [int(place) for _, place in marks]
        # Nine words a sentence, the full stop one of them: three reach 25.
        assert places[0] % 3 == 0
        assert places == [places[0], places[0] + 1, places[0] + 2]
        owners.append(int(marks[0][0]))
    assert sorted(owners[:12]) == sorted(owners[12:24]) == list(range(12))
    assert stretches(texts, 30, 25, seed=1) == drawn
    assert stretches(texts, 30, 25, seed=2) != drawn
    assert len(stretches(texts, 10_000, 25, seed=1)) == 12 * 13


def test_every_note_is_as_likely() -> None:
    """3 of 20 notes, 2000 times: each about 300 times (five standard deviations are 80)."""
    texts = [f"word{number}" for number in range(20)]
    drawn = [text for seed in range(2000) for text in stretches(iter(texts), 3, 5, seed)]
    counts = [drawn.count(text) for text in texts]
    assert sum(counts) == 6000
    assert max(abs(count - 300) for count in counts) < 80


def test_short_rest_is_left_out() -> None:
    """By hand: 4 + 4 words, then a rest of 2 (dropped) or of 4 (kept); alone it stays."""
    four, two = "He has severe pain", "No pain"
    assert stretches([f"{four}.\n{four}.\n{two}."], 9, 9, 1) == [f"{four}. {four}."]
    assert len(stretches([f"{four}.\n{four}.\n{four}."], 9, 9, 1)) == 2
    assert stretches([f"{two}."], 9, 9, 1) == [f"{two}."]


def test_plane_of_heads() -> None:
    """Points of a plane come back from their squared distances, but for turns (SciPy's cdist)."""
    points = np.random.default_rng(0).normal(size=(20, 2))
    places = embed(cdist(points, points, "sqeuclidean"))
    np.testing.assert_allclose(cdist(places, places), cdist(points, points), atol=1e-9)
    centred = points - points.mean(axis=0)
    np.testing.assert_allclose(turned(places, centred), centred, atol=1e-9)
