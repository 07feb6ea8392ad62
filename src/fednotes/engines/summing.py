"""How the replies of a request become a sum; the place where a secure one goes in.

What an update must be before it is added: named right, shaped right, finite, of bounded
size.

The site runs this before anything leaves it, the server when a reply arrives. Under a
secure sum the server sees no values, so there the site's own check is the only one of
them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.messages import Attached, Reply, Request
from fednotes.core.tensors import is_finite, nbytes
from fednotes.core.update import Tensors, Total, Update

Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name → shape, type

# of an update's tensors, or of what a secure sum sends in their place
MOST_BYTES = 2**36
MOST_WEIGHT = 1e12  # how much one site may count
MOST_METRICS = 10_000
MOST_METRIC = (
    2.0**52
)  # of a metric, either sign: what a secure sum holds, and any sum adds exactly
logger = logging.getLogger("fednotes.validation")


def agreed(updates: Iterable[Update], known: Expected | None = None) -> Expected:
    """What the updates of one request should look like.

    That is what `known` says where any update still looks so, else what most look like;
    of equally many, what the first does.
    """
    seen = [
        {
            name: (tuple(value.shape), value.dtype)
            for name, value in update.tensors.items()
        }
        for update in updates
    ]
    if known is not None and known in seen:
        return known
    counts = Counter(
        tuple(sorted(each.items(), key=lambda item: item[0])) for each in seen
    )
    return dict(counts.most_common(1)[0][0]) if counts else {}


def check_update(
    update: Update, site: str, max_norm: float = 0.0, *, quoting: bool = False
) -> None:
    """Pass an update that may be added to a sum.

    max_norm: of all its floating-point tensors together (L2); 0 for no bound. quoting:
    say the value that is wrong, as a server may of what it was sent. A site's own
    refusal, which leaves it, names the tensor and the rule alone; the value is in its
    log.
    Raises RefusedError with the site and the reason.
    """
    rule, value = _broken(update, max_norm or math.inf)
    if not rule:
        return
    whole = f"{rule} ({value})" if value else rule
    if not quoting:
        logger.warning("%s", _refusal(site, whole))
    raise _refusal(site, whole if quoting else rule)


def check_received(tensors: Tensors, site: str, task: str) -> None:
    """Check what a server sent before a site computes with it.

    The check says nothing of the site's notes, so that its outcome may be told.

    Args:
        tensors: What came with the request.
        site: The site's name, for the message.
        task: The task that was asked for.

    Raises:
        RefusedError: A number is NaN or infinite; names the tensor.
    """
    for name, value in tensors.items():
        if not is_finite(value):
            raise RefusedError(
                f"site {site!r}: tensor {name!r} that came with task {task!r} is not finite (NaN "
                "or infinity), so nothing was computed with it: the model at the server is no "
                "longer usable; resume from an earlier checkpoint with a lower learning_rate"
            )


def unlike(update: Update, like: Expected) -> str:
    """What is other than expected of names, shapes and types; "" for nothing."""
    tensors = update.tensors
    if odd := sorted(tensors.keys() ^ like.keys()):
        return (
            f"tensor {odd[0]!r} is {'unknown here' if odd[0] in tensors else 'missing'}"
        )
    for name, (shape, dtype) in like.items():
        value = tensors[name]
        if tuple(value.shape) != shape:
            return f"tensor {name!r} has shape {tuple(value.shape)}, expected {shape}"
        if value.dtype != dtype:
            return f"tensor {name!r} has type {value.dtype}, expected {dtype}"
    return ""


def hidden(task: str) -> ConfigError:
    """What a method is told that asks for single updates where there are sums alone."""
    return ConfigError(
        f"{task!r}: the secure sum hides each site's update, which this method asks for: set "
        'secure_sum = false in [federation], or aggregation = "mean" in [training]'
    )


def _refusal(site: str, reason: str) -> RefusedError:
    return RefusedError(f"site {site!r}: its update is refused: {reason}")


def _broken(update: Update, max_norm: float) -> tuple[str, str]:
    """The rule that is broken, and by what; both empty for none."""
    weight = float(update.weight)
    if not 0 <= weight <= MOST_WEIGHT:
        return f"its weight must be 0 to {MOST_WEIGHT:g}", f"it is {weight}"
    if (count := len(update.metrics)) > MOST_METRICS:
        return f"it has more than {MOST_METRICS:,} metrics", f"{count:,}"
    for name, number in update.metrics.items():
        if not math.isfinite(number):
            return f"the metric {name!r} is not finite", f"it is {float(number)}"
        if abs(number) > MOST_METRIC:
            rule = (
                f"the metric {name!r} must be from -{MOST_METRIC:g} to {MOST_METRIC:g}"
            )
            return rule, f"it is {number:g}"
    if (size := nbytes(update.tensors)) > MOST_BYTES:
        return f"it has more than {MOST_BYTES:,} bytes", f"{size:,}"
    square = 0.0
    for name, value in update.tensors.items():
        if not is_finite(value):
            return f"tensor {name!r} is not finite (NaN or infinity)", ""
        if value.is_floating_point() and max_norm < math.inf:
            square += (
                float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64))
                ** 2
            )
    if math.sqrt(square) > max_norm:
        return f"its norm is above {max_norm:g}", f"it is {math.sqrt(square):.4g}"
    return "", ""


Replies = Mapping[str, Reply]  # by site
Sites = Collection[str] | None  # None: all that the exchange is with


class Exchange(Protocol):
    """What a way of summing may do: the method's task, and messages of its own around
    it.

    sites: who is asked, in the fixed order. least: how many must be in the sum.
    request: the method's; `task` gives it a later number where a stage comes before it.
    """

    sites: tuple[str, ...]
    least: int
    request: Request

    @property
    def reasons(self) -> str:
        """Why sites are left out, in one line."""

    def task(self, attached: Attached | None = None, *, sites: Sites = None) -> Replies:
        """Run the method's task; the replies of those that answered in time. sites: ask
        these alone. Who has lost its state is asked once more, under another number."""

    def stage(
        self, name: str, attached: Mapping[str, Attached], *, least: int | None = None
    ) -> Replies:
        """One message of the protocol's own, `name` beginning with "@", to the sites
        named.

        least: how many must answer; None: as many as for the task.
        """

    def again(self) -> None:
        """Forget what came of the task: it is to be done once more."""

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out of this round, and say why."""


