"""Differential privacy of FedNER and fine-tuning: what leaves a site, and its size."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applications import has_app
from private_sites import (
    HASHED_MODEL,
    MODEL,
    SECRET,
    config_of,
    make_private_site,
    patients,
    theta,
)
from scipy import stats
from tiny_jobs import TABLE
from tiny_models import save_bert

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.update import Total
from fednotes.jobs.card import render_card
from fednotes.jobs.declaration import parse_declared
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import PROMISED
from fednotes.jobs.simulate import simulate
from fednotes.methods import list_method_names
from fednotes.methods.fedner import METHOD as FEDNER
from fednotes.methods.fedner import FedNERWithDP
from fednotes.methods.finetune import METHOD as FINETUNE
from fednotes.methods.private import DPMethod
from fednotes.privacy import noise as noise_room
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE, Stream
from fednotes.privacy.promise import COUNTS, Privacy, compute_epsilon
from fednotes.privacy.training import NOISY


def values(tensors: dict[str, torch.Tensor], grids: dict[str, float]) -> np.ndarray:
    """Return the values that whole numbers stand for, as one vector."""
    scaled = [
        tensors[name].double().numpy().ravel() * grids[name] for name in sorted(tensors)
    ]
    return np.concatenate(scaled)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """Draw the given units in each round, and add no noise to their sum."""

    def give(units: Sequence[int]) -> None:
        monkeypatch.setattr(
            private,
            "draw_units",
            lambda stream, count, rate: np.isin(np.arange(count), units),
        )
        zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
        monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)

    return give


@pytest.mark.parametrize("clip", [0.01, 0.25, 1e6])
def test_a_unit_changes_all_layers_together_by_at_most_the_clip(
    clip: float, without_noise: Any
) -> None:
    """By brute force: of what a site answers and of what moves its private layers, with
    each unit and without it, in every company; private layers included, the length is
    min(C, |g_u|)."""
    moved: dict[str, torch.Tensor] = {}

    def sums(units: Sequence[int]) -> np.ndarray:
        without_noise(units)
        site = make_private_site(privacy={"clip": clip})
        adam_step = site._adam.step
        site._adam.step = lambda gradients: (
            moved.update(gradients),
            adam_step(gradients),
        )[1]  # type: ignore[method-assign]
        answer = site.noisy_gradients(theta(site), round=0)
        shared = values(dict(answer.tensors), site._grids)
        private_part = [moved[n].double().numpy().ravel() for n in sorted(moved)]
        return np.concatenate([shared, 4 * np.concatenate(private_part)])  # N = 4

    nothing = sums([])
    assert not nothing.any()
    alone = [sums([unit]) - nothing for unit in range(3)]
    for unit, vector in enumerate(alone):
        others = [u for u in range(3) if u != unit]
        with_it, without_it = sums([0, 1, 2]), sums(others)
        assert np.allclose(
            with_it - without_it, vector, rtol=0, atol=1e-6 * min(clip, 1)
        )
        length = float(np.linalg.norm(vector))
        # What moves private layers is rounded to float32.
        assert length <= clip * (1 + 2**-24)
        assert clip > 1 or length == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("table", [MODEL, HASHED_MODEL])
def test_the_contribution_of_a_unit_does_not_depend_on_other_units(
    table: dict[str, Any], without_noise: Any
) -> None:
    """Whole numbers, dropout included: who else is drawn moves no bit of it, also where
    parameters are so large that rounding decides."""
    for factor in (1.0, 5.0):

        def sums(
            units: Sequence[int], factor: float = factor
        ) -> dict[str, torch.Tensor]:
            without_noise(units)
            site = make_private_site(model=FEDNER.read_model_config(table))
            return dict(site.noisy_gradients(theta(site, factor), round=0).tensors)

        together, single = sums([0, 1, 2]), [sums([unit]) for unit in range(3)]
        for name, value in together.items():
            assert torch.equal(
                value,
                sum((unit_sum[name] for unit_sum in single), torch.zeros_like(value)),
            )
        assert any(value.any() for value in together.values())


def test_the_contribution_of_a_unit_to_adapters_does_not_depend_on_other_units(
    tmp_path: Path, without_noise: Any
) -> None:
    """Integers, with units of different lengths and with dropout.

    In one pass over several units, the longest one would decide the shape of the
    products, and the shape decides how they are rounded.
    """
    pytest.importorskip("transformers")
    encoder = str(save_bert(tmp_path / "bert"))
    table = {"kind": "token-classifier", "encoder": encoder, "train": "lora"}
    config = FINETUNE.config_class(
        model=FINETUNE.read_model_config(table),
        privacy=Privacy(noise=1.5, rate=0.5, clip=0.25, unit="document"),
        batch_size=4,
        seed=5,
    )
    data = patients()
    config = replace(FINETUNE.configure(config, [data]), sites=3)

    def sums(units: Sequence[int]) -> dict[str, torch.Tensor]:
        without_noise(units)
        site = DPMethod(FINETUNE).make_site(data, config, secret=SECRET)
        torch.manual_seed(1)
        sent = {name: torch.randn_like(p) for name, p in theta(site).items()}
        return dict(site.noisy_gradients(sent, round=0).tensors)

    together = sums(range(6))
    singles = [sums([unit]) for unit in range(6)]
    assert "lora.up" in together
    for name, value in together.items():
        assert value.any()
        assert torch.equal(value, sum(single[name] for single in singles))


def test_dropout_of_a_unit_equals_torch_with_its_secret_seed(
    without_noise: Any,
) -> None:
    """A secret word a unit, of all generators of torch alike."""
    without_noise([1])
    site = make_private_site()
    answer = site.noisy_gradients(theta(site), round=0).tensors
    reseeded = make_private_site()
    reseeded.site.model.train(True)
    torch.manual_seed(
        int(Stream(reseeded._derive_key(0)).draw_words(3)[1] >> np.uint64(1))
    )
    alone = reseeded.clip_gradient(reseeded.units[1])
    assert answer.keys() <= alone.keys()
    assert any(value.any() for value in answer.values())
    assert all(torch.equal(answer[name], alone[name]) for name in answer)


@pytest.mark.parametrize("table", [MODEL, HASHED_MODEL])
def test_a_clipped_gradient_is_that_of_the_loss_of_the_unit(
    table: dict[str, Any],
) -> None:
    """Against torch's gradients of the mean loss, scaled and cut by hand."""
    model = FEDNER.read_model_config(table)
    site = make_private_site(privacy={"clip": 0.05}, model=model)
    site.site.model.train(True)
    indices = site.units[1]
    torch.manual_seed(3)
    clipped = site.clip_gradient(indices)
    parameters = {**site.site.shared, **site.site.private}
    torch.manual_seed(3)
    loss = site.site.model.loss(site.site.train_set, indices)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    flat = [np.zeros(0) if g is None else g.double().numpy().ravel() for g in gradients]
    norm = np.linalg.norm(np.concatenate(flat))
    assert norm > 0.05
    for (name, _), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is not None:
            expected = gradient.double().numpy() * (0.05 / norm) / site._grids[name]
            error = np.abs(clipped[name].numpy()) - np.abs(expected)
            rounded = 2e-9 * np.abs(expected)  # the clip has a margin of 1e-9
            assert (error <= rounded).all()  # towards zero
            assert (error >= -1 - rounded).all()


