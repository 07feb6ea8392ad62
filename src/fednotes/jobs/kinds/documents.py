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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    Problem,
    nearest,
    within,
)
from fednotes.core.parsing import shipped
from fednotes.core.seeds import seed_of
from fednotes.core.settings import build
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.wording import list_names
from fednotes.data import synthetic, tags
from fednotes.data.checks import (
    Finding,
    bare_documents,
    check_sites,
    in_two_parts,
    other_size,
    problem_findings,
    unlearnt,
)
from fednotes.data.formats import examine
from fednotes.data.formats.problems import Problems
from fednotes.data.notes import Key
from fednotes.data.notes.sites import assign
from fednotes.data.split import (
    mask_overlap,
    sentence_documents,
    split,
    subsample,
    without_leaks,
)
from fednotes.data.tags import FlattenCounts, flatten, relabel, types_of
from fednotes.data.text import split_sentences
from fednotes.jobs.job import (
    ConfigTable,
    Job,
    KindTables,
    SiteConfig,
    SiteKind,
    Sites,
    SyntheticConfig,
    TagsConfig,
)
from fednotes.jobs.kinds.compare_documents import compare_documents
from fednotes.privacy.secure_sum.crypto import joined

Documents = tuple[Document, ...]
Parts = dict[str, Documents]
Types = tuple[str, ...]
_PARTS = ("train", "valid", "test")
_DRAWS = 10_000
HINTS: Mapping[str, str] = shipped("jobs/hints.toml")
_SHOWN = 12  # values in a message


def load_documents(
    job: Job, progress: object = None, cache: Path | None = None
) -> Sites:
    """Read every site of a job, and deal their texts into silos where it asks for them.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it.
    """
    sites = _generated(job) if job.synthetic is not None else _Corpora(job).sites()
    return _silos(job, sites) if job.silos else sites


def _generated(job: Job) -> Sites:
    made = synthetic.generate(job.synthetic.sites, job.synthetic.sentences, job.seed)
    complete = tuple(s.complete for s in made)
    if job.tags is None:
        return Sites(tuple(s.data for s in made), complete)
    types = _complete(job.tags, [site.tags.types for site in complete])
    texts = [(*s.train, *s.valid, *s.test) for s in complete]
    return _sampled(_draw(job.tags, job.seed, types, texts), types, complete)


