"""Messages between the process of a simulation and its worker processes.

They are the requests and replies of `core/messages.py`, so tensors travel as bytes and
nothing is pickled. All other values travel as one JSON text in a tensor of bytes: the
header of a message sorts its keys and bounds their number, but the scores and the state
of a site may be large, and their order shows in the files of a run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fednotes.core.carried_errors import describe_error, rebuild_error
from fednotes.core.federation import Option, State
from fednotes.core.messages import Attached, Reply, Request, encode_message
from fednotes.core.tensors import add_prefix, select_prefix
from fednotes.core.update import Tensors, Update

JOB = "on this machine"  # stands for the fingerprint of a job
VALUES = "values"  # name of the tensor with the JSON text
STATES = "@states"
RESTORE = "@restore"
_FAILED = "an error"  # a refusal; the attached values describe the error
_STATE = "state."  # prefix of the names of a state's tensors
_SERVER_START = 1  # a simulation does not restart its server
_numbers = itertools.count(1)  # of this process's requests


class NumberedFrame(NamedTuple):
    """An encoded request, and its number, which the replies repeat."""

    number: int
    frame: bytes


def make_request(
    task: str,
    values: Any = None,
    *,
    tensors: Tensors | None = None,
    options: Mapping[str, Option] | None = None,
    attached: Tensors | None = None,
) -> NumberedFrame:
    """Return an encoded request with a new number.

    Args:
        task: A task of the method, or one of the engine, which begins with "@".
        values: JSON values.
        tensors: Tensors of the method.
        options: Options of the method's task.
        attached: Further tensors.
    """
    request = Request(
        JOB,
        _SERVER_START,
        next(_numbers),
        task,
        tensors=tensors or {},
        options=options or {},
        attached=_attach(values, attached),
    )
    return NumberedFrame(request.number, encode_message(request))


def make_reply(
    request: Request,
    site: str,
    values: Any = None,
    *,
    tensors: Tensors | None = None,
    attached: Tensors | None = None,
) -> bytes:
    """Return an encoded reply.

    Args:
        request: The request that it answers.
        site: The site; "" if the process replies for itself.
        values: JSON values.
        tensors: The tensors of an update.
        attached: Further tensors.
    """
    reply = Reply(
        JOB,
        request.server_start,
        request.number,
        site,
        Update(tensors or {}),
        attached=_attach(values, attached),
    )
    return encode_message(reply)


def make_failure(request: Request, site: str, error: Exception) -> bytes:
    """Return an encoded reply that carries an error; see `make_reply`."""
    reply = Reply(
        JOB,
        1,
        request.number,
        site,
        refusal=_FAILED,
        attached=_attach(describe_error(error)),
    )
    return encode_message(reply)


def _attach(values: Any, tensors: Tensors | None = None) -> Attached:
    """Return JSON values and tensors as what a message carries beside an update."""
    return Attached(tensors={VALUES: pack_values(values), **(tensors or {})})


def raise_failure(reply: Reply) -> None:
    """Raise the error that a reply carries, if it carries one."""
    if reply.update is None:
        raise rebuild_error(read_values(reply))


def read_values(message: Request | Reply) -> Any:
    """Return the JSON values of a message."""
    return json.loads(message.attached.tensors[VALUES].numpy().tobytes())


def pack_values(values: Any) -> torch.Tensor:
    """Return JSON values as a tensor of bytes, (length,)."""
    text = json.dumps(values, default=_convert_number).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _convert_number(value: Any) -> int | float | bool:
    """Return a number of NumPy as Python's."""
    if isinstance(value, np.generic):
        number: int | float | bool = value.item()
        return number
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# ---- updates and states --------------------------------------------------------------


def reply_with_update(request: Request, site: str, update: Update) -> bytes:
    """Return an encoded reply with a site's update.

    Its numbers keep their types and order, so that what the engine observes is equal to
    that of a site in its own process.
    """
    numbers = {"weight": update.weight, "metrics": dict(update.metrics)}
    return make_reply(request, site, numbers, tensors=update.tensors)


def read_update(reply: Reply) -> Update:
    """Return the update of a reply."""
    assert reply.update is not None
    numbers = read_values(reply)
    return Update(reply.update.tensors, numbers["weight"], numbers["metrics"])


def reply_with_state(request: Request, site: str, state: State) -> bytes:
    """Return an encoded reply with a site's state."""
    return make_reply(
        request,
        site,
        _make_state_values(state),
        attached=add_prefix(_STATE, state.tensors),
    )


def request_restore(site: str, state: State) -> NumberedFrame:
    """Return an encoded request that restores a site's state."""
    values = {"site": site, **_make_state_values(state)}
    return make_request(RESTORE, values, attached=add_prefix(_STATE, state.tensors))


def _make_state_values(state: State) -> dict[str, Any]:
    """Return the round and facts of a state as JSON values."""
    return {"round": state.round, "facts": dict(state.facts)}


def read_state(message: Request | Reply) -> State:
    """Return the state of a site that a message carries."""
    values = read_values(message)
    tensors = select_prefix(_STATE, message.attached.tensors)
    return State(values["round"], tensors, values["facts"])
