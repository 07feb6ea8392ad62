"""FedNER, compared with plain loops; sparse rows compared with whole word tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_taggers import MODEL, NO_DROPOUT, assert_same, generated, values

from fednotes.core.errors import ConfigError, ModelError, TrainingError
from fednotes.core.federation import State
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.tensors import load_into, nbytes, require_tensor, restoring
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Total
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.split import make_sentence_documents
from fednotes.engines.host import explain_error
from fednotes.engines.inprocess import InProcess
from fednotes.methods import distill, fedner
from fednotes.metrics.spans import SpanCounts
from fednotes.privacy.promise import Privacy
from fednotes.taggers.tagger import build_tagger
from fednotes.training import word_rows
from fednotes.training.sites import unite_tags


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return generated(40)


def config(sites: list[SiteData], **changes: object) -> fedner.Config:
    base = fedner.Config(
        model=MODEL, batch_size=12, epochs=2, seed=3, tags=unite_tags(sites)
    )
    return replace(base, **changes)


def federate(sites, settings, **options):
    members = [fedner.Site(site, settings) for site in sites]
    engine = InProcess(members, **options)
    return members, fedner.train(engine, settings)


def weights(member) -> dict[str, torch.Tensor]:
    return values(member.model.trainable())


def plain_epochs(
    data: SiteData, settings: fedner.Config, tagger, losses: list[float]
) -> Iterator[int]:
    """Training alone as anybody would write it: one tagger, one Adam, all parameters.

    for each epoch: for each mini-batch: loss.backward(); Adam.step(). losses: receives
    the mini-batches'.
    """
    train = tagger.prepare(data.train)
    rate = settings.learning_rate
    adam = torch.optim.Adam(list(tagger.trainable().values()), lr=rate, fused=True)
    step = 0
    for epoch in range(settings.epochs):
        rng = rng_of(settings.seed, "order", data.id, epoch)
        for batch in draw_epoch_batches(train.lengths, settings.batch_size, rng):
            torch.manual_seed(seed_of(settings.seed, "dropout", data.id, step))
            adam.zero_grad()
            loss = tagger.train().loss(train, batch)
            loss.backward()
            losses.append(float(loss.detach()))
            adam.step()
            step += 1
        yield epoch


def plain_loop(
    data: SiteData,
    settings: fedner.Config,
    losses: list[float] | None = None,
    keep_best: bool = True,
):
    """Return the best tagger on validation data after any of `plain_epochs`, or the
    last."""
    tagger = build_tagger(settings.model, data.tags, settings.seed)
    best, best_f1 = {}, -1.0
    for _ in plain_epochs(data, settings, tagger, [] if losses is None else losses):
        f1 = strict_f1(data.valid, tagger.predict(data.valid), data.tags)
        if f1 > best_f1 or f1 == best_f1 == 0 or not keep_best:
            best, best_f1 = values(tagger.trainable()), f1
    return best


def strict_f1(gold, predicted, tags) -> float:
    right = gold_count = predicted_count = 0
    for g, p in zip(gold, predicted, strict=True):
        a = {(s.start, s.end, s.label) for s in g.spans}
        b = {(s.start, s.end, s.label) for s in p.spans}
        right, gold_count, predicted_count = (
            right + len(a & b),
            gold_count + len(a),
            predicted_count + len(b),
        )
    return (
        2 * right / (gold_count + predicted_count)
        if gold_count + predicted_count
        else 0.0
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"private": ()},
        {"private": ("words", "characters", "cnn", "lstm", "crf")},
        {"exchange": "weights"},
    ],
)
def test_a_federation_of_one_platform_equals_training_alone_bit_for_bit(
    sites, changes
) -> None:
    """With one platform Eq. 2 is the identity, so Algorithm 1 is `plain_loop`, to the
    bit; a mean of weights over one is its value, and its moments persist between
    rounds."""
    settings = config(sites[:1], **changes)
    (member,), _ = federate(sites[:1], settings)
    assert_same(weights(member), plain_loop(sites[0], settings))


def test_equal_platforms_that_share_all_layers_equal_one_large_batch(sites) -> None:
    """Equal sizes and no dropout: the mean of K mini-batch means is the mean over their
    union.

    The plain loop below sees the union of the platforms' mini-batches as one batch.
    """
    documents = make_sentence_documents(sites[0].train)[:24]
    tags = sites[0].tags
    halves = [
        SiteData(name, tags, documents[i::2], (), ()) for i, name in enumerate("ab")
    ]
    settings = fedner.Config(
        model=NO_DROPOUT,
        private=(),
        batch_size=8,
        epochs=2,
        seed=3,
        tags=tags,
        patience=9,
    )
    members, _ = federate(halves, settings)

    tagger = build_tagger(NO_DROPOUT, tags, settings.seed)
    union = tagger.prepare([d for half in halves for d in half.train])
    lengths = [tagger.prepare(half.train).lengths for half in halves]
    adam = torch.optim.Adam(
        list(tagger.trainable().values()), lr=settings.learning_rate, fused=True
    )
    for epoch in range(settings.epochs):
        orders = [
            draw_epoch_batches(
                lengths[i], 4, rng_of(settings.seed, "order", half.id, epoch)
            )
            for i, half in enumerate(halves)
        ]
        for first_order, second_batch in zip(*orders, strict=True):
            adam.zero_grad()
            tagger.loss(
                union, np.concatenate([first_order, second_batch + len(lengths[0])])
            ).backward()
            adam.step()
    expected = {name: value.detach() for name, value in tagger.trainable().items()}
    for name, value in weights(members[0]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-5)


def test_the_loss_is_the_mean_negative_log_likelihood_of_sentences() -> None:
    """Eq. 1: p(y | s) = exp(-loss) sums to one over every tag sequence that BIO
    permits, and the loss of several sentences is the mean of theirs."""
    tags = TagSet(("Drug",))
    documents = [
        Document("a", "Took aspirin today", (Span(5, 12, "Drug"),)),
        Document("b", "Well"),
    ]
    tagger = build_tagger(NO_DROPOUT, tags, seed=1)
    prepared = tagger.prepare(documents)
    losses = []
    with torch.no_grad():
        for sentence, length in enumerate((3, 1)):
            part = slice(*prepared.encoded.bounds[sentence : sentence + 2])
            gold = tuple(prepared.encoded.tags[part])
            likelihood = {}
            for y in product(range(3), repeat=length):
                if any(t == 2 and (i == 0 or y[i - 1] == 0) for i, t in enumerate(y)):
                    continue  # I without B
                candidate_tags = prepared.encoded.tags.copy()
                candidate_tags[part] = y
                retagged = replace(
                    prepared, encoded=replace(prepared.encoded, tags=candidate_tags)
                )
                likelihood[y] = np.exp(-float(tagger.loss(retagged, [sentence])))
            assert sum(likelihood.values()) == pytest.approx(1, abs=1e-5)
            losses.append(-np.log(likelihood[gold]))
        assert float(tagger.loss(prepared, [0, 1])) == pytest.approx(
            np.mean(losses), rel=1e-5
        )
        summed = 2 * float(tagger.loss(prepared, [0, 1]))
        assert summed == pytest.approx(np.sum(losses), rel=1e-5)


@pytest.mark.parametrize("left_over", [0, 1, 11])
def test_an_epoch_ends_with_the_left_over_sentences(sites, left_over: int) -> None:
    """Every sentence is in each epoch once, so an epoch has ⌈|S| / N⌉ rounds and then a
    judgement.

    Checked against `plain_epochs`, whose epoch is one walk over all mini-batches.
    """
    documents = make_sentence_documents(sites[0].train)[: 24 + left_over]
    data = replace(sites[0], train=documents, valid=())
    settings = config([data], epochs=3, select="last")
    rounds: list[bool] = []
    member = fedner.Site(data, settings)
    engine = InProcess(
        [member], observer=lambda result: rounds.append(result.evaluated)
    )
    fedner.train(engine, settings)

    each = 2 if left_over == 0 else 3
    assert rounds == 3 * [*[False] * (each - 1), True]
    assert fedner.METHOD.plan_rounds(settings, [24 + left_over]) == (3 * each, 12)
    assert_same(weights(member), plain_loop(data, settings, keep_best=False))


def unequal(sites: list[SiteData]) -> list[SiteData]:
    """Return three platforms of 24, 15 and 9 sentences of the first site, without test
    data."""
    documents, cuts = make_sentence_documents(sites[0].train), (0, 24, 39, 48)
    documents += make_sentence_documents(sites[1].train)
    tags = sites[0].tags.union(sites[1].tags)
    return [
        SiteData(name, tags, documents[low:high], (), ())
        for name, low, high in zip("abc", cuts, cuts[1:], strict=False)
    ]


def first_batch(data: SiteData, settings: fedner.Config, share: int):
    """Return a tagger with torch's gradients of a platform's first mini-batch, and its
    loss."""
    tagger = build_tagger(settings.model, data.tags, settings.seed)
    corpus = tagger.prepare(data.train)
    order = draw_epoch_batches(
        corpus.lengths, share, rng_of(settings.seed, "order", data.id, 0)
    )
    torch.manual_seed(seed_of(settings.seed, "dropout", data.id, 0))
    loss = tagger.train().loss(corpus, order[0])
    loss.backward()
    return tagger, float(loss.detach())


def test_equation_2_weighs_gradients_by_sentences_and_steps_once(sites) -> None:
    """Σ |S_i| g_i / Σ |S_j| in NumPy's float64, a step of torch's Adam along it for the
    shared layers, one along its own gradient for each platform's private ones; the loss
    likewise."""
    platforms = unequal(sites)
    settings = config(
        platforms, rounds=1, batch_size=16, least_share=1, tags=platforms[0].tags
    )
    members = [fedner.Site(data, settings) for data in platforms]
    losses: list[float] = []
    engine = InProcess(
        members, observer=lambda result: losses.append(result.metrics["loss"])
    )
    state = fedner.train(engine, settings)
    sizes, shares = (24, 15, 9), agreed_by_hand([24, 15, 9], 16)
    assert shares == [8, 5, 3]
    plain = [
        first_batch(*each)
        for each in zip(platforms, [settings] * 3, shares, strict=True)
    ]
    assert losses == [
        pytest.approx(np.average([p[1] for p in plain], weights=sizes), rel=1e-6)
    ]
    start = build_tagger(settings.model, settings.tags, settings.seed)
    shared = {
        n: p
        for n, p in start.trainable().items()
        if n.split(".")[0] not in ("lstm", "crf")
    }
    for name, parameter in shared.items():
        each = [p[0].trainable()[name].grad.double().numpy() for p in plain]
        parameter.grad = torch.from_numpy(
            np.average(each, axis=0, weights=sizes)
        ).float()
        np.testing.assert_allclose(
            state.tensors[f"adam.exp_avg.{name}"],
            0.1 * parameter.grad,
            rtol=1e-5,
            atol=1e-9,
        )
    torch.optim.Adam(shared.values(), lr=settings.learning_rate, fused=True).step()
    for name, parameter in shared.items():
        torch.testing.assert_close(
            state.tensors[f"shared.{name}"], parameter.detach(), rtol=1e-5, atol=1e-6
        )
    for member, (tagger, _) in zip(members, plain, strict=True):
        private_layers = {
            n: p for n, p in tagger.trainable().items() if n in member.private
        }
        assert {name.split(".")[0] for name in private_layers} == {"lstm", "crf"}
        torch.optim.Adam(
            private_layers.values(), lr=settings.learning_rate, fused=True
        ).step()
        assert_same(values(member.private), private_layers)


def test_equation_2_weighs_parameters_by_sentences(sites) -> None:
    """Σ |S_i| θ_i / Σ |S_j| by NumPy's average, of what each platform trains to alone."""
    platforms = unequal(sites)
    settings = config(
        platforms, exchange="weights", rounds=1, batch_size=16, least_share=1
    )
    losses: list[float] = []
    engine = InProcess(
        [fedner.Site(data, settings) for data in platforms],
        observer=lambda result: losses.append(result.metrics["loss"]),
    )
    state = fedner.train(engine, settings)
    apart, step_losses = [], []
    for data, share in zip(platforms, (8, 5, 3), strict=True):
        # Nothing to judge by: the loop keeps its last tagger.
        alone = replace(settings, tags=data.tags, epochs=1, batch_size=share)
        apart.append(plain_loop(data, alone, losses=step_losses))
    means = [np.mean(step_losses[low:high]) for low, high in ((0, 3), (3, 6), (6, 9))]
    assert losses == [pytest.approx(np.average(means, weights=(24, 15, 9)), rel=1e-6)]
    for name in apart[0]:
        if name.split(".")[0] in ("lstm", "crf"):
            continue
        each = [tagger[name].double().numpy() for tagger in apart]
        expected = np.average(each, axis=0, weights=(24, 15, 9))
        np.testing.assert_allclose(
            state.tensors[f"shared.{name}"], expected, rtol=1e-6, atol=1e-7
        )


