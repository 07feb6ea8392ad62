"""The CRF against enumeration of every tag sequence, pytorch-crf, and itself rearranged.

`test_crf_limits.py` has extreme scores, constraints and bad input.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torchcrf
from torch import Tensor

from fednotes.taggers.crf import CRF, Backend

BACKENDS: tuple[Backend, ...] = ("numba", "torch")
both = pytest.mark.parametrize("backend", BACKENDS)


# ---- the independent program: enumerate all sequences ------------------------------------------


@dataclass
class Enumerated:
    """All allowed sequences of one sentence (paths, tokens), their scores and probabilities."""

    paths: np.ndarray
    scores: np.ndarray
    log_z: float
    p: np.ndarray

    @classmethod
    def of(
        cls, x: np.ndarray, start: np.ndarray, matrix: np.ndarray, end: np.ndarray
    ) -> Enumerated:
        """x (tokens, tags); start, matrix, end with -inf where forbidden."""
        paths = np.array(list(itertools.product(range(x.shape[1]), repeat=len(x))))
        scores = start[paths[:, 0]] + end[paths[:, -1]]
        scores = scores + x[np.arange(len(x)), paths].sum(1)
        scores = scores + matrix[paths[:, :-1], paths[:, 1:]].sum(1)
        paths, scores = paths[scores > -np.inf], scores[scores > -np.inf]
        log_z = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        return cls(paths, scores, log_z, np.exp(scores - log_z))

    def tag_counts(self, tags: int) -> np.ndarray:
        """Expected counts (tokens, tags)."""
        return np.einsum("p,ptj->tj", self.p, np.eye(tags)[self.paths])

    def pair_counts(self, tags: int) -> np.ndarray:
        """Expected counts (tags, tags)."""
        hot = np.eye(tags)[self.paths]
        return np.einsum("p,pti,ptj->ij", self.p, hot[:, :-1], hot[:, 1:])


def bio_masks(types: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """O, B-1, I-1, B-2, I-2, …: an I stands only behind the B or I of its own type."""
    tags = 1 + 2 * types
    inside = np.arange(2, tags, 2)
    start, matrix = np.ones(tags, dtype=bool), np.ones((tags, tags), dtype=bool)
    start[inside] = False
    matrix[:, inside] = False
    for i in inside:
        matrix[[i - 1, i], i] = True
    return start, matrix, np.ones(tags, dtype=bool)


def bioes_masks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """O, B, I, E, S of one type: an open mention must be closed."""
    outside, opened = [0, 3, 4], [1, 2]
    matrix = np.zeros((5, 5), dtype=bool)
    matrix[np.ix_(outside, [0, 1, 4])] = True
    matrix[np.ix_(opened, [2, 3])] = True
    start, end = np.zeros(5, dtype=bool), np.zeros(5, dtype=bool)
    start[[0, 1, 4]] = True
    end[outside] = True
    return start, matrix, end


CASES = {
    "free2": (2, None),
    "free3": (3, None),
    "bio3": (3, bio_masks(1)),
    "free4": (4, None),
    "bio5": (5, bio_masks(2)),
    "bioes5": (5, bioes_masks()),
}


def build(case: str, backend: Backend, dtype: torch.dtype = torch.float64, seed: int = 0) -> CRF:
    torch.manual_seed(seed)
    tags, masks = CASES[case]
    crf = CRF(tags, *(masks or ()), backend=backend).to(dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def masked(crf: CRF) -> list[np.ndarray]:
    out = []
    for name, mask in zip(
        ("start", "transitions", "end"),
        (crf.start_mask, crf.transition_mask, crf.end_mask),
        strict=True,
    ):
        values = getattr(crf, name).detach().double().numpy().copy()
        if mask is not None:
            values[~mask.numpy()] = -np.inf
        out.append(values)
    return out


def batch(case: str, seed: int = 1, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences of every length from 1 to 5 with gold tags that the constraints allow."""
    rng = np.random.default_rng(seed)
    tags, lengths = CASES[case][0], np.array([3, 5, 1, 4, 2])
    crf = build(case, "numba")
    x = rng.normal(0, scale, (5, 5, tags))
    gold = np.full((5, 5), -100)  # what stands in the padding is never looked at
    for n, length in enumerate(lengths):
        paths = Enumerated.of(x[n, :length], *masked(crf)).paths
        gold[n, :length] = paths[rng.integers(len(paths))]
        x[n, length:] = np.nan
    return torch.tensor(x), torch.tensor(gold), torch.tensor(lengths)


# ---- equal to enumeration ----------------------------------------------------------------------


