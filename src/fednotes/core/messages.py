"""Requests and replies, and their bytes: a fixed head, a JSON header, then the numbers
themselves.

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

Every message has one encoding, so equal messages have equal hashes. The decoder is
total: it gives a message or raises WireError, whatever the bytes. What a header may
hold is bounded before it is read, so a message takes four times its bytes of memory at
most, or 32 MB if that is more (docs/reliability.md). No code and no class name travels.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from fednotes.core.cleaning import LINE, clean
from fednotes.core.errors import TrainingError
from fednotes.core.federation import Option
from fednotes.core.parsing import count_values, parse_json
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Update

Frame = bytes | bytearray | memoryview
Count = Annotated[int, "from 0"]
Name = Annotated[str, "not empty, of a name's length"]
T = TypeVar("T")

OURS = "@"  # begins the names of tasks that are the engine's own
BEGIN, CHECKPOINT, END = "@begin", "@checkpoint", "@end"

MAGIC, VERSION, ALIGN = b"fedn", 3, 64
HEAD = struct.Struct("<4sHBBIQ32s12x")
REQUEST, REPLY = 1, 2
MAX_HEADER = 2**21  # of BERT with its 200 tensors: 16 KB
MAX_VALUES = 2**16  # commas and brackets of a header: 5 or 6 a tensor, 1 a metric
MAX_RANK = 16
MAX_NAME = 1024  # characters of a name of a tensor, site, metric or option
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
class Attached:
    """What a way of summing sends beside a message's own tensors.

    facts: JSON values, as `plain` makes them of a typed message and `typed` reads them.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)

    def nbytes(self) -> int:
        """Of the facts as they travel, and of the numbers."""
        return len(_canonical(self.facts)) + nbytes(self.tensors)


@dataclass(frozen=True, slots=True)
class Request:
    """What the server asks of sites; one request may go to several.

    job: the declarative job's fingerprint. run: counts the server's starts. number:
    counts the run's requests; a repeated one has the same. round: of the method. first:
    whether this is the first request of its round, which sites may join. preparing:
    whether it comes before the first round, so that a site that joins later does it
    then. told: for a first request without tensors, the number of the one whose tensors
    are meant (0: none are). counted: for each site, the number of its last request that
    counts. marks: the numbers of the checkpoints that the server may go back to. each:
    the method looks at this site's own update, not at a sum.
    """

    job: str
    run: Count
    number: Count
    task: str
    round: Count = 0
    first: bool = False
    preparing: bool = False
    told: Count = 0
    counted: Mapping[Name, Count] = field(default_factory=dict)
    marks: tuple[Count, ...] = ()
    each: bool = False
    tensors: Tensors = field(default_factory=dict)
    options: Mapping[Name, Option] = field(default_factory=dict)
    attached: Attached = Attached()


@dataclass(frozen=True, slots=True)
class Reply:
    """What one site answers.

    update: None where the site refuses; `refusal` then says why, in one line without
    note text, and `later` whether the same request may succeed later. has: the number
    of the site's last request that is in its state.
    """

    job: str
    run: Count
    number: Count
    site: str
    update: Update | None = None
    refusal: str = ""
    later: bool = False
    has: Count = 0
    attached: Attached = Attached()


_APART = {"tensors", "attached", "update"}  # fields that are no values of the header
# of its update
_REPLY: dict[str, Any] = {"weight": float | None, "metrics": Mapping[Name, float]}


def encode(message: Request | Reply) -> bytes:
    """The message's bytes.

    Raises WireError for a value that has no place in them: NaN as an option, an unknown
        dtype.
    """
    header, values = plain(message, *_APART), list[Tensor]()
    kind, parts = REQUEST, {"attached": message.attached.tensors}
    if isinstance(message, Request):
        parts["tensors"] = message.tensors
    else:
        kind, update = REPLY, message.update or Update()
        header["weight"] = float(update.weight) if message.update is not None else None
        header["metrics"] = {
            name: float(number) for name, number in update.metrics.items()
        }
        parts["tensors"] = update.tensors
    try:
        _read(kind, header)  # what the other side will ask
        header["facts"] = message.attached.facts
        for part in ("tensors", "attached"):
            header[part] = [
                [n, NAMES[v.dtype], list(v.shape)] for n, v in parts[part].items()
            ]
            _require(all(map(_is_name, parts[part])), "the name of a tensor")
            values += [
                value.detach().cpu().contiguous() for value in parts[part].values()
            ]
        text = _canonical(header)
    except KeyError as error:
        raise WireError(f"tensors of type {error.args[0]} cannot be sent") from None
    except (WireError, TypeError, ValueError) as error:
        raise WireError(f"the message cannot be sent: {error}") from None
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
    head = HEAD.pack(
        MAGIC, VERSION, kind, 0, len(text), size - len(text), hasher.digest()
    )
    return b"".join([head, *pieces])  # the only copy of the numbers


