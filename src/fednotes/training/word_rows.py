"""Tables with a row per word travel as the rows that a round's mini-batches read.

A gradient of one mini-batch is zero but in the rows of its words, and a site reads no
other row. So the server sends, and the sites return, the rows alone that any site's
mini-batch has:

    site    `marks` of its next mini-batch: a secret number other than zero for each row in it
    server  the rows whose sum of marks is not zero, and nothing of whose they are
    server  → these rows' numbers ("NAME.ids") and values; site → their gradients

The optimizer stays at the server, on whole tables and with zeros in all other rows, so
its moments move rows that no batch has, as ever, and every number is that of an
exchange of whole tables. Where all parameters are needed (evaluation, the end) whole
tables are sent. A sum that lacks a site is followed by a sum of marks alone. A site
that misses that too, and answers the round all the same, reads rows as it had them
last, and what its gradient has in rows that did not come is left
out: so a server that leaves rows out learns less, and never who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import TrainingError
from fednotes.core.tensors import load_into, require_like, shapes_of
from fednotes.core.update import Tensors
from fednotes.training.sites import rising

LEAST = 1024  # rows; a smaller table travels whole
IDS, MARKS = ".ids", ".marks"  # after a table's name
Rows = Mapping[str, Tensor]  # table → (rows,) int64, ascending


def tables(shared: Tensors) -> tuple[str, ...]:
    """The tables with a row per word that are large enough to travel by rows."""
    return tuple(
        n for n, v in shared.items() if n.startswith("words.") and len(v) >= LEAST
    )


def mark_shapes(shared: Tensors, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the marks of these tables."""
    return {name + MARKS: (len(shared[name]),) for name in names}


def gradient_shapes(
    shared: Tensors, rows: Rows, names: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a site returns from a round of gradients.

    Args:
        shared: All parameters that sites share.
        rows: The rows of tables that were sent.
        names: The tables that travel by rows.
    """
    sent = {name: (len(ids), *shared[name].shape[1:]) for name, ids in rows.items()}
    return shapes_of(shared) | sent | mark_shapes(shared, names)


def marked(total: Tensors, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The rows that any site has marked. total: a sum over sites."""
    return {name: torch.nonzero(total[name + MARKS]).flatten() for name in names}


def some(shared: Tensors, rows: Rows) -> dict[str, Tensor]:
    """What the server sends: whole parameters, and of tables `rows` with their numbers."""
    whole = {name: value for name, value in shared.items() if name not in rows}
    for name, ids in rows.items():
        whole |= {name: shared[name][ids], name + IDS: ids}
    return whole


def whole(mean: Tensors, shared: Tensors, rows: Rows) -> dict[str, Tensor]:
    """The mean gradient of all parameters, zero where no row was sent."""
    found = {name: value for name, value in mean.items() if not name.endswith(MARKS)}
    for name, ids in rows.items():
        found[name] = torch.zeros_like(shared[name]).index_copy_(0, ids, mean[name])
    return found


@torch.no_grad()
def take(
    targets: Tensors, values: Tensors, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Copy what `some` gave into a site's parameters; returns the rows that came.

    Raises TrainingError for what does not fit; nothing is copied then.
    """
    rows = {name: values[name + IDS] for name in names if name + IDS in values}
    like = dict(targets)
    for name in names:
        ids, table = rows.get(name, torch.empty(0)), targets[name]
        shape = (ids.numel(), *table.shape[1:])
        like[name + IDS] = torch.empty(ids.shape, dtype=torch.int64, device="meta")
        like[name] = torch.empty(shape, dtype=table.dtype, device="meta")
    require_like(like, values)
    for name, ids in rows.items():
        last = len(targets[name])
        if not rising(ids, last):
            raise TrainingError(
                f"tensor {name + IDS!r}: expected numbers of rows, 0 to {last - 1:,}, ascending"
            )
    plain = {name: value for name, value in targets.items() if name not in names}
    load_into(plain, {name: values[name] for name in plain})
    for name, ids in rows.items():
        place = targets[name].device
        targets[name].index_copy_(0, ids.to(place), values[name].to(place))
    return rows


def marks(
    read: Mapping[str, np.ndarray],
    shared: Tensors,
    names: tuple[str, ...],
    rng: np.random.Generator,
) -> dict[str, Tensor]:
    """Secret numbers in the rows of a mini-batch, 0 in all others: (rows of the table,)
    int32.

    Integers, which an update's norm does not count. A site's weight multiplies them in
    a sum; that numbers of several sites cancel there has a chance of about 2^-30 a row.
    """
    found = {}
    for name in names:
        row = np.unique(read[name])
        made = np.zeros(len(shared[name]), np.int32)
        made[row] = rng.integers(1, 2**30, len(row)) * rng.choice((-1, 1), len(row))
        found[name + MARKS] = torch.from_numpy(made)
    return found
