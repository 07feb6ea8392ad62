"""`fednotes audit`: each attack succeeds without defence, and falls to chance with the one that its
page names."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_jobs import TABLE, TAGGER
from tiny_models import save_bert

from fednotes.apps.audit import Scene, Trial, attacks, counts, spans, words
from fednotes.apps.deployment.site_file import job_at_home
from fednotes.cli import app
from fednotes.core.errors import ConfigError, DataError
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import Audit, Leak, read_audit

CHANCE = 0.01


def job(**tables: Any) -> Job:
    """Three generated sites, with word tables that are trained; `tables` change it."""
    table: dict[str, Any] = {**TABLE, "model": {**TAGGER, "hashed_words": 4096}}
    for name, values in tables.items():
        table[name] = {**table.get(name, {}), **values}
    return parse_job(table, "job", Path(), "job")


@cache
def _scene(key: str) -> Scene:
    of = job(**json.loads(key))
    return Scene(of, load_sites(of))


def leak(of: Job | Scene, name: str) -> Leak:
    """One attack on a job."""
    attack = next(attack for attack in attacks() if name in attack.name)
    return attack.on(of if isinstance(of, Scene) else Scene(of, load_sites(of)))


def told(name: str, **tables: Any) -> Leak:
    """One attack on `job(**tables)`, which runs once for all of them."""
    return leak(_scene(json.dumps(tables)), name)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), hidden_size=96)


def tuned(
    encoder: Path,
    model: dict[str, Any],
    privacy: dict[str, Any] | None = None,
    **training: Any,
) -> Job:
    """Fine-tuning of a tiny encoder on the same sites."""
    table = {
        "method": "finetune",
        "seed": 2,
        "synthetic": TABLE["synthetic"],
        "training": {"cycles": 1, "batch": "each", "batch_size": 2, **training},
        "model": {"kind": "token-classifier", "encoder": str(encoder), **model},
    }
    if privacy:
        table |= {"privacy": privacy, "preset": "paper"}
    return parse_job(table, "job", Path(), "job")


SECURE = {"secure_sum": True}
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "unit": "document", "rate": 0.5}


def test_success_is_what_is_named_at_one_percent_of_false_alarms() -> None:
    """By hand: of 200 decoys one may be named for each half percent, so two of them."""
    decoys = [*range(200)]
    assert Trial.of([250.0, 198.5, 197.5, -1.0], decoys).success == 0.75
    assert Trial.of([250.0, 198.5, 196.5, -1.0], decoys).success == 0.5
    # Ten decoys: one of them is 10 %. Half of the targets is above all, so are a tenth of a tenth
    # of those between the first two decoys.
    found = Trial.of([20.0, 8.5], [*range(10)])
    assert found.success == pytest.approx(0.5)
    assert Trial.of([20.0, 9.0], [*range(10)]).success == pytest.approx(0.5 + 0.1 * 0.5)
    assert found.details["auc"] == pytest.approx((1 + 0.9) / 2)


def test_who_sees_nothing_has_the_chance() -> None:
    assert Trial.of([0.0] * 30, [0.0] * 70).success == pytest.approx(CHANCE)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 20_000, generator=generator)
    found = Trial.of(noise[0], noise[1])
    assert found.low < CHANCE < found.high
    with pytest.raises(ConfigError, match="something that is not"):
        Trial.of([1.0], [])
    for wrong in ([math.nan, 1.0], [math.inf]):  # would be more than all others
        with pytest.raises(ConfigError, match="no number"):
            Trial.of(wrong, [0.0])


def test_the_interval_is_that_of_wilson() -> None:
    """Newcombe 1998, table I: 81 of 263 has 0.2553 to 0.3662, 0 of 20 has 0 to 0.1611."""
    found = Trial.share(81 / 263, 263, 0.0)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    none = Trial.share(0.0, 20, 0.0)
    assert (none.low, none.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


# ---- words ---------------------------------------------------------------------------------------


def test_rows_that_change_are_the_words_of_the_mini_batch() -> None:
    """All of them, also from a secure sum, which hides alone whose they are."""
    for settings in ({}, {"federation": SECURE}):
        found = told("word tables", **settings)
        assert found.proven
        assert found.control == found.success == 1.0


def test_so_they_are_of_a_cycle_of_fine_tuning_that_trains_all(bert: Path) -> None:
    """All that occur; in few bits, which round the smallest changes away, nearly all."""
    for compression, least in (("none", 1.0), ("packed", 0.9)):
        free = {"min_tokens": 0, "min_steps": 0, "compression": compression}
        found = leak(tuned(bert, {"train": "all"}, **free), "word tables")
        assert found.control == 1.0
        assert found.success is not None
        assert found.success >= least


def hidden(found: Leak) -> None:
    """Near chance, as of a hundred targets; noise is other noise each time."""
    assert found.control is not None
    assert found.control >= 0.99
    assert found.success is not None
    assert found.success < 0.3
    assert found.details["auc"] == pytest.approx(0.5, abs=0.25)


def test_noise_hides_words() -> None:
    hidden(told("word tables", privacy=PRIVATE))


def test_frozen_tables_have_none(bert: Path) -> None:
    for of in (job(model={"hashed_words": 0}), tuned(bert, {"train": "encoder"})):
        found = leak(of, "word tables")
        assert not found.applies
        assert "no table" in found.why


# ---- tokens of an encoder ------------------------------------------------------------------------


def test_tokens_lie_in_the_span_of_the_lowest_maps(bert: Path) -> None:
    """Of a gradient all; where the lowest layer stays as it is there is no such map."""
    one = {"local_steps": 1, "compression": "none"}
    found = leak(tuned(bert, {"train": "encoder"}, **one), "tokens from the lowest")
    assert found.control is not None
    assert found.control >= 0.99
    top = leak(tuned(bert, {"train": "top", "top": 1}, **one), "tokens from the lowest")
    assert not top.applies
    assert "no map" in top.why


def test_half_of_low_ranks_says_nothing_at_first(bert: Path) -> None:
    """The other half begins at zero, so the first step is rounding alone; later ones tell."""
    one = {"local_steps": 1, "compression": "none", "evaluate_every": 3, "cycles": 3}
    found = leak(tuned(bert, {"train": "lora"}, **one), "tokens from the lowest")
    assert found.details["auc"] > 0.6


@pytest.mark.slow
def test_neither_steps_of_adam_nor_few_bits_nor_low_ranks_hide_them() -> None:
    """Of a real encoder, after one step of Adam, and after six of low rank in few bits."""
    one = {"local_steps": 1, "compression": "none"}
    found = leak(
        tuned(Path("minilm"), {"train": "encoder"}, **one), "tokens from the lowest"
    )
    assert found.control is not None
    assert found.control >= 0.99
    assert found.success is not None
    assert found.success > 0.8
    ranks = leak(tuned(Path("minilm"), {"train": "lora"}), "tokens from the lowest")
    assert ranks.low is not None
    assert ranks.low > 0.1


def test_places_are_told_of_a_step_and_hardly_of_an_epoch(bert: Path) -> None:
    model, few = {"train": "encoder", "dropout": 0.0}, {"compression": "none"}
    found = [
        leak(tuned(bert, model, **few, **s), "places") for s in ({"local_steps": 1}, {})
    ]
    assert found[0].control == 1.0
    told = [(one.success or 0) - one.chance for one in found]
    assert told[0] > 0.25 + told[1]


def test_a_place_is_likelier_the_nearer_it_is_for_the_word() -> None:
    """By the definition, a number at a time."""
    distances, times = [[0.1, 0.4], [0.2, 0.3], [0.9, 0.5]], [[3, 0], [1, 1], [0, 2]]
    found = spans.placed(np.array(distances), np.array(times))
    for word, own in enumerate(distances):
        for place in range(2):
            less = sum(math.log(d) for d in own) / 2 - math.log(own[place])
            often = sum(times[word]) * sum(of[place] for of in times)
            assert found[word, place] == pytest.approx(
                less + 0.02 * math.log(1 + often)
            )


def test_noise_hides_tokens_of_an_encoder(bert: Path) -> None:
    of = tuned(bert, {"train": "encoder"}, cycles=2, privacy=PRIVATE)
    hidden(leak(of, "tokens from the lowest"))
    found = leak(of, "places")
    assert (found.success or 0) < found.chance + 0.1


# ---- words of a light tagger ---------------------------------------------------------------------


def test_the_order_of_words_follows_from_a_convolution_s_gradients() -> None:
    """Gradients by the definition, a token at a time. Without repeated words each pair is told as
    once, forwards and backwards; else as NumPy's least squares say, with a row for each penalty."""
    rng = np.random.default_rng(3)
    for texts, rate in (
        ([[0, 1, 2], [3, 4, 5]], 0.0),
        ([[0, 1, 0, 2], [1, 0, 3]], 0.2),
    ):
        rows = rng.normal(size=(max(map(max, texts)) + 1, 12))
        gradients = np.zeros((3, 20, 12))
        for text in texts:
            for at in range(len(text)):
                told = rng.normal(size=20)
                for k in range(3):
                    if 0 <= at + k - 1 < len(text):
                        gradients[k] += np.outer(told, rows[text[at + k - 1]])
        often = np.bincount(np.concatenate(texts)).astype(float)
        given = [torch.from_numpy(x) for x in (gradients, rows, often)]
        found = spans.inverted([given[0]], *given[1:], rate).numpy()
        if not rate:
            pairs = [(a, b) for text in texts for a, b in pairwise(text)]
            assert sorted(pairs) == sorted(zip(*np.nonzero(found > 1.5), strict=True))
            assert found[found <= 1.5].max() < 0.5
        spread = (rows**2).sum(0)
        least = np.diag((spread * rate / (1 - rate) + 1e-9 * spread.mean()) ** 0.5)
        inverse = np.linalg.pinv(np.vstack((rows, least)))[:, : len(rows)]
        told = gradients @ inverse
        wanted = np.zeros_like(found)
        for turn in (1, -1):
            x, y = (np.concatenate(part) for part in (told[:-1], told[1:])[::turn])
            ridge = (0.1 * (x**2).sum(0).mean()) ** 0.5 * np.eye(len(rows))
            blind = np.tile(often / often.sum(), (len(rows), 1))
            t = np.linalg.lstsq(np.vstack((x, ridge)), np.vstack((y, ridge @ blind)))[0]
            wanted += t * often[:, None] if turn == 1 else (t * often[:, None]).T
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