def test_a_platform_alone_has_the_same_part_of_the_mini_batch(sites) -> None:
    """|N_i| = |S_i| / Σ|S_j| · N, by fractions, and each trains with it.

    Of 24, 15 and 9 sentences with N = 16: 8, 5 and 3 sentences in every step.
    """
    platforms = unequal(sites)
    settings = replace(
        config(platforms, batch_size=16, least_share=1, select="last"), sites=3
    )
    site_configs = fedner.METHOD.configure_alone(settings, platforms)
    shares = agreed_by_hand([24, 15, 9], 16)
    assert [each.batch_size for each in site_configs] == shares == [8, 5, 3]
    for data, part, share in zip(platforms, site_configs, shares, strict=True):
        (member,), _ = federate([data], replace(part, tags=data.tags))
        # epochs, mini-batches of each
        assert (member.share, member.steps) == (share, 2 * 3)
        plain = plain_loop(data, replace(settings, tags=data.tags, batch_size=share))
        assert_same(weights(member), plain)


@pytest.mark.parametrize(
    ("changes", "epochs"),
    [
        ({"rounds": 2, "local_epochs": 3}, 6),
        pytest.param({"epochs": 5, "local_epochs": 2}, 6, marks=pytest.mark.slow),
        ({"epochs": 4}, 4),
    ],
)
def test_pooled_heads_train_as_long_as_a_federation_that_exchanges_weights(
    sites, changes: dict[str, Any], epochs: int
) -> None:
    """One tag set a site has no single output layer, so pooling is a federation of
    mini-batches.

    Layers that are trained on all sentences need one gradient of all sites in each
    step. Every sentence is read as often as where sites train for rounds of whole
    epochs.
    """
    platforms = sites[:2]
    assert platforms[0].tags != platforms[1].tags
    plain = config(platforms, select="last", personal_epochs=2)
    settings = replace(plain, exchange="weights", **changes)
    together, pooled = fedner.METHOD.configure_pooled(settings, platforms, None)
    equivalent = replace(plain, private=("crf",), personal_epochs=0, epochs=epochs)
    members, state = federate(together, pooled)
    expected, ended = federate(platforms, equivalent)
    assert_same(state.tensors, ended.tensors)
    for pooled_member, expected_member in zip(members, expected, strict=True):
        assert_same(weights(pooled_member), weights(expected_member))

    apart, _ = federate(platforms, settings)
    for member in apart:  # two personal epochs come after the federation
        assert member.steps == (epochs + 2) * math.ceil(
            member.num_examples / member.share
        )
    sentences = sum(member.num_examples for member in members)
    shares = sum(member.share for member in members)
    assert state.round == epochs * math.ceil(sentences / shares)


