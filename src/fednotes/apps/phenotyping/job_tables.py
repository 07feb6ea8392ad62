"""The tables of a job on patients.

[sites.NAME]   PatientsConfig: where the patients of a site are
[synthetic]    SyntheticPatientsConfig: generated patients
[concepts]     ConceptsConfig: how notes become bags of concepts
[text]         TextConfig, instead of [concepts]: the encoder that reads notes
[phenotypes]   the codes of each phenotype, unless its labels come from files
[hold_out]     HoldOutConfig: further codes that stage 1 must not see
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from fednotes.apps.phenotyping.code_tables import (
    CodeSource,
    CodeTable,
    CodiespFolder,
    MimicFolder,
    OmopFolder,
)
from fednotes.apps.phenotyping.codes import get_system, parse_code
from fednotes.apps.phenotyping.features import SYNTHETIC, ConceptsConfig, TextConfig
from fednotes.apps.phenotyping.labels import Unmentioned
from fednotes.apps.phenotyping.obesity import Judgment
from fednotes.apps.phenotyping.phenotyper import ATTENTION
from fednotes.core.errors import ConfigError, naming_place
from fednotes.core.numbers import (
    FractionBelowOne,
    PositiveFraction,
    PositiveInt,
)
from fednotes.core.settings import LocalFile, Mark, build, checked, merge_tables
from fednotes.data.encodings import AUTO, resolve_encoding
from fednotes.data.notes import require_places_of_notes
from fednotes.jobs.job import ConfigTable, Job, ListsTable

# Text or a list of texts, as `_list_paths` checks.
LocalFiles = Annotated[Any, Mark.LOCAL_FILE]


@checked(frozen=True)
class HoldOutConfig:
    """Codes that stage 1 never sees, in addition to those of [phenotypes].

    Attributes:
        codes: Codes to hold out, written `<system>:<code>`. Every code that begins with
            one of them is removed; an OMOP concept stands only for itself.
    """

    codes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for code in self.codes:
            parse_code(code)


@checked(frozen=True)
class PatientsConfig:
    """Where a site's notes, codes and labels are. Only notes are required.

    Attributes:
        notes: A file or folder of notes, or a list of them. A note without a patient is
            a patient of its own, named by its id. An entry can also be the address of a
            database.
        concepts: A file or folder with the output of cTAKES, instead of `notes`
            (`apps/phenotyping/ctakes.py`). Give it if the site has already extracted
            its concepts.
        format: Format of the notes; guessed from the content if empty.
        categories: Keeps only notes of these categories; all if empty.
        column: The column of a table, or the JSON key, that holds the text of a note;
            guessed if empty.
        encoding: Encoding of files of notes that are not UTF-8 and have no byte-order
            mark, such as "cp1252"; "auto" refuses such files.
        query: If `notes` or `test` is the address of a database: a SELECT that returns
            the columns of a table of notes, including the notes' ids. An address is a
            URL without a password, or "env:NAME" for an environment variable that holds
            one.
        omop: If `notes` or `test` is the address of a database: its NOTE table in the
            OMOP common data model, such as "cdm.note". If both this key and `query` are
            empty, the table is "note".
        codes: A file or folder of billing codes, or a list of them, in the format
            `codes_format`.
        codes_format: Format of `codes`: "table" is a CSV or tab-separated table with a
            patient and a code in each row (`apps/phenotyping/code_tables.py`). The
            others are folders of tables: "mimic" (MIMIC-III), "omop" and "codiesp".
        system: Coding system of the codes in a table without a column for it, such as
            "icd10".
        patient_column: Name of the column with the patients in a table of codes or
            labels; guessed if empty.
        code_column: Name of the column with the codes in a table of codes; guessed if
            empty.
        tables: Names of the MIMIC-III tables to read; empty reads all.
        kinds: Kinds of CodiEsp codes to read: diagnoses ("D"), procedures ("P") or both
            ("DP").
        conditions: Coding system of the OMOP table of conditions; "" leaves the table
            out.
        procedures: Coding system of the OMOP table of procedures; "" leaves the table
            out.
        labels: A table of phenotype labels, with a row for each patient and phenotype,
            or a column for each phenotype (`apps/phenotyping/labels.py`). It can also
            be a folder of the i2b2 2008 obesity challenge, whose texts are the notes
            unless `notes` is given, and whose test part is the test data.
        judgment: Judgment of the obesity challenge to read: "intuitive" is what a
            reader concludes, "textual" what the text states.
        unmentioned: Meaning of the obesity challenge's label U ("unmentioned"): no
            label, or that the disease is absent.
        test: Notes of a separate test part; with `concepts`, its cTAKES output. If
            empty, `test_fraction` of the patients is held out.
        test_codes: Billing codes of the test part, if `codes` does not contain them.
        test_labels: Labels of the test part, if `labels` does not contain them.
        valid_fraction: Fraction of the patients to hold out for validation.
        test_fraction: Fraction of the patients to hold out for testing, if `test` is
            empty.
        labelled: Fraction of the training patients whose phenotype labels are used,
            drawn with the job's seed and a hash of the patient. A smaller fraction uses
            a subset of the patients of a larger one. Lower it to measure how many
            labels a result needs.
    """

    notes: LocalFiles = ()
    concepts: LocalFile = ""
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    encoding: str = AUTO
    query: str = ""
    omop: str = ""
    codes: LocalFiles = ()
    codes_format: Literal["", "table", "mimic", "omop", "codiesp"] = ""
    system: str = ""
    patient_column: str = ""
    code_column: str = ""
    tables: tuple[str, ...] = ()
    kinds: Literal["D", "P", "DP"] = "DP"
    conditions: str = "condition"
    procedures: str = "procedure"
    labels: LocalFile = ""
    judgment: Judgment = "intuitive"
    unmentioned: Unmentioned = "unlabelled"
    test: LocalFiles = ()
    test_codes: LocalFiles = ()
    test_labels: LocalFile = ""
    valid_fraction: FractionBelowOne = 0.1
    test_fraction: FractionBelowOne = 0.2
    labelled: PositiveFraction = 1.0

    def __post_init__(self) -> None:
        resolve_encoding(self.encoding)
        for name in ("notes", "codes", "test", "test_codes"):
            object.__setattr__(self, name, _list_paths(name, getattr(self, name)))
        self._check_notes()
        self._check_codes()
        self._check_labels_and_test()

    def _check_notes(self) -> None:
        """Raise ConfigError unless the site has notes, and some are trained on."""
        if self.notes and self.concepts:
            raise ConfigError(
                "give either `notes` or `concepts` (cTAKES output), not both"
            )
        if not (self.notes or self.concepts or self.labels):
            raise ConfigError(
                "the site has no notes: give `notes`, `concepts` (cTAKES output) or "
                "`labels` (a folder of the obesity challenge)"
            )
        places = self.notes if self.concepts else (*self.notes, *self.test)
        require_places_of_notes(places, self.query, self.omop)
        test_fraction = 0.0 if self.test else self.test_fraction
        if self.valid_fraction + test_fraction >= 1:
            raise ConfigError(
                "valid_fraction + test_fraction must be below 1, or no training "
                "data remain"
            )

    def _check_codes(self) -> None:
        """Raise ConfigError if a parameter does not belong to the codes' format."""
        if bool(self.codes) != bool(self.codes_format):
            raise ConfigError(
                'codes and codes_format ("table", "mimic", "omop", "codiesp"): give '
                "both"
            )
        is_table = self.codes_format == "table"
        if (self.system or self.code_column) and not is_table:
            raise ConfigError(
                'system and code_column apply only with codes_format = "table"'
            )
        if self.patient_column and not (is_table or self.labels):
            raise ConfigError(
                'patient_column needs a table of codes (codes_format = "table") or of '
                "labels: give one, or leave patient_column out"
            )
        if self.system:
            get_system(self.system)

    def _check_labels_and_test(self) -> None:
        """Raise ConfigError if codes or labels of the test part have no main part."""
        if self.test_codes and not (self.test and self.codes):
            raise ConfigError("test_codes needs `test` and `codes`")
        if self.test_labels and not (self.test and self.labels):
            raise ConfigError("test_labels needs `test` and `labels`")

    def make_code_source(self) -> CodeSource | None:
        """Return the reader of the site's codes; None if the site has none."""
        if self.codes_format == "table":
            return CodeTable(self.system, self.patient_column, self.code_column)
        if self.codes_format == "mimic":
            return MimicFolder(self.tables)
        if self.codes_format == "omop":
            return OmopFolder(self.conditions, self.procedures)
        if self.codes_format == "codiesp":
            return CodiespFolder(self.kinds)
        return None


