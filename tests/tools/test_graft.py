"""Grafting a BERT into BART: a tiny random BERT, and MiniLM where it is installed."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import graft as tool
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graft import (
    FACTS,
    Classes,
    Schedule,
    bart_of,
    decode,
    graft,
    make_rows,
    read_texts,
)
from tiny_models import save_bert

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.types import Document, Span, TagSet
from fednotes.encoders.bart import set_layer_norm_eps
from fednotes.taggers.pointer import repair

transformers = pytest.importorskip("transformers")

NOUNS = "cough fever pain rash nausea aspirin codeine heparin insulin statin".split()
OTHERS = "the patient had severe and was given mg of with no sudden mild acute".split()
TEXTS = [
    f"The patient had {severity} {NOUNS[i % 5]} and was given {10 + 7 * i} mg of {NOUNS[5 + i % 4]}."
    for i in range(40)
    for severity in ("severe", "sudden", "mild", "acute")
]
QUICK = Schedule(steps=100, batch=8, pool=160, learning_rate=1e-2, listing=0.5, kinds=2)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers of 32, 40 positions. Small weights, where the epsilon tells most."""
    shape = {"num_hidden_layers": 3, "max_position_embeddings": 40}
    words = [*NOUNS, *OTHERS]
    path = save_bert(tmp_path_factory.mktemp("bert"), head=False, words=words, **shape)
    torch.manual_seed(0)
    model = transformers.BertModel.from_pretrained(path)
    for name, value in model.named_parameters():  # biases and norms start at 0 and 1
        torch.nn.init.normal_(value, float("Norm.weight" in name), 0.05)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def grafted(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A trained graft's folder and report; tests only read it."""
    out = tmp_path_factory.mktemp("made") / "bart"
    before = torch.get_rng_state()
    report = graft(bert, out, texts=TEXTS, seed=3, schedule=QUICK, sources=["tiny"])
    assert torch.equal(before, torch.get_rng_state())
    return out, report


def opened(bert: Path) -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    return transformers.BertModel.from_pretrained(bert).eval(), tokenizer


def some_ids(tokenizer: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    coded = tokenizer(texts, padding=True, return_tensors="pt")
    return coded["input_ids"], coded["attention_mask"]


@pytest.mark.slow
@torch.no_grad()
def test_a_reloaded_encoder_equals_the_original(
    bert: Path, grafted: tuple[Path, Any]
) -> None:
    """Against transformers' own BertModel; and what the library's epsilon would make of
    it."""
    original, tokenizer = opened(bert)
    ids, mask = some_ids(
        tokenizer, [TEXTS[0], "Codeine.", "No sudden rash with 123456 mg."]
    )
    theirs = original(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    model = transformers.AutoModel.from_pretrained(grafted[0]).eval()
    plain = model.encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    set_layer_norm_eps(model)
    ours = model.encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert float((ours - theirs).abs().max()) < 1e-5
    assert float((plain - theirs).abs().max()) > 1e-4
    assert grafted[1]["encoder_difference"] < 1e-5


def test_a_published_bart_keeps_its_epsilon() -> None:
    config = transformers.BartConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
        max_position_embeddings=12,
    )  # fmt: skip
    model = transformers.BartModel(config)
    set_layer_norm_eps(model)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {1e-5}


def test_training_changes_only_the_decoder(
    bert: Path, grafted: tuple[Path, Any]
) -> None:
    original, tokenizer = opened(bert)
    start = bart_of(original, tokenizer, 2).state_dict()
    trained = transformers.BartModel.from_pretrained(grafted[0]).state_dict()
    assert start.keys() == trained.keys()
    same = {name for name in start if torch.equal(start[name], trained[name])}
    frozen = {
        n for n in start if n.startswith(("encoder.", "shared", "decoder.embed_tokens"))
    }
    assert same == frozen


def test_both_losses_decrease_on_held_out_text(grafted: tuple[Path, Any]) -> None:
    before, after = grafted[1]["before"], grafted[1]["after"]
    assert after["listing"] < 0.75 * before["listing"]
    assert after["denoising"] < 0.9 * before["denoising"]
    assert after["right"] > before["right"] + 0.1


@pytest.mark.slow
def test_the_seed_determines_every_byte(
    bert: Path, grafted: tuple[Path, Any], tmp_path: Path
) -> None:
    torch.manual_seed(99)  # what the generator holds must not matter
    graft(
        bert, tmp_path / "again", texts=TEXTS, seed=3, schedule=QUICK, sources=["tiny"]
    )
    graft(
        bert, tmp_path / "other", texts=TEXTS, seed=4, schedule=QUICK, sources=["tiny"]
    )

    def digests(folder: Path) -> dict[str, str]:
        return {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()
        }

    first, again, reseeded = (
        digests(f) for f in (grafted[0], tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    changed = {name for name in first if first[name] != reseeded[name]}
    assert changed == {"model.safetensors", FACTS}


def test_the_folder_names_its_sources_and_holds_no_text(
    grafted: tuple[Path, Any],
) -> None:
    facts = json.loads((grafted[0] / FACTS).read_text())
    assert facts["text"] == {
        "sources": ["tiny"],
        "pieces": grafted[1]["text"]["pieces"],
    }
    assert facts["schedule"]["steps"] == 100
    assert len(facts["encoder"]["fingerprint"]) == 64
    for file in grafted[0].glob("*.json"):
        if file.name != "tokenizer.json":
            assert not any(noun in file.read_text() for noun in NOUNS), file.name


def test_the_pointer_model_accepts_the_folder_as_a_backbone(
    grafted: tuple[Path, Any],
) -> None:
    """The whole of it: built by path, a loss, a prediction."""
    from fednotes.encoders.bart import load_backbone
    from fednotes.taggers.prompt_bart import PromptBartConfig, build_prompt_bart

    config = PromptBartConfig(
        backbone=str(grafted[0]),
        prompts=3,
        prompt_hidden=4,
        label_words={"Drug": "aspirin"},
    )
    model = build_prompt_bart(config, TagSet(("Drug",)), seed=0)
    norms = [
        m
        for m in load_backbone(grafted[0]).model.modules()
        if isinstance(m, torch.nn.LayerNorm)
    ]
    assert {norm.eps for norm in norms} == {1e-12}  # the encoder stays the original's
    text = TEXTS[0]
    at = text.index("aspirin")
    corpus = model.prepare([Document("a", text, (Span(at, at + 7, "Drug"),))])
    assert math.isfinite(float(model.losses(corpus, [0]).source.sum().detach()))
    assert [d.text for d in model.predict([Document("a", text)])] == [text]


@torch.no_grad()
def test_prompted_classes_are_keys_and_values_without_a_position(bert: Path) -> None:
    """Against BART's decoder written out: joined keys and values, positions from 0 on."""
    original, tokenizer = opened(bert)
    model = bart_of(original, tokenizer, 2)
    torch.manual_seed(1)
    inputs, states, class_states = (
        torch.randn(2, 5, 32),
        torch.randn(2, 7, 32),
        torch.randn(2, 3, 32),
    )
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    decoder = model.decoder

    def attend(
        layer: Any, queries: torch.Tensor, source: torch.Tensor, hidden: torch.Tensor
    ) -> Any:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(*x.shape[:2], 4, 8).transpose(1, 2)

        q, k, v = (
            heads(p(x))
            for p, x in (
                (layer.q_proj, queries),
                (layer.k_proj, source),
                (layer.v_proj, source),
            )
        )
        weights = (
            (q @ k.transpose(2, 3) / math.sqrt(8))
            .masked_fill(hidden, -torch.inf)
            .softmax(-1)
        )
        return layer.out_proj((weights @ v).transpose(1, 2).reshape(queries.shape))

    normed = decoder.layernorm_embedding(class_states)
    x = decoder.layernorm_embedding(inputs + decoder.embed_positions.weight[2 : 2 + 5])
    later = torch.cat([torch.zeros(5, 3), torch.ones(5, 5).triu(1)], 1).bool()
    absent = ~mask.bool()[:, None, None]
    for layer in decoder.layers:
        x = layer.self_attn_layer_norm(
            x + attend(layer.self_attn, x, torch.cat([normed, x], 1), later)
        )
        x = layer.encoder_attn_layer_norm(
            x + attend(layer.encoder_attn, x, states, absent)
        )
        x = layer.final_layer_norm(x + layer.fc2(F.gelu(layer.fc1(x))))
    assert torch.allclose(
        decode(model, inputs, states, mask, class_states), x, atol=1e-5
    )
    plain = decode(model, inputs, states, mask, None)
    stock = decoder(
        inputs_embeds=inputs, encoder_hidden_states=states, encoder_attention_mask=mask
    )
    assert torch.equal(plain, stock.last_hidden_state)
    assert not torch.allclose(plain, x, atol=1e-2)


def test_targets_decode_to_the_requested_spans() -> None:
    """The sequence, read by pointer.py's own repair, gives the told classes' spans and
    names."""
    ids = [np.arange(n) for n in (12, 9, 6)]
    spans = (((1, 2, 0), (4, 4, 1), (6, 9, 2)), ((2, 3, 2), (5, 5, 0)), ())
    classes = Classes(("a", "b", "c"), spans, torch.zeros(7, 4))
    checked = 0
    for seed in range(40):
        rows = make_rows(ids, classes, [0, 1, 2], 0, np.random.default_rng(seed))
        for n, target in enumerate(rows.targets.tolist()):
            class_numbers, called = (
                rows.class_numbers[n].tolist(),
                rows.called[n].tolist(),
            )
            assert len(set(class_numbers)) == len(class_numbers) == len(set(called))
            types = len(rows.words)
            repaired = repair(
                [t + 2 if t else 1 for t in target if t >= 0], types, len(ids[n]) - 2
            )
            name = dict(zip(class_numbers, called, strict=True))
            expected = [(a - 1, b - 1, name[c]) for a, b, c in spans[n] if c in name]
            assert [
                (a, b, int(rows.words[t])) for a, b, t in repaired.tolist()
            ] == expected
            checked += len(expected)
    assert checked > 50


def test_texts_are_read_without_their_annotations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("No rash today.\nMild pain.")
    (tmp_path / "b.csv").write_text(
        'id,note\n1,"Severe cough, with fever, since May."\n'
    )
    (tmp_path / "c.conll").write_text("Aspirin\tB-Drug\nhelps\tO\n")
    texts, names = read_texts([tmp_path / n for n in ("a.txt", "b.csv", "c.conll")], 0)
    assert names == ["a.txt", "b.csv", "c.conll"]
    assert texts[:2] == [
        "No rash today.\nMild pain.",
        "Severe cough, with fever, since May.",
    ]
    assert texts[2].split() == ["Aspirin", "helps"]
    generated, names = read_texts([], 0)
    assert names == ["generated"]
    assert len(generated) > 100
    with pytest.raises(DataError, match="no such file"):
        read_texts([tmp_path / "none"], 0)


def test_other_models_are_refused(bert: Path, tmp_path: Path) -> None:
    tokenizer = opened(bert)[1]
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=20,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(tmp_path / "roberta")
    tokenizer.save_pretrained(tmp_path / "roberta")
    with pytest.raises(ModelError, match="is a roberta model"):
        graft(
            tmp_path / "roberta",
            tmp_path / "out",
            texts=TEXTS,
            schedule=Schedule(steps=1),
        )
    with pytest.raises(ModelError, match="no such directory"):
        graft(
            tmp_path / "nowhere",
            tmp_path / "out",
            texts=TEXTS,
            schedule=Schedule(steps=1),
        )
    with pytest.raises(ConfigError, match="too short"):
        graft(bert, tmp_path / "out", texts=["The and."], schedule=Schedule(steps=1))
    with pytest.raises(ConfigError, match="decoder layer"):
        graft(
            bert,
            tmp_path / "out",
            texts=TEXTS,
            schedule=Schedule(steps=1),
            decoder_layers=0,
        )
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_folder_and_replaces_only_its_own(
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Makes a folder, makes it again, and refuses in one line to replace anything else."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        words = ["graft.py", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        code = tool.main()
        caught = capsys.readouterr()
        return code, caught.out, caught.err

    notes = tmp_path / "notes.txt"
    notes.write_text("\n".join(TEXTS))
    out = tmp_path / "bart"
    for _ in range(2):
        code, output, _ = run_command(
            out, "--encoder", bert, "--text", notes, "--steps", 2
        )
        assert code == 0
        assert "differs from the original by" in output
        assert "denoising" in output
        assert not any(noun in output for noun in NOUNS)
    known, saved = map(transformers.AutoTokenizer.from_pretrained, (bert, out))
    assert saved("fever")["input_ids"] == known("fever")["input_ids"]
    for arguments, message in (
        (
            (tmp_path, "--encoder", bert, "--text", notes),
            "has files that do not belong to a graft",
        ),
        ((out, "--encoder", tmp_path / "x", "--text", notes), "no such directory"),
        ((out, "--encoder", bert, "--text", tmp_path / "x"), "no such file"),
        ((out, "--encoder", bert, "--text", notes, "--layers", "0"), "decoder layer"),
    ):
        code, _, output = run_command(*arguments)
        assert code == 2
        assert len(output.splitlines()) == 1
        assert message in output
