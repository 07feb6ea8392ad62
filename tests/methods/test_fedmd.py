"""Learning from predictions on public notes, compared with NumPy and with sums by hand."""

from __future__ import annotations

import itertools
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_sites import mentions
from method_cases import TAGGER, fedmd_case
from method_runs import Job, Recording
from small_classifiers import document
from tiny_models import save_encoder

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.types import Document, PublicNotes, SiteData, TagSet
from fednotes.core.update import Total, Update
from fednotes.data.tags import find_allowed_transitions
from fednotes.engines.inprocess import InProcess
from fednotes.methods import fedmd
from fednotes.methods.fedmd import Config, Site, combine_with_own, compute_consensus
from fednotes.taggers.saving import build_model, load_model
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.taggers.word_targets import LEAST_PROBABILITY, make_word_targets

RNG = np.random.default_rng(7)
TYPES = TagSet(("Drug", "ADR"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_encoder(tmp_path_factory.mktemp("encoder"), max_position_embeddings=64)


def site_data(name: str, seed: int, types: tuple[str, ...]) -> SiteData:
    """Return a site that annotates some types, with the public notes of all sites."""
    words = ["no", "pain", "took", "and", "nausea", "metoprolol", "."]
    rng = np.random.default_rng(seed)
    notes = tuple(
        replace(
            document(number, rng.choice(words, 5).tolist(), types=types),
            id=f"{name}-{number}",
        )
        for number in range(9)
    )
    public = PublicNotes.of(document(i, words[i:] + words[:i]) for i in range(4))
    parts = (notes[:5], notes[5:7], notes[7:])
    return SiteData(name, TagSet(types), *parts, public=public)


def three_sites() -> list[SiteData]:
    types = (("Drug",), ("Drug", "ADR"), ("ADR", "Dose"))
    return [site_data(name, 3, each) for name, each in zip("abc", types, strict=True)]


def configured(sites: list[SiteData], **changes: Any) -> Config:
    base = Config(
        model=TAGGER, rounds=1, first_epochs=1, local_epochs=1, batch_size=3, seed=4
    )
    return fedmd.METHOD.configure(replace(base, **changes), sites)


# ---- the equations -------------------------------------------------------------------


def test_the_consensus_is_the_mean_over_the_sites_that_annotate_a_type() -> None:
    """Oracle: NumPy's mean over sites a and b for Drug, and over b and c for ADR."""
    config = configured(three_sites())
    assert fedmd.list_shared_tags(config) == ("B-Drug", "I-Drug", "B-ADR", "I-ADR")
    words = config.public_words
    tables = RNG.random((3, words, 4))
    annotated = np.array([[1, 0], [1, 1], [0, 1]], float)
    tables *= np.repeat(annotated, 2, axis=1)[:, None]
    updates = [
        Update(
            {"posteriors": torch.from_numpy(t), "annotated": torch.from_numpy(a)},
        )
        for t, a in zip(tables, annotated, strict=True)
    ]
    mean = compute_consensus(Total.of(updates), config)
    expected = np.concatenate(
        [tables[[0, 1], :, :2].mean(0), tables[[1, 2], :, 2:].mean(0)], axis=1
    )
    np.testing.assert_allclose(mean["posteriors"].numpy(), expected, rtol=2**-22)
    assert mean["annotated"].tolist() == [2, 2]

    without_b = compute_consensus(Total.of([updates[0]]), config)
    np.testing.assert_allclose(
        without_b["posteriors"][:, :2].numpy(), tables[0, :, :2], rtol=2**-22
    )
    assert not without_b["posteriors"][:, 2:].any()
    assert without_b["annotated"].tolist() == [1, 0]


def test_targets_complete_the_consensus_by_the_own_prediction() -> None:
    """By hand, for a word each: O gets the rest; a sum above 1 is divided; a tag without
    a consensus keeps the own probability."""
    own = np.array([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.0, 0.2, 0.8]])
    consensus = {"B-Drug": np.array([0.1, 0.4, 0.7])}
    targets = combine_with_own(own, ("O", "B-Drug", "I-Drug"), consensus)
    expected = [[0.7, 0.1, 0.2], [0.4, 0.4, 0.2], [0.0, 0.7 / 1.5, 0.8 / 1.5]]
    np.testing.assert_allclose(targets, expected, rtol=1e-12)


@pytest.mark.parametrize("scheme", ["BIO", "BIOES"])
def test_a_crf_learns_from_independent_words_within_the_scheme(scheme: Any) -> None:
    """Oracle: the sum over all sequences of tags that the scheme permits."""
    tags = TagSet(("Drug",), scheme)
    size = len(tags.tags)
    model = build_model(TAGGER, tags, 1)
    corpus = model.prepare([document(0, ["no", "pain", "."])], gold=False)
    q = RNG.dirichlet(np.ones(size), 3)
    q[1, 0] = 0.0
    q /= q.sum(1, keepdims=True)
    soft = make_word_targets(corpus, q, for_crf=True)

    start, transition, end = find_allowed_transitions(tags)
    floored = np.maximum(q, LEAST_PROBABILITY)
    unary, pairs, total = np.zeros((3, size)), np.zeros((size, size)), 0.0
    for y in itertools.product(range(size), repeat=3):
        follows = transition[y[0], y[1]] and transition[y[1], y[2]]
        if not (start[y[0]] and follows and end[y[2]]):
            continue
        weight = np.prod([floored[t, tag] for t, tag in enumerate(y)])
        total += weight
        for t, tag in enumerate(y):
            unary[t, tag] += weight
        for one, two in itertools.pairwise(y):
            pairs[one, two] += weight
    np.testing.assert_allclose(soft.unary, unary / total, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(soft.pairs[0], pairs / total, rtol=1e-5, atol=1e-7)


def test_a_model_without_a_crf_learns_from_the_probabilities_as_they_are(
    encoder: Path,
) -> None:
    site = Site(
        three_sites()[0],
        configured(three_sites(), model=TokenClassifierConfig(encoder=str(encoder))),
    )
    assert site.public_set is not None
    q = RNG.dirichlet(np.ones(3), len(site.public_set.encoded.form))
    soft = make_word_targets(site.public_set, q, for_crf=False)
    np.testing.assert_array_equal(soft.unary, q.astype(np.float32))
    assert soft.pairs.shape == (site.public_set.sentences, 0, 0)


def test_a_step_weighs_the_mean_losses_of_own_and_public_words(encoder: Path) -> None:
    """Oracle: NumPy's cross-entropies with the gold tags and with the targets."""
    sites = three_sites()
    model = TokenClassifierConfig(encoder=str(encoder), train="lora")
    config = configured(sites, model=model, public_weight=0.3)
    site = Site(sites[0], config)
    site.model.eval()
    assert site.public_set is not None
    q = RNG.dirichlet(np.ones(3), len(site.public_set.encoded.form)).astype(np.float32)
    public = replace(
        site.public_set, soft=make_word_targets(site.public_set, q, for_crf=False)
    )
    step = fedmd._Sentences(
        site.model, site.train_set, np.array([0, 2]), public, np.array([1, 3]), 0.3
    )
    loss = float(step.loss([step]).detach())

    def log_probabilities(corpus: Any, indices: list[int]) -> np.ndarray:
        logits = site.model.compute_emissions(corpus).astype(np.float64)  # type: ignore[operator]
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return np.concatenate([logits[rows_of(corpus, i)] for i in indices])

    def rows_of(corpus: Any, sentence: int) -> slice:
        return slice(*corpus.encoded.bounds[sentence : sentence + 2].tolist())

    gold = np.concatenate(
        [site.train_set.encoded.tags[rows_of(site.train_set, i)] for i in (0, 2)]
    )
    own = log_probabilities(site.train_set, [0, 2])
    of_own = -own[np.arange(len(gold)), gold].mean()
    targets = np.concatenate([q[rows_of(public, 1)], q[rows_of(public, 3)]])
    of_public = -(targets * log_probabilities(public, [1, 3])).sum(1).mean()
    assert loss == pytest.approx(of_own + 0.3 * of_public, rel=1e-5)


# ---- what leaves a site --------------------------------------------------------------


def test_a_site_sends_zeros_for_types_that_it_does_not_annotate(
    tmp_path: Path,
) -> None:
    sites = three_sites()
    site = Site(sites[2], configured(sites), directory=tmp_path)
    sent = site.predict({}, round=1)
    assert sent.weight == 1
    assert not sent.metrics
    assert sent.tensors.keys() == {"posteriors", "annotated"}
    assert sent.tensors["annotated"].tolist() == [0, 1]
    posteriors = sent.tensors["posteriors"]
    assert not posteriors[:, :2].any()

    # Oracle: the model's own posterior, which float16 holds without an error.
    assert site.public_set is not None
    soft = site.model.soften(site.public_set).soft
    assert soft is not None
    own = soft.unary[:, 1:3]
    assert np.abs(posteriors[:, 2:].numpy() - own).max() <= 2**-11
    assert torch.equal(posteriors.half().float(), posteriors)


def test_a_person_can_read_what_a_site_sends(tmp_path: Path) -> None:
    sites = three_sites()
    config = configured(sites)
    site = Site(sites[0], config, directory=tmp_path)
    sent = site.predict({}, round=1).tensors["posteriors"].numpy()
    table = tmp_path / "sent" / "round-1.tsv"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (table.parent, table)]
    assert modes == [0o700, 0o600]
    text = table.read_text("utf-8")
    head, *lines = text.splitlines()
    assert head.split("\t") == ["word", "B-Drug", "I-Drug", "B-ADR", "I-ADR"]
    rows = [line.split("\t") for line in lines if line]
    assert len(rows) == config.public_words
    assert {"metoprolol", "pain"} <= {word for word, *_ in rows}
    numbers = np.array([[float(each) for each in row[1:]] for row in rows])
    np.testing.assert_allclose(numbers, sent, atol=6e-4)


def test_only_predictions_and_counts_leave_sites_of_different_models(
    encoder: Path,
) -> None:
    case = fedmd_case(encoder)
    job = Job.of(case)
    engine = Recording(job.make_all())
    kinds = {member.model.config.kind for member in engine.members}
    assert kinds == {"tagger", "token-classifier", "encoder-tagger"}
    job.train(engine)
    names = {(task, name) for _, task, sent in engine.sent for name in sent.tensors}
    assert names == {("predict", "posteriors"), ("predict", "annotated")}
    words = job.settings.public_words
    assert {
        tuple(sent.tensors["posteriors"].shape)
        for _, task, sent in engine.sent
        if task == "predict"
    } == {(words, 2)}
    up, down = fedmd.METHOD.estimate_traffic(job.settings, [1]) or (0, 0)
    assert up == down == 2 * 4 * (2 * words + 1)


def test_each_tag_learns_from_its_own_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Site b annotates Drug and ADR; the mean has ADR from no site, so b's own stays."""
    sites = three_sites()
    site = Site(sites[1], configured(sites))
    targets: list[np.ndarray] = []

    def record(corpus: Any, q: np.ndarray, *, for_crf: bool) -> Any:
        targets.append(q)
        return make_word_targets(corpus, q, for_crf=for_crf)

    monkeypatch.setattr(fedmd, "make_word_targets", record)
    mean = torch.tensor([0.1, 0.2, 0.3, 0.05]).repeat(site.config.public_words, 1)
    own, _ = site._compute_posteriors()
    site.train({"posteriors": mean, "annotated": torch.tensor([2.0, 0.0])}, round=1)

    inside = np.concatenate([mean[:, :2].numpy(), own[:, 3:]], axis=1)
    inside /= np.maximum(inside.sum(1, keepdims=True), 1.0)
    np.testing.assert_allclose(targets[0][:, 1:], inside, rtol=1e-6)


def test_predictions_of_others_change_what_a_site_learns() -> None:
    """Two runs of the same site differ only in the mean that it receives."""
    sites = three_sites()
    config = configured(sites)
    annotated = torch.tensor([2.0, 2.0])
    learnt = []
    for value in (0.1, 0.1, 0.4):
        site = Site(sites[0], config)
        mean = torch.full((config.public_words, 4), value)
        site.train({"posteriors": mean, "annotated": annotated}, round=1)
        learnt.append(site.parameters)
    one, again, other = learnt
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


def count_batches(site: Site, config: Config, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of steps on a site's own notes in a run of this site."""
    steps = []
    monkeypatch.setattr(
        fedmd,
        "_Sentences",
        lambda *given: steps.append(given) or fedmd_sentences(*given),
    )
    tensors = {
        "posteriors": torch.zeros(config.public_words, 4),
        "annotated": torch.tensor([2.0, 2.0]),
    }
    for round in range(config.rounds + 1):
        site.train(tensors if round else {}, round=round)
    return len(steps)


fedmd_sentences = fedmd._Sentences


def test_alone_and_pooled_train_for_as_many_epochs_as_the_federation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: 5 notes in batches of 3 are 2 steps; 4 and 2 · 3 epochs are 20 steps."""
    sites = three_sites()
    config = configured(sites, rounds=2, first_epochs=2, local_epochs=3)
    own = replace(config, first_epochs=4)
    config = replace(config, site_configs={"b": own})
    alone = fedmd.METHOD.configure_alone(config, sites)
    assert [each.first_epochs for each in alone] == [8, 10, 8]
    assert all(each.rounds == 0 for each in alone)
    for place, steps in enumerate((16, 20, 16)):
        federated = Site(sites[place], config)
        assert count_batches(federated, config, monkeypatch) == steps
        by_itself = Site(sites[place], alone[place])
        assert count_batches(by_itself, alone[place], monkeypatch) == steps

    same = [replace(s, tags=TagSet(("Drug",))) for s in map(only_drugs, sites)]
    _, pooled = fedmd.METHOD.configure_pooled(config, same, None)
    assert (pooled.rounds, pooled.first_epochs) == (0, 8)


def test_a_site_alone_starts_with_the_model_of_the_federation() -> None:
    sites = three_sites()
    config = configured(sites)
    (alone, *_) = fedmd.METHOD.configure_alone(config, [only_drugs(sites[0])])
    by_itself = Site(sites[0], alone)
    member = Site(sites[0], config)
    for name, value in by_itself.parameters.items():
        assert torch.equal(value, member.parameters[name]), name


def only_drugs(site: SiteData) -> SiteData:
    parts = {
        part: tuple(
            replace(d, spans=tuple(s for s in d.spans if s.label == "Drug"))
            for d in getattr(site, part)
        )
        for part in ("train", "valid", "test")
    }
    return replace(site, **parts)


def test_each_site_saves_the_model_of_its_best_round(tmp_path: Path) -> None:
    case = fedmd_case(tmp_path / "none")
    sites = [case.sites[0], case.sites[3]]  # of light taggers
    config = replace(case.settings(sites), first_epochs=3, learning_rate=0.03)
    members = [Site(site, config, directory=tmp_path / site.id) for site in sites]
    fedmd.train(InProcess(members), config)
    for site, member in zip(sites, members, strict=True):
        assert member.valid_score == member.best.score
        saved = load_model(tmp_path / site.id / "model")
        assert saved.predict(site.test) == member.model.predict(site.test)


# ---- refusals ------------------------------------------------------------------------


def test_a_site_refuses_a_consensus_on_other_words() -> None:
    sites = three_sites()
    site = Site(sites[0], configured(sites))
    wrong = {"posteriors": torch.zeros(3, 4), "annotated": torch.ones(2)}
    with pytest.raises(TrainingError, match="need the same public notes"):
        site.train(wrong, round=1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("posteriors", -0.5),
        ("posteriors", 1.5),
        ("annotated", -1.0),
        ("annotated", 0.9),
        ("annotated", 5.0),
    ],
)
def test_a_sum_of_other_numbers_than_probabilities_is_refused(
    name: str, wrong: float
) -> None:
    """Without this, each site would refuse the server's mean and blame the server, or
    one site could make the mean of a type as small as it wants."""
    config = configured(three_sites())
    tensors = {
        "posteriors": torch.full((config.public_words, 4), 0.5),
        "annotated": torch.ones(2),
    }
    compute_consensus(Total.of([Update(tensors)]), config)
    tensors[name].flatten()[1] = wrong
    with pytest.raises(TrainingError, match="a site sent other numbers"):
        compute_consensus(Total.of([Update(tensors)]), config)


def test_types_of_other_sites_cannot_make_a_site_send_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sites can make any of their types one that all sites exchange."""
    sites = three_sites()
    monkeypatch.setattr(fedmd, "MAX_PROBABILITIES", 4 * configured(sites).public_words)
    Site(sites[0], configured(sites))
    more = ("Drug", "ADR", "t1")
    sites[1:] = [replace(site, tags=TagSet(more)) for site in sites[1:]]
    with pytest.raises(ConfigError, match=r"28 public words × 6 tags .* lower public_"):
        Site(sites[0], configured(sites))


def test_the_steps_behind_predictions_are_those_that_were_made() -> None:
    """A server may leave out the first training, of four epochs of two steps."""
    sites = three_sites()
    site = Site(sites[0], configured(sites, first_epochs=4))
    words = int(site.train_set.lengths.sum())
    assert site.count_covered("predict") == {"steps": 0, "tokens": 0, "batch": 2}
    zeros = torch.zeros(site.config.public_words, 4)
    site.train({"posteriors": zeros, "annotated": torch.zeros(2)}, round=1)
    covered = {"steps": 2, "tokens": words, "batch": 3}
    assert site.count_covered("predict") == covered
    again = Site(sites[0], site.config)
    again.restore(site.state())
    assert again.count_covered("predict") == covered


def test_different_public_notes_are_refused() -> None:
    sites = three_sites()
    other = PublicNotes.of([document(0, ["other"])])
    sites[1] = replace(sites[1], public=other)
    with pytest.raises(ConfigError, match="'a' and 'b' have different public notes"):
        configured(sites)
    sites[1] = replace(sites[1], public=None)
    with pytest.raises(ConfigError, match="'b' has no public notes"):
        configured(sites)


def test_limits_of_sentences_in_a_file_do_not_change_the_public_sentences() -> None:
    """CoNLL files have such limits and other formats have none."""
    text = "She took metoprolol. It helped. She left"
    marked = Document("1", text, sentences=((0, 8), (9, len(text))))
    plain = Document("1", text)
    of_marked, of_plain = PublicNotes.of([marked]), PublicNotes.of([plain])
    assert of_marked.digest == of_plain.digest
    texts = [
        [each.text for each in fedmd.cut_public_sentences(public, 0, 1)]
        for public in (of_marked, of_plain)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def test_sites_without_a_common_type_or_scheme_are_refused() -> None:
    sites = [mentions("a", 1, 4), mentions("b", 2, 4)]
    public = PublicNotes.of([document(0, ["pain"])])
    sites = [replace(site, public=public) for site in sites]
    other = replace(sites[1], tags=TagSet(("thing",)))
    with pytest.raises(ConfigError, match="no entity type is annotated at two sites"):
        configured([sites[0], other])
    other = replace(sites[1], tags=TagSet(("drug",), "BIOES"))
    with pytest.raises(ConfigError, match="tagging schemes BIO and BIOES"):
        configured([sites[0], other])


@pytest.mark.parametrize("kind", ["prompt-bart", "type-scorer"])
def test_a_model_that_predicts_no_tags_of_words_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match='"fedmd" does not support model kind'):
        fedmd.METHOD.read_model_config({"kind": kind})