def test_who_knows_how_often_words_are_there_sets_the_chance() -> None:
    """By hand: both pairs have the largest product of numbers; then one of three has it, and three
    pairs that are nowhere have more than the other two."""
    own = np.zeros((1, 4, 4))
    own[0, 0, 1] = own[0, 0, 2] = 1.0
    scores = np.where(own[0] > 0, 1.0, 0.0)
    assert (found := Trial.order(scores, own)).success == 1.0
    assert found.chance == 1.0
    own[0, 3, 3] = 9.0
    assert Trial.order(scores, own).chance == pytest.approx(1 / 3)


WIDE = {
    "hashed_words": 0,
    "char_filters": 64,
    "char_dim": 16,
    "cnn_filters": 32,
    "dropout": 0.0,
}


def test_convolutions_tell_words_and_neighbours_of_frozen_tables() -> None:
    """Of a small mini-batch; noise hides them, and layers that stay tell nothing."""
    few = {"batch_size": 6}
    for name in ("words from conv", "neighbours"):
        found = told(name, model=WIDE, training=few)
        assert found.control is not None
        assert found.control >= 0.95
        assert found.success is not None
        assert found.success > found.chance + 0.5
        of = told(name, model=WIDE, training=few, privacy=PRIVATE)
        assert (of.success or 0) < of.chance + 0.3
        own = {"private": ["cnn", "lstm", "crf"]}
        assert told(name, model=WIDE, training=own).why.endswith("leaves a site")


