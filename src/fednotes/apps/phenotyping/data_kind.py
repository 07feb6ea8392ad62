"""A job's sites of patients: notes, codes and labels of files, or generated ones →
`SitePatients`.

read       a site's notes, codes and labels; codes without notes left out
features   notes → bags of concepts, or vectors: one dictionary or encoder for all sites
labels     phenotypes of codes or of judgments; their codes are taken out of what stage 1 learns
split      train, valid, test by patient; a share of the training patients stays labelled
silos      train and valid patients dealt out anew; every silo judges the same test patients

Nothing of a patient is in a message: paths and lines, names of codes and phenotypes,
counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.phenotyping import synthetic, tables
from fednotes.apps.phenotyping.agreement import described, stub, training_examples
from fednotes.apps.phenotyping.codes import hold_out, phenotype_labels
from fednotes.apps.phenotyping.cohort import (
    UNLABELLED,
    Bags,
    Cohort,
    ConceptVectors,
    SitePatients,
    deal,
    fingerprint,
    pool_sites,
    require_alike,
    split,
)
from fednotes.apps.phenotyping.compare import METRICS, compare_runs
from fednotes.apps.phenotyping.concepts import (
    Made,
    Mentions,
    Progress,
    bags_of_mentions,
    by_patient,
    read_ctakes,
)
from fednotes.apps.phenotyping.features import ConceptFeatures, Features, features_for
from fednotes.apps.phenotyping.hints import score_hints
from fednotes.apps.phenotyping.job_tables import (
    TABLES,
    PatientsConfig,
    PatientTables,
    SyntheticPatientsConfig,
    patient_tables,
    shown,
    tables_of,
)
from fednotes.apps.phenotyping.labels import PatientLabels, read_labels, read_obesity
from fednotes.apps.phenotyping.shadow import audit_subject
from fednotes.core.errors import ConfigError, DataError, FednotesError, within
from fednotes.core.seeds import rng_of, seed_of
from fednotes.data.notes import Note, left_out, read_notes
from fednotes.encoders.features import default_cache
from fednotes.encoders.vectors import load_vectors
from fednotes.jobs.job import CountTable, Job, SiteKind, Sites


def load_patient_sites(
    job: Job, progress: Progress | None = None, cache: Path | None = None
) -> Sites:
    """The patients of a job's sites, or of the silos that they are dealt into.

    progress: told of (patients done, all) of each site while its notes are read. cache:
    a folder for bags or vectors, which hold no text; `default_cache()`/"concepts" if
    None.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it,
    ModelError for a bad encoder, each with the site or table.
    """
    config = tables_of(job).concepts or tables_of(job).text
    assert config is not None
    cache = default_cache() / "concepts" if cache is None else cache
    features = features_for(config, job.folder)
    sites: list[SitePatients] = []
    told: list[str] = []
    seen: set[str] = set()
    met: set[str] = set()  # ids as they are in the files
    used: dict[str, set[str]] = {"trained": set(), "tested": set()}  # likewise
    tests: set[tuple[str, ...]] = set()
    for name, site in _sites(job):
        with within(f"site {name!r}", FednotesError):
            source = _generated(job, name) if job.synthetic else _read(job, name, site)
            # Sites that divide a corpus judge the same test patients: these are one
            # person each.
            test = site.test or (site.labels,)
            own = source.found.keys() - (source.test if test in tests else frozenset())
            both, clash = len(met & own), bool(seen & own)
            met |= own
            if clash:
                source = source.renamed(name)
            seen.update(source.found)
            tests.add(test)
            told += [f"{name}: {line}" for line in source.told]
            made = _made(source, features, progress, cache)
            whole, lines = _site(job, name, site, source, made, features)
        crossed = _crossed(whole, used, f"{name}/" if clash else "")
        if both:
            told.append(
                f"warning: {name}: {both:,} patients' ids are another site's too: told apart; if "
                f"they are the same people, {crossed:,} are trained on at one site and tested at "
                "another"
            )
        sites.append(whole)
        told += [f"{name}: {line}" for line in lines]
        del source, made  # one site's texts at a time
    require_alike(sites)
    vectors = _concept_vectors(job, features)
    if vectors is not None:
        sites = [replace(site, vectors=vectors) for site in sites]
        told.append(
            f"{len(vectors.concepts):,} of the dictionary's concepts have a vector in "
            "[concepts] vectors; the others start at their mean"
        )
    if job.silos:
        sites = _silos(job, sites)
        parts = (
            f"{p} {sum(len(getattr(s, p)) for s in sites):,}"
            for p in ("train", "valid")
        )
        told.append(
            f"patients in {len(sites)} silos: {', '.join(parts)}; each judges the same "
            f"{len(sites[0].test):,} test patients"
        )
    return Sites(tuple(sites), None, (*told, *_label_lines(sites)))


def _crossed(site: SitePatients, used: dict[str, set[str]], prefix: str) -> int:
    """How many of a site's ids are trained on there and tested at an earlier one, or
    reversed.

    used: the ids of earlier sites, which gets this one's. prefix: of ids that are told
        apart.
    """
    ids = {
        what: {p.removeprefix(prefix) for part in parts for p in part.patients}
        for what, parts in (
            ("trained", (site.train, site.valid)),
            ("tested", (site.test,)),
        )
    }
    found = (ids["trained"] & used["tested"]) | (ids["tested"] & used["trained"])
    for what, own in ids.items():
        used[what] |= own
    return len(found)


# ---- files ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Source:
    """What a site's files say, before notes are made features.

    found: by patient, texts of notes; or, where `extracted`, the mentions that cTAKES
        found.
    test: patients of a test part of its own. codes: patient → codes, those of patients
    without notes too; None where nobody was coded. labels: where they are not made of
    codes. told: what was counted on the way.
    """

    found: dict[str, Any]
    extracted: bool = False
    test: frozenset[str] = frozenset()
    codes: Mapping[str, frozenset[str]] | None = None
    labels: PatientLabels | None = None
    told: Sequence[str] = ()

    def renamed(self, site: str) -> Source:
        """The same with the site's name before each patient's id."""

        def named(given: Mapping[str, Any]) -> dict[str, Any]:
            return {f"{site}/{patient}": value for patient, value in given.items()}

        return replace(
            self,
            found=named(self.found),
            test=frozenset(f"{site}/{patient}" for patient in self.test),
            codes=self.codes and named(self.codes),
            labels=self.labels
            and replace(self.labels, values=named(self.labels.values)),
        )


def _sites(job: Job) -> Iterator[tuple[str, PatientsConfig]]:
    """Each site's name and table."""
    if job.synthetic is None:
        yield from job.sites.items()
    else:
        config = PatientsConfig(notes="generated", labelled=job.synthetic.labelled)
        yield from ((f"site{at}", config) for at in range(1, job.synthetic.sites + 1))