class Spy(InProcess):
    """Remembers the names of every tensor that crosses; judging changes nothing
    private."""

    crossed: ClassVar[set[str]] = set()

    def run(self, site, task, sent, options):
        before = values(site.private)
        update = super().run(site, task, sent, options)
        self.crossed.update(sent, update.tensors)
        if task == "evaluate":
            assert_same(before, values(site.private))
        return update


def test_private_layers_are_neither_sent_nor_changed_by_aggregation(sites) -> None:
    settings = config(sites, epochs=1)
    engine = Spy([fedner.Site(site, settings) for site in sites])
    fedner.train(engine, settings)
    assert {name.split(".")[0] for name in engine.crossed} == {
        "words",
        "characters",
        "cnn",
    }


def test_private_layers_differ_and_shared_layers_agree(sites) -> None:
    """After training every platform has its own CRF, trained on; θ_s is the server's at
    all."""
    settings = config(sites, epochs=1)
    members, state = federate(sites, settings)
    shapes = {member.model.crf.project.weight.shape for member in members}
    assert len(shapes) == len({len(site.tags.types) for site in sites})
    assert all(name.startswith(("shared.", "adam.")) for name in state.tensors)
    server = {
        n.removeprefix("shared."): v
        for n, v in state.tensors.items()
        if n[:6] == "shared"
    }
    starts = [
        build_tagger(MODEL, site.tags, settings.seed).trainable() for site in sites
    ]
    for member, start in zip(members, starts, strict=True):
        assert_same(values(member.shared), server)
        for name, value in member.private.items():
            assert not torch.equal(value, start[name]), name
    recurrent = [member.private["lstm.weight_hh_l0"] for member in members]
    assert not torch.equal(recurrent[0], recurrent[1])