class _Corpora:
    """A job's files on their way to its sites' data. notes, findings: what was met on
    it."""

    def __init__(self, job: Job) -> None:
        self.job, self.notes, self.findings = job, list[str](), list[Finding]()

        @cache
        def read_once(
            path: Path, format: str, encoding: str
        ) -> tuple[Documents, Problems]:
            return examine(path, format or None, encoding)

        self._read_once = read_once  # sites may share a file

    def sites(self) -> Sites:
        """The data of all sites."""
        job, config = self.job, self.job.tags
        raw = self._raw()
        found = {name: types_of(chain(*parts.values())) for name, parts in raw.items()}
        kept, complete = self._kept(found)
        whole = {
            name: self._parts(name, raw.pop(name), kept[name]) for name in job.sites
        }
        for name, parts in whole.items():
            self.findings += bare_documents(tuple(chain(*parts.values())), name)
        full = tuple(self._full(name, whole) for name in job.sites)
        if config is not None and config.is_sampled:
            everything = [chain(*parts.values()) for parts in whole.values()]
            made = _sampled(
                _draw(config, job.seed, complete, everything), complete, full
            )
            return replace(
                made,
                remarks=(*self.notes, *made.remarks),
                findings=tuple(self.findings),
            )
        own = [job.sites[site.id] for site in full]
        data = tuple(
            _kept_types(site, site.tags.types, of.types or None, of.test_types)
            for site, of in zip(full, own, strict=True)
        )
        if config is not None:
            _require_learnable(config.types, data)
            self.notes += _tag_notes(data)
        self.findings += chain(*map(unlearnt, data))
        return Sites(data, None, tuple(self.notes), tuple(self.findings))

    def _raw(self) -> dict[str, Parts]:
        """The documents of every site's `path`, or train, valid and test, with mapped
        labels.

        Raises DataError of the problems of all sites together.
        """
        problems: list[Problem] = []
        first = None
        raw: dict[str, Parts] = {}
        for name, site in self.job.sites.items():
            try:
                raw[name] = self._mapped(name, site)
            except DataError as error:
                first = first or error
                problems += error.problems or (Problem("", 0, "site", str(error)),)
        if first is None:
            return raw
        raise first if len(problems) == 1 else DataError.of(problems)

    def _mapped(self, name: str, site: SiteConfig) -> Parts:
        raw = self._files(name, site)
        if len(raw) > 1:
            self.findings += in_two_parts(raw, name)
        found = types_of(chain(*raw.values()))
        for label in site.label_map:
            if label not in found:
                self.notes.append(
                    f"{name}: label_map has {label!r}, which is not annotated"
                )
        mapped = sorted({site.label_map.get(label, label) for label in found} - {""})
        if "O" in mapped:
            raise ConfigError(
                f"{name}: mentions are called 'O', which is the tag of words outside every "
                "mention: give them another name by label_map"
            )
        for label in (*site.types, *site.test_types):
            if label not in mapped:  # misspelt
                raise DataError(
                    f"site {name!r} asks for the type {label!r}, its files have "
                    f"{', '.join(mapped) or 'no entity'}; {nearest(label, mapped)}"
                )
        with within(f"site {name!r}", FednotesError):
            chosen = {
                part: _where(documents, site.where) for part, documents in raw.items()
            }
            if site.share:
                number, of = site.part_of_corpus
                shares = {str(i): 1 / of for i in range(1, of + 1)}
                dealt = split(chosen["path"], shares, site.split, self.job.seed)
                chosen["path"] = dealt[str(number)]
        self._compare_size(name, site, chosen)
        return {
            part: relabel(documents, site.label_map)
            for part, documents in chosen.items()
        }

    def _compare_size(self, name: str, site: SiteConfig, parts: Parts) -> None:
        """Note where a corpus has another number of sentences than a publication
        counts."""
        expected = site.expected_sentences
        if not expected:
            return
        documents = chain.from_iterable(parts.values())
        counted = sum(len(split_sentences(document)) for document in documents)
        if counted != expected:
            self.findings.append(other_size(name, counted, expected))

    def _files(self, name: str, site: SiteConfig) -> Parts:
        """The documents of a site's files.

        Raises DataError of the problems of all of them.
        """
        raw: Parts = {}
        wrong: list[Problem] = []
        for part in ("path", *_PARTS):
            if not (text := getattr(site, part)):
                continue
            try:
                with within(f"site {name!r}", ConfigError):
                    path = self.job.locate(text, f"sites.{name}.{part}")
                    raw[part], problems = self._read_once(
                        path, site.format, site.encoding
                    )
                problems.refuse(site.on_error, raw[part])
            except DataError as error:
                wrong += error.problems or (Problem("", 0, "file", str(error)),)
                continue
            self.findings += problem_findings(problems, name, Path(text).name)
        if wrong:
            raise DataError.of(wrong)
        return raw

    def _kept(
        self, found: Mapping[str, Types]
    ) -> tuple[dict[str, Types | None], Types]:
        """The types that each site's documents are read with (None for all of them),
        and the complete tag set.

        found: in its files. Raises ConfigError where that does not go with [tags].
        """
        sites, config = self.job.sites, self.job.tags
        named = {name: _named(site) for name, site in sites.items()}
        asked = {
            name: named[name] if s.types else found[name] for name, s in sites.items()
        }
        if config is None:
            return {
                name: asked[name] if s.types else None for name, s in sites.items()
            }, ()
        complete = _complete(config, asked.values())
        for name, site in sites.items():
            if (
                config.is_sampled
                and site.types
                and (lacks := set(complete) - set(named[name]))
            ):
                raise ConfigError(
                    f"site {name!r} keeps {', '.join(named[name])}, but design = "
                    f"{config.design!r} needs the complete tag set there, also "
                    f'{", ".join(sorted(lacks))}: leave out its `types`, or set design = "given"'
                )
            other = [t for t in named[name] if t not in complete]
            if not config.is_sampled and other:
                raise ConfigError(
                    f"site {name!r} has the type {other[0]!r}, [tags] types does not; "
                    f"{nearest(other[0], complete)}"
                )
        for name, labels in found.items():
            if odd := sorted(set(labels) - set(complete)):
                what = f"annotates {', '.join(odd)}"
                if len(odd) == len(set(labels)):
                    raise ConfigError(
                        f"site {name!r} {what}; [tags] types has {', '.join(complete)}: map its "
                        "labels to these in label_map, or add them to types"
                    )
                self.notes.append(f"{name}: {what}, which [tags] types lacks: left out")
        if config.is_sampled:
            return dict.fromkeys(sites, complete), complete
        return {
            name: tuple(t for t in complete if t in asked[name]) for name in sites
        }, complete

    def _parts(self, name: str, raw: Parts, types: Types | None) -> Parts:
        """Train, valid and test documents with flat labels."""
        site: SiteConfig = self.job.sites[name]
        flat = {part: self._flat(name, site, part, raw[part], types) for part in raw}
        with within(f"site {name!r}", FednotesError):
            parts = self._split(site, flat)
        for part in ("valid", "test") if site.train and site.repeats == "drop" else ():
            parts["train"], dropped = without_leaks(parts["train"], parts[part])
            if part == "test" and not site.valid:  # valid was held out of train
                parts["valid"], more = without_leaks(parts["valid"], parts["test"])
                dropped += more
            if dropped:
                self.notes.append(
                    f"{name}: {dropped} training sentences dropped that occur in {part}"
                )
        return parts

    def _flat(
        self,
        name: str,
        site: SiteConfig,
        part: str,
        raw: Documents,
        types: Types | None,
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
                self.notes.append(
                    f"{name}: {number} {what} mentions in {where} ({site.flatten})"
                )
        return tuple(documents)

    def _split(self, site: SiteConfig, flat: Mapping[str, Documents]) -> Parts:
        valid, test = site.valid_fraction, site.test_fraction
        if site.path:
            fractions = {"train": 1 - valid - test, "valid": valid, "test": test}
            parts = split(flat["path"], fractions, site.split, self.job.seed)
            return self._held_out(site, parts)
        parts = {part: flat.get(part, ()) for part in _PARTS}
        if not parts["valid"] and valid:
            held = {"train": 1 - valid, "valid": valid}
            parts |= split(parts["train"], held, site.split, self.job.seed)
        return self._held_out(site, parts)

    def _held_out(self, site: SiteConfig, parts: Parts) -> Parts:
        """Return the parts with `hold_out` of the training data in an empty validation
        part."""
        if parts["valid"] or not site.hold_out:
            return parts
        shares = {"train": 1 - site.hold_out, "valid": site.hold_out}
        return parts | split(parts["train"], shares, site.split, self.job.seed)

    def _full(self, name: str, whole: Mapping[str, Parts]) -> SiteData:
        """A site with all the types that its documents were read with, after
        `mask_overlap`, `fraction` and the most sentences of each part."""
        site: SiteConfig = self.job.sites[name]
        own, seed = dict(whole[name]), self.job.seed
        if not own["train"]:
            raise ConfigError(
                f"site {name!r}: no training document is left after splitting"
            )
        types = site.types or types_of(own["train"])  # masked or unused mentions count
        if not types:
            raise ConfigError(
                f"site {name!r}: no entity is annotated in its training data; "
                "check its format and label_map"
            )
        if site.mask_overlap:
            others = [other["train"] for key, other in whole.items() if key != name]
            own["train"] = mask_overlap(own["train"], others, site.mask_overlap, seed)
        if site.fraction < 1:
            own["train"] = subsample(
                sentence_documents(own["train"]), site.fraction, seed
            )
        limits = (site.max_sentences, site.max_valid_sentences, site.max_test_sentences)
        for part, most in zip(_PARTS, limits, strict=True):
            sentences = sentence_documents(own[part]) if most else ()
            if len(sentences) > most > 0:
                own[part] = subsample(sentences, most / len(sentences), seed)
                self.notes.append(
                    f"{name}: {most:,} of {len(sentences):,} sentences of {part} are used"
                )
        tagset = TagSet(types, site.scheme)
        return SiteData(name, tagset, own["train"], own["valid"], own["test"])


def _named(site: SiteConfig) -> Types:
    return tuple(dict.fromkeys(site.types + site.test_types))


def _where(documents: Documents, where: str) -> Documents:
    """The documents whose meta has the value; all if nothing is asked."""
    key, _, value = where.partition("=")
    chosen = tuple(d for d in documents if not where or str(d.meta.get(key)) == value)
    if chosen or not where:
        return chosen
    if known := sorted({str(d.meta[key])[:20] for d in documents if key in d.meta}):
        told = f"{key} is one of {', '.join(known[:_SHOWN])}"
    else:
        keys = sorted(
            {
                k
                for d in documents
                for k, v in d.meta.items()
                if isinstance(v, str | int)
            }
        )
        told = f"their meta has {', '.join(keys[:_SHOWN]) or 'nothing to choose by'}"
    raise DataError(f"where = {where!r}: no document has this value; {told}")


def _kept_types(
    site: SiteData, types: Types, own: Types | None, test_types: Types = ()
) -> SiteData:
    """A site of these types whose data keep `own` (None: all), its test part
    `test_types`."""
    train, valid = relabel(site.train, {}, own), relabel(site.valid, {}, own)
    test = relabel(site.test, {}, test_types or own)
    return SiteData(
        site.id, TagSet(types, site.tags.scheme), train, valid, test, test_types
    )


def _sampled(sets: tags.TagSets, types: Types, full: Sequence[SiteData]) -> Sites:
    """Sites whose training and validation data keep the types that were drawn for them."""
    unused = [t for t in types if not any(t in own for own in sets)]
    types = tuple(t for t in types if t not in unused)
    complete = tuple(_kept_types(site, types, types) for site in full)
    pairs = zip(complete, sets, strict=True)
    data = tuple(_kept_types(site, own, own, types) for site, own in pairs)
    left = f"annotated at no site in this sampling, left out: {', '.join(unused)}"
    return Sites(data, complete, (*([left] if unused else ()), *_tag_notes(data)))


def _draw(
    config: TagsConfig, seed: int, types: Types, sites: Sequence[Iterable[Document]]
) -> tags.TagSets:
    """The tag sets of the job's sampling. sites: each one's documents, all parts.

    Raises ConfigError where the types cannot be dealt out, or no draw has enough
        mentions.
    """
    number = config.find_sampling(seed)
    counts = [
        Counter(s.label for d in documents for s in d.spans) for documents in sites
    ]
    for attempt in range(_DRAWS):
        drawn = seed_of(number, "draw", attempt) if attempt else number
        if config.design == "disjoint":
            sets = tags.draw_disjoint(types, len(sites), config.per_site, drawn)
        else:
            sets = tags.draw_appendix_d(types, len(sites), drawn)
        pairs = zip(counts, sets, strict=True)
        if all(found[t] >= config.min_mentions for found, own in pairs for t in own):
            return sets
    raise ConfigError(
        f"[tags] min_mentions = {config.min_mentions}: in {_DRAWS:,} draws some site never "
        "mentions one of its types so often; lower it, or leave rare types out of [tags] types"
    )


def _require_learnable(types: Types, sites: Sequence[SiteData]) -> None:
    """Every type of the complete tag set is in some site's."""
    for label in types:
        if not any(label in site.tags.types for site in sites):
            own = "; ".join(
                f"{site.id}: {', '.join(site.tags.types)}" for site in sites
            )
            raise ConfigError(
                f"[tags] types has {label!r}, which no site annotates in its training data ({own})"
            )


def _tag_notes(sites: Sequence[SiteData]) -> Iterator[str]:
    """Which types each site annotates, and which of them its training data never
    mention."""
    number = len({label for site in sites for label in site.tags.types})
    for site in sites:
        yield f"{site.id}: annotates {', '.join(site.tags.types)} (of {number} types)"
        found = types_of(site.train)
        if missing := [label for label in site.tags.types if label not in found]:
            yield f"{site.id}: no training mention of {', '.join(missing)}"


def _complete(config: TagsConfig, annotated: Iterable[Sequence[str]]) -> Types:
    """The complete tag set. Raises ConfigError for a type that occurs at no site."""
    occurring = sorted({label for own in annotated for label in own})
    for label in config.types:
        if label not in occurring:
            raise ConfigError(
                f"[tags] types has {label!r}, which is annotated at no site; "
                f"{nearest(label, occurring)}"
            )
    return config.types or tuple(occurring)


# ---- silos ---------------------------------------------------------------------------

_REMEDIES = {
    "train": "or give more documents",
    "valid": "or set valid_fraction higher, or to 0",
    "test": "or give more test documents",
}


def _silos(job: Job, sites: Sites) -> Sites:
    """The sites' documents in `silo1` …, train, valid and test each dealt out by
    itself.

    Generated sites are taken with their complete annotation. A part that no site has no
    silo has. Sentences that were cut out of a document go where it goes.

    Raises ConfigError where sites annotate different types or schemes, or a part has
    fewer documents (patients) than there are silos.
    """
    assert job.silos is not None
    whole = sites.complete if job.synthetic and sites.complete else sites.data
    _require_alike(whole)
    number, by = job.silos.number, job.silos.by or "document"
    unit = "patients" if by == "patient" else "documents"
    parts: dict[str, list[list[Document]]] = {}
    told = []
    for part, remedy in _REMEDIES.items():
        given = [
            (_unit(site.id, d, by), d) for site in whole for d in getattr(site, part)
        ]
        parts[part] = [[] for _ in range(number)]
        if not given:
            continue
        keys = {key for key, _ in given}
        try:
            where = assign(keys, number, job.seed)
        except DataError as error:
            raise ConfigError(
                f"[silos] number = {number}: the {part} data have {len(keys)} {unit}, so a silo "
                f"would have none: ask for {len(keys)} silos at most, {remedy}"
            ) from error
        for key, document in given:
            parts[part][where[key]].append(document)
        told.append(f"{part} {len(keys):,}")
    first = whole[0]
    made = []
    for at in range(number):
        train, valid, test = (tuple(parts[part][at]) for part in _PARTS)
        made.append(
            SiteData(f"silo{at + 1}", first.tags, train, valid, test, first.test_types)
        )
    dealt = f"{unit} in {number} silos: {', '.join(told)}"
    return Sites(tuple(made), None, (*sites.remarks, dealt), sites.findings)


def _unit(site: str, document: Document, by: str) -> Key:
    """What is never parted: a patient, or the note that a document is or was cut out
    of."""
    if by == "patient" and document.patient is not None:
        return ("patient", document.patient)
    return ("document", site, str(document.meta.get("document", document.id)))


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


# ---- what a job asks of this kind of site --------------------------------------------


def _read_tags(
    table: Mapping[str, Any], _preset: Mapping[str, Any], where: str
) -> KindTables:
    """Read the [tags] table of a job, if it has one.

    Raises:
        ConfigError: The table does not fit the job's other tables.
    """
    if "tags" not in table:
        return KindTables()
    tags = build(TagsConfig, table["tags"], f"{where} [tags]")
    if tags.is_sampled and "silos" in table:
        raise ConfigError(
            f"{where} [silos]: silos annotate alike, design = {tags.design!r} samples other types "
            "for each site: leave out one of the two"
        )
    if not tags.is_sampled and "synthetic" in table:
        raise ConfigError(
            f'{where} [tags]: generated sites have types of their own: design = "disjoint" or '
            '"appendix-d" samples others'
        )
    for name, site in table.get("sites", {}).items():
        if tags.is_sampled and site.get("test_types"):
            raise ConfigError(
                f"{where} [sites.{name}]: test_types does not go with design = {tags.design!r}, "
                "which tests on the complete tag set"
            )
    return KindTables(tags=tags)


def fingerprint(site: SiteData) -> str:
    """SHA-256 of a site's texts, mentions and parts: two runs on the same notes agree
    in it."""
    digest = hashlib.sha256(repr(site.tags).encode())
    if site.test_types:
        digest.update(repr(site.test_types).encode())
    for part in (site.train, site.valid, site.test):
        digest.update(b"\x1d")
        for document in part:
            digest.update(f"{document.text}\x1e{document.spans}\x1e".encode())
    return digest.hexdigest()


def _findings(job: Job, sites: Sites) -> tuple[Finding, ...]:
    """Of the sites' files, and of what is left for training."""
    chosen = {name for name, site in job.sites.items() if site.split}
    if job.silos and chosen:
        chosen = {site.id for site in sites.data}
    known = {(f.code, f.where) for f in sites.findings}
    found = [
        finding
        for finding in check_sites(sites.data, chosen=chosen)
        if (finding.code, finding.where) not in known
        and not (finding.code == "bare_documents" and job.synthetic is None)
    ]
    return (*sites.findings, *found)


def _one_sentence(site: SiteData) -> SiteData:
    train = next((d for d in site.train if d.text.strip()), None)
    first = sentence_documents([train])[:1] if train else ()
    return replace(site, train=first, valid=(), test=())


def _invented(name: str, site: SiteConfig) -> SiteData:
    types = _named(site) or ("Drug",)
    note = Document("invented", "Took aspirin .", (Span(5, 12, types[0]),))
    return SiteData(name, TagSet(types, site.scheme), (note,), (), ())


def never_right(
    scores: Mapping[str, Mapping[str, Any]], sites: Sequence[SiteData]
) -> Iterator[str]:
    """For each site the types of its test data that no mention was found of, where
    others were; what it has most of first.

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
        judged = {label: of for label, of in score["by_type"].items() if of["support"]}
        found, remedies = [], set[str]()
        for label, of in sorted(judged.items(), key=lambda each: -each[1]["support"]):
            if of["strict"]["f1"] > 0:
                continue
            here, all_sites = trained[site][label], everywhere[label]
            never = "" if of["predicted"] else HINTS["never_predicted"]
            told = {
                "label": label,
                "here": here,
                "everywhere": all_sites,
                "never": never,
            }
            found.append(HINTS["type_of_score_0"].format(**told))
            remedies.add("more_mentions" if all_sites else "name_as_training_data")
            if 0 < here == all_sites and len(sites) > 1:
                remedies.add("another_name")
        if found:
            counted = {
                "count": len(found),
                "all": len(judged),
                "types": list_names(found),
            }
            told = {
                "remedies": "; ".join(
                    text for key, text in HINTS.items() if key in remedies
                )
            }
            yield HINTS["types_of_score_0"].format(
                site=site, condition=condition, **counted, **told
            )


def _described(job: Job, site: SiteData) -> dict[str, Any]:
    """Return the tag set of a site, and how its labels are renamed."""
    return {
        "types": site.tags.types,
        "scheme": site.tags.scheme,
        "label_map": dict(job.sites[site.id].label_map),
    }


def training_examples(site: SiteData) -> dict[str, Iterator[bytes]]:
    """Return the training sentences of a site as bytes, in several views.

    Returns:
        The sentences by the name of the view: alone, with the places of their mentions,
        and with their labels too.
    """
    sentences = sentence_documents(site.train)
    return {
        "sentences": (joined(sentence.text) for sentence in sentences),
        "sentences with mentions": (_annotated(s, labels=False) for s in sentences),
        "sentences with labels": (_annotated(s, labels=True) for s in sentences),
    }


def _annotated(sentence: Document, *, labels: bool) -> bytes:
    """Return a sentence with the places of its mentions, and with their labels on
    request."""
    parts: list[str | int] = [sentence.text]
    for span in sorted(sentence.spans):
        parts.append(str(span.pieces))
        if labels:
            parts.append(span.label)
    return joined(*parts)


KIND = SiteKind(
    name="documents",
    site_config=SiteConfig,
    synthetic_config=SyntheticConfig,
    load=load_documents,
    fingerprint=fingerprint,
    tabulate_counts=lambda sites: [],
    source_keys=("path", "train"),
    source_placeholder={"path": "notes"},
    tables={"tags": ConfigTable("[tags]", TagsConfig)},
    read_tables=_read_tags,
    collect_tables=lambda job: {} if job.tags is None else {"tags": job.tags},
    count_examples=lambda site: sum(len(split_sentences(d)) for d in site.train),
    make_stand_in=lambda site, name, size: replace(
        site, id=name, train=tuple(islice(cycle(sentence_documents(site.train)), size))
    ),
    find_hints=never_right,
    check=_findings,
    compare=compare_documents,
    metrics={
        name: f"{name} F1" for name in ("strict", "relaxed", "relaxed_one_to_one")
    },
    encode_examples=training_examples,
    describe=_described,
    shrink=_one_sentence,
    invent_site=_invented,
)