def test_the_sign_of_an_output_bias_names_masked_words(
    bert: Path, tmp_path: Path
) -> None:
    """In the paper's setting, which trains it; by default it stays, and there is nothing to see."""
    for name in ("north", "south"):
        notes = [d.text for d in load_sites(job()).data[name == "south"].train]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(notes))
    table = {
        "method": "pretrain",
        "seed": 2,
        "training": {
            "cycles": 1,
            "head_cycles": 0,
            "min_tokens": 0,
            "min_steps": 0,
            "length": 32,
        },
        "model": {"encoder": str(bert)},
        "sites": {name: {"path": f"{name}.txt"} for name in ("north", "south")},
    }
    found = leak(parse_job(table, "job", tmp_path, "job"), "output bias")
    assert not found.applies
    table["model"] |= {"train": "all"}
    table["training"] |= {"local_steps": 1, "compression": "none"}
    found = leak(parse_job(table, "job", tmp_path, "job"), "output bias")
    assert found.control == found.success == 1.0
    tokens = leak(parse_job(table, "job", tmp_path, "job"), "tokens from the lowest")
    assert tokens.control is not None, tokens
    assert tokens.control >= 0.9, tokens
    none = leak(
        parse_job(table, "job", tmp_path, "job"), "neighbours from convolutions"
    )
    assert none.why == "no convolution that reads words leaves a site"


