"""The page where a person tries the model on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fednotes.apps.ui.content import Content
from fednotes.apps.ui.marked_text import cut_at_mentions
from fednotes.apps.ui.review import Predict
from fednotes.apps.ui.views import Form, Views
from fednotes.core.errors import ConfigError
from fednotes.core.types import Document

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MAX_TEXT = 100_000  # maximum length of a text to try


class TrialPages:
    """Show what the model finds in a text.

    Args:
        content: The content of the pages.
        views: Renders the pages.
    """

    def __init__(self, content: Content, views: Views) -> None:
        self._content = content
        self._views = views

    def show_trial(self, _request: Request) -> Response:
        """Show a form for a text to try the model on."""
        self._require_model()
        return self._render_trial("", None)

    def try_text(self, _request: Request, form: Form) -> Response:
        """Show the mentions that the model finds in a text."""
        model = self._require_model()
        text = form.get("text", "").replace("\r\n", "\n")
        if len(text) > _MAX_TEXT:
            raise ConfigError(
                f"the text has over {_MAX_TEXT:,} characters: try a shorter one"
            )
        if not text.strip():
            return self._render_trial(text, None)
        (result,) = model([Document("text", text)])
        return self._render_trial(text, result)

    def _require_model(self) -> Predict:
        """Return the model of the pages; raise ConfigError if they have none."""
        if self._content.model is None:
            raise ConfigError("there is no model here: fednotes ui MODEL")
        return self._content.model

    def _render_trial(self, text: str, result: Document | None) -> Response:
        """Return the page with a text and, if there is one, the result of the model."""
        spans = () if result is None else result.spans
        return self._views.render(
            "try.html",
            section="/try",
            text=text,
            result=result,
            stretches=cut_at_mentions((), spans, 0, len(text)),
            max_text=_MAX_TEXT,
        )