def decode(frame: Frame, *, checked: bool = False) -> Request | Reply:
    """The message of these bytes. Its tensors lie in the frame itself where that is
    writable.

    checked: this process has just encoded it, so its checksum is not computed once
        more.
    Raises WireError, and nothing else, for any other bytes.
    """
    kind, header, body = _opened(memoryview(frame), checked)
    listed = [header.pop(name, None) for name in ("tensors", "attached")]
    facts = header.pop("facts", None)
    _require(isinstance(facts, dict), "no table of facts")
    found = _read(kind, header)
    tensors, own = _tensors(listed, frame, body)
    attached = Attached(facts, own)
    if kind == REQUEST:
        return Request(**found, tensors=tensors, attached=attached)
    weight, metrics = found.pop("weight"), found.pop("metrics")
    if weight is None:
        _require(not tensors and not metrics, "a refusal with tensors")
        return Reply(**found, attached=attached)
    return Reply(**found, update=Update(tensors, weight, metrics), attached=attached)


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


def _opened(view: memoryview, checked: bool) -> tuple[int, dict[str, Any], int]:
    """Kind, header and the body's offset, once lengths, checksum and the header's size
    are right: a value takes up to 100 times its bytes of memory, so they are counted
    before they are read."""
    if len(view) < HEAD.size:
        raise WireError(
            f"{len(view)} bytes are no message: the head alone has {HEAD.size}"
        )
    magic, version, kind, zero, header_bytes, body_bytes, digest = HEAD.unpack_from(
        view
    )
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
    raw = view[HEAD.size : body]
    try:
        text = str(raw, "ascii")
        _require(count_values(text) <= MAX_VALUES, "the header names too many things")
        header = parse_json(text)
        del text
        canonical = _canonical(header)
    except ValueError as error:
        raise WireError(f"the header cannot be read ({str(error)[:80]})") from None
    _require(
        isinstance(header, dict) and canonical == raw,
        "the header is not canonical JSON",
    )
    return kind, header, body


