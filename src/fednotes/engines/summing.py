"""Ways to turn the replies to a request into a sum, and checks on the updates.

An update must have the right names and shapes, finite values and a bounded size. A site
checks this before its update leaves, and the server when a reply arrives. Under a
secure sum the server sees no values, so only the site's own check covers them.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
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

# Maximum size of an update's tensors, or of what a secure sum sends in their place.
MOST_BYTES = 2**36
MOST_WEIGHT = 1e12  # maximum weight of one site
MOST_METRICS = 10_000  # maximum number of metrics of one update
# Largest magnitude of a metric. A secure sum can represent it, and every sum adds it
# exactly.
MOST_METRIC = 2.0**52
logger = logging.getLogger("fednotes.validation")


def choose_expected_layout(
    updates: Iterable[Update], known: Expected | None = None
) -> Expected:
    """Choose the names, shapes and types that all updates of one request must have.

    Args:
        updates: The updates.
        known: The layout of earlier updates. It is returned if any update still has it;
            otherwise the most frequent layout is returned, with ties broken in favour
            of the earliest update.
    """
    layouts = [
        {
            name: (tuple(value.shape), value.dtype)
            for name, value in update.tensors.items()
        }
        for update in updates
    ]
    if known is not None and known in layouts:
        return known
    counts = Counter(
        tuple(sorted(layout.items(), key=lambda item: item[0])) for layout in layouts
    )
    return dict(counts.most_common(1)[0][0]) if counts else {}


def check_addable(
    update: Update, site: str, max_norm: float = 0.0, *, quoting: bool = False
) -> None:
    """Check that an update may be added to a sum.

    Args:
        update: The update.
        site: Its site's name, for messages.
        max_norm: Largest L2 norm of all its floating-point tensors together; 0 sets no
            limit.
        quoting: Whether the message quotes the wrong value, as the server's may. A
            site's refusal leaves the site, so it only names the tensor and the rule;
            the value is written to the site's log.

    Raises:
        RefusedError: It may not be added; the message names the site and the reason.
    """
    rule, value = _find_broken_rule(update, max_norm or math.inf)
    if not rule:
        return
    rule_and_value = f"{rule} ({value})" if value else rule
    if quoting:
        raise _make_refusal(site, rule_and_value)
    logger.warning("%s", _make_refusal(site, rule_and_value))
    raise _make_refusal(site, rule)


def require_example_counts(update: Update, site: str) -> None:
    """Check that an update has only numbers of examples: whole ones from zero.

    Args:
        update: The update.
        site: Its site's name, for messages.

    Raises:
        RefusedError: A number is another one; the message names the site and the count.
    """
    for name, tensor in update.tensors.items():
        counts = tensor.double()
        is_count = (counts >= 0) & (counts <= MOST_WEIGHT) & (counts == counts.round())
        if not bool(is_count.all()):
            raise _make_refusal(site, _describe_wrong_counts(f"tensor {name!r}"))
    for name, number in update.metrics.items():
        if not (0 <= number <= MOST_WEIGHT and float(number).is_integer()):
            raise _make_refusal(site, _describe_wrong_counts(f"the metric {name!r}"))


def _describe_wrong_counts(what: str) -> str:
    """Describe the rule for numbers of examples that something breaks."""
    return f"{what} must have whole numbers from 0 to {MOST_WEIGHT:g}"


def check_received(tensors: Tensors, site: str, task: str) -> None:
    """Check tensors from the server before a site computes with them.

    The result says nothing about the site's notes, so the server may see it.

    Args:
        tensors: The request's tensors.
        site: The site's name, for the message.
        task: The task of the request.

    Raises:
        RefusedError: A value is NaN or infinite; the message names the tensor.
    """
    for name, value in tensors.items():
        if not is_finite(value):
            raise RefusedError(
                f"site {site!r}: tensor {name!r} that came with task {task!r} is not "
                "finite (NaN or infinity), so nothing was computed with it: the model "
                "at the server is no longer usable; resume from an earlier checkpoint "
                "with a lower learning_rate"
            )


def find_mismatch(update: Update, expected: Expected) -> str:
    """Return the first unexpected name, shape or type; "" if all are as expected."""
    tensors = update.tensors
    odd = sorted(tensors.keys() ^ expected.keys())
    if odd:
        problem = "unknown here" if odd[0] in tensors else "missing"
        return f"tensor {odd[0]!r} is {problem}"
    for name, (shape, dtype) in expected.items():
        value = tensors[name]
        if tuple(value.shape) != shape:
            return f"tensor {name!r} has shape {tuple(value.shape)}, expected {shape}"
        if value.dtype != dtype:
            return f"tensor {name!r} has type {value.dtype}, expected {dtype}"
    return ""


def make_hidden_error(task: str) -> ConfigError:
    """Return the error for a method that needs single updates under a secure sum."""
    return ConfigError(
        f"{task!r}: the secure sum hides each site's update, which this method asks "
        "for: set secure_sum = false in [federation], or aggregation = "
        '"mean" in [training]'
    )


def _make_refusal(site: str, reason: str) -> RefusedError:
    """Return the error with which a site's update is refused."""
    return RefusedError(f"site {site!r}: its update was refused: {reason}")


