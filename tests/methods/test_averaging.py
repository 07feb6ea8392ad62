"""Averaging, compared with NumPy and plain torch loops on a small linear map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_taggers import assert_same, plain_adamw, resumed, values

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.tensors import copy_tensors, select_prefix
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.inprocess import InProcess
from fednotes.methods.averaging import (
    Averaging,
    AveragingSite,
    Server,
    count_examples,
    estimate_traffic,
    make_alone_configs,
    remove_federation_settings,
    run_cycles,
)
from fednotes.training.compression import (
    choose_step_sizes,
    compute_mean_squares,
    decode_change,
    encode_change,
    require_step_sizes,
    unpack_total,
)
from fednotes.training.local_trainer import Step
from fednotes.training.sites import Adam, RMSprop

CONFIG = Averaging(cycles=3, batch_size=4, learning_rate=0.05, weight_decay=0.1, seed=7)


@dataclass(frozen=True)
class Squares(Step):
    model: torch.nn.Module
    x: torch.Tensor
    y: torch.Tensor

    @property
    def examples(self) -> int:
        return len(self.x)

    def loss(self, batch: Sequence[Any]) -> torch.Tensor:
        loss: torch.Tensor = (self.model(self.x) - self.y).square().mean()
        return loss * (len(self.x) / sum(part.examples for part in batch))


HEAD = ("2.weight", "2.bias")


class Fit(AveragingSite):
    """A linear map fitted to random points."""

    def __init__(
        self,
        number: int,
        config: Averaging,
        size: int = 12,
        lengths: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        self.lengths = lengths
        self.read: list[np.ndarray] = []  # the mini-batches so far
        generator = torch.Generator().manual_seed(number)
        self.x = torch.randn(size, 5, generator=generator)
        self.y = torch.randn(size, 3, generator=generator)
        self.model = net()
        self.judged = 0
        super().__init__(
            f"s{number}",
            config,
            dict(self.model.named_parameters()),
            weight=size,
            examples=size,
            **options,
        )

    def batches(self, epoch: int) -> list[np.ndarray]:
        order = np.random.default_rng(epoch).permutation(len(self.x))
        return [order[i : i + self.share] for i in range(0, len(order), self.share)]

    def count_example_tokens(self) -> np.ndarray | None:
        return None if self.lengths is None else np.array(self.lengths)

    def iterate_steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        for rows in self.batches(epoch)[first:]:
            self.read.append(rows)
            parts = np.array_split(rows, self._averaging.accumulate)
            yield [Squares(self.model, self.x[p], self.y[p]) for p in parts]

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        self.load(tensors)
        self.judged += 1
        loss = float((self.model(self.x) - self.y).square().mean().detach())
        return Update(metrics={"loss": loss, "examples": 1})

    def finish(self, tensors: Tensors) -> Update:
        self.load(tensors)
        return Update()


def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )


def judged(metrics: Mapping[str, float]) -> dict[str, float]:
    return {"held_out": -metrics["loss"]}


Seen = list[tuple[Any, dict[str, torch.Tensor]]]


def trained(
    sites: list[Fit], config: Averaging, warm_up: int = 0, **options: Any
) -> tuple[Server, InProcess, Seen]:
    """Server and engine after a run, each cycle's result and what was shared then."""
    results: Seen = []
    noted = {"observer": lambda result: results.append((result, dict(server.shared)))}
    engine = InProcess(sites, **noted | options)
    initial = {n: p for n, p in net().named_parameters() if n in sites[0].shared}
    server = Server(
        config, initial, judged, engine.resume(), warm_up_cycles=warm_up, warm_up=HEAD
    )
    run_cycles(engine, server)
    return server, engine, results


def run(sites: list[Fit], config: Averaging, **options: Any) -> dict[str, torch.Tensor]:
    return trained(sites, config, **options)[0].result


def by_hand(
    site: Fit,
    config: Averaging,
    epochs: int,
    losses: list[tuple[float, int]] | None = None,
) -> dict[str, torch.Tensor]:
    """Train by a plain torch loop.

    losses: filled in with each step's loss and its number of points.
    """
    model = net()

    def loss(rows: np.ndarray) -> torch.Tensor:
        mean = (model(site.x[rows]) - site.y[rows]).square().mean()
        if losses is not None:
            losses.append((float(mean.detach()), len(rows)))
        return mean

    steps = [
        partial(loss, rows) for epoch in range(epochs) for rows in site.batches(epoch)
    ]
    plain_adamw(dict(model.named_parameters()), config, steps)
    return values(dict(model.named_parameters()))


@pytest.mark.parametrize("local", [1, 2])
def test_a_federation_of_one_site_equals_central_training_bit_for_bit(
    local: int,
) -> None:
    """Moments and schedule go on over cycles: the judge is one plain loop over all
    epochs."""
    config = replace(CONFIG, local_epochs=local)
    site = Fit(1, config)
    assert_same(run([site], config), by_hand(site, config, 3 * local))


def test_the_loss_of_a_cycle_is_the_mean_over_its_examples() -> None:
    """Of two epochs over 14 points in steps of 4, 4, 4 and 2, by NumPy's average."""
    config = replace(CONFIG, cycles=1, local_epochs=2)
    ((result, _),) = trained([Fit(1, config, 14)], config)[2]
    losses: list[tuple[float, int]] = []
    by_hand(Fit(1, config, 14), config, 2, losses)
    assert [points for _, points in losses] == [4, 4, 4, 2] * 2
    each, points = np.array(losses).T
    assert result.metrics["loss"] == pytest.approx(
        np.average(each, weights=points), rel=1e-6
    )


