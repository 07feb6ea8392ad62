"""Fine-tuning, compared with plain torch loops and NumPy on tiny random models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_taggers import assert_same, plain_adamw
from tiny_taggers import values as copied

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Total
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.split import pool_documents
from fednotes.engines.inprocess import InProcess
from fednotes.methods import distill, finetune, personal
from fednotes.methods.finetune import Config, Site, _Sentences, count_notes
from fednotes.methods.private import DPMethod
from fednotes.metrics.spans import SpanCounts
from fednotes.metrics.thresholds import THRESHOLDS
from fednotes.privacy.promise import Privacy
from fednotes.taggers.encoder_tagger import EncoderTaggerConfig
from fednotes.taggers.saving import build_model, load_model, save_model
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.taggers.type_scorer import TypeScorerConfig

DRUGS, FINDINGS = ("aspirin", "ibuprofen"), ("pain", "fever", "cough", "nausea")
FILL = "patient has the was given mg daily with on exam no".split()


def documents(seed: int, count: int, types: Sequence[str] = ("drug", "finding")) -> Any:
    """Return short notes in which the two kinds of words are mentions."""
    rng = np.random.default_rng(seed)
    notes = []
    for number in range(count):
        text, spans = "", []
        for _ in range(3):
            words = [str(w) for w in rng.choice(FILL, 4)]
            label, known = (("drug", DRUGS), ("finding", FINDINGS))[
                int(rng.integers(2))
            ]
            words.insert(int(rng.integers(5)), str(rng.choice(known)))
            for word in words:
                if word in known and label in types:
                    spans.append(Span(len(text), len(text) + len(word), label))
                text += word + " "
            text = text[:-1] + ". "
        notes.append(Document(f"{seed}-{number}", text, tuple(spans)))
    return tuple(notes)


def site_data(name: str, seed: int, count: int, *types: str) -> SiteData:
    site_types = types or ("drug", "finding")
    parts = (
        documents(seed + k, n, site_types) for k, n in ((0, count), (100, 4), (200, 6))
    )
    return SiteData(name, TagSet(site_types), *parts)


def config(bert: Path, sites: Sequence[SiteData], **changes: Any) -> Config:
    model = TokenClassifierConfig(encoder=str(bert), **changes.pop("model", {}))
    settings = {"cycles": 2, "batch_size": 4, "learning_rate": 3e-3, "seed": 3}
    settings |= {"min_tokens": 0, "min_steps": 0}
    return finetune.METHOD.configure(Config(model=model, **settings | changes), sites)


def train(sites: Sequence[SiteData], config: Config, **options: Any) -> list[Site]:
    out = options.pop("out", None)
    members = [Site(data, config, directory=out and out / data.id) for data in sites]
    finetune.train(InProcess(members, **options), config)
    return members


@pytest.mark.slow
def test_fine_tuning_with_differential_privacy_clips_each_document(
    bert: Path, tmp_path: Path
) -> None:
    """Two rounds of three silos whose classifiers are private: a document's gradient
    has length C over encoder and classifier together, by NumPy; sites end with one
    encoder and save models."""
    sites = [site_data(name, seed, 5) for seed, name in enumerate("abc")]
    settings = {
        **finetune.METHOD.dp.required_settings,
        "cycles": 1,
        "local_epochs": 0.8,
    }
    settings_with_privacy = config(bert, sites, private=("classifier",), **settings)
    settings_with_privacy = replace(
        settings_with_privacy,
        privacy=Privacy(noise=0.5, unit="document", rate=0.8, clip=0.1),
    )
    method = DPMethod(finetune.METHOD)
    members = [
        method.make_site(data, settings_with_privacy, directory=tmp_path / data.id)
        for data in sites
    ]
    for unit in members[0].units:
        parts = members[0].clip_gradient(unit).items()
        scaled = [v.numpy().ravel() * members[0]._grids[name] for name, v in parts]
        length = float(np.linalg.norm(np.concatenate(scaled)))
        assert 0.0999 < length <= 0.1
    before = [copied(member.site.private) for member in members]
    final = method.train(InProcess(members, secure=True), settings_with_privacy)
    assert final.round == 2
    for member, start in zip(members, before, strict=True):
        assert (tmp_path / member.id / "model").is_dir()
        for name, value in member.site.shared.items():
            assert torch.equal(value, final.tensors[f"shared.{name}"])
        assert not any(
            torch.equal(value, start[n]) for n, value in member.site.private.items()
        )


def test_noisy_sums_of_biases_have_no_other_parameters(bert: Path) -> None:
    """An answer under [privacy] has a tensor for each trained parameter, and the
    server's steps move no other ones."""
    sites = [site_data(name, seed, 5) for seed, name in enumerate("abc")]
    required = {**finetune.METHOD.dp.required_settings, "cycles": 1}
    settings = config(bert, sites, model={"train": "biases"}, **required)
    privacy = Privacy(noise=0.5, unit="document", rate=0.8, clip=0.1)
    settings = replace(settings, privacy=privacy)
    method = DPMethod(finetune.METHOD)
    members = [method.make_site(data, settings) for data in sites]
    model = members[0].site.model
    before = copied(dict(model.named_parameters()))
    initial = finetune.make_initial_parameters(settings)
    answer = members[0].noisy_gradients(initial, round=0)
    assert answer.tensors.keys() == model.trainable().keys() == initial.keys()
    is_bias_or_norm = {
        name: name.endswith("bias") or "LayerNorm" in name for name in initial
    }
    assert all(
        known or name == "classifier.weight" for name, known in is_bias_or_norm.items()
    )

    members = [method.make_site(data, settings) for data in sites]
    method.train(InProcess(members, secure=True), settings)
    for name, value in members[0].site.model.named_parameters():
        assert torch.equal(value, before[name]) == (name not in initial), name


