"""Pre-training, compared with plain torch loops and NumPy on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from small_tokens import tokens_of
from tiny_taggers import assert_same, plain_adamw, values

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.tensors import copy_tensors
from fednotes.data.clinical import list_note_sentences
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.encoders.language_model import LanguageModelConfig, build_language_model
from fednotes.encoders.packing import gather_sequences, mask, plan_full
from fednotes.engines.inprocess import InProcess
from fednotes.methods import pretrain
from fednotes.methods.pretrain import Config, Site, open_shared_model

WORDS = "patient has pain in the chest left knee was given aspirin daily no fever cough".split()


def notes(seed: int, count: int, patients: int) -> list[Note]:
    rng = np.random.default_rng(seed)
    return [
        Note(
            f"{seed}-{i}",
            " ".join(" ".join(rng.choice(WORDS, 9)) + "." for _ in range(4)),
            f"{seed}-p{i % patients}",
            None,
            "made",
        )
        for i in range(count)
    ]


def site_notes(
    name: str, train: Sequence[Note], valid: Sequence[Note] = ()
) -> SiteNotes:
    patients = len({note.patient for note in train})
    return SiteNotes(
        name, lambda: iter(train), lambda: iter(valid),
        len(train), len(valid), patients, len({n.patient for n in valid}), 1, 1, 1,
    )  # fmt: skip


def config(bert: Path, **changes: Any) -> Config:
    model = LanguageModelConfig(encoder=str(bert), **changes.pop("model", {}))
    settings = {
        "cycles": 2,
        "batch_size": 4,
        "length": 24,
        "learning_rate": 1e-3,
        "seed": 5,
    }
    return Config(model=model, **settings | changes)


def train(
    sites: Sequence[SiteNotes], config: Config, tmp_path: Path, **options: Any
) -> tuple[list[Site], dict[str, torch.Tensor]]:
    """Return the sites after training, and their final parameters."""
    folder = tmp_path / "out" if "directory" not in options else None
    members = [
        Site(
            data, config, cache=tmp_path / "cache", directory=folder if not i else None
        )
        for i, data in enumerate(sites)
    ]
    engine = InProcess(members, **options)
    pretrain.train(engine, config)
    return members, values(members[0].shared)


def test_a_federation_of_one_site_equals_ordinary_pretraining_bit_for_bit(
    bert: Path, tmp_path: Path
) -> None:
    """The judge: one plain loop with torch's AdamW, masks and order by their documented
    seeds."""
    settings = config(bert)
    train_notes = notes(1, 12, 12)
    _, trained_values = train([site_notes("a", train_notes)], settings, tmp_path)
    model = build_language_model(settings.model, settings.seed)
    tokens = tokens_of(
        [
            model.tokenizer.tokenize(list_note_sentences(note.text))
            for note in train_notes
        ]
    )
    model.train(True)

    def loss(step: int, sequences: Any, masked: Any) -> torch.Tensor:
        torch.manual_seed(seed_of(5, "dropout", "a", step))
        return model.loss(sequences, masked).loss

    steps: list[Any] = []
    for epoch in range(2):
        plan = plan_full(tokens, 24, 5, epoch)
        order = rng_of(5, "order", "a", epoch).permutation(len(plan))
        for number, start in enumerate(range(0, len(order), 4)):
            sequences = gather_sequences(
                tokens, plan, order[start : start + 4], model.specials
            )
            rng = rng_of(5, "mask", "a", epoch, number)
            masked = mask(sequences.ids, model.specials, model.vocabulary, rng)
            steps.append(partial(loss, len(steps), sequences, masked))
    assert len(steps) == 2 * -(-len(plan_full(tokens, 24, 5, 0)) // 4)
    plain_adamw(model.trainable(), settings, steps)
    assert_same(trained_values, values(model.trainable()))


def test_sites_are_weighted_by_their_patients(bert: Path, tmp_path: Path) -> None:
    """Eq. 1 in NumPy float64, over what each silo trains to by itself: 9 notes of 3
    patients count 3, 4 notes of 4 patients 4."""
    settings = config(bert, cycles=1)
    sites = [site_notes("a", notes(1, 9, 3)), site_notes("b", notes(2, 4, 4))]
    apart = [train([site], settings, tmp_path / site.id)[1] for site in sites]
    together = train(sites, settings, tmp_path)[1]
    for name, value in together.items():
        each = [q[name].numpy().astype(np.float64) for q in apart]
        expected = ((3 * each[0] + 4 * each[1]) / 7).astype(np.float32)
        np.testing.assert_array_equal(value.numpy(), expected)


def test_the_result_is_a_hugging_face_directory(bert: Path, tmp_path: Path) -> None:
    """AutoModel and AutoModelForMaskedLM read the trained weights back, to the bit."""
    import transformers

    sites, trained_values = train(
        [site_notes("a", notes(1, 8, 8), notes(2, 3, 3))], config(bert), tmp_path
    )
    folder = tmp_path / "out" / "model"
    saved = transformers.AutoModelForMaskedLM.from_pretrained(folder).state_dict()
    plain = transformers.AutoModel.from_pretrained(
        folder, add_pooling_layer=False
    ).state_dict()
    for name, value in trained_values.items():
        assert torch.equal(saved[name], value)
        if name.startswith("bert.") and "pooler" not in name:
            assert torch.equal(plain[name.removeprefix("bert.")], value)
    scores = sites[0].scores
    assert scores["masked"]["perplexity"] == pytest.approx(
        np.exp(scores["masked"]["loss"])
    )
    texts = "".join(p.read_text("utf-8") for p in folder.glob("*.json"))
    assert "aspirin daily" not in texts


def test_the_held_out_loss_is_the_mean_over_masked_tokens(
    bert: Path, tmp_path: Path
) -> None:
    """Hugging Face's own loss over the same masked batch, masks by their documented
    seed."""
    import transformers

    held_out_notes = notes(2, 6, 6)
    sites, _ = train(
        [site_notes("a", notes(1, 8, 8), held_out_notes)], config(bert), tmp_path
    )
    judge = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out" / "model"
    ).eval()
    model = sites[0].model
    tokens = tokens_of(
        [
            model.tokenizer.tokenize(list_note_sentences(note.text))
            for note in held_out_notes
        ]
    )
    plan = plan_full(tokens, 24, 5, 0)
    batch = gather_sequences(tokens, plan, np.arange(len(plan)), model.specials)
    masked = mask(
        batch.ids, model.specials, model.vocabulary, rng_of(5, "held out", "a")
    )
    with torch.no_grad():
        out = judge(
            input_ids=torch.from_numpy(masked.inputs),
            attention_mask=torch.from_numpy(
                (np.arange(batch.ids.shape[1]) < batch.lengths[:, None]).astype(
                    np.int64
                )
            ),
            labels=torch.from_numpy(masked.labels),
        )
    guesses = out.logits.argmax(-1).numpy()
    right = (guesses == masked.labels)[masked.labels != -100].mean()
    assert sites[0].scores["masked"]["loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert sites[0].scores["masked"]["accuracy"] == pytest.approx(right)


def test_embeddings_and_output_bias_are_frozen(bert: Path, tmp_path: Path) -> None:
    import transformers

    train([site_notes("a", notes(1, 8, 8))], config(bert), tmp_path)
    before = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    after = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out" / "model"
    )
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        assert torch.equal(before.state_dict()[name], after.state_dict()[name])
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before.state_dict()[name], after.state_dict()[name])


def test_a_new_head_is_trained_alone_at_first(bare_bert: Path, tmp_path: Path) -> None:
    settings = config(bare_bert, cycles=1)
    states: list[dict[str, torch.Tensor]] = []
    site = Site(site_notes("a", notes(1, 8, 8)), settings, cache=tmp_path)
    assert site.model.new_head
    engine = InProcess(
        [site],
        observer=lambda r: states.append(values(site.shared)),
    )
    pretrain.train(engine, settings)
    initial = open_shared_model(settings.model, settings.seed, "cpu").initial
    assert len(states) == 2
    changed = {n for n in initial if not torch.equal(states[0][n], initial[n])}
    assert changed
    assert all(name.startswith("cls.") for name in changed)
    assert any(
        not torch.equal(states[1][n], initial[n])
        for n in initial
        if n.startswith("bert.")
    )


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"objective": "mlm+nsp"}, {}),
        pytest.param({"objective": "denoise"}, {}, marks=pytest.mark.slow),
        ({"train": "lora"}, {"compression": "packed"}),
        ({"train": "top", "top": 1}, {"server": "adam", "server_learning_rate": 1e-3}),
        (
            {},
            {"whole_words": True, "long_length": 48, "long_cycles": 1, "accumulate": 2},
        ),
        ({}, {"precision": "bfloat16", "compression": "packed"}),
    ],
)
def test_every_objective_lowers_the_held_out_loss(
    bert: Path,
    bart: Path,
    tmp_path: Path,
    model: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    """Held-out loss falls below that of the untrained model, by the same counts."""
    train_notes, held_out_notes = notes(1, 30, 30), notes(2, 8, 8)
    encoder = bart if model.get("objective") == "denoise" else bert
    settings = config(encoder, model=model, cycles=4, learning_rate=5e-3, **changes)
    sites = [
        site_notes("a", train_notes[:15], held_out_notes[:4]),
        site_notes("b", train_notes[15:], held_out_notes[4:]),
    ]
    start = Site(sites[0], settings, cache=tmp_path)
    before = start.finish(
        open_shared_model(settings.model, settings.seed, "cpu").initial
    )
    after = train(sites, settings, tmp_path)[0][0].scores["masked"]["loss"]
    assert after < before.metrics["loss"] / before.metrics["examples"] - 0.05


def test_gradients_of_batch_parts_add_up_with_sentence_pairs(
    bert: Path, tmp_path: Path
) -> None:
    """Equal masks in one part and in three; pairs count by rows, tokens by what is
    masked."""
    train_notes, losses = notes(1, 24, 24), []
    for accumulate in (1, 3):
        model = {"objective": "mlm+nsp"}
        settings = config(bert, model=model, batch_size=6, accumulate=accumulate)
        site = Site(site_notes("a", train_notes), settings, cache=tmp_path)
        site.model.train(False)
        parts = next(iter(site.iterate_steps(0)))
        site.model.train(False)
        assert len(parts) == accumulate
        for part in parts:
            cls, sep = site.model.specials.cls, site.model.specials.sep
            for ids, segments, length in zip(
                part.sequences.ids,
                part.sequences.segments,
                part.sequences.lengths,
                strict=True,
            ):  # by hand: B is what stands behind the first [SEP], up to the second
                first, last = np.flatnonzero(ids == sep)[[0, -1]]
                assert (ids[0], last) == (cls, length - 1)
                expected = [int(first < at <= last) for at in range(len(ids))]
                assert segments.tolist() == expected
                assert sum(expected) > 0
        losses.append(sum(float(part.loss(parts).detach()) for part in parts))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_run_does_not_depend_on_earlier_runs_of_the_process(
    bare_bert: Path, tmp_path: Path
) -> None:
    """A warm-up sends the head alone: the encoder below must be the published one
    again."""
    settings = config(bare_bert, cycles=1, learning_rate=0.01)
    first, second = site_notes("a", notes(1, 8, 8)), site_notes("b", notes(2, 8, 8))
    fresh = train([second], settings, tmp_path)[1]
    open_shared_model.cache_clear()
    train([first], settings, tmp_path)
    after = train([second], settings, tmp_path)[1]
    assert_same(after, fresh)


def test_a_run_uses_the_requested_lengths_words_and_rates(
    bare_bert: Path, tmp_path: Path
) -> None:
    schedule: dict[str, Any] = {"long_cycles": 2, "long_length": 48, "keep_cycle": 3}
    settings = config(bare_bert, cycles=4, head_cycles=2, whole_words=True, **schedule)
    train_notes = [
        replace(note, text=note.text.replace("a", "ec")) for note in notes(1, 12, 12)
    ]
    site = Site(site_notes("a", train_notes), settings, cache=tmp_path)
    longest = [
        max(len(s.sequences.ids[0]) for (s,) in site.iterate_steps(epoch))
        for epoch in range(6)
    ]
    assert max(longest[:3]) <= 24 < min(longest[3:])
    assert [site._choose_length(epoch) for epoch in range(6)] == [
        24,
        24,
        24,
        48,
        48,
        48,
    ]
    assert site.trainer._warm_up_optimizer._rate == settings.head_learning_rate
    continues = site.model.tokenizer.continues
    words = 0
    for (part,) in site.iterate_steps(0):
        for row, labels in zip(part.sequences.ids, part.masked.labels, strict=True):
            of_word = np.cumsum(~continues[row])  # the word that each token is of
            for word in np.unique(of_word[labels != -100]):
                inside = (of_word == word) & ~np.isin(row, site.model.specials.all)
                assert (labels[inside] != -100).all()
                words += inside.sum() > 1
    assert words > 0


def test_bfloat16_only_rounds_the_result(bert: Path, tmp_path: Path) -> None:
    job_sites = [site_notes("a", notes(1, 8, 8))]
    exact, rounded = (
        train(job_sites, config(bert, cycles=1, precision=precision), tmp_path)[1]
        for precision in ("float32", "bfloat16")
    )
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(exact[name], rounded[name])
    torch.testing.assert_close(exact[name], rounded[name], rtol=0, atol=0.02)


def test_selecting_the_best_cycle_needs_held_out_data(
    bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="no site has held-out data"):
        train([site_notes("a", notes(1, 4, 4))], config(bert, keep_cycle=-1), tmp_path)


def test_scores_of_a_model_do_not_depend_on_the_site_that_trained_it(
    bert: Path, tmp_path: Path
) -> None:
    """The same weights, judged by the site and by another on that site's notes."""
    site = site_notes("a", notes(1, 8, 8), notes(2, 5, 5))
    sites, trained_values = train([site], config(bert), tmp_path)
    pooled_site = Site(
        site_notes("pooled", notes(3, 8, 8)), config(bert), cache=tmp_path
    )
    pooled_site.load(trained_values)
    assert pooled_site.score_on(site) == sites[0].scores