def test_platforms_with_different_tag_schemes_train_together(sites) -> None:
    """BIO at one platform, BIOES at another: only the private CRF differs. What a
    tagger that says a lot finds in their test data is counted by hand."""
    relabelled = replace(sites[1], tags=TagSet(sites[1].tags.types, "BIOES"))
    members, _ = federate([sites[0], relabelled], config(sites[:2], epochs=1))
    types = [len(site.tags.types) for site in sites[:2]]
    rows = [len(member.model.crf.project.weight) for member in members]
    assert rows == [1 + 2 * types[0], 1 + 4 * types[1]]
    assert_same(*(values(member.shared) for member in members))
    for member in members:
        with torch.no_grad():
            member.model.crf.project.weight.normal_(
                generator=torch.Generator().manual_seed(1)
            )
        predicted = member.model.predict(member.data.test)
        counts = member.count_mentions("test").scores()["strict"]
        gold, predicted_mentions = (
            {(d.id, s) for d in part for s in d.spans}
            for part in (member.data.test, predicted)
        )
        correct = gold & predicted_mentions
        assert len(correct) > 0
        assert counts["precision"] == pytest.approx(
            len(correct) / len(predicted_mentions), rel=1e-9
        )
        assert counts["recall"] == pytest.approx(len(correct) / len(gold), rel=1e-9)


class SizeOnly(fedner.Site):
    """A site that has only a size, to test the protocol alone."""

    def __init__(
        self, name: str, size: int, config: fedner.Config | None = None
    ) -> None:
        self.data = SiteData(name, TagSet(()), (), (), ())
        self.config = config or fedner.Config()
        self.num_examples = size
        self.share = 0
        self._all_examples = 0


