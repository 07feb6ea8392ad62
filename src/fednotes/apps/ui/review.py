"""A model's errors in one's own notes, and what a person decides of each.

Notes are read and tagged once, in a thread of their own. Decisions stand in a file of
the user's (`Corrections`), by document and place, without any text; it is written whole
at each decision.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.parsing import JsonError, read_json
from fednotes.core.store import write_json
from fednotes.core.types import Document, Span
from fednotes.data.formats import write
from fednotes.data.tags import flatten, relabel, types_of
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import load_recorded_job
from fednotes.jobs.models import MentionModel
from fednotes.jobs.run_folder import find_model_folder, require_same_data
from fednotes.metrics.calibration import Calibration
from fednotes.metrics.judging import KINDS, judge_mentions
from fednotes.taggers.saving import load_model

_ALTERNATIVES = 4  # types that are shown of one mention
Action = Literal["gold", "predicted", "label-gold", "label-predicted", "delete"]
Explain = Callable[[Document, Span], Mapping[str, float]]
T = TypeVar("T")


class Later(Generic[T]):
    """Work that is begun when it is first asked for, in a thread that ends with the
    process."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._future: Future[T] | None = None

    def get(self, wait: float = 0.3) -> T | None:
        """What it gave; None while it goes on. wait: seconds. Raises what it ended
        with; whoever asks then begins it again."""
        with self._lock:
            if (found := self._future) is None:
                found = self._future = Future()
                threading.Thread(target=self._run, args=(found,), daemon=True).start()
        if not futures.wait((found,), wait).done:
            return None
        if found.exception():
            self._future = None
        return found.result()

    def _run(self, found: Future[T]) -> None:
        try:
            found.set_result(self._work())
        except BaseException as error:  # told where it is asked for
            found.set_exception(error)


class ReviewedNotes(NamedTuple):
    """The notes of one site, or of one file: as they are, what is compared, and
    predictions.

    explain: how probable the model finds each type for some words.
    """

    name: str
    documents: tuple[Document, ...]
    gold: tuple[Document, ...]
    predicted: tuple[Document, ...]
    explain: Explain | None = None


def compared(
    name: str,
    documents: Sequence[Document],
    known: Sequence[str],
    predict: Callable[[Sequence[Document]], Sequence[Document]],
    explain: Explain | None = None,
) -> ReviewedNotes:
    """A source of documents; of the types that a model knows, those count that are
    annotated.

    Where none is annotated all count: each prediction is then a proposal.
    """
    found = set(types_of(documents))
    types = [t for t in known if t in found] or list(known)
    gold = [
        replace(d, spans=_outermost(d.spans)) for d in relabel(documents, {}, types)
    ]
    said = [
        replace(d, spans=tuple(s for s in d.spans if s.label in types))
        for d in predict(gold)
    ]
    return ReviewedNotes(name, tuple(documents), tuple(gold), tuple(said), explain)


def _outermost(spans: Sequence[Span]) -> tuple[Span, ...]:
    """What is compared, each as it is annotated: of discontinuous ones, with their
    pieces."""
    whole = {(s.start, s.end, s.label): s for s in sorted(spans, reverse=True)}
    return tuple(whole[s.start, s.end, s.label] for s in flatten(spans, "outermost")[0])


def of_run(run: Path, file: Path) -> Review:
    """The errors of a run's models, the federated ones where there are any, in its test
    notes.

    Raises DataError where its notes are not those that it was made with, or it has no
        model.
    """
    job = load_recorded_job(run)
    if job.kind.name != "documents":
        raise DataError(f"{run}: a run of {job.method!r} finds no mentions")
    sites = load_sites(job).data
    require_same_data(run, job, sites)
    found = [c for c in ("federated", "pooled", "alone") if (run / c).is_dir()]
    condition = found[0] if found else "federated"
    sources = []
    for site in sites:
        folder = find_model_folder(run, condition, site.id)
        model = MentionModel(load_model(folder), Calibration.of(folder))
        sources.append(
            compared(site.id, site.test, site.scored_types, model, model.explain)
        )
    return Review(tuple(sources), file, f"{run.name}, {condition}")


class Place(NamedTuple):
    """What tells a mention from others of its note."""

    start: int
    end: int
    label: str
    fragments: tuple[tuple[int, int], ...] = ()


class Decision(BaseModel):
    """What a person decided of one mention.

    gold, predicted: the mentions that were judged together. text: the note's digest.
    action: keep the annotation; take the prediction; give the one's or the other's
    place this label; no mention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str
    document: str
    text: str
    gold: Place | None
    predicted: Place | None
    action: Action
    label: str = Field("", max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")

    @property
    def final(self) -> Place | None:
        """The mention that there should be."""
        if self.action in ("gold", "predicted"):
            return self.gold if self.action == "gold" else self.predicted
        place = self.gold if self.action == "label-gold" else self.predicted
        if place is None or self.action == "delete":
            return None
        return place._replace(label=self.label)


class Corrections(BaseModel):
    """The file of decisions. version 1 has no fragments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1, 2] = 2
    decisions: list[Decision] = []