def _find_broken_rule(update: Update, max_norm: float) -> tuple[str, str]:
    """Return the rule that an update breaks and its wrong value; both "" for none."""
    rule, value = _find_rule_broken_by_numbers(update)
    if rule:
        return rule, value
    size = nbytes(update.tensors)
    if size > MOST_BYTES:
        return f"it has more than {MOST_BYTES:,} bytes", f"{size:,}"

    squares = 0.0
    for name, tensor in update.tensors.items():
        if not is_finite(tensor):
            return f"tensor {name!r} is not finite (NaN or infinity)", ""
        if tensor.is_floating_point() and max_norm < math.inf:
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            squares += float(norm) ** 2
    if math.sqrt(squares) > max_norm:
        return f"its norm is above {max_norm:g}", f"it is {math.sqrt(squares):.4g}"
    return "", ""


def _find_rule_broken_by_numbers(update: Update) -> tuple[str, str]:
    """Return the rule that a number breaks and its value; both "" for none."""
    weight = float(update.weight)
    if not 0 <= weight <= MOST_WEIGHT:
        return f"its weight must be 0 to {MOST_WEIGHT:g}", f"it is {weight}"
    count = len(update.metrics)
    if count > MOST_METRICS:
        return f"it has more than {MOST_METRICS:,} metrics", f"{count:,}"
    for name, number in update.metrics.items():
        if not math.isfinite(number):
            return f"the metric {name!r} is not finite", f"it is {float(number)}"
        if abs(number) > MOST_METRIC:
            bounds = f"from -{MOST_METRIC:g} to {MOST_METRIC:g}"
            return f"the metric {name!r} must be {bounds}", f"it is {number:g}"
    return "", ""


Replies = Mapping[str, Reply]  # by site
Sites = Collection[str] | None  # None: all sites of the exchange


class Exchange(Protocol):
    """One request of a method and its replies.

    A summation protocol may send messages of its own before and after the method's
    task.

    Attributes:
        sites: The sites that receive the request, in the fixed order.
        least: How many sites must be in the sum.
        request: The method's request. If a stage comes before it, `run_task` gives it a
            later number.
    """

    sites: tuple[str, ...]
    least: int
    request: Request

    @property
    def reasons(self) -> str:
        """The reasons why sites are left out, in one line."""

    def run_task(
        self, attached: Attached | None = None, *, sites: Sites = None
    ) -> Replies:
        """Run the method's task at the sites.

        A site that has lost its state is asked once more, under another number.

        Args:
            attached: What the summation protocol adds to the request.
            sites: Ask only these sites.

        Returns:
            The replies of the sites that answered in time.
        """

    def run_stage(
        self, name: str, attached: Mapping[str, Attached], *, least: int | None = None
    ) -> Replies:
        """Send a message of the summation protocol.

        Args:
            name: The message's task, which begins with "@".
            attached: What each site receives.
            least: How many sites must answer; by default as many as for the task.
        """

    def discard_replies(self) -> None:
        """Discard the replies to the task, because it will be run again."""

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out of this round and report the reason."""


class Summing(ABC):
    """A protocol that turns the sites' updates into a sum.

    Attributes:
        least: Minimum number of sites in a sum.
    """

    least: int

    def find_threshold(self, num_sites: int) -> int:  # noqa: ARG002 - subclasses use it
        """Return the minimum number of sites in a sum over this number of sites."""
        return self.least

    @abstractmethod
    def sum_updates(self, exchange: Exchange) -> Total:
        """Run a request and return the sum; `included` names its sites in order."""

    def collect_updates(self, exchange: Exchange) -> dict[str, Update]:
        """Run a request and return the updates themselves, in the fixed order.

        Raises:
            ConfigError: The protocol hides them.
        """
        raise make_hidden_error(exchange.request.task)

    def state(self) -> dict[str, Any]:
        """Return the state that later sums depend on, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing by default
        """Return to an earlier `state`."""


class PlainSum(Summing):
    """Adds unmasked updates in the fixed order."""

    least = 1

    def __init__(self) -> None:
        self._known: dict[str, Expected] = {}

    def sum_updates(self, exchange: Exchange) -> Total:
        """Return the sum over the sites whose answers can be added."""
        updates = self.collect_updates(exchange)
        return replace(Total.of(updates.values()), included=tuple(updates))

    def collect_updates(self, exchange: Exchange) -> dict[str, Update]:
        """Return the updates of the sites whose answers can be added.

        Each update was checked on its own when it arrived.
        """
        replies = exchange.run_task()
        task = exchange.request.task
        updates = {}
        for site in exchange.sites:
            update = replies[site].update if site in replies else None
            if update is not None:
                updates[site] = update

        expected = choose_expected_layout(updates.values(), self._known.get(task))
        self._known[task] = expected
        for site in list(updates):
            reason = find_mismatch(updates[site], expected)
            if reason:
                del updates[site]
                exchange.refuse(site, str(_make_refusal(site, reason)))
        return updates
