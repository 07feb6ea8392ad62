"""Rules that look at each site's update, compared with NumPy, SciPy and brute force."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fault_net import STRICT, Net, ServerKilled
from fault_toy import SITES, Toy
from hospital_jobs import FEDNER
from scipy.stats import trim_mean

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.federation import Federation, State
from fednotes.core.update import Tensors, Update
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.job_file import parse_job
from fednotes.methods.averaging import Averaging
from fednotes.training.server_steps import (
    Aggregation,
    Rule,
    fill_in_sites,
    sum_or_combine,
)

SHAPES = {"a": (3, 4), "b": (5,)}


class Fixed:
    """A site that returns one update."""

    tasks: ClassVar[frozenset[str]] = frozenset({"train"})

    def __init__(self, name: str, update: Update) -> None:
        self.id, self._update = name, update

    def train(self, tensors: Tensors) -> Update:
        return self._update

    def state(self) -> State:
        return State(0)

    def restore(self, state: State) -> None: ...


def draw_tensors(
    rng: np.random.Generator, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    values = {name: rng.normal(size=shape) * scale for name, shape in SHAPES.items()}
    return {
        name: torch.from_numpy(value.astype(np.float32))
        for name, value in values.items()
    }


def flat(tensors: Tensors) -> np.ndarray:
    """Return all numbers of a site in float64."""
    return np.concatenate([tensors[name].numpy().ravel() for name in SHAPES]).astype(
        np.float64
    )


def aggregate(config: Aggregation, start: Tensors, *updates: Tensors) -> np.ndarray:
    """Return the aggregate of sites s0, s1, … of sizes 1, 2, …, by the engine."""
    sites = [
        Fixed(f"s{k}", Update(tensors, k + 1.0, {"n": 1.0}))
        for k, tensors in enumerate(updates)
    ]
    total = sum_or_combine(InProcess(sites), config, "train", start, start)
    assert (total.weight, total.metrics) == (
        sum(range(len(updates) + 1)),
        {"n": len(updates)},
    )
    assert total.included == tuple(site.id for site in sites)
    return flat(total.mean())


# ---- the rules in NumPy: x is (sites, numbers), changes from what was sent -----------


def clipped(x: np.ndarray, bound: float) -> np.ndarray:
    lengths = [float(np.linalg.norm(row)) for row in x]
    bound = bound or float(np.median(lengths))
    cut = [
        row if n <= bound else row * (bound / n)
        for row, n in zip(x, lengths, strict=True)
    ]
    return np.mean(cut, axis=0)


def best_by_krum(x: np.ndarray, hostile: int, chosen: int) -> np.ndarray:
    """Compute the score as the least sum over all groups of n − f − 2 others."""
    scores = []
    for k, row in enumerate(x):
        others = [float(((row - x[j]) ** 2).sum()) for j in range(len(x)) if j != k]
        scores.append(
            min(sum(group) for group in combinations(others, len(x) - hostile - 2))
        )
    return np.mean(x[np.argsort(scores)[:chosen]], axis=0)


def fltrust(x: np.ndarray, at: int) -> np.ndarray:
    root, weighted, total_trust = x[at], np.zeros(x.shape[1]), 0.0
    for k, row in enumerate(x):
        n = float(np.linalg.norm(row))
        if k != at and n:
            trust = max(0.0, float(row @ root) / n / float(np.linalg.norm(root)))
            weighted, total_trust = (
                weighted + trust * row * float(np.linalg.norm(root)) / n,
                total_trust + trust,
            )
    return weighted / total_trust if total_trust else weighted


RULES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "median": ({}, lambda x: np.median(x, axis=0)),
    "trimmed-mean": ({"hostile": 2}, lambda x: trim_mean(x, 2 / len(x) + 1e-9)),
    "norm-bound": ({"norm_bound": 2.5}, lambda x: clipped(x, 2.5)),
    "krum": ({"hostile": 2}, lambda x: best_by_krum(x, 2, 1)),
    "multi-krum": ({"hostile": 1}, lambda x: best_by_krum(x, 1, len(x) - 1)),
    "reference": ({"reference": "s1"}, lambda x: fltrust(x, 1)),
}


@pytest.mark.parametrize("sites", [7, 8])
@pytest.mark.parametrize("rule", RULES)
def test_rules_equal_the_formulas_of_their_papers(rule: Rule, sites: int) -> None:
    """Of random changes that are a little alike, one of them long: by the programs
    above."""
    options, by_hand = RULES[rule]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        start, common = draw_tensors(rng), draw_tensors(rng)
        scales = [*rng.uniform(0.2, 2, sites - 1), 30.0]
        site_values = [draw_tensors(rng, scale) for scale in scales]
        site_values = [
            {n: start[n] + common[n] * 2 + each[n] for n in SHAPES}
            for each in site_values
        ]
        expected = flat(start) + by_hand(
            np.stack([flat(each) - flat(start) for each in site_values])
        )
        aggregated = aggregate(
            Aggregation(aggregation=rule, **options), start, *site_values
        )
        np.testing.assert_allclose(aggregated, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rule", "expected"), [("krum", 1.1), ("multi-krum", 1.1875)])
def test_krum_leaves_out_a_change_in_the_opposite_direction(
    rule: Rule, expected: float
) -> None:
    """By hand: -1.1, 1.0, 1.1, 1.25 and 1.4 along one axis, with one hostile site.

    The squared distances to the two nearest sum to 9.25, 0.0725, 0.0325, 0.045 and
    0.1125: 1.1 is Krum's choice, and Multi-Krum's mean is that of the four others. The
    hostile change is exactly opposite to 1.1, so a rule that looked at lengths alone
    would take it for that one.
    """
    start = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    site_values = [
        {name: torch.full(shape, size) for name, shape in SHAPES.items()}
        for size in (-1.1, 1.0, 1.1, 1.25, 1.4)
    ]
    aggregated = aggregate(
        Aggregation(aggregation=rule, hostile=1), start, *site_values
    )
    np.testing.assert_allclose(aggregated, np.full(17, expected), rtol=1e-6)


def test_the_default_norm_bound_is_the_median_length() -> None:
    """Also below a length of one, and of a site that changed nothing."""
    rng = np.random.default_rng(3)
    start, site_values = (
        draw_tensors(rng),
        [draw_tensors(rng, scale) for scale in (0.01, 0.02, 0.05, 9.0)],
    )
    site_values = [{n: start[n] + each[n] for n in SHAPES} for each in site_values] + [
        start
    ]
    x = np.stack([flat(each) - flat(start) for each in site_values])
    aggregated = aggregate(Aggregation(aggregation="norm-bound"), start, *site_values)
    np.testing.assert_allclose(
        aggregated, flat(start) + clipped(x, 0.0), rtol=1e-5, atol=1e-6
    )


def test_updates_opposed_to_the_reference_are_ignored() -> None:
    """One against it, one that changed nothing; where nobody is with it the model
    stays."""
    rng = np.random.default_rng(4)
    start, root, near = (
        draw_tensors(rng),
        draw_tensors(rng, 0.1),
        draw_tensors(rng, 0.02),
    )
    sent = {
        "root": {n: start[n] + root[n] for n in SHAPES},
        "against": {n: start[n] - 50 * root[n] for n in SHAPES},
        "none": start,
        "near": {n: start[n] + 30 * (root[n] + near[n]) for n in SHAPES},
    }
    config = Aggregation(aggregation="reference", reference="s0")
    x = np.stack([flat(each) - flat(start) for each in sent.values()])
    aggregated = aggregate(config, start, *sent.values())
    np.testing.assert_allclose(
        aggregated, flat(start) + fltrust(x, 0), rtol=1e-5, atol=1e-6
    )
    alone = aggregate(config, start, sent["root"], sent["against"], sent["none"])
    assert alone.tolist() == flat(start).tolist()


def test_gradients_are_aggregated_as_changes_and_integers_are_summed() -> None:
    """No start: the median of what came.

    Marks of rows are a weighted sum as ever, by hand.
    """
    grads = [
        torch.tensor([1.0, -2.0]),
        torch.tensor([3.0, 5.0]),
        torch.tensor([900.0, 1.0]),
    ]
    marks = torch.tensor([0, 2], dtype=torch.int32)
    sites = [
        Fixed(f"s{k}", Update({"w": g, "m": marks}, k + 1.0))
        for k, g in enumerate(grads)
    ]
    config = Aggregation(aggregation="median")
    total = sum_or_combine(InProcess(sites), config, "train", {}, {})
    assert total.mean()["w"].tolist() == [3.0, 1.0]
    assert total.tensors["m"].tolist() == [0.0, 12.0]


def test_robust_rules_drop_a_word_of_one_site_alone() -> None:
    """By hand: one of five sites moves the row of its own word by 5, all move another's
    by 1 to 5. The mean, here of equal sizes, has a fifth of it, the rules that sort
    have nothing."""
    start = {"words.table": torch.zeros(2, 1)}
    values = [torch.tensor([[5.0 * (k == 3)], [k + 1.0]]) for k in range(5)]
    sites = [
        Fixed(f"s{k}", Update({"words.table": value})) for k, value in enumerate(values)
    ]
    rules: tuple[tuple[Rule, list[float]], ...]
    rules = (("mean", [1.0, 3.0]), ("median", [0.0, 3.0]), ("trimmed-mean", [0.0, 3.0]))
    for rule, row in rules:
        total = sum_or_combine(
            InProcess(sites), Aggregation(aggregation=rule), "train", start, start
        )
        assert total.mean()["words.table"].flatten().tolist() == row


def test_too_few_trained_sites_are_an_error() -> None:
    """A site of weight zero has nothing; the reference may be away."""
    tensors = {"w": torch.ones(2)}
    sites = [
        Fixed("a", Update(tensors)),
        Fixed("b", Update(tensors)),
        Fixed("c", Update(tensors, 0.0)),
    ]
    for options, words in (
        ({"aggregation": "median"}, '"median": needs 3 sites, and 2 have trained'),
        ({"aggregation": "trimmed-mean"}, "hostile = 1: needs 3 sites, and 2 have"),
        (
            {"aggregation": "reference", "reference": "c"},
            "reference = 'c': this site did not",
        ),
    ):
        with pytest.raises(TrainingError, match=words):
            sum_or_combine(
                InProcess(sites), Aggregation(**options), "train", tensors, tensors
            )


@pytest.mark.parametrize(
    ("rule", "hostile", "least"),
    [("krum", 1, 5), ("multi-krum", 2, 7), ("trimmed-mean", 2, 5), ("median", 9, 3)],
)
def test_a_job_with_too_few_sites_is_refused(
    rule: Rule, hostile: int, least: int
) -> None:
    config = Averaging(aggregation=rule, hostile=hostile)
    names = [f"s{k}" for k in range(least)]
    assert fill_in_sites(config, names).sites == least
    with pytest.raises(
        ConfigError, match=f"needs {least} sites, but the job has only {least - 1}"
    ):
        fill_in_sites(config, names[1:])
    with pytest.raises(
        ConfigError, match=r"reference = 's': expected a site of the job"
    ):
        fill_in_sites(Averaging(aggregation="reference", reference="s"), names)


# ---- engines: lost messages, killed sites and servers, the secure sum ----------------


def toy_rounds(
    federation: Federation, took: dict[int, tuple[str, ...]]
) -> torch.Tensor:
    """Run rounds of medians, some of which broadcast nothing new."""
    state = federation.resume()
    if state is None:
        sizes = int(federation.sum("count").metrics["size"])
        federation.sum("share", sizes=sizes)
        state = State(0, {"x": torch.ones(4)})
    x, broadcast = state.tensors["x"], None
    for turn in federation.rounds(state.round, 4):
        updates = federation.each(
            "train", {} if broadcast is x else {"x": x}, round=turn.number
        )
        took[turn.number] = tuple(updates)
        x = (
            torch.stack([update.tensors["least"] for update in updates.values()])
            .median(0)
            .values
        )
        if turn.number % 2:
            federation.sum("evaluate", {"x": x})
            broadcast = x
        turn.commit(
            State(turn.number + 1, {"x": x}), {}, evaluated=bool(turn.number % 2)
        )
    return x


def makes() -> Mapping[str, Any]:
    return {site: lambda site=site: Toy(site) for site in SITES}


def test_faults_do_not_change_the_result(tmp_path: Path) -> None:
    """Both engines; and messages lost, repeated, sites and servers killed at random."""
    took: dict[int, tuple[str, ...]] = {}
    engine = InProcess([Toy(site) for site in SITES])
    expected = toy_rounds(engine, took).tolist()
    assert set(took.values()) == {SITES}
    assert engine.bytes_up == 4 * 3 * (16 + 8 + 8) + 2 * 3 * 16 + 2 * 3 * 16
    for seed in range(8):
        net = Net(makes(), tmp_path / str(seed), random.Random(seed), failures_left=2)
        while True:
            try:
                assert toy_rounds(net.engine(SITES), {}).tolist() == expected
                break
            except ServerKilled:
                continue


def test_absent_sites_are_left_out_of_the_updates(tmp_path: Path) -> None:
    net, took = Net(makes(), tmp_path, down={"b"}), dict[int, tuple[str, ...]]()
    toy_rounds(net.engine(SITES, replace(STRICT, min_sites=2)), took)
    assert set(took.values()) == {("a", "c")}
    requests = [request for _, request, _ in net.sent]
    assert {r.each for r in requests if r.task == "train"} == {True}
    assert {r.each for r in requests if r.task != "train"} == {False}
    net.down = {"a", "b"}
    with pytest.raises(TrainingError, match="did not answer task"):
        net.engine(SITES, replace(STRICT, min_sites=2)).each(
            "finish", {"x": torch.ones(4)}
        )


def test_rules_that_need_each_update_are_refused_under_a_secure_sum(
    tmp_path: Path,
) -> None:
    pytest.importorskip("cryptography")
    from fednotes.engines.secure import SecureSum

    message = (
        "'train': the secure sum hides each site's update, which this method asks for"
    )
    with pytest.raises(ConfigError, match=message):
        InProcess([Toy(site) for site in SITES], secure=True).each("train")
    net = Net(makes(), tmp_path)
    with pytest.raises(ConfigError, match=message):
        net.engine(SITES, summing=SecureSum(SITES, job="job-1")).each("train")
    assert not any(request.task == "train" for _, request, _ in net.sent)


# ---- jobs ----------------------------------------------------------------------------

MEDIAN = FEDNER.replace("[training]", '[training]\naggregation = "median"')


def table(method: str, training: str, more: str = "") -> dict[str, Any]:
    sites = "".join(f'[sites.s{k}]\npath = "x"\n' for k in range(5))
    return tomllib.loads(
        f'method = "{method}"\n{more}\n[training]\n{training}\n{sites}'
    )


@pytest.mark.parametrize(
    ("method", "training", "more", "words"),
    [
        ("distill", 'aggregation = "krum"', "", "one of 'uniform', 'size'"),
        ("adversarial", 'hostile = 1', "", "unknown key 'hostile'"),
        ("personal", 'aggregation = "krum"', "", "personal weighs each row"),
        ("finetune", 'aggregation = "krum"', "", 'compression = "packed" encodes only sums'),
        ("fedner", 'aggregation = "krums"', "", "aggregation = 'krums'"),
        ("fedner", 'aggregation = "krum"', "[federation]\nsecure_sum = true", "secure sum hides"),
        ("fedner", 'aggregation = "krum"\nprivate = []', "[privacy]\nepsilon = 8.0\ndelta = 1e-5",
         r"\[training\]: aggregation = 'krum': under \[privacy\] it must be 'mean'"),
    ],
)  # fmt: skip
def test_an_impossible_combination_of_settings_is_refused(
    method: str, training: str, more: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_job(table(method, training, more), "job", Path(), "job.toml")


def test_a_job_of_real_sites_must_disable_the_secure_sum_explicitly(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MEDIAN)
    with pytest.raises(ConfigError, match=r"secure_sum = false in \[federation\]"):
        load_declared(path)
    path.write_text(MEDIAN.replace("[federation]", "[federation]\nsecure_sum = false"))
    job, _ = load_declared(path)
    assert job.module.needs_each_update(job.config)
    path.write_text(FEDNER)  # the default
    job, _ = load_declared(path)
    assert job.federation.secure_sum
    assert not job.module.needs_each_update(job.config)
