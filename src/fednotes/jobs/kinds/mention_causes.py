"""Causes of poor results on annotated documents, from scores and from counts.

`count_training` counts a site's data; a run records the counts in its job.json. They
hold names of entity types and numbers, never text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fednotes.core.parsing import mapping
from fednotes.core.types import Document, SiteData
from fednotes.core.wording import list_names
from fednotes.data.checks import RARE
from fednotes.data.text import sentence_lengths, split_sentences, tokenize
from fednotes.jobs.causes import Cause, Evidence, Importance, Setting
from fednotes.jobs.job import Job
from fednotes.jobs.label_maps import LabelMap, find_label_maps
from fednotes.jobs.settings_to_try import list_longer_training, list_personal
from fednotes.privacy.units import group_documents

# A type with this share of all mentions is one in two hundred: batches of a few
# sentences rarely contain it.
RARE_SHARE = 0.005
# Types with more mentions than this are learned even if their share is small.
RARE_MENTIONS = 5 * RARE
# Densities of a type that differ this much between sites are rarely due to the kind of
# notes alone.
DENSITY_RATIO = 5.0
# One sentence in a hundred is more than odd lists and tables that no reader splits.
LONG_SHARE = 0.01
# Encoders read at most 512 sub-words, so a longer sentence is cut anyway.
LONGEST_READ = 512
# With fewer training mentions of all types together, a site hardly changes the model
# and its scores say little.
SMALL_SITE = 50

# Number of mentions by entity type, of each site.
_Types = Mapping[str, Mapping[str, int]]


# ---- the counts of a site ------------------------------------------------------------


def count_training(job: Job, site: SiteData) -> dict[str, Any]:
    """Return the counts of a site's data from which causes are found.

    Args:
        job: The job.
        site: The site's data.
    """
    most_words = _max_words(job)
    lengths: list[int] = []
    for document in site.train:
        bounds = split_sentences(document)
        lengths += sentence_lengths(bounds, tokenize(document.text))
    counts = {
        "sentences": len(lengths),
        "words": sum(lengths),
        "longest": max(lengths, default=0),
        "long": sum(length > most_words for length in lengths) if most_words else 0,
        "mentions": dict(_count_mentions(site.train)),
        "test_mentions": dict(_count_mentions(site.test)),
    }
    if job.privacy is not None:
        counts["units"] = _count_units(job, site, sentences=len(lengths))
    return counts


def _max_words(job: Job) -> int:
    """Return the number of words at which the job's model cuts; 0 if it does not."""
    # Not all kinds of models have this key.
    return int(getattr(job.config.model, "max_tokens", 0))


def _count_mentions(documents: Iterable[Document]) -> Counter[str]:
    return Counter(span.label for document in documents for span in document.spans)


def _count_units(job: Job, site: SiteData, *, sentences: int) -> int:
    """Return the number of units that differential privacy protects at a site."""
    assert job.privacy is not None
    if job.privacy.unit == "sentence":
        return sentences
    return len(group_documents(site.id, site.train, job.privacy.unit))


