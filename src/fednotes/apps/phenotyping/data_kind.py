"""Load the patients of a job's sites, from files or generated.

    read       a site's notes, codes and labels (`site_files.py`)
    features   one dictionary or encoder for all sites turns notes into bags or vectors
    labels     phenotypes from codes or judgments; stage 1 does not see their codes
    split      train, valid and test, patient by patient; a fraction stays labelled
    silos      train and valid patients are redistributed; test patients are shared

No message says anything about a patient: only names of codes and phenotypes, and
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednotes.apps.phenotyping.causes import (
    count_training,
    find_data_causes,
    find_score_causes,
)
from fednotes.apps.phenotyping.codes import make_phenotype_labels, remove_held_out_codes
from fednotes.apps.phenotyping.cohort import (
    UNLABELLED,
    Cohort,
    ConceptVectors,
    SitePatients,
    compute_site_fingerprint,
    deal_cohort,
    pool_sites,
    require_alike,
    split_cohort,
)
from fednotes.apps.phenotyping.compare_patients import METRICS, compare_patient_runs
from fednotes.apps.phenotyping.concepts import PatientInputs, Progress
from fednotes.apps.phenotyping.features import (
    ConceptFeatures,
    ConceptsConfig,
    Features,
    build_features,
)
from fednotes.apps.phenotyping.job_tables import (
    TABLES,
    PatientsConfig,
    PatientTables,
    SyntheticPatientsConfig,
    collect_tables,
    get_tables,
    read_patient_tables,
)
from fednotes.apps.phenotyping.labels import PatientLabels, read_labels
from fednotes.apps.phenotyping.patient_facts import (
    describe_patients,
    encode_training_examples,
    make_patient_stub,
)
from fednotes.apps.phenotyping.review import review_run
from fednotes.apps.phenotyping.shadow import make_audit_subject
from fednotes.apps.phenotyping.site_counts import describe_labels, make_count_tables
from fednotes.apps.phenotyping.site_files import SiteFiles, generate_site, read_site
from fednotes.core.errors import ConfigError, DataError, FednotesError, naming_place
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.wording import format_count
from fednotes.data.formats.files import remove_packed_suffix
from fednotes.data.formats.folders import list_files
from fednotes.data.notes import guess_notes
from fednotes.encoders.features import find_default_cache
from fednotes.encoders.vectors import load_vectors
from fednotes.jobs.job import FoundLabels, Job, KindTables, SiteKind, Sites
from fednotes.jobs.kinds.silos import make_silo_error

_SILO_REMEDIES = {
    "train": "or give more patients",
    "valid": "or set valid_fraction higher, or to 0",
}


def load_patient_sites(
    job: Job, progress: Progress | None = None, cache: Path | None = None
) -> Sites:
    """Load the patients of a job's sites, or of the silos that they are dealt into.

    Args:
        job: The job.
        progress: Receives the number of notes done and the total while the concepts or
            vectors of a site's notes are computed.
        cache: Folder of all caches; `find_default_cache()` if it is None. Bags or
            vectors, which contain no text, are stored in its folder "concepts".

    Raises:
        DataError: A file cannot be read; the message names the site or table.
        ConfigError: A setting does not match the files; the message names the site or
            table.
        ModelError: The encoder cannot be loaded.
    """
    cache = (cache or find_default_cache()) / "concepts"
    tables = get_tables(job)
    features = build_features(
        tables.features, job.folder, tunes_encoder=tables.tunes_encoder
    )
    ids = _IdsOfSites()
    sites: list[SitePatients] = []
    messages: list[str] = []
    for name, config in _list_site_configs(job):
        # A separate function, so that only one site's texts are in memory at a time.
        site, site_messages = _load_site(
            job,
            name,
            config,
            features=features,
            ids=ids,
            progress=progress,
            cache=cache,
        )
        sites.append(site)
        messages += site_messages
    require_alike(sites)

    vectors = _load_concept_vectors(job, features)
    if vectors is not None:
        sites = [replace(site, vectors=vectors) for site in sites]
        messages.append(
            f"{len(vectors.concepts):,} of the dictionary's concepts have a vector in "
            "[concepts] vectors; the others start at their mean"
        )
    if job.silos:
        sites = _deal_into_silos(job, sites)
        messages.append(_describe_silos(sites))
    return Sites(tuple(sites), None, (*messages, *describe_labels(sites)))


def _list_site_configs(job: Job) -> Iterator[tuple[str, PatientsConfig]]:
    """Yield the name and the table of each site."""
    if job.synthetic is None:
        yield from job.sites.items()
        return
    config = PatientsConfig(notes="generated", labelled=job.synthetic.labelled)
    for number in range(1, job.synthetic.sites + 1):
        yield f"site{number}", config


def _load_site(
    job: Job,
    name: str,
    config: PatientsConfig,
    *,
    features: Features,
    ids: _IdsOfSites,
    progress: Progress | None,
    cache: Path,
) -> tuple[SitePatients, list[str]]:
    """Load the patients of one site.

    Args:
        job: The job.
        name: Name of the site.
        config: The site's table.
        features: Makes features of notes.
        ids: The patient ids of earlier sites, to which this site's are added.
        progress: As in `load_patient_sites`.
        cache: Folder for bags or vectors.

    Returns:
        The patients, and messages about counts, each with the site's name.
    """
    with naming_place(f"site {name!r}", FednotesError):
        if job.synthetic:
            files = generate_site(job, name)
        else:
            files = read_site(job, name, config)
        prefixed = ids.add_site(name, config, files)
        messages = list(files.messages)
        inputs = prefixed.files.records.make_inputs(features, progress, cache)
        site, part_messages = _split_site(
            job, name, config, files=prefixed.files, inputs=inputs, features=features
        )
    lines = [f"{name}: {message}" for message in messages]
    crossing = ids.add_parts(site, prefixed.prefix)
    if prefixed.shared:
        lines.append(
            f"warning: {name}: {prefixed.shared:,} patient ids also occur at "
            "another site, where they count as other patients; if they are "
            f"the same people, {crossing:,} of them are trained on at one "
            "site and tested at another"
        )
    lines += [f"{name}: {message}" for message in part_messages]
    return site, lines


class _Prefixed(NamedTuple):
    """The files of a site with ids that are unique across sites.

    Attributes:
        files: The files.
        prefix: The prefix added to ids; "" if they are unchanged.
        shared: Number of ids that also occur in another site's files.
    """

    files: SiteFiles
    prefix: str
    shared: int


class _IdsOfSites:
    """Recognises patients' ids that several sites have in their files."""

    def __init__(self) -> None:
        self._ids_in_files: set[str] = set()
        self._ids: set[str] = set()  # including prefixes
        self._trained: set[str] = set()  # ids as in files
        self._tested: set[str] = set()  # ids as in files
        self._test_parts: set[tuple[str, ...]] = set()

    def add_site(
        self, name: str, config: PatientsConfig, files: SiteFiles
    ) -> _Prefixed:
        """Add the ids of a site; they get a prefix if another site has one of them.

        Args:
            name: Name of the site.
            config: The site's table.
            files: What its files say.
        """
        # Sites that divide a corpus name the same test part, whose patients are the
        # same people.
        test_part = config.test or (config.labels,)
        is_shared_part = test_part in self._test_parts
        ids = set(files.patients)
        if is_shared_part:
            ids -= files.test
        shared = len(self._ids_in_files & ids)
        prefix = ""
        if self._ids & ids:
            prefix = f"{name}/"
            files = files.with_prefix(prefix)
        self._ids_in_files |= ids
        self._ids.update(files.patients)
        self._test_parts.add(test_part)
        return _Prefixed(files, prefix, shared)

    def add_parts(self, site: SitePatients, prefix: str) -> int:
        """Add the parts of a site, and count ids that cross between sites.

        Args:
            site: The site.
            prefix: The prefix added to its ids.

        Returns:
            The number of ids in this site's training data and an earlier site's test
            data, or vice versa.
        """
        trained = {
            patient.removeprefix(prefix)
            for cohort in (site.train, site.valid)
            for patient in cohort.patients
        }
        tested = {patient.removeprefix(prefix) for patient in site.test.patients}
        crossing = (trained & self._tested) | (tested & self._trained)
        self._trained |= trained
        self._tested |= tested
        return len(crossing)


