"""Personal models, compared with plain torch loops and NumPy on a tiny encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compared_sums import Compared, check_sums
from fault_net import STRICT, Net
from small_classifiers import document
from tiny_models import save_encoder
from tiny_taggers import assert_same, plain_adamw, values

from fednotes.core.errors import ConfigError
from fednotes.core.seeds import rng_of
from fednotes.core.tensors import nbytes
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Total
from fednotes.data.batches import draw_epoch_batches
from fednotes.engines.inprocess import InProcess
from fednotes.methods import finetune, personal
from fednotes.methods.personal import Config, Server, Site, make_initial_parameters
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import build_model, load_model
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.training.local_trainer import LocalTrainer, Step

WORDS = ["no", "pain", "took", "and", "nausea", "metoprolol", "."]
ADR, DRUG, BOTH = ("ADR",), ("Drug",), ("ADR", "Drug")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_encoder(tmp_path_factory.mktemp("encoder"), max_position_embeddings=64)


def notes(seed: int, count: int, types: tuple[str, ...]) -> tuple[Document, ...]:
    rng = np.random.default_rng(seed)
    sentences = [
        rng.choice(WORDS, int(rng.integers(2, 7))).tolist() for _ in range(count)
    ]
    documents = [document(i, words, types=types) for i, words in enumerate(sentences)]
    return tuple(replace(each, id=f"{seed}-{each.id}") for each in documents)


def site_data(name: str, seed: int, count: int, *types: str) -> SiteData:
    parts = (notes(seed + k, n, types) for k, n in ((0, count), (100, 5), (200, 6)))
    return SiteData(name, TagSet(types), *parts)


THREE = (("a", 1, 9, *ADR), ("b", 2, 7, *BOTH), ("c", 3, 6, *DRUG, "Dose"))


def three(times: int = 1) -> list[SiteData]:
    """Return three sites: "ADR" and "Drug" are at two of them each, "Dose" at one."""
    return [
        site_data(name, seed, times * count, *types)
        for name, seed, count, *types in THREE
    ]


def config(encoder: Path, sites: Sequence[SiteData], **changes: Any) -> Config:
    table = {"train": "lora", "rank": 2, "dropout": 0.0} | changes.pop("model", {})
    model = TokenClassifierConfig(encoder=str(encoder), **table)
    settings = {"cycles": 2, "batch_size": 4, "learning_rate": 0.02, "seed": 3}
    settings |= {"distil_epochs": 1}
    return personal.METHOD.configure(Config(model=model, **settings | changes), sites)


def train(sites: Sequence[SiteData], config: Any, **options: Any) -> list[Any]:
    out = options.pop("out", None)
    method = personal.METHOD
    members = [
        method.make_site(data, config, directory=out and out / data.id)
        for data in sites
    ]
    method.train(InProcess(members, **options), config)
    return members


def test_training_of_one_site_equals_a_plain_loop(encoder: Path) -> None:
    """The judge: the library's BERT with W + s B A + s B' A' for its weights, sentence
    by sentence, and torch's AdamW over both changes and the classifier."""
    data = site_data("a", 1, 10, *BOTH)
    settings = config(encoder, [data], distil_epochs=0, model={"maps": "attention"})
    (site,) = train([data], settings)
    fresh: Any = build_model(settings.model, data.tags, 3)
    fresh.adapt(3, "private")
    library = fresh.library
    start = {n: p.detach().clone() for n, p in library.named_parameters()}
    maps = [
        f"bert.encoder.layer.{i}.attention.self.{n}"
        for i in range(3)
        for n in ("query", "value")
    ]
    trained = {
        n: p
        for n, p in fresh.named_parameters()
        if n.split(".")[0] in ("lora", "private")
    }
    trained |= {
        n: torch.nn.Parameter(start[n])
        for n in ("classifier.weight", "classifier.bias")
    }
    assert not torch.equal(trained["lora.down"], trained["private.down"])

    def sentence(index: int) -> torch.Tensor:
        words = data.train[index].text.split()
        encoding = fresh.tokenizer(words, is_split_into_words=True, return_tensors="pt")
        first = [encoding.word_ids().index(k) for k in range(len(words))]
        weights = start | {
            n: p for n, p in trained.items() if n.startswith("classifier")
        }
        for at, name in enumerate(maps):
            for change in ("lora", "private"):
                product = trained[f"{change}.up"][at] @ trained[f"{change}.down"][at]
                # 16 / 2
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + 8.0 * product
        library.eval()
        ids = encoding["input_ids"]
        out = torch.func.functional_call(
            library, weights, (ids,), {"attention_mask": ids * 0 + 1}
        )
        labels = {"pain": 1, "nausea": 1, "metoprolol": 3}
        gold = torch.tensor([labels.get(word, 0) for word in words])
        return F.cross_entropy(out.logits[0, first], gold, reduction="sum")

    def loss(batch: np.ndarray) -> torch.Tensor:
        number = sum(len(data.train[i].text.split()) for i in batch)
        return torch.stack([sentence(i) for i in batch]).sum() / number

    epochs = (
        draw_epoch_batches(site.train_set.lengths, 4, rng_of(3, "order", "a", e))
        for e in range(2)
    )
    steps = [partial(loss, batch) for epoch in epochs for batch in epoch]
    plain_adamw(trained, settings, steps)
    for name in ("lora.down", "lora.up", "private.down", "private.up"):
        torch.testing.assert_close(
            site.parameters[name], trained[name], rtol=2e-4, atol=2e-5
        )
    for part in ("weight", "bias"):
        rows = [site.parameters[f"classifier.{part}.{tag}"] for tag in data.tags.tags]
        expected = trained[f"classifier.{part}"]
        torch.testing.assert_close(torch.cat(rows), expected, rtol=2e-4, atol=2e-5)
    assert trained["private.up"].abs().max() > 0.01