@dataclass(frozen=True)
class Item:
    """A mention to look at.

    number: its place in all of a review. document: its place in its source. key: by
    which a decision of it is found again: site, document, digest of the text, both
    mentions.
    """

    number: int
    source: int
    document: int
    key: tuple[Any, ...]
    kind: str
    gold: Span | None
    predicted: Span | None

    @property
    def sides(self) -> list[tuple[str, Span]]:
        """The mentions that there are, and what each of them is."""
        both = ("annotated", self.gold), ("predicted", self.predicted)
        return [(name, span) for name, span in both if span]

    @property
    def span(self) -> Span:
        """Where it is: the annotated mention, or the predicted one."""
        return self.sides[0][1]

    @property
    def labels(self) -> tuple[str, ...]:
        """Its types, on either side."""
        return tuple(dict.fromkeys(span.label for _, span in self.sides))

    @property
    def confidence(self) -> float | None:
        """Of the prediction, where its model gives one."""
        return getattr(self.predicted, "confidence", None)


@dataclass(frozen=True)
class Filter:
    """Which items are shown, and in which order. least, most: of the confidence, in
    percent."""

    kind: Annotated[
        str, Field(pattern=f"^({'|'.join((*KINDS, 'all', 'errors'))})$")
    ] = "errors"
    label: str = ""
    site: str = ""
    least: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    most: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 100.0
    order: Literal["place", "certain", "uncertain"] = "place"
    open: bool = False

    def takes(self, item: Item, site: str, decided: bool) -> bool:
        """Whether an item is shown; one without confidence is, unless a bound is set."""
        certain = item.confidence
        return (
            (
                self.kind in ("all", item.kind)
                or (self.kind == "errors" and item.kind != "correct")
            )
            and (not self.label or self.label in item.labels)
            and (not self.site or self.site == site)
            and not (self.open and decided)
            and (
                (self.least <= 0 and self.most >= 100)
                if certain is None
                else self.least <= 100 * certain <= self.most
            )
        )

    def key(self, item: Item) -> tuple[float, int]:
        """By which items are sorted."""
        certain = item.confidence
        if self.order == "place" or certain is None:
            return (0.0 if self.order == "place" else 2.0, item.number)
        return (-certain if self.order == "certain" else certain, item.number)


_FILTER = TypeAdapter(Filter)