# ---- one site ------------------------------------------------------------------------


def _split_site(
    job: Job,
    name: str,
    config: PatientsConfig,
    *,
    files: SiteFiles,
    inputs: PatientInputs,
    features: Features,
) -> tuple[SitePatients, list[str]]:
    """Return a site's patients in three parts, and messages about counts.

    Args:
        job: The job.
        name: Name of the site.
        config: The site's table.
        files: What its files say.
        inputs: The features of its patients.
        features: The maker of these features.

    Raises:
        ConfigError: The job protects patients, and the site uses a fraction of labels.
        DataError: No patient with codes has notes, or a part would be empty.
    """
    tables = get_tables(job)
    messages = _describe_counts(files, inputs, features)
    phenotypes, labels = _find_phenotypes_and_labels(
        inputs.patients, config, files, tables=tables
    )
    cohort = Cohort(
        name, inputs.patients, bags=inputs.values, labels=labels, outputs=phenotypes
    )
    codes, code_messages = _select_codes_for_stage_1(inputs.patients, files, tables)
    parts = _split_into_parts(cohort, config, files.test, seed=job.seed)
    if job.privacy and config.labelled < 1:
        raise ConfigError(
            f"site {name!r}: labelled = {config.labelled:g}: whose labels are "
            "used depends on which other patients there are, so [privacy] "
            "could guarantee nothing: leave labelled out"
        )
    site = SitePatients(
        name,
        features.space,
        train=_keep_fraction_of_labels(parts["train"], config.labelled, job.seed),
        valid=parts["valid"],
        test=parts["test"],
        codes=codes,
    )
    return site, messages + code_messages


