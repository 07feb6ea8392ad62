"""The pages of a site: what left it, and the jobs that wait for its approval."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednotes.apps.ui.content import Content, find_ledger_reader
from fednotes.apps.ui.views import Form, Views, find_in_address
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.wording import format_size
from fednotes.jobs.site_approvals import (
    ApprovalDesk,
    ApprovalRequest,
    Decision,
    PastDecision,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_LEDGER_LINES = 100  # newest lines of a ledger that are shown
_DECISIONS = 50  # newest decisions that are shown
_REFRESH_WAITING = 5  # seconds after which a page without a request reloads itself


@dataclass(frozen=True)
class SiteApprovals:
    """What the page shows of a site's approvals.

    Attributes:
        name: The name of the kit.
        number: Its place among the kits with approvals.
        requests: The jobs that wait, the newest first, each with a token that proves
            that the page showed it.
        decisions: The newest decisions, newest first.
        problem: Why the records of the site cannot be read; "" if they can.
    """

    name: str
    number: int
    requests: tuple[tuple[ApprovalRequest, str], ...] = ()
    decisions: tuple[PastDecision, ...] = ()
    problem: str = ""


class SitePages:
    """Show what left a site, and let a person decide on the jobs that wait.

    Args:
        content: The content of the pages.
        views: Renders the pages.
    """

    def __init__(self, content: Content, views: Views) -> None:
        self._content = content
        self._views = views
        self._secret = secrets.token_bytes(32)

    def show_ledgers(self, _request: Request) -> Response:
        """Show what left each site according to its ledger."""
        ledgers = []
        for name, kit in self._content.kits.items():
            report, lines = find_ledger_reader(kit).read_ledger(kit)
            by_task: dict[tuple[str, str], list[Any]] = {}
            for line in lines:
                by_task.setdefault((line["run"], line["task"]), []).append(line)
            newest = lines[: -_LEDGER_LINES - 1 : -1]
            ledgers.append((name, report, by_task, newest))
        return self._views.render(
            "ledger.html", section="/ledger", ledgers=ledgers, format_size=format_size
        )

    # ---- approvals

    def show_approvals(self, _request: Request) -> Response:
        """Show the jobs that wait at each site, and the decisions so far."""
        if not self._content.desks:
            raise ConfigError(
                "there is no site here whose jobs need approval: fednotes ui KIT"
            )
        return self._render_approvals("")

    def _render_approvals(self, effect: str) -> Response:
        """Return the page of approvals.

        A page with a request does not reload itself: a person is reading it.

        Args:
            effect: What a decision has just changed; "" for nothing.
        """
        sites = [
            self._describe_site(number, name)
            for number, name in enumerate(self._content.desks)
        ]
        is_waiting = any(site.requests for site in sites)
        return self._views.render(
            "approvals.html",
            section="/approvals",
            sites=sites,
            effect=effect,
            group_lines=group_lines,
            refresh=0 if is_waiting or effect else _REFRESH_WAITING,
        )

    def _describe_site(self, number: int, name: str) -> SiteApprovals:
        """Return what the page shows of a site."""
        desk = self._content.desks[name]
        kit = self._content.kits[name]
        try:
            requests = desk.read_requests(kit)
            newest_decisions = tuple(desk.read_decisions(kit))[-_DECISIONS:]
        except FednotesError as error:
            return SiteApprovals(name, number, problem=str(error))
        # A decision needs the token of the request that the page has shown.
        signed_requests = tuple(
            (request, self._sign(kit, request)) for request in requests
        )
        return SiteApprovals(
            name,
            number,
            requests=signed_requests,
            decisions=tuple(reversed(newest_decisions)),
        )

    def _sign(self, kit: Path, request: ApprovalRequest) -> str:
        """Return a token for all that the page shows of a request.

        A decision needs this token, so that no one decides on a job or on changes that
        the page has not shown.
        """
        shown = json.dumps([str(kit), request.fingerprint, request.lines])
        return hmac.new(self._secret, shown.encode(), hashlib.sha256).hexdigest()

    def decide(self, request: Request, form: Form) -> Response:
        """Approve or reject the job that a page showed.

        Raises:
            ConfigError: The form is incomplete, or the job has changed since.
        """
        name, desk = find_in_address(list(self._content.desks.items()), request, "site")
        kit = self._content.kits[name]
        waiting = self._require_shown(desk, kit, form.get("token", ""))
        decision = _parse_decision(form)
        effect = desk.decide(kit, waiting.fingerprint, decision)
        return self._render_approvals(effect)

    def _require_shown(
        self, desk: ApprovalDesk, kit: Path, token: str
    ) -> ApprovalRequest:
        """Return the waiting job that the page showed, if it has not changed.

        Raises:
            ConfigError: The job no longer waits, or what a person must see has changed.
        """
        for waiting in desk.read_requests(kit):
            expected = self._sign(kit, waiting)
            if hmac.compare_digest(token.encode(), expected.encode()):
                return waiting
        raise ConfigError(
            "the job has changed since the page showed it, or no longer waits for a "
            "decision; nothing was decided: open the approvals again and read what "
            "has changed"
        )


def group_lines(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each line that fednotes wrote, with the indented lines below it.

    Indented lines contain text of the job. The page nests them, so that a job cannot
    imitate a line that fednotes wrote, whether people see the page or hear it.
    """
    groups: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("  ") and groups:
            groups[-1][1].append(line.strip())
        else:
            groups.append((line, []))
    return groups


def _parse_decision(form: Form) -> Decision:
    """Return the decision of a form, or raise ConfigError."""
    action = form.get("decision", "")
    if action == "reject":
        return "reject"
    if action != "approve":
        raise ConfigError("unknown decision; nothing was decided: reload the page")
    if form.get("read") != "yes":
        raise ConfigError(
            "nothing was decided: to approve a job, tick that you have read what it "
            "asks of this site"
        )
    return "approve"