def _generated(job: Job, name: str) -> Source:
    made = synthetic.generate(name, job.synthetic.patients, job.seed)
    return Source(dict(made.notes), codes=made.codes, labels=made.labels)


def _read(job: Job, name: str, site: PatientsConfig) -> Source:
    """A site's files."""

    def places(key: str) -> list[Path]:
        given = getattr(site, key)
        texts = [given] if isinstance(given, str) else given
        return [job.located(text, f"sites.{name}.{key}") for text in texts if text]

    told: list[str] = []
    labels, summaries = _labels(site, places("labels"), places("test_labels"), told)
    whole: dict[str, Any]
    tests: list[Mapping[str, Any]]
    if site.concepts:
        extracts = [
            _extract(path, told) for path in places("concepts") + places("test")
        ]
        whole, tests = dict(extracts[0]), [*extracts[1:]]
    else:
        notes = places("notes")
        whole = _notes(name, site, notes, told) if notes else by_patient(summaries)
        tests = (
            [_notes(name, site, places("test"), told, "test notes")]
            if site.test
            else []
        )
    test = frozenset(chain.from_iterable(tests))
    if both := len(test & whole.keys()):
        raise DataError(
            f"{both} patients of `test` are among those of training: take them out"
        )
    for other in tests:
        whole.update(other)
    if not site.test:  # the challenge's own test part
        test = frozenset(n.id for n in summaries if "test" in n.source.lower())
    if labels is not None:
        _compare(labels, site, whole, told)
    paths = places("codes") + places("test_codes")
    codes = _codes(site, paths, told) if paths else None
    return Source(whole, bool(site.concepts), test, codes, labels, told)


def _notes(
    name: str,
    site: PatientsConfig,
    paths: Sequence[Path],
    told: list[str],
    what: str = "notes",
) -> dict[str, list[str]]:
    """Texts by patient. Raises ConfigError where there is no note at all."""
    stream = read_notes(
        paths,
        site.format,
        site.categories,
        column=site.column or None,
        source=name,
        encoding=site.encoding,
    )
    nameless = 0

    def counted() -> Iterator[Note]:
        nonlocal nameless
        for note in stream:
            nameless += note.patient is None
            yield note

    found = by_patient(counted())
    gone = left_out(stream.counts)
    if not found:
        where = ", ".join(map(str, paths))
        raise ConfigError(
            f"there is no note in {where}" + (f" but {gone}" if gone else "")
        )
    if gone:
        told.append(f"{what} left out: {gone}")
    if nameless:
        told.append(
            f"{nameless:,} {what} name no patient: each is a patient's own, by its id"
        )
    return found