# what an update tells


def test_a_small_update_of_the_embeddings_is_refused(
    bert: Path, tmp_path: Path
) -> None:
    settings = config(bert, model={"train": "all"}, min_tokens=10_000)
    data, fewer = site_notes("a", notes(1, 8, 8)), replace(settings, min_tokens=100)
    with pytest.raises(
        ConfigError, match=r"site 'a'.*\d+ tokens in \d+ steps; min_tokens"
    ):
        Site(data, settings, cache=tmp_path)
    Site(data, replace(fewer, min_steps=2), cache=tmp_path)
    with pytest.raises(ConfigError, match=r"min_steps = 1000"):
        Site(data, replace(fewer, min_steps=1000), cache=tmp_path)
    assert "which words" in pretrain.METHOD.list_warnings(settings)[0]
    assert pretrain.METHOD.list_warnings(config(bert)) == ()


@pytest.mark.parametrize("objective", ["mlm", "mlm+nsp"])
def test_a_partial_epoch_covers_at_least_the_shortest_sequences(
    bert: Path, tmp_path: Path, objective: str
) -> None:
    """Brute force: the places in the corpus that each cycle has read."""
    settings = config(bert, model={"objective": objective}, cycles=3, local_epochs=0.4)
    site = Site(site_notes("a", notes(1, 8, 8)), settings, cache=tmp_path)
    read: list[int] = []
    gathered = pretrain.gather_sequences

    def gather(tokens: Any, plan: Any, rows: Any, specials: Any) -> Any:
        for row in rows:
            bounds = plan.stretches[plan.bounds[row] : plan.bounds[row + 1]]
            read.extend(place for start, end in bounds for place in range(start, end))
        return gathered(tokens, plan, rows, specials)

    promised = site.count_covered("train")["tokens"]
    tensors = copy_tensors(site.shared)
    with mock.patch.object(pretrain, "gather_sequences", gather):
        for cycle in range(settings.cycles):
            read.clear()
            site.train(tensors, cycle=cycle)
            covered = site.count_covered("train")["tokens"]
            assert 0 < promised <= len(set(read))
            assert 0 < covered <= len(set(read))


