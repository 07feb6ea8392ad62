"""Partial annotation, compared with enumeration of every tag sequence and autograd.

`test_partial_tagger.py` has the same through a whole tagger.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import Enumerated, computing, masked
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.types import Scheme, TagSet
from fednotes.data.tags import find_allowed_transitions
from fednotes.taggers.crf import CRF
from fednotes.taggers.partial import (
    compute_source_and_target_loss,
    compute_transfer_gradients,
    find_allowed_tags,
    mark_unknown_tags,
    require_types,
)

SCHEMES: tuple[Scheme, ...] = ("BIO", "BIOES", "IO")
on_both_backends = pytest.mark.parametrize("backend", ["numba", "torch"])


# ---- the independent program: enumerate all sequences --------------------------------


def log_sum(values: np.ndarray) -> float:
    return float(np.logaddexp.reduce(values))


def agrees(
    path: tuple[int, ...], tags: list[int], names: tuple[str, ...], known: set[str]
) -> bool:
    """Return whether a sequence has the same mentions of the known types as `tags`."""
    type_of = [name[2:] for name in names]
    pairs = ((type_of[a], type_of[b], a == b) for a, b in zip(path, tags, strict=True))
    return all(same if b in known else a not in known for a, b, same in pairs)


def legal(path: tuple[int, ...], names: tuple[str, ...], scheme: Scheme) -> bool:
    """Return whether neighbouring tags follow the scheme's rules, by their names."""
    if scheme == "IO":
        return True
    for before, after in itertools.pairwise(["O", *(names[i] for i in path), "O"]):
        opened = before[0] in "BI" and (scheme == "BIOES" or after[0] in "IE")
        if after[0] in "IE" and not (opened and before[2:] == after[2:]):
            return False
        if after[0] not in "IE" and scheme == "BIOES" and before[0] in "BI":
            return False
    return True


@dataclass
class Sentence:
    """All legal sequences of one sentence, and which agree with what is annotated."""

    paths: np.ndarray  # (paths, tokens)
    scores: np.ndarray
    agree: np.ndarray
    own_row: int  # the row of the annotation itself

    @classmethod
    def of(
        cls, crf: CRF, x: np.ndarray, tags: list[int], tagset: TagSet, known: set[str]
    ):
        every = Enumerated.of(x, *masked(crf))
        paths = [tuple(path) for path in every.paths.tolist()]
        free = itertools.product(range(len(tagset.tags)), repeat=len(tags))
        assert paths == [
            path for path in free if legal(path, tagset.tags, tagset.scheme)
        ]
        agree = [agrees(path, tags, tagset.tags, known) for path in paths]
        return cls(every.paths, every.scores, np.array(agree), paths.index(tuple(tags)))

    def q(self) -> np.ndarray:
        """Return the posterior (paths,) of the sequences that agree, and 0
        elsewhere."""
        inside = self.scores[self.agree]
        return np.where(self.agree, np.exp(self.scores - log_sum(inside)), 0.0)

    def parts(self, q: np.ndarray | None = None) -> tuple[float, float]:
        """-log of the summed probability of what agrees; -E_q[log p(y | agrees)], or of
        `own`."""
        within = log_sum(self.scores[self.agree])
        expected = self.scores[self.own_row] if q is None else (q * self.scores).sum()
        return log_sum(self.scores) - within, within - expected


@dataclass
class Case:
    """A CRF and a batch with annotation; teacher: another CRF of the same tag set."""

    tagset: TagSet
    known: set[str]
    crf: CRF
    teacher: CRF
    x: Tensor
    tags: Tensor
    lengths: Tensor

    @property
    def allowed(self) -> Tensor:
        return find_allowed_tags(self.tags, self.tagset, self.known)

    def sentences(self, crf: CRF | None = None) -> list[Sentence]:
        rows = enumerate(self.lengths.tolist())
        return [
            Sentence.of(
                crf or self.crf,
                self.x[n, :length].detach().numpy(),
                self.tags[n, :length].tolist(),
                self.tagset,
                self.known,
            )
            for n, length in rows
        ]


