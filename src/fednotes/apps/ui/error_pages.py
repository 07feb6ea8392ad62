"""The pages of a model's errors in annotated notes, and a person's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.content import Content
from fednotes.apps.ui.corrections import Decision, MentionKey
from fednotes.apps.ui.marked_text import cut_at_mentions
from fednotes.apps.ui.review import UNDO, Filter, Item, Review, parse_filter
from fednotes.apps.ui.views import Form, NotReady, Views, page_number, pick
from fednotes.core.errors import ConfigError
from fednotes.data.formats import LossyError

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
        # By format, and whether it may leave out what it cannot represent.
        self._exports: dict[tuple[str, bool], _Export] = {}

    def show_errors(self, request: Request) -> Response:
        """Show counts by type and kind, and the mentions that a filter selects."""
        review = self._review()
        filters = parse_filter(request.query_params)
        items = review.select(filters)
        pages = max(1, ceil(len(items) / _ERRORS_PER_PAGE))
        page = min(pages, page_number(request.query_params.get("page", "")))
        first = (page - 1) * _ERRORS_PER_PAGE
        return self._views.render(
            "errors.html",
            section="/errors",
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

    def show_item(self, request: Request) -> Response:
        """Show one mention in its note with the possible decisions."""
        review, filters, item = self._item(request)
        source = review.sources[item.source]
        document = review.document(item)
        length = len(document.text)
        low, high = 0, length
        if length > 3 * _CONTEXT:
            low = max(0, item.span.start - _CONTEXT)
            high = min(length, item.span.end + _CONTEXT)
        predicted = source.predicted[item.document]
        before, after = review.neighbours(item, filters)
        return self._views.render(
            "item.html",
            section="/errors",
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
        review, filters, item = self._item(request)
        # The decision may remove the item from the list.
        _, after = review.neighbours(item, filters)
        action = form.get("action", "")
        review.decide(item, action, form.get("label", "").strip())
        stays = action == UNDO or not after
        number = item.number if stays else after[0].number
        return self._views.redirect(f"/errors/{number}", filters, "#here")

    def export(self, request: Request) -> Response:
        """Return the corrected notes as a download."""
        from starlette.responses import Response

        review = self._review()
        format = request.path_params["format"]
        if format not in _EXPORT_NAMES:
            known = ", ".join(_EXPORT_NAMES)
            raise ConfigError(f"unknown format {format!r}; known: {known}")
        allow_loss = bool(request.query_params.get("anyway"))
        try:
            file = self._export_file(review, format, allow_loss=allow_loss)
        except LossyError as error:
            return self._show_loss(request, format, error)
        if file is None:
            raise NotReady("The export is being written")
        name, data = file
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    def _export_file(
        self, review: Review, format: str, *, allow_loss: bool
    ) -> tuple[str, bytes] | None:
        """Return the name and content of an export; None while it is written.

        Raises:
            LossyError: The format cannot represent everything.
        """
        key = (format, allow_loss)
        decisions = review.decisions
        export = self._exports.get(key)
        if export is None or export.decisions != decisions:
            work = partial(review.export, format, allow_loss=allow_loss)
            export = _Export(decisions, BackgroundWork(work))
            self._exports[key] = export
        return export.file.get(_EXPORT_SECONDS)

    def _show_loss(self, request: Request, format: str, error: LossyError) -> Response:
        """Ask whether to export what a format can represent."""
        losses = ", ".join(f"{kind} ({count:,})" for kind, count in error.lost.items())
        return self._views.render(
            "message.html",
            status=409,
            message=f"{_EXPORT_NAMES[format]} cannot represent everything in these "
            f"notes: {losses}. The notes themselves are not changed.",
            anyway=request.url.path,
        )

    def _review(self) -> Review:
        if self._content.review is None:
            raise ConfigError("there are no notes here: fednotes ui MODEL NOTES")
        review = self._content.review.get()
        if review is None:
            raise NotReady("The model is reading the notes")
        return review

    def _item(self, request: Request) -> tuple[Review, Filter, Item]:
        """Return the review, filter and mention that an address names."""
        review = self._review()
        item = pick(review.items, request, "mention")
        return review, parse_filter(request.query_params), item
