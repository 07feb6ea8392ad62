"""Facts about the notes of sites, for tests of the job that is proposed for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fednotes.jobs.job import FoundLabels
from fednotes.jobs.proposal import Facts, ReadOptions, SiteFacts
from fednotes.jobs.proposal.facts import Lengths


def facts_of(
    sites: Mapping[str, Mapping[str, int]], *, patients: int = 0, units: int = 40
) -> Facts:
    """Facts of sites whose mentions are counted; a site without any has notes alone."""
    facts = [
        SiteFacts(
            name=name,
            root=Path(name),
            parts={"path": Path(name)},
            holds="mentions" if types else "notes",
            format="conll",
            notes=100,
            patients=patients,
            words=Lengths(1000, 10, 20),
            characters=Lengths(5000, 50, 100),
            types=types,
            units={"train": units, "valid": units, "test": units},
        )
        for name, types in sites.items()
    ]
    return Facts(tuple(facts), ReadOptions())


def facts_of_patients(*names: str) -> Facts:
    """Facts of sites whose patients are labelled, as the phenotyping application is."""
    labels = FoundLabels(
        method="phenotype",
        notes_key="notes",
        labels_key="labels",
        path=Path("labels.csv"),
        counts={"Asthma": 20},
        patients=50,
        tables={},
        encoder_key=("text", "encoder"),
    )
    facts = facts_of({key: {} for key in names}, patients=50)
    return replace(
        facts,
        sites=tuple(
            replace(site, holds="patients", labels=labels) for site in facts.sites
        ),
    )
