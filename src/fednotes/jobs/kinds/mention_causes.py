"""Causes of poor results on annotated documents, from scores and from counts.

`count_training` counts a site's data; a run records the counts in its job.json. They
hold names of entity types and numbers, never text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fednotes.core.parsing import as_mapping
from fednotes.core.types import Document, SiteData
from fednotes.core.wording import format_count, list_names
from fednotes.data.checks import RARE
from fednotes.data.text import count_tokens_by_sentence, split_sentences, tokenize
from fednotes.jobs.causes import (
    Cause,
    Evidence,
    Importance,
    Setting,
    limit_importance,
)
from fednotes.jobs.job import Job
from fednotes.jobs.label_maps import KnownNames, LabelMap, find_label_maps
from fednotes.jobs.settings_to_try import list_longer_training, list_personal_settings
from fednotes.jobs.unshared_types import find_common_types
from fednotes.privacy.units import group_documents
from fednotes.taggers.type_scorer import TypeScorerConfig

# A type with this share of all mentions is one in two hundred: batches of a few
# sentences rarely contain it.
RARE_SHARE = 0.005
# Types with more mentions than this are learned even if their share is small.
RARE_MENTIONS = 5 * RARE
# Densities of a type that differ this much between sites are rarely due to the kind of
# notes alone.
DENSITY_RATIO = 5.0
# Mentions of a type cluster in a few notes, so a density of fewer mentions is rough.
DENSE_MENTIONS = 100
# Test mentions that no model can find cost this share of recall at once.
UNTRAINED_SHARE = 0.05
# One sentence in a hundred is more than odd lists and tables that no reader splits.
LONG_SHARE = 0.01
# Encoders read at most 512 sub-words, so a longer sentence is cut anyway.
LONGEST_READ = 512
# Proposed values of max_tokens are multiples of this.
LENGTH_STEP = 64
# With fewer training mentions of all types together, a site hardly changes the model
# and its scores say little.
SMALL_SITE = 50
# Maximum number of label maps to propose for one cause. Each site may have such a
# cause, and nobody reads more.
MAX_MAPS = 100

# A threshold is wrong if the numbers of predicted and of annotated mentions differ by
# more than this factor.
FAR = 2.0
# The proposed threshold is higher or lower by this factor, and not above the next.
THRESHOLD_STEP = 5.0
HIGHEST_THRESHOLD = 0.5

# The conditions in the order in which their scores show causes.
_CONDITIONS = ("federated", "alone", "pooled")
# Site → entity type → number of training mentions.
_MentionCounts = Mapping[str, Mapping[str, int]]


# ---- the counts of a site ------------------------------------------------------------


def count_training(job: Job, site: SiteData) -> dict[str, Any]:
    """Return the counts of a site's data from which causes are found.

    Args:
        job: The job.
        site: The site's data.
    """
    most_words = _read_max_words(job)
    lengths: list[int] = []
    for document in site.train:
        bounds = split_sentences(document)
        lengths += count_tokens_by_sentence(bounds, tokenize(document.text))
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


def _read_max_words(job: Job) -> int:
    """Return the number of words at which the job's model cuts; 0 if it does not."""
    # Not all kinds of models have this key.
    return int(getattr(job.config.model, "max_tokens", 0))


def _count_mentions(documents: Iterable[Document]) -> Counter[str]:
    """Return the number of mentions of each entity type."""
    return Counter(span.label for document in documents for span in document.spans)


def _count_units(job: Job, site: SiteData, *, sentences: int) -> int:
    """Return the number of units that differential privacy protects at a site."""
    assert job.privacy is not None
    if job.privacy.unit == "sentence":
        return sentences
    return len(group_documents(site.id, site.train, job.privacy.unit))


