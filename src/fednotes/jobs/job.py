"""A job, what its tables say of whose notes are read, and what a method's sites hold.

[sites.NAME]   SiteConfig; for a method that reads notes without annotations, NotesConfig
[tags]         TagsConfig: which types each site annotates
[synthetic]    SyntheticConfig: generated sites in place of files
[silos]        SilosConfig: hospitals simulated from what the sites' tables name
[federation]   FederationConfig: how the sites' answers are gathered
[privacy]      Privacy: what is promised of single patients, documents or sentences

What the sites of a method hold is a `SiteKind` (`jobs/kinds/`). A kind may have tables
of its own, and its own classes for [sites.NAME] and [synthetic]. `jobs/job_file.py`
reads them all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval

from fednotes import methods
from fednotes.core.errors import ConfigError
from fednotes.core.federation import MethodConfig
from fednotes.core.settings import checked, expand
from fednotes.core.types import Scheme, SiteData
from fednotes.data.checks import Finding
from fednotes.data.encodings import AUTO, encoding_of
from fednotes.jobs.comparing import Compared, Side
from fednotes.methods.base import Method
from fednotes.methods.private import PrivateMethod
from fednotes.privacy.promise import Privacy

Fraction = Annotated[float, Interval(ge=0, le=1)]
Share = Annotated[float, Interval(ge=0, lt=1)]
Labelled = Annotated[float, Interval(gt=0, le=1)]
Seconds = Annotated[float, Ge(0)]
Number = Annotated[int, Ge(0)]  # where 0 is all


@checked(frozen=True)
class SiteConfig:
    """Where one site's annotated documents are and how they are read.

    Attributes:
        path: A file or folder that is split here into training, validation and test
            data. Relative paths are relative to the job file; `$NAME` stands for an
            environment variable. Give either `path`, or `train` and `test`.
        train: A file or folder of training data.
        valid: A file or folder of validation data. If it is empty, `valid_fraction` of
            the training data is held out.
        test: A file or folder of test data.
        format: Format of the files (`fednotes corpus formats`); guessed from their
            content if empty.
        on_error: What happens to data that cannot be read: "refuse" refuses the whole
            corpus; "skip" leaves out each line, mention or document that cannot be
            used, and counts them.
        encoding: Encoding of the files that have no byte-order mark and are not UTF-8,
            such as "cp1252"; "auto" refuses such files.
        where: Keeps only the documents whose metadata has a value, such as "genre=nw".
        share: Part of `path` that the site gets, for sites that divide one corpus:
            "2/3" is the second of three random, disjoint parts. It is drawn after
            `where`, by `split` and the job's seed.
        types: Entity types that are kept, after `label_map`; all if empty.
        test_types: Entity types that are kept in the test data, if these are annotated
            more completely.
        label_map: New names for labels of the files, such as {Drug = "Chemical"}; ""
            drops a label.
        scheme: Tagging scheme in which the model learns.
        split: What is never divided when `path` is split: "patient", "document",
            "sentence" or a key of the documents' metadata. If empty: the patient where
            the corpus names patients, else the document. "sentence" puts sentences of
            one note into several parts.
        valid_fraction: Fraction of the sentences that is held out for validation.
        test_fraction: Fraction of the sentences of `path` that is held out for testing.
        fraction: Fraction of the training sentences that is used.
        mask_overlap: Fraction of the surface forms annotated at another site too that
            is masked in training (`data/split.py`).
        max_sentences: Largest number of training sentences, chosen at random; 0 uses
            all.
        max_valid_sentences: Largest number of validation sentences, chosen at random; 0
            uses all.
        max_test_sentences: Largest number of test sentences, chosen at random; 0 uses
            all.
        flatten: What happens to overlapping and discontinuous mentions: the outermost
            or the first fragment is kept, or they are dropped.
        hold_out: Fraction of the training sentences that becomes validation data where
            the other keys leave none. It is taken after the split, so the test data
            stay the same.
        expected_sentences: Number of sentences that a publication counts in the corpus.
            `check` and every run say by how much the files differ from it; 0 compares
            nothing.
        repeats: What happens to training sentences that also occur in `valid` or
            `test`: "drop" leaves them out; "keep" keeps a published division as it is.
    """

    path: str = ""
    train: str = ""
    valid: str = ""
    test: str = ""
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
    fraction: Labelled = 1.0
    mask_overlap: Fraction = 0.0
    max_sentences: Number = 0
    max_valid_sentences: Number = 0
    max_test_sentences: Number = 0
    flatten: Literal["outermost", "first_fragment", "drop"] = "outermost"
    hold_out: Share = 0.0
    expected_sentences: Number = 0
    repeats: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        encoding_of(self.encoding)
        if bool(self.path) == bool(self.train):
            raise ConfigError("give either `path` (split here) or `train` and `test`")
        if self.train and not self.test:
            raise ConfigError("`train` is given without `test`")
        if self.path and self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError(
                "valid_fraction + test_fraction: below 1, or nothing is left to train"
            )
        _check_distinct("types", self.types)
        _check_distinct("test_types", self.test_types)
        for label, name in self.label_map.items():
            if re.fullmatch("O|[BIES]-.*", name, re.DOTALL):
                raise ConfigError(
                    f"label_map maps {label!r} to {name!r}, which is a tag: give the name of an "
                    'entity type, without B- or I-; "" drops a label'
                )
        if self.where and not re.fullmatch(r"[^=]+=.+", self.where):
            raise ConfigError(
                f'where = {self.where!r}: expected KEY=VALUE, such as "genre=nw"'
            )
        number, of = self.shares
        if self.share and not (self.path and 1 <= number <= of):
            raise ConfigError(
                f'share = {self.share!r}: expected such as "2/3", the second third of `path`'
            )

    @property
    def shares(self) -> tuple[int, int]:
        """`share` as numbers: which one, counted from 1, of how many; zeros if it is
        none."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", self.share)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@checked(frozen=True)
