"""The layers of a tagger, over flat batches without padding.

A batch of sentences is one matrix of tokens, (tokens, features), in the order of a
packed
sequence: sentences sorted by falling length, then all first tokens, all second tokens,
… . At step t the sentences that still run are the first `sizes[t]` rows of the step, so
no layer ever sees padding: the results do not depend on it, and nothing is computed for
it.

Each layer that takes word representations takes a list of parts, (tokens, d_1),
(tokens, d_2), …, and reads them as their concatenation. A part that is frozen (word
vectors, contextual features) so costs no gradient.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# The kernels' types are those of their numba signatures.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.kernels import dropout, kernel
from fednotes.core.types import TagSet
from fednotes.data.tags import allowed_transitions
from fednotes.taggers.crf import CRF

# The fixed character inventory. Ids: 0 padding, 1 any other character, 2 word begin,
# 3 word end, then these in order. Part of every saved model: never reorder.
CHARACTERS = (
    "".join(map(chr, range(33, 127)))
    + "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿŒœŠšŽž"
    + "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩαβγδεζηθικλμνξοπρστυφχψως"
    + "µ±≥≤°×÷·•–—‘’“”…→←↑↓½¼¾¹²³®™©§†‡€£∼≈≠∞"
)
UNKNOWN, BEGIN, END, FIRST = 1, 2, 3, 4
_CODE = {c: FIRST + i for i, c in enumerate(CHARACTERS)}
INVENTORY = FIRST + len(CHARACTERS)


def character_table(forms: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Character ids of word forms: (forms, size) uint8 and lengths (forms,) uint8.

    Each word stands between a begin and an end marker. Of a word that is longer than
    `size - 2` characters the head and the tail are kept: names of drugs and findings
    tell most at their two ends.
    """
    table = np.zeros((len(forms), size), np.uint8)
    lengths = np.zeros(len(forms), np.uint8)
    room = size - 2
    head = (room + 1) // 2
    for row, form in enumerate(forms):
        if len(form) > room:
            form = form[:head] + form[len(form) - (room - head) :]
        ids = [BEGIN, *(_CODE.get(c, UNKNOWN) for c in form), END]
        table[row, : len(ids)] = ids
        lengths[row] = len(ids)
    return table, lengths


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where the tokens of one batch stand; made from the sentence lengths alone.

    order: (sentences,) the batch's sentences by falling length.
    sizes: running sentences at each step, non-increasing; their sum is the tokens'
        number.
    step, row: (tokens,) each token's position in its sentence and sentence in `order`.
    place: (steps, sentences) token → flat row; -1 where a sentence has ended.
    reverse: (tokens,) the row of the token that mirrors it in its sentence (an
        involution).
    """

    order: np.ndarray
    sizes: tuple[int, ...]
    step: np.ndarray
    row: np.ndarray
    place: np.ndarray
    reverse: Tensor
    device: torch.device

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device) -> PackedLayout:
        """The layout of sentences with these lengths (each at least 1)."""
        order = np.argsort(-lengths, kind="stable")
        sorted_lengths = lengths[order]
        running = np.arange(sorted_lengths[0])[:, None] < sorted_lengths[None, :]
        step, row = np.nonzero(running)
        place = np.full(running.shape, -1, np.int64)
        place[step, row] = np.arange(len(step))
        reverse = place[sorted_lengths[row] - 1 - step, row]
        sizes = tuple(running.sum(axis=1).tolist())
        return cls(
            order, sizes, step, row, place, torch.from_numpy(reverse).to(device), device
        )

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return len(self.step)

    def shifted(self, offset: int) -> Tensor:
        """(tokens,) the row of the token `offset` steps on; `tokens` beyond the
        sentence."""
        steps = self.place.shape[0]
        target = self.step + offset
        inside = (target >= 0) & (target < steps)
        found = np.where(
            inside, self.place[np.clip(target, 0, steps - 1), self.row], -1
        )
        return torch.from_numpy(np.where(found < 0, self.tokens, found)).to(self.device)

    def padded(self) -> Tensor:
        """(sentences, steps) flat row of each token; `tokens` at padding."""
        place = np.where(self.place < 0, self.tokens, self.place)
        return torch.from_numpy(np.ascontiguousarray(place.T)).to(self.device)


def with_zero(x: Tensor) -> Tensor:
    """x (rows, …) with one row of zeros after the last."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