def _read_mention_counts(facts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the number of training mentions: site → type → number."""
    return {
        site: dict(as_mapping(of_site["mentions"]))
        for site, of_site in facts.items()
        if "mentions" in of_site
    }


def _sum_over_sites(mentions: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the number of mentions of each type at several sites together."""
    total: Counter[str] = Counter()
    for of_site in mentions:
        total.update(of_site)
    return total


def _list_counts(mentions: Mapping[str, int], limit: int = 6) -> str:
    """Return types with their numbers of mentions, in words."""
    return list_names([f"{label} {n:,}" for label, n in mentions.items()], limit)


# ---- causes that scores show ---------------------------------------------------------


def find_missed_types(
    job: Job, scores: Mapping[str, Any], facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield a cause for each site with types of which no mention is found.

    A site is judged in the first condition in which any mention is found. Without such
    a condition, it has no cause here.

    Args:
        job: The job.
        scores: Site → condition → scores on the site's test data.
        facts: The counts of each site's data; empty if they are unknown, as between
            real sites.
    """
    training = _read_mention_counts(facts)
    total = _sum_over_sites(training.values())
    maps = find_label_maps(training)
    for site, by_condition in scores.items():
        condition = _find_condition(by_condition)
        if condition is None:
            continue
        tested = {
            label: score
            for label, score in by_condition[condition]["by_type"].items()
            if score["support"]
        }
        missed = {
            label: score
            for label, score in tested.items()
            if score["strict"]["f1"] <= 0
        }
        if not missed:
            continue
        importance: Importance = "medium"
        if 2 * len(missed) >= len(tested):
            importance = "high"
        support = sum(score["support"] for score in missed.values())
        verb = "has" if len(missed) == 1 else "have"
        yield Cause(
            "types_missed",
            limit_importance(importance, support),
            f"{site}, {condition}",
            f"{len(missed)} of {format_count(len(tested), 'type')} {verb} F1 0: "
            f"{_list_missed(missed, training.get(site), total)}",
            "; ".join(_list_remedies(missed, site, training, total=total)),
            evidence=(_make_support_evidence(missed),),
            settings=tuple(_list_type_settings(job, missed, maps, total=total)),
        )


def _find_condition(scores: Mapping[str, Any]) -> str | None:
    """Return the first condition in which any mention is found, or None."""
    for condition in _CONDITIONS:
        score = scores.get(condition)
        if score and score.get("by_type") and score["relaxed"]["f1"] > 0:
            return condition
    return None


def _list_missed(
    missed: Mapping[str, Any],
    training: Mapping[str, int] | None,
    total: Counter[str],
) -> str:
    """Return the missed types with remarks, those with most test mentions first.

    Only the first type has the site's training mentions in words, to keep the list
    short.

    Args:
        missed: The missed types, with their scores on the site's test data.
        training: The site's training mentions; None if they are unknown.
        total: Training mentions at all sites together.
    """
    types: list[str] = []
    for label in _sort_by_support(missed):
        details = []
        if training is not None:
            share = f"{training.get(label, 0)} of {total[label]}"
            if not types:
                share = f"this site has {share} training mentions"
            details.append(share)
        if not missed[label]["predicted"]:
            details.append("never predicted")
        types.append(f"{label} ({', '.join(details)})" if details else label)
    return list_names(types)


def _make_support_evidence(missed: Mapping[str, Any]) -> Evidence:
    """Return the evidence that states how often the test data mention missed types."""
    support = {label: missed[label]["support"] for label in _sort_by_support(missed)}
    return Evidence(
        f"test mentions of these types: {_list_counts(support)}",
        "summary.json",
        {"test_mentions": support},
    )


def _sort_by_support(missed: Mapping[str, Any]) -> list[str]:
    """Return types by their number of test mentions, the largest first."""
    return sorted(missed, key=lambda label: -missed[label]["support"])


def _list_remedies(
    missed: Mapping[str, Any],
    site: str,
    training: _MentionCounts,
    *,
    total: Counter[str],
) -> Iterator[str]:
    """Yield what a user can do so that the missed types are found.

    Args:
        missed: The missed types, with their scores on the site's test data.
        site: The site.
        training: Training mentions; without those of the site if they are unknown.
        total: Training mentions at all sites together.
    """
    if site not in training:
        yield "train longer, or annotate more mentions"
        return
    if any(total[label] == 0 for label in missed):
        yield (
            "give types without training mentions their names in the training data "
            "(label_map)"
        )
    if any(total[label] > 0 for label in missed):
        yield "train longer, or annotate more mentions"
    is_lone = any(
        total[label] > 0 and total[label] == training[site].get(label, 0)
        for label in missed
    )
    if len(training) > 1 and is_lone:
        yield (
            "a type that only this site annotates may have another name at other sites "
            "(label_map)"
        )


def _list_type_settings(
    job: Job,
    missed: Mapping[str, Any],
    maps: Iterable[LabelMap],
    *,
    total: Counter[str],
) -> Iterator[Setting]:
    """Yield label maps for missed types with similar names, then longer training.

    Args:
        job: The job.
        missed: The missed types of a site.
        maps: Proposals for the types of all sites.
        total: Training mentions at all sites together.
    """
    fitting = (each for each in maps if each.old in missed or each.new in missed)
    yield from _list_label_maps(job, list(islice(fitting, MAX_MAPS)))
    if any(total[label] >= RARE for label in missed):
        yield from list_longer_training(job)


def find_threshold_causes(job: Job, scores: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield a cause for each site whose threshold gives too few or too many mentions.

    Args:
        job: The job. Only the model of a type scorer has a threshold.
        scores: Site → condition → scores on the site's test data.
    """
    model = job.config.model
    is_chosen = getattr(job.config, "choose_threshold", False)
    if not isinstance(model, TypeScorerConfig) or is_chosen:
        return
    for site, by_condition in scores.items():
        judged = [c for c in _CONDITIONS if by_condition.get(c, {}).get("by_type")]
        if not judged:
            continue
        by_type = by_condition[judged[0]]["by_type"].values()
        gold = sum(score["support"] for score in by_type)
        predicted = sum(score["predicted"] for score in by_type)
        if not gold or gold / FAR <= predicted <= FAR * gold:
            continue
        yield _describe_threshold(job, f"{site}, {judged[0]}", gold, predicted)


def _describe_threshold(job: Job, where: str, gold: int, predicted: int) -> Cause:
    """Return the cause that a threshold is too high or too low.

    Args:
        job: The job.
        where: The site and the condition.
        gold: Number of test mentions.
        predicted: Number of predicted mentions.
    """
    is_high = predicted < gold
    change = "less than half" if is_high else "more than twice"
    return Cause(
        "threshold_high" if is_high else "threshold_low",
        limit_importance("medium", gold),
        where,
        f"the model predicts {change} as many mentions as are annotated",
        f"{'lower' if is_high else 'raise'} model.threshold, and keep the value with "
        "the best F1 on validation data",
        evidence=(
            Evidence(
                f"{predicted:,} predicted and {format_count(gold, 'test mention')} "
                f"at the threshold {job.config.model.threshold:g}",
                "summary.json",
                {"predicted": predicted, "test_mentions": gold},
            ),
        ),
        settings=tuple(_list_threshold_settings(job, is_high=is_high)),
    )


def _list_threshold_settings(job: Job, *, is_high: bool) -> Iterator[Setting]:
    """Yield the setting that chooses a threshold, and another threshold."""
    can_choose = hasattr(job.config, "choose_threshold") and job.privacy is None
    if can_choose:
        yield Setting.of("training", "choose_threshold", value=True, current=False)
    threshold = job.config.model.threshold
    factor = 1 / THRESHOLD_STEP if is_high else THRESHOLD_STEP
    value = float(f"{min(threshold * factor, HIGHEST_THRESHOLD):.2g}")
    if value != threshold:
        yield Setting.of("model", "threshold", value=value, current=threshold)


# ---- causes that counts show, also before training -----------------------------------


def find_data_causes(job: Job, facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield what the counts of the sites' data show about learning.

    Args:
        job: The job.
        facts: The counts of each site's data; empty if they are unknown.
    """
    counts = _read_mention_counts(facts)
    if not counts:
        return
    yield from _find_alike_names(job, counts)
    yield from _find_unmapped_types(job, counts)
    yield from _find_untrained_types(job, counts, facts)
    yield from _find_rare_types(job, counts)
    yield from _find_densities(job, counts, facts)
    yield from _find_long_sentences(job, facts)
    yield from _find_small_sites(job, counts)


def _find_alike_names(job: Job, counts: _MentionCounts) -> Iterator[Cause]:
    """Yield types whose names at two sites seem to mean the same."""
    maps = find_label_maps(counts)
    alike = [each for each in maps if each.is_active]
    if alike:
        message = "sites write the same entity type differently"
        yield _describe_names("names_alike", message, job, counts, alike)
    related = [each for each in maps if not each.is_active]
    if related:
        message = "types of different sites may be the same"
        yield _describe_names("names_related", message, job, counts, related)


def _describe_names(
    code: str,
    message: str,
    job: Job,
    counts: _MentionCounts,
    maps: Sequence[LabelMap],
) -> Cause:
    """Return the cause that sites may have several names for a type.

    Names do not matter in training while each site has an output layer of its own.
    """
    importance: Importance = "low"
    effect = "which matters once sites share the output layer"
    if job.module.shares_outputs(job.config):
        mentions = sum(counts[each.site][each.old] for each in maps)
        importance = "high" if code == "names_alike" else "medium"
        importance = limit_importance(importance, mentions)
        effect = "so they are learned as different types"
    return Cause(
        code,
        importance,
        list_names(list(dict.fromkeys(each.site for each in maps))),
        f"{message}, {effect}",
        "rename them in label_map if they are the same",
        evidence=tuple(
            Evidence(
                f"{each.site}: {each.old} ({counts[each.site][each.old]:,} training "
                f"mentions) {each.reason}",
                "job.json",
                {"mentions": counts[each.site][each.old]},
            )
            for each in maps
        ),
        settings=tuple(_list_label_maps(job, maps)),
    )


def _list_label_maps(job: Job, maps: Sequence[LabelMap]) -> Iterator[Setting]:
    """Yield each site's label_map of the job with the proposed names added."""
    by_site: dict[str, dict[str, str]] = {}
    for each in maps:
        by_site.setdefault(each.site, {})[each.old] = each.new
    for site, proposed in by_site.items():
        # Generated sites have no table in the job.
        if site not in job.sites:
            continue
        current = dict(job.sites[site].label_map)
        merged: dict[str, str | None] = dict(proposed)
        for old, new in current.items():
            # A label that the job renames to `new` gets the name proposed for `new`.
            merged[old] = proposed.get(new, new)
        value = {old: new for old, new in merged.items() if old != new}
        yield Setting.of("sites", site, "label_map", value=value, current=current)


def _find_unmapped_types(job: Job, counts: _MentionCounts) -> Iterator[Cause]:
    """Yield types that only one site has although its label_map renames others."""
    maps = find_label_maps(counts)
    names_with_proposal = {(each.site, each.old) for each in maps}
    targets = {each.new for each in maps}
    num_sites = Counter(label for of_site in counts.values() for label in of_site)
    for site, config in job.sites.items():
        site_counts = counts.get(site, {})
        others_have_types = num_sites.total() > len(site_counts)
        if not others_have_types or not config.label_map:
            continue
        lone = {
            label: number
            for label, number in site_counts.items()
            if num_sites[label] == 1
            and label not in targets
            and (site, label) not in names_with_proposal
        }
        if not lone:
            continue
        names = "a name" if len(lone) == 1 else "names"
        yield Cause(
            "types_unmapped",
            limit_importance("medium", sum(lone.values())),
            site,
            f"label_map leaves {format_count(len(lone), 'type')} under {names} that no "
            "other site uses",
            'rename them, or drop them with ""',
            evidence=(
                Evidence(
                    f"training mentions: {_list_counts(lone)}",
                    "job.json",
                    {"mentions": lone},
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
    job: Job, counts: _MentionCounts, facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield types of the test data that no site has in its training data."""
    everywhere = _sum_over_sites(counts.values())
    known_names = KnownNames(counts)
    for site, of_site in facts.items():
        tested = as_mapping(of_site.get("test_mentions"))
        unknown = {
            label: number for label, number in tested.items() if label not in everywhere
        }
        if not unknown:
            continue
        untrained = sum(unknown.values())
        is_large = untrained >= UNTRAINED_SHARE * sum(tested.values())
        verb = "has" if len(unknown) == 1 else "have"
        # The untrained types take part in the search for similar names.
        maps = list(known_names.map_new_names(site, unknown))
        yield Cause(
            "types_untrained",
            limit_importance("high" if is_large else "medium", untrained),
            site,
            f"{format_count(len(unknown), 'type')} of its test data {verb} no training "
            "mention anywhere",
            "give them their names in the training data (label_map), or drop them",
            evidence=(
                Evidence(
                    f"test mentions: {_list_counts(unknown)}",
                    "job.json",
                    {"test_mentions": unknown},
                ),
            ),
            settings=tuple(_list_label_maps(job, maps)),
        )


def _find_rare_types(job: Job, counts: _MentionCounts) -> Iterator[Cause]:
    """Yield types with too few training mentions at all sites together."""
    by_type = _sum_over_sites(counts.values())
    total = by_type.total()
    rare = {}
    for label in sorted(by_type, key=by_type.__getitem__):
        number = by_type[label]
        has_small_share = number < RARE_MENTIONS and number < RARE_SHARE * total
        if number < RARE or has_small_share:
            rare[label] = number
    if not rare:
        return
    # A pooled model is one model of all notes only with types that all sites have.
    candidates = find_common_types(counts) if "pooled" in job.conditions else by_type
    common = [label for label in candidates if label not in rare]
    settings: tuple[Setting, ...] = ()
    is_sampled = job.tags is not None and job.tags.is_sampled
    # Generated sites have fixed types.
    if common and job.synthetic is None and not is_sampled:
        settings = (Setting.of("tags", "types", value=sorted(common)),)
    verb = "has" if len(rare) == 1 else "have"
    yield Cause(
        "types_rare",
        "medium",
        "all sites",
        f"{len(rare)} of {format_count(len(by_type), 'type')} "
        f"({list_names(list(rare))}) {verb} fewer than {RARE} training mentions, or "
        f"less than {RARE_SHARE:.1%} of all mentions",
        "annotate more of them, merge them with others in label_map, or leave them out",
        evidence=(
            Evidence(
                f"training mentions of {total:,}: {_list_counts(rare, limit=10)}",
                "job.json",
                {"mentions": rare, "of": total},
            ),
        ),
        settings=settings,
    )


def _find_densities(
    job: Job, counts: _MentionCounts, facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield types that one site annotates much more often than another."""
    words = {site: int(facts[site].get("words", 0)) for site in counts}
    extremes = {}
    for label, of_type in _group_by_type(counts).items():
        densities = _find_extreme_densities(of_type, words)
        if densities:
            extremes[label] = densities
    if not extremes:
        return
    most_mentions = max(
        counts[site][label] for label, pair in extremes.items() for site in pair
    )
    evidence = [
        Evidence(
            f"{label} per 1,000 words: "
            + ", ".join(
                f"{value:.2g} at {site} "
                f"({format_count(counts[site][label], 'mention')})"
                for site, value in densities.items()
            ),
            "job.json",
            {"type": label, "per_1000_words": densities},
        )
        for label, densities in extremes.items()
    ]
    sites = dict.fromkeys(site for pair in extremes.values() for site in pair)
    yield Cause(
        "densities_differ",
        limit_importance("medium", most_mentions, DENSE_MENTIONS),
        list_names(list(sites)),
        f"sites annotate {list_names(list(extremes))} at very different rates, so "
        "their notes or their guidelines differ",
        "compare the guidelines; if they differ, leave more of the model to each site",
        evidence=tuple(evidence[:5]),
        settings=list_personal_settings(job),
    )


def _group_by_type(counts: _MentionCounts) -> dict[str, dict[str, int]]:
    """Return the number of training mentions: type → site → number."""
    by_type: dict[str, dict[str, int]] = {}
    for site, of_site in counts.items():
        for label, number in of_site.items():
            by_type.setdefault(label, {})[site] = number
    return by_type


def _find_extreme_densities(
    mentions: Mapping[str, int], words: Mapping[str, int]
) -> dict[str, float]:
    """Return the highest and the lowest density of a type, by site.

    Args:
        mentions: The type's training mentions, by site.
        words: Each site's number of words.

    Returns:
        Mentions per 1,000 words at the two sites; {} if the densities are similar, or
        the type has too few mentions to compare them.
    """
    densities = {
        site: 1000 * number / words[site]
        for site, number in mentions.items()
        if number and words[site]
    }
    if len(densities) < 2:
        return {}
    highest = max(densities, key=densities.__getitem__)
    # Sites with so many words that the highest density would give them many mentions.
    large = [
        site for site in densities if densities[highest] * words[site] / 1000 >= RARE
    ]
    if mentions[highest] < RARE or not large:
        return {}
    lowest = min(large, key=densities.__getitem__)
    if densities[highest] < DENSITY_RATIO * densities[lowest]:
        return {}
    return {highest: densities[highest], lowest: densities[lowest]}


def _find_long_sentences(job: Job, facts: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield the sites with many sentences that the model reads in pieces."""
    most_words = _read_max_words(job)
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
    importance: Importance = "low"
    if max(cut.values()) >= 5 * LONG_SHARE:
        number_cut = sum(facts[site]["long"] for site in cut)
        importance = limit_importance("medium", number_cut)
    settings: tuple[Setting, ...] = ()
    if most_words < LONGEST_READ:
        rounded_up = LENGTH_STEP * math.ceil(longest / LENGTH_STEP)
        value = min(LONGEST_READ, rounded_up)
        settings = (Setting.of("model", "max_tokens", value=value, current=most_words),)
    yield Cause(
        "sentences_cut",
        importance,
        list_names(list(cut)),
        f"sentences longer than {most_words} words are cut, so the model does not see "
        "the rest of them",
        "let the model read longer sentences, or break lines at sentence ends in the "
        "files",
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


def _find_small_sites(job: Job, counts: _MentionCounts) -> Iterator[Cause]:
    """Yield the sites with too few training mentions to matter."""
    mentions = {site: sum(of_site.values()) for site, of_site in counts.items()}
    small = {site: number for site, number in mentions.items() if number < SMALL_SITE}
    # A single site has no others to compare with.
    if not small or len(mentions) == 1:
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