class NotesConfig:
    """Where one site's notes without annotations are, and which of them are used.

    Attributes:
        path: A file or folder of notes. Relative paths are relative to the job file;
            `$NAME` stands for an environment variable. Give either `path` or `paths`.
        paths: Several files or folders, read one after the other.
        format: One of `data.notes.FORMATS`; guessed from the content if empty.
        categories: Keeps only notes of these categories, such as "Discharge summary";
            all if empty.
        column: The column of a table, or the JSON key, that holds the text; guessed if
            empty.
        encoding: Encoding of the files that have no byte-order mark and are not UTF-8,
            such as "cp1252"; "auto" refuses such files.
        valid_fraction: Fraction of the patients that is held out for validation, drawn
            by the job's seed; at least one patient where there are two.
        max_notes: Largest number of training notes; 0 uses all. Those with the lowest
            hash of seed, patient and note are kept, so the notes of a smaller number
            are among those of a larger one. With [silos] it limits what all silos get
            from this table.
        exclude: Annotated corpora: a note that shares a sentence with one of them is
            left out (`data/overlap.py`).
    """

    path: str = ""
    paths: tuple[str, ...] = ()
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    encoding: str = AUTO
    valid_fraction: Share = 0.05
    max_notes: Number = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        encoding_of(self.encoding)
        if bool(self.path) == bool(self.paths) or not all(self.files):
            raise ConfigError(
                "give either `path`, a file or folder of notes, or `paths`, several"
            )
        if len(set(self.files)) < len(self.files):
            raise ConfigError("paths: one is named twice, its notes would count twice")

    @property
    def files(self) -> tuple[str, ...]:
        """Every path, in order."""
        return self.paths or (self.path,)