@pytest.mark.parametrize("size", [64, 65, 150])
def test_the_gradient_of_a_large_unit_is_that_of_its_mean_loss(size: int) -> None:
    """A unit of more sentences than fit into one pass, against one pass of torch over
    them all.

    The loss is a mean over the unit, so it matters how each pass is weighted: the last
    one has 1 of 65 sentences, or 22 of 150. Nothing is clipped and there is no dropout.
    """
    model = FEDNER.read_model_config({**MODEL, "dropout": 0.0})
    site = make_private_site(
        patients(size=size, owners="a" * size), privacy={"clip": 1e3}, model=model
    )
    (unit,) = site.units
    assert len(unit) == size
    clipped = site.clip_gradient(unit)
    parameters = {**site.site.shared, **site.site.private}
    loss = site.site.model.train(True).loss(site.site.train_set, np.arange(size))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    assert clipped.keys() == parameters.keys()
    for (name, _), gradient in zip(parameters.items(), gradients, strict=True):
        expected = gradient.double().numpy()
        unit_of_grid = site._grids[name]
        # cut to the grid; float32 sums
        close = unit_of_grid + 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(
            clipped[name].numpy() * unit_of_grid, expected, rtol=0, atol=close
        )
        assert np.abs(expected).max() > 50 * close


