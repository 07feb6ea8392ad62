"""The pages of a phenotyping model: errors by phenotype, and single patients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from fednotes.apps.ui.content import Content
from fednotes.apps.ui.patient_review import (
    PatientFilter,
    PatientReview,
    judge_presence,
    parse_patient_filter,
)
from fednotes.apps.ui.reliability import draw_patient_bins, list_bins
from fednotes.apps.ui.views import NotReady, Views, find_in_address, parse_page_number
from fednotes.core.errors import ConfigError
from fednotes.jobs.patient_reviews import FeatureWeight

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_PATIENTS_PER_PAGE = 50


class PatientPages:
    """Show what a model predicts for patients, and where it errs.

    Args:
        content: The content of the pages.
        views: Renders the pages.
    """

    def __init__(self, content: Content, views: Views) -> None:
        self._content = content
        self._views = views

    def show_patients(self, request: Request) -> Response:
        """Show errors by phenotype, and the patients that a filter selects."""
        filters = parse_patient_filter(request.query_params)
        review = self._find_review(filters.run)
        rows = review.count_errors(filters.site)
        selected = review.select(filters)
        pages = max(1, ceil(len(selected) / _PATIENTS_PER_PAGE))
        page = min(pages, parse_page_number(request.query_params.get("page", "")))
        first = (page - 1) * _PATIENTS_PER_PAGE
        return self._views.render(
            "patients.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            address=self._link,
            rows=rows,
            pairs=review.list_label_pairs(rows),
            judgments=selected[first : first + _PATIENTS_PER_PAGE],
            total=len(selected),
            first=first,
            page=page,
            pages=pages,
        )

    def show_patient(self, request: Request) -> Response:
        """Show what the model predicts for one patient."""
        filters = parse_patient_filter(request.query_params)
        review = self._find_review(filters.run)
        each = find_in_address(review.patients, request, "patient")
        return self._views.render(
            "patient.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            address=self._link,
            each=each,
            source=next(s for s in review.sources if s.name == each.site),
        )

    def show_phenotype(self, request: Request) -> Response:
        """Show the calibration of one phenotype or of all, and concepts that count."""
        filters = parse_patient_filter(request.query_params)
        review = self._find_review(filters.run)
        judgments = [
            judgment
            for judgment in review.list_judgments(filters.site)
            if filters.phenotype in ("", judgment.phenotype)
        ]
        reliability = judge_presence(judgments)
        bins = [] if reliability is None else list_bins(reliability)
        return self._views.render(
            "phenotype.html",
            section=self._find_section(),
            review=review,
            filters=filters,
            address=self._link,
            reliability=reliability,
            bins=bins,
            diagram=draw_patient_bins(bins) if bins else None,
            weights=_list_weights(review, filters),
        )

    def _find_section(self) -> str:
        """Return the address of the section in which the layout shows these pages.

        Patients of a run in the list are in the section of runs.
        """
        return "/patients" if self._content.patients is not None else "/runs"

    def _link(self, path: str, filters: PatientFilter, **changes: str | int) -> str:
        """Return an address with the non-default values of a filter.

        Args:
            path: The path below the root.
            filters: The filter.
            changes: Values that replace those of the filter, or further ones.
        """
        defaults = asdict(PatientFilter())
        values = asdict(filters) | changes
        query = {
            name: value
            for name, value in values.items()
            if value != defaults.get(name, "")
        }
        address = self._views.link(path)
        return f"{address}?{urlencode(query)}" if query else address

    def _find_review(self, run: str) -> PatientReview:
        """Return the patients of a run, or those of the pages if `run` is "".

        Raises:
            ConfigError: There are no labelled patients to show.
            NotReady: The model is still reading their notes.
        """
        work = self._content.find_patients(run)
        if work is None:
            raise ConfigError(
                "there are no labelled patients here: start the page with some: "
                "fednotes ui MODEL PATIENTS"
            )
        review = work.get()
        if review is None:
            raise NotReady("The model is reading the patients")
        return review


def _list_weights(
    review: PatientReview, filters: PatientFilter
) -> list[tuple[str, Sequence[FeatureWeight]]]:
    """Return the weights of the features of a phenotype, by site.

    If all sites have the same weights, they are returned once, for the site "".
    """
    weights = [
        (source.name, source.weights[filters.phenotype])
        for source in review.sources
        if filters.phenotype in source.weights and filters.site in ("", source.name)
    ]
    is_shared = all(of_source == weights[0][1] for _, of_source in weights)
    if len(weights) > 1 and is_shared:
        return [("", weights[0][1])]
    return weights
