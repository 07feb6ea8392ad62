"""The recurrence of a bidirectional LSTM over a packed batch, with its analytic gradient.

The two directions run side by side on the same packed rows (the backward one on mirrored
sentences), so every step is dense. The gradient of the recurrent weights is one product over
all tokens at the end instead of one a step. Off the CPU, torch operations do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel


def bilstm(
    ahead: Tensor, back: Tensor, across: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Hidden states of both directions, each (tokens, units).

    ahead, back: (tokens, 4 · units) the input's share of the gates i, f, g, o (with bias), in
    packed order. across: (2, 4 · units, units). sizes: sentences running at each step.
    """
    if ahead.device.type == "cpu" and ahead.dtype == torch.float32:
        outputs = _Recurrence.apply(ahead, back, across, tuple(sizes))
        return cast(tuple[Tensor, Tensor], outputs)
    return _plain(ahead, across[0], sizes), _plain(back, across[1], sizes)


def _plain(gates: Tensor, across: Tensor, sizes: Sequence[int]) -> Tensor:
    """The recurrence by torch operations under autograd, any device and type."""
    hidden = gates.new_zeros(sizes[0], across.shape[1])
    cell = hidden
    outs, start = [], 0
    for size in sizes:
        step = gates[start : start + size] + hidden[:size] @ across.T
        i, f, g, o = step.chunk(4, dim=1)
        cell = f.sigmoid() * cell[:size] + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outs.append(hidden)
        start += size
    return torch.cat(outs)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ahead: Tensor, back: Tensor, across: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        units = across.shape[2]
        tokens = ahead.shape[0]
        acts = [torch.empty_like(ahead), torch.empty_like(back)]  # gates after activation
        cells = torch.empty(2, tokens, units)
        tanhs = torch.empty(2, tokens, units)
        hidden = [torch.empty(tokens, units) for _ in range(2)]
        views = [
            (a.numpy(), c.numpy(), t.numpy(), h.numpy())
            for a, c, t, h in zip(acts, cells, tanhs, hidden, strict=True)
        ]
        start, before = 0, 0
        for step, size in enumerate(sizes):
            end = start + size
            for d, gates in enumerate((ahead, back)):
                act, h = acts[d][start:end], hidden[d]
                if step == 0:
                    act.copy_(gates[:end])
                else:
                    torch.addmm(gates[start:end], h[before : before + size], across[d].T, out=act)
                act[:, : 2 * units].sigmoid_()
                act[:, 2 * units : 3 * units].tanh_()
                act[:, 3 * units :].sigmoid_()
                a, c, _, _ = views[d]
                _cell(a, c, start, size, before if step else -1)
                torch.tanh(cells[d, start:end], out=tanhs[d, start:end])
                torch.mul(act[:, 3 * units :], tanhs[d, start:end], out=h[start:end])
            before, start = start, end
        ctx.save_for_backward(across, *acts, cells, tanhs, *hidden)
        ctx.sizes = sizes
        return hidden[0], hidden[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        across, act0, act1, cells, tanhs, hidden0, hidden1 = ctx.saved_tensors
        sizes: tuple[int, ...] = ctx.sizes
        tokens, units = hidden0.shape
        outs = [torch.empty_like(act0), torch.empty_like(act1)]
        for d, (act, grad) in enumerate(zip((act0, act1), grads, strict=True)):
            out = outs[d]
            weights = across[d].contiguous()
            flowing = torch.zeros(sizes[0], units)  # ∂L/∂h from the step after
            cell_grad = np.zeros((sizes[0], units), np.float32)
            a, c, t, g = act.numpy(), cells[d].numpy(), tanhs[d].numpy(), grad.contiguous().numpy()
            o, flow = out.numpy(), flowing.numpy()
            start = tokens
            for step in range(len(sizes) - 1, -1, -1):
                size = sizes[step]
                start -= size
                before = start - sizes[step - 1] if step else -1
                _cell_grad(a, c, t, g, o, flow, cell_grad, start, size, before)
                if step:
                    torch.mm(out[start : start + size], weights, out=flowing[:size])
        previous = _previous_rows(sizes)
        first = sizes[0]
        weight_grad = torch.stack(
            [
                out[first:].T @ hidden.index_select(0, previous)
                for out, hidden in zip(outs, (hidden0, hidden1), strict=True)
            ]
        )
        return outs[0], outs[1], weight_grad, None


def _previous_rows(sizes: Sequence[int]) -> Tensor:
    """The row one step earlier of every token that is not a sentence's first."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows = [np.arange(size) + starts[t] for t, size in enumerate(sizes[1:])]
    return torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, np.int64))


@kernel("void(f4[:,::1], f4[:,::1], i8, i8, i8)")
def _cell(act, cells, start, size, before):
    units = cells.shape[1]
    for row in range(size):
        a, c = act[start + row], cells[start + row]
        if before < 0:
            for u in range(units):
                c[u] = a[u] * a[2 * units + u]
        else:
            previous = cells[before + row]
            for u in range(units):
                c[u] = a[units + u] * previous[u] + a[u] * a[2 * units + u]


@kernel("void(" + "f4[:,::1], " * 7 + "i8, i8, i8)")
def _cell_grad(act, cells, tanhs, grad, out, flowing, cell_grad, start, size, before):
    units = cells.shape[1]
    one = np.float32(1.0)
    for row in range(size):
        at = start + row
        for u in range(units):
            i, f = act[at, u], act[at, units + u]
            g, o = act[at, 2 * units + u], act[at, 3 * units + u]
            t = tanhs[at, u]
            dh = grad[at, u] + flowing[row, u]
            dc = cell_grad[row, u] + dh * o * (one - t * t)
            previous = cells[before + row, u] if before >= 0 else np.float32(0.0)
            out[at, u] = dc * g * i * (one - i)
            out[at, units + u] = dc * previous * f * (one - f)
            out[at, 2 * units + u] = dc * i * (one - g * g)
            out[at, 3 * units + u] = dh * t * o * (one - o)
            cell_grad[row, u] = dc * f
