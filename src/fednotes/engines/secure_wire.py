"""What the secure sum's messages look like in `attached`: a JSON note as bytes, and numbers.

    note            uint8  JSON: a table of strings, numbers, lists and tables
    boxes           uint8  (roster, roster, bytes of a box): from whom, for whom
    receipts        uint8  (survivors, survivors, bytes of a receipt), likewise
    confirmations   uint8  likewise; zeros where there is none
    words           int64  a masked update

What grows with the square of the sites is no JSON, so a note is small, and what it may hold is
bounded before it is read: like a message's header it takes 32 MB of memory at most.

One frame goes to all sites, so what is for one of them lies beside what is for the others; none
of it is a secret (a box is sealed for its receiver).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import RefusedError
from fednotes.core.parsing import count_values, parse_json
from fednotes.core.update import Tensors
from fednotes.engines.wire import MAX_VALUES
from fednotes.privacy.secure_sum.messages import Message
from fednotes.privacy.secure_sum.server import BOX_BYTES, RECEIPT_BYTES
from fednotes.privacy.secure_sum.sums import (
    KeysMessage,
    MaskedMessage,
    UnmaskRequest,
    from_wire,
    to_wire,
)

KEYS, SHARES, MASKED, CONFIRM, UNMASK = "@keys", "@shares", "@masked", "@confirm", "@unmask"
MOST_NOTE = 2**21  # bytes; keys of 250 sites take 0.2 million, 8,000 counts 0.8
_RECEIPTS = (("receipts", RECEIPT_BYTES), ("confirmations", RECEIPT_BYTES))
T = TypeVar("T")


def packed(note: Mapping[str, Any], **numbers: Tensor) -> dict[str, Tensor]:
    """A note and numbers beside it. Raises RefusedError for a note that `noted` would not take."""
    text = json.dumps(note, sort_keys=True, separators=(",", ":"))
    if len(text) > MOST_NOTE or count_values(text) > MAX_VALUES:
        raise RefusedError("a message of the secure sum names too many things: send fewer counts")
    return {"note": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **numbers}


def noted(attached: Tensors) -> dict[str, Any]:
    """The note. Raises RefusedError for anything else."""
    value = attached.get("note")
    if value is None or value.dtype is not torch.uint8 or value.numel() > MOST_NOTE:
        raise RefusedError("a message of the secure sum has no note, or too long a one")
    try:
        text = value.numpy().tobytes().decode("ascii")
        note = parse_json(text, most_values=MAX_VALUES)
    except ValueError as error:
        raise RefusedError(
            f"the note of a message of the secure sum is not JSON that may be read ({error})"
        ) from error
    if not isinstance(note, dict):
        raise RefusedError("the note of a message of the secure sum is no table")
    return note


def part(note: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """An entry of a note. Raises RefusedError where it is missing or of another type."""
    value = note.get(name)
    if type(value) is not kind:
        raise RefusedError(f"a message of the secure sum has no {name!r}")
    return value


def names_in(note: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of strings. Raises RefusedError."""
    value = part(note, name, list)
    if not all(isinstance(each, str) for each in value):
        raise RefusedError(f"a message of the secure sum has {name!r} that are not names")
    return tuple(value)


def header(message: Message) -> dict[str, Any]:
    """A message without a body, as JSON values."""
    return to_wire(message)[0]


def packed_masked(message: MaskedMessage, note: Mapping[str, Any]) -> dict[str, Tensor]:
    """A masked update; its words are not copied."""
    bare = header(replace(message, words=message.words[:0]))
    return packed({**note, "message": bare}, words=torch.from_numpy(message.words.view(np.int64)))


def masked_in(note: Mapping[str, Any], attached: Tensors) -> MaskedMessage:
    """A masked update back, its words those of the frame. Raises RefusedError."""
    words = attached.get("words")
    if words is None or words.dtype is not torch.int64 or words.dim() != 1:
        raise RefusedError("a masked update has no words")
    numbers: Any = words.numpy()
    body: Any = memoryview(numbers).cast("B") if numbers.size else b""
    return from_wire(MaskedMessage, part(note, "message", dict), body)


def packed_boxes(boxes: Mapping[str, Mapping[str, bytes]], roster: Sequence[str]) -> Tensor:
    """Boxes by receiver and sender as (sender, receiver, byte)."""
    return _packed(boxes, roster, BOX_BYTES)


def boxes_in(attached: Tensors, roster: Sequence[str], site: str) -> dict[str, bytes]:
    """Sender → its box for this site. Raises RefusedError."""
    return _for(site, attached, "boxes", roster, BOX_BYTES)


def _packed(own: Mapping[str, Mapping[str, bytes]], sites: Sequence[str], size: int) -> Tensor:
    """What sites have for each other, by receiver and sender, as (sender, receiver, byte)."""
    table = np.zeros((len(sites), len(sites), size), np.uint8)
    at = {site: place for place, site in enumerate(sites)}
    for to, sent in own.items():
        for sender, raw in sent.items():
            table[at[sender], at[to]] = np.frombuffer(raw, np.uint8)
    return torch.from_numpy(table)


def _for(
    site: str, attached: Tensors, name: str, sites: Sequence[str], size: int
) -> dict[str, bytes]:
    """Sender → what it has for this site. Raises RefusedError."""
    table, shape = attached.get(name), (len(sites), len(sites), size)
    if table is None or table.dtype is not torch.uint8 or tuple(table.shape) != shape:
        raise RefusedError(f"a request of the secure sum has no {name} for its sites")
    if site not in sites:
        raise RefusedError(f"site {site!r} has no {name} in this exchange of the secure sum")
    rows = zip(sites, table.numpy()[:, sites.index(site)], strict=True)
    return {sender: row.tobytes() for sender, row in rows if sender != site}


def keys_note(keys: Mapping[str, KeysMessage]) -> dict[str, Any]:
    """All sites' public keys."""
    return {site: header(message) for site, message in keys.items()}


def keys_in(note: Mapping[str, Any]) -> dict[str, KeysMessage]:
    """All sites' public keys. Raises RefusedError."""
    return {site: from_wire(KeysMessage, own) for site, own in part(note, "keys", dict).items()}


def packed_requests(
    note: Mapping[str, Any], requests: Mapping[str, UnmaskRequest]
) -> dict[str, Tensor]:
    """What all survivors are asked: the same lists, and receipts for each of them."""
    same = next(iter(requests.values()))
    lists = header(replace(same, receipts={}, confirmations={}))
    tables = {
        name: _packed({to: getattr(r, name) for to, r in requests.items()}, same.survivors, size)
        for name, size in _RECEIPTS
    }
    return packed({**note, "asked": lists}, **tables)


def request_in(note: Mapping[str, Any], attached: Tensors, site: str) -> UnmaskRequest:
    """What one survivor is asked. Raises RefusedError."""
    lists = from_wire(UnmaskRequest, part(note, "asked", dict))
    own = {name: _for(site, attached, name, lists.survivors, size) for name, size in _RECEIPTS}
    given = {sender: raw for sender, raw in own["confirmations"].items() if any(raw)}
    return replace(lists, receipts=own["receipts"], confirmations=given)
