"""Define a job, the tables of its job file, and the kinds of data that sites hold.

[sites.NAME]   SiteConfig: a site's annotated documents; NotesConfig: notes without
               annotations, for the methods that read such notes
[tags]         TagsConfig: which entity types each site annotates
[synthetic]    SyntheticConfig: generated sites instead of files
[silos]        SilosConfig: sites simulated from the corpora of the sites' tables
[federation]   FederationConfig: how the server collects the sites' updates
[left_out]     LeftOutConfig: what is trained on a few sentences of a left-out site
[privacy]      Privacy: differential privacy of patients, documents or sentences

A `SiteKind` describes what the sites of a method hold (`jobs/kinds/`). A kind can
define tables of its own, and its own classes for [sites.NAME] and [synthetic].
`jobs/job_file.py` reads all of these tables.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Interval

from fednotes import methods
from fednotes.core.databases import is_address
from fednotes.core.errors import ConfigError, naming_keys_for_parameters
from fednotes.core.federation import MethodConfig
from fednotes.core.numbers import (
    Fraction,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
)
from fednotes.core.settings import (
    LocalFile,
    Mark,
    checked,
    expand_path,
    list_marked_fields,
    require_variables,
)
from fednotes.core.types import Scheme, SiteData
from fednotes.data.checks import Finding
from fednotes.data.encodings import AUTO, resolve_encoding
from fednotes.data.notes import NoteDatabase, NotePlace, require_places_of_notes
from fednotes.data.tags import FlattenRule
from fednotes.jobs.causes import Cause
from fednotes.jobs.patient_reviews import ReviewedPatients
from fednotes.methods.base import Method
from fednotes.methods.private import DPMethod
from fednotes.metrics.paired_tests import Bootstrap
from fednotes.metrics.spans import Scores
from fednotes.privacy.promise import Privacy

_MAX_JOINED = 3  # findings that one message joins
_MAX_SENTENCE_NUMBERS = 20  # in [left_out]; two models are trained on each
# A tag of a word, such as "B-Drug", which a label map must not use as a type's name.
_TAG = re.compile("O|[BIES]-.*", re.DOTALL)
_SHARE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@checked(frozen=True)
class SiteConfig:
    """Where one site's annotated documents are and how they are read.

    Attributes:
        path: A file or folder to split into training, validation and test data.
            Give either `path`, or `train` and `test`.
        train: A file or folder of training data.
        valid: A file or folder of validation data. If it is empty, `valid_fraction` of
            the training data is held out.
        test: A file or folder of test data.
        format: Format of the files (`fednotes corpus formats`); guessed from their
            content if empty.
        on_error: What happens to data that cannot be read: "refuse" refuses the whole
            corpus; "skip" leaves out each line, mention or document that cannot be
            used, and counts them.
        encoding: Encoding of files that are not UTF-8 and have no byte-order mark, such
            as "cp1252"; "auto" refuses such files.
        where: Keeps only documents whose metadata has this value, such as "genre=nw";
            empty keeps all.
        share: Part of `path` that the site gets, for sites that divide one corpus:
            "2/3" is the second of three random, disjoint parts. It is drawn with the
            job's seed, after `where` is applied, and divides no unit of `split`.
        types: Entity types to keep, under the names that `label_map` gives them; empty
            keeps all. Set it if the files annotate more types than the model is to
            learn.
        test_types: Entity types to keep in the test data, if the test data are
            annotated with more types than `types`; empty keeps those of `types`.
        label_map: New names for labels of the files, such as {Drug = "Chemical"}; ""
            drops a label.
        scheme: Scheme of the tags that the model learns.
        split: Unit that is never divided when `path` is split into parts: "patient",
            "document", "sentence" or a key of the documents' metadata. If empty: the
            patient where the corpus names patients, else the document. "sentence" puts
            sentences of one note into several parts, so scores may be too high.
        valid_fraction: Fraction of the sentences to hold out for validation.
        test_fraction: Fraction of the sentences of `path` to hold out for testing.
        fraction: Fraction of the training sentences to use. Lower it to measure how a
            result depends on the amount of data.
        mask_overlap: Fraction of the shared mention texts to mask in training; a text
            is shared if it also occurs as a mention at another site (`data/split.py`).
            Set it to make the sites' data differ more in an experiment.
        max_sentences: Maximum number of training sentences, chosen at random; 0 uses
            all.
        max_valid_sentences: Maximum number of validation sentences, chosen at random; 0
            uses all.
        max_test_sentences: Maximum number of test sentences, chosen at random; 0 uses
            all.
        flatten: What happens to overlapping and discontinuous mentions: "outermost"
            keeps the longest of overlapping mentions, and extends a discontinuous one
            over the whole stretch from its first to its last fragment; "first_fragment"
            does the same, but keeps only the first fragment of a discontinuous one;
            "drop" leaves out all of them. "keep" keeps overlapping mentions of
            different types, and treats those of one type as "outermost" does; all sites
            must set it, and only the kinds of model "type-scorer" and "prompt-bart" can
            find such mentions.
        hold_out: Fraction of the training sentences to hold out for validation if the
            other keys leave no validation data. They are taken after the split, so the
            test data stay the same.
        expected_sentences: Number of sentences in the corpus according to a
            publication. `check` and every run report how much the files differ from it;
            0 skips the comparison.
        repeats: What happens to training sentences that also occur in `valid` or
            `test`: "drop" leaves them out; "keep" keeps them, so that a published split
            stays as it is.
        public: A file or folder of public notes, whose annotation is not used. All
            sites need the same notes. Only the method "fedmd" reads them.
        model: The site's own [model] table, which replaces the job's, for methods whose
            sites may have different models ("fedmd").
        training: The site's own values for keys of [training], for the same methods.
    """

    path: LocalFile = ""
    train: LocalFile = ""
    valid: LocalFile = ""
    test: LocalFile = ""
    format: str = ""
    on_error: Literal["refuse", "skip"] = "refuse"
    encoding: str = AUTO
    where: str = ""
    share: str = ""
    types: tuple[str, ...] = ()
    test_types: tuple[str, ...] = ()
    label_map: Mapping[str, str] = field(default_factory=dict)
    scheme: Scheme = "BIO"
    split: str = ""
    valid_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2
    fraction: PositiveFraction = 1.0
    mask_overlap: Fraction = 0.0
    max_sentences: NonNegativeInt = 0
    max_valid_sentences: NonNegativeInt = 0
    max_test_sentences: NonNegativeInt = 0
    flatten: FlattenRule = "outermost"
    hold_out: FractionBelowOne = 0.0
    expected_sentences: NonNegativeInt = 0
    repeats: Literal["drop", "keep"] = "drop"
    public: LocalFile = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        resolve_encoding(self.encoding)
        if bool(self.path) == bool(self.train):
            raise ConfigError(
                "give either `path`, which is split into parts, or `train` and `test`"
            )
        if self.train and not self.test:
            raise ConfigError(
                "`train` is given without `test`: give both, or `path` to have it split"
            )
        if self.path and self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError(
                f"valid_fraction + test_fraction = {self.valid_fraction:g} + "
                f"{self.test_fraction:g} must be below 1, or no training data remain"
            )
        _require_distinct("types", self.types)
        _require_distinct("test_types", self.test_types)
        for label, new_name in self.label_map.items():
            if _TAG.fullmatch(new_name):
                raise ConfigError(
                    f"label_map maps {label!r} to {new_name!r}, which is a tag: give "
                    'the name of an entity type, without B- or I-; "" drops a label'
                )
        if self.where and not re.fullmatch(r"[^=]+=.+", self.where):
            raise ConfigError(
                f'where = {self.where!r}: expected KEY=VALUE, such as "genre=nw"'
            )
        if self.share:
            self._require_share()

    def _require_share(self) -> None:
        """Raise ConfigError unless `share` names a part of the documents of `path`."""
        part, parts = self.part_of_corpus
        if not 1 <= part <= parts:
            raise ConfigError(
                f"share = {self.share!r}: expected a part and the number of parts, "
                'such as "2/3" for the second third'
            )
        if not self.path:
            raise ConfigError(
                f"share = {self.share!r} divides the documents of `path`, which is not "
                "set: give `path`, or leave out `share`"
            )

    @property
    def keeps_overlaps(self) -> bool:
        """Return whether mentions of different types may overlap."""
        return self.flatten == "keep"

    @property
    def part_of_corpus(self) -> tuple[int, int]:
        """Return `share` as (part, parts), such as (2, 3) for "2/3"; (0, 0) if invalid.

        Parts are counted from 1.
        """
        match = _SHARE.fullmatch(self.share)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@checked(frozen=True)
class NotesConfig:
    """Where one site's notes without annotations are, and which of them are used.

    Attributes:
        path: A file or folder of notes, or the address of a database. Give either
            `path` or `paths`.
        paths: Several files or folders, read one after the other.
        format: Format of the notes, one of `data.notes.FORMATS`; guessed from the
            content if empty.
        categories: Keeps only notes of these categories, such as "Discharge summary";
            all if empty.
        column: The column of a table, or the JSON key, that holds the text; guessed if
            empty.
        encoding: Encoding of files that are not UTF-8 and have no byte-order mark, such
            as "cp1252"; "auto" refuses such files.
        valid_fraction: Fraction of the patients to hold out for validation, drawn with
            the job's seed; at least one patient if there are two or more.
        max_notes: Maximum number of training notes; 0 uses all. The notes with the
            lowest hashes of seed, patient and note are kept, so a smaller limit keeps a
            subset of the notes of a larger one. With [silos], it limits the notes that
            all simulated sites together get from this table.
        query: If `path` is the address of a database: a SELECT that returns the columns
            of a table of notes, including the notes' ids. An address is a URL without a
            password, or "env:NAME" for an environment variable that holds one.
        omop: If `path` is the address of a database: its NOTE table in the OMOP common
            data model, such as "cdm.note". If both this key and `query` are empty, the
            table is "note".
        exclude: Annotated corpora; a note that shares a sentence with one of them is
            left out (`data/overlap.py`). Name the corpora on which the pre-trained
            model will be tested.
    """

    path: LocalFile = ""
    paths: Annotated[tuple[str, ...], Mark.LOCAL_FILE] = ()
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    encoding: str = AUTO
    valid_fraction: FractionBelowOne = 0.05
    max_notes: NonNegativeInt = 0
    query: str = ""
    omop: str = ""
    exclude: Annotated[tuple[str, ...], Mark.LOCAL_FILE] = ()

    def __post_init__(self) -> None:
        resolve_encoding(self.encoding)
        if bool(self.path) == bool(self.paths) or not all(self.files):
            raise ConfigError(
                "give either `path`, a file or folder of notes, or `paths`, a list of "
                "several"
            )
        if len(set(self.files)) < len(self.files):
            raise ConfigError(
                "paths: a path is listed twice, so its notes would count twice: list "
                "each path once"
            )
        require_places_of_notes(self.files, self.query, self.omop)

    @property
    def files(self) -> tuple[str, ...]:
        """Return all paths in the order in which they are read."""
        return self.paths or (self.path,)


@checked(frozen=True)
class TagsConfig:
    """Entity types that each site annotates, if its files contain more.

    Attributes:
        design: How types are assigned to sites. "given" uses each site's `types`. The
            others sample from the complete tag set: "disjoint" gives each type to one
            site, "appendix-d" gives each site one type of its own and every other type
            to one or two sites (`data/tags.py`). Training and validation data then keep
            the site's sampled types; test data keep all.
        types: The complete tag set; if empty, the sorted union of the sites' types.
            Give it if a site could otherwise add types that nobody wants to learn.
        per_site: Number of types of each site with design = "disjoint"; 0 distributes
            all types as evenly as possible.
        min_mentions: Minimum number of mentions that every site must have of each of
            its types; types are drawn again until this holds. Without it, a site may be
            given a type that its text does not have.
        runs_per_sampling: Number of consecutive seeds that share one sampling: with 3,
            the seeds 1 to 3 are three splits of the first sampling.
    """

    design: Literal["given", "disjoint", "appendix-d"] = "given"
    types: tuple[str, ...] = ()
    per_site: NonNegativeInt = 0
    min_mentions: NonNegativeInt = 0
    runs_per_sampling: PositiveInt = 1

    def __post_init__(self) -> None:
        _require_distinct("types", self.types)
        if self.per_site and self.design != "disjoint":
            raise ConfigError(
                f'per_site = {self.per_site} needs design = "disjoint", but the design '
                f'is "{self.design}": set the design, or leave out `per_site`'
            )

    @property
    def is_sampled(self) -> bool:
        """Return whether the sites' types are drawn at random."""
        return self.design != "given"

    def find_sampling_number(self, seed: int) -> int:
        """Return the number of the sampling that a job with this seed uses.

        With `runs_per_sampling` = 3, seeds 1 to 3 use sampling 1, seeds 4 to 6 use 2.
        """
        return -(-seed // self.runs_per_sampling)


def _require_distinct(key: str, types: tuple[str, ...]) -> None:
    """Raise ConfigError if a key of types names one of them twice."""
    if len(set(types)) < len(types):
        repeated = next(label for label in types if types.count(label) > 1)
        raise ConfigError(
            f"{key} = {list(types)}: {repeated!r} is listed twice: list each type once"
        )


@checked(frozen=True)
class SyntheticConfig:
    """Generated sites instead of files (`data/synthetic.py`).

    Attributes:
        sites: Number of sites.
        sentences: Approximate number of training sentences at the first site; the
            numbers of the other sites differ.
    """

    sites: PositiveInt = 3
    sentences: Annotated[int, Ge(10)] = 400


@checked(frozen=True)
class SilosConfig:
    """Sites simulated from corpora.

    The [sites.NAME] tables then only say where the corpora are. All their documents or
    notes are pooled and dealt at random, by the job's seed, to the simulated sites
    `silo1` … `siloN`. Training, validation and test data are dealt separately.

    Attributes:
        number: Number of sites.
        by: Unit that is never divided between sites: "patient" or "document" (a note).
            A document without a patient is a unit of its own. Default: "patient" for a
            method that reads notes without annotations, "document" for other methods,
            as in Liu and Miller 2020.
    """

    number: PositiveInt = 5
    by: Literal["patient", "document"] | None = None


# Seconds between two requests to a site. Without a lower bound, a job could keep the
# server and all sites busy, even before anybody has approved it. Much longer times
# overflow in `time.sleep`.
_WaitingTime = Annotated[float, Interval(ge=0.1, le=1e7)]


@checked(frozen=True)
class FederationConfig:
    """How the server gathers the sites' answers. A simulation needs only `secure_sum`.

    Attributes:
        min_sites: Minimum number of sites that must answer a request; 0 means all
            sites. With fewer, the server waits. Lower it if the run may continue
            without some sites.
        timeout: Seconds after which the server continues without the missing sites, if
            at least `min_sites` have answered. Raise it if a round takes longer at the
            slowest site.
        grace: Seconds to wait for further sites once `min_sites` have answered; 0 waits
            until the timeout.
        pause: Seconds before the server repeats a request that a site could not answer.
        knock_every: Seconds between two attempts to reach an absent site. Lower it if
            sites are often absent for a short time.
        checkpoint_seconds: Maximum seconds between two checkpoints. Lower it if a
            restart should repeat less work; raise it if checkpoints are large.
        max_norm: Maximum L2 norm of an update over all of its floating-point tensors;
            larger updates are left out. 0 disables the limit. Set it to limit the
            influence of a single site.
        secure_sum: Whether the server sees only sums of updates (`docs/privacy.md`). It
            needs at least three sites.
    """

    min_sites: NonNegativeInt = 0
    timeout: _WaitingTime = 600.0
    grace: NonNegativeFloat = 0.0
    pause: _WaitingTime = 5.0
    knock_every: NonNegativeFloat = 30.0
    checkpoint_seconds: NonNegativeFloat = 600.0
    max_norm: NonNegativeFloat = 0.0
    secure_sum: bool = False


@checked(frozen=True)
class LeftOutConfig:
    """What is trained on a few sentences of a left-out site (condition "left-out").

    Attributes:
        sentences: How many of the site's training sentences to use. For each of these
            numbers, the federated model of the other sites is fine-tuned on that many
            sentences, and a new model is trained on them from scratch. Sentences are
            chosen at random, and a larger number contains
            those of a smaller one. At most 20 numbers; `[]` trains neither.
        steps: Number of mini-batches in each of these training runs. It is fixed,
            because with so few sentences none can be held out to decide when to stop.
        batch_size: Number of sentences in a mini-batch.
        learning_rate: Learning rate of Adam; 0 uses the learning rate of [training].
    """

    sentences: tuple[PositiveInt, ...] = (10, 50, 200)
    steps: PositiveInt = 300
    batch_size: PositiveInt = 8
    learning_rate: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        """Refuse more training runs than the table of a report can show."""
        if len(self.sentences) > _MAX_SENTENCE_NUMBERS:
            raise ConfigError(
                f"sentences has {len(self.sentences):,} numbers: give at most "
                f"{_MAX_SENTENCE_NUMBERS}"
            )


class CountTable(NamedTuple):
    """Hold a table of counts that is ready to show.

    Attributes:
        heads: Column headings.
        rows: Rows, with a text for each column.
        words: Number of leading columns with words; the others hold numbers.
        title: Title of the table; may be empty.
    """

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int = 1
    title: str = ""


@dataclass(frozen=True)
class ConfigTable:
    """Describe a table of a job file that is read into a class.

    Attributes:
        heading: Heading in the key reference, such as "[concepts] for patients".
        config: The class whose fields are the keys of the table.
        elsewhere: Defaults that differ from those of the class, by the case in which
            they apply.
    """

    heading: str
    config: type[Any]
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ListsTable:
    """Describe a table of a job file whose keys are free names with lists of texts.

    Attributes:
        heading: Heading in the key reference.
        about: Purpose of the table.
        meaning: Meaning of the texts of a key.
    """

    heading: str
    about: str
    meaning: str


@dataclass(frozen=True)
class Side:
    """One side of a comparison of two runs.

    Attributes:
        run: Folder of the run.
        job: The job of the run.
        sites: Data of the job's sites.
        condition: Condition whose models are compared, such as "federated".
    """

    run: Path
    job: Job
    sites: tuple[Any, ...]
    condition: str


@dataclass(frozen=True)
class ComparedSites:
    """The tests and scores of a comparison of two runs, by site.

    Attributes:
        tests: The paired test.
        scores: Precision, recall and F1 of both sides; empty for a metric that has
            none of these.
        one_to_one: F1 of both sides where overlapping mentions are paired one to one.
    """

    tests: dict[str, Bootstrap] = field(default_factory=dict)
    scores: dict[str, tuple[Scores, Scores]] = field(default_factory=dict)
    one_to_one: dict[str, tuple[float, float]] = field(default_factory=dict)


# Is called with the number of items that are done, and of all items.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class KindTables:
    """Hold what a kind of data reads from its own tables of a job file.

    Attributes:
        tags: The [tags] table of a job on annotated documents, or None.
        values: What another kind of data reads from its tables.
    """

    tags: TagsConfig | None = None
    values: Any = None


def _read_no_tables(
    _tables: Mapping[str, Any], _preset: Mapping[str, Any], _where: str
) -> KindTables:
    """Return no tables: the default of `SiteKind.read_tables`."""
    return KindTables()


def _collect_no_tables(_job: Job) -> Mapping[str, Any]:
    """Return no tables: the default of `SiteKind.collect_tables`."""
    return {}


def _count_one_example(_site: Any) -> int:
    """Return 1: the default of `SiteKind.count_examples`."""
    return 1


def _rename_site(site: Any, name: str, _examples: int) -> Any:
    """Return a copy of a site with another name."""
    return replace(site, id=name)


def _find_no_score_causes(
    _job: Job, _scores: Mapping[str, Any], _facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield nothing: the default of `SiteKind.find_score_causes`."""
    return iter(())


def _find_no_data_causes(_job: Job, _facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield nothing: the default of `SiteKind.find_data_causes`."""
    return iter(())


def _check_nothing(_job: Job, _sites: Sites) -> tuple[Finding, ...]:
    """Return no findings: the default of `SiteKind.check`."""
    return ()


def _encode_no_examples(_site: Any) -> Mapping[str, Iterator[bytes]]:
    """Return no views: the default of `SiteKind.encode_examples`."""
    return {}


def _iterate_no_notes(_site: Any) -> Iterator[str]:
    """Yield nothing: the default of `SiteKind.iterate_notes`."""
    return iter(())


def _describe_nothing(_job: Job, _site: Any) -> Mapping[str, Any]:
    """Return no facts: the default of `SiteKind.describe` and `count_training`."""
    return {}


@dataclass(frozen=True)
class FoundLabels:
    """Labels that lie beside notes without annotations, and how a job learns them.

    Attributes:
        method: The method that learns them.
        notes_key: Key of [sites.NAME] for the notes.
        labels_key: Key of [sites.NAME] for the labels.
        path: The file of the labels.
        counts: Number of labelled patients by label, sorted by label.
        patients: Number of labelled patients.
        tables: Further tables of the job, by name.
        encoder_key: Table and key of the encoder.
    """

    method: str
    notes_key: str
    labels_key: str
    path: Path
    counts: Mapping[str, int]
    patients: int
    tables: Mapping[str, Mapping[str, Any]]
    encoder_key: tuple[str, str]


def _find_no_labels(_folder: Path) -> FoundLabels | None:
    """Return None: the default of `SiteKind.find_labels`."""
    return None


@dataclass(frozen=True, kw_only=True)
class SiteKind:
    """Define a kind of data that sites hold, and how a job handles it.

    Attributes:
        name: Name of the kind; a method names its kind in `holds`.
        site_config: Class of [sites.NAME].
        synthetic_config: Class of [synthetic].
        load: Reads the sites of a job. Takes the job, a progress callback and the
            folder of the cache.
        fingerprint: Returns a digest of a site's data; equal data have equal digests.
        tabulate_counts: Returns tables of counts about the sites, for `check`.
        source_keys: Keys of [sites.NAME] that locate a site's notes; a site needs one
            of them.
        source_placeholder: Values of [sites.NAME] that stand for the location of the
            notes in a process that does not read them.
        tables: Tables of a job file that only jobs on this kind of data have.
        model_keys: Keys of [model] on which it depends how a site's notes are read.
        read_tables: Reads these tables. Takes all tables of the job, the tables of the
            method's preset, and the job's name in messages.
        collect_tables: Returns the values of these tables by table name: instances of
            the tables' classes, or mappings of keys.
        count_examples: Returns the number of a site's training examples, as far as its
            data show it.
        example_name: Name of training examples, such as "sentences".
        make_stand_in: Copies a site under another name, to represent a site whose data
            are elsewhere. Takes the site, the name and the number of training examples;
            the copy keeps the site's own number where no example can occur twice.
        count_training: Returns counts of a site's data as JSON values, which a run
            records and a diagnosis reads. Takes the job and the site.
        find_score_causes: Yields causes of low scores of a run. Takes the job, the
            scores of each site by condition, and the counts of each site's data.
        find_data_causes: Yields causes of poor results that the counts show, also
            before training. Takes the job and the counts of each site's data.
        check: Returns what the user should know before training. Takes the job and its
            sites.
        iterate_notes: Yields the texts of a site's training and validation notes, to
            find notes that several sites have; nothing if the data hold no texts.
        encode_examples: Returns the training examples of a site as bytes, by the name
            of a view. Views range from the text alone to everything known about an
            example. They are compared with the examples of earlier jobs.
        describe: Returns the public facts on which sites agree before round 1 of a
            distributed run. Takes the job, reduced to this site, and the site.
        make_stub: Makes a site without examples from its name and the description with
            these facts. None if a tag set and an encoder describe sites of this kind.
        make_audit_subject: Makes the subject on which an audit trains shadow models,
            and the job of these models. Takes the audit's scene, the audited site, a
            random generator, the largest number of units to judge, and the criterion of
            the control. None if the audit reads sites of this kind itself.
        compare: Compares two sides of runs. Takes both sides, a metric and the number
            of bootstrap samples. None if runs of this kind cannot be compared.
        metrics: Display names of the metrics for comparisons, by metric name.
        shrink: Returns a site with a sample of its examples. Takes the site and the
            number of training examples. None if there is no such sample.
        invent_site: Makes an artificial site from a name and its table when the files
            cannot be read; None if this is not possible.
        find_labels: Returns the labels that lie in a folder of notes, for the proposal
            of a first job; None if there are none.
        review: Returns the labelled test patients of each site with the predictions of
            its model, for the local web UI. None if sites hold no patients.
    """

    name: str
    site_config: type[Any]
    synthetic_config: type[Any]
    load: Callable[[Job, Progress | None, Path | None], Sites]
    fingerprint: Callable[[Any], str]
    tabulate_counts: Callable[[Sequence[Any]], list[CountTable]]
    source_keys: tuple[str, ...]
    source_placeholder: Mapping[str, str]
    tables: Mapping[str, ConfigTable | ListsTable] = field(default_factory=dict)
    model_keys: tuple[str, ...] = ()
    read_tables: Callable[[Mapping[str, Any], Mapping[str, Any], str], KindTables] = (
        _read_no_tables
    )
    collect_tables: Callable[[Job], Mapping[str, Any]] = _collect_no_tables
    count_examples: Callable[[Any], int] = _count_one_example
    example_name: str = "sentences"
    make_stand_in: Callable[[Any, str, int], Any] = _rename_site
    count_training: Callable[[Job, Any], Mapping[str, Any]] = _describe_nothing
    find_score_causes: Callable[
        [Job, Mapping[str, Any], Mapping[str, Any]], Iterator[Cause]
    ] = _find_no_score_causes
    find_data_causes: Callable[[Job, Mapping[str, Any]], Iterator[Cause]] = (
        _find_no_data_causes
    )
    check: Callable[[Job, Sites], tuple[Finding, ...]] = _check_nothing
    iterate_notes: Callable[[Any], Iterator[str]] = _iterate_no_notes
    encode_examples: Callable[[Any], Mapping[str, Iterator[bytes]]] = (
        _encode_no_examples
    )
    describe: Callable[[Job, Any], Mapping[str, Any]] = _describe_nothing
    make_stub: Callable[[str, Any], Any] | None = None
    make_audit_subject: Callable[[Any, Any, Any, int, str], tuple[Any, Job]] | None = (
        None
    )
    compare: Callable[[Side, Side, str, int], ComparedSites] | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    shrink: Callable[[Any, int], Any] | None = None
    invent_site: Callable[[str, Any], Any] | None = None
    find_labels: Callable[[Path], FoundLabels | None] = _find_no_labels
    review: Callable[[Side], Sequence[ReviewedPatients]] | None = None

    def list_paths(
        self, sites: Mapping[str, Any], tables: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield the paths that a job names outside [model], as written.

        Args:
            sites: The keys of [sites.NAME] by the sites' names.
            tables: The keys of the tables of this kind by the tables' names.

        Yields:
            The key, such as "sites.mercy.path", and the path.
        """
        for name, keys in sites.items():
            yield from _list_marked_paths(self.site_config, keys, f"sites.{name}")
        for name, table in self.tables.items():
            if isinstance(table, ConfigTable) and name in tables:
                yield from _list_marked_paths(table.config, tables[name], name)


def _list_marked_paths(
    cls: type[Any], keys: Mapping[str, Any], table: str
) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for each path of a table, with keys like "sites.mercy.path".

    Args:
        cls: The class that reads the table and marks its paths.
        keys: The keys of the table.
        table: Name of the table.
    """
    for key in sorted(list_marked_fields(cls, Mark.LOCAL_FILE) & keys.keys()):
        value = keys[key]
        texts = value if isinstance(value, list | tuple) else [value]
        for text in texts:
            # a value of another type is refused when the table is read
            if isinstance(text, str):
                yield f"{table}.{key}", text


@dataclass(frozen=True)
class Job:
    """Hold the validated content of a job file.

    Attributes:
        name: Name of the job: its file name without the suffix.
        title: Title in reports.
        method: Name of the method.
        seed: Seed of all random numbers.
        conditions: Conditions to train, in their fixed order.
        threads: Number of CPU threads. Results may differ in their last bits between
            numbers of threads.
        config: The method's config.
        kind: Kind of data that the sites hold.
        sites: [sites.NAME] tables by site name, as instances of `kind.site_config`;
            empty if the job has generated sites.
        synthetic: The [synthetic] table as an instance of `kind.synthetic_config`, or
            None.
        table: Raw tables after `--set`; they go into the run's record.
        folder: Folder against which relative paths are resolved.
        silos: The [silos] table, or None.
        federation: The [federation] table.
        left_out: The [left_out] table.
        tags: The [tags] table of a job on annotated documents, or None.
        privacy: The [privacy] table, or None.
        kind_tables: What another kind of data reads from its own tables.
    """

    name: str
    title: str
    method: str
    seed: int
    conditions: tuple[str, ...]
    threads: int
    config: MethodConfig
    kind: SiteKind
    sites: Mapping[str, Any]
    synthetic: Any
    table: Mapping[str, Any]
    folder: Path
    silos: SilosConfig | None = None
    federation: FederationConfig = field(default_factory=FederationConfig)
    left_out: LeftOutConfig = field(default_factory=LeftOutConfig)
    tags: TagsConfig | None = None
    privacy: Privacy | None = None
    kind_tables: Any = None

    @property
    def module(self) -> Method:
        """Return the method, with differential privacy if the job has [privacy]."""
        method = methods.find_method(self.method)
        return method if self.privacy is None else DPMethod(method)

    @property
    def data(self) -> str:
        """Return the name of the kind of data, such as "documents" or "notes"."""
        return self.kind.name

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the job's tables, as a hexadecimal string.

        Two runs with the same fingerprint are runs of the same job.
        """
        text = json.dumps(self.table, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def locate(self, text: str, where: str) -> Path:
        """Return a path of the job, resolved against the folder of the job file.

        Args:
            text: The path as the job gives it; `$NAME` is an environment variable.
            where: Name of the key in error messages.

        Raises:
            ConfigError: An environment variable is not set.
        """
        expanded = expand_path(text, where)
        if is_address(expanded):
            raise ConfigError(
                f"{where} is the address of a database, where a file or folder is "
                "needed: only notes without annotations are read from a database, by "
                "its URL or env:NAME"
            )
        path = Path(expanded)
        return path if path.is_absolute() else self.folder / path

    def locate_notes(
        self, text: str, where: str, query: str = "", omop: str = ""
    ) -> NotePlace:
        """Return a path of notes of the job, or a database; see `locate`.

        Args:
            text: The path, or the address of a database, as the job gives it.
            where: Name of the key in error messages.
            query: As in `NoteDatabase`.
            omop: As in `NoteDatabase`.

        Raises:
            ConfigError: An environment variable is not set, or the address is
                impossible.
        """
        if is_address(text):
            return NoteDatabase(text, query, omop).resolve_from(self.folder)
        return self.locate(text, where)


@dataclass(frozen=True)
class Sites:
    """Hold the data of a job's sites, in the order of the job file.

    A job with [silos] has its simulated sites here.

    Attributes:
        data: Each site's data, of the method's kind.
        complete: The same texts with every entity type annotated at every site. Known
            only for generated sites and sampled tag sets; None otherwise.
        remarks: What was changed while reading, as counts.
        findings: What the checks found in the files before they were split and reduced.
    """

    data: tuple[Any, ...]
    complete: tuple[SiteData, ...] | None = None
    remarks: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return messages about data problems and skipped items, to be shown first.

        One message names the rare types of all sites.
        """
        texts: list[str] = []
        rare = [each for each in self.findings if each.code == "rare_types"]
        for finding in self.findings:
            if finding.level == "info":
                continue
            if finding.code != "rare_types" or len(rare) == 1:
                texts.append(f"{finding.where}: {finding.message}")
            elif finding is rare[0]:
                texts.append(_join_findings(rare))
        return tuple(texts)

    @property
    def messages(self) -> tuple[str, ...]:
        """Return a run's remarks about its data: `warnings`, then `remarks`."""
        return (*(f"warning: {text}" for text in self.warnings), *self.remarks)


def _join_findings(findings: Sequence[Finding]) -> str:
    """Return one message for findings that differ only behind a colon.

    An example is "types with fewer than 20 mentions: Dose 3 (north); Time 9 (south)".
    """
    what = findings[0].message.partition(": ")[0]
    clauses = [
        f"{each.message.partition(': ')[2]} ({each.where})"
        for each in findings[:_MAX_JOINED]
    ]
    unshown = len(findings) - _MAX_JOINED
    if unshown > 0:
        clauses.append(f"and {unshown} more")
    return f"{what}: {'; '.join(clauses)}"


def count_data(job: Job, sites: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the counts of each site's data, which a run records and a diagnosis reads.

    Args:
        job: The job.
        sites: The data of its sites.

    Returns:
        Site → name of a count → JSON value; "examples" is the number of training
        examples.
    """
    kind = job.kind
    return {
        site.id: {
            "examples": kind.count_examples(site),
            **kind.count_training(job, site),
        }
        for site in sites
    }


def load_sites(
    job: Job, progress: Progress | None = None, cache: Path | None = None
) -> Sites:
    """Read the data of every site of a job.

    Args:
        job: The job.
        progress: Called with (patients read, patients in all) while notes are read.
        cache: Folder in which values computed from the notes are cached.

    Raises:
        DataError: A file is invalid.
        ConfigError: A setting does not match the data, or environment variables that
            the job names are not set.
    """
    sites = {name: vars(site) for name, site in job.sites.items()}
    tables = {
        name: values if isinstance(values, Mapping) else vars(values)
        for name, values in job.kind.collect_tables(job).items()
    }
    require_variables(job.kind.list_paths(sites, tables))
    with naming_keys_for_parameters():
        return job.kind.load(job, progress, cache)
