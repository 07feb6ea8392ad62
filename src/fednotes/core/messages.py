"""Requests and replies, and their encoding as bytes.

A message consists of a fixed head, a JSON header and the elements of its tensors:

    offset  bytes  what
    0       4      magic "fedn"
    4       2      version
    6       1      kind: 1 request, 2 reply
    7       1      0
    8       4      bytes of the header, padding included
    12      8      bytes of the body, padding included
    20      32     SHA-256 of header and body
    52      12     0
    64      …      header: canonical JSON in ASCII, padded with spaces
    …       …      body: each tensor's bytes, little-endian, padded with zeros

Header and tensors are padded to multiples of 64 bytes.

Every message has exactly one encoding, so equal messages have equal hashes. For any
bytes, the decoder returns a message or raises WireError. The header is bounded before
it is parsed, so decoding needs at most four times the message's size in memory, or 32
MB if that is more (docs/reliability.md). No code and no class names are sent.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from fednotes.core.cleaning import LINE, clean
from fednotes.core.errors import TrainingError
from fednotes.core.federation import Option
from fednotes.core.parsing import count_values, parse_json
from fednotes.core.stored_bytes import ALIGN, StoredBytes
from fednotes.core.stored_tensors import Place, StoredTensors
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Update

Frame = bytes | bytearray | memoryview
ReceivedFrame = Frame | StoredBytes
Count = Annotated[int, "at least 0"]
Name = Annotated[str, "not empty, at most MAX_NAME characters"]
T = TypeVar("T")

OURS = "@"  # first character of the names of the engine's tasks
BEGIN = "@begin"
CHECKPOINT = "@checkpoint"
END = "@end"

MAGIC = b"fedn"
VERSION = 3
HEAD = struct.Struct("<4sHBBIQ32s12x")
REQUEST = 1
REPLY = 2
MAX_HEADER = 2**21  # bytes; BERT with its 200 tensors needs 16 KB
MAX_VALUES = 2**16  # commas and brackets in a header: 5 or 6 a tensor, 1 a metric
MAX_RANK = 16
MAX_NAME = 1024  # characters in the name of a tensor, site, metric or option
HASHED_BYTES = 2**20  # of a frame are read at a time
MAX_INT = 2**53  # up to here, every JSON library reads integers exactly

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(TrainingError):
    """Bytes are not a message, or a message cannot be encoded as bytes."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Values that the secure sum attaches to a message.

    Attributes:
        facts: JSON values, from `to_json_values` and for `from_json_values`.
        tensors: Tensors by name.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)

    def nbytes(self) -> int:
        """Return the bytes of the encoded facts and of the tensors' elements."""
        return len(_encode_header(self.facts)) + nbytes(self.tensors)


_HEADER_NAME = "header_name"


def _header_name(name: str) -> dict[str, str]:
    """Return the metadata of a field that has another name in the header."""
    return {_HEADER_NAME: name}


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the server to one or several sites.

    Attributes:
        job: Fingerprint of the job's table.
        server_start: Which start of the server this is: 1 for the first ("run" in the
            header).
        number: Number of the request in this run; a repeated request has the same
            number.
        task: The task of the method or of the engine.
        round: Round of the method.
        first: Whether this is the first request of its round; sites may join with it.
        preparing: Whether it comes before the first round. A site that joins later
            answers it on joining.
        tensors_of_request: For a first request without tensors, the number of the
            request whose tensors are used; 0 if none are ("told" in the header).
        counted: For each site for which the request is meant, the number of its last
            request whose reply counts.
        checkpoint_numbers: Numbers of the checkpoints to which the server may return
            ("marks" in the header).
        each: Whether the method reads this site's own update instead of a sum.
        tensors: Tensors of the method.
        options: Options of the task.
        attached: Values that the secure sum attaches.
    """

    job: str
    server_start: Count = field(metadata=_header_name("run"))
    number: Count
    task: str
    round: Count = 0
    first: bool = False
    preparing: bool = False
    tensors_of_request: Count = field(default=0, metadata=_header_name("told"))
    counted: Mapping[Name, Count] = field(default_factory=dict)
    checkpoint_numbers: tuple[Count, ...] = field(
        default=(), metadata=_header_name("marks")
    )
    each: bool = False
    tensors: Tensors = field(default_factory=dict)
    options: Mapping[Name, Option] = field(default_factory=dict)
    attached: Attached = Attached()


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of one site.

    Attributes:
        job: Fingerprint of the job's table.
        server_start: As in the request.
        number: As in the request.
        site: The site's name.
        update: The site's update; None if it refuses.
        refusal: The reason for a refusal, in one line without note text.
        later: Whether the same request may succeed later.
        has: Number of the last request that is part of the site's state.
        attached: Values that the secure sum attaches.
    """

    job: str
    server_start: Count = field(metadata=_header_name("run"))
    number: Count
    site: str
    update: Update | None = None
    refusal: str = ""
    later: bool = False
    has: Count = 0
    attached: Attached = Attached()