def test_the_mean_is_weighted_by_sample_sizes() -> None:
    """Eq. 1 in NumPy: Σ n_k/N Q_k over what each site trains to by itself."""
    config = replace(CONFIG, cycles=1)
    sizes = (4, 12, 8)
    together = run([Fit(k, config, size) for k, size in enumerate(sizes)], config)
    apart = [by_hand(Fit(k, config, size), config, 1) for k, size in enumerate(sizes)]
    for name, value in together.items():
        mean = sum(
            n * q[name].numpy().astype(np.float64)
            for n, q in zip(sizes, apart, strict=True)
        )
        np.testing.assert_array_equal(value.numpy(), (mean / 24).astype(np.float32))


@pytest.mark.parametrize("rate", [0.1, 0.0])
@pytest.mark.parametrize("server", ["adam", "yogi"])
def test_adaptive_servers_equal_algorithm_2_of_reddi_et_al(
    server: str, rate: float
) -> None:
    """Algorithm 2 of Reddi et al. 2021 in NumPy, float64, over three given means; at
    1e-3 where no rate is given."""
    config = replace(
        CONFIG, server=server, server_learning_rate=rate, betas=(0.8, 0.95)
    )
    rng = np.random.default_rng(3)
    start = rng.normal(size=6).astype(np.float32)
    acting = Server(config, {"w": torch.from_numpy(start)}, judged, None)
    w, m, v, tau = start.astype(np.float64), np.zeros(6), np.full(6, 1e-6), 1e-3
    for _ in range(3):
        mean = rng.normal(size=6).astype(np.float32)
        mean_update = Update(
            {"w": torch.from_numpy(mean)}, 2.0, {"loss": 1.0, "examples": 1.0}
        )
        acting.step(mean_update.tensors, Total.of([mean_update]))
        change = mean - w
        m = 0.8 * m + 0.2 * change
        sign = np.sign(v - change**2) if server == "yogi" else 1.0
        v = (
            v - 0.05 * change**2 * sign
            if server == "yogi"
            else 0.95 * v + 0.05 * change**2
        )
        w = w + (rate or 1e-3) * m / (np.sqrt(v) + tau)
    np.testing.assert_allclose(acting.shared["w"].numpy(), w, rtol=2e-5)


@pytest.mark.parametrize("rate", [0.0, 0.7])
def test_nesterov_at_the_server_equals_that_of_torch(rate: float) -> None:
    """DiLoCo's outer step: torch's SGD with Nesterov's momentum on the negative change."""
    config = replace(
        CONFIG, cycles=4, server="nesterov", server_learning_rate=rate, momentum=0.4
    )
    sites = [Fit(number, config) for number in (1, 2)]
    server, _, results = trained(sites, config)
    weights = {n: p.detach().clone() for n, p in net().named_parameters()}
    outer = torch.optim.SGD(
        weights.values(), lr=rate or 1.0, momentum=0.4, nesterov=True
    )
    plain = [Fit(number, replace(config, server="average")) for number in (1, 2)]
    for cycle, (_, shared) in enumerate(results):
        ends = [site.train(weights, cycle=cycle).tensors for site in plain]
        for name, weight in weights.items():
            weight.grad = weight - (ends[0][name] + ends[1][name]) / 2
        outer.step()
        for name, weight in weights.items():
            torch.testing.assert_close(shared[name], weight, rtol=1e-5, atol=1e-6)
    assert (
        set(select_prefix("moment.velocity.", server.state().tensors)) == weights.keys()
    )


def test_shared_batches_take_as_many_steps_as_training_in_one_place() -> None:
    """Parts of 12 for 12, 24 and 60 points: 1, 3 and 8, so that each takes about 8
    steps."""
    config = replace(CONFIG, cycles=2, batch="shared", batch_size=12)
    sites = [Fit(number, config, size) for number, size in enumerate((12, 24, 60))]
    trained(sites, config)
    assert [site.share for site in sites] == [2, 3, 8]  # 1.5 is rounded up
    assert [site.trainer.steps_taken for site in sites] == [12, 16, 16]
    assert [site.count_covered("train")["batch"] for site in sites] == [2, 3, 8]


def test_a_server_that_tries_one_sum_after_another_learns_nothing() -> None:
    """Only the first counts, and one below the site's number is that number: a whole
    batch of 12, as if the site were alone."""
    config = replace(CONFIG, batch="shared", batch_size=12)
    site = Fit(0, config, 60)
    shares = [site.take_share({}, examples=sum_).metrics for sum_ in (59, 60, 10**9, 1)]
    assert shares == [{"share": 12}] * 4
    again = Fit(0, config, 60)
    again.restore(site.state())
    assert again.take_share({}, examples=10**9).metrics == {"share": 12}


