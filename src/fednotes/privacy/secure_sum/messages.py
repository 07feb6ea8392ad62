"""The messages of the secure sum, as plain data, and their form on a wire: JSON and bytes.

A header is a JSON table; only a masked update has a body, its words (little-endian). What
comes from outside is checked for its form here and for its meaning by the one who takes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fednotes.core.errors import RefusedError
from fednotes.privacy.secure_sum.fixed_point import Field, Layout, check_layout
from fednotes.privacy.secure_sum.masks import Words

NAME_LENGTH = 1000  # characters of a name in a message
MOST_FIELDS = 1_000_000
Wire = tuple[dict[str, Any], bytes]


@dataclass(frozen=True, slots=True)
class KeysMessage:
    """A site's public keys for one exchange.

    exchange: digest of the context, the sites and the threshold, 32 bytes.
    sharing: X25519 key that shares are sealed to. masking: X25519 key of the pair masks.
    commitment: one-way image of the self mask's seed. signature: by the site's `Identity`.
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
    layout: Layout
    receipts: Mapping[str, bytes]
    words: Words
    next_keys: KeysMessage | None = None


@dataclass(frozen=True, slots=True)
class UnmaskRequest:
    """What the server asks of one survivor.

    receipts: of each other survivor, to this site. confirmations: likewise, where asked for.
    """

    exchange: bytes
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]
    receipts: Mapping[str, bytes]
    confirmations: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfirmMessage:
    """Receipts of a site to the other survivors that it was shown this list of survivors."""

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


Message = (
    KeysMessage | SharesMessage | MaskedMessage | UnmaskRequest | ConfirmMessage | UnmaskMessage
)
M = TypeVar("M", bound=Message)


def to_wire(message: Message) -> Wire:
    """Header (strings, numbers, lists and tables only) and body."""
    header: dict[str, Any] = {}
    body = b""
    for name in type(message).__dataclass_fields__:
        value = getattr(message, name)
        if name == "words":
            body = value.astype("<u8", copy=False).tobytes()
        elif isinstance(value, KeysMessage | SharesMessage):
            header[name] = to_wire(value)[0]
        elif isinstance(value, Layout):
            rows = [[f.kind, f.name, list(f.shape), f.exponent, f.fine] for f in value.fields]
            header[name] = {"purpose": value.purpose, "sites": value.sites, "fields": rows}
        elif isinstance(value, bytes):
            header[name] = value.hex()
        elif isinstance(value, Mapping):
            header[name] = {site: raw.hex() for site, raw in value.items()}
        elif isinstance(value, tuple):
            header[name] = list(value)
        else:
            header[name] = value
    return header, body


def from_wire(kind: type[M], header: Any, body: bytes = b"") -> M:
    """The message back.

    Raises RefusedError for a header or a body that is no such message.
    """
    names = kind.__dataclass_fields__
    table = _of(dict, header)
    expected = {name for name in names if name != "words"}
    if table.keys() != expected:
        raise RefusedError(f"a {kind.__name__} has other fields than {', '.join(sorted(expected))}")
    if body and "words" not in names:
        raise RefusedError(f"a {kind.__name__} has no body")
    values = {name: _READERS[name](table[name]) for name in expected}
    if "words" in names:
        layout: Layout = values["layout"]
        if len(body) != 8 * layout.words:
            raise RefusedError(f"a masked update of {len(body)} bytes, not {8 * layout.words}")
        values["words"] = np.frombuffer(body, "<u8").astype(np.uint64, copy=False)
    return kind(**values)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise RefusedError(f"a message of the secure sum has {type(value).__name__} for {kind}")
    return value


def _name(value: Any) -> str:
    if len(_of(str, value)) > NAME_LENGTH:
        raise RefusedError(f"a message of the secure sum has a name over {NAME_LENGTH} characters")
    return str(value)


def _raw(value: Any) -> bytes:
    try:
        return bytes.fromhex(_of(str, value))
    except ValueError as error:
        raise RefusedError("a message of the secure sum has bytes that are not hex") from error


def _raws(value: Any) -> dict[str, bytes]:
    return {_name(site): _raw(raw) for site, raw in _of(dict, value).items()}


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(_name, _of(list, value)))


def _keys(value: Any) -> KeysMessage | None:
    return None if value is None else from_wire(KeysMessage, value)


def _shares(value: Any) -> SharesMessage | None:
    return None if value is None else from_wire(SharesMessage, value)


def _integer(value: Any) -> int:
    number: int = _of(int, value)
    if abs(number) >= 2**48:
        raise RefusedError("a message of the secure sum has a number beyond 2^48")
    return number


def _layout(value: Any) -> Layout:
    table = _of(dict, value)
    if table.keys() != {"purpose", "sites", "fields"}:
        raise RefusedError("the layout of a masked update has other fields than it should")
    rows = _of(list, table["fields"])
    if len(rows) > MOST_FIELDS:
        raise RefusedError(f"a masked update of more than {MOST_FIELDS} fields")
    fields = []
    for row in rows:
        if len(_of(list, row)) != 5:
            raise RefusedError("a field of a masked update has 5 entries")
        kind, name, shape, exponent, fine = row
        sizes = tuple(map(_integer, _of(list, shape)))
        if len(sizes) > 16 or math.prod(sizes) >= 2**48:
            raise RefusedError("a tensor of a masked update has an impossible shape")
        fields.append(Field(_of(str, kind), _name(name), sizes, _integer(exponent), _integer(fine)))
    layout = Layout(_name(table["purpose"]), _integer(table["sites"]), tuple(fields))
    check_layout(layout)
    return layout


_READERS: Mapping[str, Any] = {
    "exchange": _raw,
    "site": _name,
    "sharing": _raw,
    "masking": _raw,
    "commitment": _raw,
    "signature": _raw,
    "session": _raw,
    "boxes": _raws,
    "layout": _layout,
    "receipts": _raws,
    "next_keys": _keys,
    "survivors": _names,
    "dropped": _names,
    "confirmations": _raws,
    "masks": _raws,
    "keys": _raws,
    "next_shares": _shares,
}
