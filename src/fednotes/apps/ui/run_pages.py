"""The pages of runs: the list, one run, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.content import Content
from fednotes.apps.ui.review import Filter
from fednotes.apps.ui.run_list import (
    FINISHED,
    IN_PROGRESS,
    UNREADABLE,
    RunRow,
    describe_run,
    find_state,
    has_finished,
)
from fednotes.apps.ui.views import Views, find_in_address
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.parsing import find_number
from fednotes.core.wording import format_duration
from fednotes.jobs.compare import Comparison, compare
from fednotes.jobs.job_file import load_recorded_job
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.results import CONDITIONS, RunResult
from fednotes.jobs.run_folder import read_result_so_far
from fednotes.report.html import ComparedRun, collect_comparison, collect_page_parts

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

# Seconds after which a page reloads itself.
_REFRESH_RUN = 5
_REFRESH_WORK = 2


class RunPages:
    """Show runs and compare them.

    Args:
        content: The content of the pages.
        views: Renders the pages.
    """

    def __init__(self, content: Content, views: Views) -> None:
        self._content = content
        self._views = views
        # The rows of finished runs, which do not change.
        self._finished: dict[str, RunRow] = {}
        self._comparisons: dict[tuple[str, ...], BackgroundWork[Comparison]] = {}

    def show_runs(self, _request: Request) -> Response:
        """List all runs, newest first; redirect to the run if there is only one."""
        content = self._content
        content.add_new_runs()
        if len(content.runs) == 1 and not content.folders:
            return self._views.redirect("/runs/0")
        rows = [
            (position, self._find_row(name))
            for position, name in enumerate(content.runs)
        ]
        rows.sort(key=lambda entry: entry[1].sort_key, reverse=True)
        is_live = any(row.state == IN_PROGRESS for _, row in rows)
        return self._views.render(
            "runs.html",
            section="/runs",
            rows=rows,
            unreadable=UNREADABLE,
            folders=[str(folder) for folder in content.folders],
            format_duration=format_duration,
            refresh=_REFRESH_RUN if is_live or content.folders else 0,
        )

    def _find_row(self, name: str) -> RunRow:
        """Return the row of a run in the list; rows of finished runs are kept."""
        row = self._finished.get(name)
        if row is None or not has_finished(row.folder):
            row = describe_run(name, self._content.runs[name])
            if row.state == FINISHED:
                self._finished[name] = row
        return row

    def show_run(self, request: Request) -> Response:
        """Show the report of a run; the page of an unfinished run refreshes itself."""
        name, folder = find_in_address(list(self._content.runs.items()), request, "run")
        lines = read_metrics(folder)
        is_finished = has_finished(folder)
        parts = collect_page_parts(read_result_so_far(folder), lines)
        parts["title"] = parts["result"].title or folder.name
        return self._views.render(
            "run_page.html",
            section="/runs",
            refresh=0 if is_finished else _REFRESH_RUN,
            refresh_seconds=_REFRESH_RUN,
            ended=is_finished,
            is_running=find_state(folder) == IN_PROGRESS,
            last_round=find_number(lines[-1], "round") if lines else None,
            errors=self._link_errors(name) if is_finished else "",
            patients=self._link_patients(name) if is_finished else "",
            **parts,
        )

    def _link_errors(self, name: str) -> str:
        """Return the address of the errors of a run; "" if it finds no mentions."""
        if self._content.find_review(name) is None:
            return ""
        return self._views.link("/errors", Filter(run=name))

    def _link_patients(self, name: str) -> str:
        """Return the address of the patients of a run; "" if it has none."""
        if self._content.find_patients(name) is None:
            return ""
        return self._views.link("/patients", run=name)

    def show_comparison(self, request: Request) -> Response:
        """Show two runs side by side and, on demand, a test of their difference."""
        self._content.add_new_runs()
        names = list(self._content.runs)
        if len(names) < 2:
            raise ConfigError("name two runs: fednotes ui RUN RUN")
        first, second = _choose_two(request, names)
        results = {
            name: read_result_so_far(self._content.runs[name])
            for name in (first, second)
        }
        first_conditions = _list_conditions(results[first])
        second_conditions = _list_conditions(results[second])
        condition = _choose_condition(request, "condition", first_conditions)
        against = _choose_condition(request, "against", second_conditions)
        labels = _name_sides((first, condition), (second, against))
        sides = {
            label: ComparedRun(
                results[name], read_metrics(self._content.runs[name]), side_condition
            )
            for label, name, side_condition in zip(
                labels, (first, second), (condition, against), strict=True
            )
        }

        metric = request.query_params.get("metric", "strict")
        comparison = None
        refresh = 0
        if request.query_params.get("test"):
            comparison = self._request_comparison(
                first, second, condition=condition, against=against, metric=metric
            )
            if comparison is None:
                refresh = _REFRESH_WORK
        return self._views.render(
            "compare.html",
            section="/compare",
            refresh=refresh,
            names=names,
            first=first,
            second=second,
            condition=condition,
            against=against,
            first_conditions=first_conditions,
            second_conditions=second_conditions,
            labels=labels,
            metric=metric,
            metrics=_list_metrics(self._content.runs[first]),
            comparison=comparison,
            **collect_comparison(sides),
        )

    def _request_comparison(
        self, first: str, second: str, *, condition: str, against: str, metric: str
    ) -> Comparison | None:
        """Return the test of the difference of two runs; None while it is computed.

        The first request starts the computation in the background. The page then asks
        again until there is a result, which is kept.

        Args:
            first: Name of the first run.
            second: Name of the second run.
            condition: Condition of the first run.
            against: Condition of the second run.
            metric: The metric to compare.

        Raises:
            FednotesError: The runs cannot be compared.
        """
        key = (first, second, condition, against, metric)
        if key not in self._comparisons:
            self._comparisons[key] = BackgroundWork(
                partial(
                    compare,
                    self._content.runs[first],
                    self._content.runs[second],
                    condition=condition,
                    against=against,
                    metric=metric,
                )
            )
        return self._comparisons[key].get()


def _list_metrics(run: Path) -> Mapping[str, str]:
    """Return the display names of the metrics by which a run can be compared."""
    with suppress(FednotesError):  # the test says what is wrong with the run
        return load_recorded_job(run).kind.metrics
    return {}


def _list_conditions(result: RunResult) -> list[str]:
    """Return the conditions that have scores at a site, in their usual order."""
    scored = {
        condition for conditions in result.sites.values() for condition in conditions
    }
    return [condition for condition in CONDITIONS if condition in scored]


def _choose_condition(request: Request, key: str, conditions: list[str]) -> str:
    """Return the condition that an address names if the run has it, or a usual one."""
    chosen = request.query_params.get(key, "")
    if chosen in conditions:
        return chosen
    if "federated" in conditions or not conditions:
        return "federated"
    return conditions[0]


def _name_sides(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    """Return the names of two sides of a comparison.

    Each name is that of the run, with its condition where the conditions differ.

    Args:
        first: Run and condition of the first side.
        second: Run and condition of the second side.

    Raises:
        ConfigError: Both sides are the same.
    """
    if first[1] == second[1] and first[0] != second[0]:
        return first[0], second[0]
    labels = f"{first[0]}, {first[1]}", f"{second[0]}, {second[1]}"
    if labels[0] == labels[1]:
        raise ConfigError(
            f"both sides are {labels[0]}: choose another run or another condition"
        )
    return labels


def _choose_two(request: Request, names: list[str]) -> tuple[str, str]:
    """Return the two runs that an address names, or the first two.

    The list of runs sends `run` twice; the page of two runs sends `a` and `b`.

    Raises:
        ConfigError: The list of runs sends another number of runs.
    """
    query = request.query_params
    if "run" in query:
        chosen = [name for name in query.getlist("run") if name in names]
        if len(chosen) != 2:
            raise ConfigError("choose two runs in the list, then compare them")
        return chosen[0], chosen[1]
    first = query.get("a", "")
    second = query.get("b", "")
    first = first if first in names else names[0]
    second = second if second in names else names[1]
    return first, second
