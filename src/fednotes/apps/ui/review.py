"""A model's errors in annotated notes, and the notes with a person's decisions."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from fednotes.apps.ui.corrections import (
    CorrectionsFile,
    Decision,
    MentionKey,
    MentionPlace,
    digest_text,
    make_decision,
)
from fednotes.apps.ui.filters import parse_query
from fednotes.core.errors import DataError, FednotesError
from fednotes.core.types import Document, Span
from fednotes.data.formats import write
from fednotes.data.tags import flatten, list_types, relabel
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import load_recorded_job
from fednotes.jobs.models import load_mention_model
from fednotes.jobs.run_folder import find_model_folder, require_same_data
from fednotes.metrics.judging import KINDS, judge_mentions

UNDO = "undo"  # the action that removes a decision

_MAX_LIKELY_TYPES = 4  # maximum number of types shown for one mention

Explain = Callable[[Document, Span], Mapping[str, float]]
Predict = Callable[[Sequence[Document]], Sequence[Document]]


# ---- notes and their predictions -----------------------------------------------------


class ReviewedNotes(NamedTuple):
    """The notes of one site or one file, with a model's predictions.

    Attributes:
        name: The name of the site or file.
        documents: The notes as annotated.
        gold: The notes with the annotations to compare.
        predicted: The notes with the model's predictions.
        explain: Returns the model's probability of each type for some words.
    """

    name: str
    documents: tuple[Document, ...]
    gold: tuple[Document, ...]
    predicted: tuple[Document, ...]
    explain: Explain | None = None


def predict_notes(
    name: str,
    documents: Sequence[Document],
    types: Sequence[str],
    predict: Predict,
    explain: Explain | None = None,
) -> ReviewedNotes:
    """Return notes with the predictions of a model.

    Types that the notes do not annotate are left out. If the notes annotate none of the
    model's types, all types are kept, and each prediction is a proposal.

    Args:
        name: The name of the site or file.
        documents: The notes.
        types: The model's types.
        predict: Returns documents with the predicted spans.
        explain: As in `ReviewedNotes`.
    """
    annotated = set(list_types(documents))
    compared = [label for label in types if label in annotated] or list(types)
    gold = [
        replace(document, spans=_keep_outermost(document.spans))
        for document in relabel(documents, {}, compared)
    ]
    predicted = [
        replace(
            document,
            spans=tuple(span for span in document.spans if span.label in compared),
        )
        for document in predict(gold)
    ]
    return ReviewedNotes(
        name=name,
        documents=tuple(documents),
        gold=tuple(gold),
        predicted=tuple(predicted),
        explain=explain,
    )


def _keep_outermost(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans that lie in no other one, each with its pieces."""
    annotated = {
        (span.start, span.end, span.label): span for span in sorted(spans, reverse=True)
    }
    flat, *_ = flatten(spans, "outermost")
    return tuple(annotated[span.start, span.end, span.label] for span in flat)


