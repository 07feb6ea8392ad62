"""Render the pages of the local web UI and their addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from fednotes.apps.ui.content import Content
from fednotes.apps.ui.marked_text import to_html
from fednotes.apps.ui.review import Filter
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError
from fednotes.metrics.judging import KINDS
from fednotes.report.html import make_environment

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Form = Mapping[str, str]
T = TypeVar("T")

_REFRESH_WORK = 2  # seconds after which a page that waits reloads itself

KIND_NAMES = {
    "correct": "Correct",
    "boundary": "Boundary",
    "type": "Type",
    "both": "Boundary and type",
    "missed": "Missed",
    "spurious": "Spurious",
}


class NotReady(Exception):
    """The requested page is not ready; the message says why. The browser retries."""


class Views:
    """Render templates, and write addresses.

    Args:
        content: The content of the pages.
        root: The folder with which all addresses begin.
    """

    def __init__(self, content: Content, root: str) -> None:
        self._content = content
        self._root = root
        self._templates = make_environment("fednotes.apps.ui")
        self._templates.filters["note"] = to_html

    def render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return the response of a rendered template.

        The layout uses `section`, the address of the current section, and `refresh`,
        the seconds after which the page reloads itself.
        """
        from starlette.responses import HTMLResponse

        common = {
            "content": self._content,
            "root": self._root,
            "link": self.link,
            "kinds": KINDS,
            "kind_names": KIND_NAMES,
            "status": status,
            "section": "",
            "refresh": 0,
        }
        html = self._templates.get_template(template).render(common | values)
        return HTMLResponse(html, status)

    def link(self, path: str, filters: Filter | None = None, **changes: Any) -> str:
        """Return an address with the non-default values of a filter.

        Args:
            path: The path below the root.
            filters: The filter.
            changes: Values that replace those of the filter, or further ones.
        """
        defaults = asdict(Filter())
        values = asdict(filters or Filter()) | changes
        query = {
            name: value
            for name, value in values.items()
            if value != defaults.get(name, "")
        }
        if query.get("undecided"):
            query["undecided"] = 1
        address = self._root + path
        return f"{address}?{urlencode(query)}" if query else address

    def redirect(
        self, path: str, filters: Filter | None = None, anchor: str = ""
    ) -> Response:
        """Return a redirect to an address below the root."""
        from starlette.responses import RedirectResponse

        return RedirectResponse(self.link(path, filters) + anchor, 303)

    # ---- pages that every section needs

    def show_start(self, _request: Request) -> Response:
        """Redirect to the first section."""
        path, _ = self._content.list_sections()[0]
        return self.redirect(path)

    def show_http_error(self, _request: Request, error: Any) -> Response:
        """Explain a starlette `HTTPException`, or a `Refused`."""
        return self.render(
            "message.html", status=error.status_code, message=error.detail
        )

    def show_error(self, _request: Request, error: Exception) -> Response:
        """Explain a FednotesError."""
        return self.render("message.html", status=400, message=str(error))

    def show_progress(self, request: Request, error: Exception) -> Response:
        """Show a page that says what it waits for, and reloads itself."""
        if request.method == "POST":
            return self.show_error(request, error)
        return self.render("wait.html", refresh=_REFRESH_WORK, message=str(error))


def find_in_address(items: Sequence[T], request: Request, name: str) -> T:
    """Return the item whose number is in the address, or raise ConfigError.

    Args:
        items: The items.
        request: The request.
        name: How messages refer to an item.
    """
    text = request.path_params["number"]
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= len(items):
        raise ConfigError(
            f"there is no {name} {clean(text, 20)}; there are {len(items)}, counted "
            "from 0"
        )
    return items[int(text)]


def parse_page_number(text: str) -> int:
    """Return the number of a page; 1 if the text is not the number of a page."""
    if not re.fullmatch("[0-9]{1,6}", text):
        return 1
    return max(1, int(text))