def test_many_sites_take_as_many_steps_as_training_in_one_place() -> None:
    """24 points in batches of 2 are 12 steps an epoch; a site of 2, of four, takes at
    most 4."""
    config = replace(CONFIG, cycles=2, batch="shared", batch_size=2, sites=4)
    sizes = (2, 6, 6, 10)
    sites = [Fit(number, config, size) for number, size in enumerate(sizes)]
    trained(sites, config)
    assert [site.share for site in sites] == [1, 1, 1, 1]
    assert [site.trainer.steps_taken for site in sites] == [8, 24, 24, 24]
    assert [site.count_covered("train")["steps"] for site in sites] == [4, 12, 12, 12]
    assert count_examples(config, sizes) == 48
    # no sum that a server tells makes more of them
    site = Fit(1, config, sizes[1])
    site.take_share({}, examples=10**9)
    assert site.count_covered("train")["steps"] == 12
    again = Fit(1, config, 6)
    again.restore(sites[1].state())
    assert again.count_covered("train")["steps"] == 12


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_site_alone_has_the_same_batch_as_in_the_federation(
    accumulate: int,
) -> None:
    """Of 60, 6 and 5 examples, where the smallest has the least part; in parts as
    large."""
    sizes = (60, 6, 5)
    config = replace(
        CONFIG, batch="shared", batch_size=32, sites=3, accumulate=accumulate
    )
    together = [Fit(number, config, size) for number, size in enumerate(sizes)]
    for site in together:
        site.take_share({}, examples=sum(sizes))
    assert [site.share for site in together] == [27, 3, 3]
    for site, site_config, size in zip(
        together, make_alone_configs(config, sizes), sizes, strict=True
    ):
        apart = Fit(1, site_config, size)
        assert (apart.share, apart._part_size) == (site.share, site._part_size)


@pytest.mark.parametrize(
    "changes",
    [
        {"server": "nesterov", "server_learning_rate": 0.5, "compression": "packed"},
        {"server": "yogi", "proximal": 5.0},
        {"aggregation": "median", "proximal": 5.0},
    ],
)
def test_training_in_one_place_ignores_settings_of_the_federation(
    changes: dict[str, Any],
) -> None:
    """The server's step, the code for updates, robust rules and FedProx serve a
    federation alone.

    Without them, for the conditions "pooled" and "alone", training is a plain loop of
    AdamW.
    """
    config = replace(CONFIG, **changes)
    (shared_batch,) = make_alone_configs(replace(config, batch="shared"), [12])
    for run_config in (
        remove_federation_settings(config),
        *make_alone_configs(config, [12, 30]),
        shared_batch,
    ):
        site = Fit(1, run_config)
        assert_same(run([site], run_config), by_hand(site, CONFIG, epochs=3))


@pytest.mark.parametrize("compression", ["none", "packed"])
def test_diverged_training_is_an_error(compression: Any) -> None:
    config = replace(CONFIG, batch_size=12, compression=compression)
    site = Fit(1, config)
    site.trainer.compute_learning_rate = lambda planned: math.inf  # type: ignore[method-assign]
    with pytest.raises(
        TrainingError, match=r"cycle 1: parameter .* no longer finite at one of"
    ):
        run([site], config)


@pytest.mark.parametrize(("sites", "share"), [(0, 1), (2, 4), (5, 2), (100, 1)])
def test_no_sum_from_the_server_makes_a_batch_part_too_small(
    sites: int, share: int
) -> None:
    """A quarter of an equal share of 32 is left, whatever the others are said to have."""
    config = replace(CONFIG, batch="shared", batch_size=32, sites=sites)
    site = Fit(1, config)
    site.take_share({}, examples=10**9)
    assert site.share == share


@pytest.mark.parametrize("local", [1, 3, 4, 7])
def test_partial_epochs_continue_through_the_data(local: int) -> None:
    """Two cycles of 7 steps are the first 14 mini-batches of epochs of 3, whatever the
    cut."""
    cycles = 14 // local
    config = replace(CONFIG, cycles=cycles, local_epochs=local / 3)
    site = Fit(1, config)
    result = run([site], config)
    model = net()

    def loss(rows: np.ndarray) -> torch.Tensor:
        return (model(site.x[rows]) - site.y[rows]).square().mean()

    batches = [
        partial(loss, rows) for epoch in range(5) for rows in site.batches(epoch)
    ]
    plain_adamw(dict(model.named_parameters()), config, batches[: cycles * local])
    assert_same(result, values(dict(model.named_parameters())))
    assert site.trainer.steps_taken == cycles * local
    assert site.count_covered("train")["steps"] == local


def test_a_site_without_examples_takes_no_step() -> None:
    config = replace(CONFIG, local_epochs=0.5)
    site = Fit(1, config, size=0)
    assert (
        site.train({n: p.detach() for n, p in site.shared.items()}, cycle=0).weight == 0
    )
    assert site.trainer.steps_taken == 0


def test_an_update_of_few_steps_covers_the_shortest_examples() -> None:
    """12 examples of 1 to 12 tokens in 3 steps: one step may have the four shortest,
    1 + 2 + 3 + 4 tokens; three and five steps have all 78."""
    for steps, tokens in ((1, 10), (3, 78), (5, 78)):
        config = replace(CONFIG, local_epochs=steps / 3)
        site = Fit(1, config, lengths=range(12, 0, -1))
        assert site.count_covered("train")["tokens"] == tokens


def test_two_steps_may_cover_the_same_examples_in_two_epochs() -> None:
    """Every second cycle of 2 of 3 steps has the last of an epoch and the first of the
    next. 9 examples of 1 to 9 tokens in batches of 4 are 3 steps, the last of one: a
    step may have that one alone, the shortest."""
    config = replace(CONFIG, batch_size=4, local_epochs=2 / 3)
    site = Fit(1, config, size=9, lengths=range(1, 10))
    assert site.count_covered("train") == {"steps": 2, "batch": 4, "tokens": 1}