def agreed_by_hand(sizes: list[int], batch: int, least: int = 1) -> list[int]:
    """Return |S_i| / Σ|S_j| · N, rounded half up, by Python's fractions."""
    exact = [Fraction(n * batch, sum(sizes)) + Fraction(1, 2) for n in sizes]
    return [max(1, int(x), min(least, n)) for x, n in zip(exact, sizes, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_sites_compute_their_shares_from_one_sum(seed: int) -> None:
    """Of a hundred platforms, more than the batch has sentences, each has one."""
    rng = np.random.default_rng(seed)
    sizes = (
        [int(n) for n in rng.integers(1, 900, size=rng.integers(1, 9))]
        if seed
        else [10] * 100
    )
    members = [SizeOnly(f"s{i}", n) for i, n in enumerate(sizes)]
    total, batch = fedner.agree_on_shares(InProcess(members))
    expected = agreed_by_hand(sizes, 64)
    assert (total, batch) == (sum(sizes), sum(expected))
    assert [m.share for m in members] == expected


@pytest.mark.parametrize(
    ("least", "sites", "share"), [(0, 3, 6), (0, 0, 1), (8, 3, 8), (1, 3, 1)]
)
def test_no_sum_from_the_server_makes_a_batch_of_one_sentence(
    least: int, sites: int, share: int
) -> None:
    """A quarter of an equal share of 64 among three is 5.33, so 6 sentences."""
    config = fedner.Config(batch_size=64, least_share=least, sites=sites)
    member = SizeOnly("a", 100, config)
    assert member.take_share({}, examples=2**50).metrics == {"share": share}
    behind = 100 % share if 100 % share >= (least or 1 + 5 * (sites > 0)) else share
    assert member.count_covered("gradients") == {"steps": 1, "batch": behind}
    few = SizeOnly("b", 2, config)
    assert few.take_share({}, examples=2**50).metrics == {"share": min(share, 2)}


def test_a_server_that_tries_one_sum_after_another_learns_nothing() -> None:
    """Only the first counts, and one below the site's number is that number: a whole
    mini-batch, as if the site were alone."""
    config = fedner.Config(batch_size=64, sites=3)
    member = SizeOnly("a", 100, config)
    sums = (99, 100, 2**50, 1)
    shares = [member.take_share({}, examples=sum_).metrics for sum_ in sums]
    assert shares == [{"share": 64}] * 4


@pytest.mark.parametrize("size", [2, 5, 6, 7, 13, 97, 100, 385])
def test_no_sum_from_the_server_makes_a_batch_of_one_at_the_end_of_an_epoch(
    size: int,
) -> None:
    """A server does not know how many sentences are left over: it tries every sum."""
    config = fedner.Config(batch_size=64, sites=3)
    for examples in range(size, 8 * size):
        member = SizeOnly("a", size, config)
        share = int(member.take_share({}, examples=examples).metrics["share"])
        lengths = np.arange(size) % 30 + 1
        batches = draw_epoch_batches(
            lengths, share, np.random.default_rng(1), min_size=6
        )
        assert sorted(np.concatenate(batches).tolist()) == list(range(size))
        assert min(map(len, batches)) >= min(6, size)
        assert len(batches) == member._plan_epoch()[0]
        assert member.count_covered("gradients") == {
            "steps": 1,
            "batch": min(map(len, batches)),
        }


LARGE = replace(MODEL, hashed_words=2048)  # a table that travels by rows


def judge(server: fedner.Server, true_positives: int) -> None:
    """Tell a server that so many of ten validation mentions are found."""
    counts = {
        "strict/Drug/tp": true_positives,
        "support/Drug/gold": 10,
        "support/Drug/predicted": 10,
    }
    server.judge(Total({}, 1.0, counts))


@pytest.mark.parametrize(
    ("patience", "right", "stops"),
    [
        (3, (0, 5, 5, 4, 5, 5), [False, False, False, False, True, True]),
        (2, (5, 0, 0), [False, False, True]),  # a collapse after success is no progress
    ],
)
def test_training_stops_when_validation_stops_improving(
    sites, patience, right, stops
) -> None:
    """F1 0, 0.5, then never better: the first two count as progress, then `patience`
    more."""
    server = fedner.Server(config(sites, patience=patience), None)
    history = []
    for true_positives in right:
        judge(server, true_positives)
        history.append(server.is_converged)
    assert history == stops


def test_bfloat16_only_rounds_the_gradients(sites) -> None:
    """Parameters stay in float32 and move in almost the same direction."""
    start = fedner.make_initial_parameters(config(sites))

    def move(precision: str) -> torch.Tensor:
        settings = config(sites, epochs=1, select="last", precision=precision)
        members, _ = federate(sites, settings)
        ends = weights(members[0])
        assert all(value.dtype == torch.float32 for value in ends.values())
        return torch.cat([(ends[name] - start[name]).flatten() for name in start])

    exact, rounded = move("float32"), move("bfloat16")
    assert not torch.equal(exact, rounded)
    assert float(torch.cosine_similarity(exact, rounded, dim=0)) > 0.9


@pytest.mark.parametrize("method", [fedner, distill])
def test_bfloat16_with_differential_privacy_is_refused(method) -> None:
    with pytest.raises(ConfigError, match=r"precision = \"auto\" .* remove precision"):
        method.Config(privacy=Privacy(noise=1.0), precision="auto")


def test_patience_continues_after_a_restart(sites) -> None:
    """The evaluations before and after it count together: 0.5, 0, restart, 0 are two in
    a row."""
    settings = config(sites, patience=2)
    server = fedner.Server(settings, None)
    judge(server, 5)
    judge(server, 0)
    assert not server.is_converged
    resumed_server = fedner.Server(settings, server.state())
    assert not resumed_server.is_converged
    judge(resumed_server, 0)
    assert resumed_server.is_converged


def test_epochs_are_evaluated_at_the_period_and_at_the_end(sites) -> None:
    """Of five epochs with `evaluate_every = 2`: after the second, the fourth and the
    last one."""
    settings = config(sites, epochs=5, evaluate_every=2, select="last")
    epoch_results = []
    _, state = federate(sites, settings, observer=epoch_results.append)
    epoch, left_over = divmod(state.round, 5)
    assert left_over == 0
    assert epoch > 1
    expected = [2 * epoch, 4 * epoch, 5 * epoch]
    assert [
        result.round + 1 for result in epoch_results if result.evaluated
    ] == expected
    assert [
        result.round + 1 for result in epoch_results if "valid_f1" in result.metrics
    ] == expected


def test_a_platform_keeps_the_tagger_with_the_most_exact_mentions(
    sites, monkeypatch
) -> None:
    """Exactly found, of two: one, none (both by half), one and one by half, none. The
    first and no later one is better than all before; the third only finds more by half.
    """
    gold = Document("1", "a b c d e f", (Span(0, 3, "Drug"), Span(4, 7, "Drug")))
    exact, half, wrong_span = gold.spans[0], Span(4, 5, "Drug"), Span(0, 1, "Drug")
    member = fedner.Site(sites[0], config(sites[:1]))
    member.data = replace(member.data, valid=(gold,))
    is_best = []
    for spans in (
        (exact, Span(8, 9, "Drug")),
        (wrong_span, half),
        (exact, half),
        (half,),
    ):
        prediction = (replace(gold, spans=spans),)
        monkeypatch.setattr(
            member.model, "predict", lambda _, prediction=prediction: prediction
        )
        member.best.tensors = {}
        member._judge()
        is_best.append(bool(member.best.tensors))
    assert is_best == [True, False, False, False]


def test_the_last_tagger_is_kept_if_validation_data_have_no_mention(sites) -> None:
    """Validation can say nothing then: the kept tagger is the one after the last epoch."""
    bare = tuple(replace(d, spans=()) for d in sites[0].valid[:3])
    data = replace(sites[0], valid=bare)
    member, _ = federate([data], config(sites[:1], epochs=3))
    last_members, _ = federate([data], config(sites[:1], epochs=2))
    assert_same(weights(member[0]), plain_loop(data, config(sites[:1], epochs=3)))
    assert not torch.equal(
        weights(member[0])["crf.project.weight"],
        weights(last_members[0])["crf.project.weight"],
    )


def test_select_last_runs_all_rounds_and_keeps_the_last_tagger(
    sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though validation data speak for the first epoch (told so); and with nothing held
    out."""
    last = config(sites[:1], select="last", epochs=3, patience=1)
    (bare,), again = federate([replace(sites[0], valid=())], last)
    f1 = iter([9, 8, 7, 6, 9, 8, 7, 6])  # of three epochs and the test data

    def counts(self, part, _documents=()) -> SpanCounts:
        metrics = {
            "strict/Drug/tp": next(f1),
            "support/Drug/gold": 10,
            "support/Drug/predicted": 10,
        }
        return SpanCounts.from_metrics(metrics)

    monkeypatch.setattr(fedner.Site, "count_mentions", counts)
    (member,), state = federate(sites[:1], last)
    reference = plain_loop(sites[0], last, keep_best=False)
    assert_same(weights(member), reference)
    assert_same(weights(bare), reference)
    (best,), fewer = federate(sites[:1], replace(last, select="best"))
    assert_same(weights(best), plain_loop(sites[0], replace(last, epochs=1)))
    assert 3 * fewer.round == 2 * state.round == 2 * again.round


def test_personal_epochs_start_from_the_best_tagger(sites) -> None:
    """A plain loop over two epochs with a new Adam, from the tagger that was kept and
    not from the last one; a validation F1 below any makes it keep what the loop makes.
    """
    data, settings = sites[0], config(sites[:1], personal_epochs=2)
    member = fedner.Site(data, settings)
    best_tagger = build_tagger(MODEL, data.tags, seed=77)
    member.best.tensors = values(best_tagger.trainable())
    bare = tuple(replace(d, spans=()) for d in data.valid)
    member.data = replace(data, valid=bare)  # F1 is 0: the later one is kept
    member.finish(values(member.shared))
    for _ in plain_epochs(data, settings, best_tagger, []):
        pass
    assert_same(weights(member), values(best_tagger.trainable()))


def test_an_error_about_a_loss_that_is_not_finite_names_site_and_step(sites) -> None:
    settings = config(sites[:1])
    member = fedner.Site(sites[0], settings)
    with torch.no_grad():
        member.model.crf.project.weight.fill_(float("nan"))
    with pytest.raises(
        TrainingError, match="the loss is nan at mini-batch 0"
    ) as caught:
        fedner.train(InProcess([member]), settings)
    with pytest.raises(ConfigError, match=r"no layer is called 'lstn'.*characters"):
        config(sites, private=("lstn",))
    message = explain_error(
        caught.value, member.id
    )  # a server could make one word fail
    assert message.startswith(
        f"site {member.id!r}: the loss is not finite: lower learning_rate"
    )


# rows of word tables


def large(sites: list[SiteData], **changes: Any) -> fedner.Config:
    return config(sites, **{"model": LARGE} | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("private", "secure", "attributes"),
    [
        (("lstm", "crf"), False, {}),
        ((), False, {}),
        (("lstm", "crf"), True, {}),
        ((), True, {"hashed_suffixes": 1100, "hashed_shapes": 30, "hashes": 3}),
    ],
)
def test_a_run_with_sparse_rows_equals_one_with_whole_tables(
    sites, private, secure, attributes, monkeypatch
) -> None:
    """Server, its optimizer's moments and every site; moments move rows that no batch
    has. Under the secure sum marks are integers, exact there: a row that nobody reads
    stays out; the grid of rounding is of the largest sum, which is that of the whole
    table."""
    settings = large(
        sites,
        private=private,
        epochs=1 if secure else 2,
        model=replace(LARGE, **attributes),
    )
    by_rows, state = federate(sites, settings, secure=secure)
    tables = ("words.hashed", "words.suffixes")
    assert by_rows[0].tables == tables[: 1 + bool(attributes)]
    monkeypatch.setattr(word_rows, "LEAST", 10_000)
    plain, expected = federate(sites, settings, secure=secure)
    assert plain[0].tables == ()
    assert_same(state.tensors, expected.tensors)
    assert state.facts == expected.facts
    for sparse_member, dense_member in zip(by_rows, plain, strict=True):
        assert_same(sparse_member.model.trainable(), dense_member.model.trainable())
        assert sparse_member.scores == dense_member.scores


class Lossy:
    """A federation that loses chosen sites' replies to tasks, by the number of the
    request."""

    def __init__(
        self,
        members: list[fedner.Site],
        lost: Mapping[tuple[str, int], tuple[int, ...]],
    ):
        self.members, self.lost = members, lost
        self.calls: dict[str, int] = {}
        self.sent: list[tuple[str, int, int]] = []  # task, bytes there, bytes back

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        number = self.calls[task] = self.calls.get(task, -1) + 1
        updates = [getattr(m, task)(tensors or {}, **options) for m in self.members]
        self.sent.append((task, nbytes(tensors or {}), nbytes(updates[0].tensors)))
        left_out = self.lost.get((task, number), ())
        return Total.of(u for i, u in enumerate(updates) if i not in left_out)


def rounds(
    federation: Lossy, settings: fedner.Config, number: int, **changes: Any
) -> fedner.Server:
    """Yield after each round of `fedner.train`. changes: tables = () sends whole
    tables."""
    server = fedner.Server(settings, None)
    server._tables = changes.get("tables", server._tables)
    fedner.agree_on_shares(federation)  # type: ignore[arg-type]
    for round in range(number):
        if server.lacks_rows:
            server.mark(federation.sum("mark", round=round))
        server.step(federation.sum("gradients", server.select_sent(), round=round))
    return server


def test_rows_are_requested_again_after_a_lost_reply(sites) -> None:
    """With the third site's reply of round 1 its marks for round 2 are lost; the run
    has the bits of whole tables with the same reply lost."""
    settings = large(sites)
    lost = {("gradients", 1): (2,)}
    by_rows = Lossy([fedner.Site(site, settings) for site in sites], lost)
    server = rounds(by_rows, settings, 5)
    assert by_rows.calls == {"count": 0, "take_share": 0, "mark": 1, "gradients": 4}
    plain = Lossy([fedner.Site(site, settings) for site in sites], lost)
    for member in plain.members:
        member.tables = ()
    expected = rounds(plain, settings, 5, tables=())
    assert "mark" not in plain.calls
    assert_same(server.shared, expected.shared)
    assert_same(server._adam.state(), expected._adam.state())
    for sparse_member, dense_member in zip(by_rows.members, plain.members, strict=True):
        assert_same(sparse_member.private, dense_member.private)


def test_a_site_that_misses_the_marks_trains_on_its_earlier_rows(sites) -> None:
    """Its gradient counts in the rows that came; marks are asked for until all sites
    are back."""
    settings = large(sites)
    lost = {
        ("gradients", 1): (2,),
        ("gradients", 2): (2,),
        ("mark", 1): (2,),
        ("mark", 2): (2,),
    }
    federation = Lossy([fedner.Site(site, settings) for site in sites], lost)
    server = rounds(federation, settings, 5)
    assert federation.calls["mark"] == 2  # before rounds 0, 2 and 3
    assert [member.steps for member in federation.members] == [5, 5, 5]
    assert all(bool(torch.isfinite(value).all()) for value in server.shared.values())


def test_a_server_that_leaves_out_rows_learns_less(sites) -> None:
    """The same weight and counts, and the whole table's gradient in the rows that were
    asked for: nothing tells whether the site reads others."""
    settings = large(sites)
    sparse_site, dense_site = (
        fedner.Site(sites[0], settings),
        fedner.Site(sites[0], settings),
    )
    shared = values(sparse_site.shared)
    dense_site.tables = ()
    dense = dense_site.gradients(shared, round=0)
    rows_read = torch.nonzero(dense.tensors["words.hashed"].abs().sum(1)).flatten()
    rows_sent = torch.unique(torch.cat([rows_read[::2], torch.tensor([7])]))
    assert 1 < len(rows_sent) < len(rows_read)
    update = sparse_site.gradients(
        word_rows.select_rows(shared, {"words.hashed": rows_sent}), round=0
    )
    assert (update.weight, update.metrics) == (dense.weight, dense.metrics)
    assert torch.equal(
        update.tensors["words.hashed"], dense.tensors["words.hashed"][rows_sent]
    )
    assert_same(sparse_site.private, dense_site.private)


def test_marks_cover_the_rows_that_a_batch_reads(sites) -> None:
    """Against the gradient of a dense table: not zero there and nowhere else; and no
    two sites or steps have the same numbers."""
    settings = large(sites)
    member = fedner.Site(sites[0], settings)
    marks = member.mark({}, round=0).tensors["words.hashed.marks"]
    assert (marks.dtype, tuple(marks.shape)) == (torch.int32, (2048,))
    again = member.mark({}, round=0).tensors["words.hashed.marks"]
    assert torch.equal(marks, again)  # a request that comes again has the same reply
    restored = fedner.Site(sites[0], settings)
    restored.restore(member.state())
    assert torch.equal(marks, restored._mark_rows()["words.hashed.marks"])
    fresh = fedner.Site(sites[0], replace(settings, model=replace(LARGE, dropout=0.0)))
    assert not torch.equal(marks, fresh._mark_rows()["words.hashed.marks"])
    assert torch.equal(marks != 0, fresh._mark_rows()["words.hashed.marks"] != 0)
    fresh._backward(fresh._select_batch(0))
    gradient = fresh.shared["words.hashed"].grad
    assert gradient is not None
    assert torch.equal(marks != 0, gradient.abs().sum(1) > 0)
    assert marks.abs().max() > 2**20
    assert bool((marks < 0).any() and (marks > 0).any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"words.hashed.ids": torch.tensor([3, 3])},
            "numbers of rows, 0 to 2,047, ascending",
        ),
        ({"words.hashed.ids": torch.tensor([5, 3])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([-1, 3])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([3, 2048])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([[3, 4]])}, "ascending"),
        ({"words.hashed.ids": torch.tensor([3.0, 4.0])}, "expected torch.int64"),
        ({"words.hashed": torch.zeros(3, 4)}, r"expected shape \(2, 4\)"),
        ({"words.hashed.ids": None}, "'words.hashed.ids' is expected but not received"),
    ],
)
def test_invalid_row_numbers_are_refused(sites, change, message) -> None:
    member = fedner.Site(sites[0], large(sites))
    good = word_rows.select_rows(
        values(member.shared),
        {"words.hashed": torch.tensor([3, 4])},
    )
    before = values(member.shared)
    wrong = {n: v for n, v in (good | change).items() if v is not None}
    with pytest.raises(TrainingError, match=message):
        member.gradients(wrong, round=0)
    assert_same(before, values(member.shared))


def test_a_round_with_sparse_rows_sends_the_documented_bytes(sites) -> None:
    """A table of 20,000 rows of 50: 4 MB whole each way; by rows four bytes a row for
    the marks, and the union's rows."""
    settings = large(sites, model=replace(LARGE, hashed_words=20_000, word_dim=50))
    federation = Lossy([fedner.Site(site, settings) for site in sites], {})
    server = rounds(federation, settings, 3)
    table = 20_000 * 50 * 4
    other_bytes = nbytes(
        {n: v for n, v in server.shared.items() if n != "words.hashed"}
    )
    sent = [sizes for task, *sizes in federation.sent if task == "gradients"]
    assert len(sent) == 3
    for sent_bytes, received_bytes in sent:
        assert other_bytes < sent_bytes < other_bytes + table / 50
        assert (
            other_bytes + 4 * 20_000
            < received_bytes
            < other_bytes + 4 * 20_000 + table / 50
        )


# tensors that do not match: a server's at a site, a checkpoint's at both; nothing is cast

DTYPES = (torch.int8, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(
        TrainingError, match=rf"'b': expected torch.float32, got {dtype}"
    ):
        load_into(target, {"a": torch.ones(2), "b": torch.ones(2).to(dtype)})
    assert target["a"].tolist() == [0, 0]  # nor is a part taken
    with pytest.raises(TrainingError, match=r"'b': expected torch\.float32"):
        require_tensor({"b": torch.ones(2).to(dtype)}, "b", torch.float32, 2)
    with pytest.raises(TrainingError, match="'c' is expected but not received"):
        require_tensor({}, "c", torch.float32, 2)


@pytest.mark.parametrize("task", ["gradients", "train", "evaluate"])
def test_a_site_refuses_tensors_that_do_not_fit_its_model(sites, task) -> None:
    member = fedner.Site(sites[0], config(sites[:1]))
    member.share = 12
    good = values(member.shared)
    name = sorted(good)[0]
    wrong: list[dict[str, torch.Tensor]] = [
        *({**good, name: good[name].to(dtype)} for dtype in DTYPES),
        {**good, name: good[name][None]},
        {**good, "more": good[name]},
        {key: value for key, value in good.items() if key != name},
    ]
    for tensors in wrong:
        with pytest.raises(TrainingError, match=r"^tensor '") as caught:
            getattr(member, task)(tensors, round=0)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(good[n], member.shared[n]) for n in good)


def damaged(state: State) -> list[State]:
    """Yield states that are invalid although their checksums are correct."""
    name = sorted(state.tensors)[0]
    value = state.tensors[name]
    return [
        *(replace(state, tensors={**state.tensors, name: value.to(d)}) for d in DTYPES),
        replace(state, tensors={**state.tensors, name: value.reshape(1, 1, -1)}),
        replace(state, tensors={}),
        *(replace(state, facts={**state.facts, key: "x"}) for key in state.facts),
        *(replace(state, facts={**state.facts, key: []}) for key in state.facts),
        replace(state, facts={}),
    ]


def test_the_server_refuses_a_malformed_checkpoint_with_one_error(sites) -> None:
    tagger = distill.Config(model=MODEL, tags=sites[0].tags, seed=3)
    servers: list[Callable[[State | None], Any]] = [
        lambda state: fedner.Server(config(sites[:1]), state),
        lambda state: distill.Server(tagger, state, None),
    ]
    for make in servers:
        state = make(None).state()
        make(state)
        for wrong in damaged(state):
            with pytest.raises(
                ModelError, match="move this folder away and start again"
            ):
                make(wrong)


def test_a_site_refuses_a_malformed_checkpoint_with_one_error(sites) -> None:
    member = fedner.Site(sites[0], config(sites[:1]))
    member.share = 12
    member.gradients(values(member.shared), round=0)
    state = member.state()
    for wrong in damaged(state):
        restored = fedner.Site(sites[0], config(sites[:1]))
        with (
            pytest.raises(ModelError, match="move this folder away and start again"),
            restoring("here"),
        ):
            restored.restore(wrong)