def test_longer_sequences_need_fewer_steps(bert: Path, tmp_path: Path) -> None:
    """The steps of the long cycles are those that they take, and are checked first."""
    longer: dict[str, Any] = {"long_cycles": 1, "long_length": 64}
    settings = config(bert, model={"train": "all"}, min_tokens=0, min_steps=0, **longer)
    data = site_notes("a", notes(1, 8, 8))
    site = Site(data, settings, cache=tmp_path)
    tensors = copy_tensors(site.shared)
    steps = []
    for cycle in range(2):
        before = site.trainer.steps_taken
        site.train(tensors, cycle=cycle)
        steps.append(site.trainer.steps_taken - before)
        assert site.count_covered("train")["steps"] == steps[-1]
    few, many = steps[1], steps[0]
    assert few < many
    Site(data, replace(settings, min_steps=few), cache=tmp_path)
    with pytest.raises(ConfigError, match=rf"in {few} steps; .*min_steps = {many}"):
        Site(data, replace(settings, min_steps=many), cache=tmp_path)


def test_the_sign_of_the_bias_gradient_reveals_the_masked_words(
    bert: Path, tmp_path: Path
) -> None:
    """Why the default leaves the bias alone: its gradient is negative at masked words
    alone."""
    settings = config(bert, model={"train": "all"}, min_tokens=0, min_steps=0)
    site = Site(site_notes("a", notes(1, 2, 2)), settings, cache=tmp_path)
    ((part,), *_) = list(site.iterate_steps(0))
    part.loss([part]).backward()
    bias = site.shared["cls.predictions.bias"].grad
    assert bias is not None
    labels = part.masked.labels  # type: ignore[attr-defined]
    assert set(np.flatnonzero(bias.numpy() < 0)) == set(labels[labels != -100])


# limits


def test_one_patient_without_held_out_notes_can_be_trained_on(
    bert: Path, tmp_path: Path
) -> None:
    sites, _ = train([site_notes("a", notes(1, 1, 1))], config(bert), tmp_path)
    assert sites[0].weight == 1
    assert sites[0].scores == {}


def test_a_note_of_200_000_characters_can_be_trained_on(
    bert: Path, tmp_path: Path
) -> None:
    long = Note("long", "pain " * 40_000, "p", None, "made")
    settings = config(bert, cycles=1, batch_size=64, length=64)
    sites, _ = train([site_notes("a", [long])], settings, tmp_path)
    assert len(sites[0].train_set.ids) == 40_000


@pytest.mark.parametrize(
    "change",
    [
        *({"length": 4}, {"masked": 0.0}, {"head_cycles": -1}, {"infilled": 2.0}),
        *({"long_cycles": 3}, {"head_learning_rate": float("inf")}),
    ],
)
def test_an_error_names_an_impossible_value(
    bert: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        config(bert, **change)
    with pytest.raises(ConfigError, match=r"length = 500: .* reads at most 64 tokens"):
        Site(site_notes("a", notes(1, 8, 8)), config(bert, length=500), cache=tmp_path)
