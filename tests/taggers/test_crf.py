"""The CRF, compared with enumeration of every tag sequence and rearranged batches."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from sequences import Enumerated, computing, masked
from torch import Tensor

from fednotes.core import kernels
from fednotes.core.errors import ModelError
from fednotes.taggers.crf import CRF, TorchOps

BACKENDS = ("numba", "torch")
on_both_backends = pytest.mark.parametrize("backend", BACKENDS)


def bio_masks(types: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return masks of O, B-1, I-1, B-2, …: an I follows only the B or I of its own
    type."""
    tags = 1 + 2 * types
    inside = np.arange(2, tags, 2)
    start, matrix = np.ones(tags, dtype=bool), np.ones((tags, tags), dtype=bool)
    start[inside] = False
    matrix[:, inside] = False
    for i in inside:
        matrix[[i - 1, i], i] = True
    return start, matrix, np.ones(tags, dtype=bool)


def bioes_masks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return masks of O, B, I, E, S of one type: an open mention must be closed."""
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


def build(
    case: str, backend: str, dtype: torch.dtype = torch.float64, seed: int = 0
) -> CRF:
    torch.manual_seed(seed)
    tags, masks = CASES.get(case, (5, None))
    crf = computing(CRF(tags, *(masks or ())), backend).to(dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def batch(
    case: str, seed: int = 1, scale: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sentences of lengths 1 to 5 with gold tags that the constraints allow."""
    rng = np.random.default_rng(seed)
    lengths = np.array([3, 5, 1, 4, 2])
    crf = build(case, "numba")
    x = rng.normal(0, scale, (5, 5, crf.num_tags))
    gold = np.full((5, 5), -100)  # what stands in the padding is never looked at
    for n, length in enumerate(lengths):
        paths = Enumerated.of(x[n, :length], *masked(crf)).paths
        gold[n, :length] = paths[rng.integers(len(paths))]
        x[n, length:] = np.nan
    return torch.tensor(x), torch.tensor(gold), torch.tensor(lengths)


# ---- equal to enumeration ------------------------------------------------------------


@on_both_backends
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_enumeration_of_all_sequences(
    case: str, backend: str
) -> None:
    """loss = log Z - score(gold); gradients = expected minus gold counts, all by
    enumeration."""
    crf, (x, gold, lengths) = build(case, backend), batch(case)
    x.requires_grad_()
    weights = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
    loss = crf.loss(x, gold, lengths)
    (loss * weights).sum().backward()
    tags, scores, expected = crf.num_tags, masked(crf), []
    of_start, of_pairs, of_end = np.zeros(tags), np.zeros((tags, tags)), np.zeros(tags)
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
        of_start, of_end = of_start + w * unary[0], of_end + w * unary[-1]
        of_pairs = of_pairs + w * pairs
    np.testing.assert_allclose(loss.detach(), expected, atol=1e-9, rtol=0)
    for parameter, value in (
        (crf.start, of_start),
        (crf.transitions, of_pairs),
        (crf.end, of_end),
    ):
        np.testing.assert_allclose(parameter.grad, value, atol=1e-9, rtol=0)


@on_both_backends
@pytest.mark.parametrize("case", CASES)
def test_decoding_and_marginals_equal_enumeration_of_all_sequences(
    case: str, backend: str
) -> None:
    """The highest-scoring of all sequences, and the summed probability of those with
    each tag."""
    crf, (x, _, lengths) = build(case, backend), batch(case, seed=2)
    best, marginals = (
        crf.find_best_tags(x, lengths),
        crf.compute_posterior(x, lengths)[0],
    )
    for n, length in enumerate(lengths.tolist()):
        every = Enumerated.of(x.numpy()[n, :length], *masked(crf))
        assert best[n, :length].tolist() == every.paths[every.scores.argmax()].tolist()
        expected = every.tag_counts(crf.num_tags)
        np.testing.assert_allclose(marginals[n, :length], expected, atol=1e-9, rtol=0)
        assert (best[n, length:] == 0).all()
        assert (marginals[n, length:] == 0).all()


# ---- agreement, invariance -----------------------------------------------------------


