"""Requests and replies as bytes: a fixed head, a JSON header, then the numbers themselves.

    offset  bytes  what
    0       4      magic "fedn"
    4       2      version
    6       1      kind: 1 request, 2 reply
    7       1      0
    8       4      bytes of the header, padding included
    12      8      bytes of the body, padding included
    20      32     SHA-256 of header and body
    52      12     0
    64      …      header: canonical JSON in ASCII, padded with spaces to a multiple of 64
    …       …      body: each tensor's bytes, little-endian, padded with zeros to the same

Every message has one encoding, so equal messages have equal hashes. The decoder is total: it
gives a message or raises WireError, whatever the bytes. What a header may hold is bounded before
it is read, so a message takes four times its bytes of memory at most, or 32 MB if that is more
(docs/reliability.md). No code and no class name travels.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fednotes.core.cleaning import LINE, clean
from fednotes.core.errors import TrainingError
from fednotes.core.federation import Option
from fednotes.core.parsing import count_values, parse_json
from fednotes.core.update import Tensors, Update

Frame = bytes | bytearray | memoryview

MAGIC, VERSION, ALIGN = b"fedn", 2, 64
HEAD = struct.Struct("<4sHBBIQ32s12x")
REQUEST, REPLY = 1, 2
MAX_HEADER = 2**21  # of BERT with its 200 tensors: 16 KB
MAX_VALUES = 2**16  # commas and brackets of a header: 5 or 6 a tensor, 1 a metric
MAX_RANK = 16
MAX_NAME = 1024  # characters of a name of a tensor, task, site or option
MAX_INT = 2**53  # what JSON numbers hold exactly everywhere

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(TrainingError):
    """Bytes that are no message, or a message that cannot be put into bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the server asks of sites; one request may go to several.

    job: the declarative job's fingerprint. run: counts the server's starts. number: counts
    the run's requests; a repeated one has the same. round: of the method. first: whether this
    is the first request of its round, which sites may join. preparing: whether it comes before
    the first round, so that a site that joins later does it then. told: for a first request without
    tensors, the number of the one whose tensors are meant (0: none are). counted: for each
    site, the number of its last request that counts. marks: the numbers of the checkpoints
    that the server may go back to. attached: what a way of summing sends beside the tensors.
    """

    job: str
    run: int
    number: int
    task: str
    round: int = 0
    first: bool = False
    preparing: bool = False
    told: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)
    marks: tuple[int, ...] = ()
    tensors: Tensors = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    attached: Tensors = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What one site answers.

    update: None where the site refuses; `refusal` then says why, in one line without note
    text, and `later` whether the same request may succeed later. has: the number of the
    site's last request that is in its state.
    """

    job: str
    run: int
    number: int
    site: str
    update: Update | None = None
    refusal: str = ""
    later: bool = False
    has: int = 0
    attached: Tensors = field(default_factory=dict)


def encode(message: Request | Reply) -> bytes:
    """The message's bytes.

    Raises WireError for a value that has no place in them: NaN as an option, an unknown dtype.
    """
    if isinstance(message, Request):
        kind, tensors = REQUEST, message.tensors
        header = {name: getattr(message, name) for name in REQUEST_FIELDS} | {
            "options": dict(message.options),
            "counted": dict(message.counted),
            "marks": list(message.marks),
        }
    else:
        kind, tensors = REPLY, message.update.tensors if message.update else {}
        header = {name: getattr(message, name) for name in REPLY_FIELDS}
        header["update"] = None
        if message.update:
            metrics = {name: float(number) for name, number in message.update.metrics.items()}
            header["update"] = {"weight": float(message.update.weight), "metrics": metrics}
    return _frame(kind, header, {"tensors": tensors, "attached": message.attached})


def decode(frame: Frame, *, checked: bool = False) -> Request | Reply:
    """The message of these bytes. Its tensors lie in the frame itself where that is writable.

    checked: this process has just encoded it, so its checksum is not computed once more.
    Raises WireError, and nothing else, for any other bytes.
    """
    kind, header, body = _opened(memoryview(frame), checked)
    parts = [header.pop(name, None) for name in ("tensors", "attached")]
    message = _request(header) if kind == REQUEST else _reply(header)
    tensors, attached = _tensors(parts, frame, body)
    if isinstance(message, Request):
        return _with(message, tensors=tensors, attached=attached)
    if message.update is None:
        _require(not tensors, "a refusal with tensors")
        return _with(message, attached=attached)
    return _with(message, update=_with(message.update, tensors=tensors), attached=attached)


