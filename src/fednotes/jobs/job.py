"""A job, what its tables say of whose notes are read, and what a method's sites hold.

[sites.NAME]   SiteConfig; for a method that reads notes without annotations, NotesConfig
[tags]         TagsConfig: which types each site annotates
[synthetic]    SyntheticConfig: generated sites in place of files
[silos]        SilosConfig: hospitals simulated from what the sites' tables name
[federation]   FederationConfig: how the sites' answers are gathered

`jobs/job_file.py` reads them, `jobs/patient_tables.py` has those of patients.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from annotated_types import Ge, Gt, Interval

from fednotes import methods
from fednotes.core.errors import ConfigError
from fednotes.core.federation import Method
from fednotes.core.settings import checked, expand
from fednotes.core.types import Scheme, SiteData
from fednotes.data.checks import Finding, Report
from fednotes.jobs.patient_tables import PatientTables

POOLED = "pooled"  # the site that has every site's sentences
Fraction = Annotated[float, Interval(ge=0, le=1)]
Seconds = Annotated[float, Ge(0)]
Number = Annotated[int, Ge(0)]  # where 0 is all


@checked(frozen=True)
class SiteConfig:
    """Where one site's notes are and how they are read.

    path: a file or folder that is split here; or train, valid and test, each a file or
        folder (without valid, a tenth of train is held out). Relative to the job file;
        `$NAME` stands for an environment variable.
    format: of the files; guessed from their content if empty. on_error: "refuse" a corpus with
        anything wrong in it, or "skip" each line, mention or document that cannot be used; what
        was skipped is counted.
    where: "genre=nw" keeps the documents whose meta has this value. share: "2/3" is the
        second of three random parts of `path`, disjoint and together everything, for sites
        that divide one corpus; dealt after `where`, by `split` and the job's seed.
    types: the entity types kept, after label_map; all if empty. A label mapped to "" is
        dropped. test_types: those kept in the test part, if it is annotated more completely.
    split: what stays together when `path` is split: "patient", "document", "sentence" or a key
        of the documents' meta; if empty, the patient where the corpus names patients, else the
        document. "sentence" puts sentences of one note in several parts. valid_fraction,
        test_fraction: of the sentences.
    fraction: of the training sentences that are used. mask_overlap: the ratio of surface
        forms, annotated at another site too, that are masked in training (`data/split.py`).
    max_sentences, max_valid_sentences, max_test_sentences: at most so many of the training,
        validation and test data are used, random ones; 0 is all.
    flatten: what becomes of overlapping and discontinuous mentions.
    repeats: "drop", training sentences that occur in `valid` or `test` are left out; or "keep",
        a published division is taken as it is.
    """

    path: str = ""
    train: str = ""
    valid: str = ""
    test: str = ""
    format: str = ""
    on_error: Literal["refuse", "skip"] = "refuse"
    where: str = ""
    share: str = ""
    types: tuple[str, ...] = ()
    test_types: tuple[str, ...] = ()
    label_map: Mapping[str, str] = field(default_factory=dict)
    scheme: Scheme = "BIO"
    split: str = ""
    valid_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2
    fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    mask_overlap: Fraction = 0.0
    max_sentences: Number = 0
    max_valid_sentences: Number = 0
    max_test_sentences: Number = 0
    flatten: Literal["outermost", "first_fragment", "drop"] = "outermost"
    repeats: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
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
        if self.where and not re.fullmatch(r"[^=]+=.+", self.where):
            raise ConfigError(f'where = {self.where!r}: expected KEY=VALUE, such as "genre=nw"')
        number, of = self.shares
        if self.share and not (self.path and 1 <= number <= of):
            raise ConfigError(
                f'share = {self.share!r}: expected such as "2/3", the second third of `path`'
            )

    @property
    def shares(self) -> tuple[int, int]:
        """`share` as numbers: which one, counted from 1, of how many; zeros if it is none."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", self.share)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@checked(frozen=True)
class NotesConfig:
    """Where one site's notes without annotations are, and which of them are used.

    path: a file or folder, or paths: several, one after the other. Relative to the job file;
        `$NAME` stands for an environment variable.
    format: one of `data.notes.FORMATS`; guessed from the content if empty. categories: keep
        only notes of these, such as "Discharge summary". column: the table's column, or the
        JSON key, that holds the text.
    valid_fraction: of the patients, drawn by the job's seed, at least one where there are two.
    max_notes: so many of the training notes, those whose hash of seed, patient and note is
        lowest; 0 is all. A smaller number's notes are among a larger one's. With [silos], of
        what all silos get of this table.
    exclude: annotated corpora; a note that shares a sentence with one is left out
        (`data/overlap.py`).
    """

    path: str = ""
    paths: tuple[str, ...] = ()
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    valid_fraction: Annotated[float, Interval(ge=0, lt=1)] = 0.05
    max_notes: Number = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.paths) or not all(self.files):
            raise ConfigError("give either `path`, a file or folder of notes, or `paths`, several")
        if len(set(self.files)) < len(self.files):
            raise ConfigError("paths: one is named twice, its notes would count twice")

    @property
    def files(self) -> tuple[str, ...]:
        """Every path, in order."""
        return self.paths or (self.path,)