def test_columns_of_contextual_features_are_left_out(bert: Path) -> None:
    """The control knows of it; where there are no others nothing is told."""
    model = {"contextual": str(bert), **WIDE}
    found = told("words from conv", model=model, training={"batch_size": 6})
    assert found.control is not None
    assert found.control >= 0.95
    assert told("words from conv", model=model | {"characters": False}).why


# ---- counts --------------------------------------------------------------------------------------


def test_counts_of_an_evaluation_tell_types() -> None:
    """A secure sum tells those of all sites."""
    found = told("from counts")
    assert (
        found.success == found.control == found.low == 1.0
    )  # of all types, no sample of them
    secure = told("from counts", federation=SECURE)
    assert secure.success is not None
    assert secure.success < 1
    assert not told("from counts", privacy=PRIVATE).applies


@pytest.mark.slow
def test_an_evaluation_may_come_late(bert: Path) -> None:
    """After more cycles than are kept, in few bits."""
    few = {
        "local_steps": 1,
        "cycles": 10,
        "evaluate_every": 10,
        "compression": "packed",
    }
    scene = Scene(of := tuned(bert, {"train": "top", "top": 1}, **few), load_sites(of))
    assert leak(scene, "from counts").success == 1.0
    assert sum(bool(seen.tensors) for seen in scene.seen) < 10


def test_two_rounds_are_heard_where_each_is_evaluated(bert: Path) -> None:
    of = tuned(
        bert,
        {"train": "top", "top": 1},
        cycles=3,
        local_steps=1,
        evaluate_every=1,
        compression="none",
    )
    seen = Scene(of, load_sites(of)).seen
    assert [each.task for each in seen] == ["train", "evaluate"] * 2


def test_two_sums_that_differ_by_a_site_tell_its_counts() -> None:
    """With drop-outs permitted; never where a sum is over all sites."""
    found = told("two sums", federation={**SECURE, "min_sites": 2})
    assert found.success == found.control == 1.0
    assert found.advantage > 0.5
    for settings in ({"federation": SECURE}, {}):
        assert not told("two sums", **settings).applies
    of = job(federation={**SECURE, "min_sites": 2})
    scene = Scene(of, load_sites(of))
    none = dict.fromkeys(
        scene.seen[-1].own.metrics, 0.0
    )  # of a site without validation notes
    scene.seen[-1] = replace(
        scene.seen[-1], own=replace(scene.seen[-1].own, metrics=none)
    )
    assert leak(scene, "two sums").why == "no evaluation counts anything of the site"


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A job's file."""
    path = tmp_path / "job.toml"
    settings = "".join(
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for name, values in job().table.items()
        if isinstance(values, dict)
    )
    path.write_text(f'method = "fedner"\nseed = 2\n{settings}')
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["fednotes", *words])
    app.main()


