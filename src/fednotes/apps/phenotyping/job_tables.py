"""The tables of a job on patients.

[sites.NAME]   PatientsConfig
[synthetic]    SyntheticPatientsConfig
[concepts]     ConceptsConfig: how notes become bags of concepts
[text]         TextConfig, in place of it: patients as mean vectors of a frozen encoder
[phenotypes]   name → codes, any of which makes it present, where no labels come from files
[hold_out]     HoldOutConfig: further codes that stage 1 must not see
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from fednotes.apps.phenotyping.codes import parse, system_of
from fednotes.apps.phenotyping.features import SYNTHETIC, ConceptsConfig, TextConfig
from fednotes.apps.phenotyping.labels import Judgment, Unmentioned
from fednotes.core.errors import ConfigError, within
from fednotes.core.settings import build, checked, over
from fednotes.data.encodings import AUTO, encoding_of
from fednotes.jobs.job import ConfigTable, Job, Labelled, ListsTable, Share


@checked(frozen=True)
class HoldOutConfig:
    """Codes that stage 1 never sees, besides those of [phenotypes].

    Attributes:
        codes: Codes as `<system>:<code>`. Every code that begins with one is taken out;
            an OMOP concept stands only for itself.
    """

    codes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for code in self.codes:
            parse(code)


@checked(frozen=True)
class PatientsConfig:
    """Where one site's patients are: notes, billed codes, labels. All but notes may be
    absent.

    Attributes:
        notes: A file or folder of notes, or a list of them. Relative paths are relative
            to the job file; `$NAME` stands for an environment variable. A note without
            a patient is a patient of its own, named by its id.
        concepts: The output of cTAKES, in place of `notes`
            (`apps/phenotyping/concepts.py`).
        format: Format of the notes; guessed from the content if empty.
        categories: Keeps only notes of these categories; all if empty.
        column: The column of a table, or the JSON key, that holds the text of a note;
            guessed if empty.
        encoding: Encoding of files of notes that have no byte-order mark and are not
            UTF-8, such as "cp1252"; "auto" refuses such files.
        codes: A file or folder of billed codes, or a list of them; `codes_format` says
            what they are.
        codes_format: What `codes` is: "table", any CSV or tab-separated table with a
            patient and a code in each row (`apps/phenotyping/tables.py`); or a folder
            of tables: "mimic" (MIMIC-III), "omop" or "codiesp".
        system: Coding system of a table whose rows name none, such as "icd10".
        patient_column: Name of the column of patients in a table of codes or labels;
            guessed if empty.
        code_column: Name of the column of codes in a table of codes; guessed if empty.
        tables: Tables of MIMIC-III that are read; all if empty.
        kinds: Codes of CodiEsp that are read: diagnoses (D), procedures (P) or both
            (DP).
        conditions: Coding system of the OMOP table of conditions; "" leaves the table
            out.
        procedures: Coding system of the OMOP table of procedures; "" leaves the table
            out.
        labels: A table of judged phenotypes, with a row for each pair or a column for
            each phenotype (`apps/phenotyping/labels.py`). Or a folder of the i2b2 2008
            obesity challenge: its texts are the notes unless `notes` is given, and its
            test part is the test data.
        judgment: Which of the obesity challenge's two judgments is read: what a reader
            concludes, or what the text states.
        unmentioned: What a label U ("unmentioned") counts as.
        test: Notes of a separate test part; with `concepts`, its cTAKES output. If it
            is empty, `test_fraction` of the patients is held out.
        test_codes: Billed codes of the test part, if `codes` does not contain them.
        test_labels: Labels of the test part, if `labels` does not contain them.
        valid_fraction: Fraction of the patients that is held out for validation.
        test_fraction: Fraction of the patients that is held out for testing, where
            `test` is empty.
        labelled: Fraction of the training patients whose phenotype labels are used,
            drawn by the job's seed and a hash of the patient. The patients of a smaller
            fraction are among those of a larger one.
    """

    notes: Any = ()  # text or a list of texts: _paths checks it
    concepts: str = ""
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    encoding: str = AUTO
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
        encoding_of(self.encoding)
        for name in ("notes", "codes", "test", "test_codes"):
            object.__setattr__(self, name, _paths(name, getattr(self, name)))
        if self.notes and self.concepts:
            raise ConfigError(
                "give either `notes` or `concepts` (cTAKES output), not both"
            )
        if not (self.notes or self.concepts or self.labels):
            raise ConfigError(
                "the site has no notes: give `notes`, `concepts` (cTAKES output) or `labels` (a "
                "folder of the obesity challenge)"
            )
        if self.valid_fraction + (0.0 if self.test else self.test_fraction) >= 1:
            raise ConfigError(
                "valid_fraction + test_fraction: 0 to below 1, or nothing is trained"
            )
        if bool(self.codes) != bool(self.codes_format):
            raise ConfigError(
                'codes and codes_format ("table", "mimic", "omop", "codiesp"): give both'
            )
        of_table = self.codes_format == "table"
        if (self.system or self.code_column) and not of_table:
            raise ConfigError('system and code_column go with codes_format = "table"')
        if self.patient_column and not (of_table or self.labels):
            raise ConfigError(
                "patient_column is of a table of codes or of labels: give one"
            )
        if self.system:
            system_of(self.system)
        for name, of in (("test_codes", "codes"), ("test_labels", "labels")):
            if getattr(self, name) and not (self.test and getattr(self, of)):
                raise ConfigError(f"{name} belong to `test`, and go with `{of}`")


def _paths(name: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) and value else value or ()
    if not isinstance(given, list | tuple) or not all(
        isinstance(p, str) and p for p in given
    ):
        raise ConfigError(f"{name} = {value!r}: expected a path or a list of paths")
    if len(set(given)) < len(given):
        raise ConfigError(f"{name}: a path is named twice")
    return tuple(given)


@checked(frozen=True)
class SyntheticPatientsConfig:
    """Generated patients in place of files (`apps/phenotyping/synthetic.py`).

    Attributes:
        sites: Number of sites.
        patients: Approximate number of patients of a site; sites differ.
        labelled: Fraction of the training patients whose phenotype labels are used.
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


