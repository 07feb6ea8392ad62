"""Files of a job on patients: each site's notes by patient, codes and labels.

Nothing of a patient is in a message: paths and lines, names of codes and phenotypes, counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.seeds import rng_of
from fednotes.data import synthetic_patients
from fednotes.data.code_table import read_codes
from fednotes.data.concepts import by_patient
from fednotes.data.ehr import MIMIC, PatientCodes, read_codiesp, read_mimic, read_omop
from fednotes.data.formats import ctakes
from fednotes.data.label_table import PatientLabels, read_labels
from fednotes.data.note_sites import note_files
from fednotes.data.notes import Note
from fednotes.data.obesity import Obesity, label_matrix, read_obesity
from fednotes.jobs import Job, expand
from fednotes.patient_features import Notes
from fednotes.patient_tables import PatientsConfig

Found = Mapping[str, tuple[ctakes.Found, ...]]
Labels = Callable[[Sequence[str]], np.ndarray]  # patients → (patients, outputs) int8


@dataclass(frozen=True, eq=False)
class Source:
    """What a site's files say, before notes are made features.

    notes: by patient; or mentions, what cTAKES found. test: patients of a test part of its own.
    codes: patient → codes, those of patients without notes too; None where nobody was coded.
    labels: gives those of some patients, where they are not made of codes. told: what was
    counted on the way.
    """

    notes: Notes = field(default_factory=dict)
    mentions: Found | None = None
    test: frozenset[str] = frozenset()
    codes: Mapping[str, frozenset[str]] | None = None
    labels: Labels | None = None
    outputs: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def patients(self) -> tuple[str, ...]:
        """All with notes."""
        return tuple(self.notes if self.mentions is None else self.mentions)

    def renamed(self, site: str) -> Source:
        """The same with the site's name before each patient's id."""

        def named(patient: str) -> str:
            return f"{site}/{patient}"

        labels = self.labels
        return replace(
            self,
            notes={named(p): texts for p, texts in self.notes.items()},
            mentions=self.mentions and {named(p): m for p, m in self.mentions.items()},
            test=frozenset(map(named, self.test)),
            codes=self.codes and {named(p): c for p, c in self.codes.items()},
            labels=labels and (lambda ids: labels([p.removeprefix(f"{site}/") for p in ids])),
        )


def sources_of(job: Job) -> Iterator[tuple[str, PatientsConfig, Source]]:
    """Each site's name, table and files, or generated patients; one at a time in memory.

    Raises DataError, ConfigError with the site.
    """
    if job.synthetic is not None:
        made = synthetic_patients.generate(job.synthetic.sites, job.synthetic.patients, job.seed)
        config = PatientsConfig(notes="generated", labelled=job.synthetic.labelled)
        for one in made:
            row = {patient: at for at, patient in enumerate(one.notes)}
            labels = _rows_of(one.labels, row)
            outputs = synthetic_patients.PHENOTYPES
            yield one.id, config, Source(one.notes, None, frozenset(), one.codes, labels, outputs)
        return
    for name, site in job.sites.items():
        try:
            yield name, site, _read(job, name, site)
        except FednotesError as error:
            raise type(error)(f"site {name!r}: {error}") from error


def _rows_of(labels: np.ndarray, row: Mapping[str, int]) -> Labels:
    return lambda patients: labels[[row[patient] for patient in patients]]


def _read(job: Job, name: str, site: PatientsConfig) -> Source:
    """A site's files."""

    def places(key: str) -> list[Path]:
        return [_path(job, p, f"sites.{name}.{key}") for p in getattr(site, key)]

    told: list[str] = []
    labels = _labels(job, name, site, told)
    judged = labels if isinstance(labels, Obesity) else None  # the challenge has notes too
    notes: dict[str, list[str]] = {}
    test: frozenset[str] = frozenset()
    mentions: Found | None = None
    if site.concepts:
        given = [_extract(_path(job, site.concepts, f"sites.{name}.concepts"), told)]
        given += [_extract(path, told) for path in places("test")]
        mentions = dict(given[0])
        test = _apart(mentions, *given[1:])
    else:
        if site.notes:
            notes = _notes(name, site, places("notes"), told)
        elif judged is not None:
            notes = by_patient(judged.notes)
        if site.test:
            test = _apart(notes, _notes(name, site, places("test"), told, "test notes"))
    if judged is not None and not site.test:  # the challenge's own test part
        test = frozenset(n.id for n in judged.notes if "test" in n.source.lower())
    if isinstance(labels, PatientLabels):
        _compare(labels, site, notes if mentions is None else mentions, told)
    codes = None
    if site.codes:
        codes = _codes(site, [*places("codes"), *places("test_codes")], told)
    kept = _shared(tuple(notes if mentions is None else mentions), test, site, job.seed)
    if mentions is not None:
        mentions = {p: m for p, m in mentions.items() if p in kept}
    notes = {p: texts for p, texts in notes.items() if p in kept}
    source = Source(notes, mentions, test & kept, codes, None, (), tuple(told))
    if labels is None:
        return source
    outputs = labels.diseases if isinstance(labels, Obesity) else labels.phenotypes
    return replace(source, labels=_label(labels, site), outputs=outputs)


def _label(labels: Obesity | PatientLabels, site: PatientsConfig) -> Labels:
    unmentioned = site.unmentioned
    if isinstance(labels, PatientLabels):
        return lambda patients: labels.matrix(patients, unmentioned)
    judgments = labels.judgments
    return lambda patients: label_matrix(patients, judgments, unmentioned)