def values(site: Site) -> dict[str, torch.Tensor]:
    return copied(site.parameters)


@pytest.mark.parametrize("trained", ["encoder", "biases"])
def test_a_federation_of_one_site_equals_ordinary_fine_tuning_bit_for_bit(
    bert: Path, trained: str
) -> None:
    """The judge: one plain loop with torch's AdamW on the mean loss of a word."""
    data = site_data("a", 1, 10)
    settings = config(bert, [data], model={"train": trained})
    trained_values = values(train([data], settings)[0])
    model = build_model(settings.model, data.tags, settings.seed)
    corpus: Any = model.prepare(data.train)
    model.train(True)

    def loss(step: int, batch: np.ndarray) -> torch.Tensor:
        torch.manual_seed(seed_of(3, "dropout", "a", step))
        return model.losses(corpus, batch).source.sum() / int(corpus.words[batch].sum())

    epochs = (
        draw_epoch_batches(corpus.lengths, 4, rng_of(3, "order", "a", epoch))
        for epoch in range(2)
    )
    batches = [batch for epoch in epochs for batch in epoch]
    steps = [partial(loss, step, batch) for step, batch in enumerate(batches)]
    plain_adamw(model.trainable(), settings, steps)
    assert_same(trained_values, copied(model.trainable()))


def test_an_earlier_classifier_is_reported(bert: Path, tmp_path: Path) -> None:
    """With the types that are reused; of a job whose types are not known yet all of
    them."""
    earlier = build_model(
        TokenClassifierConfig(encoder=str(bert)), TagSet(("Dose", "ADR")), 7
    )
    save_model(earlier, tmp_path / "model")
    model = TokenClassifierConfig(encoder=str(tmp_path / "model"), train="lora")
    for method in (finetune, personal, distill):
        options = {"weighting": False} if method is distill else {}
        for types, reused in (
            (("Drug", "ADR"), "ADR"),
            ((), "Dose, ADR"),
            (("Drug",), ""),
        ):
            settings = method.METHOD.config_class(
                model=model, tags=TagSet(types), **options
            )
            warnings = method.METHOD.list_warnings(settings)
            assert len(warnings) == bool(reused)
            assert not reused or f"outputs for {reused} are reused" in warnings[0]
        without_tags = replace(settings, model=replace(model, encoder=str(bert)))
        assert method.METHOD.list_warnings(without_tags) == ()
    initial_values = finetune.make_initial_parameters(
        Config(model=model, tags=TagSet(("Drug", "ADR")))
    )
    earlier_weight = dict(earlier.named_parameters())["classifier.weight"]
    assert torch.equal(
        initial_values["classifier.weight"][[0, 3, 4]], earlier_weight[[0, 3, 4]]
    )
    assert not torch.equal(
        initial_values["classifier.weight"][[1, 2]], earlier_weight[[1, 2]]
    )