def test_implementations_agree_on_larger_batches() -> None:
    """Compiled kernels against torch operations: 19 tags (9 types), 60 tokens, mixed
    lengths."""
    masks = bio_masks(9)
    torch.manual_seed(3)
    crfs = {b: computing(CRF(19, *masks), b).double() for b in BACKENDS}
    crfs["torch"].load_state_dict(crfs["numba"].state_dict())
    lengths = torch.randint(1, 61, (16,))
    x = torch.randn(16, 60, 19, dtype=torch.float64) * 3
    gold = crfs["torch"].find_best_tags(torch.randn_like(x), lengths)
    results = {}
    for backend, crf in crfs.items():
        leaf = x.clone().requires_grad_()
        loss = crf.loss(leaf, gold, lengths)
        loss.mean().backward()
        results[backend] = [
            loss.detach(),
            leaf.grad,
            *(p.grad for p in crf.parameters()),
            crf.compute_posterior(x, lengths)[0],
            crf.find_best_tags(x, lengths),
        ]
    for ours, theirs in zip(results["numba"], results["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["scaled", "log-space"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
def test_padding_position_and_threads_do_not_change_the_loss_of_a_sentence(
    dtype: torch.dtype, scale: float
) -> None:
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
        decoded = crf.find_best_tags(leaf, lengths[rows])
        return [
            loss.detach(),
            gradient,
            crf.compute_posterior(leaf, lengths[rows])[0],
            decoded,
        ]

    together = run(list(range(6)), 40, x, gold)
    order = [4, 2, 0, 5, 3, 1]
    for ours, moved in zip(together, run(order, 40, x, gold), strict=True):
        assert torch.equal(ours[order], moved)
    wide_x = torch.cat([x, torch.full((6, 9, 11), torch.nan, dtype=dtype)], 1)
    wide_gold = torch.cat([gold, torch.full((6, 9), 99)], 1)
    for ours, padded in zip(
        together, run(list(range(6)), 49, wide_x, wide_gold), strict=True
    ):
        assert torch.equal(ours, padded[:, :40] if padded.dim() > 1 else padded)
    for n in range(6):
        length = int(lengths[n])
        for ours, alone in zip(together, run([n], length, x, gold), strict=True):
            assert torch.equal(
                ours[n, :length] if ours.dim() > 1 else ours[n], alone[0]
            )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        repeated = run(list(range(6)), 40, x, gold)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(together, repeated, strict=True))


def results_of(
    crf: CRF, x: Tensor, gold: Tensor, lengths: Tensor
) -> list[list[Tensor]]:
    """Return what the CRF computes for each sentence of a batch, without padding."""
    leaf = x.clone().requires_grad_()
    loss = crf.loss(leaf, gold, lengths)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    unary, pairs = crf.compute_posterior(x, lengths)
    best = crf.find_best_tags(x.nan_to_num(0.0, posinf=0.0), lengths)
    return [
        [loss[n].detach(), gradient[n, :end], unary[n, :end], pairs[n], best[n, :end]]
        for n, end in enumerate(lengths.tolist())
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
def test_other_sentences_of_a_batch_do_not_change_a_sentence(
    dtype: torch.dtype,
) -> None:
    """Each sentence alone against itself in batches of random size, order and padding,
    beside sentences of other lengths with extreme, forbidden and broken emissions."""
    rng = np.random.default_rng(11)
    sentences, tokens = 21, 26
    crf = build("bioes5", "numba", dtype)
    lengths = torch.tensor(rng.integers(1, tokens + 1, sentences))
    x = torch.tensor(rng.normal(0, 2, (sentences, tokens, 5))).to(dtype)
    x[3] *= 300.0  # computed in log space
    x[7] *= 15.0  # messages fall far, but do not underflow
    x[11, 0, 1] = torch.nan
    x[15, :, 4] = -torch.inf  # as where a lattice forbids a tag
    for n, end in enumerate(lengths.tolist()):
        x[n, end:] = torch.nan
    gold = torch.zeros(sentences, tokens, dtype=torch.int64)  # always allowed
    padded_x = torch.cat([x, torch.full((sentences, 9, 5), torch.nan, dtype=dtype)], 1)
    padded_gold = torch.cat([gold, torch.full((sentences, 9), 99)], 1)

    alone = [
        results_of(crf, x[[n], :end], gold[[n], :end], lengths[[n]])[0]
        for n, end in enumerate(lengths.tolist())
    ]
    for _ in range(60):
        chosen = rng.choice(sentences, rng.integers(1, sentences + 1), replace=False)
        width = int(rng.integers(int(lengths[chosen].max()), tokens + 10))
        together = results_of(
            crf, padded_x[chosen, :width], padded_gold[chosen, :width], lengths[chosen]
        )
        for n, values in zip(chosen, together, strict=True):
            for value, expected in zip(values, alone[n], strict=True):
                torch.testing.assert_close(
                    value, expected, atol=0, rtol=0, equal_nan=True
                )


def test_emissions_of_half_precision_are_accepted() -> None:
    crf, (x, gold, lengths) = build("bio5", "numba", torch.float32), batch("bio5")
    halves = x.to(torch.bfloat16)
    leaf = halves.clone().requires_grad_()
    loss = crf.loss(leaf, gold, lengths)
    loss.sum().backward()
    assert loss.dtype == torch.bfloat16
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    expected = crf.loss(halves.float(), gold, lengths).to(torch.bfloat16)
    assert torch.equal(loss, expected)


def test_frozen_emissions_get_no_gradient() -> None:
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


# ---- extreme values ------------------------------------------------------------------


def log_z_by_logaddexp(
    x: np.ndarray, start: np.ndarray, matrix: np.ndarray, end: np.ndarray
) -> float:
    """Run the forward algorithm with numpy.logaddexp, in extended precision if
    possible."""
    alpha = (start + x[0]).astype(np.longdouble)
    for row in x[1:]:
        alpha = np.logaddexp.reduce(alpha[:, None] + matrix, axis=0) + row
    return float(np.logaddexp.reduce(alpha + end))


EXTREMES = {
    "200": lambda rng, shape: rng.choice([-200.0, 200.0], shape),
    "1e4": lambda rng, shape: rng.choice([-1e4, 1e4], shape) + rng.normal(size=shape),
    "mixed": lambda rng, shape: (
        rng.normal(size=shape) * 10.0 ** rng.integers(-3, 5, shape)
    ),
    "border": lambda rng, shape: rng.uniform(-120, 120, shape),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("case", ["free", "bioes5"])
def test_extreme_emissions_give_the_exact_log_partition_function(
    case: str, extreme: str, dtype: torch.dtype
) -> None:
    """log Z by numpy.logaddexp; both implementations agree and nothing is NaN."""
    rng = np.random.default_rng(5)
    lengths = torch.tensor([30, 1, 17, 29])
    emissions = torch.tensor(EXTREMES[extreme](rng, (4, 30, 5))).to(dtype)
    gold = torch.zeros(4, 30, dtype=torch.int64)  # always O, always allowed
    results = []
    for backend in BACKENDS:
        crf = build(case, backend, dtype)
        x = emissions.clone().requires_grad_()
        loss = crf.loss(x, gold, lengths)
        loss.sum().backward()
        assert x.grad is not None
        start, matrix, end = masked(crf)
        for n, length in enumerate(lengths.tolist()):
            values = emissions[n, :length].double().numpy()
            score = values[:, 0].sum() + start[0] + end[0] + (length - 1) * matrix[0, 0]
            expected = log_z_by_logaddexp(values, start, matrix, end) - score
            rtol = 1e-10 if dtype == torch.float64 else 1e-6
            assert loss[n].item() == pytest.approx(expected, rel=rtol, abs=1e-6)
        gradients = [x.grad, *(p.grad for p in crf.parameters())]
        results.append(
            [loss.detach(), crf.compute_posterior(emissions, lengths)[0], *gradients]
        )
        assert all(torch.isfinite(t).all() for t in results[-1])
    for ours, theirs in zip(*results, strict=True):
        close = 1e-7 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(ours, theirs, atol=close, rtol=close)
    decoded = [
        build(case, b, dtype).find_best_tags(emissions, lengths) for b in BACKENDS
    ]
    torch.testing.assert_close(decoded[0], decoded[1])


@on_both_backends
def test_a_path_that_underflows_temporarily_still_wins(backend: str) -> None:
    """Tag 1 starts e^-1000 behind, 0 -> 1 is forbidden, then tag 0 falls to -5000: only
    the path 1, 1 counts, with log Z = -1000. Plain scaling would have lost it at the
    first token."""
    allowed = np.array([[True, False], [True, True]])
    crf = computing(CRF(2, None, allowed, None), backend).double()
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.zero_()
    x = torch.tensor([[[0.0, -1000.0], [-5000.0, 0.0]]], dtype=torch.float64)
    length, two = torch.ones(1, 2, dtype=torch.int64), torch.tensor([2])
    assert crf.loss(x, length, two).item() == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(
        crf.compute_posterior(x, two)[0][0, :, 1], torch.ones(2, dtype=torch.float64)
    )
    assert crf.find_best_tags(x, two).tolist() == [[1, 1]]


@on_both_backends
@pytest.mark.parametrize("place", range(9))
def test_the_only_path_counts_however_low_its_emissions(
    backend: str, place: int
) -> None:
    """Tag 1 cannot be reached, and tag 0 falls to -1000 at one token, so p(all 0) = 1."""
    only_tag_0 = np.array([True, False])
    crf = computing(CRF(2, only_tag_0, np.array([[True, False]] * 2)), backend).double()
    x = torch.zeros(1, 9, 2, dtype=torch.float64)
    x[0, place, 0] = -1000.0
    gold, length = torch.zeros(1, 9, dtype=torch.int64), torch.tensor([9])
    with torch.no_grad():
        assert crf.loss(x, gold, length).item() == pytest.approx(0.0, abs=1e-9)
    x.requires_grad_()
    loss = crf.loss(x, gold, length)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-9


@on_both_backends
@pytest.mark.parametrize("score", [500.0, -500.0])
def test_extreme_transitions_give_the_exact_log_partition_function(
    backend: str, score: float
) -> None:
    """Transitions beyond exp's range, against numpy.logaddexp."""
    crf, (x, gold, lengths) = build("free", backend), batch("free")
    with torch.no_grad():
        crf.transitions[0, 1] = score
        crf.start[2] = -score
    loss = crf.loss(x, gold, lengths)
    loss.sum().backward()
    start, matrix, end = masked(crf)
    for n, length in enumerate(lengths.tolist()):
        values, path = x[n, :length].numpy(), gold[n, :length].numpy()
        path_score = start[path[0]] + end[path[-1]] + matrix[path[:-1], path[1:]].sum()
        path_score += values[np.arange(length), path].sum()
        expected = log_z_by_logaddexp(values, start, matrix, end) - path_score
        assert loss[n].item() == pytest.approx(expected, abs=1e-9)
    assert crf.transitions.grad is not None
    assert torch.isfinite(crf.transitions.grad).all()


# ---- constraints and errors ----------------------------------------------------------


@on_both_backends
@pytest.mark.parametrize("scale", [2.0, 400.0])
def test_forbidden_transitions_have_no_gradient(backend: str, scale: float) -> None:
    """Exactly zero, and never NaN, in exp-space and in log-space."""
    crf, (x, gold, lengths) = build("bioes5", backend), batch("bioes5", scale=scale)
    x.requires_grad_()
    crf.loss(x, gold, lengths).sum().backward()
    for name in ("start", "transitions", "end"):
        gradient = getattr(crf, name).grad
        mask = getattr(crf, {"transitions": "transition"}.get(name, name) + "_mask")
        assert (gradient[~mask] == 0).all()
        assert torch.isfinite(gradient).all()
        assert (gradient[mask] != 0).any()


@on_both_backends
def test_forbidden_gold_tags_are_refused(backend: str) -> None:
    crf, x, lengths = (
        build("bioes5", backend),
        torch.zeros(2, 3, 5),
        torch.tensor([3, 2]),
    )
    with pytest.raises(
        ModelError, match=r"sentence 1 .* tag 2 at position 0 \(at the start\)"
    ):
        crf.loss(x, torch.tensor([[1, 2, 3], [2, 3, 0]]), lengths)
    with pytest.raises(
        ModelError, match=r"sentence 0 .* tag 3 at position 1 \(after tag 0\)"
    ):
        crf.loss(x, torch.tensor([[0, 3, 0], [0, 0, 0]]), lengths)
    with pytest.raises(
        ModelError, match=r"sentence 1 .* tag 1 at position 1 \(after tag 0\)"
    ):
        # not closed at the end
        crf.loss(x, torch.tensor([[0, 0, 0], [0, 1, 3]]), lengths)
    for tag in (-1, 5, 1 << 40):
        with pytest.raises(ModelError, match=f"sentence 1 .* tag {tag} at position 1"):
            crf.loss(x, torch.tensor([[0, 0, 0], [0, tag, 0]]), lengths)


@on_both_backends
def test_sentences_without_any_allowed_sequence_are_refused(backend: str) -> None:
    """One token cannot both open and close a mention; neither can an empty allowed set."""
    closed = np.array([False, True])
    crf = computing(CRF(2, ~closed, None, closed), backend)
    x, length = torch.zeros(1, 1, 2), torch.tensor([1])
    with pytest.raises(ModelError, match="no tag sequence"):
        crf.find_best_tags(x, length)
    with pytest.raises(ModelError, match="no tag sequence is allowed for sentence 0"):
        crf.compute_posterior(x, length)[0]
    free = computing(CRF(2), backend)
    with pytest.raises(ModelError, match="exclude each other"):
        free._compute_losses(x, [torch.zeros(1, 1, 2, dtype=torch.bool)], length)[0]


@on_both_backends
@pytest.mark.parametrize("case", ["bioes5", "free"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_emissions_affect_only_their_sentence(
    backend: str, value: float, case: str
) -> None:
    """NaN loss and gradient where an emission is not finite, untouched neighbours."""
    crf, (x, gold, lengths) = build(case, backend), batch(case)
    clean = crf.loss(x, gold, lengths).detach()
    x[1, 2, 1] = value
    x.requires_grad_()
    loss = crf.loss(x, gold, lengths)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False, False, False]
    keep = [0, 2, 3, 4]
    torch.testing.assert_close(loss[keep], clean[keep])
    assert x.grad is not None
    assert x.grad[1].isnan().all()
    assert x.grad[keep].isfinite().all()
    with pytest.raises(ModelError, match=r"sentence 1 .*not finite"):
        crf.find_best_tags(x, lengths)


@on_both_backends
@pytest.mark.parametrize("only_first", [True, False], ids=["one", "all"])
def test_nan_parameters_give_a_nan_loss(backend: str, only_first: bool) -> None:
    """So that training sees it; decoding refuses what it cannot rank."""
    crf, (x, gold, lengths) = build("free", backend), batch("free")
    with torch.no_grad():
        crf.start[: 1 if only_first else None] = torch.nan
        crf.transitions[0 if only_first else slice(None)] = torch.nan
    loss = crf.loss(x, gold, lengths)
    loss.sum().backward()
    assert loss.isnan().all()
    assert crf.transitions.grad is not None
    if not only_first:
        with pytest.raises(ModelError, match="no tag sequence"):
            crf.find_best_tags(x, lengths)


def test_bad_shapes_are_refused() -> None:
    crf = CRF(3)
    x, y, n = (
        torch.zeros(2, 4, 3),
        torch.zeros(2, 4, dtype=torch.int64),
        torch.tensor([4, 2]),
    )
    with pytest.raises(ModelError, match="do not match a CRF of 3 tags"):
        crf.find_best_tags(torch.zeros(2, 4, 5), n)
    for lengths in ([5, 1], [0, 4]):
        with pytest.raises(ModelError, match="do not match emissions of 4 tokens"):
            crf.loss(x, y, torch.tensor(lengths))
    with pytest.raises(ModelError, match="2 sentences but lengths of"):
        crf.loss(x, y, torch.tensor([4]))
    with pytest.raises(ModelError, match="target has shape"):
        crf.loss(x, y[:, :3], n)
    with pytest.raises(ModelError, match="target has shape"):
        crf._compute_losses(x, [y.bool()], n)[0]
    with pytest.raises(
        ModelError, match=r"transition_mask is .* expected bool of \(3, 3\)"
    ):
        CRF(3, None, np.ones((3, 2), dtype=bool))
    with pytest.raises(ModelError, match="start_mask is"):
        CRF(3, np.ones(3))
    with pytest.raises(ModelError, match="at least one tag"):
        CRF(0)


def test_the_state_dict_has_only_parameters_and_the_start_is_seeded() -> None:
    """Masks are no part of what is saved or sent; the start values follow torch's seed."""
    torch.manual_seed(7)
    first = CRF(5, *bioes_masks())
    torch.manual_seed(7)
    second = CRF(5)
    assert list(first.state_dict()) == ["start", "transitions", "end"]
    assert isinstance(
        first._choose_recursions(torch.device("meta")), TorchOps
    )  # off the CPU
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() <= 0.1


def test_kernels_compile_without_a_cache_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numba raises RuntimeError when it finds no directory to write its cache to."""
    original = numba.njit

    def without_cache(
        *arguments: object, cache: bool = False, **options: object
    ) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(*arguments, **options)

    monkeypatch.setattr(kernels.numba, "njit", without_cache)

    def double(x: float) -> float:
        return 2 * x

    assert kernels.kernel("float64(float64)")(double)(1.5) == 3.0