def decode_request(frame: Frame) -> Request:
    """Like `decode`; WireError for a reply too."""
    message = decode(frame)
    if not isinstance(message, Request):
        raise WireError("a reply came where a request was expected")
    return message


def decode_reply(frame: Frame, *, checked: bool = False) -> Reply:
    """Like `decode`; WireError for a request too."""
    message = decode(frame, checked=checked)
    if not isinstance(message, Reply):
        raise WireError("a request came where a reply was expected")
    return message


# bytes


def _frame(kind: int, header: dict[str, Any], parts: Mapping[str, Tensors]) -> bytes:
    values: list[Tensor] = []
    try:
        (_request if kind == REQUEST else _reply)(dict(header))  # what the other side will ask
        for part, tensors in parts.items():
            header[part] = [[n, NAMES[v.dtype], list(v.shape)] for n, v in tensors.items()]
            _require(all(map(_is_name, tensors)), "the name of a tensor")
            values += [value.detach().cpu().contiguous() for value in tensors.values()]
        text = _canonical(header)
    except KeyError as error:
        raise WireError(f"tensors of type {error.args[0]} cannot be sent") from None
    except WireError as error:
        raise WireError(f"the message cannot be sent: {error}") from None
    except (TypeError, ValueError) as error:
        raise WireError(f"the message cannot be sent: {error}") from None
    text += b" " * (-len(text) % ALIGN)
    if len(text) > MAX_HEADER or count_values(text.decode()) > MAX_VALUES:
        raise WireError(f"the message names too many things ({len(values):,} tensors)")
    pieces: list[Any] = [text]
    for value in values:
        if value.numel():
            raw = value.reshape(-1).view(torch.uint8).numpy()
            pieces += [raw.data, bytes(-raw.size % ALIGN)]
    hasher, size = hashlib.sha256(), 0
    for piece in pieces:
        hasher.update(piece)
        size += len(piece)
    head = HEAD.pack(MAGIC, VERSION, kind, 0, len(text), size - len(text), hasher.digest())
    return b"".join([head, *pieces])  # the only copy of the numbers


def _opened(view: memoryview, checked: bool) -> tuple[int, dict[str, Any], int]:
    """Kind, header and the body's offset, once lengths and checksum are right."""
    if len(view) < HEAD.size:
        raise WireError(f"{len(view)} bytes are no message: the head alone has {HEAD.size}")
    magic, version, kind, zero, header_bytes, body_bytes, digest = HEAD.unpack_from(view)
    _require(magic == MAGIC, "not a message of fednotes")
    if version != VERSION:
        raise WireError(
            f"a message of wire format {version}, this version reads {VERSION}: "
            "both sides must run the same version of fednotes"
        )
    _require(kind in (REQUEST, REPLY) and zero == 0, "an unknown kind of message")
    _require(not any(view[HEAD.size - 12 : HEAD.size]), "bytes where zeros belong")
    _require(header_bytes <= MAX_HEADER, "the header is too long")
    body = HEAD.size + header_bytes
    if len(view) != body + body_bytes:
        raise WireError(f"a message of {body + body_bytes:,} bytes, {len(view):,} came")
    right = checked or hashlib.sha256(view[HEAD.size :]).digest() == digest
    _require(right, "damaged on its way")
    header = _read(view[HEAD.size : body])
    return kind, header, body


def _read(raw: memoryview) -> dict[str, Any]:
    """The header. One value takes up to 100 times its bytes, so they are counted before."""
    try:
        text = str(raw, "ascii")
        _require(count_values(text) <= MAX_VALUES, "the header names too many things")
        header = parse_json(text)
        canonical = _canonical(header)
    except ValueError as error:
        raise WireError(f"the header cannot be read ({str(error)[:80]})") from None
    del text
    canonical += b" " * (-len(canonical) % ALIGN)
    if not isinstance(header, dict) or canonical != raw:
        raise WireError("not a readable message: the header is not canonical JSON")
    return header


