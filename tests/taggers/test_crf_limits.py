"""The CRF at its limits: extreme scores, forbidden transitions, bad input."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from fednotes.core import kernels
from fednotes.core.errors import ModelError
from fednotes.taggers.crf import CRF, Backend

BACKENDS: tuple[Backend, ...] = ("numba", "torch")
both = pytest.mark.parametrize("backend", BACKENDS)

OUTSIDE, OPENED = [0, 3, 4], [1, 2]  # O, E, S | B, I


def bioes_masks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """O, B, I, E, S of one type: an open mention must be closed."""
    start, matrix, end = (
        np.zeros(5, dtype=bool),
        np.zeros((5, 5), dtype=bool),
        np.zeros(5, dtype=bool),
    )
    start[[0, 1, 4]] = True
    matrix[np.ix_(OUTSIDE, [0, 1, 4])] = True
    matrix[np.ix_(OPENED, [2, 3])] = True
    end[OUTSIDE] = True
    return start, matrix, end


def build(constrained: bool, backend: Backend, dtype: torch.dtype = torch.float64) -> CRF:
    """Five tags; the same parameters for every backend."""
    torch.manual_seed(0)
    crf = CRF(5, *(bioes_masks() if constrained else ()), backend=backend).to(dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def masked(crf: CRF) -> list[np.ndarray]:
    """start, transitions and end in float64, -inf where forbidden."""
    values = [p.detach().double().numpy().copy() for p in (crf.start, crf.transitions, crf.end)]
    if crf.start_mask is not None:
        for value, mask in zip(values, bioes_masks(), strict=True):
            value[~mask] = -np.inf
    return values


def batch(scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five sentences; gold tags are all O, which every constraint allows."""
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.normal(0, scale, (5, 6, 5)))
    return x, torch.zeros(5, 6, dtype=torch.int64), torch.tensor([3, 6, 1, 4, 2])


# ---- extreme values ----------------------------------------------------------------------------


def log_z_by_logaddexp(
    x: np.ndarray, start: np.ndarray, matrix: np.ndarray, end: np.ndarray
) -> float:
    """The forward algorithm with numpy.logaddexp in extended precision, where there is one."""
    alpha = (start + x[0]).astype(np.longdouble)
    for row in x[1:]:
        alpha = np.logaddexp.reduce(alpha[:, None] + matrix, axis=0) + row
    return float(np.logaddexp.reduce(alpha + end))


EXTREMES = {
    "200": lambda rng, shape: rng.choice([-200.0, 200.0], shape),
    "1e4": lambda rng, shape: rng.choice([-1e4, 1e4], shape) + rng.normal(size=shape),
    "mixed": lambda rng, shape: rng.normal(size=shape) * 10.0 ** rng.integers(-3, 5, shape),
    "border": lambda rng, shape: rng.uniform(-120, 120, shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "bioes"])
def test_extreme_emissions(constrained: bool, extreme: str, dtype: torch.dtype) -> None:
    """log Z by numpy.logaddexp; both implementations agree and nothing is NaN."""
    rng = np.random.default_rng(5)
    lengths = torch.tensor([30, 1, 17, 29])
    emissions = torch.tensor(EXTREMES[extreme](rng, (4, 30, 5))).to(dtype)
    gold = torch.zeros(4, 30, dtype=torch.int64)  # always O, always allowed
    results = []
    for backend in BACKENDS:
        crf = build(constrained, backend, dtype)
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
        results.append([loss.detach(), crf.posterior(emissions, lengths)[0], *gradients])
        assert all(torch.isfinite(t).all() for t in results[-1])
    for ours, theirs in zip(*results, strict=True):
        close = 1e-7 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(ours, theirs, atol=close, rtol=close)
    decoded = [build(constrained, b, dtype).decode(emissions, lengths) for b in BACKENDS]
    torch.testing.assert_close(decoded[0], decoded[1])


@both
def test_a_path_that_underflows_on_the_way_still_wins(backend: Backend) -> None:
    """Tag 1 starts e^-1000 behind, 0 -> 1 is forbidden, then tag 0 falls to -5000: only the path
    1, 1 counts, with log Z = -1000. Plain scaling would have lost it at the first token."""
    allowed = np.array([[True, False], [True, True]])
    crf = CRF(2, None, allowed, None, backend=backend).double()
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.zero_()
    x = torch.tensor([[[0.0, -1000.0], [-5000.0, 0.0]]], dtype=torch.float64)
    one, two = torch.ones(1, 2, dtype=torch.int64), torch.tensor([2])
    assert crf.loss(x, one, two).item() == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(
        crf.posterior(x, two)[0][0, :, 1], torch.ones(2, dtype=torch.float64)
    )
    assert crf.decode(x, two).tolist() == [[1, 1]]


@both
@pytest.mark.parametrize("score", [500.0, -500.0])
def test_extreme_transitions(backend: Backend, score: float) -> None:
    """Transitions beyond exp's range, against numpy.logaddexp."""
    crf, (x, gold, lengths) = build(False, backend), batch()
    with torch.no_grad():
        crf.transitions[0, 1] = score
        crf.start[2] = -score
    loss = crf.loss(x, gold, lengths)
    loss.sum().backward()
    start, matrix, end = masked(crf)
    for n, length in enumerate(lengths.tolist()):
        values, path = x[n, :length].numpy(), gold[n, :length].numpy()
        own = start[path[0]] + end[path[-1]] + matrix[path[:-1], path[1:]].sum()
        own += values[np.arange(length), path].sum()
        expected = log_z_by_logaddexp(values, start, matrix, end) - own
        assert loss[n].item() == pytest.approx(expected, abs=1e-9)
    assert crf.transitions.grad is not None
    assert torch.isfinite(crf.transitions.grad).all()


