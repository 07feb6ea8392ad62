"""Distillation with heterogeneous tag sets, compared with plain loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_taggers import MODEL, NO_DROPOUT, assert_same, generated, values

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.seeds import Draws, rng_of, seed_of
from fednotes.core.tensors import load_into, select_prefix
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Tensors, Total, Update, compute_contribution
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.synthetic import generate
from fednotes.engines.inprocess import InProcess
from fednotes.methods import distill
from fednotes.methods.distill import compute_weighted_loss, pseudo_complete
from fednotes.metrics.spans import SpanCounts, TypeCounts
from fednotes.taggers.model import Losses
from fednotes.taggers.prompt_bart import PromptBartConfig
from fednotes.taggers.saving import build_model, load_model
from fednotes.taggers.token_classifier import TokenClassifierConfig

QUICK: dict[str, Any] = {
    "unannotated": "marginal",
    "batch_size": 4,
    "learning_rate": 0.03,
}


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return generated(30)


@pytest.fixture(scope="module")
def complete() -> list[SiteData]:
    return [
        site.complete for site in generate(num_sites=3, sentences_per_site=30, seed=5)
    ]


def test_a_rate_at_which_a_token_classifier_diverges_causes_a_warning() -> None:
    encoder = TokenClassifierConfig(encoder="nowhere")
    for model, rate, count in (
        (encoder, 3e-3, 1),
        (encoder, 1e-3, 0),
        (MODEL, 3e-3, 0),
    ):
        settings = distill.Config(model=model, learning_rate=rate)
        assert len(distill.METHOD.list_warnings(settings)) == count
        assert (
            not count
            or "0.003: a token classifier diverges"
            in distill.METHOD.list_warnings(settings)[0]
        )


def config(sites: list[SiteData], **changes: Any) -> distill.Config:
    base = distill.Config(
        model=MODEL, batch_size=8, rounds=2, seed=3, learning_rate=0.01
    )
    return distill.METHOD.configure(replace(base, **changes), sites)


def federate(sites, settings, **options):
    members = [distill.Site(site, settings) for site in sites]
    return members, distill.train(InProcess(members, **options), settings)


def test_bfloat16_only_rounds_the_gradients(sites) -> None:
    """Parameters stay in float32 and move in almost the same direction."""
    start = values(build_model(MODEL, config(sites).tags, 3).trainable())

    def move(precision: str) -> torch.Tensor:
        _, state = federate(sites, config(sites, rounds=1, precision=precision))
        ends = shared(state)
        assert all(value.dtype == torch.float32 for value in ends.values())
        return torch.cat([(ends[name] - start[name]).flatten() for name in ends])

    exact, rounded = move("float32"), move("bfloat16")
    assert not torch.equal(exact, rounded)
    assert float(torch.cosine_similarity(exact, rounded, dim=0)) > 0.9


def shared(state) -> dict[str, torch.Tensor]:
    return select_prefix("shared.", state.tensors)


def plain_training(
    data: SiteData, settings: distill.Config, start, round: int, corpus, loss
):
    """Train for epochs with torch's Adam in the ordinary way.

    corpus(model): what is trained on. loss: of a mini-batch, from the losses of its
    sentences.
    """
    model = build_model(settings.model, settings.tags, settings.seed)
    load_into(model.trainable(), start)
    prepared = corpus(model)
    adam = torch.optim.Adam(
        list(model.trainable().values()), lr=settings.learning_rate, fused=True
    )
    step = 0
    for epoch in range(int(settings.local_epochs)):
        rng = rng_of(settings.seed, "order", data.id, round, epoch)
        for batch in draw_epoch_batches(prepared.lengths, settings.batch_size, rng):
            torch.manual_seed(seed_of(settings.seed, "dropout", data.id, round, step))
            model.train()
            adam.zero_grad()
            loss(model.losses(prepared, batch), batch).backward()
            adam.step()
            step += 1
    return values(model.trainable())


def local_training(data: SiteData, settings: distill.Config, start, round: int = 0):
    """Train for one epoch on gold tags with a mean loss."""

    def loss(losses: Losses, batch: np.ndarray) -> torch.Tensor:
        return losses.source.mean()

    return plain_training(
        data, settings, start, round, lambda m: m.prepare(data.train), loss
    )


def test_equation_1_is_the_plain_mean_of_the_models(complete) -> None:
    """[tagsets eq 1] m_k = 1 / K, against local training written out and NumPy's mean."""
    settings = config(complete, rounds=1, weighting=False)
    _, state = federate(complete, settings)
    start = distill.make_initial_parameters(settings)
    trained = [local_training(site, settings, start) for site in complete]
    for name, value in shared(state).items():
        site_values = [t[name].double().numpy() for t in trained]
        assert np.array_equal(
            value.numpy(), (sum(site_values) / len(site_values)).astype(np.float32)
        ), name