@checked(frozen=True)
class TagsConfig:
    """Which types each site annotates, where its files are annotated with more.

    Attributes:
        design: How types are given to sites: "given" by each site's `types`; or sampled
            from the complete tag set: "disjoint" gives each type to one site,
            "appendix-d" gives each site one type of its own and every other type to one
            or two sites (`data/tags.py`). Training and validation data then keep the
            site's sampled types; test data keep all.
        types: The complete tag set; if empty, the union of the sites' types, sorted.
        per_site: Number of types of each site in "disjoint"; 0 deals out all, as evenly
            as possible.
        min_mentions: Draw again until the data of every site mention each of its types
            this often, because a site cannot teach a type that its text does not have.
        runs_per_sampling: Number of consecutive seeds that share one sampling: with 3,
            seeds 1 to 3 are three splits of the first sampling.
    """

    design: Literal["given", "disjoint", "appendix-d"] = "given"
    types: tuple[str, ...] = ()
    per_site: Number = 0
    min_mentions: Number = 0
    runs_per_sampling: Annotated[int, Ge(1)] = 1

    def __post_init__(self) -> None:
        _check_distinct("types", self.types)
        if self.per_site and self.design != "disjoint":
            raise ConfigError(
                f'per_site = {self.per_site}: a number for design = "disjoint", 0 is an even deal'
            )

    @property
    def sampled(self) -> bool:
        """Whether the sites' types are drawn at random."""
        return self.design != "given"

    def sampling(self, seed: int) -> int:
        """The number of the sampling that a job with this seed belongs to."""
        return -(-seed // self.runs_per_sampling)  # rounded up


def _check_distinct(name: str, types: tuple[str, ...]) -> None:
    if len(set(types)) < len(types):
        raise ConfigError(f"{name} = {list(types)}: a type is named twice")


@checked(frozen=True)
class SyntheticConfig:
    """Generated sites in place of files (`data/synthetic.py`).

    Attributes:
        sites: Number of sites.
        sentences: Approximate number of training sentences of the first site; other
            sites differ.
    """

    sites: Annotated[int, Ge(1)] = 3
    sentences: Annotated[int, Ge(10)] = 400


@checked(frozen=True)
class SilosConfig:
    """Sites simulated from corpora.

    The tables of the sites then only say where the corpora are. All their documents or
    notes (of train, valid and test, each part by itself) are pooled and dealt to
    `silo1` … `siloN` at random by the job's seed.

    Attributes:
        number: Number of sites.
        by: What is never divided between sites: "patient" or "document" (a note). A
            document without a patient counts by itself. If it is not given: "patient"
            for a method that reads notes without annotations, "document" for other
            methods, as in Liu and Miller 2020.
    """

    number: Annotated[int, Ge(1)] = 5
    by: Literal["patient", "document"] | None = None


@checked(frozen=True)
class FederationConfig:
    """How the server gathers the sites' answers. A simulation needs only `secure_sum`.

    Attributes:
        min_sites: Smallest number of sites that must answer a request; with fewer, the
            request waits. 0 means all sites.
        timeout: Seconds after which a request continues with the sites that have
            answered, if they are enough.
        grace: Seconds that the other sites get once enough have answered; 0 waits until
            the timeout.
        pause: Seconds between two attempts of something that a site could not do.
        knock_every: Seconds between two questions to an absent site whether it is back.
        checkpoint_seconds: Longest time between two checkpoints, in seconds.
        max_norm: Updates whose floating-point tensors together have a larger L2 norm
            are left out; 0 disables the limit.
        secure_sum: Whether the server sees only sums (`docs/privacy.md`). It needs
            three sites.
    """

    min_sites: Number = 0
    timeout: Annotated[float, Gt(0)] = 600.0
    grace: Seconds = 0.0
    pause: Seconds = 5.0
    knock_every: Seconds = 30.0
    checkpoint_seconds: Seconds = 600.0
    max_norm: Annotated[float, Ge(0)] = 0.0
    secure_sum: bool = False


class CountTable(NamedTuple):
    """A table of numbers. words: so many of its first columns hold words."""

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int = 1
    title: str = ""


@dataclass(frozen=True)
class ConfigTable:
    """A table of a job file that a class reads.

    Attributes:
        heading: Its heading in the reference of keys, such as "[concepts] of patients".
        config: The class.
        elsewhere: Other defaults of its keys, by the circumstance in which a job gets
            them.
    """

    heading: str
    config: type[Any]
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ListsTable:
    """A table of a job file whose keys are free names, each with a list of texts.

    Attributes:
        heading: Its heading in the reference of keys.
        about: What the table is for.
        meaning: What the texts of a key are.
    """

    heading: str
    about: str
    meaning: str


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SiteKind:
    """What the sites of a method hold, and all that a job does with it.

    Attributes:
        name: Name of the kind, which is the `holds` of a method.
        sites: Class of [sites.NAME].
        synthetic: Class of [synthetic].
        load: Reads the sites of a job. Gets the job, a listener to progress and a
            cache.
        fingerprint: Digest of a site's data: two runs on the same data agree in it.
        counts: Tables of numbers about sites, for `check`.
        needed: Keys of [sites.NAME], one of which a site needs to find its notes.
        somewhere: A table [sites.NAME] for those who do not read the notes themselves.
        tables: Tables of a job file that only jobs on this kind have.
        more: Makes fields of `Job` from these tables. Gets all tables of the job, those
            of the method's preset, and the job as messages call it.
        shown: Values of these tables by name: instances of the tables' classes, or
            mappings of keys.
        size: Number of a site's training examples, as far as its data tell.
        unit: What these examples are, in short.
        stand_in: Copy of a site under another name, in place of a site that is not
            here, with so many training examples, or as many as it has where none can
            occur twice.
        hints: What a run says of its scores. Gets the scores and the sites.
        findings: What to know before training. Gets the job and its sites.
        training_examples: Training examples of a site as bytes, by the name of a view:
            from the text alone to all that is known of it. They are compared with those
            of earlier jobs.
        describe: Public facts of a site by which sites agree before round 1 of a real
            run. Gets the job, with this site alone, and the site.
        stub: Makes a site without examples by its name and the description that has
            these facts; None if sites of this kind are described by their tag sets and
            encoder.
        audit_subject: Makes what an audit trains shadow models on
            (`apps/audit/shadow/subject.py`), with the job of these models. Gets the
            audit's scene, the audited site, a generator, the most units to judge, and
            what the control judges by. None if the audit reads sites of this kind
            itself.
        compare: Compares two sides of runs by a metric and a number of bootstrap
            samples; None if runs of this kind find nothing that can be compared.
        metrics: What the metrics are called by which runs are compared, by their names.
        one_sentence: Reduces a site to one that is made in no time; None if there is no
            such site.
        invented: Makes a site by its name and table where its files cannot be read;
            None if this is not possible.
    """

    name: str
    sites: type[Any]
    synthetic: type[Any]
    load: Callable[[Job, Progress | None, Path | None], Sites]
    fingerprint: Callable[[Any], str]
    counts: Callable[[Sequence[Any]], list[CountTable]]
    needed: tuple[str, ...]
    somewhere: Mapping[str, str]
    tables: Mapping[str, ConfigTable | ListsTable] = field(default_factory=dict)
    more: Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]] = (
        lambda table, preset, where: {}
    )
    shown: Callable[[Job], Mapping[str, Any]] = lambda job: {}
    size: Callable[[Any], int] = lambda site: 1
    unit: str = "sent"
    stand_in: Callable[[Any, str, int], Any] = lambda site, name, size: replace(
        site, id=name
    )
    hints: Callable[[Mapping[str, Any], Sequence[Any]], Iterator[str]] = (
        lambda scores, sites: iter(())
    )
    findings: Callable[[Job, Sites], tuple[Finding, ...]] = lambda job, sites: ()
    training_examples: Callable[[Any], Mapping[str, Iterator[bytes]]] = lambda site: {}
    describe: Callable[[Job, Any], Mapping[str, Any]] = lambda job, site: {}
    stub: Callable[[str, Any], Any] | None = None
    audit_subject: Callable[[Any, Any, Any, int, str], tuple[Any, Job]] | None = None
    compare: Callable[[Side, Side, str, int], Compared] | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    one_sentence: Callable[[Any], Any] | None = None
    invented: Callable[[str, Any], Any] | None = None