def test_sites_are_weighted_by_their_notes(bert: Path) -> None:
    """Eq. 1 in NumPy float64, over what each silo trains to by itself."""
    sites = [site_data("a", 1, 9), site_data("b", 2, 5)]
    settings = config(bert, sites, cycles=1)
    apart = [values(train([site], settings)[0]) for site in sites]
    together = values(train(sites, settings)[0])
    for name, value in together.items():
        each = [q[name].numpy().astype(np.float64) for q in apart]
        expected = ((9 * each[0] + 5 * each[1]) / 14).astype(np.float32)
        np.testing.assert_array_equal(value.numpy(), expected)


def test_notes_of_two_patients_with_equal_ids_are_counted_separately() -> None:
    """By hand: (p, 1), (q, 1) and (q, 2), of the last one two sentences."""
    notes = [Document("1", "a", patient="p"), Document("1", "a", patient="q")]
    cut = [
        Document(f"2#{i}", "b", patient="q", meta={"document": "2"}) for i in range(2)
    ]
    assert count_notes([*notes, *cut]) == 3


def test_cycles_are_evaluated_by_exact_mentions() -> None:
    """By hand: of three mentions one is found exactly and one by half, and one is
    invented: strict F1 2/6, where any overlap would be 4/6."""
    gold = Document(
        "1", "a b c d e f", (Span(0, 3, "x"), Span(4, 5, "x"), Span(8, 9, "x"))
    )
    predicted = replace(
        gold, spans=(Span(0, 1, "x"), Span(4, 5, "x"), Span(10, 11, "x"))
    )
    counts = SpanCounts.of([gold], [predicted], types=["x"])
    assert finetune.METHOD.summarise(counts.to_metrics()) == {
        "held_out": pytest.approx(1 / 3),
        "valid_f1": pytest.approx(1 / 3),
    }


def test_cycles_are_not_evaluated_if_no_held_out_note_is_annotated() -> None:
    """A wrong mention among notes without any has an F1 of 0, and says nothing of the
    cycle."""
    gold = Document("1", "a b c d e f")
    false_positive = replace(gold, spans=(Span(0, 1, "x"),))
    for predicted in (gold, false_positive):
        counts = SpanCounts.of([gold], [predicted], types=["x"])
        judged = finetune.METHOD.summarise(counts.to_metrics())
        assert judged == {"held_out": -math.inf, "valid_f1": 0.0}


@pytest.mark.slow
def test_a_trained_model_is_saved_for_hugging_face(bert: Path, tmp_path: Path) -> None:
    import transformers

    sites = [site_data("a", 1, 40), site_data("b", 2, 30)]
    settings = config(bert, sites, cycles=6, model={"train": "all"})
    members = train(sites, settings, out=tmp_path)
    assert members[0].scores["strict"]["f1"] > 0.9
    folder = tmp_path / "a" / "model"
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    again = load_model(folder)
    documents_held_out = sites[0].test
    assert [d.spans for d in again.predict(documents_held_out)] == [
        d.spans for d in members[0].model.predict(documents_held_out)
    ]
    state = theirs.state_dict()
    assert torch.equal(
        state["classifier.weight"], members[0].shared["classifier.weight"]
    )
    assert "which words" in finetune.METHOD.list_warnings(settings)[0]


@pytest.mark.slow
def test_sites_with_different_types_train_private_classifiers_over_a_common_encoder(
    bert: Path,
) -> None:
    """FedNER's split: different entity types, no common output layer."""
    sites = [site_data("a", 1, 30, "drug"), site_data("b", 2, 30, "finding")]
    changes: Any = {"model": {"train": "all"}, "learning_rate": 0.01, "cycles": 6}
    settings = config(bert, sites, private=("classifier",), **changes)
    a, b = train(sites, settings)
    assert a.private.keys() == {"classifier.weight", "classifier.bias"}
    assert not finetune.METHOD.ends_with_one_model(settings)
    assert_same(a.shared, b.shared)
    for site in (a, b):
        assert site.scores["strict"]["f1"] > 0.9
    assert a.scores["by_type"].keys() == {"drug"}