def case(
    scheme: Scheme = "BIO",
    known: str = "X",
    types: str = "XY",
    lengths: tuple[int, ...] = (3, 1, 4),
    seed: int = 0,
    backend: str = "numba",
    scale: float = 2.0,
) -> Case:
    """Return random scores and a random legal annotation; padding holds NaN."""
    rng = np.random.default_rng(seed)
    tagset = TagSet(tuple(types), scheme)
    size, longest = len(tagset.tags), max(lengths)
    crfs = []
    for _ in range(2):
        crf = CRF(size, *find_allowed_transitions(tagset)).double()
        computing(crf, backend)
        with torch.no_grad():
            for parameter in crf.parameters():
                parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
        crfs.append(crf)
    x = rng.normal(0, scale, (len(lengths), longest, size))
    tags = rng.integers(0, size, (len(lengths), longest))
    for n, length in enumerate(lengths):
        x[n, length:] = np.nan
        while not legal(tuple(tags[n, :length].tolist()), tagset.tags, scheme):
            tags[n, :length] = rng.integers(0, size, length)
    tensors = torch.tensor(x), torch.tensor(tags), torch.tensor(lengths)
    return Case(tagset, set(known), *crfs, *tensors)


# ---- what a token may be -------------------------------------------------------------


def test_allowed_tags_equal_those_worked_out_by_hand() -> None:
    """O B-X I-X B-Y I-Y: with X known a token of X is fixed, any other is O or of Y."""
    tags, tagset = torch.tensor([[0, 1, 2], [3, 4, 0]]), TagSet(("X", "Y"))
    free, b, i = [1, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]
    expected = torch.tensor([[free, b, i], [free, free, free]]).bool()
    assert torch.equal(find_allowed_tags(tags, tagset, ["X"]), expected)
    assert torch.equal(
        find_allowed_tags(tags, tagset, ["Y", "X"]), nn.functional.one_hot(tags, 5) == 1
    )
    assert bool(find_allowed_tags(tags, tagset, []).all())
    assert mark_unknown_tags(tags, tagset, {"X"}).tolist() == [
        [False] * 3,
        [True, True, False],
    ]
    assert not mark_unknown_tags(tags, tagset, {"X", "Y"}).any()


def test_an_unknown_entity_type_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'Drugs' is not in the tag set: did you mean 'Drug'"
    ):
        require_types(["Drugs"], TagSet(("ADR", "Drug")))
    with pytest.raises(ConfigError, match="'Z'"):
        find_allowed_tags(torch.tensor([0]), TagSet(("X",)), {"Z", "X"})


# ---- equal to enumeration ------------------------------------------------------------


@on_both_backends
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("known", ["", "X", "Y"])
def test_source_and_target_losses_equal_enumeration(
    scheme: Scheme, known: str, backend: str
) -> None:
    """source, target (hard and soft) and posteriors: sums over all legal sequences that
    agree."""
    c = case(scheme, known, backend=backend)
    source, target = compute_source_and_target_loss(
        c.crf, c.x, c.tags, c.allowed, c.lengths
    )
    soft = c.teacher.compute_posterior(c.x, c.lengths, c.allowed)
    same, of_soft = compute_source_and_target_loss(
        c.crf, c.x, c.tags, c.allowed, c.lengths, soft
    )
    full = c.crf._compute_losses(c.x, [soft], c.lengths)[0]
    torch.testing.assert_close(same, source)
    size = len(c.tagset.tags)
    for n, (student, teacher) in enumerate(
        zip(c.sentences(), c.sentences(c.teacher), strict=True)
    ):
        expected = student.parts()
        assert source[n].item() == pytest.approx(expected[0], abs=1e-9)
        assert target[n].item() == pytest.approx(expected[1], abs=1e-9)
        q = teacher.q()
        expected = student.parts(q)
        assert of_soft[n].item() == pytest.approx(expected[1], abs=1e-9)
        assert full[n].item() == pytest.approx(sum(expected), abs=1e-9)
        hot = np.eye(size)[teacher.paths]
        unary, pairs = np.einsum("p,ptj->tj", q, hot), np.zeros((size, size))
        pairs += np.einsum("p,pti,ptj->ij", q, hot[:, :-1], hot[:, 1:])
        np.testing.assert_allclose(soft[0][n, : len(unary)], unary, atol=1e-9)
        np.testing.assert_allclose(soft[1][n], pairs, atol=1e-9)
        assert not soft[0][n, len(unary) :].any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    scheme=st.sampled_from(SCHEMES),
    known=st.sampled_from(["", "X", "Y", "XY"]),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.1, 3.0, 200.0]),  # the last: in log-space
)
def test_random_lattices_equal_enumeration(
    scheme: Scheme, known: str, lengths: tuple[int, ...], seed: int, scale: float
) -> None:
    """As above; and the annotation itself, and that with O for what was added, always
    agree."""
    c = case(scheme, known, lengths=lengths, seed=seed, scale=scale)
    source, target = compute_source_and_target_loss(
        c.crf, c.x, c.tags, c.allowed, c.lengths
    )
    without = c.tags.masked_fill(mark_unknown_tags(c.tags, c.tagset, c.known), 0)
    assert bool(c.allowed.gather(2, c.tags[..., None]).all())
    assert bool(c.allowed.gather(2, without[..., None]).all())
    c.crf.loss(c.x, without, c.lengths)  # raises where the scheme forbids it
    total = c.crf.loss(c.x, c.tags, c.lengths)
    for n, sentence in enumerate(c.sentences()):
        assert [source[n].item(), target[n].item()] == pytest.approx(
            sentence.parts(), abs=1e-9, rel=1e-9
        )
    torch.testing.assert_close(source + target, total, atol=1e-9, rtol=1e-12)