_NOT_IN_HEADER = {"tensors", "attached", "update"}
# Header fields of a reply that stand for its update.
_UPDATE_FIELDS: dict[str, Any] = {
    "weight": float | None,
    "metrics": Mapping[Name, float],
}


# ---- encoding ------------------------------------------------------------------------


def encode_message(message: Request | Reply) -> bytes:
    """Return a message as bytes.

    Raises:
        WireError: The message has a value that cannot be sent, such as an option that
            is NaN or a tensor of an unknown type.
    """
    kind, header, tensors = _split_message(message)
    attached = message.attached.tensors
    try:
        _read_fields(kind, header)  # the same check as at the receiver
        header["facts"] = message.attached.facts
        header["tensors"] = _describe_tensors(tensors)
        header["attached"] = _describe_tensors(attached)
        text = _encode_header(header)
    except KeyError as error:
        raise WireError(f"tensors of type {error.args[0]} cannot be sent") from None
    except (WireError, TypeError, ValueError) as error:
        raise WireError(f"the message cannot be sent: {error}") from None

    values = [*tensors.values(), *attached.values()]
    if len(text) > MAX_HEADER or count_values(text.decode()) > MAX_VALUES:
        raise WireError(
            f"the message's header is too large ({len(values):,} tensors): send less "
            "at a time"
        )

    pieces: list[Any] = [text]
    for value in values:
        if value.numel():
            flat = value.detach().cpu().contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy()
            pieces += [raw.data, bytes(-raw.size % ALIGN)]

    hasher = hashlib.sha256()
    size = 0
    for piece in pieces:
        hasher.update(piece)
        size += len(piece)
    body_size = size - len(text)
    head = HEAD.pack(MAGIC, VERSION, kind, 0, len(text), body_size, hasher.digest())
    return b"".join([head, *pieces])  # the only copy of the tensors' elements


def _split_message(message: Request | Reply) -> tuple[int, dict[str, Any], Tensors]:
    """Return the kind of a message, the fields of its header, and its tensors."""
    header = to_json_values(message, *_NOT_IN_HEADER)
    if isinstance(message, Request):
        return REQUEST, header, message.tensors

    if message.update is None:
        header["weight"] = None
        header["metrics"] = {}
        return REPLY, header, {}

    update = message.update
    header["weight"] = float(update.weight)
    header["metrics"] = {name: float(value) for name, value in update.metrics.items()}
    return REPLY, header, update.tensors


def _describe_tensors(tensors: Tensors) -> list[list[Any]]:
    """Return the header's entry of each tensor: its name, type and shape.

    Raises:
        KeyError: A tensor has a type that cannot be sent.
        WireError: A name is empty, too long or not printable.
    """
    _require(all(map(_is_name, tensors)), "the name of a tensor")
    return [
        [name, NAMES[value.dtype], list(value.shape)] for name, value in tensors.items()
    ]


# ---- decoding ------------------------------------------------------------------------


def decode_message(frame: ReceivedFrame, *, checked: bool = False) -> Request | Reply:
    """Decode a message.

    The tensors are views of the bytes. Callers must not change them, because the bytes
    may be read-only, and a site stores the bytes of a request. If the frame is in a
    file, a tensor is read from it only when it is used.

    Args:
        frame: The bytes.
        checked: Whether this process has just encoded the message, or a pipe brought it
            from another process of this machine, so that its checksum need not be
            verified.

    Raises:
        WireError: The bytes are not a message. No other error is raised.
    """
    kind, header, body_start = _open_frame(_view_bytes(frame), checked=checked)
    descriptions = [header.pop(name, None) for name in ("tensors", "attached")]
    facts = header.pop("facts", None)
    _require(isinstance(facts, dict), "the facts are not a table")
    values = _read_fields(kind, header)
    tensors, attached_tensors = _read_tensors(descriptions, frame, body_start)
    attached = Attached(facts, attached_tensors)

    if kind == REQUEST:
        return Request(**values, tensors=tensors, attached=attached)
    weight = values.pop("weight")
    metrics = values.pop("metrics")
    if weight is None:
        _require(not tensors and not metrics, "a refusal with tensors")
        return Reply(**values, attached=attached)
    update = Update(tensors, weight, metrics)
    return Reply(**values, update=update, attached=attached)


