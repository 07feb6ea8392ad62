"""The secure sum: totals, drop-outs and what ends an exchange."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
import torch

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.fixed_point import SumLayout, encode
from fednotes.privacy.secure_sum.server import SecureServer
from fednotes.privacy.secure_sum.site import SecureSite

A, B, C, D, E = "abcde"


def names(n: int) -> tuple[str, ...]:
    """Not in alphabetical order, so that the order of the sites and of their names differ."""
    return tuple(f"site{(7 * i + 3) % 11}" for i in range(n))


def updates_of(sites: tuple[str, ...], seed: int = 0) -> dict[str, Update]:
    draw = torch.Generator().manual_seed(seed)

    def update(weight: float) -> Update:
        tensors = {
            "layer.weight": torch.randn(3, 5, generator=draw),
            "layer.bias": torch.randn(4, generator=draw, dtype=torch.float64),
            "count": torch.randint(-9, 9, (2,), generator=draw),
        }
        return Update(
            tensors, weight, {"tp": weight * 3, "loss": float(torch.rand(1, generator=draw))}
        )

    return {site: update(1.0 + 37 * i) for i, site in enumerate(sites)}


def check(total: Total, updates: dict[str, Update], included: list[str], sites: int) -> None:
    """Against NumPy: round each weight · value to its unit, add Python integers; and against
    `Total.of`, the plain float64 sum, within the stated error."""
    kept = [updates[name] for name in included]
    layout = SumLayout.of(kept[0], sites)
    units = {f.name: 2.0**f.exponent for f in layout.fields if f.kind == "tensor" and not f.fine}
    assert set(units) == {"layer.weight"}
    for name, unit in units.items():
        rows = [np.rint(u.tensors[name].double().numpy() * u.weight * unit) for u in kept]
        exact = [sum(map(int, column)) / unit for column in zip(*map(np.ravel, rows), strict=True)]
        assert total.tensors[name].view(-1).tolist() == exact
    plain, units = Total.of(kept), {f.name: f.exponent + f.fine for f in layout.fields}
    for name, value in plain.tensors.items():
        slack = len(kept) * 2.0 ** -(units[name] + 1) + 1e-15 * float(value.abs().max())
        assert float((total.tensors[name] - value).abs().max()) <= slack
    assert total.weight == plain.weight
    assert total.metrics == pytest.approx(plain.metrics, rel=1e-15)
    assert total.metrics["tp"] == plain.metrics["tp"]
    assert (total.included, total.sites) == (tuple(included), len(kept))


def drop_outs(sites: tuple[str, ...], threshold: int) -> Iterator[tuple[str, ...]]:
    for size in range(len(sites) - threshold + 1):
        yield from combinations(sites, size)


def exact_at(exchange: type, n: int, threshold: int, sets: list[tuple[str, ...]]) -> None:
    """Each set of drop-outs in five ways: gone before shares, before the update, before the
    answer, and split over these."""
    sites, split = names(n), random.Random(n)
    updates = updates_of(sites, n)
    for gone in sets:
        parts: list[list[str]] = [[], [], []]
        for site in gone:
            split.choice(parts).append(site)
        ways = [(gone, (), ()), ((), gone, ()), ((), (), gone), parts]
        for no_shares, no_update, no_answer in ways[: len(gone) * 4 or 1]:
            total = exchange(sites, threshold).run(
                updates, no_shares=no_shares, no_update=no_update, no_answer=no_answer
            )
            out = {*no_shares, *no_update}
            check(total, updates, [s for s in sites if s not in out], n)


@pytest.mark.parametrize(
    ("n", "threshold"), [(3, 2), (3, 3), (4, 3), (4, 4), (5, 3), (5, 4), (6, 4), (7, 5)]
)
def test_exact_at_each_set_of_drop_outs(exchange: type, n: int, threshold: int) -> None:
    exact_at(exchange, n, threshold, list(drop_outs(names(n), threshold)))


@pytest.mark.parametrize("n", [7, 8, 9, 10])
def test_exact_at_drop_outs_of_many_sites(exchange: type, n: int) -> None:
    """Ten sets drawn, the largest among them; every set is the slow test's."""
    sets = list(drop_outs(names(n), n // 2 + 1))
    exact_at(exchange, n, n // 2 + 1, [sets[-1], *random.Random(n).sample(sets, 9)])


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 8, 9, 10])
def test_exact_at_each_set_of_drop_outs_of_many_sites(exchange: type, n: int) -> None:
    exact_at(exchange, n, n // 2 + 1, list(drop_outs(names(n), n // 2 + 1)))


def test_fifty_sites(exchange: type) -> None:
    sites = tuple(f"h{i}" for i in range(50))
    updates = updates_of(sites)
    total = exchange(sites).run(updates, no_update=sites[3:20], no_answer=sites[40:47])
    check(total, updates, [s for s in sites if s not in sites[3:20]], 50)


def test_the_order_of_arrival_does_not_matter(exchange: type) -> None:
    """Integers: every permutation gives the same bits."""
    updates = updates_of((A, B, C))
    totals = []
    for order in [(A, B, C), (C, A, B), (B, C, A)]:
        run = exchange((A, B, C))
        boxes = run.set_up()
        run.upload({name: updates[name] for name in order}, boxes)
        for name, answer in sorted(run.answers().items(), key=lambda x: order.index(x[0])):
            assert name == answer.site
            run.server.add_unmask(answer)
        totals.append(run.server.total())
    for total in totals[1:]:
        assert total.included == (A, B, C)
        assert all(torch.equal(v, total.tensors[k]) for k, v in totals[0].tensors.items())
        assert total.metrics == totals[0].metrics


def test_limits_and_names_of_metrics_travel_with_the_request(exchange: type) -> None:
    """Against the plain sum: values are multiples of 2^-50, which the default limit drops."""
    updates = {s: Update({"w": torch.tensor([2.0**-50])}, 1.0, {s: 1.0}) for s in (A, B, C)}
    how = {"limits": {"w": 1}, "metrics": [A, B, C, "none"], "purpose": "r 1"}
    total = exchange((A, B, C)).run(updates, **how)
    assert total.tensors["w"].tolist() == [3 * 2.0**-50]
    assert total.metrics == {A: 1.0, B: 1.0, C: 1.0, "none": 0.0}


def test_below_the_threshold_nothing_is_opened(exchange: type) -> None:
    """The server cannot ask, and sites would not answer."""
    updates = updates_of((A, B, C, D, E))
    run = exchange((A, B, C, D, E))
    boxes = run.set_up()
    run.upload({name: updates[name] for name in (A, B)}, boxes)
    with pytest.raises(TrainingError, match="2 of 5 sites, and the threshold is 3: nothing"):
        run.server.requests()
    with pytest.raises(TrainingError, match="no updates to open"):
        run.server.total()
    run = exchange((A, B, C, D, E))
    boxes = run.set_up()
    run.upload(updates, boxes)
    for answer in list(run.answers().values())[:2]:
        run.server.add_unmask(answer)
    with pytest.raises(TrainingError, match="opened shares of 2 of 5"):
        run.server.total()
    parties = Parties((A, B, C))
    server = SecureServer(parties, b"")
    server.add_keys(SecureSite(A, parties, b"").keys())
    with pytest.raises(TrainingError, match="keys of 1 of 3"):
        server.keys()
    server.add_keys(SecureSite(B, parties, b"").keys())
    server.keys()
    with pytest.raises(TrainingError, match="shares of 0 of 3"):
        server.boxes()


def test_bad_values_are_refused_before_masking_and_the_exchange_goes_on(exchange: type) -> None:
    """Out of range: with wider limits the same exchange gives the total; NaN: a drop-out."""
    sites = (A, B, C)
    updates = {s: Update({"v": torch.tensor([1e12])}, 1.0) for s in sites}
    run = exchange(sites)
    boxes = run.set_up()
    with pytest.raises(TrainingError, match=r"tensor 'v'.*nothing was sent"):
        run.upload(updates, boxes)
    assert run.server.heard == ()
    nan = {**updates, B: Update({"v": torch.tensor([float("nan")])})}
    wide = {"v": 60}
    with pytest.raises(TrainingError, match="tensor 'v' has a value that is not finite"):
        run.upload({B: nan[B]}, boxes, limits=wide)
    run.upload({A: updates[A], C: updates[C]}, boxes, limits=wide)
    for answer in run.answers().values():
        run.server.add_unmask(answer)
    total = run.server.total()
    assert total.included == (A, C)
    assert total.tensors["v"].tolist() == [2 * float(torch.tensor(1e12))]


def test_the_layout_of_most_sites_counts(exchange: type) -> None:
    """A site with another tensor is left out like a drop-out; without a majority the message
    names what differs."""
    sites = (A, B, C)
    odd = Update({"other": torch.ones(2)})
    updates = {A: odd, B: Update({"w": torch.ones(2)}), C: Update({"w": torch.ones(2)})}
    total = exchange(sites).run(updates)
    assert total.included == (B, C)
    assert total.tensors["w"].tolist() == [2.0, 2.0]
    two = exchange((A, B, C), 3)
    boxes = two.set_up()
    two.upload(updates, boxes)
    with pytest.raises(TrainingError, match=r"'a' and 'b'|'b' and 'a'") as error:
        two.server.requests()
    assert "tensor 'other'" in str(error.value)


def test_a_total_is_made_of_masks_that_cancel_only(exchange: type) -> None:
    """Words changed on the way, and shares that fit no key, are noticed."""
    updates = updates_of((A, B, C))
    run = exchange((A, B, C))
    boxes = run.set_up()
    message = run.sites[A].masked(boxes[A], updates[A])
    message.words[-1] += np.uint64(1)
    run.server.add_masked(message)
    run.upload({s: updates[s] for s in (B, C)}, boxes)
    for answer in run.answers().values():
        run.server.add_unmask(answer)
    with pytest.raises(TrainingError, match="did not cancel"):
        run.server.total()
    for part, gone in (("masks", ()), ("keys", (C,))):
        run = exchange((A, B, C))
        run.upload({s: u for s, u in updates.items() if s not in gone}, run.set_up())
        for answer in run.answers().values():
            shares = getattr(answer, part)
            name = sorted(shares)[-1]
            shares[name] = shares[name][:-1] + bytes([shares[name][-1] ^ 1])
            run.server.add_unmask(answer)
        with pytest.raises(TrainingError, match=r"shares of the (mask|key) of site '[bc]'"):
            run.server.total()


def test_late_doubled_and_foreign_messages_are_refused(exchange: type) -> None:
    updates = updates_of((A, B, C))
    run, other = exchange((A, B, C)), exchange((A, B, C), context=b"job/run/1")
    for wrong, why in [
        (other.sites[A].keys(), "another exchange"),
        (SecureSite("x", Parties(("x", B, C)), b"job/run/0").keys(), "site 'x' takes no part"),
    ]:
        with pytest.raises(RefusedError, match=why):
            run.server.add_keys(wrong)
    boxes = run.set_up(without=(C,))
    with pytest.raises(RefusedError, match="late"):
        run.server.add_keys(run.sites[A].keys())
    messages = run.upload({A: updates[A]}, boxes)
    with pytest.raises(RefusedError, match="site 'a' answered twice"):
        run.server.add_masked(messages[A])
    late = run.sites[B].masked(boxes[B], updates[B])
    other_boxes = other.set_up()
    with pytest.raises(RefusedError, match="another exchange"):
        run.server.add_masked(other.sites[B].masked(other_boxes[B], updates[B]))
    run.server.add_masked(late)
    answers = run.answers()
    with pytest.raises(RefusedError, match="site 'b' is late"):
        run.server.add_masked(late)
    run.server.add_unmask(answers[A])
    with pytest.raises(RefusedError, match="answered twice"):
        run.server.add_unmask(answers[A])
    run.server.add_unmask(answers[B])
    check(run.server.total(), updates, [A, B], 3)


def test_parameters_that_protect_nobody_are_refused() -> None:
    for sites, threshold, why in [
        ((A, B), 2, "2 sites; it takes 3"),
        ((A, B, C, A), 3, "listed twice"),
        ((A, B, C, D), 2, "threshold of 2 of 4"),
        ((A, B, C), 4, "threshold of 4 of 3"),
        ((B, C, D), 2, "'a' is not one of its sites"),
    ]:
        with pytest.raises(ConfigError, match=why):
            SecureSite(A, Parties(sites, threshold), b"")


def test_update_of_encoded_words_is_what_is_masked(exchange: type) -> None:
    """The words that arrive, less the streams, are the encoding: nothing else is sent."""
    updates = updates_of((A, B, C))
    run = exchange((A, B, C))
    boxes = run.set_up()
    messages = run.upload(updates, boxes)
    encoded = [encode(u, messages[A].layout) for u in updates.values()]
    assert all((m.words != e).all() for m, e in zip(messages.values(), encoded, strict=True))
    assert messages[A].words.shape == (messages[A].layout.words,)


@pytest.mark.parametrize(("n", "threshold"), [(3, 2), (3, 3), (4, 3), (4, 4), (5, 3), (5, 4)])
def test_least_sum_of_a_lying_server(n: int, threshold: int) -> None:
    """Brute force over every list that every site may be shown: it names itself and at least
    t sites. A sum opens where some sites are named by t, and all others left out by t.

    A bound by hand: each of n sites names at least t survivors, once. For a sum of k sites alone,
    each of the other n - k must be called dropped by t sites, so named by n - t at most; n sites
    name n(t - k) of these at least. Hence n(t - k) ≤ (n - k)(n - t), that is k ≥ n(2t - n) / t."""
    lists = [
        [m for m in range(1 << n) if m >> site & 1 and m.bit_count() >= threshold]
        for site in range(n)
    ]
    least = n
    for shown in product(*lists):
        named = [sum(m >> site & 1 for m in shown) for site in range(n)]
        opened = [count >= threshold for count in named]
        if all(o or n - count >= threshold for o, count in zip(opened, named, strict=True)):
            least = min(least, sum(opened))
    assert -(-n * (2 * threshold - n) // threshold) <= least
    assert least >= 2
    assert threshold < n or least == threshold  # where all are needed, no list need be confirmed
