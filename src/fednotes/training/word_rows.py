"""Tables with a row for each word travel as the rows that a round's mini-batches read.

The gradient of a mini-batch is zero except in the rows of its words, and a site reads
no other row. So the server sends, and the sites return, only the rows that any site's
mini-batch has:

1. Each site marks the rows of its next mini-batch with secret numbers (`make_marks`).
2. The server finds the rows whose sum of marks is not zero (`find_marked`), and learns
   nothing of whose they are.
3. It sends these rows' numbers ("NAME.ids") and values (`select_rows`), and each site
   returns their gradients.

The optimizer stays at the server, on whole tables and with zeros in all other rows, so
its moments move rows that no batch has, and every number is that of an exchange of
whole tables. Where all parameters are needed (evaluation, the end), whole tables are
sent. A sum that lacks a site is followed by a sum of marks alone. A site may miss that
too and still answer the round. It then reads rows as it had them last, and its gradient
in rows that did not come is left out. So a server that leaves rows out learns less, and
never who reads them.
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


def find_tables(shared: Tensors) -> tuple[str, ...]:
    """Return the word tables that are large enough to travel by rows."""
    return tuple(
        name
        for name, value in shared.items()
        if name.startswith("words.") and len(value) >= LEAST
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


def find_marked(total: Tensors, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the rows that any site has marked.

    Args:
        total: The sum of the sites' marks.
        names: The tables that travel by rows.
    """
    return {name: torch.nonzero(total[name + MARKS]).flatten() for name in names}


def select_rows(shared: Tensors, rows: Rows) -> dict[str, Tensor]:
    """Return what the server sends: of tables some rows with their numbers.

    Args:
        shared: All parameters that sites share.
        rows: The rows of tables.
    """
    sent = {name: value for name, value in shared.items() if name not in rows}
    for name, ids in rows.items():
        sent[name] = shared[name][ids]
        sent[name + IDS] = ids
    return sent


def fill_gradients(mean: Tensors, shared: Tensors, rows: Rows) -> dict[str, Tensor]:
    """Return the mean gradient of all parameters, zero where no row was sent.

    Args:
        mean: What sites returned.
        shared: All parameters that sites share.
        rows: The rows of tables that were sent.
    """
    gradients = {
        name: value for name, value in mean.items() if not name.endswith(MARKS)
    }
    for name, ids in rows.items():
        zeros = torch.zeros_like(shared[name])
        gradients[name] = zeros.index_copy_(0, ids, mean[name])
    return gradients


@torch.no_grad()
def load_rows(
    targets: Tensors, values: Tensors, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Copy what `select_rows` returned into a site's parameters.

    Args:
        targets: The site's shared parameters.
        values: What came.
        names: The tables that travel by rows.

    Returns:
        The numbers of the rows that came, by table.

    Raises:
        TrainingError: Something does not match; nothing is copied then.
    """
    rows = {name: values[name + IDS] for name in names if name + IDS in values}
    _require_rows(targets, values, rows, names)
    complete = {name: value for name, value in targets.items() if name not in names}
    load_into(complete, {name: values[name] for name in complete})
    for name, ids in rows.items():
        device = targets[name].device
        targets[name].index_copy_(0, ids.to(device), values[name].to(device))
    return rows


def _require_rows(
    targets: Tensors, values: Tensors, rows: Rows, names: tuple[str, ...]
) -> None:
    """Check the names, shapes and row numbers of what came."""
    like = dict(targets)
    for name in names:
        ids, table = rows.get(name, torch.empty(0)), targets[name]
        shape = (ids.numel(), *table.shape[1:])
        like[name + IDS] = torch.empty(ids.shape, dtype=torch.int64, device="meta")
        like[name] = torch.empty(shape, dtype=table.dtype, device="meta")
    require_like(like, values)
    for name, ids in rows.items():
        length = len(targets[name])
        if not rising(ids, length):
            raise TrainingError(
                f"tensor {name + IDS!r}: expected numbers of rows, 0 to "
                f"{length - 1:,}, ascending"
            )


def make_marks(
    read: Mapping[str, np.ndarray],
    shared: Tensors,
    names: tuple[str, ...],
    rng: np.random.Generator,
) -> dict[str, Tensor]:
    """Return secret numbers in the rows of a mini-batch, and 0 in all others.

    They are integers, which an update's norm does not count. A site's weight multiplies
    them in a sum. That numbers of several sites cancel there has a chance of about
    2^-30 for each row.

    Args:
        read: The rows that the mini-batch reads, by table.
        shared: All parameters that sites share.
        names: The tables that travel by rows.
        rng: Where the numbers come from.

    Returns:
        (rows of the table,) int32, by "NAME.marks".
    """
    marks = {}
    for name in names:
        rows = np.unique(read[name])
        sizes = rng.integers(1, 2**30, len(rows))
        signs = rng.choice((-1, 1), len(rows))
        numbers = np.zeros(len(shared[name]), np.int32)
        numbers[rows] = sizes * signs
        marks[name + MARKS] = torch.from_numpy(numbers)
    return marks
