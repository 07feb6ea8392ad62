"""The tables of a job file on patients: their notes, codes and labels (`method = "phenotype"`).

[concepts]     ConceptsConfig: how notes become bags of concepts
[text]         TextConfig, in place of it: patients as mean vectors of a frozen encoder
[phenotypes]   name → codes, any of which makes it present, where no labels come from files
[hold_out]     HoldOutConfig: further codes that stage 1 must not see
[sites.NAME]   PatientsConfig
[synthetic]    SyntheticPatientsConfig: generated patients in place of files
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from fednotes.core.errors import ConfigError
from fednotes.core.settings import build, checked
from fednotes.patients.codes import parse, system_of
from fednotes.patients.features import SYNTHETIC, ConceptsConfig, TextConfig
from fednotes.patients.labels import Judgment, Unmentioned

Share = Annotated[float, Interval(ge=0, lt=1)]
Labelled = Annotated[float, Interval(gt=0, le=1)]


@checked(frozen=True)
class HoldOutConfig:
    """Codes that stage 1 never sees, besides those of [phenotypes].

    codes: `<system>:<code>`; every code that begins so is taken out (an OMOP concept: itself).
    """

    codes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for code in self.codes:
            parse(code)


@checked(frozen=True)
class PatientsConfig:
    """Where one site's patients are: notes, billed codes, labels. All but notes may be absent.

    notes: a file or folder, or a list of them. Relative to the job file; `$NAME` stands for an
        environment variable. A note without a patient is a patient of its own, by its id.
    concepts: in place of notes, the output of cTAKES (`patients/concepts.py`).
    format, categories, column: of notes, as in `job_tables.NotesConfig`.
    codes: in `codes_format` "table" any CSV or tab-separated table of a patient and a code a row
        (`patients/tables.py`); else a folder of tables, "mimic" (MIMIC-III), "omop" or
        "codiesp". Or a list of them. system: of a table's codes, where its rows name none
        ("icd10"). patient_column, code_column: what its columns are called, if unusually.
        tables: of MIMIC-III, all if empty. kinds: of CodiEsp's codes, D, P or DP.
        conditions, procedures: coding systems of the OMOP tables; "" leaves a table out.
    labels: a table of judged phenotypes, by pair or with a column for each
        (`patients/labels.py`; a `patient_column` counts if it has it). Or a folder of the i2b2
        2008 obesity challenge, whose texts are the notes unless `notes` is given, and whose
        test part is the test part; judgment: `patients/labels.py`. unmentioned: what a label U is.
    test: notes of a test part of its own (with `concepts`: its cTAKES output); test_codes and
        test_labels: files of it, where those of `codes` and `labels` do not tell them. Without,
        test_fraction of the patients are it. valid_fraction: of the patients.
    labelled: of the training patients, the share whose labels of phenotypes are used. Drawn by
        the job's seed and a hash of the patient: a smaller share's are among a larger one's.
    """

    notes: Any = ()  # text or a list of texts: _paths checks it
    concepts: str = ""
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    codes: Any = ()
    codes_format: Literal["", "table", "mimic", "omop", "codiesp"] = ""
    system: str = ""
    patient_column: str = ""
    code_column: str = ""
    tables: tuple[str, ...] = ()
    kinds: Literal["D", "P", "DP"] = "DP"
    conditions: str = "condition"
    procedures: str = "procedure"
    labels: str = ""
    judgment: Judgment = "intuitive"
    unmentioned: Unmentioned = "unlabelled"
    test: Any = ()
    test_codes: Any = ()
    test_labels: str = ""
    valid_fraction: Share = 0.1
    test_fraction: Share = 0.2
    labelled: Labelled = 1.0

    def __post_init__(self) -> None:
        for name in ("notes", "codes", "test", "test_codes"):
            object.__setattr__(self, name, _paths(name, getattr(self, name)))
        if self.notes and self.concepts:
            raise ConfigError("give either `notes` or `concepts` (cTAKES output), not both")
        if not (self.notes or self.concepts or self.labels):
            raise ConfigError(
                "the site has no notes: give `notes`, `concepts` (cTAKES output) or `labels` (a "
                "folder of the obesity challenge)"
            )
        if self.valid_fraction + (0.0 if self.test else self.test_fraction) >= 1:
            raise ConfigError("valid_fraction + test_fraction: 0 to below 1, or nothing is trained")
        if bool(self.codes) != bool(self.codes_format):
            raise ConfigError(
                'codes and codes_format ("table", "mimic", "omop", "codiesp"): give both'
            )
        of_table = self.codes_format == "table"
        if (self.system or self.code_column) and not of_table:
            raise ConfigError('system and code_column go with codes_format = "table"')
        if self.patient_column and not (of_table or self.labels):
            raise ConfigError("patient_column is of a table of codes or of labels: give one")
        if self.system:
            system_of(self.system)
        for name, of in (("test_codes", "codes"), ("test_labels", "labels")):
            if getattr(self, name) and not (self.test and getattr(self, of)):
                raise ConfigError(f"{name} belong to `test`, and go with `{of}`")


def _paths(name: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) and value else value or ()
    if not isinstance(given, list | tuple) or not all(isinstance(p, str) and p for p in given):
        raise ConfigError(f"{name} = {value!r}: expected a path or a list of paths")
    if len(set(given)) < len(given):
        raise ConfigError(f"{name}: a path is named twice")
    return tuple(given)


@checked(frozen=True)
class SyntheticPatientsConfig:
    """Generated patients in place of files (`patients/synthetic.py`).

    sites: how many. patients: of a site, roughly; sites differ. labelled: as in PatientsConfig.
    """

    sites: Annotated[int, Ge(1)] = 3
    patients: Annotated[int, Ge(30)] = 600
    labelled: Labelled = 1.0


@dataclass(frozen=True)
class PatientTables:
    """What holds for all sites of a job on patients. One of concepts and text is given.

    phenotypes: name → codes. hold_out: further codes that stage 1 must not see.
    """

    concepts: ConceptsConfig | None
    text: TextConfig | None
    phenotypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hold_out: tuple[str, ...] = ()

    @property
    def held_out(self) -> tuple[str, ...]:
        """All codes that are taken out of what stage 1 learns, each once."""
        named = (code for codes in self.phenotypes.values() for code in codes)
        return tuple(dict.fromkeys((*named, *self.hold_out)))


PATIENT_TABLES = ("concepts", "text", "phenotypes", "hold_out")


def patient_tables(table: Mapping[str, Any], where: str) -> PatientTables:
    """The tables of a job on patients, checked. Raises ConfigError naming table and key."""
    if table.get("silos", {}).get("by", "patient") != "patient":
        raise ConfigError(f"{where} [silos]: patients are dealt by patient: leave out `by`")
    if "concepts" in table and "text" in table:
        raise ConfigError(f"{where}: give either [concepts] or [text], not both")
    concepts = None
    if "text" not in table:
        given = dict(table.get("concepts", {}))
        if "synthetic" in table:
            given.setdefault("dictionary", SYNTHETIC)
        elif "concepts" not in table:
            raise ConfigError(
                f"{where}: say how notes are read: [concepts] with a dictionary, or [text] with "
                "an encoder"
            )
        concepts = build(ConceptsConfig, given, f"{where} [concepts]")
    text = build(TextConfig, table["text"], f"{where} [text]") if "text" in table else None
    phenotypes = _phenotypes(table.get("phenotypes", {}), where)
    if phenotypes and "synthetic" in table:
        raise ConfigError(f"{where} [phenotypes]: generated patients have their own: leave it out")
    out = build(HoldOutConfig, table.get("hold_out", {}), f"{where} [hold_out]")
    for name, site in table.get("sites", {}).items():
        if not isinstance(site, Mapping):
            continue
        if phenotypes and site.get("labels"):
            raise ConfigError(
                f"{where} [sites.{name}]: labels do not go with [phenotypes], which makes them of "
                "codes: leave out one of the two"
            )
        if phenotypes and not site.get("codes"):
            raise ConfigError(f"{where} [sites.{name}]: [phenotypes] are made of codes: give them")
        if text is not None and site.get("concepts"):
            raise ConfigError(f"{where} [sites.{name}]: concepts do not go with [text]: give notes")
    return PatientTables(concepts, text, phenotypes, out.codes)


def _phenotypes(table: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    made: dict[str, tuple[str, ...]] = {}
    for name, codes in table.items():
        place = f"{where} [phenotypes] {name}"
        if not isinstance(codes, list | tuple) or not codes:
            raise ConfigError(f'{place} = {codes!r}: expected a list of codes such as "icd10:I10"')
        try:
            for code in codes:
                parse(str(code))
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        made[name] = tuple(map(str, codes))
    return made
