"""Exchange of only those rows of word tables that a round's mini-batches read.

The gradient of a mini-batch is zero except in the rows of its words, and a site reads
no other row. So the server sends, and the sites return, only the rows that any site's
mini-batch has:

1. Each site marks the rows of its next mini-batch with secret numbers (`make_marks`).
2. The server finds the rows whose sum of marks is not zero (`find_marked`), but does
   not learn which site reads a row.
3. It sends the indices ("NAME.ids") and values of these rows (`select_rows`), and each
   site returns their gradients.

The optimizer stays at the server and steps whole tables, with zero gradients in all
other rows. Its moments therefore also move rows that are in no batch, and all results
equal those of exchanging whole tables. When all parameters are needed (for evaluation
and at the end), whole tables are sent. If a site is missing from a sum, a separate sum
of marks follows. A site may miss that sum too and still take part in the round. It then
uses its latest values of rows that it did not receive, and omits their gradients. A
server that omits rows therefore learns less, and never who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import TrainingError
from fednotes.core.tensors import list_shapes, load_into, require_like
from fednotes.core.update import Tensors
from fednotes.training.sites import is_ascending

LEAST = 1024  # rows; smaller tables are sent whole
IDS, MARKS = ".ids", ".marks"  # after a table's name
Rows = Mapping[str, Tensor]  # table → (rows,) int64, ascending


def find_tables(shared: Tensors) -> tuple[str, ...]:
    """Return the names of word tables large enough to be sent by rows."""
    return tuple(
        name
        for name, value in shared.items()
        if name.startswith("words.") and len(value) >= LEAST
    )


def list_mark_shapes(
    shared: Tensors, names: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that mark the tables' rows, by tensor name."""
    return {name + MARKS: (len(shared[name]),) for name in names}


def list_gradient_shapes(
    shared: Tensors, rows: Rows, names: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a site's update in a round of gradients.

    Args:
        shared: All shared parameters.
        rows: The rows that were sent, by table.
        names: The tables that are sent by rows.
    """
    sent = {name: (len(ids), *shared[name].shape[1:]) for name, ids in rows.items()}
    return list_shapes(shared) | sent | list_mark_shapes(shared, names)


def find_marked(total: Tensors, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the rows that any site has marked.

    Args:
        total: The sum of the sites' marks.
        names: The tables that are sent by rows.
    """
    return {name: torch.nonzero(total[name + MARKS]).flatten() for name in names}


def select_rows(shared: Tensors, rows: Rows) -> dict[str, Tensor]:
    """Return the tensors to send: of tables, only some rows and their indices.

    Args:
        shared: All shared parameters.
        rows: The rows to send, by table.
    """
    sent = {name: value for name, value in shared.items() if name not in rows}
    for name, ids in rows.items():
        sent[name] = shared[name][ids]
        sent[name + IDS] = ids
    return sent


def fill_gradients(mean: Tensors, shared: Tensors, rows: Rows) -> dict[str, Tensor]:
    """Return the mean gradient of all parameters, zero in rows that were not sent.

    Args:
        mean: The mean of the sites' updates.
        shared: All shared parameters.
        rows: The rows that were sent, by table.
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
    """Copy the result of `select_rows` into a site's parameters.

    Args:
        targets: The site's shared parameters.
        values: The received tensors.
        names: The tables that are sent by rows.

    Returns:
        The indices of the received rows, by table.

    Raises:
        TrainingError: Names, shapes or indices do not match; nothing is copied.
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
    """Check the names, shapes and row indices of received tensors."""
    like = dict(targets)
    for name in names:
        ids = rows.get(name, torch.empty(0))
        table = targets[name]
        shape = (ids.numel(), *table.shape[1:])
        like[name + IDS] = torch.empty(ids.shape, dtype=torch.int64, device="meta")
        like[name] = torch.empty(shape, dtype=table.dtype, device="meta")
    require_like(like, values)
    for name, ids in rows.items():
        length = len(targets[name])
        if not is_ascending(ids, length):
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
    """Return random marks in the rows of a mini-batch and 0 in all others.

    Marks are integers, so they do not count in an update's norm. In a sum they are
    multiplied by the site's weight. The probability that the marks of several sites
    cancel is about 2^-30 per row.

    Args:
        read: The rows that the mini-batch reads, by table.
        shared: All shared parameters.
        names: The tables that are sent by rows.
        rng: Secret source of the marks.

    Returns:
        Marks by "NAME.marks", each (rows of the table,) int32.
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