def _path(job: Job, text: str, where: str) -> Path:
    path = Path(expand(text, where))
    return path if path.is_absolute() else job.folder / path


def _apart(whole: dict[str, Any], *others: Mapping[str, Any]) -> frozenset[str]:
    """Adds a test part's patients in place; raises DataError if one trains too."""
    test = frozenset(chain.from_iterable(others))
    if both := len(test & set(whole)):
        raise DataError(f"{both} patients of `test` are among those of training: take them out")
    for other in others:
        whole.update(other)
    return test


def _notes(
    name: str, site: PatientsConfig, paths: Sequence[Path], told: list[str], what: str = "notes"
) -> dict[str, list[str]]:
    """Texts by patient. Raises ConfigError where there is no note at all."""
    stream = note_files(name, paths, site.format, site.categories, site.column)()
    nameless = 0

    def counted() -> Iterator[Note]:
        nonlocal nameless
        for note in stream:
            nameless += note.patient is None
            yield note

    found = by_patient(counted())
    counts = stream.counts
    numbers = {
        "without text": counts.empty,
        "marked as errors": counts.errors,
        "of another category": counts.other_category,
    }
    gone = ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number)
    if not found:
        where = ", ".join(map(str, paths))
        raise ConfigError(f"there is no note in {where}" + (f" but {gone}" if gone else ""))
    if gone:
        told.append(f"{what} left out: {gone}")
    if nameless:
        told.append(f"{nameless:,} {what} name no patient: each is a patient's own, by its id")
    return found


def _extract(path: Path, told: list[str]) -> Found:
    made = ctakes.read(path)
    if damaged := made.counts.get("damaged", 0):
        told.append(f"{path}: {damaged:,} of {made.counts['rows']:,} lines are no CUIs: left out")
    return made.mentions


def _labels(
    job: Job, name: str, site: PatientsConfig, told: list[str]
) -> Obesity | PatientLabels | None:
    """Judged labels: of a table, which is a file, or of the obesity challenge, a folder."""
    if not site.labels:
        return None
    path = _path(job, site.labels, f"sites.{name}.labels")
    if not path.is_dir():
        return _table(job, name, site, path, told)
    if site.test_labels:
        raise ConfigError(
            f"{path}: a folder of the obesity challenge has a test part: leave out test_labels"
        )
    judged = read_obesity(path, site.judgment, "all", site.unmentioned)
    told += judged.judgments.lines()
    if judged.without_text:
        told.append(f"{judged.without_text:,} judged documents have no text: left out")
    if judged.unlabelled:
        told.append(f"{judged.unlabelled:,} documents have no judgment: unlabelled")
    return judged


def _table(job: Job, name: str, site: PatientsConfig, path: Path, told: list[str]) -> PatientLabels:
    if not (site.notes or site.concepts):
        raise ConfigError(f"{path}: a table of labels has no notes: give `notes` or `concepts`")
    if site.judgment != "intuitive":
        raise ConfigError(f"{path}: judgment is of the obesity challenge, not of a table")
    test = [site.test_labels] if site.test_labels else []
    more = [_path(job, text, f"sites.{name}.test_labels") for text in test]
    found = read_labels(path, *more, patient_column=site.patient_column)
    told += found.lines()
    return found


def _compare(
    labels: PatientLabels, site: PatientsConfig, patients: Collection[str], told: list[str]
) -> None:
    """Tells who has labels or notes alone. Raises DataError where nobody has both."""
    noteless = sum(patient not in patients for patient in labels.values)
    if noteless == len(labels.values):
        raise DataError(
            f"{site.labels}: none of the {noteless:,} labelled patients has notes: are both of "
            "the same patients, by the same ids?"
        )
    if noteless:
        told.append(f"{noteless:,} labelled patients have no notes here: left out")
    if bare := sum(not labels.of(patient, site.unmentioned) for patient in patients):
        told.append(f"{bare:,} patients have no label of any phenotype: unlabelled")


def _codes(
    site: PatientsConfig, paths: Sequence[Path], told: list[str]
) -> dict[str, frozenset[str]]:
    """Codes of all paths; what is damaged in them is told by line, not by content."""
    codes: dict[str, frozenset[str]] = {}
    for path in paths:
        made = _read_codes(site, path)
        for patient, given in made.codes.items():
            codes[patient] = codes.get(patient, frozenset()) | given
        for table in made.tables:
            told += table.lines()
            if table.empty:
                told.append(f"{table.path}: {table.empty:,} rows without a code: left out")
            if table.unknown:
                told.append(
                    f"{table.path}: {table.unknown:,} rows have a code that the dictionary of "
                    "codes beside it does not know: kept"
                )
    return codes


def _read_codes(site: PatientsConfig, path: Path) -> PatientCodes:
    if site.codes_format == "table":
        return read_codes(path, site.system, site.patient_column, site.code_column)
    if site.codes_format == "mimic":
        return read_mimic(path, site.tables or tuple(MIMIC))
    if site.codes_format == "omop":
        return read_omop(path, site.conditions or None, site.procedures or None)
    return read_codiesp(path, site.kinds)


def _shared(
    patients: Sequence[str], test: Collection[str], site: PatientsConfig, seed: int
) -> frozenset[str]:
    """The site's share of the patients, and all of `test`. Shares are disjoint, and everything."""
    if not site.share:
        return frozenset(patients)
    number, of = site.shares
    names = sorted(p for p in patients if p not in test)
    order = rng_of(seed, "patients share").permutation(len(names))
    first, last = (round(n * len(names) / of) for n in (number - 1, number))
    return frozenset(names[at] for at in order[first:last].tolist()).union(test)