def test_all_documents_of_a_patient_form_one_unit() -> None:
    """Six notes, a sentence each, of three patients; two documents of one note are one
    note."""
    site = patients()
    notes = tuple(
        replace(d, meta={"document": f"n{i // 3}"}) for i, d in enumerate(site.train)
    )
    by = {
        "patient": [[0, 1], [2, 3], [4, 5]],
        "document": [[n] for n in range(6)],
        "sentence": [[n] for n in range(6)],
    }
    for unit, unit_documents in by.items():
        assert [
            list(u) for u in make_private_site(site, privacy={"unit": unit}).units
        ] == unit_documents
    cut = replace(site, train=tuple(replace(d, patient=None) for d in notes))
    units = make_private_site(cut, privacy={"unit": "document"}).units
    assert [list(u) for u in units] == [[0, 1, 2], [3, 4, 5]]


def test_spellings_of_the_name_of_a_patient_are_merged() -> None:
    """Case and blanks make nobody another patient; notes of one number may be of two
    patients."""
    names = ("Ann B", "ann b", "Cy", " cy ", "ANN  B", "D")
    site = patients()
    notes = tuple(replace(d, patient=p) for d, p in zip(site.train, names, strict=True))
    units = make_private_site(replace(site, train=notes)).units
    assert [list(u) for u in units] == [[0, 1, 4], [2, 3], [5]]
    numbered = tuple(replace(d, meta={"document": "n1"}) for d in notes)
    units = make_private_site(
        replace(site, train=numbered), privacy={"unit": "document"}
    ).units
    assert [list(u) for u in units] == [[0, 1, 4], [2, 3], [5]]


def test_documents_without_a_patient_are_refused() -> None:
    site = patients(owners="aabbcc")
    unknown = replace(
        site, train=(*site.train[:-1], replace(site.train[-1], patient=None))
    )
    with pytest.raises(
        ConfigError, match=r'1 of 6 training documents.*unit = "document"'
    ):
        make_private_site(unknown)
    make_private_site(unknown, privacy={"unit": "document"})


def test_a_delta_that_would_reveal_a_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too large for site"):
        make_private_site(
            privacy={"delta": 0.09, "unit": "sentence"},
            site=patients(size=12, owners="ab" * 6),
        )


def test_equal_questions_have_equal_answers_and_others_have_other_noise() -> None:
    """Noise that was added to two answers would go with their difference: of no two
    questions is the difference as short as without noise (σ √2 per number)."""
    site, again = make_private_site(), make_private_site()
    first = site.noisy_gradients(theta(site), round=0).tensors
    same = again.noisy_gradients(theta(again), round=0).tensors
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(torch.equal(a, b) for a, b in zip(
        site.site.private.values(), again.site.private.values(), strict=True))  # fmt: skip

    second_site = make_private_site()
    data = patients()
    longer = replace(data.train[0], text=data.train[0].text + " ")
    changed = replace(data, train=(longer, *data.train[1:]))
    answers = {
        "other parameters": second_site.noisy_gradients(
            theta(second_site, 1 + 1e-6), round=0
        ),
        "another step": site.noisy_gradients(theta(site), round=0),
        "another round": (s := make_private_site()).noisy_gradients(theta(s), round=1),
        "another sum": (
            s := make_private_site(name_request=lambda: b"x")
        ).noisy_gradients(theta(s), round=0),
        "another secret": (s := make_private_site(secret=bytes(32))).noisy_gradients(
            theta(s), round=0
        ),
        "another text": (s := make_private_site(changed)).noisy_gradients(
            theta(s), round=0
        ),
        "another setting": (s := make_private_site(learning_rate=0.5)).noisy_gradients(
            theta(site), round=0
        ),
        "another promise": (
            s := make_private_site(privacy={"clip": 0.26})
        ).noisy_gradients(theta(s), round=0),
    }
    for kind, answer in answers.items():
        apart = np.concatenate(
            [
                (first[n] - v).double().numpy().ravel() / SCALE
                for n, v in answer.tensors.items()
            ]
        )
        assert apart.std() > 1.2, kind


def test_no_two_steps_have_the_same_noise() -> None:
    """A site without private layers that is sent the same parameters in each round.

    Nothing else differs between the steps, so a key without their number would add the
    same noise to two sums. The difference of two answers has the noise of both, √2 of
    one, and units besides.
    """
    site = make_private_site(private=(), rounds=3)
    answers = [site.noisy_gradients(theta(site), round=0).tensors for _ in range(3)]
    for first, second in combinations(answers, 2):
        apart = [
            (first[n] - v).double().numpy().ravel() / SCALE for n, v in second.items()
        ]
        assert np.concatenate(apart).std() > 1.2


