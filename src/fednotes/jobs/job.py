"""Job files: one TOML table says what is trained, on whose notes, and how.

method = "fedner"                 # names a module of fednotes.methods
preset = "best"                   # or "paper": that method's settings, overridden below
seed = 1
[training]                        # the method's Config
[model]                           # its model's settings
[sites.mercy]                     # one table a site, see `job_tables.SiteConfig`
path = "mercy/notes.jsonl"

The tables of a job file that say whose notes are read, and how they are dealt out.

[sites.NAME]   SiteConfig; for a method that reads notes without annotations, NotesConfig
[tags]         TagsConfig: which types each site annotates
[synthetic]    SyntheticConfig: generated sites in place of files
[silos]        SilosConfig: hospitals simulated from what the sites' tables name
[federation]   FederationConfig: how the sites' answers are gathered
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from fednotes import methods
from fednotes.core.errors import ConfigError, nearest
from fednotes.core.federation import Method
from fednotes.core.settings import assign, build, checked, read_toml
from fednotes.core.types import Scheme, SiteData
from fednotes.data.checks import Finding
from fednotes.jobs.patient_tables import (
    PATIENT_TABLES,
    PatientsConfig,
    PatientTables,
    SyntheticPatientsConfig,
    patient_tables,
)

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


CONDITIONS = ("alone", "federated", "pooled")
POOLED = "pooled"  # the site that has every site's sentences
# Of a Config, by the job itself.
FILLED_IN = {
    *("seed", "tags", "platforms", "model", "space", "phenotypes", "questionable"),
    "vectors",
}
_TOP = {"title", "method", "preset", "seed", "conditions", "threads", "notes"}
_TABLES = {
    "training",
    "model",
    "sites",
    "synthetic",
    "tags",
    "silos",
    "federation",
    *PATIENT_TABLES,
}
SITE_TABLES: dict[str, type[Any]] = {  # by the method's DATA: what its sites hold
    "documents": SiteConfig,
    "notes": NotesConfig,
    "patients": PatientsConfig,
}


@dataclass(frozen=True)
class Job:
    """A job file, read and checked.

    table: the raw tables after `--set`, for the record. folder: what relative paths are
    relative to. sites: a SiteConfig each, or a NotesConfig or PatientsConfig where the method
    reads notes or patients; synthetic likewise. patients: the tables of a job on patients.
    """

    name: str
    title: str
    method: str
    seed: int
    conditions: tuple[str, ...]
    threads: int
    config: Any
    sites: Mapping[str, Any]
    synthetic: Any
    table: Mapping[str, Any]
    folder: Path
    tags: TagsConfig | None = None
    silos: SilosConfig | None = None
    patients: PatientTables | None = None
    federation: FederationConfig = field(default_factory=FederationConfig)

    @property
    def module(self) -> Method:
        """What the method does."""
        return methods.find(self.method)

    @property
    def data(self) -> str:
        """What the method's sites hold: "documents", "notes" (no annotations) or "patients"."""
        return self.module.holds

    @property
    def reads_notes(self) -> bool:
        """Whether the method's sites hold notes without annotations, not documents."""
        return self.data == "notes"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the declarative job; two runs with one fingerprint are one run."""
        text = json.dumps(self.table, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Sites:
    """The sites of a job in its order, or the silos that it deals them into.

    data: what each holds, SiteNotes where the method reads notes without annotations,
        SitePatients where it reads patients.
    complete: the same texts with every type annotated everywhere, where that is known: for
        generated sites and sampled tag sets.
    notes: what was changed on the way, as counts.
    findings: what to know of the files before they were split and reduced.
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


@lru_cache(maxsize=1)
def built_in_jobs() -> Mapping[str, Path]:
    """The jobs that come with the package, by name: `demo`, `fedner/table2`, …"""
    root = Path(str(resources.files("fednotes") / "experiments"))
    found = {str(path.relative_to(root).with_suffix("")): path for path in root.rglob("*.toml")}
    return {name: path for name, path in sorted(found.items()) if "base" not in read_toml(path)}


def load_job(name: str | Path, settings: tuple[str, ...] = ()) -> Job:
    """Read a job file, or a built-in job by name, and apply `--set` assignments.

    Raises ConfigError naming file, table and key.
    """
    table, path = load_table(name, settings)
    return parse_job(table, path.stem, path.resolve().parent, str(path))