def test_a_missing_type_is_not_a_negative_example(bert: Path) -> None:
    """What is trained does not fall when a word that may be a foreign type is called O:
    the loss by hand is -log of the probability of all that the site's annotation
    allows, a mean a word."""
    sites = [site_data("a", 1, 40, "drug"), site_data("b", 2, 40, "finding")]
    settings = config(bert, sites, cycles=1)
    site = Site(sites[0], settings)
    site.model.train(False)
    with torch.no_grad():
        # "finding" everywhere costs site a nothing
        site.parameters["classifier.bias"][3:] = 50.0
    model: Any = site.model
    part = _Sentences(model, site._read, np.arange(6))
    words = model._read(site._read, np.arange(6))
    probabilities = torch.softmax(words.logits, 1).detach().numpy()
    tags = site._read.encoded.tags[words.tokens]
    foreign = probabilities[:, [0, 3, 4]].sum(1)  # O, B-finding, I-finding
    token_probabilities = np.where(
        tags == 0, foreign, probabilities[np.arange(len(tags)), tags]
    )
    assert (tags > 0).any()
    expected = -np.log(token_probabilities[tags == 0]).sum()
    assert expected < 1e-3
    logs = torch.log_softmax(words.logits, 1).detach().numpy()
    expected -= logs[np.arange(len(tags)), tags][tags > 0].sum()
    assert float(part.loss([part]).detach()) == pytest.approx(
        expected / len(tags), rel=1e-4
    )


@pytest.mark.slow
def test_sites_with_different_types_train_one_model_of_all_types(bert: Path) -> None:
    """Each is tested on both types and has annotated one; O would hide the other."""
    full = [site_data(name, seed, 60) for name, seed in (("a", 1), ("b", 2))]
    sites = [
        replace(
            site,
            tags=TagSet((kind,)),
            train=documents(seed, 60, (kind,)),
            test_types=all_types,
        )
        for site, seed, kind in zip(full, (1, 2), ("drug", "finding"), strict=True)
        for all_types in [("drug", "finding")]
    ]
    changes: Any = {"model": {"train": "all"}, "learning_rate": 0.01, "cycles": 6}
    trained = train(sites, config(bert, sites, **changes))
    for site in trained:
        assert site.scores["by_type"].keys() == {"drug", "finding"}
        assert site.scores["strict"]["recall"] > 0.9


@pytest.mark.parametrize("keep_cycle", [1, -1])
def test_private_layers_belong_to_the_kept_cycle(bert: Path, keep_cycle: int) -> None:
    """A run of the kept cycle alone, under the same schedule, ends with the same
    classifier."""
    sites = [site_data("a", 1, 9, "drug"), site_data("b", 2, 7, "finding")]
    settings = config(
        bert, sites, cycles=3, private=("classifier",), keep_cycle=keep_cycle
    )
    judged: list[tuple[float, list[dict[str, torch.Tensor]]]] = []
    members = [Site(data, settings) for data in sites]

    def note(result: Any) -> None:
        judged.append(
            (result.metrics["held_out"], [copied(m.private) for m in members])
        )

    finetune.train(InProcess(members, observer=note), settings)
    best = judged[0] if keep_cycle == 1 else max(judged, key=lambda each: each[0])
    for member, expected in zip(members, best[1], strict=True):
        assert_same(member.private, expected)


@pytest.mark.slow
def test_adapters_of_a_frozen_encoder_are_trained(bert: Path) -> None:
    sites = [site_data("a", 1, 30), site_data("b", 2, 30)]
    model = EncoderTaggerConfig(encoder=str(bert), tuning="lora", dropout=0.0)
    settings = replace(config(bert, sites, cycles=8, learning_rate=0.03), model=model)
    assert train(sites, settings)[0].scores["strict"]["f1"] > 0.6


def scorer_sites(count: int = 40) -> list[SiteData]:
    """Return three sites that each annotate one type and are tested on both types."""
    return [
        replace(
            site_data(name, seed, count, kind),
            test=documents(seed + 200, 6),
            test_types=("drug", "finding"),
        )
        for name, seed, kind in (
            ("a", 1, "drug"),
            ("b", 2, "finding"),
            ("c", 3, "drug"),
        )
    ]


def scorer_config(bert: Path, sites: Sequence[SiteData], **changes: Any) -> Config:
    model = TypeScorerConfig(
        encoder=str(bert),
        descriptions={"drug": "aspirin and ibuprofen"},
        width=16,
        threshold=0.5,
        dropout=0.0,
    )
    return replace(config(bert, sites, **changes), model=model)


# The F1 of a model that finds all mentions of one of two types, and none of the other.
F1_OF_ONE_TYPE = 2 / 3