def _tensors(parts: list[Any], frame: Frame, offset: int) -> list[dict[str, Tensor]]:
    """The body's tensors, views of the frame."""
    found: list[dict[str, tuple[torch.dtype, list[int], int, int]]] = []
    view = memoryview(frame)
    for listed in parts:
        _require(isinstance(listed, list), "no list of tensors")
        part: dict[str, tuple[torch.dtype, list[int], int, int]] = {}
        for entry in listed:
            name, dtype, shape = _described(entry)
            _require(name not in part, f"tensor {name!r} comes twice")
            count = math.prod(shape)
            end = offset + count * dtype.itemsize
            following = offset + _padded(end - offset)
            _require(following <= len(view), f"tensor {name!r} is longer than the message")
            _require(not any(view[end:following]), "bytes between tensors")
            part[name] = (dtype, shape, count, offset)
            offset = following
        found.append(part)
    _require(offset == len(view), "bytes after the last tensor")
    if view.readonly and any(how[2] for part in found for how in part.values()):
        frame = bytearray(frame)  # torch has no tensors that cannot be written to
    return [{name: _tensor(frame, *how) for name, how in part.items()} for part in found]


def _described(entry: Any) -> tuple[str, torch.dtype, list[int]]:
    _require(isinstance(entry, list) and len(entry) == 3, "a tensor without name, type and shape")
    name, dtype, shape = entry
    _require(_is_name(name), "a tensor without a name")
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise WireError(f"tensor {name!r} has a type that cannot be sent")
    sized = isinstance(shape, list) and len(shape) <= MAX_RANK and all(map(_is_count, shape))
    # A length of zero must not hide others whose product no machine can hold.
    _require(sized and math.prod(max(1, n) for n in shape) <= MAX_INT, f"the shape of {name!r}")
    return name, known, shape


def _tensor(frame: Frame, dtype: torch.dtype, shape: list[int], count: int, offset: int) -> Tensor:
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = torch.uint8 if dtype is torch.bool else dtype
    value = torch.frombuffer(frame, dtype=raw, count=count, offset=offset)
    if dtype is torch.bool:
        _require(int(value.max()) <= 1, "a truth value that is neither 0 nor 1")
        value = value.view(torch.bool)
    return value.reshape(shape)


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _canonical(header: Any) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# headers


def _request(header: dict[str, Any]) -> Request:
    _fields(header, REQUEST_FIELDS | {"options": dict, "counted": dict, "marks": list})
    options, counted, marks = header["options"], header["counted"], header["marks"]
    _require(all(map(_is_name, options)) and all(map(_is_option, options.values())), "options")
    _require(all(map(_is_name, counted)) and all(map(_is_count, counted.values())), "counted")
    _require(all(map(_is_count, marks)), "marks")
    return Request(**(header | {"marks": tuple(marks)}))


def _reply(header: dict[str, Any]) -> Reply:
    _fields(header, REPLY_FIELDS | {"update": (dict, type(None))})
    given = header["update"]
    _require((given is None) == bool(header["refusal"]), "neither an update nor a refusal")
    _require(len(header["refusal"]) <= LINE, "a refusal that is no line")
    if given is None:
        return Reply(**header)
    _fields(given, {"weight": float, "metrics": dict})
    metrics = given["metrics"]
    _require(all(map(_is_name, metrics)), "metrics")
    _require(all(type(value) is float for value in metrics.values()), "metrics")
    return Reply(**(header | {"update": Update({}, given["weight"], metrics)}))


REQUEST_FIELDS: dict[str, Any] = {
    **{"job": str, "task": str, "run": int, "number": int, "round": int},
    **{"first": bool, "preparing": bool, "told": int},
}
REPLY_FIELDS: dict[str, Any] = {
    **{"job": str, "site": str, "run": int, "number": int},
    **{"refusal": str, "later": bool, "has": int},
}


def _fields(header: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    _require(header.keys() == wanted.keys(), "fields are missing or unknown")
    for name, kind in wanted.items():
        value = header[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        right = type(value) in kinds
        if kind is int:
            right = _is_count(value)
        elif kind is str:
            right = _is_text(value)
        _require(right, f"the field {name!r} is wrong")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and clean(value, None) == value  # so no half of a surrogate pair


def _is_name(value: Any) -> TypeGuard[str]:
    return _is_text(value) and 0 < len(value) <= MAX_NAME


def _is_option(value: Any) -> bool:
    number = type(value) is int and abs(value) <= MAX_INT
    return number or type(value) in (bool, float) or _is_text(value)


def _with(message: Any, **changes: Any) -> Any:
    """dataclasses.replace, for slots, without a second check of the rest."""
    values = {name: getattr(message, name) for name in message.__slots__}
    return type(message)(**(values | changes))


def _require(right: bool, reason: str) -> None:
    if not right:
        raise WireError(f"not a readable message: {reason}")


if sys.byteorder != "little":  # pragma: no cover
    raise WireError("tensors travel as little-endian numbers, this machine has another order")
