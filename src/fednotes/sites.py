"""A job's sites → their data.

read        files, mapped labels; `where` and `share` (`site_corpora.py`)
flat        one annotation that every part is cut from: all types that the job asks for
split       train, valid, test; without leaks
reduced     `fraction`, `mask_overlap`, at most so many sentences
restricted  to the types that the site annotates, given or sampled
silos       dealt out anew, where the job simulates hospitals (`silo_jobs.py`)
             Notes without annotations: `note_jobs.py`; patients: `cohort_jobs.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from fednotes.cohort_jobs import load_patient_sites
from fednotes.core.errors import ConfigError, FednotesError, nearest
from fednotes.core.seeds import seed_of
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.data import heterogeneous, synthetic
from fednotes.data.checks import bare_documents, unlearnt
from fednotes.data.findings import Finding
from fednotes.data.split import (
    mask_overlap,
    sentence_documents,
    split,
    subsample,
    without_leaks,
)
from fednotes.data.tags import FlattenCounts, flatten, relabel, types_of
from fednotes.job_tables import SiteConfig, TagsConfig
from fednotes.jobs import Job, Sites
from fednotes.note_jobs import load_note_sites
from fednotes.silo_jobs import document_silos
from fednotes.site_corpora import Documents, Parts, read_sites

_DRAWS = 10_000


def load_sites(
    job: Job, progress: Callable[[int, int], None] | None = None, cache: Path | None = None
) -> Sites:
    """Read every site of a job, and deal their texts into silos where it asks for them.

    progress, cache: of `load_patient_sites`. Raises DataError for a bad file, ConfigError for a
    setting that does not fit it.
    """
    if job.data == "patients":
        return load_patient_sites(job, progress, cache)
    if job.reads_notes:
        return load_note_sites(job)
    sites = _load_documents(job)
    return document_silos(job, sites) if job.silos else sites


def _load_documents(job: Job) -> Sites:
    if job.synthetic is not None:
        made = synthetic.generate(job.synthetic.sites, job.synthetic.sentences, job.seed)
        complete = tuple(s.complete for s in made)
        if job.tags is None:
            return Sites(tuple(s.data for s in made), complete)
        types = _complete(job.tags, [site.tags.types for site in complete])
        texts = [(*s.train, *s.valid, *s.test) for s in complete]
        sets = _draw(job.tags, job.seed, types, texts)
        return _sampled(sets, types, complete, [])
    notes: list[str] = []
    findings: list[Finding] = []
    raw = read_sites(job, notes, findings)
    found = {name: types_of(chain(*parts.values())) for name, parts in raw.items()}
    complete_types = _complete(job.tags, _asked(job, found).values()) if job.tags else ()
    kept = _kept(job, found, complete_types)
    notes += _left_out(job, found, complete_types)
    whole = {
        name: _parts_of(job, name, site, raw.pop(name), kept[name], notes)
        for name, site in job.sites.items()
    }
    for name, parts in whole.items():
        findings += bare_documents(tuple(chain(*parts.values())), name)
    full = tuple(_full(job, name, site, whole, notes) for name, site in job.sites.items())
    if job.tags is not None and job.tags.sampled:
        everything = [chain(*parts.values()) for parts in whole.values()]
        sets = _draw(job.tags, job.seed, complete_types, everything)
        return replace(_sampled(sets, complete_types, full, notes), findings=tuple(findings))
    data = tuple(_own(job.sites[site.id], site) for site in full)
    if job.tags is not None:
        _require_learnable(job.tags.types, data)
        notes += _tag_notes(data)
    findings += chain(*map(unlearnt, data))
    return Sites(data, None, tuple(notes), tuple(findings))


def _left_out(
    job: Job, found: Mapping[str, tuple[str, ...]], types: tuple[str, ...]
) -> Iterator[str]:
    """Annotated types that [tags] types lacks. Raises ConfigError if a site has no other."""
    for name, labels in found.items():
        mapped = {job.sites[name].label_map.get(label, label) for label in labels} - {""}
        odd = sorted(mapped - set(types)) if types else []
        if odd and mapped == set(odd):
            raise ConfigError(
                f"site {name!r} annotates {', '.join(odd)}; [tags] types has {', '.join(types)}: "
                "map its labels to these in label_map, or add them to types"
            )
        if odd:
            yield f"{name}: annotates {', '.join(odd)}, which [tags] types lacks: left out"


def _full(
    job: Job, name: str, site: SiteConfig, whole: Mapping[str, Parts], notes: list[str]
) -> SiteData:
    """A site with all the types that its documents were read with."""
    train = whole[name]["train"]
    if not train:
        raise ConfigError(f"site {name!r}: no training document is left after splitting")
    types = site.types or types_of(train)  # masked or unused mentions count
    if not types:
        raise ConfigError(
            f"site {name!r}: no entity is annotated in its training data; "
            "check its format and label_map"
        )
    parts = _reduced(job, name, site, whole, notes)
    tags = TagSet(types, site.scheme)
    return SiteData(name, tags, parts["train"], parts["valid"], parts["test"])


def _own(site: SiteConfig, full: SiteData) -> SiteData:
    """A site with the types that its table gives."""
    own = site.types or None
    return SiteData(
        full.id,
        full.tags,
        relabel(full.train, {}, own),
        relabel(full.valid, {}, own),
        relabel(full.test, {}, site.test_types or own),
        site.test_types,
    )


def _sampled(
    sets: heterogeneous.TagSets,
    types: tuple[str, ...],
    full: Sequence[SiteData],
    notes: Sequence[str],
) -> Sites:
    """Sites whose training and validation data keep the types that were drawn for them."""
    unused = [t for t in types if not any(t in own for own in sets)]
    if unused:
        notes = [*notes, f"annotated at no site in this sampling, left out: {', '.join(unused)}"]
    types = tuple(t for t in types if t not in unused)
    complete, data = [], []
    for site, own in zip(full, sets, strict=True):
        train, valid, test = (relabel(p, {}, types) for p in (site.train, site.valid, site.test))
        scheme = site.tags.scheme
        complete.append(SiteData(site.id, TagSet(types, scheme), train, valid, test))
        train, valid = relabel(train, {}, own), relabel(valid, {}, own)
        data.append(SiteData(site.id, TagSet(own, scheme), train, valid, test, types))
    return Sites(tuple(data), tuple(complete), (*notes, *_tag_notes(data)))


def _draw(
    config: TagsConfig, seed: int, types: tuple[str, ...], sites: Sequence[Iterable[Document]]
) -> heterogeneous.TagSets:
    """The tag sets of the job's sampling. sites: each one's documents, all parts.

    Raises ConfigError where the types cannot be dealt out, or no draw has enough mentions.
    """
    number = config.sampling(seed)
    counts = [Counter(s.label for d in documents for s in d.spans) for documents in sites]
    for attempt in range(_DRAWS):
        drawn = seed_of(number, "draw", attempt) if attempt else number
        if config.design == "disjoint":
            sets = heterogeneous.disjoint(types, len(sites), config.per_site, drawn)
        else:
            sets = heterogeneous.appendix_d(types, len(sites), drawn)
        pairs = zip(counts, sets, strict=True)
        if all(found[t] >= config.min_mentions for found, own in pairs for t in own):
            return sets
    raise ConfigError(
        f"[tags] min_mentions = {config.min_mentions}: in {_DRAWS:,} draws some site never "
        "mentions one of its types so often; lower it, or leave rare types out of [tags] types"
    )


def _require_learnable(types: tuple[str, ...], sites: Sequence[SiteData]) -> None:
    """Every type of the complete tag set is in some site's."""
    for label in types:
        if not any(label in site.tags.types for site in sites):
            own = "; ".join(f"{site.id}: {', '.join(site.tags.types)}" for site in sites)
            raise ConfigError(
                f"[tags] types has {label!r}, which no site annotates in its training data ({own})"
            )