@pytest.mark.slow
def test_sites_with_different_types_train_one_type_scorer(
    bert: Path, tmp_path: Path
) -> None:
    """Its final model is that of each site, and knows the types of all sites."""
    sites = scorer_sites()
    settings = scorer_config(bert, sites, cycles=25, learning_rate=0.01)
    a, b, c = train(sites, settings, secure=True, out=tmp_path)
    assert_same(a.shared, b.shared)
    for site in (a, b, c):
        assert site.scores["by_type"].keys() == {"drug", "finding"}
        assert site.scores["strict"]["f1"] > F1_OF_ONE_TYPE
    model = load_model(tmp_path / "a" / "model")
    texts = documents(7, 3)
    assert model.predict(texts) == a.model.predict(texts)


def choosing(bert: Path, sites: Sequence[SiteData], **changes: Any) -> Config:
    """Return the settings of training that chooses a type scorer's threshold."""
    settings = scorer_config(bert, sites, learning_rate=0.01, **changes)
    return replace(settings, choose_threshold=True)


def score_thresholds_by_sets(members: Sequence[Site]) -> dict[float, float]:
    """Return the F1 at each threshold over all sites' own types, by sets of mentions."""
    scores = {}
    for threshold in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005):
        gold: set[Any] = set()
        guessed: set[Any] = set()
        for member in members:
            config = member.model.config
            member.model.config = replace(config, threshold=threshold)
            predicted = member.model.predict(member.data.valid)
            member.model.config = config
            for mentions, documents_of in (
                (gold, member.data.valid),
                (guessed, predicted),
            ):
                mentions.update(
                    (member.id, each.id, span)
                    for each in documents_of
                    for span in each.spans
                    if span.label in member.data.tags.types
                )
        precision = len(gold & guessed) / len(guessed) if guessed else 0.0
        recall = len(gold & guessed) / len(gold)
        both = precision + recall
        scores[threshold] = 2 * precision * recall / both if both else 0.0
    return scores


def test_sites_choose_the_threshold_with_the_best_f1_over_their_validation_data(
    bert: Path, tmp_path: Path
) -> None:
    """The sums of counts suffice. The models of the sites and the server have it."""
    sites = scorer_sites(12)
    settings = choosing(bert, sites, cycles=8)
    members = [Site(data, settings, directory=tmp_path / data.id) for data in sites]
    final = finetune.train(InProcess(members, secure=True), settings)
    expected = score_thresholds_by_sets(members)
    best = max(expected.values())
    highest = max(each for each, f1 in expected.items() if f1 == best)
    assert 0 < min(expected.values()) < best
    assert {member.model.config.threshold for member in members} == {highest}
    assert finetune.METHOD.save_model(settings, final, tmp_path / "global")
    for folder in (tmp_path / "global", tmp_path / "a" / "model"):
        assert load_model(folder).config.threshold == highest
    assert members[0].scores["strict"] == members[0].score_on(sites[0])["strict"]

    server = finetune.Server(settings, members[0].shared, finetune.summarise, None)
    server.round = settings.cycles
    updates = [member.evaluate(member.shared, cycle=8) for member in members]
    server.judge(Total.of(updates))
    assert server.metrics["valid_f1"] == pytest.approx(best)
    for threshold, f1 in expected.items():
        assert server.metrics[f"valid_f1_at_{threshold:g}"] == pytest.approx(f1)
    resumed = finetune.Server(
        settings, members[0].shared, finetune.summarise, server.state()
    )
    assert resumed.list_finish_options() == {"threshold": highest}


def test_the_threshold_is_that_of_the_kept_cycle(bert: Path) -> None:
    """The second of three evaluations has the best F1; ties take the higher value."""
    sites = scorer_sites(2)
    settings = choosing(bert, sites, cycles=3, keep_cycle=-1)
    initial = finetune.make_initial_parameters(settings)
    server = finetune.Server(settings, initial, finetune.summarise, None)
    kept = []
    for found in ({0.5: 3}, {0.2: 5, 0.02: 5}, {0.1: 4}):
        metrics = {"threshold/gold": 10.0}
        for threshold in THRESHOLDS:
            name = f"threshold/{threshold:g}"
            metrics[f"{name}/predicted"] = 10.0
            metrics[f"{name}/tp"] = float(found.get(threshold, 0))
        server.round += 1
        kept.append(server.judge(Total({}, 1.0, metrics, 2)))
    assert kept == [True, True, False]
    assert server.list_finish_options() == {"threshold": 0.2}