def test_a_row_is_averaged_over_the_sites_that_have_its_tag(encoder: Path) -> None:
    """By NumPy in float64: of B-ADR sites a and b (9 and 7 notes), of B-Drug b and c (7
    and 6), of the change all three; and all send the same names and shapes, nothing
    private among them."""
    sites = three()
    settings = config(encoder, sites)
    tags = ("B-ADR", "I-ADR", "B-Drug", "I-Drug")
    assert settings.shared_tags == tags
    members = [Site(data, settings) for data in sites]
    server = Server(
        settings, make_initial_parameters(settings), personal.summarise_mentions, None
    )
    updates = [member.train(server.select_sent(), cycle=0) for member in members]
    rows = {f"classifier.{part}.{tag}" for part in ("weight", "bias") for tag in tags}
    shapes = [
        {name: value.shape for name, value in each.tensors.items()} for each in updates
    ]
    assert shapes[0].keys() == rows | {"lora.down", "lora.up", "counted"}
    assert shapes[0] == shapes[1] == shapes[2]
    assert not updates[0].tensors["classifier.weight.B-Drug"].any()
    assert not updates[2].tensors["classifier.bias.I-ADR"].any()
    mean = server.compute_mean(Total.of(updates))
    assert mean.keys() == server.select_sent().keys()
    places_by_row = {
        "lora.up": (0, 1, 2),
        "classifier.weight.B-ADR": (0, 1),
        "classifier.bias.I-Drug": (1, 2),
    }
    for name, places in places_by_row.items():
        each = {
            k: members[k].parameters[name].detach().double().numpy() for k in places
        }
        notes = {k: (9, 7, 6)[k] for k in places}
        expected = sum(notes[k] * each[k] for k in places) / sum(notes.values())
        np.testing.assert_array_equal(mean[name].numpy(), expected.astype(np.float32))
    # b and c dropped out: a row of theirs stays
    apart = server.compute_mean(Total.of(updates[:1]))
    assert torch.equal(
        apart["classifier.weight.B-Drug"],
        server.select_sent()["classifier.weight.B-Drug"],
    )
    assert torch.equal(apart["lora.down"], updates[0].tensors["lora.down"])


