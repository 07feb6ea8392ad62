"""A job's sites of annotated documents → their data.

read        files, mapped labels; `where` and `share`
flat        one annotation that every part is cut from: all types that the job asks for
split       train, valid, test; without leaks
reduced     `fraction`, `mask_overlap`, at most so many sentences
restricted  to the types that the site annotates, given or sampled
silos       dealt out anew, where the job simulates hospitals
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, DataError, FednotesError, Problem, nearest
from fednotes.core.seeds import seed_of
from fednotes.core.settings import build
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data import synthetic, tags
from fednotes.data.checks import (
    Finding,
    Report,
    bare_documents,
    check_sites,
    in_two_parts,
    problem_findings,
    unlearnt,
)
from fednotes.data.formats import examine
from fednotes.data.formats.files import Problems
from fednotes.data.notes import Key
from fednotes.data.notes.sites import assign
from fednotes.data.split import mask_overlap, sentence_documents, split, subsample, without_leaks
from fednotes.data.tags import FlattenCounts, flatten, relabel, types_of
from fednotes.data.text import split_sentences
from fednotes.jobs.job import Job, SiteConfig, SiteKind, Sites, SyntheticConfig, TagsConfig

_REMEDIES = {
    "train": "or give more documents",
    "valid": "or set valid_fraction higher, or to 0",
    "test": "or give more test documents",
}


def document_silos(job: Job, sites: Sites) -> Sites:
    """The sites' documents in `silo1` …, train, valid and test each dealt out by itself.

    Generated sites are taken with their complete annotation. A part that no site has no silo
    has. Sentences that were cut out of a document go where it goes.

    Raises ConfigError where sites annotate different types or schemes, or a part has fewer
    documents (patients) than there are silos.
    """
    assert job.silos is not None
    whole = sites.complete if job.synthetic and sites.complete else sites.data
    _require_alike(whole)
    number, by = job.silos.number, job.silos.by or "document"
    parts: dict[str, list[list[Document]]] = {}
    told = []
    for part, remedy in _REMEDIES.items():
        given = [(_unit(site.id, d, by), d) for site in whole for d in getattr(site, part)]
        parts[part] = [[] for _ in range(number)]
        if not given:
            continue
        where = _dealt((key for key, _ in given), job, part, by, remedy)
        for key, document in given:
            parts[part][where[key]].append(document)
        told.append(f"{part} {len(where):,}")
    unit = "patients" if by == "patient" else "documents"
    made = tuple(
        SiteData(
            f"silo{at + 1}",
            whole[0].tags,
            train=tuple(parts["train"][at]),
            valid=tuple(parts["valid"][at]),
            test=tuple(parts["test"][at]),
            test_types=whole[0].test_types,
        )
        for at in range(number)
    )
    dealt = f"{unit} in {number} silos: {', '.join(told)}"
    return Sites(made, None, (*sites.notes, dealt), sites.findings)


def _unit(site: str, document: Document, by: str) -> Key:
    """What is never parted: a patient, or the note that a document is or was cut out of."""
    if by == "patient" and document.patient is not None:
        return ("patient", document.patient)
    return ("document", site, str(document.meta.get("document", document.id)))


def _dealt(keys: Iterable[Key], job: Job, part: str, by: str, remedy: str) -> dict[Key, int]:
    assert job.silos is not None
    distinct = set(keys)
    try:
        return assign(distinct, job.silos.number, job.seed)
    except DataError as error:
        unit = "patients" if by == "patient" else "documents"
        raise ConfigError(
            f"[silos] number = {job.silos.number}: the {part} data have {len(distinct)} {unit}, "
            f"so a silo would have none: ask for {len(distinct)} silos at most, {remedy}"
        ) from error


def _require_alike(sites: Sequence[SiteData]) -> None:
    """Raises ConfigError unless all sites annotate the same types in the same scheme."""
    first = sites[0]
    for site in sites[1:]:
        for what, own, other in (
            ("annotates", set(first.tags.types), set(site.tags.types)),
            ("is tested on", set(first.scored_types), set(site.scored_types)),
            ("has the scheme", {first.tags.scheme}, {site.tags.scheme}),
        ):
            if own != other:
                raise ConfigError(
                    f"[silos] silos annotate alike, but site {first.id!r} {what} "
                    f"{', '.join(sorted(own))}, and {site.id!r} {', '.join(sorted(other))}: "
                    "give both the same `types` (label_map renames them) and the same scheme"
                )


Documents = tuple[Document, ...]
Parts = dict[str, Documents]
Reader = Callable[[str, str, str], tuple[Documents, Problems]]

_SHOWN = 12  # values in a message


def _reader(job: Job) -> Reader:
    """(path, format, where it is named) → documents, and what is wrong with the others; a file
    that sites share is read once."""

    @cache
    def read_once(path: Path, format: str) -> tuple[Documents, Problems]:
        return examine(path, format or None)

    return lambda text, format, where: read_once(job.located(text, where), format)


def read_sites(job: Job, notes: list[str], findings: list[Finding]) -> dict[str, Parts]:
    """The documents of every site's `path`, or train, valid and test, with mapped labels.

    notes, findings: take what was changed, and what to know of the files. Raises DataError of
    the problems of all sites together, ConfigError for a setting that does not fit them.
    """
    reader = _reader(job)
    problems: list[Problem] = []
    first = None
    raw: dict[str, Parts] = {}
    for name, site in job.sites.items():
        try:
            raw[name] = _read_site(job, name, site, reader, notes, findings)
        except DataError as error:
            first = first or error
            problems += error.problems or (Problem("", 0, "site", str(error)),)
    if first is None:
        return raw
    raise first if len(problems) == 1 else DataError.of(problems)


def _read_site(
    job: Job,
    name: str,
    site: SiteConfig,
    reader: Reader,
    notes: list[str],
    findings: list[Finding],
) -> Parts:
    """The documents of `path`, or of train, valid and test, with mapped labels."""
    raw = _files(name, site, reader, findings)
    if len(raw) > 1:
        findings += in_two_parts(raw, name)
    _check_labels(name, site, types_of(chain(*raw.values())), notes)
    try:
        chosen = {part: _where(documents, site.where) for part, documents in raw.items()}
        if site.share:
            number, of = site.shares
            shares = {str(i): 1 / of for i in range(1, of + 1)}
            chosen["path"] = split(chosen["path"], shares, site.split, job.seed)[str(number)]
    except FednotesError as error:
        raise type(error)(f"site {name!r}: {error}") from error
    return {part: relabel(documents, site.label_map) for part, documents in chosen.items()}


def _files(name: str, site: SiteConfig, reader: Reader, findings: list[Finding]) -> Parts:
    """The documents of each of a site's files. Raises DataError of the problems of all files."""
    raw: Parts = {}
    wrong: list[Problem] = []
    for part in ("path", "train", "valid", "test"):
        if not (text := getattr(site, part)):
            continue
        try:
            raw[part], problems = reader(text, site.format, f"sites.{name}.{part}")
            if site.on_error == "refuse" or not raw[part]:
                problems.refuse()
        except ConfigError as error:
            raise ConfigError(f"site {name!r}: {error}") from error
        except DataError as error:
            wrong += error.problems or (Problem("", 0, "file", str(error)),)
            continue
        findings += problem_findings(problems, name, Path(text).name)
    if wrong:
        raise DataError.of(wrong)
    return raw