def load_table(name: str | Path, settings: tuple[str, ...] = ()) -> tuple[dict[str, Any], Path]:
    """The tables of a job file, or a built-in job, after `--set`; and its file.

    Raises ConfigError.
    """
    path = Path(name)
    if not path.is_file():
        known = built_in_jobs()
        if str(name) not in known:
            raise ConfigError(
                f"{name}: no such job file, nor a built-in job; {nearest(str(name), known)}"
            )
        path = known[str(name)]
    table = read_toml(path)
    for assignment in settings:
        assign(table, assignment)
    return table, path


def parse_job(table: Mapping[str, Any], name: str, folder: Path, where: str) -> Job:
    """A job from its tables. Raises ConfigError."""
    for key in table:
        if key not in _TOP | _TABLES:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, _TOP | _TABLES)}")
        if key in _TABLES and not isinstance(table[key], Mapping):
            raise ConfigError(f"{where}: {key} is a value, expected a table [{key}]")
    top = build(TopConfig, {k: v for k, v in table.items() if k in _TOP}, where)
    try:
        kind = methods.find(top.method).holds
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for condition in top.conditions:
        if condition not in CONDITIONS:
            raise ConfigError(
                f"{where}: conditions has {condition!r}; {nearest(condition, CONDITIONS)}"
            )
    federation = build(FederationConfig, table.get("federation", {}), f"{where} [federation]")
    for key in PATIENT_TABLES:
        if key in table and kind != "patients":
            raise ConfigError(f"{where} [{key}]: is for methods on patients, not {top.method}")
    synthetic, sites = _sources(table, where, kind)
    return Job(
        name=name,
        title=top.title or name,
        method=top.method,
        seed=top.seed,
        conditions=tuple(c for c in CONDITIONS if c in top.conditions),
        threads=top.threads,
        config=_config(top, table, folder, where),
        sites=sites,
        synthetic=synthetic,
        table=table,
        folder=folder,
        tags=_tags(table, where, top.method, kind),
        silos=build(SilosConfig, table["silos"], f"{where} [silos]") if "silos" in table else None,
        patients=_patients(top, table, where) if kind == "patients" else None,
        federation=federation,
    )


@checked(frozen=True)
class TopConfig:
    """The keys of a job file outside its tables.

    method: names a module of `fednotes.methods`. title, notes: for people. preset: the method's
    settings to begin with, "best" or "paper". seed: the same one, the same run. conditions: what
    is trained, of "alone" (each site by itself), "federated" and "pooled" (all notes in one place).
    threads: of this process.
    """

    method: str
    title: str = ""
    notes: str = ""
    preset: str = "best"
    seed: int = 1
    conditions: tuple[str, ...] = ("alone", "federated", "pooled")
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ConfigError(f"conditions = []: name some of {', '.join(CONDITIONS)}")
        most = 4 * (os.cpu_count() or 1)
        if not 1 <= self.threads <= most:
            raise ConfigError(f"threads = {self.threads}: expected 1 to {most} on this machine")


def _sources(table: Mapping[str, Any], where: str, kind: str) -> tuple[Any, dict[str, Any]]:
    if ("sites" in table) == ("synthetic" in table):
        raise ConfigError(f"{where}: give either [sites.NAME] tables or a [synthetic] table")
    if "synthetic" in table:
        made: type[Any] = SyntheticPatientsConfig if kind == "patients" else SyntheticConfig
        return build(made, table["synthetic"], f"{where} [synthetic]"), {}
    if not table["sites"]:
        raise ConfigError(f"{where}: expected one table [sites.NAME] for each site")
    sites: dict[str, Any] = {}
    for site, values in table["sites"].items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", site):
            raise ConfigError(
                f"{where} [sites.{site}]: a site's name has letters, digits, - and _ only"
            )
        taken = {name.lower(): name for name in (POOLED, *sites)}
        if found := taken.get(site.lower()):  # a site is a folder; some systems ignore case
            raise ConfigError(
                f"{where} [sites.{site}]: this name is taken, choose another (it is {found!r} "
                "where case does not count)"
            )
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: sites.{site} is a value, expected a table [sites.{site}]")
        sites[site] = build(SITE_TABLES[kind], values, f"{where} [sites.{site}]")
    return None, sites


