"""The messages of the secure sum: typed values in a header, and tables of bytes.

    request of the server                answer of a site
    @keys     Stage: number              KeysMessage
    @shares   Stage: number, keys        SharesMessage
    a task    Terms, boxes               Masking, words
    @masked   Terms, boxes               Masking, words
    @confirm  Stage: lists, receipts     ConfirmMessage
    @unmask   Stage: all of these        UnmaskMessage

    boxes           uint8  (roster, roster, bytes of a box): sender, receiver
    receipts        uint8  (survivors, survivors, bytes of a receipt): as boxes
    confirmations   uint8  as receipts; zeros where there is none
    words           int64  a masked update

Values whose number grows quadratically with the number of sites are not JSON. All sites
receive the same message, which contains the values for each of them. None of this is
secret: a box is sealed for its receiver. This module checks the form of a message; the
receiver checks its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import RefusedError
from fednotes.core.messages import (
    Attached,
    Count,
    Name,
    WireError,
    from_json_values,
    to_json_values,
)
from fednotes.privacy.secure_sum.crypto import SHARE_BYTES, Words
from fednotes.privacy.secure_sum.fixed_point import SumLayout

KEYS = "@keys"
SHARES = "@shares"
MASKED = "@masked"
CONFIRM = "@confirm"
UNMASK = "@unmask"
BOX_BYTES = 2 * SHARE_BYTES + 16  # two shares and a tag
RECEIPT_BYTES = 32
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class KeysMessage:
    """A site's public keys for one exchange.

    Attributes:
        exchange: Digest of the context, the sites and the threshold, 32 bytes.
        site: The site.
        sharing: X25519 key for sealing shares.
        masking: X25519 key of the pair masks.
        commitment: One-way image of the self mask's seed.
        signature: Signature by the site's `Identity`.
    """

    exchange: bytes
    site: str
    sharing: bytes
    masking: bytes
    commitment: bytes
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class SharesMessage:
    """A site's shares for the other sites.

    Attributes:
        exchange: Digest of the exchange.
        site: The site.
        session: Digest of all public keys that the site received.
        boxes: The sealed box for each receiver.
    """

    exchange: bytes
    site: str
    session: bytes
    boxes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedMessage:
    """A site's masked update.

    Attributes:
        exchange: Digest of the exchange.
        site: The site.
        layout: The layout of the update as words.
        receipts: A proof of roster and layout for each other site.
        words: The masked update.
        next_keys: The site's keys for the next exchange, which save a message there.
    """

    exchange: bytes
    site: str
    layout: SumLayout
    receipts: Mapping[str, bytes]
    words: Words
    next_keys: KeysMessage | None = None


@dataclass(frozen=True, slots=True)
class UnmaskRequest:
    """A request to one survivor to help open the sum.

    Attributes:
        exchange: Digest of the exchange.
        survivors: The sites in the sum.
        dropped: The sites of the roster that are not in the sum.
        receipts: The receipt of each other survivor for this site.
        confirmations: The other survivors' confirmations for this site, if sites
            confirm lists.
    """

    exchange: bytes
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]
    receipts: Mapping[str, bytes]
    confirmations: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfirmMessage:
    """A site's proofs to other survivors that it received the same list."""

    exchange: bytes
    site: str
    confirmations: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class UnmaskMessage:
    """A site's shares that open the sum.

    Attributes:
        exchange: Digest of the exchange.
        site: The site.
        masks: Shares of the survivors' self masks.
        keys: Shares of the dropped sites' masking keys.
        next_shares: The site's shares for the next exchange.
    """

    exchange: bytes
    site: str
    masks: Mapping[str, bytes]
    keys: Mapping[str, bytes]
    next_shares: SharesMessage | None = None