def test_without_validation_mentions_the_threshold_stays(bert: Path) -> None:
    sites = [replace(site, valid=()) for site in scorer_sites(2)]
    (member, *_) = train(sites, choosing(bert, sites, cycles=1))
    assert member.model.config.threshold == 0.5


def test_a_threshold_that_cannot_be_chosen_is_refused(bert: Path) -> None:
    sites = scorer_sites(2)
    with pytest.raises(
        ConfigError, match=r"choose_threshold = true needs .*type-scorer"
    ):
        replace(config(bert, sites), choose_threshold=True)
    settings = choosing(bert, sites, cycles=1)
    privacy = Privacy(noise=0.5, unit="document", rate=0.8, clip=0.1)
    with pytest.raises(ConfigError, match=r"with \[privacy\], leave it out and set"):
        replace(settings, privacy=privacy)
    for changed, threshold in ((True, 0.3), (False, 0.5)):
        member = Site(sites[0], replace(settings, choose_threshold=changed))
        with pytest.raises(RefusedError, match="site 'a' received the threshold 0"):
            member.finish(member.shared, threshold=threshold)


def nest(data: SiteData) -> SiteData:
    """Return a site with findings around each finding and the word before it."""
    tags = replace(data.tags, types=(*data.tags.types, "phrase"), overlaps=True)
    parts = {}
    for part in ("train", "valid", "test"):
        parts[part] = tuple(
            replace(each, spans=(*each.spans, *_find_phrases(each)))
            for each in getattr(data, part)
        )
    return replace(data, tags=tags, **parts)


def _find_phrases(document: Document) -> Iterator[Span]:
    for span in document.spans:
        before = document.text[: span.start].rstrip()
        start = max(before.rfind(" "), before.rfind(".")) + 1
        if start < len(before) and before[-1] != ".":
            yield Span(start, span.end, "phrase")


@pytest.mark.slow
def test_sites_train_a_type_scorer_that_finds_nested_mentions(bert: Path) -> None:
    """Flat predictions could not have more than one mention of each pair."""
    sites = [nest(site_data(name, seed, 40)) for seed, name in enumerate("ab")]
    model = replace(scorer_config(bert, sites).model, descriptions={})
    settings = config(bert, sites, cycles=25, learning_rate=0.01)
    a, _ = train(sites, replace(settings, model=model))
    of_type = a.scores["by_type"]
    gold = sum(len(document.spans) for document in sites[0].test)
    assert a.scores["support"] == gold
    assert of_type["phrase"]["support"] > 0.6 * (gold - of_type["phrase"]["support"])
    assert all(scores["strict"]["recall"] > 0.8 for scores in of_type.values())


def test_private_pseudo_annotation_needs_flat_mentions(bert: Path) -> None:
    sites = [nest(site_data(name, seed, 2)) for seed, name in enumerate("ab")]
    settings = distill.Config(
        model=scorer_config(bert, scorer_sites(2)).model,
        privacy=Privacy(noise=0.5, unit="document", rate=0.8, clip=0.1),
        weighting=False,
    )
    pseudo = replace(settings, unannotated="pseudo")
    with pytest.raises(ConfigError, match=r'do not overlap: set unannotated = "soft"'):
        distill.METHOD.configure(pseudo, sites)
    soft = distill.METHOD.configure(replace(settings, unannotated="soft"), sites)
    assert soft.tags.overlaps


def test_a_site_alone_trains_a_type_scorer_of_its_own_types(bert: Path) -> None:
    """It gets the descriptions of its own types alone."""
    sites = scorer_sites(4)
    configs = finetune.METHOD.configure_alone(scorer_config(bert, sites), sites)
    assert [each.model.descriptions for each in configs] == [
        {"drug": "aspirin and ibuprofen"},
        {},
        {"drug": "aspirin and ibuprofen"},
    ]
    for site, settings in zip(sites, configs, strict=True):
        (member,) = train([site], settings)
        assert member.model.tagset == site.tags


def test_private_type_scorers_have_the_types_of_their_sites(bert: Path) -> None:
    sites = scorer_sites(4)
    settings = scorer_config(bert, sites, private=("classifier",))
    a, b, _ = train(sites, settings)
    assert (a.model.tagset, b.model.tagset) == (sites[0].tags, sites[1].tags)
    assert_same(a.shared, b.shared)
    assert a.private.keys() == b.private.keys()


