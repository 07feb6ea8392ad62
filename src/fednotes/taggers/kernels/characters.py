"""Characters pooled over a word: compiled on the CPU in float32, torch operations elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel


def char_max(table: Tensor, characters: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Any]:
    """The pooled convolution (words, filters) and the position of each maximum (words, filters).

    table: (inventory, width, filters). characters: (words, size) uint8. lengths: (words,).
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


def _neighbours(
    characters: np.ndarray, lengths: np.ndarray, like: Tensor, width: int | None = None
) -> Tensor:
    """(words, size, width) the character at each offset; -1, the row of zeros, outside."""
    width = like.shape[1] if width is None else width
    size = characters.shape[1]
    out = np.empty((*characters.shape, width), np.int64)
    for k in range(width):
        position = np.arange(size) + k - (width - 1) // 2
        inside = (position >= 0) & (position[None, :] < lengths[:, None].astype(np.int64))
        found = characters[:, np.clip(position, 0, size - 1)].astype(np.int64)
        out[:, :, k] = np.where(inside, found, -1)
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