# ---- mentions to review --------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A mention to review: an annotation, a prediction, or a pair of them.

    Attributes:
        number: Its index in `Review.items`.
        source: The index of its notes in `Review.sources`.
        document: The index of its note in these notes.
        key: Identifies it in the file of decisions.
        kind: One of `fednotes.metrics.judging.KINDS`.
        gold: The annotated mention, if there is one.
        predicted: The predicted mention, if there is one.
    """

    number: int
    source: int
    document: int
    key: MentionKey
    kind: str
    gold: Span | None
    predicted: Span | None

    @property
    def sides(self) -> list[tuple[str, Span]]:
        """Its mentions with their names, "annotated" and "predicted"."""
        both = (("annotated", self.gold), ("predicted", self.predicted))
        return [(name, span) for name, span in both if span is not None]

    @property
    def span(self) -> Span:
        """The annotated mention, or the predicted one if there is no other."""
        return self.sides[0][1]

    @property
    def labels(self) -> tuple[str, ...]:
        """Its one or two types."""
        return tuple(dict.fromkeys(span.label for _, span in self.sides))

    @property
    def confidence(self) -> float | None:
        """The confidence of the prediction, if there is one."""
        return None if self.predicted is None else self.predicted.confidence


_KIND_PATTERN = f"^({'|'.join((*KINDS, 'all', 'errors'))})$"
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


@dataclass(frozen=True)
class Filter:
    """The selection and order of the items in a list.

    Attributes:
        kind: A kind of error, "errors" or "all".
        label: A type; "" for all.
        site: The name of a site or file; "" for all.
        min_confidence: The lowest confidence in percent.
        max_confidence: The highest confidence in percent.
        order: "place" (as in the notes), "certain" (most confident first) or
            "uncertain" (least confident first).
        undecided: Whether to leave out items with a decision.
        gold: An annotated type; "" for all items, annotated or not.
        predicted: A predicted type; "" for all items, predicted or not.
        run: The run whose errors are shown; "" for the first one.
    """

    kind: Annotated[str, Field(pattern=_KIND_PATTERN)] = "errors"
    label: str = ""
    site: str = ""
    min_confidence: Percent = 0.0
    max_confidence: Percent = 100.0
    order: Literal["place", "certain", "uncertain"] = "place"
    undecided: bool = False
    gold: str = ""
    predicted: str = ""
    run: str = ""

    def accepts(self, item: Item, *, site: str, is_decided: bool) -> bool:
        """Return whether the list shows an item.

        Args:
            item: The item.
            site: The name of the item's site or file.
            is_decided: Whether there is a decision about it.
        """
        return (
            self._accepts_kind(item.kind)
            and self.label in ("", *item.labels)
            and _has_type(item.gold, self.gold)
            and _has_type(item.predicted, self.predicted)
            and self.site in ("", site)
            and not (self.undecided and is_decided)
            and self._accepts_confidence(item.confidence)
        )

    def _accepts_kind(self, kind: str) -> bool:
        """Return whether the list shows items of a kind."""
        if self.kind == "errors":
            return kind != "correct"
        return self.kind in ("all", kind)

    def _accepts_confidence(self, confidence: float | None) -> bool:
        """Return whether a confidence is within the bounds of the list."""
        if confidence is None:
            # Shown unless a bound is set.
            return self.min_confidence <= 0 and self.max_confidence >= 100
        return self.min_confidence <= 100 * confidence <= self.max_confidence

    def make_sort_key(self, item: Item) -> tuple[float, int]:
        """Return the sort key of an item; items without a confidence are last.

        No two items have the same key.
        """
        if self.order == "place":
            return 0.0, item.number
        if item.confidence is None:
            return 2.0, item.number
        if self.order == "certain":
            return -item.confidence, item.number
        return item.confidence, item.number


def _has_type(span: Span | None, label: str) -> bool:
    """Return whether a mention has a type; "" accepts anything."""
    return not label or (span is not None and span.label == label)


_FILTER = TypeAdapter(Filter)


def parse_filter(query: Mapping[str, str]) -> Filter:
    """Return the filter in an address; invalid values are ignored."""
    return parse_query(_FILTER, query)


# ---- the review ----------------------------------------------------------------------


class Review:
    """All mentions of some notes, and the decisions about them.

    Args:
        sources: The notes.
        file: The file of decisions.
        about: The name of what is reviewed.

    Attributes:
        sources: The notes.
        about: The name of what is reviewed.
        items: All mentions, in the order of the notes.
        labels: All types, sorted.

    Raises:
        DataError: The file exists and holds something other than decisions.
    """

    def __init__(
        self, sources: Sequence[ReviewedNotes], file: Path, about: str
    ) -> None:
        self.sources = tuple(sources)
        self.about = about
        self.items = _list_items(self.sources)
        self.labels = sorted({label for item in self.items for label in item.labels})
        self._corrections = CorrectionsFile(file)

    @property
    def file(self) -> Path:
        """The file of decisions."""
        return self._corrections.path

    @property
    def decisions(self) -> Mapping[MentionKey, Decision]:
        """The decisions by mention; a new mapping after each decision."""
        return self._corrections.decisions

    def count_strays(self) -> int:
        """Return how many decisions match no mention of these notes and this model."""
        return len(self.decisions.keys() - {item.key for item in self.items})

    def find_document(self, item: Item) -> Document:
        """Return the note of an item, with the annotations that are compared."""
        return self.sources[item.source].gold[item.document]

    def find_decision(self, item: Item) -> Decision | None:
        """Return the decision about an item, if there is one."""
        return self.decisions.get(item.key)

    # ---- lists

    def accepts(self, item: Item, filters: Filter) -> bool:
        """Return whether a filter accepts an item."""
        return filters.accepts(
            item,
            site=self.sources[item.source].name,
            is_decided=item.key in self.decisions,
        )

    def select(self, filters: Filter) -> list[Item]:
        """Return the items that a filter accepts, in its order."""
        items = [item for item in self.items if self.accepts(item, filters)]
        return sorted(items, key=filters.make_sort_key)

    def list_neighbours(
        self, item: Item, filters: Filter
    ) -> tuple[list[Item], list[Item]]:
        """Return the selected items that come before an item, and those after it."""
        items = self.select(filters)
        key = filters.make_sort_key(item)
        before = [each for each in items if filters.make_sort_key(each) < key]
        after = [each for each in items if filters.make_sort_key(each) > key]
        return before, after

    def count_kinds(self) -> dict[str, Counter[str]]:
        """Return the number of items by type and kind.

        A pair with two types counts for the annotated one.
        """
        counts = {label: Counter[str]() for label in self.labels}
        for item in self.items:
            counts[item.labels[0]][item.kind] += 1
        return {label: kinds for label, kinds in counts.items() if kinds}

    def list_likely_types(self, item: Item) -> list[tuple[str, float]]:
        """Return the types that the model finds most probable for an item's words.

        Returns:
            Types with probabilities, the most probable first; "O" stands for no
            mention. Empty if the model gives no probabilities for these words.
        """
        explain = self.sources[item.source].explain
        if explain is None:
            return []
        probabilities: Mapping[str, float] = {}
        # The model may have no whole word at these offsets.
        with suppress(FednotesError):
            probabilities = explain(
                self.find_document(item), item.predicted or item.span
            )
        ranked = sorted(probabilities.items(), key=lambda entry: -entry[1])
        return ranked[:_MAX_LIKELY_TYPES]

    # ---- decisions

    def decide(self, item: Item, action: str, label: str = "") -> None:
        """Save a decision about an item.

        Args:
            item: The item.
            action: An action of `Decision`, or "undo" to remove the decision.
            label: The new type, for actions that change the type.

        Raises:
            ConfigError: The decision is not possible.
            FednotesError: The decision cannot be saved.
        """
        if action == UNDO:
            self._corrections.remove(item.key)
        else:
            self._corrections.save(make_decision(item.key, action, label))

    def correct_documents(self) -> tuple[Document, ...]:
        """Return all annotated notes with the decisions applied.

        With several sources, ids begin with the source's name.
        """
        changes: dict[tuple[int, int], list[Decision]] = {}
        for item in self.items:
            decision = self.find_decision(item)
            if decision is not None and decision.action != "gold":
                changes.setdefault((item.source, item.document), []).append(decision)

        corrected = []
        for source_index, source in enumerate(self.sources):
            for index, document in enumerate(source.documents):
                decisions = changes.get((source_index, index), [])
                spans = _apply_decisions(document.spans, decisions)
                id = document.id
                if len(self.sources) > 1:
                    id = f"{source.name}/{id}"
                corrected.append(replace(document, id=id, spans=spans))
        return tuple(corrected)

    def export(self, format: str, *, allow_loss: bool = False) -> tuple[str, bytes]:
        """Return the name and content of a file with the corrected notes.

        A format that is a folder is returned as a .zip file.

        Args:
            format: The name of the format.
            allow_loss: Whether to leave out what the format cannot represent.

        Raises:
            LossyError: The format cannot represent everything.
        """
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "corrected"
            write(self.correct_documents(), target, format, allow_loss=allow_loss)
            if target.is_file():
                ending = "jsonl" if format == "jsonl" else "json"
                return f"corrected.{ending}", target.read_bytes()
            packed = Path(shutil.make_archive(str(target), "zip", target))
            return packed.name, packed.read_bytes()


def review_mentions_of_run(run: Path, file: Path) -> Review:
    """Return the errors of a run's models in its test notes.

    The models are the federated ones; without these, the pooled ones, or those trained
    alone.

    Args:
        run: The folder of the run.
        file: The file of decisions.

    Raises:
        DataError: The run finds no mentions, its notes have changed, or it has no
            models.
    """
    job = load_recorded_job(run)
    if job.kind.name != "documents":
        raise DataError(
            f"{run}: method {job.method!r} does not predict mentions, so there is "
            "nothing to show"
        )
    sites = load_sites(job).data
    require_same_data(run, job, sites)
    condition = "federated"
    for each in ("federated", "pooled", "alone"):
        if (run / each).is_dir():
            condition = each
            break

    sources = []
    for site in sites:
        folder = find_model_folder(run, condition, site.id)
        model = load_mention_model(folder)
        sources.append(
            predict_notes(
                site.id,
                site.test,
                types=site.scored_types,
                predict=model,
                explain=model.explain,
            )
        )
    return Review(sources, file, f"{run.name}, {condition}")


def _list_items(sources: Sequence[ReviewedNotes]) -> list[Item]:
    """Return all mentions of some notes, each judged against the annotation."""
    items: list[Item] = []
    for source_index, source in enumerate(sources):
        pairs = zip(source.gold, source.predicted, strict=True)
        for index, (gold, predicted) in enumerate(pairs):
            digest = digest_text(gold.text)
            for mention in judge_mentions(gold.spans, predicted.spans):
                key = MentionKey(
                    site=source.name,
                    document=gold.id,
                    text=digest,
                    gold=MentionPlace.of(mention.gold),
                    predicted=MentionPlace.of(mention.predicted),
                )
                item = Item(
                    number=len(items),
                    source=source_index,
                    document=index,
                    key=key,
                    kind=mention.kind,
                    gold=mention.gold,
                    predicted=mention.predicted,
                )
                items.append(item)
    return items


def _apply_decisions(
    spans: Iterable[Span], decisions: Sequence[Decision]
) -> tuple[Span, ...]:
    """Return the spans of a note after the decisions about its mentions."""
    if not decisions:
        return tuple(spans)
    replaced = {decision.gold for decision in decisions}
    corrected = [span for span in spans if MentionPlace.of(span) not in replaced]
    for decision in decisions:
        place = decision.final
        if place is not None:
            corrected.append(Span(*place))
    return tuple(dict.fromkeys(sorted(corrected)))