class Summing(Protocol):
    """How the sites' updates become a sum. least: the fewest sites that it can add."""

    least: int

    def total(self, exchange: Exchange) -> Total:
        """The sum, with `included` in the fixed order."""

    def each(self, exchange: Exchange) -> dict[str, Update]:
        """The updates themselves, in the fixed order.

        Raises ConfigError where none is seen.
        """
        raise hidden(exchange.request.task)

    def state(self) -> dict[str, Any]:
        """What later sums depend on, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a kept state."""
        return


class PlainSum(Summing):
    """Updates added as they are, in the fixed order."""

    least = 1

    def __init__(self) -> None:
        self._known: dict[str, Expected] = {}

    def total(self, exchange: Exchange) -> Total:
        """Σ over the sites that answered and fit together."""
        updates = self.each(exchange)
        return replace(Total.of(updates.values()), included=tuple(updates))

    def each(self, exchange: Exchange) -> dict[str, Update]:
        """Of the sites that answered and fit together; each alone was checked as it
        came."""
        replies, task = exchange.task(), exchange.request.task
        given = {s: replies[s].update for s in exchange.sites if s in replies}
        updates = {site: update for site, update in given.items() if update is not None}
        like = self._known[task] = agreed(updates.values(), self._known.get(task))
        for site in list(updates):
            if reason := unlike(updates[site], like):
                del updates[site]
                exchange.refuse(site, str(_refusal(site, reason)))
        return updates