@both
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_enumeration(case: str, backend: Backend) -> None:
    """loss = log Z - score(gold); gradients = expected minus gold counts, all by enumeration."""
    crf, (x, gold, lengths) = build(case, backend), batch(case)
    x.requires_grad_()
    weights = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
    loss = crf.loss(x, gold, lengths)
    (loss * weights).sum().backward()
    tags, scores = crf.num_tags, masked(crf)
    expected, of_start, of_pairs, of_end = (
        [],
        np.zeros(tags),
        np.zeros((tags, tags)),
        np.zeros(tags),
    )
    assert x.grad is not None
    for n, length in enumerate(lengths.tolist()):
        every = Enumerated.of(x.detach().numpy()[n, :length], *scores)
        path = gold[n, :length].numpy()
        expected.append(every.log_z - every.scores[(every.paths == path).all(1)][0])
        unary = every.tag_counts(tags) - np.eye(tags)[path]
        pairs = every.pair_counts(tags)
        np.subtract.at(pairs, (path[:-1], path[1:]), 1)
        w = weights[n].item()
        np.testing.assert_allclose(x.grad[n, :length], w * unary, atol=1e-9, rtol=0)
        assert (x.grad[n, length:] == 0).all()
        of_start, of_end, of_pairs = (
            of_start + w * unary[0],
            of_end + w * unary[-1],
            of_pairs + w * pairs,
        )
    np.testing.assert_allclose(loss.detach(), expected, atol=1e-9, rtol=0)
    for parameter, value in ((crf.start, of_start), (crf.transitions, of_pairs), (crf.end, of_end)):
        np.testing.assert_allclose(parameter.grad, value, atol=1e-9, rtol=0)


@both
@pytest.mark.parametrize("case", CASES)
def test_decode_and_marginals_equal_enumeration(case: str, backend: Backend) -> None:
    """The highest-scoring of all sequences, and the summed probability of those with each tag."""
    crf, (x, _, lengths) = build(case, backend), batch(case, seed=2)
    best, marginals = crf.decode(x, lengths), crf.posterior(x, lengths)[0]
    for n, length in enumerate(lengths.tolist()):
        every = Enumerated.of(x.numpy()[n, :length], *masked(crf))
        assert best[n, :length].tolist() == every.paths[every.scores.argmax()].tolist()
        expected = every.tag_counts(crf.num_tags)
        np.testing.assert_allclose(marginals[n, :length], expected, atol=1e-9, rtol=0)
        assert (best[n, length:] == 0).all()
        assert (marginals[n, length:] == 0).all()


@both
@pytest.mark.parametrize("case", CASES)
def test_partial_loss_equals_enumeration(case: str, backend: Backend) -> None:
    """-log of the summed probability of the sequences within the allowed tags."""
    crf, (x, gold, lengths) = build(case, backend), batch(case, seed=3)
    rng = np.random.default_rng(0)
    hot = torch.nn.functional.one_hot(gold.clamp(min=0), crf.num_tags).bool()
    allowed = torch.tensor(rng.random(x.shape) < 0.5) | hot
    x.requires_grad_()
    loss = crf._losses(x, [allowed], lengths)[0]
    loss.sum().backward()
    assert x.grad is not None
    for n, length in enumerate(lengths.tolist()):
        values, scores = x.detach().numpy()[n, :length], masked(crf)
        every = Enumerated.of(values, *scores)
        some = Enumerated.of(np.where(allowed[n, :length], values, -np.inf), *scores)
        assert loss[n].item() == pytest.approx(every.log_z - some.log_z, abs=1e-9)
        unary = every.tag_counts(crf.num_tags) - some.tag_counts(crf.num_tags)
        np.testing.assert_allclose(x.grad[n, :length], unary, atol=1e-9, rtol=0)
    with torch.no_grad():
        everything = crf._losses(x, [torch.ones_like(allowed)], lengths)[0]
        torch.testing.assert_close(everything, torch.zeros(5, dtype=torch.float64))
        torch.testing.assert_close(
            crf._losses(x, [hot], lengths)[0], crf.loss(x, gold, lengths), atol=1e-12, rtol=1e-12
        )


@both
@pytest.mark.parametrize("case", ["free3", "bioes5"])
def test_gradcheck(case: str, backend: Backend) -> None:
    """Central differences of the loss, by every input."""
    crf, (x, gold, lengths) = build(case, backend), batch(case)
    x = x.nan_to_num(0.0).requires_grad_()
    allowed = torch.nn.functional.one_hot(gold.clamp(min=0), crf.num_tags).bool()
    allowed[:, ::2] = True

    def full(x: Tensor, *_: Tensor) -> Tensor:
        return crf.loss(x, gold, lengths)

    def partial(x: Tensor, *_: Tensor) -> Tensor:
        return crf._losses(x, [allowed], lengths)[0]

    inputs = (x, crf.start, crf.transitions, crf.end)  # gradcheck shifts parameters in place
    assert torch.autograd.gradcheck(full, inputs)
    assert torch.autograd.gradcheck(partial, inputs)


