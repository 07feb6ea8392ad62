"""The layers of a tagger, which read flat batches without padding.

A batch of sentences is one matrix of tokens, (tokens, features), in the order of a
packed sequence: sentences by decreasing length, then all first tokens, all second
tokens, and so on. Step t has `sizes[t]` rows, one for each sentence that is longer than
t. No layer reads padding, so results do not depend on it and no time is spent on it.

A layer on word representations takes a list of parts, (tokens, d_1), (tokens, d_2), …,
and treats them as their concatenation. Frozen parts (word vectors, contextual features)
then need no gradient.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# The kernels' types are those of their numba signatures.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.kernels import dropout, kernel
from fednotes.core.types import TagSet
from fednotes.data.tags import find_allowed_transitions
from fednotes.taggers.crf import CRF

# The fixed character inventory. Ids: 0 padding, 1 any other character, 2 start of a
# word, 3 end of a word, then these characters in order. Every saved model depends on
# the order.
CHARACTERS = (
    "".join(map(chr, range(33, 127)))
    + "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿŒœŠšŽž"
    + "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩαβγδεζηθικλμνξοπρστυφχψως"
    + "µ±≥≤°×÷·•–—‘’“”…→←↑↓½¼¾¹²³®™©§†‡€£∼≈≠∞"
)
UNKNOWN, BEGIN, END, FIRST = 1, 2, 3, 4
_CODE = {c: FIRST + i for i, c in enumerate(CHARACTERS)}
INVENTORY = FIRST + len(CHARACTERS)


def make_character_table(
    forms: Sequence[str], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the character ids of word forms, between a start and an end marker.

    A word longer than `size - 2` characters loses its middle, because both ends of the
    name of a drug or finding are the most informative parts.

    Returns:
        (forms, size) uint8 ids, 0 after the end marker, and (forms,) uint8 lengths.
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
    """The positions of one batch's tokens, derived from sentence lengths.

    Attributes:
        order: (sentences,) the batch's sentences by decreasing length.
        sizes: Number of sentences still running at each step, non-increasing; the sum
            is the number of tokens.
        step: (tokens,) each token's position in its sentence.
        row: (tokens,) each token's sentence, as a position in `order`.
        place: (steps, sentences) each token's row; -1 after a sentence's end.
        reverse: (tokens,) for each token, the row of its mirror image in the sentence.
            Applying it twice restores the order.
        device: The device for the indices.
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
        """Lay out sentences of these lengths, each at least 1."""
        order = np.argsort(-lengths, kind="stable")
        sorted_lengths = lengths[order]
        running = np.arange(sorted_lengths[0])[:, None] < sorted_lengths[None, :]
        step, row = np.nonzero(running)
        place = np.full(running.shape, -1, np.int64)
        place[step, row] = np.arange(len(step))
        reverse = place[sorted_lengths[row] - 1 - step, row]
        return cls(
            order=order,
            sizes=tuple(running.sum(axis=1).tolist()),
            step=step,
            row=row,
            place=place,
            reverse=torch.from_numpy(reverse).to(device),
            device=device,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return len(self.step)

    def find_shifted_rows(self, offset: int) -> Tensor:
        """Return the row of the token `offset` steps after each token, (tokens,).

        The row is `tokens` outside the sentence.
        """
        steps = self.place.shape[0]
        target = self.step + offset
        inside = (target >= 0) & (target < steps)
        rows = self.place[np.clip(target, 0, steps - 1), self.row]
        is_token = inside & (rows >= 0)
        return torch.from_numpy(np.where(is_token, rows, self.tokens)).to(self.device)

    def find_neighbours(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the rows that a filter of some width reads, and their inverse.

        Returns:
            (width, tokens) each: the rows at the filter's offsets, and at the opposite
            offsets; as in `find_shifted_rows`.
        """
        offsets = [k - (width - 1) // 2 for k in range(width)]
        ahead = torch.stack([self.find_shifted_rows(o) for o in offsets])
        back = torch.stack([self.find_shifted_rows(-o) for o in offsets])
        return ahead, back

    def find_padded_rows(self) -> Tensor:
        """Return (sentences, steps), the row of each token; `tokens` at padding."""
        place = np.where(self.place < 0, self.tokens, self.place)
        return torch.from_numpy(np.ascontiguousarray(place.T)).to(self.device)


def append_zero_row(x: Tensor) -> Tensor:
    """Append a row of zeros to x, (rows, …)."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


class _Reorder(torch.autograd.Function):
    """x[index] for an index that is its own inverse.

    The gradient is then also a gather instead of a slower scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        """Return x[index]."""
        ctx.save_for_backward(index)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None


class _ShiftedSum(torch.autograd.Function):
    """Σ_k y[neighbour_k, k], (tokens, filters), of y, (tokens, width, filters).

    Neighbours outside the sentence are zero.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, ahead: Tensor, back: Tensor) -> Tensor:
        """Return the sum, (tokens, filters).

        Args:
            ctx: Keeps what `backward` needs.
            y: (tokens, width, filters).
            ahead: (width, tokens) the row of each token's neighbour k.
            back: (width, tokens) the row of the token that has this one as its
                neighbour k.
        """
        ctx.save_for_backward(back)
        padded = append_zero_row(y)
        out = padded[:, 0].index_select(0, ahead[0])
        for k in range(1, y.shape[1]):
            out += padded[:, k].index_select(0, ahead[k])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of y."""
        (back,) = ctx.saved_tensors
        padded = append_zero_row(grads[0])
        return torch.stack([padded.index_select(0, b) for b in back], dim=1), None, None


class _Neighbours(torch.autograd.Function):
    """The rows of x, (tokens, d), at each token's neighbours, (tokens, width · d).

    Neighbours outside the sentence are zero. It is the adjoint of `_ShiftedSum`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        padded = append_zero_row(x)
        return torch.cat([padded.index_select(0, rows) for rows in ahead], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        blocks = grads[0].chunk(len(back), dim=1)
        out = append_zero_row(blocks[0]).index_select(0, back[0])
        for block, rows in zip(blocks[1:], back[1:], strict=True):
            out += append_zero_row(block).index_select(0, rows)
        return out, None, None


def apply_linear(
    parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return concat(parts) @ weightᵀ + bias, without a gradient for frozen parts.

    The result has the dtype of the weight, also under autocast.

    Args:
        parts: (tokens, d_1), (tokens, d_2), ….
        weight: (outputs, Σ d).
        bias: (outputs,).
    """
    columns = weight.split([part.shape[1] for part in parts], dim=1)
    out = F.linear(parts[0], columns[0], bias)
    for part, column in zip(parts[1:], columns[1:], strict=True):
        out = torch.addmm(out, part, column.T)
    return out.to(weight.dtype)


class Characters(nn.Module):
    """Character CNN with max-pooling: word → (filters,), ReLU.

    The convolution of an embedding is a sum of look-ups: with E (inventory, dim) and
    kernel W_k (dim, filters) at offset k, the result at position p is Σ_k (E
    W_k)[character p+k]. The products E W_k (inventory, width, filters) are computed
    once per batch; a word then needs only additions.
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
        """Return (words, filters).

        Args:
            characters: (words, size) uint8 ids.
            lengths: (words,) number of ids.
        """
        width, filters, dim = self.weight.shape
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            table = apply_linear([self.embedding], self.weight.reshape(-1, dim))
            table = table.view(INVENTORY, width, filters)
            # (words, filters)
            pooled = cast(Tensor, _CharMax.apply(table, characters, lengths))
        else:
            pooled = self._convolve_in_torch(characters, lengths)
        return F.relu(pooled + self.bias)

    def _convolve_in_torch(self, characters: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Return each filter's maximum per word, on any device and in any dtype."""
        width = len(self.weight)
        size = characters.shape[1]
        device = self.weight.device
        # (words, size)
        inside = torch.from_numpy(np.arange(size) < lengths[:, None]).to(device)
        ids = torch.from_numpy(characters.astype(np.int64)).to(device)
        embedded = F.embedding(ids, self.embedding) * inside[..., None]
        padded = F.pad(embedded.transpose(1, 2), ((width - 1) // 2, width // 2))
        # not F.conv1d, which rounds to TF32 on an accelerator; (words, filters, size)
        summed = torch.einsum("wdsk,kfd->wfs", padded.unfold(2, width, 1), self.weight)
        return summed.masked_fill(~inside[:, None], -torch.inf).max(2).values


class _CharMax(torch.autograd.Function):
    """The maximum over a word's positions of Σ_k table[character, k].

    The table is (inventory, width, filters).
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, characters: np.ndarray, lengths: np.ndarray
    ) -> Tensor:
        """Return the maxima, (words, filters)."""
        pooled = torch.empty(len(characters), table.shape[2])
        ctx.places = np.empty(pooled.shape, np.uint8)
        values = table.detach().contiguous().numpy()
        _find_char_maxima(values, characters, lengths, pooled.numpy(), ctx.places)
        ctx.characters = characters
        ctx.lengths = lengths
        ctx.shape = table.shape
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the table."""
        out = torch.zeros(ctx.shape)
        grad = grads[0].contiguous().numpy()
        _scatter_char_gradients(
            grad, ctx.places, ctx.characters, ctx.lengths, out.numpy()
        )
        return out, None, None


class WordCNN(nn.Module):
    """Parallel convolutions of several widths over the words, concatenated.

    Sentences are padded with zeros. A filter of even width reaches one word farther
    forward than back. With one piece, the activation is ReLU. With several, it is
    maxout, the maximum over the pieces (Goodfellow et al. 2013), and a layer norm
    follows. Layers above the first are residual.

    Args:
        inputs: Number of columns of the input.
        filters: Number of filters of each width.
        widths: Widths of the filters, in words.
        layers: Number of layers.
        pieces: Number of linear maps per filter, of which the largest value counts.
    """

    def __init__(
        self,
        inputs: int,
        filters: int,
        widths: Sequence[int],
        *,
        layers: int = 1,
        pieces: int = 1,
    ) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.filters = filters
        self.pieces = pieces
        rows = filters * pieces
        for width in self.widths:
            weight = torch.empty(width, rows, inputs)
            bound = math.sqrt(6.0 / (width * (inputs + filters)))
            self.register_parameter(
                f"weight_{width}", nn.Parameter(nn.init.uniform_(weight, -bound, bound))
            )
            self.register_parameter(f"bias_{width}", nn.Parameter(torch.zeros(rows)))
        if pieces > 1:
            self.norm = nn.LayerNorm(self.outputs)
        self.above = nn.ModuleList(
            WordCNN(self.outputs, filters, widths, pieces=pieces)
            for _ in range(layers - 1)
        )

    @property
    def outputs(self) -> int:
        """Number of columns of the result."""
        return self.filters * len(self.widths)

    def forward(
        self, parts: Sequence[Tensor], layout: PackedLayout, rate: float = 0.0
    ) -> Tensor:
        """Return (tokens, widths · filters) of parts (tokens, d_1), ….

        `rate` is the dropout rate of each further layer's change.
        """
        neighbours = [layout.find_neighbours(width) for width in self.widths]
        out = self._convolve(parts, neighbours)
        for layer in self.above:
            change = cast(WordCNN, layer)._convolve([out], neighbours)
            out = out + dropout(change, rate, self.training)
        return out

    def _convolve(
        self, parts: Sequence[Tensor], neighbours: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return one layer's output, without the layers above it."""
        if self.pieces > 1:
            return self._take_maxima(torch.cat([*parts], dim=1), neighbours)

        # (width, filters, d)
        weights = [getattr(self, f"weight_{w}") for w in self.widths]
        inputs = weights[0].shape[2]
        stacked = torch.cat([w.reshape(-1, inputs) for w in weights])
        y = apply_linear(parts, stacked)  # (tokens, Σ width · filters)
        outputs = []
        blocks = y.split([w * self.filters for w in self.widths], dim=1)
        for width, block, near in zip(self.widths, blocks, neighbours, strict=True):
            # Each token adds the blocks of its neighbours.
            unfolded = block.unflatten(1, (width, self.filters))
            summed = cast(Tensor, _ShiftedSum.apply(unfolded, *near))
            outputs.append(F.relu(summed + getattr(self, f"bias_{width}")))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _take_maxima(
        self, x: Tensor, neighbours: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the normed maxima over the pieces, (tokens, widths · filters).

        With several pieces the products are wider than the input, so neighbours are
        read before the product and not summed after it.
        """
        outputs = []
        for width, near in zip(self.widths, neighbours, strict=True):
            read = cast(Tensor, _Neighbours.apply(x, *near))
            # (pieces · filters, width · d)
            weight = getattr(self, f"weight_{width}").transpose(0, 1).flatten(1)
            y = apply_linear([read], weight, getattr(self, f"bias_{width}"))
            outputs.append(reduce(torch.maximum, y.chunk(self.pieces, dim=1)))
        return cast(Tensor, self.norm(torch.cat(outputs, dim=1)))


class BiLSTM(nn.Module):
    """Stacked bidirectional LSTM (Hochreiter and Schmidhuber 1997).

    The gates are i, f, g, o as in torch.nn.LSTM, with a single bias. The parameters of
    both directions are stacked: [0] forward, [1] backward.
    """

    def __init__(self, inputs: int, units: int, layers: int) -> None:
        super().__init__()
        self.units = units
        self.num_layers = layers
        for layer in range(layers):
            columns = inputs if layer == 0 else 2 * units
            into = torch.empty(2, 4 * units, columns)
            bound = math.sqrt(6.0 / (columns + units))
            nn.init.uniform_(into, -bound, bound)
            across = torch.stack([_make_orthogonal_gates(units) for _ in range(2)])
            bias = torch.zeros(2, 4 * units)
            # The forget gates start open (Jozefowicz et al. 2015).
            bias[:, units : 2 * units] = 1.0
            self.register_parameter(f"weight_ih_l{layer}", nn.Parameter(into))
            self.register_parameter(f"weight_hh_l{layer}", nn.Parameter(across))
            self.register_parameter(f"bias_l{layer}", nn.Parameter(bias))

    def forward(
        self, parts: Sequence[Tensor], layout: PackedLayout, rate: float = 0.0
    ) -> Tensor:
        """Return (tokens, 2 · units) of parts (tokens, d_1), ….

        `rate` is the dropout rate between stacked layers.
        """
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
            gates_ahead = apply_linear(parts, into[0], bias[0])  # (tokens, 4 · units)
            gates_back = apply_linear(mirrored, into[1], bias[1])
            ahead, back = run_bilstm(gates_ahead, gates_back, across, layout.sizes)
            back_in_order = cast(Tensor, _Reorder.apply(back, layout.reverse))
            out = torch.cat([ahead, back_in_order], dim=1)
        return out


def _make_orthogonal_gates(units: int) -> Tensor:
    """Return (4 · units, units), an orthogonal matrix for each gate."""
    matrices = [nn.init.orthogonal_(torch.empty(units, units)) for _ in range(4)]
    return torch.cat(matrices)


class Words(nn.Module):
    """Trainable word tables: pretrained vectors, hashed attributes of words, or both.

    Args:
        table: Pretrained vectors (words, dim) to copy; None for none.
        hashed: Number of rows of each hashed table, by its name.
        dim: Number of columns of each hashed table.
        hashes: Number of rows that each word reads in a hashed table.
    """

    def __init__(
        self, table: Tensor | None, hashed: Mapping[str, int], dim: int, hashes: int
    ) -> None:
        super().__init__()
        if table is not None:
            self.weight = nn.Parameter(table.clone())
        for name, rows in hashed.items():
            values = torch.randn(rows, dim) / math.sqrt(hashes * dim)
            self.register_parameter(name, nn.Parameter(values))

    def look_up(self, name: str, rows: Tensor) -> Tensor:
        """Return (words, dim), the sum of each word's rows in a hashed table.

        Args:
            name: The table's name.
            rows: (words, hashes) row numbers.
        """
        table = self.get_parameter(name)
        if rows.shape[1] == 1:
            return F.embedding(rows[:, 0], table)
        return F.embedding_bag(rows, table, mode="sum")


class ContextMix(nn.Module):
    """Scalar mix over the layers of contextual features, and a projection.

    The mix is Eq. 1 of Peters et al. 2018. With one layer nothing is mixed, and with
    `project` = 0 nothing is projected.
    """

    def __init__(self, layers: int, dim: int, project: int) -> None:
        super().__init__()
        self.has_projection = project > 0
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
        """Return (tokens, project or dim) of features (tokens, layers, dim)."""
        if features.shape[1] > 1:
            weights = torch.softmax(self.mix, 0) * self.gamma
            mixed = torch.einsum("l,tld->td", weights, features).to(weights.dtype)
        else:
            mixed = features[:, 0]
        if not self.has_projection:
            return mixed
        return apply_linear([mixed], self.project, self.bias)


class CrfOutput(nn.Module):
    """Projection to the tags of a tag set, and their CRF."""

    def __init__(self, inputs: int, tagset: TagSet) -> None:
        super().__init__()
        masks = (torch.from_numpy(mask) for mask in find_allowed_transitions(tagset))
        self.project = nn.Linear(inputs, len(tagset.tags))
        self.crf = CRF(len(tagset.tags), *masks)


# ---- characters pooled over a word ---------------------------------------------------


@kernel("void(f4[:,:,::1], u1[:,::1], u1[::1], f4[:,::1], u1[:,::1])")
def _find_char_maxima(table, characters, lengths, pooled, best):
    """Set pooled to the maxima of `_CharMax`, and best to their positions.

    Args:
        table: (inventory, width, filters).
        characters: (words, size) ids.
        lengths: (words,) number of ids.
        pooled: (words, filters).
        best: (words, filters) the first position of the maximum in the word.
    """
    width = table.shape[1]
    filters = table.shape[2]
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
def _scatter_char_gradients(grad, best, characters, lengths, out):
    """Add the gradients of the maxima, grad (words, filters), to that of the table.

    The gradient of the table is out; the other arguments are those of
    `_find_char_maxima`.
    """
    width = out.shape[1]
    filters = out.shape[2]
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
# Both directions run on the same packed rows (the backward one on mirrored sentences),
# so every step is dense. The gradient of the recurrent weights is one product over all
# tokens at the end instead of one per step. On devices other than a CPU, torch
# operations compute the same.


def run_bilstm(
    ahead: Tensor, back: Tensor, across: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the hidden states of both directions, each (tokens, units).

    Args:
        ahead: (tokens, 4 · units) the input's contribution to the gates i, f, g, o,
            with bias, in packed order.
        back: The same for the backward direction, on mirrored sentences.
        across: (2, 4 · units, units) recurrent weights of both directions.
        sizes: Number of sentences still running at each step.
    """
    if ahead.device.type == "cpu" and ahead.dtype == torch.float32:
        outputs = _Recurrence.apply(ahead, back, across, tuple(sizes))
        return cast(tuple[Tensor, Tensor], outputs)
    return _run_recurrence(ahead, across[0], sizes), _run_recurrence(
        back, across[1], sizes
    )


def _run_recurrence(gates: Tensor, across: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute the recurrence with torch operations, for all devices and dtypes."""
    hidden = gates.new_zeros(sizes[0], across.shape[1])
    cell = hidden
    outputs = []
    start = 0
    for size in sizes:
        step = gates[start : start + size] + hidden[:size] @ across.T
        i, f, g, o = step.chunk(4, dim=1)
        cell = f.sigmoid() * cell[:size] + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
        start += size
    return torch.cat(outputs)


class _Recurrence(torch.autograd.Function):
    """The recurrence on a CPU in float32, with its analytic gradient.

    Under autocast, its matrix products have autocast's precision.
    """

    @staticmethod
    def forward(
        ctx: Any, ahead: Tensor, back: Tensor, across: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run both LSTM directions in packed order.

        `back` has mirrored sentences, so both directions run forwards. The gates are
        i, f, g, o.
        """
        units = across.shape[2]
        tokens = ahead.shape[0]
        # the gates after their activation functions
        activated = [torch.empty_like(ahead), torch.empty_like(back)]
        cells = torch.empty(2, tokens, units)
        tanhs = torch.empty(2, tokens, units)
        hidden = [torch.empty(tokens, units) for _ in range(2)]
        activated_arrays = [act.numpy() for act in activated]
        cell_arrays = [cell.numpy() for cell in cells]
        recurrent = across.to(_find_product_dtype(across))
        start = 0
        previous_start = 0
        for step, size in enumerate(sizes):
            end = start + size
            for d, gates in enumerate((ahead, back)):
                act = activated[d][start:end]
                h = hidden[d]
                if step == 0:
                    act.copy_(gates[:end])
                else:
                    previous = h[previous_start : previous_start + size]
                    _add_product(gates[start:end], previous, recurrent[d].T, out=act)
                act[:, : 2 * units].sigmoid_()
                act[:, 2 * units : 3 * units].tanh_()
                act[:, 3 * units :].sigmoid_()
                # -1 at the first step, which has no previous one
                previous_start_or_none = previous_start if step else -1
                _compute_cells(
                    activated_arrays[d],
                    cell_arrays[d],
                    start,
                    size,
                    previous_start_or_none,
                )
                torch.tanh(cells[d, start:end], out=tanhs[d, start:end])
                torch.mul(act[:, 3 * units :], tanhs[d, start:end], out=h[start:end])
            previous_start = start
            start = end
        ctx.save_for_backward(recurrent, *activated, cells, tanhs, *hidden)
        ctx.sizes = sizes
        return hidden[0], hidden[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of ahead, back and across."""
        recurrent, act0, act1, cells, tanhs, hidden0, hidden1 = ctx.saved_tensors
        sizes: tuple[int, ...] = ctx.sizes
        tokens, units = hidden0.shape
        outputs = [torch.empty_like(act0), torch.empty_like(act1)]
        for d, (act, grad) in enumerate(zip((act0, act1), grads, strict=True)):
            out = outputs[d]
            weights = recurrent[d].contiguous()
            flowing = torch.zeros(sizes[0], units)  # ∂L/∂h from the next step
            arrays = (
                act.numpy(),
                cells[d].numpy(),
                tanhs[d].numpy(),
                grad.contiguous().numpy(),
                out.numpy(),
                flowing.numpy(),
                np.zeros((sizes[0], units), np.float32),  # ∂L/∂cell
            )
            start = tokens
            for step in range(len(sizes) - 1, -1, -1):
                size = sizes[step]
                start -= size
                previous_start_or_none = start - sizes[step - 1] if step else -1
                _compute_gate_gradients(*arrays, start, size, previous_start_or_none)
                if step:
                    _multiply(out[start : start + size], weights, flowing[:size])

        previous = _find_previous_rows(sizes)
        first = sizes[0]
        weight_gradients = [
            _multiply(
                out[first:].T,
                hidden.index_select(0, previous).to(recurrent.dtype),
                torch.empty(4 * units, units),
            )
            for out, hidden in zip(outputs, (hidden0, hidden1), strict=True)
        ]
        return outputs[0], outputs[1], torch.stack(weight_gradients), None


def _find_product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products with x on a CPU: that of autocast, or its own."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return x.dtype


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Set out to a @ b, computed in the dtype of b; return it."""
    if a.dtype == b.dtype:
        return torch.mm(a, b, out=out)
    return out.copy_(a.to(b.dtype) @ b)


def _add_product(c: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Set out to c + a @ b, where the product is computed in the dtype of b."""
    if a.dtype == b.dtype:
        torch.addmm(c, a, b, out=out)
    else:
        torch.add(c, a.to(b.dtype) @ b, out=out)


def _find_previous_rows(sizes: Sequence[int]) -> Tensor:
    """Return the row of the token before, for each token after the first step.

    Rows are ordered by step, and within a step by sentence, the longest first (as in
    torch's `PackedSequence`). So token i of a step follows token i of the step before.

    Args:
        sizes: Number of sentences that have a token at each step; it never rises.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])  # the first row of each step
    rows = [starts[step] + np.arange(size) for step, size in enumerate(sizes[1:])]
    return torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, np.int64))


@kernel("void(f4[:,::1], f4[:,::1], i8, i8, i8)")
def _compute_cells(act, cells, start, size, previous_start):
    """Set the cells of one step in one direction: c = f · c_previous + i · g.

    Args:
        act: (tokens, 4 · units) the gates i, f, g, o after their activations.
        cells: (tokens, units).
        start: The row of the step's first sentence.
        size: Number of sentences still running.
        previous_start: The row of the previous step's first sentence, or -1.
    """
    units = cells.shape[1]
    for row in range(size):
        a = act[start + row]
        c = cells[start + row]
        if previous_start < 0:  # the first step
            for u in range(units):
                c[u] = a[u] * a[2 * units + u]
        else:
            previous = cells[previous_start + row]
            for u in range(units):
                c[u] = a[units + u] * previous[u] + a[u] * a[2 * units + u]


@kernel("void(" + "f4[:,::1], " * 7 + "i8, i8, i8)")
def _compute_gate_gradients(  # noqa: PLR0913 - the arrays of a compiled kernel
    act, cells, tanhs, grad, out, flowing, cell_grad, start, size, previous_start
):
    """Set the gradients of the gates of one step in one direction.

    Args:
        act: As in `_compute_cells`.
        cells: As in `_compute_cells`.
        tanhs: (tokens, units) tanh of the cells.
        grad: (tokens, units) gradients of the hidden states from above.
        out: (tokens, 4 · units) gradients of the gates before their activations.
        flowing: (sentences, units) gradients of the hidden states from the next step.
        cell_grad: (sentences, units) gradients of the cells, from the next step and
            afterwards for the previous one.
        start: As in `_compute_cells`.
        size: As in `_compute_cells`.
        previous_start: As in `_compute_cells`.
    """
    units = cells.shape[1]
    one = np.float32(1.0)
    for row in range(size):
        at = start + row
        for u in range(units):
            i = act[at, u]
            f = act[at, units + u]
            g = act[at, 2 * units + u]
            o = act[at, 3 * units + u]
            t = tanhs[at, u]
            dh = grad[at, u] + flowing[row, u]
            dc = cell_grad[row, u] + dh * o * (one - t * t)
            previous = (
                cells[previous_start + row, u]
                if previous_start >= 0
                else np.float32(0.0)
            )
            out[at, u] = dc * g * i * (one - i)
            out[at, units + u] = dc * previous * f * (one - f)
            out[at, 2 * units + u] = dc * i * (one - g * g)
            out[at, 3 * units + u] = dh * t * o * (one - o)
            cell_grad[row, u] = dc * f