def _where(documents: Documents, where: str) -> Documents:
    """The documents whose meta has the value; all if nothing is asked."""
    if not where:
        return documents
    key, _, value = where.partition("=")
    chosen = tuple(d for d in documents if str(d.meta.get(key)) == value)
    if not chosen:
        known = sorted({str(d.meta[key])[:20] for d in documents if key in d.meta})
        keys = sorted({k for d in documents for k, v in d.meta.items() if isinstance(v, str | int)})
        raise DataError(
            f"where = {where!r}: no document has this value; "
            + (
                f"{key} is one of {', '.join(known[:_SHOWN])}"
                if known
                else f"their meta has {', '.join(keys[:_SHOWN]) or 'nothing to choose by'}"
            )
        )
    return chosen


def _check_labels(name: str, site: SiteConfig, found: tuple[str, ...], notes: list[str]) -> None:
    """A type that is asked for but occurs in no file of the site is a misspelt one."""
    for label in site.label_map:
        if label not in found:
            notes.append(f"{name}: label_map has {label!r}, which is not annotated")
    mapped = sorted({site.label_map.get(label, label) for label in found} - {""})
    for label in (*site.types, *site.test_types):
        if label not in mapped:
            raise DataError(
                f"site {name!r} asks for the type {label!r}, its files have "
                f"{', '.join(mapped) or 'no entity'}; {nearest(label, mapped)}"
            )


_DRAWS = 10_000


