"""Measure what a lying server reads about sentences and patients by crafted parameters.

    python tools/trap.py [--traps NAME …] [--settings NAME …] [--seeds 1 2 3]

A dishonest server does not send the parameters that a job begins with. It sends trap
weights, with which only chosen sentences or patients have a gradient (Fowl et al. 2022,
"Robbing the Fed"; Boenisch et al. 2023, "When the curious abandon honesty"). The jobs
are generated and have three sites. The sites run their own code, with its mini-batches,
dropout and local steps, and the sum is that of the engine: with the secure sum, the
server sees only the sum over all sites.

    words        Each convolution of a light tagger responds to one chosen word and to nothing
                 else, so its update is the sum of the windows around that word. Success is the
                 fraction of the chosen words for which both neighbours in the site's sentence are
                 named, among all words of the table. A chosen word that occurs more than once in
                 the sum counts, too.
    patients     Each hidden unit of the phenotyping network responds to one chosen concept, so its
                 update changes only the vectors of that patient's concepts. Success is the
                 fraction of the chosen concepts for which exactly the concepts of one patient are
                 named. They are drawn among the concepts that only one patient of all sites has.
    classifiers  The server sends a network of its own before stage 2 of phenotyping. Each unit
                 responds only to the patients with one chosen concept, and adds one concept of the
                 dictionary. The rows of the classifiers' update then differ by these concepts.
                 Chosen concepts and success are those of "patients".
    encoders     The lowest layer of an encoder flags the sentence of one chosen word, and each of
                 its units responds to one position of this sentence (`trap_encoders.py`). Success
                 is the fraction of the sentence's first words that are named: the first 24, or as
                 many as the rank of a LoRA adapter. The chosen word occurs once in the data of
                 all sites.

The control reads an update of honest parameters in the same way. The chosen words and
concepts are drawn among those of the first site in the update; a real server would go
through a list of its own.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trap_encoders import (
    MARKS,
    SIZES,
    SentenceTrap,
    find_units,
    has_maps,
    load_embeddings,
    save_encoder,
    set_trap,
)

from fednotes.apps.deployment.rules.policy import Policy, check_update
from fednotes.apps.phenotyping.site import NETWORK
from fednotes.core.federation import EVALUATE, TRAIN
from fednotes.core.tensors import add_prefix
from fednotes.core.update import Tensors, Total
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.methods import pretrain

SITES, SENTENCES, PATIENTS = 3, 120, 120
BUCKETS, WIDTH = 1000, 64  # of the word table, which is sent completely
CHOSEN = 12  # number of words or concepts that are chosen
# Part of a complete match at which a unit responds; lower than 1 because of dropout.
GATE = 0.6
KNOCK = 1e3  # the negative of this bias keeps a unit from responding
# Fraction of a patient's concepts at which a unit responds to the chosen concept.
LEAST_SHARE = 5e-3


class Reached(Exception):
    """The server has the update that it wants."""


class LyingServer(InProcess):
    """The engine of a simulation with a server that changes what it sends.

    Args:
        sites: The sites.
        trap: Returns the changed tensors of a request.
        task: The task whose sum the server takes; or "evaluate", before which the server
            has decoded a sum of compressed changes.
        secure: Whether the server sees only sums.
        needs: A tensor that the request must have for its sum to be taken; "" for none.
    """

    def __init__(
        self,
        sites: Sequence[Any],
        trap: Callable[[Tensors], Tensors],
        task: str,
        *,
        secure: bool,
        needs: str = "",
    ) -> None:
        super().__init__(sites, secure=secure)
        self._trap, self._task, self.sent = trap, task, dict[str, Tensor]()
        self._needs = needs

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Any
    ) -> Total:
        """Send a trap in place of parameters; raise Reached once the server has the update."""
        if task == self._task == EVALUATE:
            before, after = self.honest, tensors or {}
            self.change = {n: after[n].double() - before[n].double() for n in before}
            raise Reached
        if task == TRAIN and tensors:
            self.honest = {name: value.clone() for name, value in tensors.items()}
        changed = self._trap(tensors) if tensors else tensors
        self.sent |= {name: value.clone() for name, value in (changed or {}).items()}
        total = super().sum(task, changed, **options)
        if task == self._task and (not self._needs or self._needs in (changed or {})):
            self.total = total
            raise Reached
        return total


def take_change(method: Any, config: Any, server: LyingServer) -> Tensors:
    """Return what the server learns: a gradient, or the change of the tensors that it sent."""
    with suppress(Reached):
        method.train(server, config)
    if server._task == EVALUATE:
        return server.change
    mean = server.total.mean(torch.float64)
    if server._task in ("gradients", "noisy_gradients"):
        return {name: -value for name, value in mean.items()}
    # A site also sends counts, which the server did not send.
    known = mean.keys() & server.sent.keys()
    return {name: mean[name] - server.sent[name].double() for name in sorted(known)}


# ---- words of a light tagger ---------------------------------------------------------


def codes(rows: int, width: int, seed: int) -> Tensor:
    """Return random rows (rows, width) of ±1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (rows, width), generator=generator).float() * 2 - 1