def test_soft_targets_have_no_gradient_at_the_teacher_parameters(sites) -> None:
    """Fisher's identity at θ_t: why soft distillation takes no instance weights."""
    settings = config(sites, model=NO_DROPOUT, weighting=False, unannotated="soft")
    for data in sites:
        member = distill.Site(data, settings)
        member.begin(distill.make_initial_parameters(settings), round=0)
        corpus = member._begun[1]
        source, target = member.model.gradients(corpus, np.arange(corpus.sentences))
        assert float(target.norm()) < 1e-4 * float(source.norm(dim=1).sum())
        assert float(source.norm()) > 0


def test_aggregation_by_size_weighs_by_sentences(complete) -> None:
    """m_k = N_k / Σ N_j, by NumPy's average."""
    settings = config(complete, rounds=1, weighting=False, aggregation="size")
    members, state = federate(complete, settings)
    start = distill.make_initial_parameters(settings)
    trained = [local_training(site, settings, start) for site in complete]
    sizes = [member.num_examples for member in members]
    assert len(set(sizes)) > 1
    for name, value in shared(state).items():
        site_values = np.stack([t[name].double().numpy() for t in trained])
        np.testing.assert_allclose(
            value.numpy(),
            np.average(site_values, axis=0, weights=sizes),
            rtol=1e-6,
            atol=1e-7,
        )


def test_a_federation_of_one_site_equals_training_alone_bit_for_bit(complete) -> None:
    """A mean over one site is its value: rounds are epochs of the loop above."""
    settings = config(complete[:1], rounds=2, weighting=False)
    _, state = federate(complete[:1], settings)
    start = distill.make_initial_parameters(settings)
    for round in range(2):
        start = local_training(complete[0], settings, start, round)
    assert_same(shared(state), start)


@pytest.mark.parametrize("unannotated", ["pseudo", "soft", "marginal"])
def test_a_complete_tag_set_equals_plain_federated_averaging(
    complete, unannotated
) -> None:
    """[tagsets eq 5] T_k = T at every site: each way ends in plain federated averaging."""
    plain = config(complete, weighting=False, unannotated="outside")
    plain_config = config(complete, weighting=False, unannotated=unannotated)
    assert_same(
        federate(complete, plain_config)[1].tensors,
        federate(complete, plain)[1].tensors,
    )


def test_weights_of_1_give_the_unweighted_loss() -> None:
    """[tagsets eq 6] [tagsets eq 10] by hand: mean(w · source) + mean(target)."""
    losses = Losses(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 3.0]))
    ones, source, target = compute_weighted_loss(losses, np.ones(2), "pseudo")
    assert (float(ones), source, target) == (5.0, 3.0, 2.0)
    weighted, source, _ = compute_weighted_loss(losses, np.array([0.5, -1.0]), "pseudo")
    assert (float(weighted), source) == (-1.5 + 2.0, -1.5)
    assert float(compute_weighted_loss(losses, np.ones(2), "marginal")[0]) == 3.0


class OnlySums:
    """A federation that can only add, and remembers the requests."""

    def __init__(self, members, left_out: tuple[str, ...] = ()) -> None:
        self.members, self.left_out = members, left_out
        self.totals: dict[str, Total] = {}

    def sum(self, task, tensors=None, /, **options):
        replies = {
            m.id: getattr(m, task)(tensors or {}, **options) for m in self.members
        }
        counted = {name: r for name, r in replies.items() if name not in self.left_out}
        total = replace(Total.of(counted.values()), included=tuple(counted))
        self.totals[task] = total
        return total


