"""The messages of the secure sum: typed values for a header, and tables of bytes beside
them.

    what the server asks                 what a site answers
    @keys     Stage: number              KeysMessage
    @shares   Stage: number, keys        SharesMessage
    a task    Terms, boxes               Masking, words
    @masked   Terms, boxes               Masking, words
    @confirm  Stage: lists, receipts     ConfirmMessage
    @unmask   Stage: all of these        UnmaskMessage

    boxes           uint8  (roster, roster, bytes of a box): from whom, for whom
    receipts        uint8  (survivors, survivors, bytes of a receipt), likewise
    confirmations   uint8  likewise; zeros where there is none
    words           int64  a masked update

What grows with the square of the sites is no JSON. One frame goes to all sites, so what
is for one of them lies beside what is for the others; none of it is a secret (a box is
sealed for its receiver). What comes from outside is checked for its form here and for
its meaning by the one who takes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import RefusedError
from fednotes.core.messages import Attached, Count, Name, WireError, plain, typed
from fednotes.privacy.secure_sum.crypto import SHARE_BYTES, Words
from fednotes.privacy.secure_sum.fixed_point import SumLayout

KEYS, SHARES, MASKED, CONFIRM, UNMASK = (
    "@keys",
    "@shares",
    "@masked",
    "@confirm",
    "@unmask",
)
BOX_BYTES = 2 * SHARE_BYTES + 16  # two shares and a tag
RECEIPT_BYTES = 32
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class KeysMessage:
    """A site's public keys for one exchange.

    exchange: digest of the context, the sites and the threshold, 32 bytes.
    sharing: X25519 key that shares are sealed to. masking: X25519 key of the pair
        masks.
    commitment: one-way image of the self mask's seed. signature: by the site's
        `Identity`.
    """

    exchange: bytes
    site: str
    sharing: bytes
    masking: bytes
    commitment: bytes
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class SharesMessage:
    """A site's shares for the others: receiver → sealed box.

    session: digest of all public keys that the site was shown.
    """

    exchange: bytes
    site: str
    session: bytes
    boxes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedMessage:
    """A site's masked update.

    receipts: to each other site, who was in the sum and how it was laid out.
    next_keys: the site's keys for the next exchange, which save a message there.
    """

    exchange: bytes
    site: str
    layout: SumLayout
    receipts: Mapping[str, bytes]
    words: Words
    next_keys: KeysMessage | None = None


@dataclass(frozen=True, slots=True)
class UnmaskRequest:
    """What the server asks of one survivor.

    receipts: of each other survivor, to this site. confirmations: likewise, where asked
        for.
    """

    exchange: bytes
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]
    receipts: Mapping[str, bytes]
    confirmations: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfirmMessage:
    """Receipts of a site to the other survivors that it was shown this list of
    survivors."""

    exchange: bytes
    site: str
    confirmations: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class UnmaskMessage:
    """A site's shares: of survivors' self masks, and of dropped sites' masking keys.

    next_shares: the site's shares for the next exchange.
    """

    exchange: bytes
    site: str
    masks: Mapping[str, bytes]
    keys: Mapping[str, bytes]
    next_shares: SharesMessage | None = None


ANSWERS: dict[str, type[Any]] = {
    **{KEYS: KeysMessage, SHARES: SharesMessage},
    **{CONFIRM: ConfirmMessage, UNMASK: UnmaskMessage},
}


@dataclass(frozen=True, slots=True)
class Stage:
    """What all sites are asked at a stage of exchange `number`. keys: of all sites, for
    this exchange or the next one. exchange, survivors, dropped: as in `UnmaskRequest`.
    """

    number: Count
    keys: Mapping[str, KeysMessage] = field(default_factory=dict)
    exchange: bytes = b""
    survivors: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """How all sites lay their updates out, and when they answer.

    roster: who is in the exchange. metrics: the names of the counts; None: each site's
        own.
    limits: by tensor, the exponent of two. pace: the class of the slowest site
    (`engines.secure`); None if it is not known. history: that all sites have, where all
    are in each sum.
    """

    number: Count
    roster: tuple[str, ...]
    metrics: tuple[Name, ...] | None
    limits: Mapping[Name, int] = field(default_factory=dict)
    pace: int | None = None
    history: bytes = b""


@dataclass(frozen=True, slots=True)
class Masking:
    """What a site says of its masked update, or of why there is none.

    names: of its counts; None: those of the terms. history: what the update leads to.
    before: the sites over which a sum of this very task was opened: it can be opened
    for these alone.
    again: why it cannot be masked in this exchange; wide: for a limit is too narrow.
    message: the update without its words.
    """

    names: tuple[Name, ...] | None
    history: bytes
    before: tuple[str, ...] = ()
    again: str = ""
    wide: bool = False
    message: Mapping[str, Any] | None = None


def packed(message: Any, **tensors: Tensor) -> Attached:
    """A message for a header, and tensors beside it."""
    return Attached(plain(message), tensors)


def read(kind: type[M], facts: Any, **apart: Any) -> M:
    """A message of a kind. apart: its fields that are no part of a header.

    Raises RefusedError for anything else.
    """
    try:
        return typed(kind, facts, **apart)
    except WireError as error:
        raise RefusedError(
            f"a message of the secure sum is refused: {error}"
        ) from error


def packed_masked(told: Masking, message: MaskedMessage) -> Attached:
    """A masked update; its words are not copied."""
    words = torch.from_numpy(message.words.view(np.int64))
    return packed(replace(told, message=plain(message, "words")), words=words)


def masked_in(told: Masking, attached: Attached) -> MaskedMessage:
    """A masked update back, its words those of the frame. Raises RefusedError."""
    words = attached.tensors.get("words")
    if words is None or words.dtype is not torch.int64 or words.dim() != 1:
        raise RefusedError("a masked update has no words")
    return read(MaskedMessage, told.message, words=words.numpy().view(np.uint64))


def packed_boxes(terms: Terms, boxes: Mapping[str, Mapping[str, bytes]]) -> Attached:
    """The terms, and boxes by receiver and sender."""
    return packed(terms, boxes=_table(boxes, terms.roster, BOX_BYTES))


def boxes_in(attached: Attached, roster: Sequence[str], site: str) -> dict[str, bytes]:
    """Sender → its box for this site. Raises RefusedError."""
    return _column(site, attached, "boxes", roster, BOX_BYTES)


def packed_requests(
    number: int, keys: Mapping[str, KeysMessage], requests: Mapping[str, UnmaskRequest]
) -> Attached:
    """What all survivors are asked: the same lists, and receipts for each of them."""
    same = next(iter(requests.values()))
    receipts = {to: each.receipts for to, each in requests.items()}
    confirmations = {to: each.confirmations for to, each in requests.items()}
    return packed(
        Stage(number, keys, same.exchange, same.survivors, same.dropped),
        receipts=_table(receipts, same.survivors, RECEIPT_BYTES),
        confirmations=_table(confirmations, same.survivors, RECEIPT_BYTES),
    )


def request_in(stage: Stage, attached: Attached, site: str) -> UnmaskRequest:
    """What one survivor is asked. Raises RefusedError."""
    receipts, confirmations = (
        _column(site, attached, name, stage.survivors, RECEIPT_BYTES)
        for name in ("receipts", "confirmations")
    )
    given = {sender: raw for sender, raw in confirmations.items() if any(raw)}
    return UnmaskRequest(
        stage.exchange, stage.survivors, stage.dropped, receipts, given
    )


def _table(
    own: Mapping[str, Mapping[str, bytes]], sites: Sequence[str], size: int
) -> Tensor:
    """What sites have for each other, by receiver and sender, as (sender, receiver,
    byte)."""
    table = np.zeros((len(sites), len(sites), size), np.uint8)
    at = {site: place for place, site in enumerate(sites)}
    for to, sent in own.items():
        for sender, raw in sent.items():
            table[at[sender], at[to]] = np.frombuffer(raw, np.uint8)
    return torch.from_numpy(table)


def _column(
    site: str, attached: Attached, name: str, sites: Sequence[str], size: int
) -> dict[str, bytes]:
    """Sender → what it has for this site. Raises RefusedError."""
    table, shape = attached.tensors.get(name), (len(sites), len(sites), size)
    if table is None or table.dtype is not torch.uint8 or tuple(table.shape) != shape:
        raise RefusedError(f"a request of the secure sum has no {name} for its sites")
    if site not in sites:
        raise RefusedError(
            f"site {site!r} has no {name} in this exchange of the secure sum"
        )
    rows = zip(sites, table.numpy()[:, sites.index(site)], strict=True)
    return {sender: row.tobytes() for sender, row in rows if sender != site}