# ---- constraints and errors --------------------------------------------------------------------


@both
@pytest.mark.parametrize("scale", [2.0, 400.0])
def test_forbidden_transitions_have_no_gradient(backend: Backend, scale: float) -> None:
    """Exactly zero, and never NaN, in exp-space and in log-space."""
    crf, (x, gold, lengths) = build(True, backend), batch(scale)
    x.requires_grad_()
    crf.loss(x, gold, lengths).sum().backward()
    for name in ("start", "transitions", "end"):
        gradient = getattr(crf, name).grad
        mask = getattr(crf, {"transitions": "transition"}.get(name, name) + "_mask")
        assert (gradient[~mask] == 0).all()
        assert torch.isfinite(gradient).all()
        assert (gradient[mask] != 0).any()


@both
def test_forbidden_gold_tags_are_refused(backend: Backend) -> None:
    crf, x, lengths = build(True, backend), torch.zeros(2, 3, 5), torch.tensor([3, 2])
    with pytest.raises(ModelError, match=r"sentence 1 .* tag 2 at position 0 \(at the start\)"):
        crf.loss(x, torch.tensor([[1, 2, 3], [2, 3, 0]]), lengths)
    with pytest.raises(ModelError, match=r"sentence 0 .* tag 3 at position 1 \(after tag 0\)"):
        crf.loss(x, torch.tensor([[0, 3, 0], [0, 0, 0]]), lengths)
    with pytest.raises(ModelError, match=r"sentence 1 .* tag 1 at position 1 \(after tag 0\)"):
        crf.loss(x, torch.tensor([[0, 0, 0], [0, 1, 3]]), lengths)  # not closed at the end
    for tag in (-1, 5, 1 << 40):
        with pytest.raises(ModelError, match=f"sentence 1 .* tag {tag} at position 1"):
            crf.loss(x, torch.tensor([[0, 0, 0], [0, tag, 0]]), lengths)


@both
def test_sentences_without_any_sequence_are_refused(backend: Backend) -> None:
    """One token cannot both open and close a mention; neither can an empty allowed set."""
    closed = np.array([False, True])
    crf = CRF(2, ~closed, None, closed, backend=backend)
    x, one = torch.zeros(1, 1, 2), torch.tensor([1])
    with pytest.raises(ModelError, match="no tag sequence"):
        crf.decode(x, one)
    with pytest.raises(ModelError, match="no tag sequence is allowed for sentence 0"):
        crf.posterior(x, one)[0]
    free = CRF(2, backend=backend)
    with pytest.raises(ModelError, match="exclude each other"):
        free._losses(x, [torch.zeros(1, 1, 2, dtype=torch.bool)], one)[0]


@both
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_emissions_stay_in_their_sentence(backend: Backend, value: float) -> None:
    """NaN loss and gradient where an emission is not finite, untouched neighbours."""
    crf, (x, gold, lengths) = build(True, backend), batch()
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
        crf.decode(x, lengths)


@both
@pytest.mark.parametrize("some", [True, False], ids=["one", "all"])
def test_nan_parameters_give_a_nan_loss(backend: Backend, some: bool) -> None:
    """So that training sees it; decoding refuses what it cannot rank."""
    crf, (x, gold, lengths) = build(False, backend), batch()
    with torch.no_grad():
        crf.start[: 1 if some else None] = torch.nan
        crf.transitions[0 if some else slice(None)] = torch.nan
    loss = crf.loss(x, gold, lengths)
    loss.sum().backward()
    assert loss.isnan().all()
    assert crf.transitions.grad is not None
    if not some:
        with pytest.raises(ModelError, match="no tag sequence"):
            crf.decode(x, lengths)


def test_bad_shapes_are_refused() -> None:
    crf = CRF(3)
    x, y, n = torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64), torch.tensor([4, 2])
    with pytest.raises(ModelError, match="do not fit a CRF of 3 tags"):
        crf.decode(torch.zeros(2, 4, 5), n)
    for lengths in ([5, 1], [0, 4]):
        with pytest.raises(ModelError, match="do not fit emissions of 4 tokens"):
            crf.loss(x, y, torch.tensor(lengths))
    with pytest.raises(ModelError, match="2 sentences but lengths of"):
        crf.loss(x, y, torch.tensor([4]))
    with pytest.raises(ModelError, match="target has shape"):
        crf.loss(x, y[:, :3], n)
    with pytest.raises(ModelError, match="target has shape"):
        crf._losses(x, [y.bool()], n)[0]
    with pytest.raises(ModelError, match=r"transition_mask is .* bool of \(3, 3\) is expected"):
        CRF(3, None, np.ones((3, 2), dtype=bool))
    with pytest.raises(ModelError, match="start_mask is"):
        CRF(3, np.ones(3))
    with pytest.raises(ModelError, match="at least one tag"):
        CRF(0)


def test_state_dict_and_seeded_start() -> None:
    """Masks are no part of what is saved or sent; the start values follow torch's seed."""
    torch.manual_seed(7)
    first = CRF(5, *bioes_masks())
    torch.manual_seed(7)
    second = CRF(5)
    assert list(first.state_dict()) == ["start", "transitions", "end"]
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() <= 0.1


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba raises RuntimeError when it finds no directory to write its cache to."""
    original = numba.njit

    def without_cache(*arguments: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(*arguments, **options)

    monkeypatch.setattr(kernels.numba, "njit", without_cache)

    def double(x: float) -> float:
        return 2 * x

    assert kernels.kernel("float64(float64)")(double)(1.5) == 3.0
