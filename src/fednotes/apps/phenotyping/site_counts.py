"""Tables of counts about the sites' patients, and lines about their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients
from fednotes.jobs.job import CountTable

_LABELS = ("present", "absent", "questionable")
_WITH_UNLABELLED = (*_LABELS, "unlabelled")


def describe_labels(sites: Sequence[SitePatients]) -> Iterator[str]:
    """Yield the labels of the training patients.

    Yields:
        A line for each phenotype; and a line for each site at which a phenotype has
        fewer than two classes and therefore cannot be learned.
    """
    counts = {site.id: site.train.count_labels() for site in sites}
    phenotypes = sites[0].phenotypes
    kinds = "/".join(_WITH_UNLABELLED)
    for row, phenotype in enumerate(phenotypes):
        by_site = ", ".join(
            f"{site} {_format_counts(of_site, _WITH_UNLABELLED, row)}"
            for site, of_site in counts.items()
        )
        yield f"{phenotype}: {kinds} of the training patients: {by_site}"
    for site, of_site in counts.items():
        lacking = [
            _describe_lack_of_classes(phenotype, of_site, row)
            for row, phenotype in enumerate(phenotypes)
        ]
        described = ", ".join(text for text in lacking if text)
        if described:
            yield (
                f"{site}: phenotypes without two classes of training labels: "
                f"{described}"
            )


def _format_counts(
    counts: dict[str, np.ndarray], names: Sequence[str], row: int
) -> str:
    """Return the counts of a phenotype as text, one per label."""
    return "/".join(str(int(counts[name][row])) for name in names)


def _describe_lack_of_classes(
    phenotype: str, counts: dict[str, np.ndarray], row: int
) -> str:
    """Return a phenotype with its only class; "" if it has two or more."""
    classes = [name for name in _LABELS if counts[name][row]]
    if len(classes) > 1:
        return ""
    return f"{phenotype} ({classes[0]} only)" if classes else f"{phenotype} (no label)"


def make_count_tables(sites: Sequence[SitePatients]) -> list[CountTable]:
    """Return tables of the sites' patients, and of the test patients' labels.

    The first table has the number of patients, of those with billed codes (`coded`) and
    of those with a label for any phenotype (`labelled`); and, if notes are read as
    concepts, the mean and the maximum number of concepts per patient.
    """
    rows = []
    for site in sites:
        rows.append((site.id, *_make_part_row("train", site, site.train)))
        rows.append(("", *_make_part_row("valid", site, site.valid)))
        rows.append(("", *_make_part_row("test", site, site.test)))
    heads = ["site", "part", "patients", "coded", "labelled"]
    if not any(site.space.dense for site in sites):
        heads += ["without concepts", "concepts each", "most"]
    tables = [CountTable(tuple(heads), rows, words=2)]

    labelled = [site for site in sites if (site.test.labels >= 0).any()]
    if labelled:
        tables.append(_make_label_table(labelled))
    return tables


def _make_part_row(name: str, site: SitePatients, cohort: Cohort) -> tuple[str, ...]:
    """Return the cells of one part of a site: its name and its counts."""
    numbers = (
        len(cohort),
        len(site.select_coded(cohort)),
        len(cohort.select_labelled()),
    )
    cells = [name, *(f"{number:,}" for number in numbers)]
    if isinstance(cohort.bags, Bags):
        sizes = cohort.bags.sizes
        cells.append(f"{int((sizes == 0).sum()):,}")
        if len(sizes):
            cells += [f"{sizes.mean():,.1f}", f"{sizes.max():,}"]
        else:
            cells += ["–", "–"]
    return tuple(cells)


def _make_label_table(sites: Sequence[SitePatients]) -> CountTable:
    """Return a table of the labels of the test patients, by phenotype and site."""
    counts = [site.test.count_labels() for site in sites]
    rows = []
    for row, phenotype in enumerate(sites[0].phenotypes):
        cells = [_format_counts(of_site, _LABELS, row) for of_site in counts]
        rows.append((phenotype, *cells))
    heads = ("phenotype", *(site.id for site in sites))
    return CountTable(heads, rows, title="test patients: present/absent/questionable")
