"""The tables of a job file that say whose notes are read, and how they are dealt out.

[sites.NAME]   SiteConfig; for a method that reads notes without annotations, NotesConfig
[tags]         TagsConfig: which types each site annotates
[synthetic]    SyntheticConfig: generated sites in place of files
[silos]        SilosConfig: hospitals simulated from what the sites' tables name
[federation]   FederationConfig: how the sites' answers are gathered
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fednotes.core.errors import ConfigError
from fednotes.core.types import Scheme


@dataclass(frozen=True)
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
    valid_fraction: float = 0.1
    test_fraction: float = 0.2
    fraction: float = 1.0
    mask_overlap: float = 0.0
    max_sentences: int = 0
    max_valid_sentences: int = 0
    max_test_sentences: int = 0
    flatten: Literal["outermost", "first_fragment", "drop"] = "outermost"
    repeats: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.train):
            raise ConfigError("give either `path` (split here) or `train` and `test`")
        if self.train and not self.test:
            raise ConfigError("`train` is given without `test`")
        for name in ("valid_fraction", "test_fraction", "fraction", "mask_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected 0 to 1")
        if self.path and self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError(
                "valid_fraction + test_fraction: below 1, or nothing is left to train"
            )
        for name in ("types", "test_types"):
            _check_distinct(name, getattr(self, name))
        if self.fraction == 0:
            raise ConfigError("fraction = 0: a site needs training data")
        for name in ("max_sentences", "max_valid_sentences", "max_test_sentences"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: 0 is all, below is nothing")
        if self.where and not re.fullmatch(r"[^=]+=.+", self.where):
            raise ConfigError(f'where = {self.where!r}: expected KEY=VALUE, such as "genre=nw"')
        if self.share:
            number, of = self.shares
            if not self.path or not 1 <= number <= of:
                raise ConfigError(
                    f'share = {self.share!r}: expected such as "2/3", the second third of `path`'
                )

    @property
    def shares(self) -> tuple[int, int]:
        """`share` as numbers: which one, counted from 1, of how many; zeros if it is none."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", self.share)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
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
        (`data/shared_text.py`).
    """

    path: str = ""
    paths: tuple[str, ...] = ()
    format: str = ""
    categories: tuple[str, ...] = ()
    column: str = ""
    valid_fraction: float = 0.05
    max_notes: int = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.paths) or not all(self.files):
            raise ConfigError("give either `path`, a file or folder of notes, or `paths`, several")
        if len(set(self.files)) < len(self.files):
            raise ConfigError("paths: one is named twice, its notes would count twice")
        if not 0 <= self.valid_fraction < 1:
            raise ConfigError(f"valid_fraction = {self.valid_fraction}: expected 0 to less than 1")
        if self.max_notes < 0:
            raise ConfigError(f"max_notes = {self.max_notes}: 0 is all, below is nothing")

    @property
    def files(self) -> tuple[str, ...]:
        """Every path, in order."""
        return self.paths or (self.path,)


@dataclass(frozen=True)
class TagsConfig:
    """Which types each site annotates, where its files are annotated with more.

    design: "given" by each site's `types`; or sampled from the complete tag set:
        "disjoint", every type at one site, or "appendix-d", one type of its own for each site
        and the others at one or two (`data/heterogeneous.py`). Then training and validation
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
    per_site: int = 0
    min_mentions: int = 0
    runs_per_sampling: int = 1

    def __post_init__(self) -> None:
        _check_distinct("types", self.types)
        if self.per_site < 0 or (self.per_site and self.design != "disjoint"):
            raise ConfigError(
                f'per_site = {self.per_site}: a number for design = "disjoint", 0 is an even deal'
            )
        if self.runs_per_sampling < 1 or self.min_mentions < 0:
            raise ConfigError("runs_per_sampling: at least 1; min_mentions: at least 0")

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


@dataclass(frozen=True)
class SyntheticConfig:
    """Generated sites in place of files (`data/synthetic.py`).

    sites: how many. sentences: of the first site's training data, roughly; others differ.
    """

    sites: int = 3
    sentences: int = 400

    def __post_init__(self) -> None:
        if self.sites < 1 or self.sentences < 10:
            raise ConfigError("expected at least 1 site and 10 sentences")


@dataclass(frozen=True)
class SilosConfig:
    """Hospitals simulated from corpora: the sites' tables only say where these are.

    All their documents (of train, valid and test, each part by itself), or notes, are pooled
    and dealt into `silo1` to `siloN` at random by the job's seed.

    number: of silos. by: what is never parted, "patient" or "document" (a note); a document
        without a patient counts by itself. Without it, "patient" for a method that reads notes
        without annotations, "document" for others, as Liu and Miller 2020 did.
    """

    number: int = 5
    by: Literal["patient", "document"] | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ConfigError(f"number = {self.number}: expected at least 1 silo")


@dataclass(frozen=True)
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

    min_sites: int = 0
    timeout: float = 600.0
    grace: float = 0.0
    pause: float = 5.0
    knock_every: float = 30.0
    checkpoint_seconds: float = 600.0
    max_norm: float = 0.0
    secure_sum: bool = False

    def __post_init__(self) -> None:
        names = ("min_sites", "grace", "pause", "knock_every", "checkpoint_seconds", "max_norm")
        for name in names:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 0 is needed")
        if not self.timeout > 0:
            raise ConfigError(f"timeout = {self.timeout}: more than 0 seconds are needed")