# ---- agreement, invariance ---------------------------------------------------------------------


def test_implementations_agree_on_larger_batches() -> None:
    """Compiled kernels against torch operations: 19 tags (9 types), 60 tokens, mixed lengths."""
    masks = bio_masks(9)
    torch.manual_seed(3)
    crfs = {b: CRF(19, *masks, backend=b).double() for b in BACKENDS}
    crfs["torch"].load_state_dict(crfs["numba"].state_dict())
    lengths = torch.randint(1, 61, (16,))
    x = torch.randn(16, 60, 19, dtype=torch.float64) * 3
    gold = crfs["torch"].decode(torch.randn_like(x), lengths)
    results = {}
    for backend, crf in crfs.items():
        leaf = x.clone().requires_grad_()
        loss = crf.loss(leaf, gold, lengths)
        loss.mean().backward()
        results[backend] = [
            loss.detach(),
            leaf.grad,
            *(p.grad for p in crf.parameters()),
            crf.posterior(x, lengths)[0],
            crf.decode(x, lengths),
        ]
    for ours, theirs in zip(results["numba"], results["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["scaled", "log-space"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_padding_position_and_threads_change_no_bit(dtype: torch.dtype, scale: float) -> None:
    """A sentence alone, in another order, padded further, with another thread setting."""
    torch.manual_seed(0)
    crf = CRF(11).to(dtype)
    lengths = torch.tensor([7, 23, 1, 40, 12, 31])
    x = scale * torch.randn(6, 40, 11, dtype=dtype)
    gold = torch.randint(0, 11, (6, 40))

    def run(rows: list[int], tokens: int, x: Tensor, gold: Tensor) -> list[Tensor]:
        leaf = x[rows, :tokens].clone().requires_grad_()
        loss = crf.loss(leaf, gold[rows, :tokens], lengths[rows])
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        decoded = crf.decode(leaf, lengths[rows])
        return [loss.detach(), gradient, crf.posterior(leaf, lengths[rows])[0], decoded]

    together = run(list(range(6)), 40, x, gold)
    order = [4, 2, 0, 5, 3, 1]
    for ours, moved in zip(together, run(order, 40, x, gold), strict=True):
        assert torch.equal(ours[order], moved)
    wide_x = torch.cat([x, torch.full((6, 9, 11), torch.nan, dtype=dtype)], 1)
    wide_gold = torch.cat([gold, torch.full((6, 9), 99)], 1)
    for ours, padded in zip(together, run(list(range(6)), 49, wide_x, wide_gold), strict=True):
        assert torch.equal(ours, padded[:, :40] if padded.dim() > 1 else padded)
    for n in range(6):
        length = int(lengths[n])
        for ours, alone in zip(together, run([n], length, x, gold), strict=True):
            assert torch.equal(ours[n, :length] if ours.dim() > 1 else ours[n], alone[0])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        repeated = run(list(range(6)), 40, x, gold)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(together, repeated, strict=True))


@both
def test_equal_to_pytorch_crf(backend: Backend) -> None:
    """pytorch-crf in float32: loss, gradients and best sequences."""
    torch.manual_seed(1)
    crf, reference = CRF(9, backend=backend), torchcrf.CRF(9, batch_first=True)
    pairs = [
        (crf.start, reference.start_transitions),
        (crf.transitions, reference.transitions),
        (crf.end, reference.end_transitions),
    ]
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(ours)
    lengths = torch.tensor([20, 3, 1, 14])
    mask = torch.arange(20) < lengths[:, None]
    x, y = torch.randn(4, 20, 9), torch.randint(0, 9, (4, 20))
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    loss = crf.loss(leaves[0], y, lengths)
    expected = -reference(leaves[1], y, mask=mask, reduction="none")
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    loss.mean().backward()
    expected.mean().backward()
    for ours, theirs in [*pairs, (leaves[0], leaves[1])]:
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)
    decoded = crf.decode(x, lengths)
    rows = [decoded[n, :length].tolist() for n, length in enumerate(lengths.tolist())]
    assert rows == reference.decode(x, mask=mask)


def test_frozen_emissions_and_no_grad() -> None:
    """Only what needs a gradient gets one; the loss is the same without."""
    crf, (x, gold, lengths) = build("free3", "numba"), batch("free3")
    loss = crf.loss(x, gold, lengths)
    loss.sum().backward()
    assert crf.transitions.grad is not None
    assert x.grad is None
    with torch.no_grad():
        again = crf.loss(x, gold, lengths)
    assert not again.requires_grad
    assert torch.equal(loss.detach(), again)