def _mentions_by_site(facts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the training mentions by type of each site that has counts."""
    return {
        site: dict(mapping(of_site["mentions"]))
        for site, of_site in facts.items()
        if "mentions" in of_site
    }


def _sum_types(types: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for of_site in types:
        total.update(of_site)
    return total


# ---- causes that scores show ---------------------------------------------------------


def find_missed_types(
    job: Job, scores: Mapping[str, Any], facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield a cause for each site with types of which no mention is found.

    A site where no mention of any type is found gets a different remark.

    Args:
        job: The job.
        scores: Site → condition → scores on the site's test data.
        facts: The counts of each site's data; empty if they are unknown, as between
            real sites.
    """
    by_site = _mentions_by_site(facts)
    everywhere = _sum_types(by_site.values())
    for name, by_condition in scores.items():
        condition = _find_condition(by_condition)
        if condition is None:
            continue
        by_type = by_condition[condition]["by_type"]
        tested = {label: score for label, score in by_type.items() if score["support"]}
        missed = {
            label: score
            for label, score in tested.items()
            if score["strict"]["f1"] <= 0
        }
        if not missed:
            continue
        by_support = sorted(missed, key=lambda label: -missed[label]["support"])
        local = by_site.get(name)
        listed = list_names(
            [
                _describe_type(each, missed[each], local, everywhere)
                for each in by_support
            ]
        )
        explained = (
            "" if local is None else " (training mentions here of those at all sites)"
        )
        remedies = _list_remedies(missed, local, everywhere, len(by_site))
        support = {label: missed[label]["support"] for label in by_support}
        yield Cause(
            "types_missed",
            "high" if 2 * len(missed) >= len(tested) else "medium",
            f"{name}, {condition}",
            f"{len(missed)} of {len(tested)} types score 0{explained}: {listed}",
            "; ".join(remedies),
            evidence=(
                Evidence(
                    "test mentions of these types: "
                    + list_names([f"{label} {n:,}" for label, n in support.items()]),
                    "summary.json",
                    {"test_mentions": support},
                ),
            ),
            settings=tuple(_list_type_settings(job, missed, by_site)),
        )


def _find_condition(scores: Mapping[str, Any]) -> str | None:
    """Return the first condition in which any mention is found, or None."""
    for condition in ("federated", "alone", "pooled"):
        score = scores.get(condition)
        if score and score.get("by_type") and score["relaxed"]["f1"] > 0:
            return condition
    return None


def _describe_type(
    label: str,
    score: Mapping[str, Any],
    local: Mapping[str, int] | None,
    everywhere: Mapping[str, int],
) -> str:
    details = []
    if local is not None:
        details.append(f"{local.get(label, 0)} of {everywhere.get(label, 0)}")
    if not score["predicted"]:
        details.append("never predicted")
    return f"{label} ({', '.join(details)})" if details else label


def _list_remedies(
    missed: Mapping[str, Any],
    local: Mapping[str, int] | None,
    everywhere: Mapping[str, int],
    sites: int,
) -> Iterator[str]:
    """Yield possible remedies.

    Args:
        missed: The missed types.
        local: Training mentions of this site by type; None if they are unknown.
        everywhere: Training mentions of all sites by type.
        sites: Number of sites.
    """
    if local is None:
        yield "train longer or give more mentions"
        return
    if any(not everywhere.get(label) for label in missed):
        yield "name types without training mentions as the training data do (label_map)"
    if any(everywhere.get(label) for label in missed):
        yield "train longer or give more mentions"
    if sites > 1 and any(
        0 < local.get(label, 0) == everywhere.get(label) for label in missed
    ):
        yield (
            "a type that only this site mentions may have another name at other sites "
            "(label_map)"
        )


def _list_type_settings(
    job: Job, missed: Mapping[str, Any], types: _Types
) -> Iterator[Setting]:
    """Yield label maps for missed types with similar names, then longer training."""
    maps = [
        each
        for each in find_label_maps(types)
        if each.old in missed or each.new in missed
    ]
    yield from _label_map_settings(job, maps)
    everywhere = _sum_types(types.values())
    if any(everywhere.get(label, 0) >= RARE for label in missed):
        yield from list_longer_training(job)


# ---- causes that counts show, also before training -----------------------------------


def find_data_causes(job: Job, facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield what the counts of the sites' data show about learning.

    Args:
        job: The job.
        facts: The counts of each site's data; empty if they are unknown.
    """
    types = _mentions_by_site(facts)
    if not types:
        return
    yield from _find_alike_names(job, types)
    yield from _find_unmapped_types(job, types)
    yield from _find_untrained_types(job, types, facts)
    yield from _find_rare_types(job, types)
    yield from _find_densities(job, types, facts)
    yield from _find_long_sentences(job, facts)
    yield from _find_small_sites(job, types)


def _find_alike_names(job: Job, types: _Types) -> Iterator[Cause]:
    """Yield types whose names at two sites seem to mean the same."""
    maps = find_label_maps(types)
    if alike := [each for each in maps if each.is_active]:
        message = "sites write the same entity type differently"
        yield _describe_names("names_alike", message, job, types, alike)
    if related := [each for each in maps if not each.is_active]:
        message = "types of different sites may be the same"
        yield _describe_names("names_related", message, job, types, related)


def _describe_names(
    code: str,
    message: str,
    job: Job,
    types: _Types,
    maps: Sequence[LabelMap],
) -> Cause:
    """Return the cause that sites have several names for a type.

    Names do not matter in training while each site has an output layer of its own.
    """
    importance: Importance = "low"
    effect = "which matters once sites share the output layer"
    if job.module.shares_outputs(job.config):
        importance = "high" if code == "names_alike" else "medium"
        effect = "so they are learned as different types"
    return Cause(
        code,
        importance,
        list_names(list(dict.fromkeys(each.site for each in maps))),
        f"{message}, {effect}",
        "rename them by label_map, if they are the same",
        evidence=tuple(
            Evidence(
                f"{each.site}: {each.old} ({types[each.site][each.old]:,} training "
                f"mentions) {each.reason}",
                "job.json",
                {"mentions": types[each.site][each.old]},
            )
            for each in maps
        ),
        settings=tuple(_label_map_settings(job, maps)),
    )


def _label_map_settings(job: Job, maps: Sequence[LabelMap]) -> Iterator[Setting]:
    """Yield the label maps of the sites of a job, completed by these names."""
    by_site: dict[str, dict[str, str]] = {}
    for each in maps:
        by_site.setdefault(each.site, {})[each.old] = each.new
    for site, names in by_site.items():
        # Simulated silos have no table of their own.
        if site in job.sites:
            current = dict(job.sites[site].label_map)
            # A name that the job has already mapped is mapped to the new one.
            merged = {old: names.get(new, new) for old, new in current.items()}
            value = {old: new for old, new in {**names, **merged}.items() if old != new}
            yield Setting.of("sites", site, "label_map", value=value, current=current)


def _find_unmapped_types(job: Job, types: _Types) -> Iterator[Cause]:
    """Yield types that only one site has although its label_map renames others."""
    maps = find_label_maps(types)
    alike = {(each.site, each.old) for each in maps}
    targets = {each.new for each in maps}
    for site, config in job.sites.items():
        others = _sum_types(of for name, of in types.items() if name != site)
        lone = {
            label: number
            for label, number in types.get(site, {}).items()
            if not (label in others or label in targets or (site, label) in alike)
        }
        if not (others and lone and config.label_map):
            continue
        listed = list_names([f"{label} {number:,}" for label, number in lone.items()])
        yield Cause(
            "types_unmapped",
            "medium",
            site,
            f"label_map leaves {len(lone)} types under names that no other site uses",
            'rename them, or drop them with ""',
            evidence=(
                Evidence(
                    f"training mentions: {listed}", "job.json", {"mentions": lone}
                ),
            ),
            settings=(
                Setting.of(
                    "sites",
                    site,
                    "label_map",
                    value={**config.label_map, **dict.fromkeys(lone, "")},
                    current=dict(config.label_map),
                ),
            ),
        )


def _find_untrained_types(
    job: Job, types: _Types, facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield types of the test data that no site has in its training data."""
    everywhere = _sum_types(types.values())
    for site, of_site in facts.items():
        tested = mapping(of_site.get("test_mentions"))
        unknown = {
            label: number for label, number in tested.items() if label not in everywhere
        }
        if not unknown:
            continue
        listed = list_names([f"{label} {n:,}" for label, n in unknown.items()])
        with_test = {**types, site: {**types.get(site, {}), **unknown}}
        maps = [each for each in find_label_maps(with_test) if each.old in unknown]
        yield Cause(
            "types_untrained",
            "high",
            site,
            f"{len(unknown)} types of its test data have no training mention anywhere",
            "name them as the training data do (label_map), or drop them",
            evidence=(
                Evidence(
                    f"test mentions: {listed}", "job.json", {"test_mentions": unknown}
                ),
            ),
            settings=tuple(_label_map_settings(job, maps)),
        )


def _find_rare_types(job: Job, types: _Types) -> Iterator[Cause]:
    """Yield types with too few training mentions at all sites together."""
    everywhere = _sum_types(types.values())
    total = everywhere.total()
    rare = {
        label: number
        for label, number in sorted(everywhere.items(), key=lambda item: item[1])
        if number < RARE or (number < RARE_MENTIONS and number < RARE_SHARE * total)
    }
    if not rare:
        return
    listed = list_names([f"{label} {number:,}" for label, number in rare.items()], 10)
    common = [label for label in everywhere if label not in rare]
    settings: tuple[Setting, ...] = ()
    is_sampled = job.tags is not None and job.tags.is_sampled
    # Generated sites have fixed types.
    if common and job.synthetic is None and not is_sampled:
        settings = (Setting.of("tags", "types", value=sorted(common)),)
    yield Cause(
        "types_rare",
        "medium",
        "all sites",
        f"{len(rare)} of {len(everywhere)} types have fewer than {RARE} training "
        f"mentions, or under {RARE_SHARE:.1%} of all",
        "annotate more of them, merge them with others by label_map, or leave them out",
        evidence=(
            Evidence(
                f"training mentions of {total:,}: {listed}",
                "job.json",
                {"mentions": rare, "of": total},
            ),
        ),
        settings=settings,
    )


def _find_densities(
    job: Job, types: _Types, facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield types that one site annotates much more often than another."""
    words = {site: int(facts[site].get("words", 0)) for site in types}
    # Type → the sites that annotate it most and least often, with their densities.
    extremes: dict[str, dict[str, float]] = {}
    for label in _sum_types(types.values()):
        # per 1,000 words, at the sites that have the type
        densities = {
            site: 1000 * counts[label] / words[site]
            for site, counts in types.items()
            if counts.get(label) and words[site]
        }
        if len(densities) < 2:
            continue
        highest = max(densities, key=densities.__getitem__)
        lowest = min(densities, key=densities.__getitem__)
        expected = densities[highest] * words[lowest] / 1000
        is_common = types[highest][label] >= RARE and expected >= RARE
        if is_common and densities[highest] >= DENSITY_RATIO * densities[lowest]:
            extremes[label] = {
                highest: densities[highest],
                lowest: densities[lowest],
            }
    if not extremes:
        return
    evidence = [
        Evidence(
            f"{label}: "
            + ", ".join(f"{value:.2g} at {site}" for site, value in densities.items())
            + " per 1,000 words",
            "job.json",
            {"type": label, "per_1000_words": densities},
        )
        for label, densities in extremes.items()
    ]
    sites = dict.fromkeys(site for pair in extremes.values() for site in pair)
    yield Cause(
        "densities_differ",
        "medium",
        list_names(list(sites)),
        f"sites annotate {list_names(list(extremes))} at very different rates, so "
        "their notes or their guidelines differ",
        "compare the guidelines; if they differ, leave more of the model to each site",
        evidence=tuple(evidence[:5]),
        settings=list_personal(job),
    )


def _find_long_sentences(job: Job, facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield the sites with many sentences that the model reads in pieces."""
    most_words = _max_words(job)
    if not most_words:
        return
    shares = {
        site: of_site["long"] / of_site["sentences"]
        for site, of_site in facts.items()
        if of_site.get("sentences")
    }
    cut = {site: share for site, share in shares.items() if share >= LONG_SHARE}
    if not cut:
        return
    longest = max(facts[site]["longest"] for site in cut)
    importance: Importance = "medium" if max(cut.values()) >= 5 * LONG_SHARE else "low"
    settings: tuple[Setting, ...] = ()
    if most_words < LONGEST_READ:
        value = min(LONGEST_READ, 64 * -(-longest // 64))
        settings = (Setting.of("model", "max_tokens", value=value, current=most_words),)
    yield Cause(
        "sentences_cut",
        importance,
        list_names(list(cut)),
        f"sentences longer than {most_words} words are cut, so the model does not see "
        "their other part",
        "let the model read longer ones, or break lines at sentence ends in the files",
        evidence=tuple(
            Evidence(
                f"{site}: {share:.1%} of {facts[site]['sentences']:,} training "
                f"sentences; the longest has {facts[site]['longest']:,} words",
                "job.json",
                {"share": share, "longest": facts[site]["longest"]},
            )
            for site, share in cut.items()
        ),
        settings=settings,
    )


def _find_small_sites(job: Job, types: _Types) -> Iterator[Cause]:
    """Yield the sites with too few training mentions to matter."""
    mentions = {site: sum(of_site.values()) for site, of_site in types.items()}
    small = {site: number for site, number in mentions.items() if number < SMALL_SITE}
    if not small or len(small) == len(mentions) == 1:
        return
    settings: tuple[Setting, ...] = ()
    if getattr(job.config, "aggregation", "") == "uniform":
        settings = (
            Setting.of("training", "aggregation", value="size", current="uniform"),
        )
    yield Cause(
        "sites_small",
        "medium" if 2 * len(small) >= len(mentions) else "low",
        list_names(list(small)),
        f"fewer than {SMALL_SITE} training mentions, so these sites teach little and "
        "their scores are uncertain",
        "add annotated notes there, or read their scores as rough",
        evidence=tuple(
            Evidence(
                f"{site}: {number:,} training mentions",
                "job.json",
                {"mentions": number},
            )
            for site, number in small.items()
        ),
        settings=settings,
    )