@pytest.mark.parametrize(
    ("share_outputs", "types", "shared_tags"),
    [
        ("common", (ADR, BOTH), "B-ADR I-ADR"),
        ("common", (BOTH, BOTH), "O B-ADR I-ADR B-Drug I-Drug"),
        ("common", (ADR, DRUG), ""),
        ("none", (BOTH, BOTH), ""),
    ],
)
def test_rows_of_common_tags_are_shared(
    encoder: Path, share_outputs: str, types: Sequence[Sequence[str]], shared_tags: str
) -> None:
    """By hand; and the sites end with equal ones of these, and each with its own of the
    others."""
    sites = [
        site_data(f"s{n}", n, 5, *site_types) for n, site_types in enumerate(types)
    ]
    settings = config(encoder, sites, share_outputs=share_outputs, cycles=1)
    assert settings.shared_tags == tuple(shared_tags.split())
    first, second = train(sites, settings)
    assert_same(values(first.shared), values(second.shared))
    assert not torch.equal(first.private["private.up"], second.private["private.up"])
    private_tags = {
        name.split(".", 2)[2] for name in first.private if name.startswith("classifier")
    }
    assert private_tags == set(TagSet(tuple(types[0])).tags) - set(settings.shared_tags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "batch": "shared",
            "batch_size": 8,
            "server": "nesterov",
            "keep_cycle": -1,
            "cycles": 3,
        },
        {"local_epochs": 0.5, "lora_learning_rate": 0.05, "compression": "packed"},
    ],
    ids=["each", "shared", "steps"],
)
def test_the_own_model_equals_training_alone(
    encoder: Path, changes: dict[str, Any]
) -> None:
    """To the bit that of fine-tuning at each site by itself, which is what "alone" is."""
    sites = three()
    settings = config(encoder, sites, **changes)
    members = train(sites, settings)
    for data, own_config, member in zip(
        sites, personal.METHOD.configure_alone(settings, sites), members, strict=True
    ):
        assert isinstance(own_config, finetune.Config)
        (alone,) = train([data], own_config)
        assert type(alone) is finetune.Site
        assert_same(values(member.own_site.parameters), values(alone.parameters))
        assert member.scores["parts"]["own"]["strict"] == alone.scores["strict"]


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["each", "shared"])
def test_sites_that_share_nothing_do_not_affect_each_other(
    encoder: Path, batch: str
) -> None:
    """No number but counts leaves it, and both models have the bits that they have
    where the other sites hold other notes."""
    sites = three()
    control = {
        "share_change": False,
        "share_outputs": "none",
        "batch": batch,
        "server": "nesterov",
    }
    settings = config(encoder, sites, **control)
    assert make_initial_parameters(settings) == {}
    members = train(sites, settings)
    own_values, second = (
        values(members[0].own_site.parameters),
        values(members[0].parameters),
    )
    sent = members[0].train({}, cycle=1)
    assert not sent.tensors
    others = [
        site_data(s.id, 50, len(s.train), *s.tags.types) if n else s
        for n, s in enumerate(sites)
    ]
    again = train(others, settings)
    assert_same(second, values(again[0].parameters))
    assert_same(own_values, values(again[0].own_site.parameters))
    assert not torch.equal(own_values["lora.up"], second["lora.up"])


@pytest.mark.slow
def test_the_own_model_does_not_depend_on_missed_cycles(encoder: Path) -> None:
    """A site that was away for a cycle, and for the last one, has the own model of the
    others."""
    sites = three()
    settings = config(encoder, sites, cycles=4, decay="constant")
    always = train(sites, settings)[1]
    away, sent = Site(sites[1], settings), make_initial_parameters(settings)
    for cycle in (0, 2):
        away.train(sent, cycle=cycle)
    away.train(sent, cycle=9)  # that the job has not
    away.finish(sent)
    assert_same(values(away.own_site.parameters), values(always.own_site.parameters))


def test_a_site_without_held_out_notes_keeps_its_last_own_model(encoder: Path) -> None:
    """The best is asked for, which the others can say; of its own model this site
    cannot."""
    sites = three()
    sites[1] = replace(sites[1], valid=())
    settings = config(encoder, sites, keep_cycle=-1)
    member = train(sites, settings)[1]
    own_config = replace(
        personal.METHOD.configure_alone(settings, sites)[1], keep_cycle=0
    )
    (alone,) = train([sites[1]], own_config)
    assert_same(values(member.own_site.parameters), values(alone.parameters))