def test_the_command_leaves_an_audit_and_its_page(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(
        "fednotes.apps.audit.attacks", lambda: [*words.ATTACKS, *counts.ATTACKS]
    )
    out = tmp_path / "audit"
    run(monkeypatch, "audit", str(written), "--out", str(out))
    found = read_audit(out)
    assert found is not None
    assert [a.attack for a in found.attacks] == [
        a.name for a in (*words.ATTACKS, *counts.ATTACKS)
    ]
    assert found.worst == pytest.approx(1 - CHANCE, abs=1e-3)
    page = (out / "report.html").read_text()
    assert found.fingerprint in page
    assert all(leak.attack in page for leak in found.attacks)
    assert "words from word tables" in capsys.readouterr().out
    assert (out / "audit.json").stat().st_mode & 0o077 == 0
    texts = {
        w for d in load_sites(job()).data[0].train for w in d.text.split() if len(w) > 8
    }
    told = (out / "audit.json").read_text() + page
    assert not [word for word in texts if word in told]


def test_the_command_says_what_is_missing(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = tmp_path / "run"
    other.mkdir()
    (other / "job.json").write_text(json.dumps({"table": {**job().table, "seed": 3}}))
    for given, said in (
        ((str(written),), "give --out"),
        (
            (str(written), "--out", str(tmp_path / "o"), "--site", "nobody"),
            "the job's sites are",
        ),
        ((str(written), "--out", str(tmp_path / "o"), "--total", "9"), "go together"),
        ((str(tmp_path / "none"), "--out", str(tmp_path / "o")), "no such job file"),
        ((str(written), "--out", str(written)), "cannot be written"),
        ((str(written), "--out", str(other)), f"{other}: a run of another job"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "audit", *given)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert [path.name for path in other.iterdir()] == ["job.json"]


def test_a_share_that_is_none_is_refused(tmp_path: Path) -> None:
    """A chance above 1 would hide every success."""
    for name, value in (("chance", 1e300), ("success", -1.0), ("control", 2.0)):
        told = {"attacks": [{"attack": "words", "success": 1.0, name: value}]}
        (tmp_path / "audit.json").write_text(json.dumps(told))
        with pytest.raises(DataError, match=rf"attacks\.0\.{name}: Input should be "):
            read_audit(tmp_path)


def test_what_is_not_tried_or_fails_is_told() -> None:
    fine = Leak(attack="a", success=0.3, chance=0.01, control=1.0, proven=True)
    failed = fine.model_copy(update={"attack": "b", "proven": False, "control": 0.1})
    none = Leak(attack="c", applies=False, why="no")
    found = Audit(
        attacks=[fine, failed, none, Leak(attack="d", why="could not be tried: x")]
    )
    assert found.unproven == ["b", "d"]
    assert found.worst == pytest.approx(0.29)
    sample = fine.model_copy(update={"low": 0.1, "high": 0.6})  # of few trials
    assert Audit(attacks=[sample]).worst == pytest.approx(0.59)


def test_a_site_at_home_needs_its_own_notes_alone(tmp_path: Path) -> None:
    """Stand-ins take the place of the other site, whose file does not exist here."""
    sentences = [f"Drug{number} B-Drug\nhelped O\n\n" for number in range(20)]
    (tmp_path / "north.conll").write_text("".join(sentences))
    path, own = tmp_path / "job.toml", tmp_path / "site.toml"
    path.write_text(
        'method = "fedner"\n'
        "[sites.north]\npath = 'north.conll'\nsplit = 'sentence'\n"
        "[sites.south]\npath = 'south.conll'\nsplit = 'sentence'\n"
    )
    own.write_text('[data]\npath = "north.conll"\nsplit = "sentence"\n')

    loaded = load_sites(job_at_home(path, (), "north", own, 100)).data

    assert [site.id for site in loaded] == ["north", "south"]
    assert len(loaded[1].train) == 100 - len(loaded[0].train)
    with pytest.raises(ConfigError, match="site 'north' alone has"):
        load_sites(job_at_home(path, (), "north", own, 3))
    with pytest.raises(ConfigError, match=r"no \[sites.east\]"):
        job_at_home(path, (), "east", own, 100)
