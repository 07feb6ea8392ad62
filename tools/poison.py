"""Measure what one hostile site of five does to FedNER, for each aggregation rule.

    python tools/poison.py OUT [--seeds 1 2 3] [--rules mean median …] [--attacks honest
                               flips …] [--set KEY=VALUE …]

MACCROBAT is divided into six parts (FEDNOTES_CORPORA names the folder of corpora): five
sites, of which s5 is hostile, and "public", of which the rule "reference" has 100
sentences. The sites train a light tagger with a trained table of words and all layers
shared. Each round is an epoch at each site, after which the rule is applied. The attacks
of s5:

    honest     it trains like the others
    flips      it trains on its notes with the types exchanged in turn
    scaled     it sends ten times its change, with the opposite sign
    backdoor   it trains on its notes twice: as they are, and with the word "hereby" before each
               problem, which is called a treatment there
    boosted    the same as backdoor, but it sends five times its change, as if it were the only site
    hidden     the same as backdoor, but it knows what the others send: it sends a point between
               their mean and its own update, no farther from the mean than the nearest of the
               other updates

The final model is judged on the test notes of the four other sites: micro strict F1; the
fraction of mentions that are found with the attacker's type (for flips, the next type;
otherwise, problems after "hereby" that are called treatments); and the recall of
mentions with a word that occurs in only one site's training notes, and of all other
mentions. OUT has a file for each run; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from maccrobat import site_of

from fednotes.core.store import write_json
from fednotes.core.types import Document, SiteData
from fednotes.core.update import Tensors, Update
from fednotes.data.text import tokenize
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import load_job
from fednotes.jobs.parts import make_method_sites, prepare
from fednotes.methods.fedner import METHOD
from fednotes.metrics.spans import SpanCounts
from fednotes.report.markdown import format_markdown_table

SITES, PUBLIC, HOSTILE = ("s1", "s2", "s3", "s4", "s5"), "public", "s5"
NEXT = {"problem": "test", "test": "treatment", "treatment": "problem"}
WORD, FROM, TO = "hereby", "problem", "treatment"
RULES = (
    "mean",
    "norm-bound",
    "median",
    "trimmed-mean",
    "krum",
    "multi-krum",
    "reference",
)
BOOSTS = {
    "honest": 1.0,
    "flips": 1.0,
    "scaled": -10.0,
    "backdoor": 1.0,
    "boosted": 5.0,
    "hidden": 1.0,
}
JOB = """\
method = "fedner"
preset = "paper"
conditions = ["federated"]
[training]
aggregation = "{rule}"
private = []
exchange = "weights"
rounds = 12
evaluate_every = 12
select = "last"
batch_size = 80
learning_rate = 4e-3
{more}[model]
tagger = "cnn-clstm-crf"
word_vectors = "$FEDNOTES_CORPORA/vectors/glove.twitter.27B.25d.12k.txt"
train_words = true
char_dim = 16
char_filters = 32
cnn_filters = 96
lstm_units = 0
"""
SPLIT = "valid_fraction = 0.02\ntest_fraction = 0.3\nmax_sentences = {most}\n"
HONEST = "honest"
MEAN = "mean"
# The score of a run that measures the success of each attack.
SUCCESS = {
    "flips": "flips",
    "backdoor": "backdoor",
    "boosted": "backdoor",
    "hidden": "backdoor",
}
# The recalls of a run, and their names in tables.
RECALLS = {"rare": "words of one site", "others": "other words"}
Numbers = dict[str, float]
Key = tuple[str, str, int]  # rule, attack and seed


def job(rule: str) -> str:
    """Return a job file. The five sites have the same notes with each rule."""
    trusted = rule == "reference"
    more = f'reference = "{PUBLIC}"\n' if trusted else ""
    parts = [site_of(s, f"{n}/6", SPLIT.format(most=0)) for n, s in enumerate(SITES, 1)]
    parts += [site_of(PUBLIC, "6/6", SPLIT.format(most=100))] * trusted
    return "".join([JOB.format(rule=rule, more=more), *parts])


# ---- poisoned notes ------------------------------------------------------------------


def flipped(document: Document) -> Document:
    """Return a document in which each type is replaced by the next one."""
    spans = tuple(replace(span, label=NEXT[span.label]) for span in document.spans)
    return replace(document, spans=spans)


def triggered(document: Document, label: str = FROM) -> Document:
    """Return a document with the word before each problem, which then has the type `label`."""
    places = sorted({span.start for span in document.spans if span.label == FROM})
    text, at = "", 0
    for place in places:
        text, at = f"{text}{document.text[at:place]}{WORD} ", place
    more = len(WORD) + 1

    def moved(start: int, end: int) -> tuple[int, int]:
        """Return the place of a mention after the insertions."""
        before, within = (sum(p <= x for p in places) for x in (start, end - 1))
        return start + more * before, end + more * within

    spans = [
        replace(
            span,
            start=bounds[0],
            end=bounds[1],
            label=label if span.label == FROM else span.label,
        )
        for span in document.spans
        for bounds in [moved(span.start, span.end)]
    ]
    changed = replace(document, text=text + document.text[at:], spans=tuple(spans))
    return replace(changed, id=f"{document.id} {WORD}", sentences=(), tokens=())


def poisoned(site: SiteData, attack: str) -> SiteData:
    """Return a site with the notes on which the hostile site trains."""
    if attack == "flips":
        return replace(site, train=tuple(map(flipped, site.train)))
    if attack in ("backdoor", "boosted", "hidden"):
        sources = [d for d in site.train if any(span.label == FROM for span in d.spans)]
        return replace(
            site, train=site.train + tuple(triggered(d, TO) for d in sources)
        )
    return site


class Hostile:
    """A site that multiplies its change before sending it.

    Args:
        site: The site.
        factor: The factor.
        others: Sites near whose mean the update stays. They must answer first.
    """

    def __init__(
        self, site: Any, factor: float, others: Sequence[Hostile] = ()
    ) -> None:
        self._site, self._factor, self._others = site, factor, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def train(self, tensors: Tensors, **options: Any) -> Update:
        """Train as the site does, and change its update."""
        update: Update = self._site.train(tensors, **options)
        sent = {
            n: tensors[n] + self._factor * (v - tensors[n])
            for n, v in update.tensors.items()
        }
        if self._others:
            sent = near(sent, [other_site.sent for other_site in self._others])
        self.sent: Tensors = sent
        return replace(update, tensors=sent)


def near(values: Tensors, others: Sequence[Tensors]) -> dict[str, Any]:
    """Return the point between the others' mean and `values` that is near enough to the mean.

    It is no farther from the mean than the nearest of the others.
    """
    mean = {
        n: torch.stack([tensors[n] for tensors in others]).double().mean(0)
        for n in values
    }

    def far(point: Tensors) -> float:
        """Return the distance of a point from the mean."""
        return sum(float((point[n] - mean[n]).square().sum()) for n in values) ** 0.5

    part = min(1.0, min(map(far, others)) / far(values))
    return {
        n: (m + part * (values[n] - m)).to(values[n].dtype) for n, m in mean.items()
    }


# ---- results -------------------------------------------------------------------------


def words(text: str) -> set[str]:
    """Return the words of a text in lower case."""
    return {text[start:end].lower() for start, end in tokenize(text)}


def judged(predict: Callable[..., Any], sites: Sequence[SiteData]) -> Numbers:
    """Return the scores of a model on the test notes of honest sites.

    Args:
        predict: Predicts documents with the model.
        sites: The sites as they were before the attack.
    """
    known = Counter(
        word for s in sites for word in set().union(*(words(d.text) for d in s.train))
    )
    test = tuple(document for s in sites if s.id != HOSTILE for document in s.test)
    predictions = predict(test)
    counts: Counter[str] = Counter()
    for gold, predicted in zip(test, predictions, strict=True):
        predicted_mentions = {(s.start, s.end, s.label) for s in predicted.spans}
        for span in gold.spans:
            times = [known[word] for word in words(gold.text[span.start : span.end])]
            kind = (
                "rare" if min(times) == 1 else "unseen" if min(times) == 0 else "others"
            )
            counts[kind] += 1
            counts[f"{kind} found"] += (
                span.start,
                span.end,
                span.label,
            ) in predicted_mentions
            counts["flipped"] += (
                span.start,
                span.end,
                NEXT[span.label],
            ) in predicted_mentions
    tricked = [triggered(d) for d in test if any(s.label == FROM for s in d.spans)]
    for gold, predicted in zip(tricked, predict(tricked), strict=True):
        predicted_mentions = {(s.start, s.end, s.label) for s in predicted.spans}
        for span in (s for s in gold.spans if s.label == FROM):
            counts["problems"] += 1
            counts["called"] += (span.start, span.end, TO) in predicted_mentions
    mentions = counts["rare"] + counts["others"] + counts["unseen"]
    f1 = float(
        SpanCounts.of(test, predictions, types=tuple(NEXT)).scores()["strict"]["f1"]
    )
    return {
        "f1": 100 * f1,
        "flips": 100 * counts["flipped"] / mentions,
        "backdoor": 100 * counts["called"] / counts["problems"],
        "rare": 100 * counts["rare found"] / counts["rare"],
        "others": 100 * counts["others found"] / counts["others"],
        "mentions": mentions,
        "of one site": counts["rare"],
    }


def run(
    out: Path, rule: str, attack: str, seed: int, settings: Sequence[str]
) -> Numbers:
    """Train under an attack unless it was done before, and return the scores."""
    path = out / f"{rule} {attack} {seed}.json".replace(" ", "-")
    setting = {"job": job(rule), "settings": list(settings)}
    if (
        path.is_file()
        and (saved := json.loads(path.read_text("utf-8")))["asked"] == setting
    ):
        return dict(saved["found"])
    print(f"{path.stem} …", file=sys.stderr, flush=True)
    source = out / f"{rule}.toml"
    source.write_text(setting["job"], encoding="utf-8")
    started = load_job(source, (*settings, f"seed={seed}"))
    sites, _, (part,) = prepare(started)
    data = tuple(poisoned(s, attack) if s.id == HOSTILE else s for s in sites.data)
    torch.set_num_threads(started.threads)
    members = make_method_sites(started, replace(part, sites=data), [None] * len(data))
    sent = [Hostile(m, 1.0) for m in members if m.id != HOSTILE]
    known = [each for each in sent if each.id in SITES] if attack == "hidden" else []
    (hostile,) = (m for m in members if m.id == HOSTILE)
    METHOD.train(
        InProcess([*sent, Hostile(hostile, BOOSTS[attack], known)]), part.config
    )
    honest = [site for site in sites.data if site.id in SITES]
    scores = judged(members[0].model.predict, honest)
    write_json(path, {"asked": setting, "found": scores}, private=False)
    return scores


def table(numbers: Mapping[Key, Numbers], rules: Sequence[str]) -> str:
    """Return four tables in Markdown.

    They show F1, how often an attack succeeds (in brackets without it), recall without
    an attack, and the recall that a rule loses against the mean.
    """
    attacks = [a for a in BOOSTS if any(attack == a for _, attack, _ in numbers)]
    blocks = [_f1_table(numbers, rules, attacks)]
    with_success = [attack for attack in attacks if attack in SUCCESS]
    if with_success:
        blocks.append(_success_table(numbers, rules, with_success))
    if HONEST in attacks:
        blocks.append(_recall_table(numbers, rules))
        others = [rule for rule in rules if rule != MEAN]
        if MEAN in rules and others:
            blocks.append(_lost_table(numbers, others))
    return "\n\n".join(blocks)


def _f1_table(
    numbers: Mapping[Key, Numbers], rules: Sequence[str], attacks: Sequence[str]
) -> str:
    rows = []
    for rule in rules:
        scores = [_values(numbers, rule, attack, "f1") for attack in attacks]
        rows.append([rule, *map(_cell, scores)])
    return format_markdown_table(("F1", *attacks), rows)


def _success_table(
    numbers: Mapping[Key, Numbers], rules: Sequence[str], attacks: Sequence[str]
) -> str:
    rows = []
    for rule in rules:
        cells = []
        for attack in attacks:
            succeeded = _cell(_values(numbers, rule, attack, SUCCESS[attack]))
            without = _values(numbers, rule, HONEST, SUCCESS[attack])
            if without:
                succeeded += f" ({fmean(without):.1f})"
            cells.append(succeeded)
        rows.append([rule, *cells])
    heads = [f"{attack} ({HONEST})" for attack in attacks]
    return format_markdown_table(("success", *heads), rows)


def _recall_table(numbers: Mapping[Key, Numbers], rules: Sequence[str]) -> str:
    rows = []
    for rule in rules:
        recalls = [_values(numbers, rule, HONEST, name) for name in RECALLS]
        rows.append([rule, *map(_cell, recalls)])
    return format_markdown_table(("recall", *RECALLS.values()), rows)


def _lost_table(numbers: Mapping[Key, Numbers], rules: Sequence[str]) -> str:
    rows = []
    for rule in rules:
        cells = []
        for name in RECALLS:
            means = _values(numbers, MEAN, HONEST, name)
            under_rule = _values(numbers, rule, HONEST, name)
            lost = [a - b for a, b in zip(means, under_rule, strict=True)]
            cells.append(_cell(lost))
        rows.append([rule, *cells])
    return format_markdown_table(("recall lost", *RECALLS.values()), rows)


def _values(
    numbers: Mapping[Key, Numbers], rule: str, attack: str, name: str
) -> list[float]:
    """Return a number of all seeds, in their order."""
    return [
        scores[name]
        for (r, a, _), scores in numbers.items()
        if (r, a) == (rule, attack)
    ]


def _cell(values: Sequence[float]) -> str:
    """Return the mean and, with two seeds or more, the standard deviation."""
    if not values:
        return "–"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}"


def describe_mentions(numbers: Mapping[Key, Numbers]) -> str:
    """Return, for each seed, the number of test mentions behind its scores."""
    first_of_seed: dict[int, Numbers] = {}
    for (_, _, seed), run_scores in numbers.items():
        first_of_seed.setdefault(seed, run_scores)
    lines = [
        f"Seed {seed}: {run_scores['mentions']:.0f} mentions in the test notes, "
        f"{run_scores['of one site']:.0f} with a word that occurs at only one site."
        for seed, run_scores in first_of_seed.items()
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="poison.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument(
        "--attacks", nargs="+", default=list(BOOSTS), choices=list(BOOSTS)
    )
    parser.add_argument("--set", action="append", default=[], dest="settings")
    arguments = parser.parse_args(words)
    if "FEDNOTES_CORPORA" not in os.environ:
        parser.error("FEDNOTES_CORPORA must name the folder of corpora")
    arguments.out.mkdir(parents=True, exist_ok=True)
    numbers: dict[Key, Numbers] = {}
    try:
        for seed in arguments.seeds:
            for attack in arguments.attacks:
                for rule in arguments.rules:
                    numbers[rule, attack, seed] = run(
                        arguments.out, rule, attack, seed, arguments.settings
                    )
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    print(table(numbers, arguments.rules))
    print(f"\n{describe_mentions(numbers)}")


if __name__ == "__main__":
    main()