def start_round(sites, left_out=(), **changes):
    settings = config(sites, model=NO_DROPOUT, **changes)
    members = [distill.Site(site, settings) for site in sites]
    federation = OnlySums(members, left_out)
    federation.sum("begin", distill.make_initial_parameters(settings), round=0)
    return settings, members, federation


def weighed(sites, **changes):
    """Return the federation of `begun` with the sites' weights for the next round."""
    settings, members, federation = start_round(sites, **changes)
    distill._update_weights(federation, federation.totals["begin"], 0)
    return settings, members, federation


def next_weights(member) -> np.ndarray:
    """Return w_{t+1}, with which the next round trains."""
    assert member._next is not None
    return member._next[1].copy()


def plain_weights(members, settings, included) -> list[np.ndarray]:
    """Compute eq. 11 and 12 in NumPy with every gradient in the open, sentence by
    sentence."""
    sources, targets = [], []
    for member in members:
        corpus = member._begun[1]
        parameter = member.parameters[member.model.transfer]
        source_weights, total = [], 0.0
        member.model.eval()
        for i in range(corpus.sentences):
            losses = member.model.losses(corpus, [i])
            for part, keep in ((losses.source, source_weights), (losses.target, None)):
                (g,) = torch.autograd.grad(
                    part.sum(), parameter, retain_graph=True, allow_unused=True,
                    materialize_grads=True,
                )  # fmt: skip
                if keep is None:
                    total = total + g.double().numpy().ravel()
                else:
                    keep.append(g.double().numpy().ravel())
        sources.append(np.stack(source_weights))
        targets.append(total / corpus.sentences)
    weights = []
    for k, source in enumerate(sources):
        others = sum(
            t for j, t in enumerate(targets) if j != k and members[j].id in included
        )
        cosine = (
            source @ others / np.linalg.norm(source, axis=1) / np.linalg.norm(others)
        )
        weights.append(settings.momentum + (1 - settings.momentum) * cosine)
    return weights


def test_equations_11_and_12_follow_from_sums_alone(sites) -> None:
    """[tagsets eq 12] The weights that a site gets from a total are those of Eq. 11 and
    12 computed in the open."""
    settings, members, _ = weighed(sites)
    for member, expected in zip(
        members, plain_weights(members, settings, [s.id for s in sites]), strict=True
    ):
        assert (member.weights == 1).all()  # this round still trains with w_t
        np.testing.assert_allclose(next_weights(member), expected, atol=2e-5)
        assert np.ptp(next_weights(member)) > 0.01


def test_a_sentence_without_a_gradient_keeps_its_weight(sites) -> None:
    """Its cosine is undefined; the others' weights are those of Eq. 12, from whatever
    they were: α more for each that a weight is above the 1 that `plain_weights` begins
    with."""
    settings, members, federation = start_round(sites)
    names, quiet = [s.id for s in sites], [0, 7]
    for member in members:
        member._directions[quiet] = 0
        member.weights = np.linspace(0.3, 1.7, member.num_examples)
    distill._update_weights(federation, federation.totals["begin"], 0)
    for member, first in zip(
        members, plain_weights(members, settings, names), strict=True
    ):
        before = np.linspace(0.3, 1.7, member.num_examples)
        expected = first + settings.momentum * (before - 1)
        expected[quiet] = before[quiet]
        np.testing.assert_allclose(next_weights(member), expected, atol=2e-5)


def test_a_site_that_is_not_in_the_sum_subtracts_nothing(sites) -> None:
    """Four sites, one's reply is lost: the others subtract their part, it does not."""
    four = [*sites, replace(sites[0], id="fourth", tags=sites[0].tags)]
    settings, members, _ = weighed(four, left_out=("fourth",))
    included = [s.id for s in sites]
    for member, expected in zip(
        members, plain_weights(members, settings, included), strict=True
    ):
        np.testing.assert_allclose(next_weights(member), expected, atol=2e-5)