TABLES: Mapping[str, ConfigTable | ListsTable] = {
    "concepts": ConfigTable(
        "[concepts] of patients",
        ConceptsConfig,
        {"with [synthetic]": {"dictionary": SYNTHETIC}},
    ),
    "text": ConfigTable("[text] of patients", TextConfig),
    "hold_out": ConfigTable("[hold_out] of patients", HoldOutConfig),
    "phenotypes": ListsTable(
        "[phenotypes] of patients",
        about="Phenotypes by name, each made of billed codes.",
        meaning='Codes such as "icd10:I10"; any of them makes the phenotype present.',
    ),
}


def tables_of(job: Job) -> PatientTables:
    """Return what the tables of a job on patients say."""
    tables = job.kind_tables
    assert isinstance(tables, PatientTables)
    return tables


def shown(job: Job) -> dict[str, Any]:
    """Return the values of the tables of a job on patients, by the tables' names."""
    tables = tables_of(job)
    values: dict[str, Any] = {}
    if tables.concepts is not None:
        values["concepts"] = tables.concepts
    if tables.text is not None:
        values["text"] = tables.text
    values["hold_out"] = {"codes": tables.hold_out}
    values["phenotypes"] = tables.phenotypes
    return values


def patient_tables(
    table: Mapping[str, Any], preset: Mapping[str, Any], where: str
) -> PatientTables:
    """Return the tables of a job on patients.

    Args:
        table: All tables of the job.
        preset: The tables of the method's preset. Its [concepts] applies where the job
            reads notes by concepts.
        where: The job, as messages call it.

    Raises:
        ConfigError: Something is wrong in a table; with table and key.
    """
    table = _with_concepts(table, preset)
    if table.get("silos", {}).get("by", "patient") != "patient":
        raise ConfigError(
            f"{where} [silos]: patients are dealt by patient: leave out `by`"
        )
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
    text = (
        build(TextConfig, table["text"], f"{where} [text]") if "text" in table else None
    )
    phenotypes = _phenotypes(table.get("phenotypes", {}), where)
    if phenotypes and "synthetic" in table:
        raise ConfigError(
            f"{where} [phenotypes]: generated patients have their own: leave it out"
        )
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
            raise ConfigError(
                f"{where} [sites.{name}]: [phenotypes] are made of codes: give them"
            )
        if text is not None and site.get("concepts"):
            raise ConfigError(
                f"{where} [sites.{name}]: concepts do not go with [text]: give notes"
            )
    return PatientTables(concepts, text, phenotypes, out.codes)


def _with_concepts(
    table: Mapping[str, Any], preset: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a job's tables with the preset's [concepts], where the job reads notes by
    concepts."""
    reads = isinstance(table.get("concepts"), Mapping) or "synthetic" in table
    if not reads or "text" in table or "concepts" not in preset:
        return table
    return {**table, "concepts": over(preset["concepts"], table.get("concepts", {}))}


def _phenotypes(table: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    made: dict[str, tuple[str, ...]] = {}
    for name, codes in table.items():
        place = f"{where} [phenotypes] {name}"
        if not isinstance(codes, list | tuple) or not codes:
            raise ConfigError(
                f'{place} = {codes!r}: expected a list of codes such as "icd10:I10"'
            )
        with within(place, ConfigError):
            for code in codes:
                parse(str(code))
        made[name] = tuple(map(str, codes))
    return made