@pytest.mark.parametrize("local", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12])
@pytest.mark.parametrize("size", [11, 12, 18, 21])
def test_an_update_never_covers_fewer_tokens_than_promised(
    local: int, size: int
) -> None:
    """Brute force: the tokens of the different examples that each cycle has read."""
    in_epoch = -(-size // 3)
    config = replace(CONFIG, batch_size=3, cycles=8, local_epochs=local / in_epoch)
    lengths = np.random.default_rng(size).integers(1, 30, size)
    site = Fit(1, config, size, lengths=lengths.tolist())
    promised = site.count_covered("train")
    tensors = copy_tensors(site.shared)
    for cycle in range(config.cycles):
        before = len(site.read)
        site.train(tensors, cycle=cycle)
        batches = site.read[before:]
        read = int(lengths[np.unique(np.concatenate(batches))].sum())
        covered = site.count_covered("train")
        assert promised["tokens"] <= covered["tokens"] <= read
        assert promised["steps"] == covered["steps"] == len(batches) == local
        assert covered["batch"] <= max(map(len, batches))


def test_gradients_of_batch_parts_add_up_to_that_of_the_batch() -> None:
    """Gradients of unequal parts, weighted by their sizes, are the whole batch's."""
    undivided = run([Fit(1, CONFIG, 14)], CONFIG)
    config = replace(CONFIG, accumulate=2)
    parts = run([Fit(1, config, 14)], config)
    for name in undivided:
        torch.testing.assert_close(parts[name], undivided[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_proximal_term_is_the_gradient_of_its_penalty(clip: float) -> None:
    """One epoch with μ against autograd on loss + μ/2 |w - w_t|².

    FedProx changes the objective, so the gradient that is clipped is that of loss and
    penalty together. The norm of each step's gradient is far above this clip.
    """
    config = replace(
        CONFIG, cycles=1, proximal=3.0, clip=clip, weight_decay=0.0, warmup=0.0
    )
    config = replace(config, decay="constant")
    site, model = Fit(1, config), net()
    trained_values = run([site], config)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(
        model.parameters(), lr=config.learning_rate, fused=True
    )
    for rows in site.batches(0):
        optimizer.zero_grad()
        loss = (model(site.x[rows]) - site.y[rows]).square().mean()
        pull = sum(
            (p - s).square().sum()
            for p, s in zip(model.parameters(), start, strict=True)
        )
        (loss + 1.5 * pull).backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > 2 * clip
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            trained_values[name], parameter.detach(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("kill", [0, 1, 2])
def test_an_interrupted_warm_up_resumes_to_the_same_result(
    tmp_path: Path, kill: int
) -> None:
    """The optimizer of the warm-up keeps its moments, too, and its steps count as such."""
    config = replace(CONFIG, cycles=2)
    warming = {"warm_up_cycles": 3, "warm_up": HEAD, "warm_up_rate": 0.01}

    def run_all(**options: Any) -> dict[str, torch.Tensor]:
        sites = [Fit(k, config, 8 + 4 * k, **warming) for k in range(2)]
        return trained(sites, config, warm_up=3, **options)[0].result

    assert_same(resumed(run_all, tmp_path, kill), run_all())


@pytest.mark.parametrize(
    "settings",
    [
        {"server": "yogi"},
        {"server": "adam", "compression": "packed"},
        {"server": "nesterov", "batch": "shared", "batch_size": 6, "local_epochs": 0.5},
    ],
    ids=["yogi", "packed", "nesterov"],
)
def test_an_interrupted_run_resumes_to_the_same_result(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = replace(CONFIG, cycles=4, keep_cycle=-1, **settings)

    def trained(**options: Any) -> tuple[list[Fit], dict[str, torch.Tensor]]:
        sites = [Fit(k, config, 8 + 4 * k, private=HEAD) for k in range(3)]
        return sites, run(sites, config, **options)

    whole_sites, reference = trained()
    sites, again = resumed(trained, tmp_path, 2)
    assert_same(again, reference)
    for a, b in zip(sites, whole_sites, strict=True):
        assert_same(a.private, b.private)
        assert_same(a.state().tensors, b.state().tensors)


def test_private_parameters_are_trained_and_never_sent() -> None:
    sites = [Fit(k, CONFIG, private=HEAD) for k in range(2)]
    result = run(sites, CONFIG)
    assert result.keys() == {"0.weight", "0.bias"}
    before = dict(net().named_parameters())["2.weight"]
    assert not torch.equal(sites[0].private["2.weight"], before)
    assert not torch.equal(sites[0].private["2.weight"], sites[1].private["2.weight"])


def test_shared_and_private_gradients_are_clipped_by_their_common_norm() -> None:
    """One site with a private head trains as a model without private layers does.

    `plain_adamw` clips the gradient of all parameters by torch's own function. The clip
    is far below every norm, so a norm over the shared layers alone would give other
    steps.
    """
    config = replace(CONFIG, clip=0.05)
    site = Fit(1, config, private=HEAD)
    shared = run([site], config)
    plain = by_hand(Fit(1, config), config, epochs=3)
    assert_same(shared | values(site.private), plain)


def test_the_proximal_term_does_not_affect_private_layers() -> None:
    """FedProx holds the shared parameters near those that the server sent, and no
    others."""
    config = replace(
        CONFIG, cycles=1, proximal=3.0, clip=0.0, weight_decay=0.0, warmup=0.0
    )
    config = replace(config, decay="constant")
    site, model = Fit(1, config, private=HEAD), net()
    trained_values = run([site], config) | values(site.private)
    start = [p.detach().clone() for p in model[0].parameters()]
    optimizer = torch.optim.Adam(
        model.parameters(), lr=config.learning_rate, fused=True
    )
    for rows in site.batches(0):
        optimizer.zero_grad()
        loss = (model(site.x[rows]) - site.y[rows]).square().mean()
        pulled = zip(model[0].parameters(), start, strict=True)
        (loss + 1.5 * sum((p - s).square().sum() for p, s in pulled)).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            trained_values[name], parameter.detach(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("server", ["average", "nesterov", "yogi"])
def test_a_warm_up_trains_only_its_parameters_at_its_own_rate(server: Any) -> None:
    """Against a loop of torch's Adam over the head; the server's own step waits for its
    end."""
    config = replace(CONFIG, cycles=1, weight_decay=0.0, server=server)
    site = Fit(1, config, warm_up_cycles=2, warm_up=HEAD, warm_up_rate=0.01)
    initial = values(dict(net().named_parameters()))
    states = [shared for _, shared in trained([site], config, warm_up=2)[2]]
    assert len(states) == 3
    for name in ("0.weight", "0.bias"):
        assert torch.equal(states[1][name], initial[name])
        assert not torch.equal(states[2][name], initial[name])
    model = net()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01, fused=True)
    for rows in (*site.batches(0), *site.batches(1)):
        optimizer.zero_grad()
        (model(site.x[rows]) - site.y[rows]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1.0)
        optimizer.step()
    assert torch.equal(states[1]["2.weight"], model[2].weight.detach())


def test_a_site_trains_only_the_parameters_of_the_job() -> None:
    """All of them, or in the cycles of the warm-up its own: no request narrows them
    down."""
    site = Fit(1, CONFIG, warm_up_cycles=1, warm_up=HEAD, warm_up_rate=0.01)
    parameters = values(dict(net().named_parameters()))
    head = {name: parameters[name] for name in HEAD}
    for cycle, wrong in (
        (0, parameters),
        (0, {"2.weight": parameters["2.weight"]}),
        (1, head),
    ):
        with pytest.raises(
            RefusedError, match=f"cycle {cycle} of the job trains different param"
        ):
            site.train(wrong, cycle=cycle)
    assert site.trainer.steps_taken == 0
    assert site.train(head, cycle=0).tensors.keys() == set(HEAD)
    assert site.train(parameters, cycle=1).tensors.keys() == parameters.keys()


def test_the_requested_cycle_is_kept() -> None:
    """It is the last that is run, and what a run of all cycles had then: rates are of
    all."""
    results, runs = {}, {}
    for chosen in (0, 2, -1):
        config = replace(CONFIG, cycles=4, keep_cycle=chosen)
        server, _, observed = trained([Fit(1, config)], config)
        results[chosen], runs[chosen] = (
            server.result,
            [shared for _, shared in observed],
        )
    assert {chosen: len(run) for chosen, run in runs.items()} == {0: 4, 2: 2, -1: 4}
    assert_same(results[0], runs[0][-1])
    assert_same(results[2], runs[0][1])
    assert not torch.equal(results[2]["0.weight"], runs[0][0]["0.weight"])
    assert_same(
        results[-1], max(observed, key=lambda each: each[0].metrics["held_out"])[1]
    )


class Worsening(Fit):
    """A site that is judged worse in every cycle."""

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        self.load(tensors)
        return Update(metrics={"loss": float(cycle), "examples": 1})


def test_a_cycle_of_the_warm_up_is_never_kept() -> None:
    """Of two warm-up cycles and two of training, the first cycle of training is the
    best one.

    A warm-up trains the head alone, and its models are judged better here. What is
    private must be of the same cycle as what is shared.
    """
    config = replace(CONFIG, cycles=2, keep_cycle=-1)
    warming = {"warm_up_cycles": 2, "warm_up": HEAD, "warm_up_rate": 0.01}
    server, _, observed = trained([Worsening(1, config, **warming)], config, warm_up=2)
    assert len(observed) == 4
    assert_same(server.result, observed[2][1])
    assert server.best.score == -2.0  # the loss of the third cycle


def test_the_best_cycle_is_kept_after_a_restart_before_the_first(
    tmp_path: Path,
) -> None:
    """A run that is stopped in its warm-up has judged no cycle yet, and any number is
    better.

    The losses of the two cycles of training are 2 and 3, so both scores are below -1.
    """
    config = replace(CONFIG, cycles=2, keep_cycle=-1)
    warming = {"warm_up_cycles": 2, "warm_up": HEAD, "warm_up_rate": 0.01}

    def run_all(**options: Any) -> Server:
        return trained([Worsening(1, config, **warming)], config, warm_up=2, **options)[
            0
        ]

    uninterrupted, again = run_all(), resumed(run_all, tmp_path, kill=1)
    assert again.best.score == uninterrupted.best.score == -2.0
    assert_same(again.result, uninterrupted.result)


def test_a_cycle_is_the_best_only_if_it_beats_all_earlier_ones() -> None:
    """Of the held-out numbers 3, 1, 2, 4 the first and the last are the best so far,
    not the third, which is only better than the one before it; equal ones stay behind
    the earlier."""
    config = replace(CONFIG, cycles=5, keep_cycle=-1)
    acting = Server(config, {"w": torch.zeros(1)}, lambda mean: dict(mean), None)
    is_best = []
    for score in (3.0, 1.0, 2.0, 4.0, 4.0):
        acting.round += 1
        is_best.append(acting.judge(Total.of([Update({}, 1.0, {"held_out": score})])))
    assert is_best == [True, False, False, True, False]


class Keeping(Worsening):
    """A site that ends with the private values of the selected cycle."""

    def finish(self, tensors: Tensors) -> Update:
        self.load_kept(tensors)
        return Update()


@pytest.mark.parametrize("kill", [None, 2])
def test_private_layers_are_restored_to_the_kept_cycle(
    tmp_path: Path, kill: int | None
) -> None:
    """The first of four cycles is the best one, also where the run is stopped after it.

    The expected layers are those after the first cycle of a run without a stop.
    """
    config = replace(CONFIG, cycles=4, keep_cycle=-1)
    after: list[dict[str, torch.Tensor]] = []
    member = Keeping(1, config, private=HEAD)
    trained(
        [member], config, observer=lambda result: after.append(values(member.private))
    )

    def run_all(**options: Any) -> Keeping:
        site = Keeping(1, config, private=HEAD)
        trained([site], config, **options)
        return site

    site = run_all() if kill is None else resumed(run_all, tmp_path, kill)
    assert_same(values(site.private), after[0])
    assert not torch.equal(after[0]["2.weight"], after[3]["2.weight"])


def test_packing_saves_the_documented_number_of_bytes() -> None:
    """On a wide map, so that heads of messages do not count."""
    sent = {}
    for compression in ("none", "packed"):
        config = replace(CONFIG, cycles=2, compression=compression)
        site = Fit(1, config)
        site.model = torch.nn.Sequential(
            torch.nn.Linear(5, 4000), torch.nn.Linear(4000, 3)
        )
        parameters = dict(site.model.named_parameters())
        AveragingSite.__init__(site, "s1", config, parameters, weight=12, examples=12)
        engine = InProcess([site])
        run_cycles(engine, Server(config, parameters, judged, None))
        sent[compression] = engine.bytes_up
    assert sent["none"] > 3.5 * sent["packed"]


def test_parameters_are_sent_to_sites_once_per_cycle() -> None:
    """The first cycle's, then each evaluation's; the end needs none."""
    config = replace(CONFIG, cycles=4)
    engine = trained([Fit(1, config)], config)[1]
    size = 4 * sum(p.numel() for p in net().parameters())
    options = 8 * 2 * 4  # the cycle's number
    assert engine.bytes_down == 5 * size + options


def test_the_remainder_of_a_change_is_added_to_the_next_one() -> None:
    """By hand: steps of 1 are too large for the first change but for one of a tensor,
    so the second change is the training's own and what the first left."""
    config = replace(CONFIG, compression="packed")
    site = Fit(1, config)
    start = values(dict(net().named_parameters()))
    site.train(start, cycle=0)
    first = {name: value.clone() for name, value in site._change.items()}
    steps = {name: torch.ones(1) for name in start}
    steps["2.bias"] = first["2.bias"].abs().max()[None]
    site.send(steps, weight=12.0, sites=1)
    for name, value in first.items():
        first[name] = value - steps[name] * (value / steps[name]).round()
    site.train(start, cycle=1)
    for name, value in site._change.items():
        site_change = site.shared[name].detach() - start[name]
        torch.testing.assert_close(value, site_change + first[name], rtol=0, atol=1e-7)


def test_the_server_rate_scales_the_step_to_the_mean() -> None:
    """w + η (mean - w) in NumPy."""
    config = replace(CONFIG, server_learning_rate=0.25)
    acting = Server(config, {"w": torch.tensor([1.0, 2.0])}, judged, None)
    mean = {"w": torch.tensor([5.0, -2.0])}
    acting.step(mean, Total.of([Update(mean, 1.0, {"loss": 1.0, "examples": 1.0})]))
    assert acting.shared["w"].tolist() == [2.0, 1.0]


def test_cycles_are_evaluated_by_their_own_numbers_without_the_warm_up() -> None:
    """A warm-up does not shift them; the last one is judged whatever the period."""
    judged_cycles = {}
    for chosen in (0, 3):
        config = replace(CONFIG, cycles=5, evaluate_every=2, keep_cycle=chosen)
        site = Fit(1, config, warm_up_cycles=1, warm_up=HEAD, warm_up_rate=0.01)
        # counted from 0, the warm-up's first
        observed = trained([site], config, warm_up=1)[2]
        judged_cycles[chosen] = [
            result.round for result, _ in observed if result.evaluated
        ]
    assert judged_cycles == {0: [0, 2, 4, 5], 3: [0, 2, 3]}


def test_a_given_rate_applies_to_one_step() -> None:
    """By hand: Adam's first step is the rate, and so is one along the same gradient
    again."""
    weight = torch.zeros(1)
    adam, gradient = Adam({"w": weight}, 0.25), {"w": torch.ones(1)}
    for rate, expected in ((None, -0.25), (0.5, -0.75), (None, -1.0)):
        adam.step(gradient, rate=rate)
        assert weight.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_those_of_the_optimizer_of_torch(decay: float) -> None:
    """Bit for bit, also where a parameter has no gradient, and after a restart.

    Matrices decay and biases do not; low-rank parameters have a rate of their own.
    """
    draws = torch.Generator().manual_seed(3)
    shapes = {"lora.a": (3, 2), "top.weight": (4, 3), "top.bias": (4,)}

    def draw() -> dict[str, torch.Tensor]:
        return {
            name: torch.randn(shape, generator=draws) for name, shape in shapes.items()
        }

    ours = draw()
    theirs = {name: value.clone() for name, value in ours.items()}
    lora, weight, bias = theirs.values()
    groups = [
        {"params": [lora], "lr": 0.05, "weight_decay": decay},
        {"params": [weight], "weight_decay": decay},
        {"params": [bias], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    torch_adam = kind(groups, lr=0.01, fused=True)
    adam = Adam(ours, 0.01, decay, {"lora": 5.0})
    for step in range(6):
        gradients: dict[str, torch.Tensor | None] = {**draw()}
        if step == 2:
            gradients["top.weight"] = None
        if step == 4:
            state = adam.state()
            adam = Adam(ours, 0.01, decay, {"lora": 5.0})
            adam.restore(state)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name]
        torch_adam.step()
        adam.step(gradients)
        for name, parameter in theirs.items():
            assert torch.equal(ours[name], parameter)
            assert ours[name].grad is None


@pytest.mark.parametrize("optimizer", [Adam, RMSprop])
def test_restored_moments_are_on_the_devices_where_steps_expect_them(
    optimizer: type[Adam],
) -> None:
    """A fused step expects its count on the parameter's device, others on the CPU."""
    weight = torch.zeros(2, device="meta")
    stepped = optimizer({"w": weight}, 0.1)
    stepped.step({"w": torch.ones(2, device="meta")})
    devices = {name: value.device for name, value in stepped.state().items()}
    saved = {
        name: torch.zeros(value.shape, dtype=value.dtype)
        for name, value in stepped.state().items()
    }
    restored = optimizer({"w": weight}, 0.1)
    restored.restore(saved)
    assert len(devices) == len(optimizer.moments)
    assert {name: each.device for name, each in restored.state().items()} == devices


# mistakes


@pytest.mark.parametrize(
    "change",
    [
        *({"cycles": 0}, {"learning_rate": 0.0}, {"warmup": 1.0}, {"keep_cycle": 4}),
        *({"accumulate": 5}, {"betas": (0.9,)}, {"proximal": -1.0}),
    ],
)
def test_an_error_names_an_impossible_value(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(CONFIG, **change)


def test_an_error_about_a_loss_that_is_not_finite_names_the_site() -> None:
    site = Fit(1, CONFIG)
    site.y[3] = float("nan")
    with pytest.raises(
        TrainingError, match=r"site 's1': the loss is nan at step \d: lower"
    ):
        run([site], CONFIG)


def test_a_restarted_site_without_parameters_is_an_error() -> None:
    with pytest.raises(
        TrainingError, match="site 's1' has no parameters: it was restarted"
    ):
        Fit(1, CONFIG).train({}, cycle=1)
    with pytest.raises(TrainingError, match="before it trained"):
        Fit(1, replace(CONFIG, compression="packed")).send({}, weight=1.0, sites=1)


@pytest.mark.parametrize(
    ("weight", "sites"), [(-1.0, 2), (math.nan, 2), (math.inf, 2), (99.0, 4), (99.0, 0)]
)
def test_a_site_has_no_weight_in_an_impossible_sum(weight: float, sites: int) -> None:
    """Of a site of weight 12, of three at most."""
    site = Fit(1, replace(CONFIG, compression="packed", sites=3))
    squares = site.train(values(dict(net().named_parameters())), cycle=0).tensors
    code = choose_step_sizes(squares)
    with pytest.raises(RefusedError, match="received an impossible sum, of weight"):
        site.send(code, weight=weight, sites=sites)
    assert site.send(code, weight=36.0, sites=3).metrics == {"part": 1.0}


def test_a_sum_below_the_weight_of_a_site_is_not_refused() -> None:
    """A refusal would tell the server the weight, number by number. Such a sum is the
    site's own weight, 12, and so its part is the number of sites."""
    site = Fit(1, replace(CONFIG, compression="packed", sites=3))
    squares = site.train(values(dict(net().named_parameters())), cycle=0).tensors
    sent = site.send(choose_step_sizes(squares), weight=11.0, sites=2)
    assert sent.metrics == {"part": 2.0}


# codes for updates that add


def change(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(10, 30, generator=generator),
        "b": torch.randn(7, generator=generator) / 100,
    }


@pytest.mark.parametrize("weights", [(1,), (6, 8, 22), (1, 1, 1, 1, 996), (3,) * 40])
def test_packed_numbers_add_up_and_rounding_remainders_are_kept(
    weights: tuple[int, ...],
) -> None:
    """Python's integers: nearest multiples of 4 rms / 12 of a change times its weight,
    of which the mean is 1, at most 12 times the weight; and of a sum nothing is lost.
    """
    count, total_weight = len(weights), sum(weights)
    sites = [change(seed) for seed in range(count)]
    means = Total.of(
        [
            Update(compute_mean_squares(s), w)
            for s, w in zip(sites, weights, strict=True)
        ]
    )
    code = choose_step_sizes(means.mean())
    sent, levels = [], dict.fromkeys(code, 0)
    for site, weight in zip(sites, weights, strict=True):
        part = count * weight / total_weight
        words, remainder = encode_change(site, code, part, count)
        sent.append(Update(words, metrics={"part": part}))
        for name, value in site.items():
            assert words[name].dtype == torch.int64
            assert int(words[name].abs().max()) < 2**52
            assert len(words[name]) < value.numel() / 3 + 1
            step = np.float32(code[name].item())
            rounded = np.round(np.float32(part) * value.numpy() / step)
            clipped = np.clip(rounded, -math.ceil(12 * part), math.ceil(12 * part))
            levels[name] = levels[name] + clipped.astype(np.int64)
            back = torch.from_numpy(clipped * step / part).float()
            torch.testing.assert_close(
                back + remainder[name], value, rtol=1e-5, atol=1e-6
            )
    total = unpack_total(Total.of(sent), sites[0], count)
    assert total.weight == pytest.approx(count)
    decoded = decode_change(total.mean(), code, sites[0])
    for name, level in levels.items():
        rms = np.sqrt(
            sum(
                w * np.mean(s[name].numpy() ** 2)
                for s, w in zip(sites, weights, strict=True)
            )
            / total_weight
        )
        assert code[name].item() == pytest.approx(4 * rms / 12, rel=1e-5)
        np.testing.assert_array_equal(total.tensors[name].numpy(), level)
        torch.testing.assert_close(
            decoded[name], (torch.from_numpy(level) * code[name] / count).float()
        )


@pytest.mark.parametrize("sites", [1, 2, 5, 20, 1000])
def test_packed_numbers_at_their_maximum_do_not_carry(sites: int) -> None:
    """All sites at the bound, of either sign, side by side."""
    largest = {"w": torch.tensor([1e9, -1e9, 0.0, 1e9, -1e9, -1e9, 1e9, 1e9])}
    words, _ = encode_change(largest, {"w": torch.tensor([1.0])}, 1.0, sites)
    total = Total.of([Update(words, metrics={"part": 1.0})] * sites)
    decoded = unpack_total(total, largest, sites).tensors["w"]
    assert decoded.tolist() == [
        12 * sites * math.copysign(1, v) * (v != 0) for v in largest["w"].tolist()
    ]


def test_digits_do_not_carry_with_fractional_weights() -> None:
    """By hand: two sites of 5 and 195 notes are weighed by 0.05 and 1.95. A digit is at
    most 12 times that, rounded up, so 1 and 24: together more than 12 a site."""
    largest, code = (
        {"w": torch.tensor([1e9, -1e9, 1e9, 1e9])},
        {"w": torch.tensor([1.0])},
    )
    parts = (0.05, 1.95)
    sent = [
        Update(encode_change(largest, code, p, 2)[0], metrics={"part": p})
        for p in parts
    ]
    decoded = unpack_total(Total.of(sent), largest, 2).tensors["w"]
    assert decoded.tolist() == [25, -25, 25, 25]


def test_a_site_without_weight_keeps_its_change() -> None:
    """It sends zeros, and all that it could not send is left for the next time."""
    update = change(1)
    code = choose_step_sizes(compute_mean_squares(update))
    words, remainder = encode_change(update, code, 0.0, 3)
    assert not any(value.any() for value in words.values())
    assert_same(remainder, update)


def test_error_feedback_eventually_sends_the_whole_change() -> None:
    """A site that keeps changing by the same amount: what was sent tends to t times
    that."""
    constant = {name: value / value.std() for name, value in change(1).items()}
    remainder = {name: torch.zeros_like(value) for name, value in constant.items()}
    total: dict[str, torch.Tensor] = {}
    for _ in range(60):
        now = {n: v + remainder[n] for n, v in constant.items()}
        steps = choose_step_sizes(compute_mean_squares(now))
        sent, remainder = encode_change(now, steps)
        summed = Total.of([Update(sent, metrics={"part": 1.0})])
        decoded = decode_change(
            unpack_total(summed, constant, 1).mean(), steps, constant
        )
        total = {n: decoded[n] + total.get(n, 0) for n in decoded}
    for name, value in constant.items():
        torch.testing.assert_close(total[name] / 60, value, rtol=0, atol=0.4)
        torch.testing.assert_close(
            total[name] + remainder[name], 60 * value, rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize(("part", "cycle"), [(1.0, 1), (0.1, 2), (0.02, 9)])
def test_a_small_site_is_delayed_as_the_page_states(part: float, cycle: int) -> None:
    """Each number changes by the root mean square. A step is a third of that, and half
    of one is sent: by hand, after 1 / (6 part) cycles. What was sent and what is left
    are the whole."""
    moved, backlog, sent = torch.ones(4), torch.zeros(4), torch.zeros(4)
    code = choose_step_sizes({"w": moved.square().mean(0, keepdim=True)})
    first = 0
    for now in range(1, 40):
        words, remainder = encode_change({"w": moved + backlog}, code, part, 5)
        # of all five, only this one moves
        total = Total.of([Update(words, metrics={"part": 5.0})])
        decoded = decode_change(
            unpack_total(total, {"w": moved}, 5).mean(),
            code,
            {"w": moved},
        )
        backlog, sent = remainder["w"], sent + decoded["w"] * 5 / part
        first = first or now * bool(decoded["w"].any())
        torch.testing.assert_close(sent + backlog, now * moved, rtol=1e-4, atol=1e-4)
    assert first == cycle
    assert float(backlog.abs().max()) <= 1 / (6 * part) * 1.0001


def test_impossible_step_sizes_are_refused() -> None:
    model_change = change(1)
    steps = {"a": torch.tensor([0.1]), "b": torch.tensor([0.0])}
    require_step_sizes(steps, model_change)
    wrong_steps = (
        torch.tensor([-0.1]),
        torch.tensor([torch.inf]),
        torch.tensor([torch.nan]),
        torch.tensor([0.1, 0.2]),
        torch.tensor(0.1),
        torch.tensor([0.1], dtype=torch.float64),
    )
    wrong = [steps | {"b": step} for step in wrong_steps]
    for code in (*wrong, {"a": steps["a"]}, steps | {"c": steps["a"]}):
        with pytest.raises(RefusedError, match="does not match this job"):
            require_step_sizes(code, model_change)


@pytest.mark.parametrize("keep", [0, -1])
@pytest.mark.parametrize("compression", ["none", "packed"])
def test_reported_bytes_equal_those_of_the_engine(compression: Any, keep: int) -> None:
    """But for counts and losses, some bytes a message."""
    shared: Any = {"compression": compression, "sites": 2}
    config = replace(CONFIG, cycles=6, keep_cycle=keep, **shared)
    sites = [Fit(k, config) for k in range(2)]
    _, engine, _ = trained(sites, config)
    up, down = estimate_traffic(
        config, {n: p.detach() for n, p in net().named_parameters()}
    )
    messages = 6 * (2 if compression == "none" else 3)
    assert 0 <= engine.bytes_up - 2 * up <= 2 * 40 * messages
    assert abs(engine.bytes_down - 2 * down) <= 2 * 16 * messages
