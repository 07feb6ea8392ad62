"""Score models at a site that took no part in their training (condition "left-out").

    alone, mean         the mean score of the other sites' own models
    alone, best         the one of them that is best on its own site's validation data
    alone, votes        all of them: what most of them find
    federated, pooled   models trained on the notes of all other sites, jointly or in
                        one place
    fine-tuned on N     the federated model after training on N sentences of the site
    from scratch on N   a new model, trained on the same sentences
    own model           the site's model alone, trained on all of its notes

If the sites of a federation end with different models, these vote, and the one that is
best on its own site's validation data is fine-tuned.

The site's test data are used only for scoring. Models are chosen by the other sites'
validation data, and training on the site's sentences has a fixed length.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import Draws
from fednotes.core.types import Document, SiteData, Span
from fednotes.core.wording import format_count
from fednotes.core.work import working
from fednotes.data.split import make_sentence_documents, subsample
from fednotes.data.tags import relabel
from fednotes.encoders.features import find_default_cache
from fednotes.jobs.job import Job
from fednotes.jobs.left_out_sites import list_shared_types
from fednotes.jobs.results import LeftOutOutcome
from fednotes.metrics.spans import SpanCounts, collect_forms, count_by_document
from fednotes.metrics.summaries import average_scores
from fednotes.taggers.model import Model
from fednotes.taggers.saving import build_model, load_model
from fednotes.training.few_sentences import train_on_few_sentences

Documents = tuple[Document, ...]
# The scores that are kept of each model.
_KINDS = ("strict", "relaxed")


@dataclass(frozen=True)
class TrainedModel:
    """A saved model of one or several sites.

    Attributes:
        folder: Its folder.
        types: The entity types that these sites annotate.
        valid: Its score on their validation data; None if it is unknown.
    """

    folder: Path
    types: frozenset[str]
    valid: float | None = None


class TrainedModels(NamedTuple):
    """The models that are scored at a left-out site.

    Attributes:
        alone: Each other site's own model.
        federated: The models of their federation: one, or one for each site.
        pooled: The models of pooled training: one, or one for each site.
        own: The left-out site's own model.
    """

    alone: list[TrainedModel]
    federated: list[TrainedModel]
    pooled: list[TrainedModel]
    own: list[TrainedModel]


def find_trained_models(
    folder: Path,
    sites: Sequence[SiteData],
    valid: Mapping[str, float | None] | None = None,
) -> list[TrainedModel]:
    """Return the models in the folder of a part of a run.

    Args:
        folder: The folder.
        sites: The sites of the part.
        valid: Validation score of each site's model, where it is known.

    Raises:
        DataError: A model is missing.
    """
    if (folder / "model").exists():
        types = frozenset(name for site in sites for name in site.tags.types)
        return [TrainedModel(folder / "model", types)]
    scores = valid or {}
    models = []
    for site in sites:
        place = folder / "sites" / site.id / "model"
        if not place.exists():
            raise DataError(
                f"{folder} has no model of site {site.id!r}: check that the run has "
                'ended, that "left-out" is one of its conditions, and that the remarks '
                "of its report do not say that a site is not left out"
            )
        types = frozenset(site.tags.types)
        models.append(TrainedModel(place, types, scores.get(site.id)))
    return models


def choose_best(models: Sequence[TrainedModel]) -> TrainedModel:
    """Return the model with the best validation score.

    If several models have this score, it is the first of them.
    """
    return max(models, key=lambda model: -1.0 if model.valid is None else model.valid)


def find_mentions(
    models: Sequence[TrainedModel], documents: Sequence[Document], device: str = "cpu"
) -> Documents:
    """Return documents with the mentions that most models find.

    Args:
        models: The models.
        documents: The documents; their annotation is not used.
        device: PyTorch device.
    """
    votes = [_predict(model, documents, device) for model in models]
    return count_votes(votes, [model.types for model in models])


def _predict(
    model: TrainedModel, documents: Sequence[Document], device: str
) -> Documents:
    """Return documents with the mentions of the types that a model has learned."""
    tagger = load_model(model.folder, device)
    return relabel(_predict_with(tagger, documents), {}, model.types)


def _predict_with(model: Model, documents: Sequence[Document]) -> Documents:
    """Return documents with the mentions that a model finds."""
    corpus = model.prepare(documents, cache=find_default_cache(), gold=False)
    return model.predict(corpus)


def count_votes(
    votes: Sequence[Sequence[Document]], types: Sequence[Collection[str]]
) -> Documents:
    """Return documents with the mentions that get more than half of the votes.

    A model has a vote on the types that it has learned. A mention is kept if more than
    half of the votes on its type are for exactly this mention.

    Args:
        votes: The documents with the mentions of each model.
        types: The types that each model has learned.
    """
    voters = Counter(name for each in types for name in each)
    return tuple(
        replace(same_documents[0], spans=_keep_elected(same_documents, voters))
        for same_documents in zip(*votes, strict=True)
    )


def _keep_elected(
    votes: Iterable[Document], voters: Mapping[str, int]
) -> tuple[Span, ...]:
    """Return the mentions of a document that most models find, in order.

    Args:
        votes: The document with the mentions of each model.
        voters: Number of models that have a vote on a type.
    """
    counts = Counter(span for document in votes for span in document.spans)
    elected = (span for span, count in counts.items() if 2 * count > voters[span.label])
    return tuple(sorted(elected))


class LeftOutSite:
    """A left-out site, and what models find in its test data.

    Args:
        job: The job.
        site: The site.
        others: Data of the other sites.
        device: PyTorch device.
    """

    def __init__(
        self, job: Job, site: SiteData, others: Sequence[SiteData], device: str = "cpu"
    ) -> None:
        self._job = job
        self._site = site
        self._others = others
        self._device = device
        self._types = list_shared_types(job, site, others)
        # The test data may be annotated with more types than the training data.
        self._own_types = tuple(name for name in self._types if name in site.tags.types)
        self._models: dict[str, dict[str, Any]] = {}

    def score(self, trained: TrainedModels) -> LeftOutOutcome:
        """Score all models on the site's test data.

        `models` of the outcome has the scores of each. `scores` and `documents` are the
        federated model's, in the form that all conditions have.
        """
        started = time.monotonic()
        self._score_alone(trained.alone)
        federated = find_mentions(trained.federated, self._site.test, self._device)
        self._add("federated", federated)
        pooled = find_mentions(trained.pooled, self._site.test, self._device)
        self._add("pooled", pooled)
        remarks = self._score_few_sentences(trained.federated)
        by_own_model = find_mentions(trained.own, self._site.test, self._device)
        self._add("own model", by_own_model, self._own_types)

        by_document = count_by_document(self._site.test, federated, types=self._types)
        return LeftOutOutcome(
            scores={self._site.id: self._score_federated(federated)},
            documents={self._site.id: by_document.tolist()},
            rounds=0,
            seconds=time.monotonic() - started,
            bytes_up=0,
            bytes_down=0,
            models=self._models,
            types=list(self._types),
            remarks=remarks,
        )

    def _score_federated(self, predicted: Documents) -> dict[str, Any]:
        """Return the federated model's scores, in the form that all conditions have.

        A mention's form is unseen if the notes that the model was trained on, which are
        the other sites', do not have it.

        Args:
            predicted: The site's test documents with the model's mentions.
        """
        notes = [note for other in self._others for note in other.train]
        seen_forms = collect_forms(notes)
        counts = SpanCounts.of(self._site.test, predicted, seen_forms, self._types)
        scores = counts.scores()
        if self._job.privacy is not None:
            del scores["unseen"]  # it reveals which forms the training notes have
        return scores

    def _add(
        self, name: str, predicted: Documents, types: Collection[str] | None = None
    ) -> None:
        """Score a model's mentions, and add the scores to those of the other models.

        Args:
            name: The model.
            predicted: The site's test documents with its mentions.
            types: The types that it has learned; None if these are all types.
        """
        self._models[name] = self._score(predicted, types)

    def _score(
        self, predicted: Documents, types: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return the scores of a model's mentions; see `_add`."""
        counted = [name for name in self._types if types is None or name in types]
        scores = SpanCounts.of(self._site.test, predicted, types=counted).scores()
        return {"types": len(counted), **{kind: scores[kind] for kind in _KINDS}}

    def _score_alone(self, models: Sequence[TrainedModel]) -> None:
        """Score the other sites' own models.

        Models that have learned none of the scored types are not scored.
        """
        able = [model for model in models if self._knows_a_type(model)]
        votes = [_predict(model, self._site.test, self._device) for model in able]
        scores = [
            self._score(predicted, model.types)
            for predicted, model in zip(votes, able, strict=True)
        ]
        means = average_scores(scores)
        self._models["alone, mean"] = {
            # The mean is partial if one of its models is: `LeftOutCell.counts_all`.
            "types": min(each["types"] for each in scores),
            **{kind: means[kind] for kind in _KINDS},
        }
        # Sites without validation data have no score by which the best can be chosen.
        if any(model.valid is not None for model in able):
            self._models["alone, best"] = scores[able.index(choose_best(able))]
        elected = count_votes(votes, [model.types for model in able])
        self._add("alone, votes", elected)

    def _knows_a_type(self, model: TrainedModel) -> bool:
        """Return whether a model has learned a type that is scored."""
        return not model.types.isdisjoint(self._types)

    # ---- a few sentences of the site's own ----

    def _score_few_sentences(self, federated: Sequence[TrainedModel]) -> list[str]:
        """Score models that are trained on a few sentences of the site.

        Args:
            federated: The models of the federation, the best of which is fine-tuned.

        Returns:
            What could not be trained.
        """
        if not self._own_types:
            return [
                f"{self._site.id} has training data without any type that another "
                "site annotates, so no model is trained on its sentences"
            ]
        # One of these models has such a type, because other sites annotate it.
        start = choose_best(
            [
                model
                for model in federated
                if not model.types.isdisjoint(self._own_types)
            ]
        )
        sentences = make_sentence_documents(self._site.train)
        numbers = sorted(set(self._job.left_out.sentences))
        possible = [number for number in numbers if number <= len(sentences)]
        title = f"training on a few sentences of {self._site.id}"
        with working(title, 2 * len(possible)) as work:
            for number in possible:
                fraction = number / len(sentences)
                few = subsample(sentences, fraction, self._job.seed)
                fine_tuned = load_model(start.folder, self._device)
                name = f"fine-tuned on {number}"
                self._train_and_score(name, fine_tuned, few, start.types)
                work.add()

                name = f"from scratch on {number}"
                self._train_and_score(name, self._build_model(), few, self._own_types)
                work.add()
        available = format_count(len(sentences), "training sentence")
        return [
            f"{self._site.id} has only {available}: no model is trained on {number:,}"
            for number in numbers
            if number not in possible
        ]

    def _build_model(self) -> Model:
        """Return a new model for those of the scored types that the site annotates."""
        tags = replace(self._site.tags, types=self._own_types)
        config = self._job.config.model.for_types(self._own_types)
        return build_model(config, tags, self._job.seed, self._device)

    def _train_and_score(
        self, name: str, model: Model, sentences: Documents, learned: Collection[str]
    ) -> None:
        """Train a model on some of the site's sentences, and score it.

        Args:
            name: The model's name in the table.
            model: The model.
            sentences: The sentences.
            learned: The types that the model can find; for a new model, those of its
                tag set. The site's annotation of other types is not used.
        """
        settings = self._job.left_out
        # A type of the model that the site does not annotate is not among these, so a
        # word without annotation may have it.
        known = [name for name in self._own_types if name in learned]
        gold = relabel(sentences, {}, known)
        corpus = model.prepare(gold, cache=find_default_cache())
        train_on_few_sentences(
            model,
            model.annotate(corpus, gold, known),
            steps=settings.steps,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate or self._find_learning_rate(),
            draws=Draws(self._job.seed),
            site=self._site.id,
        )
        self._add(name, _predict_with(model, self._site.test), learned)

    def _find_learning_rate(self) -> float:
        """Return the learning rate of the job's method.

        Raises:
            ConfigError: The method has none.
        """
        rate = getattr(self._job.config, "learning_rate", None)
        if not isinstance(rate, float):
            raise ConfigError(
                f"method {self._job.method!r} has no learning_rate, with which a model "
                "could be trained on sentences of a left-out site: set left_out."
                "learning_rate, or left_out.sentences = []"
            )
        return rate
