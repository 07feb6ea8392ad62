"""The file in which a person's decisions are saved.

It identifies each mention by document and position, and contains no text. Each decision
rewrites the complete file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fednotes.core.errors import ConfigError, DataError, FednotesError, ParameterError
from fednotes.core.parsing import JsonError, read_json
from fednotes.core.store import write_json
from fednotes.core.types import Span

Action = Literal["gold", "predicted", "label-gold", "label-predicted", "delete"]

_MAX_LABEL = 200  # maximum length of a type that a person enters


class MentionPlace(NamedTuple):
    """The position and type that distinguish a mention from others in its note.

    Attributes:
        start: Start of the mention.
        end: End of the mention, exclusive.
        label: Its type.
        fragments: The offsets of its pieces if it is discontinuous.
    """

    start: int
    end: int
    label: str
    fragments: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, span: Span | None) -> MentionPlace | None:
        """Return the place of a span; None if there is no span."""
        if span is None:
            return None
        return cls(span.start, span.end, span.label, span.fragments)


class MentionKey(NamedTuple):
    """The key of a mention, by which decisions of earlier sessions are found.

    Attributes:
        site: The name of the site or file.
        document: The id of the note.
        text: The digest of the note's text.
        gold: The annotated mention, if there is one.
        predicted: The predicted mention, if there is one.
    """

    site: str
    document: str
    text: str
    gold: MentionPlace | None
    predicted: MentionPlace | None


class Decision(BaseModel):
    """A person's decision about one mention.

    Attributes:
        site: As in `MentionKey`, like the next four.
        document: The id of the note.
        text: The digest of the note's text.
        gold: The annotated mention, if there is one.
        predicted: The predicted mention, if there is one.
        action: "gold" keeps the annotation, "predicted" accepts the prediction,
            "label-gold" and "label-predicted" change the type of one of them, and
            "delete" says that there is no mention.
        label: The other type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str
    document: str
    text: str
    gold: MentionPlace | None
    predicted: MentionPlace | None
    action: Action
    label: str = Field("", max_length=_MAX_LABEL, pattern=r"^[^\x00-\x1f\x7f]*$")

    @property
    def key(self) -> MentionKey:
        """The key of the mention."""
        return MentionKey(
            site=self.site,
            document=self.document,
            text=self.text,
            gold=self.gold,
            predicted=self.predicted,
        )

    @property
    def final(self) -> MentionPlace | None:
        """The correct mention; None if there should be none."""
        if self.action == "gold":
            return self.gold
        if self.action == "predicted":
            return self.predicted
        if self.action == "delete":
            return None
        place = self.gold if self.action == "label-gold" else self.predicted
        return None if place is None else place._replace(label=self.label)


class _Content(BaseModel):
    """The content of the file; version 1 has no fragments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1, 2] = 2
    decisions: list[Decision] = []


def make_decision(key: MentionKey, action: str, label: str) -> Decision:
    """Return a checked decision.

    Args:
        key: The mention.
        action: One of the actions of `Decision`.
        label: The other type; ignored by actions that need none.

    Raises:
        ConfigError: There is no such action, it does not apply to this mention, or the
            type is invalid.
    """
    if action not in get_args(Action):
        raise ConfigError("unknown action: reload the page")
    gives_label = action.startswith("label-")
    places = {"gold": key.gold, "predicted": key.predicted}
    side = action.removeprefix("label-")
    if side in places and places[side] is None:
        name = "annotated" if side == "gold" else "predicted"
        raise ConfigError(f"this item has no {name} mention: reload the page")
    if gives_label and not label:
        raise ConfigError('the type is empty: enter one, or choose "No mention"')
    try:
        return Decision.model_validate(
            {**key._asdict(), "action": action, "label": label if gives_label else ""}
        )
    except ValidationError as error:
        raise ConfigError(
            f"a type must be one line of at most {_MAX_LABEL} characters"
        ) from error


class CorrectionsFile:
    """The decisions in a file.

    Args:
        path: The file; it is created by the first decision.

    Attributes:
        path: The file.

    Raises:
        DataError: The file exists but does not contain decisions.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp = _read_stamp(path)
        self._decisions: dict[MentionKey, Decision] = {}
        if self._stamp is not None:
            self._decisions = _read_decisions(path)

    @property
    def decisions(self) -> Mapping[MentionKey, Decision]:
        """The decisions by mention; a new mapping after each change."""
        return self._decisions

    def save(self, decision: Decision) -> None:
        """Add a decision, or replace an earlier one about the same mention.

        Raises:
            FednotesError: Another program changed the file, or it cannot be written.
        """
        self._replace_decision(decision.key, decision)

    def remove(self, key: MentionKey) -> None:
        """Remove the decision about a mention, if there is one.

        Raises:
            FednotesError: Another program changed the file, or it cannot be written.
        """
        self._replace_decision(key, None)

    def _replace_decision(self, key: MentionKey, decision: Decision | None) -> None:
        """Write the file with a new decision about a mention, or without one."""
        with self._lock:
            if _read_stamp(self.path) != self._stamp:
                raise FednotesError(
                    f"{self.path}: another program has changed this file, so the "
                    "decision was not saved: start `fednotes ui` again to load it"
                )
            decisions = dict(self._decisions)
            decisions.pop(key, None)
            if decision is not None:
                decisions[key] = decision
            content = _Content(decisions=list(decisions.values()))
            write_json(self.path, content.model_dump())
            self._decisions = decisions
            self._stamp = _read_stamp(self.path)


def _read_decisions(path: Path) -> dict[MentionKey, Decision]:
    """Return the decisions in a file, or raise DataError."""
    try:
        content = _Content.model_validate(read_json(path, strict=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _make_unreadable_error(path, f"{where}: {first['msg']}") from error
    except (OSError, JsonError) as error:
        raise _make_unreadable_error(path, str(error)) from error
    return {decision.key: decision for decision in content.decisions}


def _make_unreadable_error(path: Path, reason: str) -> DataError:
    """Return the error for a file that holds no decisions."""
    return DataError(
        f"{path}: cannot be read as a file of decisions ({reason}): start `fednotes "
        "ui` with another file of corrections"
    )


def require_writable(file: Path) -> None:
    """Raise ParameterError if decisions cannot be written to a file."""
    with suppress(OSError):
        folder = next(each for each in file.absolute().parents if each.exists())
        can_write = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        if can_write and not file.is_dir():
            return
    raise ParameterError(
        f"{file}: decisions cannot be written there: give another file in `corrections`"
    )


def digest_text(text: str) -> str:
    """Return the digest that ties a decision to the text of its note."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _read_stamp(path: Path) -> tuple[int, int] | None:
    """Return the time and size of a file, by which changes are noticed."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
