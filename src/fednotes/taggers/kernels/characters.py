"""Compiled parts of the layers: characters pooled over a word, and dropout.

The character kernels are for the CPU in float32; elsewhere torch operations do the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel


def char_max(table: Tensor, characters: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Any]:
    """The pooled convolution and where its maxima are.

    table: (inventory, width, filters). characters: (words, size) uint8. lengths: (words,).
    Returns (words, filters) and the position of each maximum (words, filters).
    """
    if table.device.type == "cpu" and table.dtype == torch.float32:
        pooled = torch.empty(len(characters), table.shape[2])
        places = np.empty(pooled.shape, np.uint8)
        values = table.detach().contiguous().numpy()
        _char_max(values, characters, lengths, pooled.numpy(), places)
        return pooled, places
    neighbours = _neighbours(characters, lengths, table)  # (words, size, width)
    summed = table.new_zeros(*characters.shape, table.shape[2])
    padded = torch.cat([table, table.new_zeros(1, *table.shape[1:])])
    for k in range(table.shape[1]):
        summed += padded[neighbours[:, :, k], k]
    size = torch.as_tensor(lengths, device=table.device).long()
    outside = torch.arange(characters.shape[1], device=table.device) >= size[:, None]
    pooled, best = summed.masked_fill(outside[:, :, None], -torch.inf).max(dim=1)
    return pooled, best


def char_scatter(
    grad: Tensor, best: Any, characters: np.ndarray, lengths: np.ndarray, shape: torch.Size
) -> Tensor:
    """The gradient of `char_max` for its table; arguments as there."""
    if isinstance(best, np.ndarray):
        out = torch.zeros(shape)
        _char_scatter(grad.contiguous().numpy(), best, characters, lengths, out.numpy())
        return out
    out = grad.new_zeros(shape[0] + 1, *shape[1:])
    neighbours = _neighbours(characters, lengths, grad, shape[1])
    columns = torch.arange(shape[2], device=grad.device).expand_as(best)
    for k in range(shape[1]):
        rows = neighbours[:, :, k].gather(1, best)  # (words, filters)
        out[:, k].index_put_((rows, columns), grad, accumulate=True)
    return out[:-1]


def dropout_cpu(x: Tensor, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """x (…) float32 with values dropped, and the mask that was multiplied (0 or 1 / kept).

    The probability is `rate` rounded to 16 bits. Value i depends on (seed, i) alone.
    """
    x = x.detach().contiguous()
    out, mask = torch.empty_like(x), torch.empty_like(x)
    limit = round(rate * 65536)
    scale = 65536.0 / (65536 - limit)
    flat = (x.view(-1).numpy(), out.view(-1).numpy(), mask.view(-1).numpy())
    _dropout(*flat, np.uint64(limit), np.float32(scale), np.uint64(seed))
    return out, mask


def _neighbours(
    characters: np.ndarray, lengths: np.ndarray, like: Tensor, width: int | None = None
) -> Tensor:
    """(words, size, width) the character at each offset; `inventory` (a zero row) outside."""
    width = like.shape[1] if width is None else width
    size = characters.shape[1]
    zero_row = -1  # the appended row
    out = np.full((*characters.shape, width), zero_row, np.int64)
    for k in range(width):
        position = np.arange(size) + k - (width - 1) // 2
        inside = (position >= 0) & (position[None, :] < lengths[:, None].astype(np.int64))
        found = characters[:, np.clip(position, 0, size - 1)].astype(np.int64)
        out[:, :, k] = np.where(inside, found, zero_row)
    return torch.from_numpy(out).to(like.device)


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


@kernel("void(f4[::1], f4[::1], f4[::1], u8, f4, u8)")
def _dropout(x, out, mask, limit, scale, seed):
    """SplitMix64 (Steele et al. 2014) of a counter; each 64-bit number serves four values."""
    n = x.shape[0]
    zero = np.float32(0.0)
    quarter = (n + 3) // 4
    low = np.uint64(0xFFFF)
    for j in range(quarter):
        z = seed + np.uint64(j + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        for part in range(4):
            i = part * quarter + j
            if i < n:
                m = scale if ((z >> np.uint64(16 * part)) & low) >= limit else zero
                mask[i] = m
                out[i] = x[i] * m