@pytest.mark.slow
def test_the_mix_weighs_both_models_and_is_learnt(encoder: Path) -> None:
    """NumPy: half the gold tags, half the normalised geometric mean of both models'
    probabilities; and a step on the cross-entropy with these is torch's."""
    sites = three()
    settings = config(encoder, sites, mix=0.25)
    site = train(sites, settings)[1]
    targets = site.compute_targets()
    at = 0
    for n, each in enumerate(sites[1].train):
        own_log_probabilities, federated = (
            torch.log_softmax(model._read(site.train_set, np.array([n])).logits, 1)
            .detach()
            .numpy()
            for model in (site.own_site.model.eval(), site.model.eval())
        )
        mixed = np.exp(0.75 * own_log_probabilities + 0.25 * federated)
        labels = {"pain": 1, "nausea": 1, "metoprolol": 3}
        gold = np.eye(5)[[labels.get(word, 0) for word in each.text.split()]]
        expected = 0.5 * gold + 0.5 * mixed / mixed.sum(1, keepdims=True)
        np.testing.assert_allclose(
            targets[at : at + len(expected)], expected, atol=2e-6
        )
        at += len(expected)
    assert at == len(targets)
    before: list[torch.Tensor] = []

    class Noted(LocalTrainer):
        """Compares the loss of each step with torch's, and does not take the step."""

        def step(self, parts: Sequence[Step], *, planned: int, start: Tensors) -> float:
            a_tenth = pytest.approx(0.002)
            assert self._settings.learning_rate == a_tenth
            (part,) = parts
            batch = part.model._read(part.corpus, part.indices)
            q = torch.from_numpy(targets[batch.tokens])
            expected = F.cross_entropy(batch.logits, q)
            torch.testing.assert_close(part.loss(parts), expected)
            before.append(expected)
            return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(personal, "LocalTrainer", Noted)
        site._distil(targets)
    assert len(before) == 2


@pytest.mark.slow
def test_the_saved_model_has_the_reported_scores(encoder: Path, tmp_path: Path) -> None:
    """The saved model's predictions have the scores told; of both ends of the mix the
    parts have those of one model; and distilling changed the student, and no other
    model."""
    sites = three(5)
    for mix, name in ((0.0, "own"), (1.0, "federated")):
        rates: Any = {"learning_rate": 0.02, "lora_learning_rate": 0.002, "cycles": 8}
        settings = config(encoder, sites, mix=mix, distil_epochs=2, **rates)
        members = train(sites, settings, out=tmp_path / name)
        for data, member in zip(sites, members, strict=True):
            again = load_model(tmp_path / name / data.id / "model")
            counts = SpanCounts.of(
                data.test, again.predict(data.test), types=data.tags.types
            )
            assert counts.scores()["strict"] == member.scores["strict"]
            judged = SpanCounts.of(
                data.valid, again.predict(data.valid), types=data.tags.types
            )
            assert judged.strict_f1 == member.valid_score
            assert member.score_on(data) == {
                k: v for k, v in member.scores.items() if k != "parts"
            }
            parts = member.scores["parts"]
            assert parts["mix"] == parts[name]
            federated = SpanCounts.of(data.test, member.model.predict(data.test))
            assert parts["federated"]["strict"] == federated.scores()["strict"]
            alone_site = train(
                [data],
                personal.METHOD.configure_alone(settings, sites)[sites.index(data)],
            )[0]
            assert parts["own"]["strict"] == alone_site.scores["strict"]
            changed = member.own_site.model.trainable()["lora.up"]
            assert not torch.equal(changed, member.model.trainable()["lora.up"])
            assert_same(
                values(member._own_model.trainable()),
                values(alone_site.model.trainable()),
            )
            scores = member.scores
            member.finish({})  # which a site may be asked for twice
            assert member.scores == scores
        # else this would compare zeros
        assert sum(member.scores["strict"]["f1"] > 0.1 for member in members) >= 2


@pytest.mark.slow
def test_compressed_rows_are_weighted_by_the_sites_that_have_them(
    encoder: Path,
) -> None:
    """Within the steps of the code the rows are those that are sent whole: were they
    divided by the notes of all sites, they would have moved about half as far."""
    sites = three()
    uncompressed, eight = (
        train(sites, config(encoder, sites, cycles=1, compression=compression))[1]
        for compression in ("none", "packed")
    )
    start = make_initial_parameters(config(encoder, sites))
    for name, value in uncompressed.shared.items():
        moved, packed_change = value - start[name], eight.shared[name] - start[name]
        assert (moved - packed_change).norm() < 0.3 * moved.norm()