@dataclass(frozen=True)
class Job:
    """A job file, read and checked.

    kind: what its sites hold. config: the method's `Config`. sites: a table of the kind
    each; synthetic likewise. table: the raw tables after `--set`, for the record.
    folder: what relative paths are relative to. tags: of annotated documents.
    kind_tables: what another kind made of its own tables.
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
    tags: TagsConfig | None = None
    privacy: Privacy | None = None
    kind_tables: Any = None

    @property
    def module(self) -> Method:
        """What the method does, with differential privacy if the job asks for it."""
        method = methods.find(self.method)
        return method if self.privacy is None else PrivateMethod(method)

    @property
    def data(self) -> str:
        """What the method's sites hold, such as "documents" or "notes" (without
        annotations)."""
        return self.kind.name

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the declarative job; two runs with one fingerprint are one run."""
        text = json.dumps(self.table, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def located(self, text: str, where: str) -> Path:
        """A path of the job, relative to its file. Raises ConfigError for a variable
        that is not set."""
        path = Path(expand(text, where))
        return path if path.is_absolute() else self.folder / path


@dataclass(frozen=True)
class Sites:
    """The sites of a job in its order, or the silos that it deals them into.

    data: what each holds, of the method's kind. complete: the same texts with every
    type annotated everywhere, where that is known: for generated sites and sampled tag
    sets.
    notes: what was changed on the way, as counts. findings: what to know of the files
    before they were split and reduced.
    """

    data: tuple[Any, ...]
    complete: tuple[SiteData, ...] | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the data, and what was skipped: to be known before
        training."""
        return tuple(
            f"{f.where}: {f.message}" for f in self.findings if f.level != "info"
        )

    @property
    def told(self) -> tuple[str, ...]:
        """What a run says of its data: `warnings`, and what was changed on the way."""
        return (*(f"warning: {text}" for text in self.warnings), *self.notes)


def load_sites(
    job: Job, progress: Progress | None = None, cache: Path | None = None
) -> Sites:
    """Read every site of a job. progress: told of (patients done, all) while notes are
    read; cache: of what is made of them.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it.
    """
    return job.kind.load(job, progress, cache)