@dataclass
class Review:
    """All mentions of some notes, and the decisions of a file. about: what is looked
    at."""

    sources: tuple[ReviewedNotes, ...]
    file: Path
    about: str
    items: list[Item] = field(init=False)
    decisions: dict[tuple[Any, ...], Decision] = field(init=False)

    def __post_init__(self) -> None:
        self.items = []
        for s, source in enumerate(self.sources):
            for d, (gold, said) in enumerate(
                zip(source.gold, source.predicted, strict=True)
            ):
                note = (source.name, gold.id, _digest(gold.text))
                for kind, *sides in judge_mentions(gold.spans, said.spans):
                    key = (*note, *map(_place, sides))
                    self.items.append(Item(len(self.items), s, d, key, kind, *sides))
        self._lock = threading.Lock()
        self.decisions, self._stamp = self._read()

    @property
    def labels(self) -> list[str]:
        """All types of either side."""
        return sorted({label for item in self.items for label in item.labels})

    @property
    def strays(self) -> int:
        """Decisions of the file that fit no mention here: of other notes, or another
        model."""
        return len(self.decisions.keys() - {item.key for item in self.items})

    def document(self, item: Item) -> Document:
        """The note that an item is in."""
        return self.sources[item.source].gold[item.document]

    def decision(self, item: Item) -> Decision | None:
        """What was decided of it."""
        return self.decisions.get(item.key)

    def shows(self, item: Item, by: Filter) -> bool:
        """Whether a filter takes an item."""
        return by.takes(
            item, self.sources[item.source].name, self.decision(item) is not None
        )

    def select(self, by: Filter) -> list[Item]:
        """The items that a filter takes, in its order."""
        return sorted((item for item in self.items if self.shows(item, by)), key=by.key)

    def around(self, item: Item, by: Filter) -> tuple[list[Item], list[Item]]:
        """Those of them that come before an item, and after it."""
        chosen, own = self.select(by), by.key(item)
        return [i for i in chosen if by.key(i) < own], [
            i for i in chosen if by.key(i) > own
        ]

    def alternatives(self, item: Item) -> list[tuple[str, float]]:
        """What the model finds possible of an item's words, the most probable first;
        "O": none."""
        explain = self.sources[item.source].explain
        found: Mapping[str, float] = {}
        # it reads no whole word there, or scores nothing else
        with suppress(FednotesError):
            found = (
                explain(self.document(item), item.predicted or item.span)
                if explain
                else {}
            )
        return sorted(found.items(), key=lambda each: -each[1])[:_ALTERNATIVES]

    def counts(self) -> dict[str, Counter[str]]:
        """label → kind → items; a mention with two types stands at its annotated one."""
        table = {label: Counter[str]() for label in self.labels}
        for item in self.items:
            table[item.labels[0]][item.kind] += 1
        return {label: found for label, found in table.items() if found}

    def decide(self, item: Item, action: str, label: str = "") -> None:
        """Write down a decision; "undo" takes it back.

        Raises ConfigError for what cannot be.
        """
        if action == "undo":
            return self._keep(item.key, None)
        missing = {"gold": item.gold, "predicted": item.predicted}
        side = action.removeprefix("label-")
        if side in missing and missing[side] is None:
            raise ConfigError(f"{action}: there is no {side} mention here to take")
        if action.startswith("label-") and not label:
            raise ConfigError(
                "the label is empty: choose one, or say that there is no mention"
            )
        names = ("site", "document", "text", "gold", "predicted")
        table = dict(zip(names, item.key, strict=True)) | {"action": action}
        try:
            made = Decision(**table, label=label if action.startswith("label-") else "")
        except ValidationError as error:
            raise ConfigError(
                "the label has line ends or over 200 characters, or there is no such action"
            ) from error
        return self._keep(item.key, made)

    def _keep(self, key: tuple[Any, ...], made: Decision | None) -> None:
        with self._lock:
            if _stamp(self.file) != self._stamp:
                raise FednotesError(
                    f"{self.file}: another program changed it: nothing was written; start again to "
                    "go on from what it holds now"
                )
            kept = {k: v for k, v in self.decisions.items() if k != key}
            if made is not None:
                kept[key] = made
            write_json(self.file, Corrections(decisions=[*kept.values()]).model_dump())
            self.decisions, self._stamp = kept, _stamp(self.file)

    def _read(self) -> tuple[dict[tuple[Any, ...], Decision], tuple[int, int] | None]:
        stamp = _stamp(self.file)
        if stamp is None:
            return {}, None
        try:
            found = Corrections.model_validate(read_json(self.file, strict=False))
        except (OSError, JsonError, ValidationError) as error:
            why = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False, include_input=False)[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise DataError(
                f"{self.file}: cannot be read as corrections ({why}); name another with "
                "--corrections"
            ) from error
        rows = (
            (d.site, d.document, d.text, d.gold, d.predicted) for d in found.decisions
        )
        return dict(zip(rows, found.decisions, strict=True)), stamp

    def corrected(self) -> tuple[Document, ...]:
        """The notes as they are annotated, with all decisions; of several sources, ids
        begin with the source's name."""
        change: dict[tuple[int, int], list[Decision]] = {}
        for item in self.items:
            if (made := self.decision(item)) is not None and made.action != "gold":
                change.setdefault((item.source, item.document), []).append(made)
        found = []
        for s, source in enumerate(self.sources):
            for d, document in enumerate(source.documents):
                spans = _corrected(document.spans, change.get((s, d), ()))
                name = (
                    f"{source.name}/{document.id}"
                    if len(self.sources) > 1
                    else document.id
                )
                found.append(replace(document, id=name, spans=spans))
        return tuple(found)

    def export(self, format: str, allow_loss: bool = False) -> tuple[str, bytes]:
        """A file's name and content: the corrected notes; a folder is one .zip.

        Raises LossyError for what the format cannot hold, unless that is agreed to.
        """
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "corrected"
            write(self.corrected(), target, format, allow_loss=allow_loss)
            if target.is_file():
                return (
                    f"corrected.{'jsonl' if format == 'jsonl' else 'json'}",
                    target.read_bytes(),
                )
            packed = Path(shutil.make_archive(str(target), "zip", target))
            return packed.name, packed.read_bytes()


def filter_of(query: Mapping[str, str]) -> Filter:
    """The filter that an address names; what is no value of a key is left out."""
    try:
        return _FILTER.validate_python(dict(query))
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors()}
        return _FILTER.validate_python(
            {k: v for k, v in query.items() if k not in wrong}
        )


def require_writable(file: Path) -> None:
    """Raises ConfigError where decisions cannot be written to a file."""
    with suppress(OSError):
        folder = next(each for each in file.absolute().parents if each.exists())
        if (
            folder.is_dir()
            and os.access(folder, os.W_OK | os.X_OK)
            and not file.is_dir()
        ):
            return
    raise ConfigError(
        f"{file}: decisions cannot be written there: name another file with --corrections"
    )


def _corrected(
    spans: Sequence[Span], decisions: Iterable[Decision]
) -> tuple[Span, ...]:
    made = list(decisions)
    gone = {d.gold for d in made}
    new = [Span(*place) for d in made if (place := d.final)]
    kept = [s for s in spans if _place(s) not in gone]
    return tuple(dict.fromkeys(sorted((*kept, *new)))) if made else tuple(spans)


def _place(span: Span | None) -> Place | None:
    return (
        None
        if span is None
        else Place(span.start, span.end, span.label, span.fragments)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