def _tags(table: Mapping[str, Any], where: str, method: str, kind: str) -> TagsConfig | None:
    if "tags" not in table:
        return None
    if kind == "patients":
        return None  # patient_tables refuses it
    if kind == "notes":
        raise ConfigError(f"{where} [tags]: {method} reads notes without annotations: leave it out")
    tags = build(TagsConfig, table["tags"], f"{where} [tags]")
    if tags.sampled and "silos" in table:
        raise ConfigError(
            f"{where} [silos]: silos annotate alike, design = {tags.design!r} samples other types "
            "for each site: leave out one of the two"
        )
    if not tags.sampled and "synthetic" in table:
        raise ConfigError(
            f'{where} [tags]: generated sites have types of their own: design = "disjoint" or '
            '"appendix-d" samples others'
        )
    for name, site in table.get("sites", {}).items():
        if tags.sampled and site.get("test_types"):
            raise ConfigError(
                f"{where} [sites.{name}]: test_types does not go with design = {tags.design!r}, "
                "which tests on the complete tag set"
            )
    return tags


def _config(top: TopConfig, table: Mapping[str, Any], folder: Path, where: str) -> Any:
    method = methods.find(top.method)
    if top.preset not in method.presets:
        raise ConfigError(
            f"{where}: preset = {top.preset!r}; {nearest(top.preset, method.presets)}"
        )
    preset = method.presets[top.preset]
    for key in FILLED_IN:
        if key in table.get("training", {}):
            raise ConfigError(f"{where} [training]: {key!r} does not belong here")
    values = preset.get("training", {}) | table.get("training", {}) | {"seed": top.seed}
    training = {f.name for f in fields(method.Config)} - FILLED_IN
    for key in table.get("training", {}):
        if key not in training:
            raise ConfigError(f"{where} [training]: unknown key {key!r}; {nearest(key, training)}")
    settings = _expand(table.get("model", {}), folder)
    own = preset.get("model", {})
    if all(own.get(key) == settings[key] for key in ("kind", "tagger") if key in settings):
        settings = _over(own, settings)  # else the job starts from a model of its own
    if settings.get("word_vectors"):
        settings = preset.get("with_word_vectors", {}) | settings
    try:
        model = method.model_config(settings)
    except ConfigError as error:
        told = str(error).removeprefix("model: ").removeprefix("model ")  # [model] says so
        raise ConfigError(f"{where} [model]: {told}") from error
    made: Any = build(method.Config, values | {"model": model}, f"{where} [training]")
    return made


def _patients(top: TopConfig, table: Mapping[str, Any], where: str) -> PatientTables:
    """The tables of a job on patients; what the preset says of [concepts] is in them."""
    preset = methods.find(top.method).presets[top.preset]
    reads = isinstance(table.get("concepts"), Mapping) or "synthetic" in table
    if reads and "text" not in table and "concepts" in preset:
        table = {**table, "concepts": _over(preset["concepts"], table.get("concepts", {}))}
    return patient_tables(table, where)


def _over(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's table with a job's values in place of its own; tables in it likewise."""
    both = {
        key: _over(preset[key], value)
        if isinstance(value, Mapping) and isinstance(preset.get(key), Mapping)
        else value
        for key, value in given.items()
    }
    return {**preset, **both}


def _expand(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Environment variables in text values; files beside the job are found by their names."""
    found = {k: expand(v, k) if isinstance(v, str) else v for k, v in table.items()}
    for key in (
        "word_vectors",
        "contextual",
        "encoder",
        "backbone",
        "representation",
        "concept_vectors",
    ):
        value = found.get(key)
        if value and isinstance(value, str) and (folder / value).exists():
            found[key] = str(folder / value)
    return found


def expand(text: str, where: str) -> str:
    """`$NAME` and `~` in a path. Raises ConfigError for a variable that is not set."""
    missing = [n for n in re.findall(r"\$\{?(\w+)\}?", text) if n not in os.environ]
    if missing:
        raise ConfigError(
            f"{where} = {text!r}: the environment variable {missing[0]} is not set; "
            f"for example: export {missing[0]}=/path/to/folder"
        )
    return os.path.expanduser(os.path.expandvars(text))