def _extract(path: Path, told: list[str]) -> Mentions:
    mentions, report = read_ctakes(path)
    if report.damaged:
        told.append(
            f"{path}: {report.damaged:,} of {report.rows:,} lines are no CUIs: left out"
        )
    return mentions


def _labels(
    site: PatientsConfig, paths: Sequence[Path], tests: Sequence[Path], told: list[str]
) -> tuple[PatientLabels | None, Sequence[Note]]:
    """Judged labels: of a table, a file; or of the obesity challenge, a folder with
    notes too."""
    if not paths:
        return None, ()
    path, notes = paths[0], tuple[Note, ...]()
    if path.is_dir():
        if tests:
            raise ConfigError(
                f"{path}: a folder of the obesity challenge has a test part: leave out test_labels"
            )
        notes, found = read_obesity(path, site.judgment)
    elif not (site.notes or site.concepts):
        raise ConfigError(
            f"{path}: a table of labels has no notes: give `notes` or `concepts`"
        )
    elif site.judgment != "intuitive":
        raise ConfigError(
            f"{path}: judgment is of the obesity challenge, not of a table"
        )
    else:
        found = read_labels(path, *tests, patient_column=site.patient_column)
    told += found.lines()
    return found, notes


def _compare(
    labels: PatientLabels,
    site: PatientsConfig,
    patients: Collection[str],
    told: list[str],
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
        if site.codes_format == "table":
            made = tables.read_codes(
                path, site.system, site.patient_column, site.code_column
            )
        elif site.codes_format == "mimic":
            made = tables.read_mimic(path, site.tables)
        elif site.codes_format == "omop":
            made = tables.read_omop(path, site.conditions, site.procedures)
        else:
            made = tables.read_codiesp(path, site.kinds)
        for patient, given in made.codes.items():
            codes[patient] = codes.get(patient, frozenset()) | given
        for table in made.tables:
            told += table.lines()
            if table.empty:
                told.append(
                    f"{table.path}: {table.empty:,} rows without a code: left out"
                )
            if table.unknown:
                told.append(
                    f"{table.path}: {table.unknown:,} rows have a code that the dictionary of "
                    "codes beside it does not know: kept"
                )
    return codes


# ---- sites ---------------------------------------------------------------------------


def _made(
    source: Source, features: Features, progress: Progress | None, cache: Path
) -> Made:
    if not source.extracted:
        return features.make(source.found, progress, cache)
    assert isinstance(features, ConceptFeatures)  # the tables are checked for it
    matcher = features.matcher
    found = bags_of_mentions(
        source.found, matcher.dictionary.concepts, matcher.context, features.most
    )
    if found.counts["unknown"] and not found.counts["mentions"]:
        raise DataError(
            f"none of the {found.counts['unknown']:,} CUIs is a concept of the dictionary: give "
            'the UMLS, or an ontology with ids = "UMLS_CUI"'
        )
    return found


def _site(
    job: Job,
    name: str,
    site: PatientsConfig,
    source: Source,
    made: Made,
    features: Features,
) -> tuple[SitePatients, list[str]]:
    """A site's three parts, and what was counted on the way."""
    tables = tables_of(job)
    lines = _counted(source, made, features)
    labels, outputs = (
        np.zeros((len(made.patients), 0), np.int8),
        tuple(tables.phenotypes),
    )
    if outputs:
        labels = phenotype_labels(made.patients, source.codes or {}, tables.phenotypes)
    elif source.labels is not None:
        labels = source.labels.matrix(made.patients, site.unmentioned)
        outputs = source.labels.phenotypes
    whole = Cohort(name, made.patients, made.values, labels, outputs)
    codes = _known_codes(made.patients, source, tables, lines)
    share = 0.0 if source.test else site.test_fraction
    parts = {"train": 1 - site.valid_fraction - share, "valid": site.valid_fraction}
    if source.test:  # it stays as it is
        tested = np.array(
            [patient in source.test for patient in whole.patients], dtype=bool
        )
        cohorts = {
            **split(whole.take(~tested), parts, job.seed),
            "test": whole.take(tested),
        }
    else:
        cohorts = split(whole, parts | {"test": share}, job.seed)
    if job.privacy and site.labelled < 1:
        raise ConfigError(
            f"site {name!r}: labelled = {site.labelled:g}: whose labels are used depends on who "
            "else is there, so that [privacy] would promise nobody anything: leave it out"
        )
    train = _labelled(cohorts["train"], site.labelled, job.seed)
    valid, test = cohorts["valid"], cohorts["test"]
    return SitePatients(name, features.space, train, valid, test, codes), lines


def _counted(source: Source, made: Made, features: Features) -> list[str]:
    """What became of the site's patients."""
    counts = made.counts
    notes = f" with {counts['notes']:,} notes" if "notes" in counts else ""
    lines = [f"{len(source.found):,} patients{notes}"]
    what = (
        "a concept of the dictionary"
        if isinstance(features, ConceptFeatures)
        else "a word"
    )
    if counts["without"]:
        lines.append(
            f"{counts['without']:,} patients without {what} in their notes: kept"
        )
    if counts["left_out"] and isinstance(features, ConceptFeatures):
        lines.append(
            f"{counts['left_out']:,} patients with more than {features.most:,} concepts: left out"
        )
    if counts.get("unknown"):
        lines.append(f"{counts['unknown']:,} CUIs are not in the dictionary: left out")
    return lines


def _known_codes(
    patients: Sequence[str], source: Source, tables: PatientTables, lines: list[str]
) -> dict[str, frozenset[str]]:
    """The codes of a site's patients that stage 1 may see. `lines` gets what was left
    out."""
    known = source.codes
    if known is None:
        return {}
    own = {patient: known[patient] for patient in patients if patient in known}
    if known and not own:
        raise DataError(
            f"none of the {len(known):,} patients with codes has notes: are both of the same "
            "patients, by the same ids?"
        )
    if uncoded := len(patients) - len(own):
        lines.append(
            f"{uncoded:,} patients without codes: kept, their codes are unknown"
        )
    if noteless := len(known) - len(known.keys() & source.found.keys()):
        lines.append(f"{noteless:,} patients with codes have no notes here: left out")
    if not tables.held_out:
        return own
    kept, counts = hold_out(own, tables.held_out)
    shown = ", ".join(f"{code} {count:,}" for code, count in counts.items() if count)
    lines.append(
        f"codes held out of stage 1, and who had them: {shown or 'none, nobody'}"
    )
    if nobody := [code for code, count in counts.items() if not count]:
        lines.append(f"codes to hold out that no patient has: {', '.join(nobody)}")
    return kept


def _labelled(cohort: Cohort, share: float, seed: int) -> Cohort:
    """The cohort with the labels of a share of its annotated patients, those of lowest
    hash."""
    annotated = np.flatnonzero((cohort.labels != UNLABELLED).any(1))
    if share >= 1 or not len(annotated):
        return cohort
    hashes = [
        seed_of(seed, "labelled", cohort.patients[row]) for row in annotated.tolist()
    ]
    kept = annotated[
        np.argsort(hashes, kind="stable")[: max(1, round(share * len(annotated)))]
    ]
    labels = np.full_like(cohort.labels, UNLABELLED)
    labels[kept] = cohort.labels[kept]
    return replace(cohort, labels=labels)


def _silos(job: Job, sites: Sequence[SitePatients]) -> list[SitePatients]:
    """The sites' patients in `silo1` …; all of them judge everybody's test patients.

    Raises ConfigError where a part has fewer patients than there are silos.
    """
    assert job.silos is not None
    number = job.silos.number
    whole = pool_sites(sites)
    with within(f"[silos] number = {number}", DataError, become=ConfigError):
        trains = deal(whole.train, number, job.seed)
        valids = (
            deal(whole.valid, number, job.seed)
            if len(whole.valid)
            else (whole.valid,) * number
        )
    made = []
    for at, (train, valid) in enumerate(zip(trains, valids, strict=True), 1):
        everyone = (p for part in (train, valid, whole.test) for p in part.patients)
        billed = {p: whole.codes[p] for p in everyone if p in whole.codes}
        name = f"silo{at}"
        train, valid, test = (
            replace(part, id=name) for part in (train, valid, whole.test)
        )
        made.append(
            SitePatients(name, whole.space, train, valid, test, billed, whole.vectors)
        )
    return made


def _concept_vectors(job: Job, features: Features) -> ConceptVectors | None:
    """The public vectors of the dictionary's concepts, where the job names a file of
    them.

    Raises DataError where none is of a concept, ModelError for a bad file.
    """
    concepts = tables_of(job).concepts
    given = "" if concepts is None else concepts.vectors
    if not given:
        return None
    assert isinstance(features, ConceptFeatures)  # they are what [concepts] makes
    words = load_vectors(job.located(given, "[concepts] vectors"))
    names = features.matcher.dictionary.concepts
    found = [
        (at, words.index[name]) for at, name in enumerate(names) if name in words.index
    ]
    if not found:
        raise DataError(
            f"[concepts] vectors = {given!r}: no word in it is the id of a concept, such as "
            f"{names[0]}: is it of another dictionary?"
        )
    concepts, rows = np.array(found, np.int64).T
    return ConceptVectors.of(concepts, words.table.numpy()[rows])


_SHOWN = ("present", "absent", "questionable", "unlabelled")


def _label_lines(sites: Sequence[SitePatients]) -> Iterator[str]:
    """Training labels: a line for each phenotype, and for each site that cannot learn
    some."""
    counts = {site.id: site.train.label_counts() for site in sites}
    for at, phenotype in enumerate(sites[0].phenotypes):
        own = ", ".join(
            f"{site} {'/'.join(str(int(c[name][at])) for name in _SHOWN)}"
            for site, c in counts.items()
        )
        yield f"{phenotype}: {'/'.join(_SHOWN)} of the training patients: {own}"
    for site, c in counts.items():
        of = [
            [name for name in _SHOWN[:3] if c[name][at]]
            for at in range(c["present"].size)
        ]
        named = list(zip(sites[0].phenotypes, of, strict=True))
        few = [
            f"{p} ({k[0]} only)" if k else f"{p} (no label)"
            for p, k in named
            if len(k) < 2
        ]
        if few:
            yield f"{site}: phenotypes without two classes of training labels: {', '.join(few)}"


def _counts(sites: Sequence[SitePatients]) -> list[CountTable]:
    """Patients; of the test patients present/absent/questionable, at sites that have
    labels.

    coded: patients with billed codes, labelled: with a label of any phenotype.
    concepts: of a patient, the mean and the most, where notes are read as concepts.
    """
    rows = []
    for site in sites:
        for place, part in enumerate(("train", "valid", "test")):
            cohort = getattr(site, part)
            coded = len(site.coded(cohort))
            labelled = len(cohort.labelled())
            cells = [f"{n:,}" for n in (len(cohort), coded, labelled)]
            if isinstance(cohort.bags, Bags):
                sizes = cohort.bags.sizes
                cells += [f"{int((sizes == 0).sum()):,}"]
                cells += (
                    [f"{sizes.mean():,.1f}", f"{sizes.max():,}"]
                    if len(sizes)
                    else ["–", "–"]
                )
            rows.append(("" if place else site.id, part, *cells))
    dense = any(site.space.dense for site in sites)
    concepts = () if dense else ("without concepts", "concepts each", "most")
    heads = ("site", "part", "patients", "coded", "labelled", *concepts)
    found = [CountTable(heads, rows, words=2)]
    if judged := [site for site in sites if (site.test.labels >= 0).any()]:
        counts = [site.test.label_counts() for site in judged]
        labels = [
            (
                name,
                *("/".join(f"{of[kind][row]}" for kind in _SHOWN[:3]) for of in counts),
            )
            for row, name in enumerate(judged[0].phenotypes)
        ]
        ids = ("phenotype", *(site.id for site in judged))
        found.append(
            CountTable(ids, labels, title="test patients: present/absent/questionable")
        )
    return found


def _stand_in(site: SitePatients, name: str, size: int) -> SitePatients:
    """Two thirds of the patients, others each time: exact copies' mean would be the
    site's own."""
    rng = rng_of(0, "stand in", name)

    def some(cohort: Cohort, most: int) -> Cohort:
        rows = rng.permutation(len(cohort))[: -(-2 * len(cohort) // 3)]
        return cohort.take(np.sort(rows[:most]))

    return replace(
        site, id=name, train=some(site.train, size), valid=some(site.valid, size)
    )


KIND = SiteKind(
    "patients",
    PatientsConfig,
    SyntheticPatientsConfig,
    load_patient_sites,
    fingerprint,
    _counts,
    needed=("notes", "concepts", "labels"),
    somewhere={"notes": "notes", "codes": "codes", "codes_format": "table"},
    tables=TABLES,
    more=lambda table, preset, where: {
        "kind_tables": patient_tables(table, preset, where)
    },
    shown=shown,
    size=lambda site: len(site.train),
    unit="patients",
    stand_in=_stand_in,
    hints=score_hints,
    audit_subject=audit_subject,
    compare=compare_runs,
    describe=described,
    stub=stub,
    training_examples=training_examples,
    metrics=METRICS,
)