def test_an_answer_has_the_noise_that_is_promised(
    without_noise: Any, monkeypatch: Any
) -> None:
    """A site's share, σ C / √2 of three sites, in what leaves; all of σ C in what moves
    its private layers. χ² of the sum of squares of numbers with nobody in the round, p
    > 1e-4."""
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.zeros(count, bool)
    )
    site, moved = make_private_site(privacy={"noise": 1.5, "clip": 0.25}), {}
    site._adam.step = moved.update  # type: ignore[method-assign,assignment]
    answer = site.noisy_gradients(theta(site), round=0)
    shared = values(dict(answer.tensors), site._grids)
    private_part = 4 * np.concatenate(
        [moved[n].double().numpy().ravel() for n in sorted(moved)]
    )
    for part, deviation in (
        (shared, 1.5 * 0.25 / math.sqrt(2)),
        (private_part, 1.5 * 0.25),
    ):
        square = float((part / deviation) ** 2 @ np.ones(len(part)))
        low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(part))
        assert low < square < high


def test_an_answer_is_the_sum_of_clipped_gradients_and_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise that is 7 everywhere, and gradients that are 1000 a unit in each number:
    3007."""
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.ones(count, bool)
    )
    sevens = lambda stream, count: np.full(count, 7)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", sevens)
    site = make_private_site()
    site.clip_gradient = lambda indices: {  # type: ignore[method-assign]
        n: torch.full(p.shape, 1000) for n, p in site._parameters.items()
    }
    answer = site.noisy_gradients(theta(site), round=0).tensors
    assert len(site.units) == 3
    assert all((value == 3007).all() for value in answer.values())


def test_the_server_divides_the_sum_by_a_constant() -> None:
    """By hand: σ = 1.5, C = 1/4, three sites of which one counts as none, and N = 4: a
    step of the grid is 1.5 / 4 / √2 / 2^26 / 4."""
    site = make_private_site()
    config: Any = config_of(patients())
    server = private.Server(config, site.promise, theta(site), None)
    gradients: dict[str, torch.Tensor] = {}
    server._adam.step = gradients.update  # type: ignore[method-assign,assignment]
    totals = {n: torch.full(v.shape, 2**40) for n, v in theta(site).items()}
    server.step(Total(totals, 3.0, {}))
    expected = 2**40 * 1.5 / 4 / math.sqrt(2) / 2**26 / 4
    assert gradients.keys() == totals.keys()
    for value in gradients.values():
        assert value.dtype == torch.float32
        assert torch.allclose(value, torch.full_like(value, expected), rtol=1e-6)
    rests = totals.popitem()[0]
    server.step(Total(totals, 3.0, {}))
    assert gradients.keys() == {*totals, rests}
    assert gradients[rests] is None  # what no site sends has no gradient


def test_nothing_but_the_noisy_sum_leaves_a_site() -> None:
    site = make_private_site()
    assert site.tasks == {NOISY, COUNTS, "begin", "finish"}
    answer = site.noisy_gradients(theta(site), round=0)
    assert (answer.weight, dict(answer.metrics)) == (1.0, {})
    assert answer.tensors.keys() == site.site.shared.keys()
    assert all(v.dtype == torch.int64 for v in answer.tensors.values())
    end = site.finish(theta(site))
    assert (end.weight, dict(end.metrics), dict(end.tensors)) == (1.0, {}, {})
    assert "strict" in site.scores  # which stay


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_parameters_that_break_every_gradient_get_only_noise(
    value: float,
) -> None:
    """A refusal would tell of the units; one that is not finite adds nothing."""
    site = make_private_site()
    sent = {name: torch.full_like(t, value) for name, t in theta(site).items()}
    answer = site.noisy_gradients(sent, round=0)
    spread = (
        np.concatenate([t.double().numpy().ravel() for t in answer.tensors.values()])
        / SCALE
    )
    assert 0.5 < spread.std() < 2


def test_a_site_answers_no_more_rounds_than_promised() -> None:
    site = make_private_site(rounds=2)
    for _ in range(2):
        site.noisy_gradients(theta(site), round=0)
    with pytest.raises(RefusedError, match="guarantee covers 2 rounds"):
        site.noisy_gradients(theta(site), round=7)


def test_a_restored_site_has_the_same_secret() -> None:
    """A new process draws a new secret; the kept one comes back, or what is done again
    after a fault would have a second answer, with other noise and other units."""
    site = make_private_site()
    site.noisy_gradients(theta(site), round=0)
    saved = site.state()
    again = make_private_site(secret=None)
    again.restore(saved)
    first_answer = site.noisy_gradients(theta(site), round=1).tensors
    second_answer = again.noisy_gradients(theta(again), round=1).tensors
    assert first_answer.keys() == second_answer.keys()
    assert all(
        torch.equal(first_answer[name], second_answer[name]) for name in first_answer
    )


def job(**tables: Any) -> Any:
    table = {**TABLE, "conditions": ["federated"], **tables}
    return parse_job(table, "job", Path(), "job.toml")


def test_a_run_shows_its_promise_and_no_losses(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    privacy = {"epsilon": 8.0, "rate": 0.5, "unit": "document"}
    result = simulate(job(privacy=privacy), tmp_path)
    promise = result.privacy["federated"]
    assert promise["rounds"] == 4  # two epochs of two
    assert 7.9 < promise["epsilon"] <= 8.0
    assert promise["epsilon"] == compute_epsilon(promise["noise"], 1e-5, 0.5, 4)
    assert (
        json.loads((tmp_path / "summary.json").read_text())["privacy"]["federated"]
        == promise
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["round"] for line in lines] == [1, 3]
    assert lines[0]["epsilon"] < lines[1]["epsilon"] == promise["epsilon"]
    assert not any("loss" in line or line["sites"] for line in lines)
    assert any("ε = 8.00 at δ = 1e-05 after 4 rounds" in note for note in result.notes)
    assert result.mean["federated"]["strict"]["f1"] >= 0
    model = next((tmp_path / "federated" / "sites").iterdir()) / "model"
    alone = shutil.copytree(model, tmp_path_factory.mktemp("kit") / "run" / "model")
    assert "differential privacy" not in render_card(alone)
    (alone.parent / PROMISED).write_text(json.dumps(promise))
    for text in (render_card(model), render_card(alone)):
        for line in (
            f"epsilon: {promise['epsilon']}",
            "delta: 1e-05",
            "unit: document",
        ):
            assert f"- {line}\n" in text
        assert "without differential privacy" not in text
        # a number of units is none to publish
        assert "examples of all sites" not in text


ABLE = ["distill", "fedner", "finetune", "personal", "pretrain"]
if has_app("phenotyping"):
    ABLE = sorted([*ABLE, "phenotype"])


@pytest.mark.parametrize("method", sorted({*list_method_names()} - {*ABLE}))
def test_methods_without_differential_privacy_name_those_with_it(method: str) -> None:
    table = {"method": method, "synthetic": {}, "privacy": {"epsilon": 1.0}}
    refusal = rf"'{method}' does not support .*use one of {', '.join(ABLE)}"
    with pytest.raises(ConfigError, match=refusal):
        parse_job(table, "job", Path(), "job.toml")


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        *[("fedner", "exchange", "weights"), ("fedner", "select", "best")],
        *[("fedner", "personal_epochs", 1), ("finetune", "server", "nesterov")],
        *[("finetune", "compression", "packed"), ("finetune", "keep_cycle", -1)],
        *[("finetune", "proximal", 0.1), ("finetune", "weight_decay", 0.01)],
    ],
)
def test_settings_that_break_the_promise_are_refused_by_name(
    method: str, key: str, value: Any
) -> None:
    tables = {"method": method, "training": {key: value}, "synthetic": {}}
    with pytest.raises(
        ConfigError, match=rf"\[training\]: {key} = .*under \[privacy\] it must be"
    ):
        parse_job({**tables, "privacy": {"epsilon": 1.0}}, "job", Path(), "job.toml")
    parse_job(tables, "job", Path(), "job.toml")
    support = {"fedner": FEDNER, "finetune": FINETUNE}[method].dp
    assert key in support.required_settings


def test_shared_noise_between_real_sites_needs_a_secure_sum() -> None:
    sites = {name: {} for name in ("a", "b", "c")}
    table = {
        "method": "fedner",
        "sites": sites,
        "model": MODEL,
        "privacy": {"epsilon": 1.0},
    }
    with pytest.raises(ConfigError, match=r'where = "sum".*secure_sum = true'):
        parse_declared({"name": "job", "job": table}, Path(), "job.toml")
    secure = {**table, "federation": {"secure_sum": True}}
    assert (
        parse_declared({"name": "job", "job": secure}, Path(), "job.toml").privacy
        is not None
    )
    alone = {**table, "privacy": {"epsilon": 1.0, "where": "site"}}
    assert (
        parse_declared({"name": "job", "job": alone}, Path(), "job.toml").privacy
        is not None
    )


def test_unknown_keys_of_the_table_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"\[privacy\].*'epsilom': did you mean 'epsilon'"
    ):
        job(privacy={"epsilom": 1.0})
    with pytest.raises(ConfigError, match="'privacy' does not belong here"):
        job(training={"privacy": {}})


# ---- an audit: is what is promised kept? ---------------------------------------------


class Canaries:
    """A model of one number a unit, whose gradient is long and that unit's alone; the
    audit of Steinke, Nasr, Jagielski 2023 ("Privacy auditing with one (1) training
    run"), Algorithm 1."""

    def __init__(self, count: int) -> None:
        self.shared = {"w": torch.nn.Parameter(torch.zeros(count))}
        self.private: dict[str, torch.nn.Parameter] = {}
        self.id, self.model, self.num_examples = "site", torch.nn.Module(), count


def least_epsilon(canaries: int, right: int, guesses: int, delta: float) -> float:
    """The largest ε that so many right guesses refute at 95 %: the paper's Theorem 5.2,
    as in its Appendix D."""

    def chance(epsilon: float) -> float:
        guesses_right = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
        cumulative = np.cumsum(guesses_right.pmf(np.arange(right - 1, -1, -1)))
        alpha = float((cumulative / np.arange(1, right + 1)).max(initial=0.0))
        return float(guesses_right.sf(right - 1)) + 2 * alpha * delta * canaries

    return max(
        (e for e in np.linspace(0, 12, 241) if chance(float(e)) < 0.05), default=0.0
    )


class CanarySupport(FedNERWithDP):
    """The gradient of a unit is 10 in the unit's own place."""

    def loss(self, site: Any, indices: np.ndarray) -> torch.Tensor:
        return 10 * site.shared["w"][indices].sum()


def audited(
    monkeypatch: pytest.MonkeyPatch, runs: int, *, clip: float = 1.0, noise: float = 1.0
) -> tuple[float, float]:
    """What is promised, and what the guesses refute. clip, noise: what becomes of them."""
    count, guesses = 400, min(1500, 25 * runs)
    privacy = Privacy(noise=1.5, rate=1.0, clip=1.0, unit="sentence", where="site")
    site: Any = object.__new__(private.DPSite)
    site.promise = private.Promise(privacy, 1.5, 10**6, 1)
    site.support = CanarySupport()
    site.site, site._private, site.steps = Canaries(count), {}, 0
    site._shared, site._noise_secret, site._data = site.site.shared, SECRET, b""
    site._name_request, site._memory, site._agreed = bytes, {}, {}
    site._config, site.units = (
        config_of(patients()),
        [np.array([n]) for n in range(count)],
    )
    site._grids = {"w": site.promise.grids[0]}
    rng, scores, was_in = np.random.default_rng(1), [], []
    original = private.draw_discrete_gaussian
    monkeypatch.setattr(noise_room, "MARGIN", clip)
    less = lambda stream, n: (original(stream, n) * noise).astype(np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", less)
    for _ in range(runs):
        inside = rng.random(count) < 0.5
        monkeypatch.setattr(
            private, "draw_units", lambda stream, n, rate, inside=inside: inside
        )
        scores.append(
            site.noisy_gradients(theta(site), round=0).tensors["w"].double().numpy()
        )
        was_in.append(inside)
    score, truth = np.concatenate(scores), np.concatenate(was_in)
    order = np.argsort(score)
    right = (~truth[order[: guesses // 2]]).sum() + truth[order[-guesses // 2 :]].sum()
    refuted = least_epsilon(len(truth), int(right), guesses, 1e-6)
    return compute_epsilon(1.5, 1e-6, 1.0, 1), refuted


@pytest.mark.slow
def test_an_audit_by_canaries_does_not_refute_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    promised, refuted = audited(monkeypatch, 6)
    assert 0 < refuted < promised


@pytest.mark.parametrize(
    "broken", [{"clip": 6.0}, pytest.param({"noise": 1 / 6}, marks=pytest.mark.slow)]
)
def test_an_audit_detects_a_broken_clip_and_missing_noise(
    broken: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised, refuted = audited(monkeypatch, 6, **broken)
    assert refuted > promised


@pytest.mark.slow
@pytest.mark.parametrize("broken", [{"clip": 2.0}, {"noise": 0.5}])
def test_an_audit_with_more_canaries_detects_half_the_noise(
    broken: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised, refuted = audited(monkeypatch, 400, **broken)
    assert refuted > promised