def _list_paths(name: str, value: Any) -> tuple[str, ...]:
    """Return the paths in a value of a job: one text, or a list of texts.

    Raises:
        ConfigError: The value is something else, or names a path twice.
    """
    values = [value] if isinstance(value, str) and value else value or ()
    if not isinstance(values, list | tuple) or not all(
        isinstance(path, str) and path for path in values
    ):
        raise ConfigError(f"{name} = {value!r}: expected a path or a list of paths")
    if len(set(values)) < len(values):
        raise ConfigError(f"{name}: a path is listed twice: list each path once")
    return tuple(values)


@checked(frozen=True)
class SyntheticPatientsConfig:
    """Generated patients instead of files (`apps/phenotyping/synthetic.py`).

    Attributes:
        sites: Number of sites.
        patients: Approximate number of patients at a site; the numbers differ between
            sites.
        labelled: Fraction of the training patients whose phenotype labels are used.
    """

    sites: PositiveInt = 3
    patients: Annotated[int, Ge(30)] = 600
    labelled: PositiveFraction = 1.0


@dataclass(frozen=True)
class PatientTables:
    """The settings for all sites of a job on patients.

    Attributes:
        features: How notes are read: [concepts] or [text].
        phenotypes: The codes of each phenotype.
        hold_out: Further codes that stage 1 must not see.
        tunes_encoder: Whether the encoder of [text] is tuned, and reads all words.
    """

    features: ConceptsConfig | TextConfig
    phenotypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hold_out: tuple[str, ...] = ()
    tunes_encoder: bool = False

    @property
    def held_out(self) -> tuple[str, ...]:
        """All distinct codes that are removed from the training of stage 1."""
        of_phenotypes = (code for codes in self.phenotypes.values() for code in codes)
        return tuple(dict.fromkeys((*of_phenotypes, *self.hold_out)))


