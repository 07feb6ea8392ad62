"""The pages of a site: what left it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fednotes.apps.ui.content import Content, ledger_reader
from fednotes.apps.ui.views import Views
from fednotes.core.wording import format_size

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_LEDGER_LINES = 100  # newest lines of a ledger that are shown


class SitePages:
    """Show what left a site.

    Args:
        content: The content of the pages.
        views: Renders the pages.
    """

    def __init__(self, content: Content, views: Views) -> None:
        self._content = content
        self._views = views

    def show_ledgers(self, _request: Request) -> Response:
        """Show what left each site according to its ledger."""
        ledgers = []
        for name, kit in self._content.kits.items():
            report, lines = ledger_reader(kit).read_ledger(kit)
            by_task: dict[tuple[str, str], list[Any]] = {}
            for line in lines:
                by_task.setdefault((line["run"], line["task"]), []).append(line)
            newest = lines[: -_LEDGER_LINES - 1 : -1]
            ledgers.append((name, report, by_task, newest))
        return self._views.render(
            "ledger.html", section="/ledger", ledgers=ledgers, format_size=format_size
        )