def decode_request(frame: Frame) -> Request:
    """Decode a request.

    Raises:
        WireError: The bytes are not a request.
    """
    message = decode_message(frame)
    if not isinstance(message, Request):
        raise WireError("received a reply, expected a request")
    return message


def decode_reply(frame: ReceivedFrame, *, checked: bool = False) -> Reply:
    """Decode a reply.

    Args:
        frame: The bytes.
        checked: As in `decode_message`.

    Raises:
        WireError: The bytes are not a reply.
    """
    message = decode_message(frame, checked=checked)
    if not isinstance(message, Reply):
        raise WireError("received a request, expected a reply")
    return message


class _OpenedFrame(NamedTuple):
    """A frame whose head was checked.

    Attributes:
        kind: The kind of message, `REQUEST` or `REPLY`.
        header: The header.
        body_start: The offset at which the body begins.
    """

    kind: int
    header: dict[str, Any]
    body_start: int


def _view_bytes(frame: ReceivedFrame) -> memoryview | StoredBytes:
    """Return bytes whose parts can be read without a copy of the whole."""
    return frame if isinstance(frame, StoredBytes) else memoryview(frame)


def _compute_digest(view: memoryview | StoredBytes) -> bytes:
    """Return the SHA-256 of all that follows the head of a frame."""
    hasher = hashlib.sha256()
    for start in range(HEAD.size, len(view), HASHED_BYTES):
        hasher.update(view[start : start + HASHED_BYTES])
    return hasher.digest()


def _open_frame(view: memoryview | StoredBytes, *, checked: bool) -> _OpenedFrame:
    """Check the lengths and the checksum of a message, and parse its header.

    A parsed JSON value takes up to 100 times the memory of its text, so values are
    counted before parsing.

    Args:
        view: The bytes.
        checked: As in `decode_message`.

    Raises:
        WireError: The bytes are not a message.
    """
    if len(view) < HEAD.size:
        raise WireError(
            f"{len(view)} bytes are too few for a message, whose head alone "
            f"has {HEAD.size}"
        )
    magic, version, kind, zero, header_bytes, body_bytes, digest = HEAD.unpack(
        view[: HEAD.size]
    )
    _require(magic == MAGIC, "not a message of fednotes")
    if version != VERSION:
        raise WireError(
            f"the message has wire format {version}, but this version reads {VERSION}: "
            "both sides must run the same version of fednotes"
        )
    _require(kind in (REQUEST, REPLY) and zero == 0, "an unknown kind of message")
    _require(
        not any(view[HEAD.size - 12 : HEAD.size]),
        "the reserved bytes are not zero",
    )
    _require(header_bytes <= MAX_HEADER, "the header is too long")
    body_start = HEAD.size + header_bytes
    if len(view) != body_start + body_bytes:
        raise WireError(
            f"expected a message of {body_start + body_bytes:,} bytes, received "
            f"{len(view):,}"
        )
    is_intact = checked or _compute_digest(view) == digest
    _require(is_intact, "damaged in transit")
    raw = view[HEAD.size : body_start]
    try:
        text = str(raw, "ascii")
        _require(count_values(text) <= MAX_VALUES, "the header has too many values")
        header = parse_json(text)
        del text
        canonical = _encode_header(header)
    except ValueError as error:
        raise WireError(f"the header cannot be read ({str(error)[:80]})") from None
    _require(
        isinstance(header, dict) and canonical == raw,
        "the header is not canonical JSON",
    )
    return _OpenedFrame(kind, header, body_start)