TABLES: Mapping[str, ConfigTable | ListsTable] = {
    "concepts": ConfigTable(
        "[concepts] for patients",
        ConceptsConfig,
        {"with [synthetic]": {"dictionary": SYNTHETIC}},
    ),
    "text": ConfigTable("[text] for patients", TextConfig),
    "hold_out": ConfigTable("[hold_out] for patients", HoldOutConfig),
    "phenotypes": ListsTable(
        "[phenotypes] for patients",
        about="Phenotypes by name, each defined by billing codes.",
        meaning='Codes such as "icd10:I10"; any of them makes the phenotype present.',
    ),
}


def get_tables(job: Job) -> PatientTables:
    """Return the settings in the tables of a job on patients."""
    tables = job.kind_tables
    assert isinstance(tables, PatientTables)
    return tables


def collect_tables(job: Job) -> dict[str, Any]:
    """Return the values of the tables of a job on patients, by the tables' names."""
    tables = get_tables(job)
    name = "concepts" if isinstance(tables.features, ConceptsConfig) else "text"
    return {
        name: tables.features,
        "hold_out": {"codes": tables.hold_out},
        "phenotypes": tables.phenotypes,
    }


def read_patient_tables(
    table: Mapping[str, Any], preset: Mapping[str, Any], where: str
) -> PatientTables:
    """Return the tables of a job on patients.

    Args:
        table: All tables of the job.
        preset: The tables of the method's preset. Its [concepts] applies if the job
            reads notes by concepts.
        where: How messages refer to the job.

    Raises:
        ConfigError: A table has an error; the message names table and key.
    """
    if table.get("silos", {}).get("by", "patient") != "patient":
        raise ConfigError(
            f"{where} [silos]: patients are always divided by patient: leave `by` out"
        )
    features = _read_features_config(table, preset, where)
    tunes_encoder = _reads_words(table.get("model"))
    if tunes_encoder and not isinstance(features, TextConfig):
        raise ConfigError(
            f'{where}: representation = "{ATTENTION}" tunes an encoder: give [text] '
            "with the encoder, instead of [concepts]"
        )
    phenotypes = _read_phenotypes(table.get("phenotypes", {}), where)
    if phenotypes and "synthetic" in table:
        raise ConfigError(
            f"{where} [phenotypes]: generated patients already have phenotypes: leave "
            "[phenotypes] out"
        )
    hold_out = build(HoldOutConfig, table.get("hold_out", {}), f"{where} [hold_out]")
    for name, site in table.get("sites", {}).items():
        if isinstance(site, Mapping):
            _require_fitting_site(
                site,
                f"{where} [sites.{name}]",
                has_phenotypes=bool(phenotypes),
                reads_text=isinstance(features, TextConfig),
            )
    return PatientTables(features, phenotypes, hold_out.codes, tunes_encoder)