@pytest.mark.parametrize("compression", ["none", "packed"])
def test_a_secure_sum_counts_the_notes_of_each_row(
    encoder: Path, compression: str
) -> None:
    """A site without a note of its own type adds to no row; "Drug" is at the others."""
    sites = [site_data(f"s{i}", i, 6 + 2 * i, *DRUG) for i in range(4)]
    sites[1:] = [
        replace(site, tags=TagSet((*DRUG, f"Other{i % 2}")))
        for i, site in enumerate(sites[1:])
    ]
    silent = tuple(replace(document, spans=()) for document in sites[0].train)
    sites[0] = replace(
        sites[0], tags=TagSet(("Other0",)), train=silent, valid=(), test=()
    )
    settings = config(encoder, sites, cycles=1, compression=compression)
    assert settings.shared_tags == ("B-Other0", "I-Other0", "B-Drug", "I-Drug")

    engine = Compared([personal.METHOD.make_site(data, settings) for data in sites])
    personal.train(engine, settings)
    check_sums(engine)
    task = "train" if compression == "none" else "send"
    (counted,) = [
        total.tensors["counted"] for name, total, _ in engine.pairs if name == task
    ]
    expected = np.array([6 + 8 + 12, 6 + 8 + 12, 8 + 10 + 12, 8 + 10 + 12], np.float64)
    if compression == "packed":  # weighed by what of all notes is a site's
        expected *= 4 / (6 + 8 + 10 + 12)
    np.testing.assert_allclose(counted.numpy(), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("least", [2, 3])
def test_a_site_that_drops_out_does_not_stop_the_others(
    encoder: Path, tmp_path: Path, least: int
) -> None:
    """Between hosts. "c", one of the two that have "Drug", cannot be reached in the
    second of three cycles: where two sites are enough the others go on, else they wait
    for it. Expected is what the tasks give that are called here one by one."""
    sites = three()
    settings = config(encoder, sites, cycles=3, distil_epochs=0)
    started: dict[str, Site] = {}

    def make(data: SiteData) -> Site:
        started[data.id] = Site(data, settings)
        return started[data.id]

    def come_back() -> None:
        net.down.clear()

    def go() -> None:
        net.down.add("c")
        net.after["evaluate" if least == 2 else "@begin"] = come_back

    net = Net({site.id: partial(make, site) for site in sites}, tmp_path)
    net.after["evaluate"] = go
    engine = net.engine([site.id for site in sites], replace(STRICT, min_sites=least))
    final = personal.train(engine, settings)

    members = [Site(data, settings) for data in sites]
    server = Server(
        settings, make_initial_parameters(settings), personal.summarise_mentions, None
    )
    for cycle in range(3):
        present = members[: least if cycle == 1 else 3]
        total = Total.of(
            [member.train(server.select_sent(), cycle=cycle) for member in present]
        )
        server.step(server.compute_mean(total), total)
        server.judge(
            Total.of([m.evaluate(server.shared, cycle=cycle) for m in present])
        )
    for member in members:
        member.finish(server.result)
        assert_same(values(started[member.id].parameters), values(member.parameters))
        assert_same(
            values(started[member.id].own_site.parameters),
            values(member.own_site.parameters),
        )
        assert started[member.id].scores == member.scores
    assert_same(dict(final.tensors), dict(server.state().tensors))


def test_pooled_training_uses_all_notes_and_wrong_settings_are_refused(
    encoder: Path,
) -> None:
    sites = three()
    settings = config(encoder, sites)
    together, pooled = personal.METHOD.configure_pooled(settings, sites, None)
    assert len(together) == 3
    assert pooled.private == ("classifier",)
    assert pooled.model.train == "lora"
    assert not personal.METHOD.ends_with_one_model(settings)
    assert personal.METHOD.ends_with_one_model(
        personal.METHOD.configure_alone(settings, sites)[0]
    )
    with pytest.raises(
        ConfigError, match='trains LoRA adapters in a frozen encoder: set train = "l'
    ):
        Config(model=TokenClassifierConfig(train="all"))
    with pytest.raises(
        ConfigError, match=r'"personal" does not support model kind .tagger.'
    ):
        personal.METHOD.read_model_config({"kind": "tagger", "hashed_words": 8})
    with pytest.raises(ConfigError, match=r"scores no tags: .* or finetune$"):
        personal.METHOD.read_model_config({"kind": "type-scorer"})
    assert personal.METHOD.read_model_config({"rank": 4}).train == "lora"
    sent, received = personal.METHOD.estimate_traffic(settings, [9, 7, 6])
    update = Site(sites[0], settings).train(make_initial_parameters(settings), cycle=0)
    assert sent == 2 * nbytes(update.tensors)
    assert received == 3 * nbytes(make_initial_parameters(settings))