def _tensors(parts: list[Any], frame: Frame, offset: int) -> list[dict[str, Tensor]]:
    """The body's tensors, views of the frame."""
    view, found = (
        memoryview(frame),
        list[dict[str, tuple[torch.dtype, list[int], int]]](),
    )
    for listed in parts:
        _require(isinstance(listed, list), "no list of tensors")
        found.append({})
        for entry in listed:
            right = isinstance(entry, list) and len(entry) == 3
            _require(right, "a tensor without name, type and shape")
            name, type_name, shape = entry
            _require(_is_name(name), "a tensor without a name")
            _require(name not in found[-1], f"tensor {name!r} comes twice")
            dtype = DTYPES.get(type_name) if isinstance(type_name, str) else None
            if dtype is None:
                raise WireError(f"tensor {name!r} has a type that cannot be sent")
            sized = isinstance(shape, list) and len(shape) <= MAX_RANK
            sized = sized and all(map(_is_count, shape))
            # A length of zero must not hide others whose product no machine can hold.
            bounded = sized and math.prod(max(1, n) for n in shape) <= MAX_INT
            _require(bounded, f"the shape of {name!r}")
            end = offset + math.prod(shape) * dtype.itemsize
            following = offset + -(-(end - offset) // ALIGN) * ALIGN
            _require(
                following <= len(view), f"tensor {name!r} is longer than the message"
            )
            _require(not any(view[end:following]), "bytes between tensors")
            found[-1][name] = (dtype, shape, offset)
            offset = following
    _require(offset == len(view), "bytes after the last tensor")
    if view.readonly and any(
        math.prod(how[1]) for part in found for how in part.values()
    ):
        frame = bytearray(frame)  # torch has no tensors that cannot be written to
    return [
        {name: _tensor(frame, *how) for name, how in part.items()} for part in found
    ]


def _tensor(frame: Frame, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    count, truth = math.prod(shape), dtype is torch.bool
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = torch.uint8 if truth else dtype
    value = torch.frombuffer(frame, dtype=raw, count=count, offset=offset).reshape(
        shape
    )
    _require(
        not truth or int(value.max()) <= 1, "a truth value that is neither 0 nor 1"
    )
    return value.view(torch.bool) if truth else value


def _canonical(header: Any) -> bytes:
    text = json.dumps(
        header, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    return text + b" " * (-len(text) % ALIGN)


def _read(kind: int, header: Any) -> dict[str, Any]:
    """The fields of a message, but its tensors and what is attached."""
    found = _row(Request if kind == REQUEST else Reply)(header)
    if kind == REPLY:
        refused, reason = found["weight"] is None, found["refusal"]
        _require(refused == bool(reason), "neither an update nor a refusal")
        _require(len(reason) <= LINE, "a refusal that is no line")
    return found


def _require(right: bool, reason: str) -> None:
    if not right:
        raise WireError(f"not a readable message: {reason}")


# typed values in a header


def plain(value: Any, *apart: str) -> Any:
    """A message as JSON values, without its fields `apart`; bytes as hexadecimal
    digits."""
    if is_dataclass(value):
        names = (each.name for each in fields(value))
        return {
            name: plain(getattr(value, name)) for name in names if name not in apart
        }
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def typed(kind: type[T], value: Any, **apart: Any) -> T:
    """The message of a type that JSON values stand for. apart: its fields that are not
    in these.

    Raises WireError, naming the field, for anything that is no such message.
    """
    return kind(**_row(cast("Any", kind), *apart)(value), **apart)


@cache
def _row(kind: Any, *apart: str) -> Callable[[Any], dict[str, Any]]:
    """Reads the table that a message is."""
    hints = get_type_hints(kind, include_extras=True)
    apart = tuple(_APART) if kind in (Request, Reply) else apart
    hints |= _REPLY if kind is Reply else {}
    readers = {name: _reader(hint) for name, hint in hints.items() if name not in apart}

    def row(value: Any) -> dict[str, Any]:
        right = type(value) is dict and value.keys() == readers.keys()
        _require(right, f"fields of a {kind.__name__} are missing or unknown")
        found, name = {}, ""
        try:
            for name, read in readers.items():
                found[name] = read(value[name])
        except ValueError:
            raise WireError(
                f"not a readable message: the field {name!r} of a {kind.__name__} is wrong"
            ) from None
        return found

    return row


def _reader(kind: Any) -> Callable[[Any], Any]:
    """Reads a value of a type; raises ValueError for any other."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        row, made = _row(kind), cast("Callable[..., Any]", kind)
        return lambda value: made(**row(value))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _only(inner.__contains__)
    if origin is UnionType:
        choices = {_in_json(each): _reader(each) for each in inner}
        return lambda value: choices.get(type(value), _none)(value)
    item = _reader(inner[-1 if origin is Mapping else 0])
    if origin is Mapping:
        name = _reader(inner[0])
        return lambda value: {
            name(key): item(each) for key, each in _LEAVES[dict](value).items()
        }
    return lambda value: tuple(map(item, _LEAVES[list](value)))


def _in_json(kind: Any) -> Any:
    """The type that values of a type have in a header."""
    origin = get_origin(kind)
    return (
        dict
        if origin is Mapping or is_dataclass(kind)
        else list
        if origin is tuple
        else kind
    )


def _only(right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not right(value):
            raise ValueError
        return value

    return read


def _exactly(kind: type) -> Callable[[Any], Any]:
    return _only(lambda value: type(value) is kind)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_text(value: Any) -> bool:
    # so no half of a surrogate pair
    return isinstance(value, str) and clean(value, None) == value


def _is_name(value: Any) -> bool:
    return _is_text(value) and 0 < len(value) <= MAX_NAME


_none = _only(lambda value: False)
_LEAVES: dict[Any, Callable[[Any], Any]] = {
    **{str: _only(_is_text), Name: _only(_is_name), Count: _only(_is_count)},
    int: _only(lambda value: type(value) is int and abs(value) <= MAX_INT),
    bytes: lambda value: bytes.fromhex(_LEAVES[str](value)),
    **{each: _exactly(each) for each in (bool, float, dict, list, NoneType)},
    Any: lambda value: value,
}


if sys.byteorder != "little":  # pragma: no cover
    raise WireError(
        "tensors travel as little-endian numbers, this machine has another order"
    )