def _reads_words(model: object) -> bool:
    """Return whether a job's [model] table tunes the encoder of [text]."""
    return isinstance(model, Mapping) and model.get("representation") == ATTENTION


def _read_features_config(
    table: Mapping[str, Any], preset: Mapping[str, Any], where: str
) -> ConceptsConfig | TextConfig:
    """Return the job's [concepts], or its [text].

    Raises:
        ConfigError: The job has both or neither, or a wrong value.
    """
    table = _add_concepts_of_preset(table, preset)
    if "concepts" in table and "text" in table:
        raise ConfigError(f"{where}: give either [concepts] or [text], not both")
    if "text" in table:
        return build(TextConfig, table["text"], f"{where} [text]")
    settings = dict(table.get("concepts", {}))
    if "synthetic" in table:
        settings.setdefault("dictionary", SYNTHETIC)
    elif "concepts" not in table:
        raise ConfigError(
            f"{where}: say how notes are read: [concepts] with a dictionary, or [text] "
            "with an encoder"
        )
    return build(ConceptsConfig, settings, f"{where} [concepts]")


def _add_concepts_of_preset(
    table: Mapping[str, Any], preset: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a job's tables over the preset's [concepts], if the job reads concepts."""
    reads_concepts = isinstance(table.get("concepts"), Mapping) or "synthetic" in table
    if not reads_concepts or "text" in table or "concepts" not in preset:
        return table
    return {
        **table,
        "concepts": merge_tables(preset["concepts"], table.get("concepts", {})),
    }


def _read_phenotypes(
    table: Mapping[str, Any], where: str
) -> dict[str, tuple[str, ...]]:
    """Return the codes of each phenotype in [phenotypes].

    Raises:
        ConfigError: A value is not a list of codes.
    """
    phenotypes: dict[str, tuple[str, ...]] = {}
    for name, codes in table.items():
        place = f"{where} [phenotypes] {name}"
        if not isinstance(codes, list | tuple) or not codes:
            raise ConfigError(
                f'{place} = {codes!r}: expected a list of codes such as "icd10:I10"'
            )
        names = tuple(map(str, codes))
        with naming_place(place, ConfigError):
            for code in names:
                parse_code(code)
        phenotypes[name] = names
    return phenotypes


def _require_fitting_site(
    site: Mapping[str, Any], where: str, *, has_phenotypes: bool, reads_text: bool
) -> None:
    """Check that a site's table agrees with the tables of all sites.

    Args:
        site: The table in the job.
        where: How messages refer to the table.
        has_phenotypes: Whether the job has [phenotypes].
        reads_text: Whether the job has [text].

    Raises:
        ConfigError: The tables contradict each other.
    """
    if has_phenotypes and site.get("labels"):
        raise ConfigError(
            f"{where}: labels cannot be combined with [phenotypes], which derives them "
            "from codes: leave out one of the two"
        )
    if has_phenotypes and not site.get("codes"):
        raise ConfigError(f"{where}: [phenotypes] are derived from codes: give `codes`")
    if reads_text and site.get("concepts"):
        raise ConfigError(
            f"{where}: concepts cannot be combined with [text]: give notes"
        )