def load_documents(job: Job, progress: object = None, cache: Path | None = None) -> Sites:
    """Read every site of a job, and deal their texts into silos where it asks for them.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it.
    """
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
        odd = sorted(set(labels) - set(types)) if types else []
        if odd and set(labels) == set(odd):
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
    sets: tags.TagSets,
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
) -> tags.TagSets:
    """The tag sets of the job's sampling. sites: each one's documents, all parts.

    Raises ConfigError where the types cannot be dealt out, or no draw has enough mentions.
    """
    number = config.sampling(seed)
    counts = [Counter(s.label for d in documents for s in d.spans) for documents in sites]
    for attempt in range(_DRAWS):
        drawn = seed_of(number, "draw", attempt) if attempt else number
        if config.design == "disjoint":
            sets = tags.disjoint(types, len(sites), config.per_site, drawn)
        else:
            sets = tags.appendix_d(types, len(sites), drawn)
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


# ---- what a job asks of this kind of site --------------------------------------------------------


def _tags(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The [tags] of a job. Raises ConfigError where they do not go with its other tables."""
    if "tags" not in table:
        return {}
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
    return {"tags": tags}


def fingerprint(site: SiteData) -> str:
    """SHA-256 of a site's texts, mentions and parts: two runs on the same notes agree in it."""
    digest = hashlib.sha256(repr(site.tags).encode())
    if site.test_types:
        digest.update(repr(site.test_types).encode())
    for part in (site.train, site.valid, site.test):
        digest.update(b"\x1d")
        for document in part:
            digest.update(f"{document.text}\x1e{document.spans}\x1e".encode())
    return digest.hexdigest()


def _findings(job: Job, sites: Sites) -> Report:
    """Of the sites' files, and of what is left for training."""
    chosen = {name for name, site in job.sites.items() if site.split}
    if job.silos and chosen:
        chosen = {site.id for site in sites.data}
    known = {(f.code, f.where) for f in sites.findings}
    found = [
        finding
        for finding in check_sites(list(sites.data), chosen=chosen).findings
        if (finding.code, finding.where) not in known
        and not (finding.code == "bare_documents" and job.synthetic is None)
    ]
    return Report((*sites.findings, *found))


def _one_sentence(site: SiteData) -> SiteData:
    train = next((d for d in site.train if d.text.strip()), None)
    first = sentence_documents([train])[:1] if train else ()
    return replace(site, train=first, valid=(), test=())


def _invented(name: str, site: SiteConfig) -> SiteData:
    types = tuple(dict.fromkeys((*site.types, *site.test_types))) or ("Drug",)
    note = Document("invented", "Took aspirin .", (Span(5, 12, types[0]),))
    return SiteData(name, TagSet(types, site.scheme), (note,), (), ())


def never_right(
    scores: Mapping[str, Mapping[str, Any]], sites: Sequence[SiteData]
) -> Iterator[str]:
    """Types of the test data that no mention was found of, where others were.

    scores: condition → score of each site. sites: their data, with annotations.
    """
    trained = {s.id: Counter(x.label for d in s.train for x in d.spans) for s in sites}
    everywhere: Counter[str] = sum(trained.values(), Counter())
    for site, by_condition in scores.items():
        for condition in ("federated", "alone", "pooled"):
            score = by_condition.get(condition)
            if score and score.get("by_type") and score["relaxed"]["f1"] > 0:
                break
        else:
            continue
        for label, of_type in score["by_type"].items():
            if not of_type["support"] or of_type["strict"]["f1"] > 0:
                continue
            here, all_sites = trained[site][label], everywhere[label]
            why = f"{here} training mentions here, {all_sites} at all sites"
            why += "" if of_type["predicted"] else "; never predicted"
            remedy = "train longer or give more mentions"
            if not all_sites:
                remedy = "name it as the training data do (label_map)"
            elif here == all_sites and len(sites) > 1:
                remedy += "; if other sites have it by another name: label_map"
            yield f"{site}, {condition}: {label} scores 0 ({why}): {remedy}"


KIND = SiteKind(
    "documents",
    SiteConfig,
    SyntheticConfig,
    load_documents,
    fingerprint,
    counts=lambda sites: [],
    tables=frozenset({"tags"}),
    more=_tags,
    size=lambda site: sum(len(split_sentences(d)) for d in site.train),
    hints=never_right,
    findings=_findings,
    one_sentence=_one_sentence,
    invented=_invented,
)