def _describe_counts(
    files: SiteFiles, inputs: PatientInputs, features: Features
) -> list[str]:
    """Return messages about the patients used and left out at a site."""
    counts = inputs.counts
    if isinstance(features, ConceptFeatures):
        unit = "a concept of the dictionary"
        limit = features.max_concepts
    else:
        unit = "a word"
        limit = 0  # none
    notes = ""
    if "notes" in counts:
        notes = f" with {format_count(counts['notes'], 'note')}"
    messages = [f"{format_count(len(files.patients), 'patient')}{notes}"]
    if counts["without_features"]:
        messages.append(
            f"kept {format_count(counts['without_features'], 'patient')} without "
            f"{unit} in the notes"
        )
    if counts["left_out"] and limit:
        messages.append(
            f"left out {format_count(counts['left_out'], 'patient')} with more than "
            f"{limit:,} concepts"
        )
    if counts.get("unknown"):
        messages.append(
            f"left out {format_count(counts['unknown'], 'CUI')} not in the dictionary"
        )
    return messages


def _find_phenotypes_and_labels(
    patients: Sequence[str],
    config: PatientsConfig,
    files: SiteFiles,
    *,
    tables: PatientTables,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the phenotypes of a site and the labels of its patients.

    Returns:
        The names; and (patients, phenotypes) int8 labels.
    """
    if tables.phenotypes:
        codes = files.codes or {}
        labels = make_phenotype_labels(patients, codes, tables.phenotypes)
        return tuple(tables.phenotypes), labels
    if files.labels is not None:
        labels = files.labels.to_matrix(patients, config.unmentioned)
        return files.labels.phenotypes, labels
    return (), np.zeros((len(patients), 0), np.int8)


def _select_codes_for_stage_1(
    patients: Sequence[str], files: SiteFiles, tables: PatientTables
) -> tuple[dict[str, frozenset[str]], list[str]]:
    """Return the codes that stage 1 may see, and messages about omitted codes.

    Raises:
        DataError: No patient with codes has notes.
    """
    if files.codes is None:
        return {}, []
    codes = {
        patient: files.codes[patient] for patient in patients if patient in files.codes
    }
    if files.codes and not codes:
        raise DataError(
            f"none of the {len(files.codes):,} patients with codes has notes: "
            "check that both files use the same patient ids"
        )
    messages = []
    uncoded = len(patients) - len(codes)
    if uncoded:
        messages.append(
            f"kept {format_count(uncoded, 'patient')} without codes; the codes count "
            "as unknown"
        )
    without_notes = sum(patient not in files.patients for patient in files.codes)
    if without_notes:
        messages.append(
            f"left out {format_count(without_notes, 'patient')} with codes but no "
            "notes at this site"
        )
    if not tables.held_out:
        return codes, messages
    remaining, patient_counts = remove_held_out_codes(codes, tables.held_out)
    return remaining, messages + _describe_held_out_codes(patient_counts)


def _describe_held_out_codes(patient_counts: Mapping[str, int]) -> list[str]:
    """Return messages about the codes that stage 1 does not see.

    Args:
        patient_counts: Each held-out code → number of the site's patients who had it.
    """
    present = [f"{code} {count:,}" for code, count in patient_counts.items() if count]
    absent = [code for code, count in patient_counts.items() if not count]
    shown_codes = ", ".join(present) or "no patient had any"
    messages = [
        (
            "codes held out of stage 1, with the number of patients who had "
            f"them: {shown_codes}"
        )
    ]
    if absent:
        messages.append(f"codes to hold out that no patient has: {', '.join(absent)}")
    return messages


def _split_into_parts(
    cohort: Cohort, config: PatientsConfig, test: frozenset[str], *, seed: int
) -> dict[str, Cohort]:
    """Divide the patients of a site into the parts train, valid and test.

    Args:
        cohort: All patients.
        config: The site's table.
        test: Patients of a separate test part; empty if a fraction is held out.
        seed: Seed of the split.
    """
    test_fraction = 0.0 if test else config.test_fraction
    fractions = {
        "train": 1 - config.valid_fraction - test_fraction,
        "valid": config.valid_fraction,
    }
    if not test:
        return split_cohort(cohort, fractions | {"test": test_fraction}, seed)
    is_tested = np.array([patient in test for patient in cohort.patients], dtype=bool)
    parts = split_cohort(cohort.take(~is_tested), fractions, seed)
    return {**parts, "test": cohort.take(is_tested)}


def _keep_fraction_of_labels(cohort: Cohort, fraction: float, seed: int) -> Cohort:
    """Return a cohort in which a fraction of the annotated patients keep their labels.

    These are the patients with the lowest hashes, so the patients of a smaller fraction
    are a subset of those of a larger one.
    """
    annotated = np.flatnonzero((cohort.labels != UNLABELLED).any(1))
    if fraction >= 1 or not len(annotated):
        return cohort
    hashes = [
        seed_of(seed, "labelled", cohort.patients[row]) for row in annotated.tolist()
    ]
    number = max(1, round(fraction * len(annotated)))
    rows = annotated[np.argsort(hashes, kind="stable")[:number]]
    labels = np.full_like(cohort.labels, UNLABELLED)
    labels[rows] = cohort.labels[rows]
    return replace(cohort, labels=labels)


# ---- all sites -----------------------------------------------------------------------


def _deal_into_silos(job: Job, sites: Sequence[SitePatients]) -> list[SitePatients]:
    """Return silos with the patients of all sites; all have the same test patients.

    Raises:
        ConfigError: A part has fewer patients than there are silos.
    """
    assert job.silos is not None
    number = job.silos.number
    pooled = pool_sites(sites)
    trains = _deal_part(job, "train", pooled.train)
    if len(pooled.valid):
        valids = _deal_part(job, "valid", pooled.valid)
    else:
        valids = (pooled.valid,) * number
    return [
        _make_silo(f"silo{position}", pooled, train, valid)
        for position, (train, valid) in enumerate(zip(trains, valids, strict=True), 1)
    ]


def _deal_part(job: Job, part: str, patients: Cohort) -> tuple[Cohort, ...]:
    """Deal the patients of one part out to the silos; return one cohort for each.

    Raises:
        ConfigError: There are fewer patients than silos.
    """
    assert job.silos is not None
    number = job.silos.number
    if len(patients) < number:
        remedy = _SILO_REMEDIES[part]
        raise make_silo_error(number, part, len(patients), "patients", remedy)
    return deal_cohort(patients, number, job.seed)


def _make_silo(
    name: str, pooled: SitePatients, train: Cohort, valid: Cohort
) -> SitePatients:
    """Return a silo with these patients and all test patients, as a site."""
    cohorts = (train, valid, pooled.test)
    patients = [patient for cohort in cohorts for patient in cohort.patients]
    return SitePatients(
        name,
        pooled.space,
        train=replace(train, id=name),
        valid=replace(valid, id=name),
        test=replace(pooled.test, id=name),
        codes={p: pooled.codes[p] for p in patients if p in pooled.codes},
        vectors=pooled.vectors,
    )


def _describe_silos(silos: Sequence[SitePatients]) -> str:
    """Return a message about the numbers of patients in silos."""
    train = sum(len(silo.train) for silo in silos)
    valid = sum(len(silo.valid) for silo in silos)
    return (
        f"patients in {len(silos)} silos: train {train:,}, valid "
        f"{valid:,}; each is tested on the same {len(silos[0].test):,} "
        "patients"
    )


def _load_concept_vectors(job: Job, features: Features) -> ConceptVectors | None:
    """Return the public vectors of the dictionary's concepts; None without such a file.

    Raises:
        DataError: No vector in the file belongs to a concept.
        ModelError: The file cannot be read.
    """
    config = get_tables(job).features
    if not isinstance(config, ConceptsConfig) or not config.vectors:
        return None
    assert isinstance(features, ConceptFeatures)  # because the job has [concepts]
    words = load_vectors(job.locate(config.vectors, "[concepts] vectors"))
    names = features.matcher.dictionary.concepts
    concepts = [index for index, name in enumerate(names) if name in words.index]
    if not concepts:
        raise DataError(
            f"[concepts] vectors = {config.vectors!r}: none of its words is "
            f"a concept id (for example {names[0]}): check that it belongs to this "
            "dictionary"
        )
    rows = [words.index[names[index]] for index in concepts]
    return ConceptVectors.from_arrays(
        np.array(concepts, np.int64), words.table.numpy()[np.array(rows, np.int64)]
    )


def _make_stand_in(site: SitePatients, name: str, size: int) -> SitePatients:
    """Return a copy of a site under another name, with two thirds of its patients.

    The selection differs for each name, because the mean over exact copies of a site
    would be the site's own update.
    """
    rng = rng_of(0, "stand in", name)

    def take_two_thirds(cohort: Cohort) -> Cohort:
        number = -(-2 * len(cohort) // 3)
        rows = rng.permutation(len(cohort))[:number]
        return cohort.take(np.sort(rows[:size]))

    train = take_two_thirds(site.train)
    valid = take_two_thirds(site.valid)
    return replace(site, id=name, train=train, valid=valid)


# ---- the proposal of a first job -----------------------------------------------------


def find_labels(folder: Path) -> FoundLabels | None:
    """Return the one table of judged phenotypes in a folder of notes.

    Args:
        folder: The folder.

    Returns:
        The table, for a job that learns it from vectors of a frozen encoder, which
        needs no dictionary; None if there is no such table, or if there are several.
    """
    tables = []
    for file in list_files(folder):
        if remove_packed_suffix(file).suffix.lower() in (".csv", ".tsv"):
            labels = _read_table_of_labels(file)
            if labels is not None:
                tables.append((file, labels))
    if len(tables) != 1:
        return None
    ((path, labels),) = tables
    counts = dict.fromkeys(labels.phenotypes, 0)
    for patient in labels.values:
        for phenotype in labels.get_labels(patient):
            counts[phenotype] += 1
    return FoundLabels(
        method="phenotype",
        notes_key="notes",
        labels_key="labels",
        path=path,
        counts=counts,
        patients=len(labels.values),
        tables={"text": {"encoder": ""}, "model": {"representation": "none"}},
        encoder_key=("text", "encoder"),
    )


def _read_table_of_labels(file: Path) -> PatientLabels | None:
    """Return the labels of a table; None if it is one of notes or something else."""
    try:
        guess_notes(file)
    except DataError:
        try:
            return read_labels(file)
        except DataError:
            return None
    return None


KIND = SiteKind(
    name="patients",
    site_config=PatientsConfig,
    synthetic_config=SyntheticPatientsConfig,
    load=load_patient_sites,
    fingerprint=compute_site_fingerprint,
    model_keys=("representation",),
    tabulate_counts=make_count_tables,
    source_keys=("notes", "concepts", "labels"),
    source_placeholder={"notes": "notes", "codes": "codes", "codes_format": "table"},
    tables=TABLES,
    read_tables=lambda table, preset, where: KindTables(
        values=read_patient_tables(table, preset, where)
    ),
    collect_tables=collect_tables,
    count_examples=lambda site: len(site.train),
    example_name="patients",
    make_stand_in=_make_stand_in,
    count_training=count_training,
    find_score_causes=find_score_causes,
    find_data_causes=find_data_causes,
    make_audit_subject=make_audit_subject,
    compare=compare_patient_runs,
    describe=describe_patients,
    make_stub=make_patient_stub,
    find_labels=find_labels,
    encode_examples=encode_training_examples,
    metrics=METRICS,
    review=review_run,
)