@on_both_backends
@pytest.mark.parametrize("soft", [False, True])
def test_gradients_equal_finite_differences(soft: bool, backend: str) -> None:
    """Central differences of both parts, by emissions and by the CRF's scores."""
    c = case("BIOES", lengths=(3, 2), backend=backend)
    x = c.x.nan_to_num(0.0).requires_grad_()
    q = c.teacher.compute_posterior(x, c.lengths, c.allowed) if soft else None

    def parts(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return compute_source_and_target_loss(c.crf, x, c.tags, c.allowed, c.lengths, q)

    # gradcheck shifts them in place
    inputs = (x, c.crf.start, c.crf.transitions, c.crf.end)
    assert torch.autograd.gradcheck(parts, inputs)
    if q is not None:
        assert torch.autograd.gradcheck(
            lambda x, *_: c.crf._compute_losses(x, [q], c.lengths)[0], inputs
        )


# ---- identities ----------------------------------------------------------------------


def _gradient(loss: Tensor, x: Tensor, crf: CRF) -> list[Tensor]:
    return list(
        torch.autograd.grad(loss.sum(), [x, *crf.parameters()], retain_graph=True)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_step_equals_a_step_of_expectation_maximisation(scheme: Scheme) -> None:
    """Fisher's identity: with teacher = student, ∇ of the full soft loss is ∇ of
    source, and ∇ of target 0; the target is the posterior's entropy, enumerated."""
    c = case(scheme, seed=3)
    x = c.x.nan_to_num(0.0).requires_grad_()
    q = c.crf.compute_posterior(x, c.lengths, c.allowed)
    source, target = compute_source_and_target_loss(
        c.crf, x, c.tags, c.allowed, c.lengths, q
    )
    full = c.crf._compute_losses(x, [q], c.lengths)[0]
    pairs = zip(_gradient(full, x, c.crf), _gradient(source, x, c.crf), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    for value in _gradient(target, x, c.crf):
        assert value.abs().max() < 1e-10
    for n, sentence in enumerate(c.sentences()):
        p = sentence.q()[sentence.q() > 0]
        assert target[n].item() == pytest.approx(-(p * np.log(p)).sum(), abs=1e-9)
    with torch.no_grad():  # nothing is kept for a backward pass then
        again = compute_source_and_target_loss(
            c.crf, x, c.tags, c.allowed, c.lengths, q
        )
    torch.testing.assert_close(again, (source.detach(), target.detach()))


def test_a_certain_teacher_equals_a_hard_target() -> None:
    c = case("BIOES", seed=1)
    sure = 1e4 * nn.functional.one_hot(c.tags, len(c.tagset.tags)).double()
    soft = c.teacher.compute_posterior(sure, c.lengths, c.allowed)
    ours = compute_source_and_target_loss(
        c.crf, c.x, c.tags, c.allowed, c.lengths, soft
    )
    for a, b in zip(
        ours,
        compute_source_and_target_loss(c.crf, c.x, c.tags, c.allowed, c.lengths),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("form", ["allowed", "nothing"])
def test_without_unknown_types_the_target_loss_is_0(form: str) -> None:
    """source is the ordinary loss bit for bit, target 0 without a graph, soft or not."""
    c = case(known="XY")
    x = c.x.nan_to_num(0.0).requires_grad_()
    soft = c.teacher.compute_posterior(x, c.lengths, c.allowed)
    allowed = c.allowed if form == "allowed" else None
    for q in (None, soft):
        source, target = compute_source_and_target_loss(
            c.crf, x, c.tags, allowed, c.lengths, q
        )
        assert torch.equal(source, c.crf.loss(x, c.tags, c.lengths))
        assert torch.equal(target, torch.zeros(3, dtype=torch.float64))
        assert source.requires_grad
        assert not target.requires_grad


def test_without_known_types_the_source_loss_is_0() -> None:
    """Nothing is annotated: source and its gradient are exactly 0, target is the whole
    loss."""
    c = case(known="")
    x = c.x.nan_to_num(0.0).requires_grad_()
    source, target = compute_source_and_target_loss(
        c.crf, x, c.tags, c.allowed, c.lengths
    )
    assert not source.any()
    assert torch.equal(target, c.crf.loss(x, c.tags, c.lengths))
    assert all(not value.any() for value in _gradient(source, x, c.crf))


@pytest.mark.parametrize("known", ["", "X", "XY"])
@pytest.mark.parametrize("soft", [False, True])
def test_transfer_gradients_equal_those_of_a_loop(known: str, soft: bool) -> None:
    """One sentence after the other through autograd, by the projection's weight."""
    c = case("BIOES", known, lengths=(4, 2, 1, 3), seed=5)
    torch.manual_seed(0)
    project = nn.Linear(6, len(c.tagset.tags)).double()
    features = torch.randn(4, 4, 6, dtype=torch.float64)
    q = c.teacher.compute_posterior(c.x, c.lengths, c.allowed) if soft else None
    arguments = c.crf, project, features, c.tags, c.allowed, c.lengths, q
    with torch.no_grad():
        each, total = compute_transfer_gradients(*arguments)
    assert all(p.grad is None for p in [*project.parameters(), *c.crf.parameters()])
    summed = torch.zeros_like(total)
    for n, length in enumerate(c.lengths.tolist()):
        row = slice(n, n + 1)
        own_targets = None if q is None else (q[0][row, :length], q[1][row])
        source, target = compute_source_and_target_loss(
            c.crf,
            project(features[row, :length]),
            c.tags[row, :length],
            c.allowed[row, :length],
            c.lengths[row],
            own_targets,
        )
        (expected,) = torch.autograd.grad(
            source.sum(), project.weight, retain_graph=True
        )
        torch.testing.assert_close(each[n], expected.flatten(), atol=1e-12, rtol=1e-10)
        if target.requires_grad:
            summed += torch.autograd.grad(target.sum(), project.weight)[0].flatten()
    torch.testing.assert_close(total, summed, atol=1e-12, rtol=1e-10)
    assert bool(total.any()) == (known != "XY")
    assert bool(each.any()) == (known != "")


def test_inputs_of_mismatched_sizes_are_refused() -> None:
    c = case()
    unary, pairs = c.teacher.compute_posterior(c.x, c.lengths, c.allowed)
    with pytest.raises(ModelError, match="has shape"):
        c.crf._compute_losses(c.x, [(unary[:, :-1], pairs)], c.lengths)[0]
    with pytest.raises(ModelError, match="has shape"):
        c.crf._compute_losses(c.x, [(unary, pairs[:-1])], c.lengths)[0]
    with pytest.raises(ModelError, match="has shape"):
        c.crf.compute_posterior(c.x, c.lengths, c.allowed[:-1])
    pairs = pairs.clone()
    pairs[2, 0, 2] = 0.1  # from O to I-X
    with pytest.raises(ModelError, match="sentence 2 of the batch"):
        c.crf._compute_losses(c.x, [(unary, pairs)], c.lengths)[0]