@pytest.mark.slow
@pytest.mark.parametrize("unannotated", ["soft", "marginal"])
def test_a_type_scorer_is_distilled(bert: Path, unannotated: Any) -> None:
    """Its targets for other types are the global model's probabilities, or none."""
    sites = scorer_sites()
    settings = distill.METHOD.configure(
        distill.Config(
            model=scorer_config(bert, sites).model,
            unannotated=unannotated,
            weighting=False,
            rounds=25,
            learning_rate=0.005,
            seed=3,
        ),
        sites,
    )
    members = [distill.Site(site, settings) for site in sites]
    distill.train(InProcess(members), settings)
    for member in members:
        assert member.scores["strict"]["f1"] > F1_OF_ONE_TYPE
        assert member.scores["by_type"].keys() == {"drug", "finding"}


def test_a_type_scorer_is_trained_with_differential_privacy(bert: Path) -> None:
    """The clipped gradient of a document has length C, by NumPy, and is that of the
    document alone."""
    sites = scorer_sites(5)
    settings = scorer_config(
        bert, sites, **{**finetune.METHOD.dp.required_settings, "cycles": 1}
    )
    settings = replace(
        settings, privacy=Privacy(noise=0.5, unit="document", rate=0.8, clip=0.1)
    )
    method = DPMethod(finetune.METHOD)
    members = [method.make_site(data, settings) for data in sites]
    for unit in members[0].units:
        parts = members[0].clip_gradient(unit).items()
        scaled = [v.numpy().ravel() * members[0]._grids[name] for name, v in parts]
        length = float(np.linalg.norm(np.concatenate(scaled)))
        assert 0.0999 < length <= 0.1
    final = method.train(InProcess(members, secure=True), settings)
    for member in members:
        for name, value in member.site.shared.items():
            assert torch.equal(value, final.tensors[f"shared.{name}"])


def test_pooled_training_uses_all_notes_and_no_private_layers(bert: Path) -> None:
    sites = [site_data("a", 1, 5), site_data("b", 2, 5)]
    together, settings = finetune.METHOD.configure_pooled(
        config(bert, sites), sites, None
    )
    assert together[0].train == pool_documents(sites).train
    assert not settings.private
    mixed = [site_data("a", 1, 5, "drug"), site_data("b", 2, 5, "finding")]
    apart, settings = finetune.METHOD.configure_pooled(config(bert, mixed), mixed, None)
    assert [s.id for s in apart] == ["a", "b"]
    assert settings.private == ("classifier",)
    site_configs = finetune.METHOD.configure_alone(config(bert, mixed), mixed)
    assert [each.tags.types for each in site_configs] == [("drug",), ("finding",)]


def test_a_batch_alone_counts_notes_or_sentences_as_the_model_reads_them(
    bert: Path,
) -> None:
    """Six notes of three sentences and six of one: where notes are read whole, half of
    it each."""
    long, short = site_data("a", 1, 6), site_data("b", 2, 6)
    first = tuple(Document(d.id, d.text.split(".")[0]) for d in short.train)
    sites = [long, replace(short, train=first)]
    for context, shares in (("document", [4, 4]), ("sentence", [6, 2])):
        model = {"context": context}
        settings = config(bert, sites, batch="shared", batch_size=8, model=model)
        assert [
            site_config.batch_size
            for site_config in finetune.METHOD.configure_alone(settings, sites)
        ] == shares
        members = train(sites, replace(settings, cycles=1))
        assert [site.share for site in members] == shares


def test_an_error_names_a_wrong_setting(bert: Path) -> None:
    sites = [site_data("a", 1, 4)]
    small: Any = {"model": {"train": "all"}, "min_tokens": 10_000, "min_steps": 10}
    empty = [replace(sites[0], train=())]
    for message, job_sites, changes in (
        (
            r"no layer is called 'crf': this model has classifier",
            sites,
            {"private": ("crf",)},
        ),
        ("nothing is left to share", sites, {"private": ("classifier", "encoder")}),
        (r"min_tokens = 10,000 and min_steps = 10 are needed", sites, small),
        ("site 'a' has no training sentence", empty, {}),
    ):
        with pytest.raises(ConfigError, match=message):
            train(job_sites, config(bert, sites, **changes))
    with pytest.raises(ConfigError, match="does not support model kind"):
        finetune.METHOD.read_model_config({"kind": "tagger", "hashed_words": 8})