def _tag_notes(sites: Sequence[SiteData]) -> list[str]:
    """Which types each site annotates, and which of them its training data never mention."""
    number = len({label for site in sites for label in site.tags.types})
    notes = []
    for site in sites:
        own = site.tags.types
        notes.append(f"{site.id}: annotates {', '.join(own)} (of {number} types)")
        found = types_of(site.train)
        if missing := [label for label in own if label not in found]:
            notes.append(f"{site.id}: no training mention of {', '.join(missing)}")
    return notes


def _asked(job: Job, found: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Each site's types by its table; without, `found` in its files."""
    return {
        name: tuple(dict.fromkeys(site.types + site.test_types)) if site.types else found[name]
        for name, site in job.sites.items()
    }


def _complete(config: TagsConfig, annotated: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The complete tag set. Raises ConfigError for a type that occurs at no site."""
    occurring = sorted({label for own in annotated for label in own})
    for label in config.types:
        if label not in occurring:
            raise ConfigError(
                f"[tags] types has {label!r}, which is annotated at no site; "
                f"{nearest(label, occurring)}"
            )
    return config.types or tuple(occurring)


def _kept(
    job: Job, found: Mapping[str, tuple[str, ...]], complete: tuple[str, ...]
) -> dict[str, tuple[str, ...] | None]:
    """The types that each site's documents are read with; None for all of them.

    Raises ConfigError where that does not go with the complete tag set.
    """
    asked = _asked(job, found)
    if job.tags is None:
        return {name: asked[name] if site.types else None for name, site in job.sites.items()}
    for name, site in job.sites.items():
        named = site.types + site.test_types
        if job.tags.sampled and site.types and (lacks := set(complete) - set(named)):
            raise ConfigError(
                f"site {name!r} keeps {', '.join(named)}, but design = {job.tags.design!r} "
                f"needs the complete tag set there, also {', '.join(sorted(lacks))}: leave out "
                'its `types`, or set design = "given"'
            )
        if not job.tags.sampled and (other := [t for t in named if t not in complete]):
            raise ConfigError(
                f"site {name!r} has the type {other[0]!r}, [tags] types does not; "
                f"{nearest(other[0], complete)}"
            )
    if job.tags.sampled:
        return dict.fromkeys(job.sites, complete)
    return {name: tuple(t for t in complete if t in own) for name, own in asked.items()}


def _parts_of(
    job: Job,
    name: str,
    site: SiteConfig,
    raw: Parts,
    types: tuple[str, ...] | None,
    notes: list[str],
) -> Parts:
    """Train, valid and test documents with flat labels."""
    flat = {part: _flat(name, site, part, raw[part], types, notes) for part in raw}
    try:
        parts = _split(job, site, flat)
    except FednotesError as error:
        raise type(error)(f"site {name!r}: {error}") from error
    if site.train and site.repeats == "drop":
        for part in ("valid", "test"):
            parts["train"], dropped = without_leaks(parts["train"], parts[part])
            if part == "test" and not site.valid:  # valid was held out of train
                parts["valid"], more = without_leaks(parts["valid"], parts["test"])
                dropped += more
            if dropped:
                notes.append(f"{name}: {dropped} training sentences dropped that occur in {part}")
    return parts


def _flat(
    name: str,
    site: SiteConfig,
    part: str,
    raw: Documents,
    types: tuple[str, ...] | None,
    notes: list[str],
) -> Documents:
    counts = FlattenCounts()
    documents = []
    for document in relabel(raw, {}, types):
        spans, count = flatten(document.spans, site.flatten)
        documents.append(replace(document, spans=spans))
        counts += count
    where = Path(getattr(site, part)).name
    for what in ("duplicates", "nested", "crossing", "discontinuous"):
        if number := getattr(counts, what):
            notes.append(f"{name}: {number} {what} mentions in {where} ({site.flatten})")
    return tuple(documents)


def _split(job: Job, site: SiteConfig, flat: Mapping[str, Documents]) -> Parts:
    if site.path:
        fractions = {
            "train": 1 - site.valid_fraction - site.test_fraction,
            "valid": site.valid_fraction,
            "test": site.test_fraction,
        }
        return split(flat["path"], fractions, site.split, job.seed)
    parts = {part: flat.get(part, ()) for part in ("train", "valid", "test")}
    if not parts["valid"] and site.valid_fraction:
        held = {"train": 1 - site.valid_fraction, "valid": site.valid_fraction}
        parts |= split(parts["train"], held, site.split, job.seed)
    return parts


def _reduced(
    job: Job, name: str, site: SiteConfig, parts: Mapping[str, Parts], notes: list[str]
) -> Parts:
    """The parts after `mask_overlap`, `fraction` and the most sentences of each."""
    own = dict(parts[name])
    if site.mask_overlap:
        others = [other["train"] for key, other in parts.items() if key != name]
        own["train"] = mask_overlap(own["train"], others, site.mask_overlap, job.seed)
    if site.fraction < 1:
        own["train"] = subsample(sentence_documents(own["train"]), site.fraction, job.seed)
    for part, most in (
        ("train", site.max_sentences),
        ("valid", site.max_valid_sentences),
        ("test", site.max_test_sentences),
    ):
        sentences = sentence_documents(own[part]) if most else ()
        if len(sentences) > most > 0:
            own[part] = subsample(sentences, most / len(sentences), job.seed)
            notes.append(f"{name}: {most:,} of {len(sentences):,} sentences of {part} are used")
    return own