ANSWERS: dict[str, type[Any]] = {
    KEYS: KeysMessage,
    SHARES: SharesMessage,
    CONFIRM: ConfirmMessage,
    UNMASK: UnmaskMessage,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """The request to all sites at one stage of an exchange.

    Attributes:
        number: Number of the exchange.
        keys: The keys of all sites, for this exchange or the next one.
        exchange: As in `UnmaskRequest`.
        survivors: As in `UnmaskRequest`.
        dropped: As in `UnmaskRequest`.
    """

    number: Count
    keys: Mapping[str, KeysMessage] = field(default_factory=dict)
    exchange: bytes = b""
    survivors: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """The layout of all sites' updates, and the timing of their answers.

    Attributes:
        number: Number of the exchange.
        roster: The sites in the exchange.
        metrics: The names of the counts; None means each site's own names.
        limits: The limit of each tensor's values, as an exponent of two.
        pace: Class of the slowest site (`engines/answer_times.py`); None if unknown.
        history: The common history of all sites, if every sum includes all of them.
    """

    number: Count
    roster: tuple[str, ...]
    metrics: tuple[Name, ...] | None
    limits: Mapping[Name, int] = field(default_factory=dict)
    pace: int | None = None
    history: bytes = b""


@dataclass(frozen=True, slots=True)
class Masking:
    """A site's masked update, or the reason why there is none.

    Attributes:
        names: Names of its counts; None means those of the terms.
        history: The history after this update.
        before: The sites of an earlier opened sum of the same task. It can only be
            opened again over the same sites.
        again: The reason why the update cannot be masked in this exchange.
        wide: Whether the reason is that a limit is too narrow.
        message: The masked update without its words.
    """

    names: tuple[Name, ...] | None
    history: bytes
    before: tuple[str, ...] = ()
    again: str = ""
    wide: bool = False
    message: Mapping[str, Any] | None = None


def pack(message: Any, **tensors: Tensor) -> Attached:
    """Return a message for a header, with attached tensors."""
    return Attached(to_json_values(message), tensors)


def read_message(kind: type[M], facts: Any, **excluded: Any) -> M:
    """Parse the message in a header.

    Args:
        kind: The class of the message.
        facts: The header's values.
        excluded: Values of fields that are not in the header.

    Raises:
        RefusedError: The values are not a valid message of this class.
    """
    try:
        return from_json_values(kind, facts, **excluded)
    except WireError as error:
        raise RefusedError(
            f"a message of the secure sum is refused: {error}"
        ) from error


def pack_masked(answer: Masking, message: MaskedMessage) -> Attached:
    """Return an answer with a masked update, without copying its words."""
    words = torch.from_numpy(message.words.view(np.int64))
    return pack(replace(answer, message=to_json_values(message, "words")), words=words)


def read_masked(answer: Masking, attached: Attached) -> MaskedMessage:
    """Return an answer's masked update, whose words are a view of the frame.

    Raises:
        RefusedError: The update is missing or malformed.
    """
    words = attached.tensors.get("words")
    if words is None or words.dtype is not torch.int64 or words.dim() != 1:
        raise RefusedError("a masked update has no words")
    return read_message(
        MaskedMessage, answer.message, words=words.numpy().view(np.uint64)
    )


def pack_boxes(terms: Terms, boxes: Mapping[str, Mapping[str, bytes]]) -> Attached:
    """Return the terms with the boxes, by receiver and sender."""
    return pack(terms, boxes=_make_table(boxes, terms.roster, BOX_BYTES))


def read_boxes(
    attached: Attached, roster: Sequence[str], site: str
) -> dict[str, bytes]:
    """Return each sender's shares for this site, encrypted in a box.

    Raises:
        RefusedError: The boxes are missing or malformed.
    """
    return _read_column(site, attached, "boxes", roster, BOX_BYTES)


def pack_requests(
    number: int, keys: Mapping[str, KeysMessage], requests: Mapping[str, UnmaskRequest]
) -> Attached:
    """Return one request for all survivors, with the receipts for each.

    Args:
        number: Number of the exchange.
        keys: The keys of the next exchange, by site.
        requests: The request to each survivor.
    """
    first = next(iter(requests.values()))
    receipts = {site: request.receipts for site, request in requests.items()}
    confirmations = {site: request.confirmations for site, request in requests.items()}
    return pack(
        Stage(number, keys, first.exchange, first.survivors, first.dropped),
        receipts=_make_table(receipts, first.survivors, RECEIPT_BYTES),
        confirmations=_make_table(confirmations, first.survivors, RECEIPT_BYTES),
    )


def read_unmask_request(stage: Stage, attached: Attached, site: str) -> UnmaskRequest:
    """Return the request to one survivor.

    Raises:
        RefusedError: The request contains nothing for this site.
    """
    survivors = stage.survivors
    receipts = _read_column(site, attached, "receipts", survivors, RECEIPT_BYTES)
    confirmations = _read_column(
        site, attached, "confirmations", survivors, RECEIPT_BYTES
    )
    return UnmaskRequest(
        exchange=stage.exchange,
        survivors=survivors,
        dropped=stage.dropped,
        receipts=receipts,
        confirmations={
            sender: raw for sender, raw in confirmations.items() if any(raw)
        },
    )


def _make_table(
    values: Mapping[str, Mapping[str, bytes]], sites: Sequence[str], size: int
) -> Tensor:
    """Return the values that sites send each other as a table.

    Args:
        values: The values by receiver and sender.
        sites: The sites, in the order of rows and columns.
        size: The bytes of each value.

    Returns:
        uint8 (sender, receiver, byte).
    """
    table = np.zeros((len(sites), len(sites), size), np.uint8)
    place_of = {site: place for place, site in enumerate(sites)}
    for receiver, by_sender in values.items():
        for sender, raw in by_sender.items():
            table[place_of[sender], place_of[receiver]] = np.frombuffer(raw, np.uint8)
    return torch.from_numpy(table)


def _read_column(
    site: str, attached: Attached, name: str, sites: Sequence[str], size: int
) -> dict[str, bytes]:
    """Return each sender's value for this site.

    Raises:
        RefusedError: The table is missing or malformed, or has no column for the site.
    """
    table = attached.tensors.get(name)
    shape = (len(sites), len(sites), size)
    if table is None or table.dtype is not torch.uint8 or tuple(table.shape) != shape:
        raise RefusedError(f"a request of the secure sum lacks {name} for its sites")
    if site not in sites:
        raise RefusedError(
            f"site {site!r} has no {name} in this exchange of the secure sum"
        )
    rows = zip(sites, table.numpy()[:, sites.index(site)], strict=True)
    return {sender: row.tobytes() for sender, row in rows if sender != site}