def _read_tensors(
    descriptions: list[Any], frame: ReceivedFrame, offset: int
) -> list[Tensors]:
    """Return the tensors in the body.

    Args:
        descriptions: The lists of tensors in the header.
        frame: The bytes of the message.
        offset: The start of the body.
    """
    view = _view_bytes(frame)
    parts: list[dict[str, Place]] = []
    for description in descriptions:
        _require(isinstance(description, list), "the tensors are not a list")
        places: dict[str, Place] = {}
        for entry in description:
            name, dtype, shape = _read_description(entry)
            _require(name not in places, f"tensor {name!r} occurs twice")
            place = Place(dtype, shape, offset)
            next_offset = offset + -(-(place.end - offset) // ALIGN) * ALIGN
            is_inside = next_offset <= len(view)
            _require(is_inside, f"tensor {name!r} is longer than the message")
            _require(not any(view[place.end : next_offset]), "bytes between tensors")
            places[name] = place
            offset = next_offset
        parts.append(places)
    _require(offset == len(view), "bytes after the last tensor")
    return [_make_tensors(frame, places) for places in parts]


def _read_description(entry: Any) -> tuple[str, torch.dtype, list[int]]:
    """Return the name, type and shape in the header's entry of one tensor."""
    is_entry = isinstance(entry, list) and len(entry) == 3
    _require(is_entry, "a tensor lacks its name, type or shape")
    name, type_name, shape = entry
    _require(_is_name(name), "a tensor without a name")
    dtype = DTYPES.get(type_name) if isinstance(type_name, str) else None
    if dtype is None:
        raise WireError(f"tensor {name!r} has a type that cannot be sent")

    is_shape = isinstance(shape, list) and len(shape) <= MAX_RANK
    is_shape = is_shape and all(map(_is_count, shape))
    # A dimension of zero must not hide others whose product is too large.
    is_bounded = is_shape and math.prod(max(1, size) for size in shape) <= MAX_INT
    _require(is_bounded, f"the shape of {name!r}")
    return name, dtype, shape


def _make_tensors(frame: ReceivedFrame, places: Mapping[str, Place]) -> Tensors:
    """Return the tensors at some places of a frame."""
    tensors: Tensors
    if isinstance(frame, StoredBytes):
        tensors = StoredTensors(frame, places)
    else:
        tensors = {name: place.make_tensor(frame) for name, place in places.items()}
    for name, place in places.items():
        # Reads one stored tensor after another into memory, and releases it.
        if place.dtype is torch.bool and place.end > place.offset:
            largest = int(tensors[name].view(torch.uint8).max())
            _require(largest <= 1, "a boolean that is neither 0 nor 1")
    return tensors


def _encode_header(header: Any) -> bytes:
    """Return a header as canonical JSON, padded with spaces to a multiple of ALIGN."""
    text = json.dumps(
        header, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    return text + b" " * (-len(text) % ALIGN)


def _read_fields(kind: int, header: Any) -> dict[str, Any]:
    """Check and return the fields of a message, without tensors and attached values.

    Args:
        kind: `REQUEST` or `REPLY`.
        header: The header without the entries of tensors and attached values.
    """
    message_type = Request if kind == REQUEST else Reply
    values = _make_table_reader(message_type)(header)
    if kind == REPLY:
        is_refused = values["weight"] is None
        refusal = values["refusal"]
        _require(is_refused == bool(refusal), "neither an update nor a refusal")
        _require(len(refusal) <= LINE, "a refusal of more than one line")
    return values


def _require(condition: bool, reason: str) -> None:  # noqa: FBT001 - as `assert`
    """Raise WireError for a reason unless a condition holds."""
    if not condition:
        raise WireError(f"not a readable message: {reason}")


# ---- typed values in a header --------------------------------------------------------


def to_json_values(value: Any, *excluded: str) -> Any:
    """Convert a message, or a value in one, to JSON values.

    Args:
        value: The message or value. Bytes become hexadecimal digits.
        excluded: Fields of the message to leave out.
    """
    if is_dataclass(value):
        return {
            header_name: to_json_values(getattr(value, name))
            for name, header_name in _map_to_header_names(value).items()
            if name not in excluded
        }
    if isinstance(value, Mapping):
        return {name: to_json_values(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_json_values(inner) for inner in value]
    return value.hex() if isinstance(value, bytes) else value


def _map_to_header_names(message: Any) -> dict[str, str]:
    """Return the name of each field of a message or its class → that in a header."""
    return {
        each.name: each.metadata.get(_HEADER_NAME, each.name)
        for each in fields(message)
    }


def from_json_values(kind: type[T], value: Any, **excluded: Any) -> T:
    """Return the message whose fields are JSON values: the inverse of `to_json_values`.

    Args:
        kind: The class of the message.
        value: The message's fields as JSON values.
        excluded: Values of fields that are not among the JSON values.

    Raises:
        WireError: The values are not a valid message; the error names the field.
    """
    values = _make_table_reader(cast("Any", kind), *excluded)(value)
    return kind(**values, **excluded)


@cache
def _make_table_reader(kind: Any, *excluded: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads the fields of a message class from a table."""
    hints = get_type_hints(kind, include_extras=True)
    if kind in (Request, Reply):
        excluded = tuple(_NOT_IN_HEADER)
    if kind is Reply:
        hints |= _UPDATE_FIELDS
    header_names = _map_to_header_names(kind)
    readers = {
        header_names.get(name, name): (name, _make_reader(hint))
        for name, hint in hints.items()
        if name not in excluded
    }

    def read_table(table: Any) -> dict[str, Any]:
        """Return the fields of a table; raise WireError if one is missing or wrong."""
        has_fields = type(table) is dict and table.keys() == readers.keys()
        _require(has_fields, f"fields of a {kind.__name__} are missing or unknown")
        values = {}
        header_name = ""
        try:
            for header_name, (name, read) in readers.items():
                values[name] = read(table[header_name])
        except ValueError:
            raise WireError(
                f"not a readable message: the field {header_name!r} of a "
                f"{kind.__name__} is wrong"
            ) from None
        return values

    return read_table


def _make_reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that reads a value of a type or raises ValueError."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        return _make_dataclass_reader(kind)
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return _accept_if(arguments.__contains__)
    if origin is UnionType:
        choices = {_find_json_type(each): _make_reader(each) for each in arguments}
        return lambda value: choices.get(type(value), _refuse)(value)
    if origin is Mapping:
        return _make_mapping_reader(
            _make_reader(arguments[0]), _make_reader(arguments[1])
        )
    read_item = _make_reader(arguments[0])
    return lambda value: tuple(map(read_item, _LEAVES[list](value)))


def _make_dataclass_reader(kind: type) -> Callable[[Any], Any]:
    """Return a function that reads an instance of a dataclass from a table."""
    read_table = _make_table_reader(kind)
    return lambda value: kind(**read_table(value))


def _make_mapping_reader(
    read_key: Callable[[Any], Any], read_value: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Return a function that reads each key and value of a table."""

    def read(table: Any) -> Any:
        return {
            read_key(key): read_value(value)
            for key, value in _LEAVES[dict](table).items()
        }

    return read


def _find_json_type(kind: Any) -> Any:
    """Return the Python type that values of a type have in parsed JSON."""
    if is_dataclass(kind):
        return dict
    return {Mapping: dict, tuple: list}.get(get_origin(kind), kind)


def _accept_if(condition: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that returns its argument if a condition holds, else raises."""

    def read(value: Any) -> Any:
        if not condition(value):
            raise ValueError
        return value

    return read


def _accept_type(kind: type) -> Callable[[Any], Any]:
    """Return a function that returns its argument if it has exactly this type."""
    return _accept_if(lambda value: type(value) is kind)


def _is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 to MAX_INT."""
    return type(value) is int and 0 <= value <= MAX_INT


def _is_int(value: Any) -> bool:
    """Return whether a value is a whole number of at most MAX_INT in magnitude."""
    return type(value) is int and abs(value) <= MAX_INT


def _is_text(value: Any) -> bool:
    # `clean` escapes half of a surrogate pair, so such text is refused
    """Return whether a value is text in which every character is visible."""
    return isinstance(value, str) and clean(value, None) == value


def _is_name(value: Any) -> bool:
    """Return whether a value is visible text of 1 to MAX_NAME characters."""
    return _is_text(value) and 0 < len(value) <= MAX_NAME


def _read_bytes(value: Any) -> bytes:
    """Return the bytes that hexadecimal digits stand for."""
    return bytes.fromhex(_LEAVES[str](value))


_refuse = _accept_if(lambda _: False)
_LEAVES: dict[Any, Callable[[Any], Any]] = {
    str: _accept_if(_is_text),
    Name: _accept_if(_is_name),
    Count: _accept_if(_is_count),
    int: _accept_if(_is_int),
    bytes: _read_bytes,
    bool: _accept_type(bool),
    float: _accept_type(float),
    dict: _accept_type(dict),
    list: _accept_type(list),
    NoneType: _accept_type(NoneType),
    Any: lambda value: value,
}


# Torch has no read-only tensors. It warns of this with the first view of bytes in a
# process, and never again.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

if sys.byteorder != "little":  # pragma: no cover
    raise WireError(
        "tensors are sent as little-endian numbers, but this machine has another byte "
        "order"
    )