def test_a_round_trains_with_the_weights_of_the_previous_round(sites) -> None:
    """Algorithm 1 computes w_{t+1} and trains with Eq. 10's w_t: round 0 is one without
    weights, round 1 is one with the weights that round 0 made."""
    settings, members, _ = weighed(sites)
    plain = [distill.Site(site, settings) for site in sites]
    start = distill.make_initial_parameters(settings)
    for member, reference in zip(members, plain, strict=True):
        weights = next_weights(member)
        assert np.array_equal(member.state().tensors["weights"].numpy(), weights)
        reference.begin(start, round=0)
        first = member.train({}, round=0)
        assert_same(first.tensors, reference.train({}, round=0).tensors)
        assert np.array_equal(member.weights, weights)
        late = distill.Site(member.data, settings)
        late.restore(member.state())
        for each in (member, late, reference):
            each.begin(start, round=1)
        reference.weights = weights
        second = [each.train({}, round=1).tensors for each in (member, late, reference)]
        assert_same(second[0], second[1])
        assert_same(second[0], second[2])
        assert not torch.equal(
            second[0]["crf.project.weight"], first.tensors["crf.project.weight"]
        )


def test_weights_survive_a_round_without_training(sites) -> None:
    settings, members, federation = weighed(sites)
    weights, member = next_weights(members[0]), members[0]
    # the same round again: nothing is due yet
    member.begin(distill.make_initial_parameters(settings), round=0)
    assert (member.weights == 1).all()
    distill._update_weights(federation, federation.totals["begin"], 0)
    members[1].begin(distill.make_initial_parameters(settings), round=1)
    assert not (members[1].weights == 1).all()
    assert weights.shape == member.weights.shape


def test_two_contributors_are_refused_on_both_sides(sites) -> None:
    """With two, the difference is the other site's own gradient."""
    settings = config(sites)
    members = [distill.Site(site, settings) for site in sites[:2]]
    with pytest.raises(RefusedError, match="need 3 sites"):
        distill.train(InProcess(members), settings)
    # before anything is trained
    with pytest.raises(RefusedError, match="need 3 sites"):
        config(sites[:2])
    _, members, federation = start_round(sites)
    total = federation.totals["begin"]
    for names, contributing in (
        ("discharge,reports", 3),
        ("discharge,reports,posts", 2),
    ):
        with pytest.raises(RefusedError, match="2 sites"):
            members[0].update_weights(
                total.tensors, round=0, included=names, contributing=contributing
            )


def test_a_site_without_contribution_is_not_counted(sites, complete) -> None:
    """One site annotates all types: of the two others each would receive the other's
    vector. And weights rest until a round distils."""
    mixed = [replace(complete[0], id="all"), *sites[1:]]
    for job_sites, changes, contributing in ((mixed, {}, 2), (sites, {"warmup": 1}, 0)):
        _, members, federation = weighed(job_sites, **changes)
        assert federation.totals["begin"].metrics["contributing"] == contributing
        assert "update_weights" not in federation.totals
        assert all(member._next is None for member in members)


def test_a_site_with_one_sentence_has_a_target_gradient_under_secret_draws(
    sites,
) -> None:
    """A half of an odd number of sentences is rounded up, so the only sentence is
    always in it."""
    member = distill.Site(sites[0], config(sites), draws=Draws.of_secret(bytes(32)))
    assert member.num_examples == 45
    assert (
        member.count_covered("begin")["batch"]
        == member._draw_counted_sentences(0).sum()
        == 23
    )
    note = Document("1", "Aspirin helps", (Span(0, 7, "Drug"),))
    small, settings = replace(sites[0], train=(note,)), config(sites, model=NO_DROPOUT)
    gradients = []
    for draws in (Draws.of_secret(bytes(32)), Draws(3)):
        member = distill.Site(small, settings, draws=draws)
        assert member.num_examples == 1
        update = member.begin(distill.make_initial_parameters(settings), round=0)
        gradients.append(update.tensors["target_gradient"])
    assert gradients[0].isfinite().all()
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("epochs", "batches"), [(0.01, 1), (0.5, 3), (1, 6), (1.5, 9), (2, 12)]
)
def test_a_partial_epoch_has_the_matching_number_of_batches(
    sites, epochs: float, batches: int
) -> None:
    """45 sentences in batches of 8 are 6; the first ones of the epoch's own order."""
    settings = config(sites, weighting=False, local_epochs=epochs, batch_size=8)
    member = distill.Site(sites[0], settings)
    assert member.num_examples == 45
    lengths = member.train_set.lengths
    batches_drawn = list(member._iterate_batches(member.train_set, 3))
    orders = [
        draw_epoch_batches(
            lengths, 8, rng_of(settings.seed, "order", member.id, 3, epoch)
        )
        for epoch in (0, 1)
    ]
    expected = [*orders[0], *orders[1]][:batches]
    assert len(batches_drawn) == len(expected) == batches
    assert all(
        np.array_equal(a, b) for a, b in zip(batches_drawn, expected, strict=True)
    )
    covered = member.count_covered("train")
    assert covered["steps"] == batches
    least = np.sort(lengths)[: 45 - 8 * max(0, 6 - batches)].sum()
    assert (
        covered["tokens"]
        == least
        <= lengths[np.unique(np.concatenate(batches_drawn))].sum()
    )
    member.begin(distill.make_initial_parameters(settings), round=0)
    metrics = member.train({}, round=0).metrics
    # the loss is the mean over what was seen, times these
    assert metrics["examples"] == 45
    assert 0 < metrics["source"] / 45 < 200