@checked(frozen=True)
class TagsConfig:
    """Which types each site annotates, where its files are annotated with more.

    design: "given" by each site's `types`; or sampled from the complete tag set:
        "disjoint", every type at one site, or "appendix-d", one type of its own for each site
        and the others at one or two (`data/tags.py`). Then training and validation
        data keep the site's sampled types, test data have all.
    types: the complete tag set; if empty, the union of the sites' types, sorted.
    per_site: types of each site in "disjoint"; 0 deals out all, as evenly as can be.
    min_mentions: draw again until every site's data mention each of its types so often; a
        site cannot teach a type that its text does not have.
    runs_per_sampling: so many seeds in a row share one sampling: with 3, seeds 1 to 3 are
        three splits of sampling 1.
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

    sites: how many. sentences: of the first site's training data, roughly; others differ.
    """

    sites: Annotated[int, Ge(1)] = 3
    sentences: Annotated[int, Ge(10)] = 400


@checked(frozen=True)
class SilosConfig:
    """Hospitals simulated from corpora: the sites' tables only say where these are.

    All their documents (of train, valid and test, each part by itself), or notes, are pooled
    and dealt into `silo1` to `siloN` at random by the job's seed.

    number: of silos. by: what is never parted, "patient" or "document" (a note); a document
        without a patient counts by itself. Without it, "patient" for a method that reads notes
        without annotations, "document" for others, as Liu and Miller 2020 did.
    """

    number: Annotated[int, Ge(1)] = 5
    by: Literal["patient", "document"] | None = None


@checked(frozen=True)
class FederationConfig:
    """How sites' answers are gathered; but for `secure_sum` a simulation needs none of it.

    min_sites: with fewer a request waits; 0 means all. timeout: seconds after which a request
    goes on with the sites that answered, if they are enough. grace: how long the others may take
    once enough have answered; 0 is until the timeout. pause: seconds between two tries of what a
    site could not do. knock_every: how often sites that were away are asked whether they are
    back. checkpoint_seconds: the longest time between two checkpoints. max_norm: an update whose
    floating-point tensors have a larger L2 norm, all together, is left out; 0 is no bound.
    secure_sum: the server sees sums alone (`docs/privacy.md`); it takes three sites.
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


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SiteKind:
    """What the sites of a method hold, and all that a job does with it.

    sites, synthetic: the classes of [sites.NAME] and [synthetic]. tables: further tables of the
    job that only it has; more(table, where): Job's fields that are made of them.
    load(job, progress, cache): the sites. fingerprint(site): two runs on the same data agree in it.
    size(site): its training examples, as far as its data tell; unit: what they are, in short.
    counts(sites): what `check` shows. hints(scores, sites): what a run says of its scores.
    findings(job, sites): what to know before training. one_sentence(site): a site that is made in
    no time; invented(name, table): a site where files cannot be read. None where there is none.
    """

    name: str
    sites: type[Any]
    synthetic: type[Any]
    load: Callable[[Job, Progress | None, Path | None], Sites]
    fingerprint: Callable[[Any], str]
    counts: Callable[[Sequence[Any]], list[CountTable]]
    tables: frozenset[str] = frozenset()
    more: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda table, where: {}
    size: Callable[[Any], int] = lambda site: 1
    unit: str = "sent"
    hints: Callable[[Mapping[str, Any], Sequence[Any]], Iterator[str]] = lambda scores, sites: iter(
        ()
    )
    findings: Callable[[Job, Sites], Report] = lambda job, sites: Report()
    one_sentence: Callable[[Any], Any] | None = None
    invented: Callable[[str, Any], Any] | None = None


class MethodConfig(Protocol):
    """What every method's `Config` has: its seed, and the settings of its model."""

    @property
    def seed(self) -> int: ...

    @property
    def model(self) -> Any: ...


@dataclass(frozen=True)
class Job:
    """A job file, read and checked.

    kind: what its sites hold. config: the method's `Config`. sites: a table of the kind each;
    synthetic likewise. table: the raw tables after `--set`, for the record. folder: what relative
    paths are relative to. tags, patients: as far as the kind has them.
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
    patients: PatientTables | None = None

    @property
    def module(self) -> Method:
        """What the method does."""
        return methods.find(self.method)

    @property
    def data(self) -> str:
        """What the method's sites hold: "documents", "notes" (no annotations) or "patients"."""
        return self.kind.name

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the declarative job; two runs with one fingerprint are one run."""
        text = json.dumps(self.table, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def located(self, text: str, where: str) -> Path:
        """A path of the job, relative to its file. Raises ConfigError for a variable that is not
        set."""
        path = Path(expand(text, where))
        return path if path.is_absolute() else self.folder / path


@dataclass(frozen=True)
class Sites:
    """The sites of a job in its order, or the silos that it deals them into.

    data: what each holds, of the method's kind. complete: the same texts with every type
    annotated everywhere, where that is known: for generated sites and sampled tag sets.
    notes: what was changed on the way, as counts. findings: what to know of the files before
    they were split and reduced.
    """

    data: tuple[Any, ...]
    complete: tuple[SiteData, ...] | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the data, and what was skipped: to be known before training."""
        return tuple(f"{f.where}: {f.message}" for f in self.findings if f.level != "info")

    @property
    def told(self) -> tuple[str, ...]:
        """What a run says of its data: `warnings`, and what was changed on the way."""
        return (*(f"warning: {text}" for text in self.warnings), *self.notes)


def load_sites(job: Job, progress: Progress | None = None, cache: Path | None = None) -> Sites:
    """Read every site of a job. progress: told of (patients done, all) while notes are read; cache:
    of what is made of them.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it.
    """
    return job.kind.load(job, progress, cache)