class _Reorder(torch.autograd.Function):
    """x[index] where index is an involution: the gradient is a gather too, not a
    scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None


class _ShiftedSum(torch.autograd.Function):
    """y (tokens, width, filters) → Σ_k y[neighbour_k, k] (tokens, filters), zeros
    outside."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ahead: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        padded = with_zero(y)
        out = padded[:, 0].index_select(0, ahead[0])
        for k in range(1, y.shape[1]):
            out += padded[:, k].index_select(0, ahead[k])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        padded = with_zero(grads[0])
        return torch.stack([padded.index_select(0, b) for b in back], dim=1), None, None


def parts_linear(
    parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """concat(parts) @ weightᵀ + bias, weight (out, Σ d), without a gradient for frozen
    parts."""
    columns = weight.split([part.shape[1] for part in parts], dim=1)
    out = F.linear(parts[0], columns[0], bias)
    for part, column in zip(parts[1:], columns[1:], strict=True):
        out = torch.addmm(out, part, column.T)
    return out


class Characters(nn.Module):
    """Character CNN with max-pooling: word → (filters,), ReLU.

    The convolution of an embedding is a sum of look-ups: with E (inventory, dim) and
    kernel W_k (dim, filters) at offset k, position p gives Σ_k (E W_k)[character p+k].
    The products E W_k are formed once a batch, (inventory, width, filters); then a word
    costs additions.
    """

    def __init__(self, dim: int, filters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(INVENTORY, dim))
        self.weight = nn.Parameter(torch.empty(width, filters, dim))
        self.bias = nn.Parameter(torch.zeros(filters))
        limit = math.sqrt(3.0 / dim)
        nn.init.uniform_(self.embedding, -limit, limit)
        bound = math.sqrt(6.0 / (width * (dim + filters)))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, characters: np.ndarray, lengths: np.ndarray) -> Tensor:
        """characters (words, size) uint8, lengths (words,) → (words, filters)."""
        width, filters, dim = self.weight.shape
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            table = F.linear(self.embedding, self.weight.reshape(-1, dim))
            table = table.view(INVENTORY, width, filters)
            # (words, filters)
            pooled = cast(Tensor, _CharMax.apply(table, characters, lengths))
        else:
            pooled = self._convolved(characters, lengths)
        return F.relu(pooled + self.bias)

    def _convolved(self, characters: np.ndarray, lengths: np.ndarray) -> Tensor:
        """The same by torch operations, for every device and type."""
        width, size = len(self.weight), characters.shape[1]
        inside = np.arange(size) < lengths[:, None]  # (words, size)
        here = torch.from_numpy(inside).to(self.weight.device)
        ids = torch.from_numpy(characters.astype(np.int64)).to(self.weight.device)
        embedded = F.embedding(ids, self.embedding) * here[..., None]
        padded = F.pad(embedded.transpose(1, 2), ((width - 1) // 2, width // 2))
        # not F.conv1d, which rounds to TF32 on an accelerator; (words, filters, size)
        summed = torch.einsum("wdsk,kfd->wfs", padded.unfold(2, width, 1), self.weight)
        return summed.masked_fill(~here[:, None], -torch.inf).max(2).values


class _CharMax(torch.autograd.Function):
    """table (inventory, width, filters) → max over a word's positions of Σ_k table[c,
    k]."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, characters: np.ndarray, lengths: np.ndarray
    ) -> Tensor:
        pooled = torch.empty(len(characters), table.shape[2])
        ctx.places = np.empty(pooled.shape, np.uint8)
        values = table.detach().contiguous().numpy()
        _char_max(values, characters, lengths, pooled.numpy(), ctx.places)
        ctx.characters, ctx.lengths, ctx.shape = characters, lengths, table.shape
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        out, grad = torch.zeros(ctx.shape), grads[0].contiguous().numpy()
        _char_scatter(grad, ctx.places, ctx.characters, ctx.lengths, out.numpy())
        return out, None, None


class WordCNN(nn.Module):
    """Parallel convolutions of several widths over the words, ReLU, concatenated.

    Zeros stand before the first and after the last word of a sentence. An even width
    reaches one word farther ahead than back.
    """

    def __init__(self, inputs: int, filters: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.filters = filters
        for width in self.widths:
            weight = torch.empty(width, filters, inputs)
            bound = math.sqrt(6.0 / (width * (inputs + filters)))
            self.register_parameter(
                f"weight_{width}", nn.Parameter(nn.init.uniform_(weight, -bound, bound))
            )
            self.register_parameter(f"bias_{width}", nn.Parameter(torch.zeros(filters)))

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.filters * len(self.widths)

    def forward(self, parts: Sequence[Tensor], layout: PackedLayout) -> Tensor:
        """parts of (tokens, Σ d) → (tokens, widths · filters)."""
        # (width, filters, d)
        weights = [getattr(self, f"weight_{w}") for w in self.widths]
        inputs = weights[0].shape[2]
        stacked = torch.cat([w.reshape(-1, inputs) for w in weights])
        y = parts_linear(parts, stacked)  # (tokens, Σ width · filters)
        outs = []
        blocks = y.split([w * self.filters for w in self.widths], dim=1)
        for width, block in zip(self.widths, blocks, strict=True):
            offsets = [k - (width - 1) // 2 for k in range(width)]
            ahead = torch.stack([layout.shifted(o) for o in offsets])  # (width, tokens)
            back = torch.stack([layout.shifted(-o) for o in offsets])
            summed = _ShiftedSum.apply(
                block.unflatten(1, (width, self.filters)), ahead, back
            )
            outs.append(F.relu(cast(Tensor, summed) + getattr(self, f"bias_{width}")))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


class BiLSTM(nn.Module):
    """Stacked bidirectional LSTM (Hochreiter and Schmidhuber 1997; gates i, f, g, o as
    in torch.nn.LSTM, one bias). Each direction's parameters are stacked: [0] forward,
    [1] back.
    """

    def __init__(self, inputs: int, units: int, layers: int) -> None:
        super().__init__()
        self.units, self.num_layers = units, layers
        for layer in range(layers):
            columns = inputs if layer == 0 else 2 * units
            into = torch.empty(2, 4 * units, columns)
            bound = math.sqrt(6.0 / (columns + units))
            nn.init.uniform_(into, -bound, bound)
            across = torch.stack(
                [
                    torch.cat(
                        [
                            nn.init.orthogonal_(torch.empty(units, units))
                            for _ in range(4)
                        ]
                    )
                    for _ in range(2)
                ]
            )
            bias = torch.zeros(2, 4 * units)
            # remember at first (Jozefowicz et al. 2015)
            bias[:, units : 2 * units] = 1.0
            self.register_parameter(f"weight_ih_l{layer}", nn.Parameter(into))
            self.register_parameter(f"weight_hh_l{layer}", nn.Parameter(across))
            self.register_parameter(f"bias_l{layer}", nn.Parameter(bias))

    def forward(
        self, parts: Sequence[Tensor], layout: PackedLayout, rate: float = 0.0
    ) -> Tensor:
        """parts of (tokens, Σ d) → (tokens, 2 · units); dropout between stacked layers."""
        out = parts[0]
        for layer in range(self.num_layers):
            into = getattr(self, f"weight_ih_l{layer}")
            across = getattr(self, f"weight_hh_l{layer}")
            bias = getattr(self, f"bias_l{layer}")
            if layer:
                parts = [dropout(out, rate, self.training)]
            mirrored = [
                cast(Tensor, _Reorder.apply(part, layout.reverse)) for part in parts
            ]
            gates_ahead = parts_linear(parts, into[0], bias[0])  # (tokens, 4 · units)
            gates_back = parts_linear(mirrored, into[1], bias[1])
            ahead, back = bilstm(gates_ahead, gates_back, across, layout.sizes)
            out = torch.cat(
                [ahead, cast(Tensor, _Reorder.apply(back, layout.reverse))], dim=1
            )
        return out


class Words(nn.Module):
    """Trainable word tables: pretrained vectors (a copy), hashed words, or both."""

    def __init__(self, table: Tensor | None, buckets: int, dim: int) -> None:
        super().__init__()
        if table is not None:
            self.weight = nn.Parameter(table.clone())
        if buckets:
            self.hashed = nn.Parameter(torch.randn(buckets, dim) / math.sqrt(dim))


class ContextMix(nn.Module):
    """Scalar mix over the layers of contextual features (Peters et al. 2018, Eq. 1),
    then an optional projection. Without parameters where there is one layer and no
    projection."""

    def __init__(self, layers: int, dim: int, project: int) -> None:
        super().__init__()
        if layers > 1:
            self.mix = nn.Parameter(torch.zeros(layers))
            self.gamma = nn.Parameter(torch.ones(1))
        if project:
            bound = math.sqrt(6.0 / (dim + project))
            self.project = nn.Parameter(
                nn.init.uniform_(torch.empty(project, dim), -bound, bound)
            )
            self.bias = nn.Parameter(torch.zeros(project))

    def forward(self, features: Tensor) -> Tensor:
        """features (tokens, layers, dim) → (tokens, dim or project)."""
        if features.shape[1] > 1:
            weights = torch.softmax(self.mix, 0) * self.gamma
            mixed = torch.einsum("l,tld->td", weights, features)
        else:
            mixed = features[:, 0]
        return (
            F.linear(mixed, self.project, self.bias)
            if hasattr(self, "project")
            else mixed
        )


class CrfOutput(nn.Module):
    """Projection to the tags of a tag set, and their CRF."""

    def __init__(self, inputs: int, tagset: TagSet) -> None:
        super().__init__()
        masks = (torch.from_numpy(mask) for mask in allowed_transitions(tagset))
        self.project = nn.Linear(inputs, len(tagset.tags))
        self.crf = CRF(len(tagset.tags), *masks)


# ---- characters pooled over a word ---


@kernel("void(f4[:,:,::1], u1[:,::1], u1[::1], f4[:,::1], u1[:,::1])")
def _char_max(table, characters, lengths, pooled, best):
    width, filters = table.shape[1], table.shape[2]
    left = (width - 1) // 2
    sums = np.empty(filters, np.float32)
    for word in range(characters.shape[0]):
        length = np.int64(lengths[word])
        for f in range(filters):
            pooled[word, f] = -np.inf
            best[word, f] = 0
        for p in range(length):
            sums[:] = 0.0
            for k in range(width):
                q = p + k - left
                if 0 <= q < length:
                    c = characters[word, q]
                    for f in range(filters):
                        sums[f] += table[c, k, f]
            for f in range(filters):
                better = sums[f] > pooled[word, f]
                pooled[word, f] = sums[f] if better else pooled[word, f]
                best[word, f] = np.uint8(p) if better else best[word, f]


@kernel("void(f4[:,::1], u1[:,::1], u1[:,::1], u1[::1], f4[:,:,::1])")
def _char_scatter(grad, best, characters, lengths, out):
    width, filters = out.shape[1], out.shape[2]
    left = (width - 1) // 2
    for word in range(characters.shape[0]):
        length = np.int64(lengths[word])
        for f in range(filters):
            g = grad[word, f]
            if g != 0.0:
                for k in range(width):
                    q = np.int64(best[word, f]) + k - left
                    if 0 <= q < length:
                        out[characters[word, q], k, f] += g


# ---- the recurrence of a bidirectional LSTM, with its analytic gradient --------------
#
# The two directions run side by side on the same packed rows (the backward one on
# mirrored sentences), so every step is dense. The gradient of the recurrent weights is
# one product over all tokens at the end instead of one a step. Off the CPU, torch
# operations do the same.


def bilstm(
    ahead: Tensor, back: Tensor, across: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Hidden states of both directions, each (tokens, units).

    ahead, back: (tokens, 4 · units) the input's share of the gates i, f, g, o (with
    bias), in packed order. across: (2, 4 · units, units). sizes: sentences running at
    each step.
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
        # gates after activation
        acts = [torch.empty_like(ahead), torch.empty_like(back)]
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
                    torch.addmm(
                        gates[start:end],
                        h[before : before + size],
                        across[d].T,
                        out=act,
                    )
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
            a, c, t, g = (
                act.numpy(),
                cells[d].numpy(),
                tanhs[d].numpy(),
                grad.contiguous().numpy(),
            )
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