def test_local_training_is_two_weighted_epochs_on_completed_annotation(
    sites,
) -> None:
    """Site.train against a loop written out: predicted mentions added by hand, w_i on
    the source loss alone, E_loc = 2; and what a round of warm-up trains on instead."""
    settings = config(
        sites, model=NO_DROPOUT, weighting=False, local_epochs=2, warmup=1
    )
    data, start = sites[0], talkative(distill.make_initial_parameters(settings))
    known = set(data.tags.types)
    for round in (0, 1):
        member = distill.Site(data, settings)
        member.begin(start, round=round)
        member.weights = np.linspace(0.2, 1.8, member.num_examples)
        weights = member.weights.copy()
        update = member.train({}, round=round)

        def completed(model, round=round):
            corpus = model.prepare(data.train)
            merged = [
                replace(
                    gold,
                    spans=tuple(sorted((*gold.spans, *foreign(gold, guess, known)))),
                )
                for gold, guess in zip(data.train, model.predict(corpus), strict=True)
            ]
            return model.annotate(corpus, merged if round else data.train, known)

        def loss(
            losses: Losses, batch: np.ndarray, round=round, weights=weights
        ) -> torch.Tensor:
            mean = (
                torch.tensor(weights[batch], dtype=torch.float32) * losses.source
            ).mean()
            return mean + losses.target.mean() if round else mean

        expected = plain_training(data, settings, start, round, completed, loss)
        assert_same(update.tensors, expected)


def test_given_test_types_are_scored(sites, complete) -> None:
    """The counts of finish against a count of the complete test annotation by hand."""
    types = ("Disease", "Drug", "ADE")
    data = replace(sites[0], test=complete[0].test, test_types=types)
    settings = config(sites, model=NO_DROPOUT, weighting=False)
    member = distill.Site(data, settings)
    metrics = member.finish(distill.make_initial_parameters(settings)).metrics
    support = sum(s.label in types for d in complete[0].test for s in d.spans)
    by_type = [score["support"] for score in member.scores["by_type"].values()]
    assert sum(by_type) == support > 0
    assert any("ADE" in name for name in metrics)


def talkative(start):
    """Return initial values with an output layer that predicts many mentions."""
    loud = torch.randn(
        start["crf.project.weight"].shape, generator=torch.Generator().manual_seed(1)
    )
    return {**start, "crf.project.weight": 20 * loud}


def foreign(gold: Document, guess: Document, known: set[str]) -> list[Span]:
    """Return predicted mentions of other types that overlap no gold mention."""
    return [
        s
        for s in guess.spans
        if s.label not in known
        and not any(s.start < g.end and g.start < s.end for g in gold.spans)
    ]


def test_the_summed_target_gradient_is_the_mean_times_the_sentences(sites) -> None:
    """[tagsets alg 2] sums over i where Eq. 7 takes the mean."""
    members, others = (
        start_round(sites)[1],
        start_round(sites, target_gradient="sum")[1],
    )
    for member, summed in zip(members, others, strict=True):
        mean, total = (m._sent.tensors["target_gradient"] for m in (member, summed))
        torch.testing.assert_close(total, mean * member.num_examples)