def words_trap(chosen: Sequence[int], seed: int) -> Callable[[Tensors], Tensors]:
    """Return a trap in which convolution j responds only to the word `chosen[j]`."""

    def trap(tensors: Tensors) -> Tensors:
        if "cnn.weight_3" not in tensors:
            return tensors
        trapped = {name: value.clone() for name, value in tensors.items()}
        trapped["words.hashed"] = codes(BUCKETS, WIDTH, seed)
        weight, bias = (
            trapped["cnn.weight_3"].zero_(),
            trapped["cnn.bias_3"].fill_(-KNOCK),
        )
        for unit, word in enumerate(chosen):
            weight[1, unit, :WIDTH] = trapped["words.hashed"][word]
            bias[unit] = -GATE * WIDTH
        return trapped

    return trap


def named_neighbours(
    change: Tensors, sent: Tensors, chosen: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the words that the server names before and after each chosen word."""
    table = sent["words.hashed"].double()
    unit = torch.nn.functional.normalize(table, dim=1)
    neighbours = []
    for number, word in enumerate(chosen):
        rows = change["cnn.weight_3"][:, number, : table.shape[1]]
        sign = torch.sign(rows[1] @ table[word])
        before, after = (int((sign * rows[at] @ unit.T).argmax()) for at in (0, 2))
        neighbours.append((before, after))
    return neighbours


@dataclass(frozen=True)
class Setting:
    """A job, and the sum from which the server reads.

    Attributes:
        table: The job's table.
        task: The task of the sum.
    """

    table: Mapping[str, Any]
    task: str


LIGHT = {
    "tagger": "cnn-clstm-crf",
    "hashed_words": BUCKETS,
    "word_dim": WIDTH,
    "char_dim": 8,
    "char_filters": 16,
    "cnn_filters": 32,
    "lstm_units": 32,
}


def fedner(batch: int, **training: Any) -> Setting:
    """Return a step of FedNER with `batch` sentences of each site in a mini-batch."""
    settings = {"batch_size": SITES * batch, "least_share": 1, "epochs": 1, **training}
    task = "train" if training else "gradients"
    return Setting({"method": "fedner", "training": settings, "model": LIGHT}, task)


def distilled(method: str, **training: Any) -> Setting:
    """Return an epoch of a method that averages light taggers."""
    settings = {"weighting": False, "rounds": 2, "learning_rate": 1e-3, **training}
    return Setting({"method": method, "training": settings, "model": LIGHT}, "train")


WORDS = {
    "fedner, 1 sentence": fedner(1),
    "fedner, 8 sentences": fedner(8),
    "fedner, 32 sentences": fedner(32),
    "fedner, an epoch of Adam": fedner(8, exchange="weights"),
    "distill, an epoch of Adam": distilled("distill"),
    "adversarial, an epoch of Adam": distilled("adversarial"),
}


def opened(
    setting: Setting, seed: int, synthetic: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Return the method of a setting, its config and the sites' data."""
    table = {**setting.table, "seed": seed, "synthetic": synthetic}
    job = parse_job(table, "trap", Path(), "trap")
    data = load_sites(job).data
    return job.module, job.module.configure(job.config, data), data


def windows(site: Any, sentences: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the words before and after each occurrence of a word, by word."""
    neighbours: dict[int, list[tuple[int, int]]] = {}
    corpus = site.train_set
    for sentence in sentences:
        tokens = slice(*corpus.encoded.bounds[sentence : sentence + 2])
        rows = corpus.hashed["hashed"][:, 0].numpy()
        words = rows[corpus.encoded.form[tokens]].tolist()
        for before, word, after in zip(words, words[1:], words[2:], strict=False):
            neighbours.setdefault(word, []).append((before, after))
    return neighbours


def words_read(setting: Setting, seed: int, *, secure: bool, honest: bool) -> float:
    """Return the fraction of the chosen words whose neighbours are named."""
    method, config, data = opened(
        setting, seed, {"sites": SITES, "sentences": SENTENCES}
    )
    sites = [method.make_site(each, config) for each in data]
    first, neighbours = sites[0], dict[int, list[tuple[int, int]]]()
    chosen = list[int]()

    def trap(tensors: Tensors) -> Tensors:
        if not chosen:  # by now, the sites have agreed on the size of mini-batches
            by_batch = setting.task == "gradients"
            neighbours.update(
                windows(
                    first,
                    first._select_batch(0) if by_batch else range(first.num_examples),
                )
            )
            order = np.random.default_rng(seed).permutation(sorted(neighbours))
            chosen.extend(int(word) for word in order[:CHOSEN])
        return tensors if honest else words_trap(chosen, seed)(tensors)

    server = LyingServer(sites, trap, setting.task, secure=secure)
    change = take_change(method, config, server)
    named = named_neighbours(change, server.sent, chosen)
    return fmean(
        pair in neighbours[word] for word, pair in zip(chosen, named, strict=True)
    )


# ---- patients ------------------------------------------------------------------------

CODES = {"systems": ["icd9"], "minimum": 5, "local_epochs": 1}
NETWORK_WIDTHS = {"embedding": 100, "hidden": 64}
STAGE_1 = {
    "method": "phenotype",
    "training": {**CODES, "min_patients": 0},
    "model": {"network": NETWORK_WIDTHS},
}
PATIENT_JOBS = {"phenotype, an epoch of Adam": Setting(STAGE_1, "train")}


def patients_trap(chosen: Sequence[int]) -> Callable[[Tensors], Tensors]:
    """Return a trap in which hidden unit j responds only to the concept `chosen[j]`."""

    def trap(tensors: Tensors) -> Tensors:
        if "hidden_weight" not in tensors:
            return tensors
        trapped = {name: value.clone() for name, value in tensors.items()}
        table, weight = trapped["embedding"].zero_(), trapped["hidden_weight"].zero_()
        trapped["hidden_bias"].fill_(-KNOCK)
        trapped["output_bias"].zero_()
        for unit, concept in enumerate(chosen):
            table[concept, unit] = 1.0
            weight[unit, unit] = KNOCK
            trapped["hidden_bias"][unit] = -KNOCK * LEAST_SHARE
        return trapped

    return trap


def draw_concept(sites: Sequence[Any], rng: np.random.Generator) -> int:
    """Draw a concept of the first site that only one patient of all sites has.

    Args:
        sites: The bags of the sites' patients.
        rng: Draws it.
    """
    concepts = [bags.count_concepts()[1] for bags in sites]
    often = np.bincount(np.concatenate(concepts))
    return int(rng.choice(concepts[0][often[concepts[0]] == 1]))


def concepts_of_owner(bags: Any, chosen: int) -> set[int]:
    """Return all concepts of the patient who has the chosen one."""
    row, concepts, _ = bags.count_concepts()
    (owner,) = row[concepts == chosen]
    return set(concepts[row == owner].tolist())


def patients_read(setting: Setting, seed: int, *, secure: bool, honest: bool) -> float:
    """Return the fraction of the chosen concepts whose patient's concepts are all named.

    Each chosen concept has a trap of its own.
    """
    hits = []
    rng = np.random.default_rng(seed)
    for _ in range(CHOSEN // 3):
        generated = {"sites": SITES, "patients": PATIENTS}
        method, config, data = opened(setting, seed, generated)
        sites = [method.make_site(each, config) for each in data]
        cohorts = [each.select_coded(each.train).bags for each in data]
        chosen = draw_concept(cohorts, rng)
        trap = (lambda tensors: tensors) if honest else patients_trap([chosen])
        server = LyingServer(sites, trap, setting.task, secure=secure)
        change = take_change(method, config, server)
        moved = change["embedding"].abs().sum(1) > 0
        named = set(torch.nonzero(moved).flatten().tolist())
        hits.append(named == concepts_of_owner(cohorts[0], chosen))
    return fmean(hits)


# ---- patients of classifiers ---------------------------------------------------------

POLICY = Policy(min_patients=50)  # of each site
LEAST_DIFFERENCE = 1e-5  # relative; rounding to float32 causes a smaller one


def classifiers(**model: Any) -> Setting:
    """Return a cycle of all diseases' classifiers, after a cycle of stage 1."""
    table = {
        "method": "phenotype",
        "training": {**CODES, "cycles": 1, "keep_cycle": 0},
        "model": {"network": NETWORK_WIDTHS, "classifier": model},
    }
    return Setting(table, TRAIN)


CLASSIFIER_JOBS = {
    "phenotype, classifiers, an epoch": classifiers(),
    "phenotype, classifiers, converged": classifiers(solver="converged", loss="log"),
}


def classifiers_trap(chosen: int, concepts: int) -> Callable[[Tensors], Tensors]:
    """Return a trap with a network that represents only the patients who have a concept.

    A site takes the widths of the network from the tensors that it receives, so the network
    has a unit for each concept of the dictionary: it responds to the chosen concept, and
    adds the share of its own concept. Unit `concepts` responds to the chosen concept and
    adds nothing. A patient without the chosen concept is below the threshold of every unit.

    Args:
        chosen: The concept whose patient is to be read.
        concepts: The number of concepts in the dictionary.
    """
    hidden = torch.cat([torch.eye(concepts), torch.zeros(1, concepts)])
    hidden[:, chosen] += 1 / LEAST_SHARE
    network = {
        "embedding": torch.eye(concepts),
        "hidden_weight": hidden,
        "hidden_bias": -torch.ones(concepts + 1),
        "output_weight": torch.zeros(1, concepts + 1),
        "output_bias": torch.zeros(1),
    }

    def trap(tensors: Tensors) -> Tensors:
        if "classes" in tensors:  # stage 2 begins
            return {**tensors, **add_prefix(NETWORK, network)}
        if "svm.weight" in tensors:
            classifiers = tensors["svm.weight"].shape[1]
            return {**tensors, "svm.weight": torch.zeros(concepts + 1, classifiers)}
        return tensors

    return trap


def named_concepts(change: Tensor, chosen: int) -> set[int]:
    """Return the concepts that one patient has according to the classifiers' rows.

    Args:
        change: (units, classifiers), the change of the classifiers' weights. The last unit
            responds only to the chosen concept.
        chosen: The chosen concept.
    """
    moved = change[:, change[-1].abs().argmax()]
    differences = moved[:-1] / moved[-1] - 1
    named = torch.nonzero(differences > LEAST_DIFFERENCE).flatten()
    return {chosen, *named.tolist()}


def classifiers_read(
    setting: Setting, seed: int, *, secure: bool, honest: bool
) -> float:
    """Return the fraction of the chosen concepts whose patient's concepts are all named."""
    hits = []
    rng = np.random.default_rng(seed)
    for _ in range(CHOSEN // 3):
        generated = {"sites": SITES, "patients": PATIENTS}
        method, config, data = opened(setting, seed, generated)
        sites = [method.make_site(each, config) for each in data]
        cohorts = [each.train.select_labelled().bags for each in data]
        chosen = draw_concept(cohorts, rng)
        concepts = config.space.width
        trap = (
            (lambda tensors: tensors) if honest else classifiers_trap(chosen, concepts)
        )
        server = LyingServer(
            sites, trap, setting.task, secure=secure, needs="svm.weight"
        )
        change = take_change(method, config, server)["svm.weight"]
        for site in sites:
            require_permitted(site, server.total)
        named = named_concepts(change, chosen)
        hits.append(named == concepts_of_owner(cohorts[0], chosen))
    return fmean(hits)


def require_permitted(site: Any, total: Total) -> None:
    """Raise PolicyRefusal if the site's policy forbids its part of a masked sum."""
    check_update(
        POLICY,
        TRAIN,
        round=1,
        tensors=total.tensors,
        covered=site.count_covered(TRAIN),
        size=0,
        secure=True,
        scores=False,
        num_sent=1,
    )


# ---- sentences of an encoder ---------------------------------------------------------

ENCODER_SENTENCES = 60  # of each site
TRIES = 3  # number of chosen words for each seed
SCALE = 2.0  # alpha / rank of a LoRA adapter, by default
ALL_SENTENCES = ENCODER_SENTENCES * SITES  # in one batch, an epoch is one step
SENTENCE_NOISE = {"epsilon": 8, "unit": "sentence", "rate": 0.5}


def encoder_setting(
    method: str, train: str, *, task: str = TRAIN, noise: bool = False, **training: Any
) -> Setting:
    """Return an epoch of a method that trains an encoder.

    Args:
        method: The job's method.
        train: What the job trains of the encoder.
        task: The task whose sum the server reads; EVALUATE if changes are compressed.
        noise: Whether sentences are protected at ε = 8.
        **training: Further settings of the job's training.
    """
    epoch = {
        "cycles": 1,
        "local_epochs": 1,
        "batch_size": 8 * SITES,
        "compression": "none",
        **training,
    }
    table = {"method": method, "model": {"train": train}, "training": epoch}
    if noise:
        return Setting({**table, "privacy": SENTENCE_NOISE}, "noisy_gradients")
    return Setting(table, task)


def distilled_encoder(batch_size: int) -> Setting:
    """Return an epoch of distillation into an encoder, from annotated entities only."""
    training = {
        "rounds": 1,
        "local_epochs": 1,
        "batch_size": batch_size,
        "unannotated": "outside",
        "weighting": False,
    }
    model = {"kind": "token-classifier", "train": "encoder"}
    table = {"method": "distill", "model": model, "training": training}
    return Setting(table, TRAIN)


ENCODER_JOBS = {
    "finetune, encoder": encoder_setting(
        "finetune", "encoder", task=EVALUATE, compression="packed"
    ),
    "finetune, all": encoder_setting(
        "finetune",
        "all",
        task=EVALUATE,
        compression="packed",
        min_tokens=0,
        min_steps=0,
    ),
    "pretrain, encoder": encoder_setting(
        "pretrain", "encoder", length=32, head_cycles=0
    ),
    "finetune, LoRA, one step": encoder_setting(
        "finetune", "lora", batch_size=ALL_SENTENCES
    ),
    "finetune, LoRA": encoder_setting("finetune", "lora"),
    "finetune, LoRA, ε = 8": encoder_setting("finetune", "lora", noise=True),
    "personal, LoRA, one step": encoder_setting(
        "personal", "lora", batch_size=ALL_SENTENCES
    ),
    "personal, LoRA": encoder_setting("personal", "lora"),
    "distill, encoder": distilled_encoder(8),
    "distill, encoder, one step": distilled_encoder(ENCODER_SENTENCES),
}


def vocabulary_of(seed: int, generated: Mapping[str, Any]) -> list[str]:
    """Return the words of the generated notes, which stand for a public vocabulary."""
    table = {"method": "finetune", "seed": seed, "synthetic": generated}
    data = load_sites(parse_job(table, "trap", Path(), "trap")).data
    texts = (document.text for site in data for document in site.train)
    return sorted(
        {word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())}
    )


def sentences_of(site: Any) -> list[list[int]]:
    """Return the sub-words of each training sentence of a site.

    Pre-training reads a site's notes one after the other, as a single text.
    """
    site = getattr(site, "site", site)  # the site that a `DPSite` wraps
    if isinstance(site, pretrain.Site):
        return [site.train_set.ids.tolist()]
    pieces = site.train_set.pieces
    bounds = np.cumsum(pieces.lengths)[:-1]
    return [part.tolist() for part in np.split(pieces.ids, bounds)]


def share_named(named: Sequence[int], sentence: Sequence[int], chosen: int) -> float:
    """Return the fraction of the words at the trap's positions that are named.

    A text that is too long to be read at once may begin anywhere before the chosen word.
    The beginning with the highest fraction counts.
    """
    longest = SIZES["max_position_embeddings"]
    starts = range(1)
    if len(sentence) > longest:
        at = sentence.index(chosen)
        starts = range(max(0, at - longest), at + 1)
    shares = []
    for start in starts:
        truth = sentence[start : start + len(named)]
        shares.append(fmean(a == b for a, b in zip(named, truth, strict=False)))
    return max(shares)


def draw_word(sentences: Sequence[Sequence[Sequence[int]]], seed: int) -> int:
    """Draw a word of the first site that occurs once in the sentences of all sites."""
    counts = Counter(
        word for site in sentences for sentence in site for word in sentence
    )
    unique = [
        word
        for sentence in sentences[0]
        for word in sentence
        if counts[word] == 1 and word >= len(MARKS)
    ]
    return int(np.random.default_rng(seed).choice(unique))


def sentence_read(
    setting: Setting,
    encoder: Path,
    seeds: tuple[int, int],
    *,
    secure: bool,
    honest: bool,
) -> float:
    """Return the fraction of a chosen word's sentence that is named.

    Args:
        setting: The job, whose model has this encoder.
        encoder: The folder of the encoder.
        seeds: The seed of the data, and that of the choice of the word.
        secure: Whether the server sees only the sum of all sites.
        honest: Whether the server sends honest parameters.
    """
    generated = {"sites": SITES, "sentences": ENCODER_SENTENCES}
    method, config, data = opened(setting, seeds[0], generated)
    sites = [method.make_site(each, config, cache=encoder / "cache") for each in data]
    sentences = [sentences_of(site) for site in sites]
    chosen = draw_word(sentences, seeds[1])
    is_low_rank = setting.table["model"]["train"] == "lora"
    trap = SentenceTrap(load_embeddings(encoder), chosen, is_low_rank=is_low_rank)

    def send(tensors: Tensors) -> Tensors:
        if honest or not has_maps(tensors):
            return tensors
        return set_trap(tensors, trap, SCALE)

    server = LyingServer(sites, send, setting.task, secure=secure)
    change = find_units(take_change(method, config, server))
    named = trap.name_words(change[: len(trap.read_at)])
    (sentence,) = (each for each in sentences[0] if chosen in each)
    return share_named(named, sentence, chosen)


def sentences_read(
    setting: Setting, seed: int, *, secure: bool, honest: bool, tries: int = TRIES
) -> float:
    """Return the mean fraction of the chosen words' sentences that is named."""
    generated = {"sites": SITES, "sentences": ENCODER_SENTENCES}
    with tempfile.TemporaryDirectory() as folder:
        encoder = save_encoder(Path(folder), vocabulary_of(seed, generated), seed)
        model = {**setting.table["model"], "encoder": str(encoder)}
        placed = replace(setting, table={**setting.table, "model": model})
        return fmean(
            sentence_read(
                placed,
                encoder,
                (seed, 100 * seed + number),
                secure=secure,
                honest=honest,
            )
            for number in range(tries)
        )


TRAPS = {
    "words": (WORDS, words_read),
    "patients": (PATIENT_JOBS, patients_read),
    "classifiers": (CLASSIFIER_JOBS, classifiers_read),
    "encoders": (ENCODER_JOBS, sentences_read),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each setting: mean and standard deviation over seeds, in percent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--traps", nargs="+", default=[*TRAPS], choices=[*TRAPS])
    parser.add_argument(
        "--settings", nargs="+", help="names of settings; all by default"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    arguments_given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| trap | job | trap weights | with the secure sum | honest parameters |")
    print("|---|---|---:|---:|---:|")
    for trap in arguments_given.traps:
        settings, measure = TRAPS[trap]
        for name, setting in settings.items():
            if arguments_given.settings and name not in arguments_given.settings:
                continue
            cells = []
            for options in (
                {"secure": False, "honest": False},
                {"secure": True, "honest": False},
                {"secure": False, "honest": True},
            ):
                percentages = [
                    100 * measure(setting, seed, **options)
                    for seed in arguments_given.seeds
                ]
                spread = stdev(percentages) if len(percentages) > 1 else 0.0
                cells.append(f"{fmean(percentages):.0f} ± {spread:.0f}")
            print(f"| {trap} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
