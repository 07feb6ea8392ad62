"""The pages of a model's errors in annotated notes, and a person's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.confusion import count_confusions
from fednotes.apps.ui.content import Content
from fednotes.apps.ui.corrections import Decision, MentionKey
from fednotes.apps.ui.marked_text import cut_at_mentions
from fednotes.apps.ui.reliability import (
    describe_confidence,
    draw_mention_bins,
    judge_confidences,
    list_bins,
    measure_types,
)
from fednotes.apps.ui.review import UNDO, Filter, Item, Review, parse_filter
from fednotes.apps.ui.views import (
    Form,
    NotReady,
    Views,
    find_in_address,
    parse_page_number,
)
from fednotes.core.errors import ConfigError
from fednotes.data.formats import LossyError
from fednotes.metrics.calibration import Reliability

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_ERRORS_PER_PAGE = 50
# Characters that are shown before and after a mention if its note is long.
_CONTEXT = 6_000
# Seconds until a page says that an export is still being written.
_EXPORT_SECONDS = 2.0

_ORDER_NAMES = {
    "place": "as in the notes",
    "certain": "most confident first",
    "uncertain": "least confident first",
}
_EXPORT_NAMES = {
    "jsonl": "JSONL",
    "brat": "brat (.zip)",
    "label-studio": "Label Studio",
}


class _Export(NamedTuple):
    """An export, and the decisions that it contains."""

    decisions: Mapping[MentionKey, Decision]
    file: BackgroundWork[tuple[str, bytes]]


class ErrorPages:
    """Show errors in notes, and save decisions about them.

    Args:
        content: The content of the pages.
        views: Renders the pages.
    """

    def __init__(self, content: Content, views: Views) -> None:
        self._content = content
        self._views = views
        # By run, format, and whether it may leave out what it cannot represent.
        self._exports: dict[tuple[str, str, bool], _Export] = {}

    def show_errors(self, request: Request) -> Response:
        """Show counts by type and kind, and the mentions that a filter selects."""
        filters = parse_filter(request.query_params)
        review = self._find_review(filters.run)
        items = review.select(filters)
        pages = max(1, ceil(len(items) / _ERRORS_PER_PAGE))
        page = min(pages, parse_page_number(request.query_params.get("page", "")))
        first = (page - 1) * _ERRORS_PER_PAGE
        return self._views.render(
            "errors.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            counts=review.count_kinds(),
            total=len(items),
            items=items[first : first + _ERRORS_PER_PAGE],
            first=first,
            page=page,
            pages=pages,
            order_names=_ORDER_NAMES,
            export_names=_EXPORT_NAMES,
        )

    def show_confusion(self, request: Request) -> Response:
        """Show which types the model confuses, as a matrix."""
        filters = parse_filter(request.query_params)
        review = self._find_review(filters.run)
        items = review.select(Filter("all", site=filters.site))
        return self._views.render(
            "confusion.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            confusion=count_confusions(items, review.labels),
        )

    def show_calibration(self, request: Request) -> Response:
        """Show how reliable the model's confidences are."""
        filters = parse_filter(request.query_params)
        review = self._find_review(filters.run)
        sources = [
            source for source in review.sources if filters.site in ("", source.name)
        ]
        judged = judge_confidences(sources, review.labels)
        values: dict[str, Any] = {}
        if judged is not None:
            documents = sum(len(source.gold) for source in sources)
            reliability = Reliability.of(*judged, documents)
            bins = list_bins(reliability)
            values = {
                "reliability": reliability,
                "summary": describe_confidence(judged),
                "bins": bins,
                "diagram": draw_mention_bins(bins),
                "types": measure_types(sources, review.labels),
            }
        return self._views.render(
            "calibration.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            judged=judged,
            **values,
        )

    def _find_section(self) -> str:
        """Return the address of the section in which the layout shows these pages.

        Errors of a run in the list are in the section of runs.
        """
        return "/errors" if self._content.review is not None else "/runs"

    def show_item(self, request: Request) -> Response:
        """Show one mention in its note with the possible decisions."""
        review, filters, item = self._find_item(request)
        source = review.sources[item.source]
        document = review.find_document(item)
        length = len(document.text)
        low = 0
        high = length
        if length > 3 * _CONTEXT:
            low = max(0, item.span.start - _CONTEXT)
            high = min(length, item.span.end + _CONTEXT)
        predicted = source.predicted[item.document]
        before, after = review.list_neighbours(item, filters)
        return self._views.render(
            "item.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            item=item,
            source=source,
            document=document,
            stretches=cut_at_mentions(document.spans, predicted.spans, low, high),
            low=low,
            high=high,
            before=before,
            after=after,
        )

    def decide(self, request: Request, form: Form) -> Response:
        """Save a decision and redirect to the next mention."""
        review, filters, item = self._find_item(request)
        # The decision may remove the item from the list.
        _, after = review.list_neighbours(item, filters)
        action = form.get("action", "")
        review.decide(item, action, form.get("label", "").strip())
        stays = action == UNDO or not after
        number = item.number if stays else after[0].number
        return self._views.redirect(f"/errors/{number}", filters, "#here")

    def export(self, request: Request) -> Response:
        """Return the corrected notes as a download."""
        from starlette.responses import Response

        filters = parse_filter(request.query_params)
        format = request.path_params["format"]
        if format not in _EXPORT_NAMES:
            known = ", ".join(_EXPORT_NAMES)
            raise ConfigError(f"unknown format {format!r}: known: {known}")
        allow_loss = bool(request.query_params.get("anyway"))
        try:
            file = self._find_export(filters.run, format, allow_loss=allow_loss)
        except LossyError as error:
            return self._show_loss(filters.run, format, error)
        if file is None:
            raise NotReady("The export is being written")
        name, data = file
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    def _find_export(
        self, run: str, format: str, *, allow_loss: bool
    ) -> tuple[str, bytes] | None:
        """Return the name and content of an export; None while it is written.

        Raises:
            LossyError: The format cannot represent everything.
        """
        key = (run, format, allow_loss)
        review = self._find_review(run)
        decisions = review.decisions
        export = self._exports.get(key)
        if export is None or export.decisions != decisions:
            work = partial(review.export, format, allow_loss=allow_loss)
            export = _Export(decisions, BackgroundWork(work))
            self._exports[key] = export
        return export.file.get(_EXPORT_SECONDS)

    def _show_loss(self, run: str, format: str, error: LossyError) -> Response:
        """Ask whether to export what a format can represent."""
        losses = ", ".join(f"{kind} ({count:,})" for kind, count in error.lost.items())
        return self._views.render(
            "message.html",
            status=409,
            message=f"{_EXPORT_NAMES[format]} cannot represent everything in these "
            f"notes: {losses}. The notes themselves are not changed.",
            anyway=self._views.link(f"/export/{format}", Filter(run=run), anyway=1),
        )

    def _find_review(self, run: str) -> Review:
        """Return the errors of a run, or those of the pages if `run` is "".

        Raises:
            ConfigError: There are no notes to show.
            NotReady: The model is still reading the notes.
        """
        work = self._content.find_review(run)
        if work is None:
            raise ConfigError(
                "there are no notes here: start the page with some: fednotes ui MODEL "
                "NOTES"
            )
        review = work.get()
        if review is None:
            raise NotReady("The model is reading the notes")
        return review

    def _find_item(self, request: Request) -> tuple[Review, Filter, Item]:
        """Return the review, the filter and the mention that an address names."""
        filters = parse_filter(request.query_params)
        review = self._find_review(filters.run)
        item = find_in_address(review.items, request, "mention")
        return review, filters, item