def test_instance_weights_never_leave_the_site(sites) -> None:
    """No reply is as long as the training set, and no metric is a weight's."""
    _, members, federation = weighed(sites)
    federation.sum("train", round=0)
    size = members[0].parameters[members[0].model.transfer].numel()
    assert {k: v.numel() for k, v in federation.totals["begin"].tensors.items()} == {
        "target_gradient": size
    }
    assert not federation.totals["update_weights"].tensors
    assert not federation.totals["update_weights"].metrics
    assert set(federation.totals["train"].metrics) == {
        "loss", "source", "target", "examples", "pseudo"
    }  # fmt: skip


def test_pseudo_annotation_completes_the_example_of_figure_2() -> None:
    """Clozapine induced akathisia in children with schizophrenia: ADE from the
    platform's own annotation, Drug and Disease from the global model, whose own ADE is
    not taken."""
    text = "Clozapine induced akathisia in children with schizophrenia."
    at = {
        word: (text.index(word), text.index(word) + len(word))
        for word in text[:-1].split()
    }
    gold = Document("1", text, (Span(*at["akathisia"], "ADE"),))
    guess = (
        Span(*at["Clozapine"], "Drug"),
        Span(*at["children"], "ADE"),  # of a type that the platform annotates itself
        Span(*at["schizophrenia"], "Disease"),
    )
    completed = pseudo_complete(gold, replace(gold, spans=guess), {"ADE"})
    assert completed.spans == (guess[0], gold.spans[0], guess[2])


def test_gold_mentions_win_over_overlapping_predictions() -> None:
    gold = Document("1", "aspirin induced asthma", (Span(0, 15, "ADE"),))
    guess = (Span(0, 7, "Drug"), Span(16, 22, "Disease"))
    completed = pseudo_complete(gold, replace(gold, spans=guess), {"ADE"})
    assert completed.spans == (Span(0, 15, "ADE"), Span(16, 22, "Disease"))


def test_predictions_stay_where_mentions_may_overlap() -> None:
    gold = Document("1", "aspirin induced asthma", (Span(0, 15, "ADE"),))
    guess = replace(gold, spans=(Span(0, 7, "Drug"), Span(0, 15, "ADE")))
    completed = pseudo_complete(gold, guess, {"ADE"}, overlaps=True)
    assert completed.spans == (Span(0, 7, "Drug"), Span(0, 15, "ADE"))


def test_adjacent_mentions_do_not_overlap() -> None:
    """Half-open offsets: one that ends where gold begins stays, one that begins where
    it ends too; one character more, and the gold one wins."""
    gold = Document("1", "abcdefgh", (Span(2, 5, "ADE"),))
    beside = (Span(0, 2, "Drug"), Span(5, 8, "Drug"))
    completed = pseudo_complete(gold, replace(gold, spans=beside), {"ADE"})
    assert completed.spans == (beside[0], gold.spans[0], beside[1])
    over = (Span(0, 3, "Drug"), Span(4, 8, "Drug"))
    assert pseudo_complete(gold, replace(gold, spans=over), {"ADE"}).spans == gold.spans


def test_pseudo_annotation_equals_the_predictions_of_the_global_model(sites) -> None:
    """[tagsets eq 4] by predicting and merging in the open, from a model that says a
    lot."""
    settings = config(sites, model=NO_DROPOUT, weighting=False)
    start = talkative(distill.make_initial_parameters(settings))
    model = build_model(settings.model, settings.tags, settings.seed)
    load_into(model.trainable(), start)
    for data in sites:
        member = distill.Site(data, settings)
        member.begin(start, round=0)
        guesses = model.predict(model.prepare(data.train))
        pairs, own_types = zip(data.train, guesses, strict=True), set(data.tags.types)
        assert (
            member.pseudo == sum(len(foreign(*pair, own_types)) for pair in pairs) > 0
        )


def test_the_distribution_of_weights_is_logged_at_the_site(
    sites, tmp_path: Path
) -> None:
    """One line for each round, and quantiles of the site's own weights in it."""
    settings = config(sites, rounds=2)
    members = [
        distill.Site(site, settings, directory=tmp_path / site.id) for site in sites
    ]
    distill.train(InProcess(members), settings)
    for member in members:
        text = (tmp_path / member.id / "weights.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["round"] for line in lines] == [0, 1]
        low, *_, high = lines[-1]["weight_quantiles"]
        assert low == pytest.approx(member.weights.min(), abs=1e-4)
        assert high == pytest.approx(member.weights.max(), abs=1e-4)


@pytest.mark.slow
def test_the_best_model_is_kept_if_requested(sites) -> None:
    """By F1 on the validation data, against the highest of the committed rounds."""
    settings = config(sites, rounds=8, weighting=False, select="best", **QUICK)
    members = [distill.Site(site, settings) for site in sites]
    judged: list[tuple[float, int]] = []
    engine = InProcess(
        members,
        observer=lambda result: judged.append(
            (result.metrics["valid_f1"], result.round)
        ),
    )
    state = distill.train(engine, settings)
    best_f1, best_round = max(judged)
    assert state.facts["best"] == best_f1 > 0
    short = config(sites, rounds=best_round + 1, weighting=False, **QUICK)
    _, again = federate(sites, short)
    for name, value in shared(again).items():
        assert torch.equal(value, state.tensors[f"best.{name}"])


class Scripted(distill.Site):
    """A site with given validation counts: so many of ten mentions are found, by
    round."""

    true_positives: ClassVar[tuple[int, ...]] = (2, 9, 9, 5)

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        load_into(self.parameters, tensors)
        right = TypeCounts(gold=10, predicted=10, strict=self.true_positives[round])
        return Update(metrics=SpanCounts({"Drug": right}).to_metrics())


@pytest.mark.parametrize(("select", "rounds"), [("best", 3), ("last", 4)])
def test_sites_and_job_end_with_the_selected_model(
    sites, tmp_path, select, rounds
) -> None:
    """The F1 of four rounds is 0.2, 0.9, 0.9 and 0.5; the later of two equal models is
    better.

    The expected model is that of a plain run that ends after the selected round.
    """
    settings = config(sites, rounds=4, weighting=False, select=select, **QUICK)
    members = [Scripted(site, settings, directory=tmp_path / site.id) for site in sites]
    state = distill.train(InProcess(members), settings)

    _, plain = federate(sites, config(sites, rounds=rounds, weighting=False, **QUICK))
    selected = shared(plain)
    for member in members:
        assert_same(values(member.model.trainable()), selected)
        assert_same(
            values(load_model(tmp_path / member.id / "model").trainable()), selected
        )
    distill.METHOD.save_model(settings, state, tmp_path / "job")
    assert_same(values(load_model(tmp_path / "job").trainable()), selected)


def test_rounds_are_evaluated_at_the_period_and_at_the_end(sites) -> None:
    """Of five rounds with `evaluate_every = 2` the second, the fourth and the last one
    are."""
    settings = config(sites, rounds=5, evaluate_every=2, weighting=False, **QUICK)
    judged: list[int] = []

    class Noting(distill.Site):
        def evaluate(self, tensors: Tensors, *, round: int) -> Update:
            judged.append(round)
            return super().evaluate(tensors, round=round)

    evaluations = []
    engine = InProcess(
        [Noting(site, settings) for site in sites],
        observer=lambda result: evaluations.append(
            (result.evaluated, "valid_f1" in result.metrics)
        ),
    )
    distill.train(engine, settings)
    assert judged == [1] * 3 + [3] * 3 + [4] * 3
    assert evaluations == [(n in (1, 3, 4), n in (1, 3, 4)) for n in range(5)]


def test_a_restored_site_has_its_saved_state(sites) -> None:
    """Weights, history and the number of rounds, whether or not the next weights are in
    use."""
    _, members, _ = weighed(sites)
    member = members[0]
    for trained in (False, True):
        if trained:
            member.train({}, round=0)
        saved = member.state()
        assert not np.all(saved.tensors["weights"].numpy() == 1)
        again = distill.Site(sites[0], member.config)
        again.restore(saved)
        restored = again.state()
        assert_same(restored.tensors, saved.tensors)
        assert (restored.round, restored.facts) == (saved.round, saved.facts)
        assert (restored.round, len(restored.facts["history"])) == (int(trained), 1)


@pytest.mark.slow
def test_the_global_model_predicts_types_that_a_site_never_annotated(
    sites, tmp_path
) -> None:
    """Saved at a site, loaded again: all types, some of them predicted there."""
    larger = replace(
        MODEL, hashed_words=512, word_dim=24, cnn_filters=32, lstm_units=16
    )
    settings = config(sites, rounds=10, weighting=False, model=larger, **QUICK)
    members = [
        distill.Site(site, settings, directory=tmp_path / site.id) for site in sites
    ]
    distill.train(InProcess(members), settings)
    model = load_model(tmp_path / sites[0].id / "model")
    assert set(model.tagset.types) == {t for site in sites for t in site.tags.types}
    foreign = [
        span.label
        for site in sites
        for document in model.predict(site.test)
        for span in document.spans
        if span.label not in site.tags.types
    ]
    assert foreign


def test_clipping_and_normalising_of_weights_are_optional(sites) -> None:
    member = distill.Site(
        sites[0], config(sites, clip_weights=True, normalise_weights=True)
    )
    member.weights = np.linspace(-1, 1, member.num_examples)
    weights = member._compute_effective_weights()
    expected = np.maximum(np.linspace(-1, 1, member.num_examples), 0)
    np.testing.assert_allclose(weights, expected / expected.mean())
    member.weights[:] = 0.0
    # by hand: one positive weight, so it counts n times
    member.weights[:3] = (-0.3, -0.1, 0.1)
    assert member._compute_effective_weights().tolist() == pytest.approx(
        [0, 0, member.num_examples] + [0] * (member.num_examples - 3)
    )
    member.weights[:] = -1.0
    assert not member._compute_effective_weights().any()
    plain = distill.Site(sites[0], config(sites))
    plain.weights = member.weights
    assert np.array_equal(plain._compute_effective_weights(), member.weights)


def test_a_pointer_model_alone_has_label_words_for_its_own_types(sites) -> None:
    """The job names every type's words; a model refuses those of a type that it does
    not have."""
    words = {label: label.lower() for label in config(sites).tags.types}
    settings = replace(config(sites), model=PromptBartConfig(label_words=words))
    for site, site_config in zip(
        sites, distill.METHOD.configure_alone(settings, sites), strict=True
    ):
        assert isinstance(site_config.model, PromptBartConfig)
        assert site_config.model.label_words == {
            label: label.lower() for label in site.tags.types
        }
        assert len(site_config.model.label_words) < len(words)


def test_a_site_without_mentions_of_its_types_participates(sites) -> None:
    """Its model counts in the mean like the others', after training on sentences of O
    alone.

    The expected mean is NumPy's, of models that are trained here one by one.
    """
    bare = replace(sites[0], train=tuple(replace(d, spans=()) for d in sites[0].train))
    members = [bare, *sites[1:]]
    _, state = federate(members, config(sites, rounds=2))
    assert all(torch.isfinite(v).all() for v in shared(state).values())

    plain = config(sites, rounds=1, weighting=False, unannotated="outside")
    _, state = federate(members, plain)
    start = distill.make_initial_parameters(plain)
    trained = [local_training(site, plain, start) for site in members]
    for name, value in shared(state).items():
        site_values = np.stack([t[name].double().numpy() for t in trained])
        np.testing.assert_allclose(
            value.numpy(), site_values.mean(0), rtol=1e-6, atol=1e-7
        )
    assert any(not torch.equal(start[name], trained[0][name]) for name in start)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"momentum": 1.0}, "momentum"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"unannotated": "marginal"}, "no target loss"),
        ({"unannotated": "soft"}, "target gradient is zero"),
        ({"normalise_weights": True}, "set clip_weights = true"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_impossible_settings_are_refused(
    sites, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        distill.Config(**changes)
    settings = replace(config(sites), tags=TagSet(("Weather",)))
    with pytest.raises(ConfigError, match=r"annotates .* complete tag set is Weather"):
        distill.Site(sites[0], settings)


def test_a_total_minus_an_own_contribution_leaves_the_others() -> None:
    """Bitwise for integers that float64 holds; the identity that Eq. 11 rests on."""
    a = Update({"g": torch.tensor([1.5, -2.0])}, 3)
    b = Update({"g": torch.tensor([0.25, 8.0])}, 2)
    others = Total.of((a, b)).tensors["g"] - compute_contribution(a)["g"]
    assert torch.equal(others, torch.tensor([0.5, 16.0], dtype=torch.float64))
