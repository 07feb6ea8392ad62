"""A personal model for each site, distilled from its local and the federated model.

It is for sites with different tag sets, so that none loses by taking part. A site
trains two token classifiers on its own tags. The local one uses only the site's data.
The federated one has LoRA adapters that all sites average and others that stay at
the site; sites share the output rows of tags that mean the same at each of them. The
predictions of both models are mixed, and the federated model is trained on the mixture.
Then it is tested, saved and used.

It builds on: Arivazhagan, Aggarwal, Singh and Choudhary 2019, "Federated learning with
personalization layers" (parameters that stay); Mansour, Mohri, Ro and Suresh 2020,
"Three approaches for personalization with applications to federated learning" (a
mixture of the local and the common model); Hinton, Vinyals and Dean 2015, "Distilling
the knowledge in a neural network"; averaging as in Liu and Miller 2020 (`averaging.py`,
Eq. 1). The combination is not a published method.

    there                   here
    W_B, base layers        `Site.shared`: "lora" and rows of `Config.shared_tags`
    W_P, personal layers    `Site.private`: "private" and the classifier's other rows
    h_l, the local model    `Site.own_site`, a `finetune.Site`, bit for bit as alone
    h_c, the central model  `Site.model`, which is federated
    λ_k, the mixture        `Config.mix`, one for all sites
    soft targets, q         `Site.compute_targets`
    n_k                     notes; for a row of the classifier, those of sites that
                            have its tag

All sites send tensors with the same names and shapes. A site sends zeros for rows that
it lacks, and "counted" marks the rows that it has. The server sees only sums, and
divides each row's sum by the number of notes at the sites that have the row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fednotes.core.counts import round_counts
from fednotes.core.errors import ConfigError
from fednotes.core.federation import Federation, State
from fednotes.core.numbers import Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import add_prefix, copy_tensors, load_into, select_prefix
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.batches import decode_documents
from fednotes.methods import averaging, finetune, read_presets
from fednotes.methods.averaging import (
    Averaging,
    AveragingWithDP,
    run_cycles,
)
from fednotes.methods.model_kinds import make_unsupported_kind_error
from fednotes.metrics.spans import SpanCounts, collect_forms
from fednotes.privacy.promise import Privacy
from fednotes.taggers.corpora import EncoderCorpus, PreparedCorpus
from fednotes.taggers.model import Model
from fednotes.taggers.partial import Soft
from fednotes.taggers.saving import build_model
from fednotes.taggers.saving import read_model_config as any_model
from fednotes.taggers.token_classifier import TokenClassifier, TokenClassifierConfig
from fednotes.training.local_trainer import ADAPTERS, LocalTrainer
from fednotes.training.server_steps import needs_each_update
from fednotes.training.sites import (
    list_earlier_classifier_warnings,
    summarise_mentions,
    unite_tags,
)

OUTPUTS, COUNTED = "classifier", "counted"
FLOAT_BYTES = 4
# Learning rates of distillation, as a fraction of those of training. On the validation
# data of pays/unlike it was better than 1.
RATE = 0.1


@checked(frozen=True)
class Config(Averaging):
    """Settings of fine-tuning with a personal model for each site.

    With differential privacy, both sets of LoRA adapters of the federated model, the
    shared ones and those that stay at the site, are trained privately. Only this model
    is kept, because the scores of a model trained on the notes without protection would
    reveal facts about them.

    Attributes:
        model: The token classifier that every site trains, with train = "lora".
        share_outputs: Tags whose rows of the classifier are shared: "common" shares
            tags that two or more sites have ("O" only if all sites annotate the same
            types, because it otherwise means different things); "none" shares no row.
        share_change: Whether sites share one of the two sets of LoRA adapters of the
            encoder. If it is false and share_outputs = "none", each site mixes two
            models of its own, which is the control that a federation has to beat.
        mix: Weight of the federated model in the mix; the site's own model gets the
            rest.
        distil_epochs: Number of epochs in which the federated model is trained on the
            mix's predictions, at a tenth of the learning rates. With 0, the federated
            model is saved unchanged, regardless of `mix`.
        tags: The complete tag set, the union over the sites. A job fills it in.
        shared_tags: Tags whose row is shared. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: FilledIn[TokenClassifierConfig] = field(
        default_factory=lambda: TokenClassifierConfig(train="lora")
    )
    cycles: PositiveInt = 6
    learning_rate: PositiveFloat = 3e-4
    share_outputs: Literal["common", "none"] = "common"
    share_change: bool = True
    mix: Fraction = 0.5
    distil_epochs: NonNegativeInt = 3
    tags: FilledIn[TagSet] = field(default_factory=lambda: TagSet(()))
    shared_tags: FilledIn[tuple[str, ...]] = ()
    privacy: FilledIn[Privacy | None] = None
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        super().__post_init__()
        if needs_each_update(self):
            raise ConfigError(
                f'aggregation = "{self.aggregation}": the method personal weighs each '
                "row of the classifier by the sites that have its tag, in a sum: set "
                'aggregation = "mean"'
            )
        if self.model.train != "lora":
            raise ConfigError(
                f'train = "{self.model.train}": the method personal trains LoRA '
                'adapters in a frozen encoder: set train = "lora"'
            )


# ---- names ---------------------------------------------------------------------------


class _Rows(nn.Module):
    """A matrix whose rows are separate parameters."""

    def forward(self, *rows: Tensor) -> Tensor:
        """Concatenate rows of shape (1, …) into a matrix, (rows, …)."""
        return torch.cat(rows)

    def right_inverse(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Split a matrix, (rows, …), into rows of shape (1, …)."""
        return torch.split(matrix, 1)


def separate_classifier_rows(model: Model) -> dict[str, nn.Parameter]:
    """Make each classifier row a parameter; return all trained parameters by name.

    Args:
        model: A token classifier, whose classifier is changed in place.

    Returns:
        The LoRA adapters, and for each tag "classifier.weight.TAG", (1, width), and
        "classifier.bias.TAG", (1,).
    """
    assert isinstance(model, TokenClassifier)
    parameters = {
        name: parameter
        for name, parameter in model.trainable().items()
        if name.split(".")[0] in ADAPTERS
    }
    for part, _ in list(model.classifier.named_parameters()):
        parametrize.register_parametrization(model.classifier, part, _Rows())
        rows = model.classifier.get_submodule(f"parametrizations.{part}")
        for place, tag in enumerate(model.tagset.tags):
            row = rows.get_parameter(f"original{place}")
            parameters[f"{OUTPUTS}.{part}.{tag}"] = row
    return parameters


def _merge_classifier_rows(model: TokenClassifier) -> TokenClassifier:
    """Return a copy of the model whose classifier is one matrix and one bias again.

    It undoes `separate_classifier_rows`.
    """
    rows = model.classifier
    # The device "meta" draws no random numbers.
    classifier = nn.Linear(rows.in_features, rows.out_features, device="meta")
    classifier.weight = nn.Parameter(rows.weight.detach().clone())
    classifier.bias = nn.Parameter(rows.bias.detach().clone())
    return model.copy_with_classifier(classifier)


def find_tag(name: str) -> str:
    """Return the tag of a row by its parameter's name; "" for other parameters."""
    layer, _, part_and_tag = name.partition(".")
    if layer != OUTPUTS:
        return ""
    _, _, tag = part_and_tag.partition(".")
    return tag


def make_initial_parameters(config: Config) -> dict[str, Tensor]:
    """Return the shared parameters before training."""
    shared_tags = set(config.shared_tags)
    if config.share_change:
        shared_tags.add("")  # parameters that are not rows of a tag
    parameters = separate_classifier_rows(
        build_model(config.model, config.tags, config.seed)
    )
    return {
        name: parameter.detach()
        for name, parameter in sorted(parameters.items())
        if find_tag(name) in shared_tags
    }


# ---- server --------------------------------------------------------------------------


def train(federation: Federation, config: Config) -> State:
    """Run the global cycles; at their end, each site distils.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's last state; see `averaging.run_cycles`.
    """
    server = Server(
        config, make_initial_parameters(config), summarise_mentions, federation.resume()
    )
    return run_cycles(federation, server)


class Server(averaging.Server):
    """The server of `averaging.py`, with a separate weight for each classifier row."""

    config: Config

    def require_returned(
        self, total: Total, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check what sites returned, including the number of notes for each row.

        Raises:
            TrainingError: Names or shapes differ from those expected.
        """
        tags = self.config.shared_tags
        expected = dict(shapes)
        if tags:
            expected[COUNTED] = (len(tags),)
        total.require(expected)

    def compute_mean(self, total: Total) -> dict[str, Tensor]:
        """Return the mean over sites; a row's mean is over the sites that have its tag.

        If none of these sites is in the sum, the row does not change.
        """
        sums = dict(total.tensors)
        counted = sums.pop(COUNTED, torch.zeros(0)).tolist()
        notes = dict(zip(self.config.shared_tags, counted, strict=True))
        means = Total(sums, total.weight, {}).mean()
        for name in sums:
            weight = notes.get(find_tag(name), total.weight)
            if weight > 0:
                means |= Total({name: sums[name]}, weight, {}).mean()
            elif self.config.compression == "none":
                # With compression these are changes, which are zero.
                means[name] = self.shared[name]
        return means


# ---- sites ---------------------------------------------------------------------------


def make_finetune_config(
    config: Config, tags: TagSet, **changes: Any
) -> finetune.Config:
    """Return the settings with which "finetune" trains one of a site's two models.

    Args:
        config: The settings of this method.
        tags: The tags of the model.
        **changes: Settings that differ from `config`, by name.
    """
    # The settings that both methods have, except the tags: those inherited from
    # `Averaging`, and three that each method defines itself.
    names = [setting.name for setting in fields(Averaging)]
    names += ["model", "privacy", "min_sites"]
    values = {name: getattr(config, name) for name in names}
    values.update(changes)
    return finetune.Config(**values, tags=tags)


class Site(finetune.Site):
    """One site with its two models.

    Args:
        data: The site's documents.
        config: The settings of the run.
        **options: As for `MentionSite`.

    Attributes:
        own: The local model, as the site would train it alone. Its parameters depend
            only on the site's data and the job's settings, not on other sites or the
            server. At the end it holds the model that is saved. It sends nothing, so
            its counts are exact, regardless of `count_step`.
    """

    model: TokenClassifier

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        self._settings = config
        alone = averaging.remove_federation_settings(
            make_finetune_config(config, data.tags, batch="each")
        )
        self.own_site = finetune.Site(data, alone, **options | {"count_step": 1})
        self._own_model = self.own_site.model
        self._own_start = copy_tensors(self.own_site.parameters)
        self._start_own_server(None)
        super().__init__(
            data,
            make_finetune_config(config, data.tags),
            **options | {"directory": None},
        )

    def _start_own_server(self, resumed: State | None) -> None:
        """Create the server that averages the local model alone.

        Args:
            resumed: The state to resume from; None at the first start.
        """
        self._own_server = averaging.Server(
            self.own_site.config, self._own_start, summarise_mentions, resumed
        )

    def _choose_trained(self) -> tuple[Mapping[str, nn.Parameter], Collection[str]]:
        """Return all trained parameters, and the names of those that stay at the site.

        Rows of tags that only other sites have are present but unused, and stay zero.
        """
        config = self._settings
        tags = self.model.tagset.tags
        self.model.adapt(config.seed, "private")
        present = separate_classifier_rows(self.model)
        shared = make_initial_parameters(config)
        has_tag = [float(tag in tags) for tag in config.shared_tags]
        self._has_tag = torch.tensor(has_tag)  # (shared tags,)
        self._lacks = shared.keys() - present.keys()
        device = self.model.device
        lacking = {
            name: nn.Parameter(torch.zeros_like(shared[name], device=device))
            for name in self._lacks
        }
        parameters: dict[str, nn.Parameter] = dict(sorted((present | lacking).items()))
        return parameters, parameters.keys() - shared.keys()

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Set this site's part of a shared mini-batch for both models; return it."""
        update = super().take_share(tensors, examples=examples)
        self.own_site.share = self.share
        return update

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """Train both models for a cycle; return the shared parameters."""
        update = super().train(tensors, cycle=cycle)
        self._train_own(cycle + 1)
        return update

    def _make_update(
        self, tensors: Tensors, metrics: Mapping[str, float], part: float | None = None
    ) -> Update:
        """Return the update; rows that the site lacks are zeros without weight."""
        sent = {
            name: torch.zeros_like(value) if name in self._lacks else value
            for name, value in tensors.items()
        }
        if self._settings.shared_tags:
            sent[COUNTED] = self._has_tag * (1.0 if part is None else part)
        return super()._make_update(sent, metrics, part)

    def _train_own(self, cycles: int) -> None:
        """Train the local model until it has had this number of cycles.

        A site that missed cycles makes up for them here. The training is that of a
        federation of this site alone.
        """
        server = self._own_server
        while server.round < min(cycles, server.cycles):
            cycle = server.round
            update = self.own_site.train(server.select_sent(), cycle=cycle)
            total = Total.of([update])
            server.step(total.mean(), total)
            if server.is_evaluation_due and server.best.keeps_tensors:
                counts = Total.of([self.own_site.evaluate(server.shared, cycle=cycle)])
                has_held_out = (
                    summarise_mentions(counts.metrics)["held_out"] > -math.inf
                )
                if has_held_out:  # otherwise the last cycle is kept
                    server.judge(counts)

    # The final model.

    def finish(self, tensors: Tensors, *, threshold: float = 0.0) -> Update:
        """Distil the mixture into the federated model, then test and save it.

        Without differential privacy, `scores["parts"]` has the test scores of "own",
        "federated" and "mix" before the distillation.
        """
        self.take_threshold(threshold)
        self.load_kept(tensors)
        if self._settings.privacy is not None:
            return self._finish_privately()

        self.own_site.model = self._own_model
        self._train_own(self.config.last_cycle)
        load_into(self.own_site.parameters, self._own_server.result)
        parts = self._score_parts()
        if self._settings.distil_epochs:
            targets = self.compute_targets()
            self.own_site.model = _merge_classifier_rows(self.model)
            self._distil(targets)
        else:
            self.own_site.model = _merge_classifier_rows(self.model)
        tested = self.own_site.test_and_save()
        self.scores = {**self.own_site.scores, "parts": parts}
        return Update(metrics=round_counts(tested.metrics, self.count_step))

    def _finish_privately(self) -> Update:
        """Test and save the federated model, the only one that is protected."""
        self.own_site.model = _merge_classifier_rows(self.model)
        self.own_site.tells_forms = self.tells_forms
        update = self.own_site.test_and_save()
        self.scores = self.own_site.scores
        return update

    def _distil(self, targets: np.ndarray) -> None:
        """Train the federated model on soft targets, (tokens, tags)."""
        corpus: EncoderCorpus = self.own_site.model.require_corpus(
            self.own_site.train_set
        )
        pairs = np.zeros((corpus.sentences, 0, 0), np.float32)
        # No tag is certain, so the loss is the cross-entropy with the targets.
        soft = replace(corpus, known=frozenset(), soft=Soft(targets, pairs))
        train_on_soft_targets(soft, self.own_site, epochs=self._settings.distil_epochs)

    def compute_targets(self) -> np.ndarray:
        """Return soft targets of the training text, (tokens, tags).

        They are the mean of the gold tags and the mixture's probabilities.
        """
        mixed = self._compute_emissions(self.train_set)["mix"]
        predicted = torch.from_numpy(mixed).softmax(-1).numpy()
        tags = predicted.shape[1]
        gold = np.eye(tags, dtype=np.float32)[self.train_set.encoded.tags]
        return np.asarray((gold + predicted) / 2)

    def _compute_emissions(self, corpus: PreparedCorpus) -> dict[str, np.ndarray]:
        """Return (tokens, tags) logits of both models and of their weighted mix.

        The mean of logits equals the mean of log-probabilities up to a constant per
        word, which cancels in the softmax.
        """
        own_model = self.own_site.model
        assert isinstance(own_model, TokenClassifier)
        weight = np.float32(self._settings.mix)
        own_emissions = own_model.compute_emissions(corpus)
        federated_emissions = self.model.compute_emissions(corpus)
        mix = (1 - weight) * own_emissions + weight * federated_emissions
        return {"own": own_emissions, "federated": federated_emissions, "mix": mix}

    def _score_parts(self) -> dict[str, Any]:
        """Return the strict and relaxed test scores of both models and of their mix.

        The keys are those of `_compute_emissions`.
        """
        train_forms = collect_forms(self.data.train)
        types = self.list_judged_types(self.data)
        scores = {}
        for name, emissions in self._compute_emissions(self.test_set).items():
            predicted = decode_documents(self.test_set.encoded, emissions.argmax(-1))
            counts = SpanCounts.of(
                self.data.test, predicted, seen=train_forms, types=types
            )
            by_kind = counts.scores()
            scores[name] = {kind: by_kind[kind] for kind in ("strict", "relaxed")}
        return scores

    def find_document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of the saved model; see `MethodSite`."""
        return self.own_site.find_document_counts(site)

    def score_on(self, site: SiteData) -> dict[str, Any]:
        """Return the saved model's scores on another site's test data."""
        return self.own_site.score_on(site)

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the saved model on validation data; None without such data."""
        return self.own_site.valid_score

    # State that must survive a restart.

    def state(self) -> State:
        """Return the state of this site.

        The state of the federated model contains two more: that of the site's own
        model, "own", and that of the server which averages it alone, "alone".
        """
        state = super().state()
        tensors = dict(state.tensors)
        facts = dict(state.facts)
        children = {"own": self.own_site.state(), "alone": self._own_server.state()}
        for name, child in children.items():
            tensors |= add_prefix(f"{name}.", child.tensors)
            facts[name] = {"round": child.round, "facts": dict(child.facts)}
        return State(state.round, tensors, facts)

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        super().restore(state)
        self.own_site.restore(_extract_child_state(state, "own"))
        self._start_own_server(_extract_child_state(state, "alone"))


def _extract_child_state(state: State, name: str) -> State:
    """Extract a part's state, by name, from the state of a site."""
    child = state.facts[name]
    return State(
        child["round"], select_prefix(f"{name}.", state.tensors), child["facts"]
    )


def train_on_soft_targets(
    corpus: EncoderCorpus, site: finetune.Site, *, epochs: int
) -> None:
    """Train a site's current model on a corpus with soft targets.

    The learning rates are a tenth of the job's and are scheduled over these epochs.

    Args:
        corpus: The site's training text with soft targets.
        site: The site; its model is trained.
        epochs: Number of epochs.
    """
    config = site.config
    slow_config = replace(
        config,
        learning_rate=RATE * config.learning_rate,
        lora_learning_rate=RATE * config.lora_learning_rate,
        proximal=0.0,
    )
    # A separate name, so that order and dropout differ from those in training.
    name = f"{site.id}, distilling"
    parameters = site.model.trainable()
    trainer = LocalTrainer(
        name, slow_config, parameters, draws=site.draws, device=site.device
    )
    for parameter in parameters.values():
        parameter.requires_grad_()
    planned = max(1, epochs * math.ceil(site.num_examples / site.share))
    part_size = math.ceil(site.share / config.accumulate)
    for epoch in range(epochs):
        rng = site.draws.rng_of("order", name, epoch)
        batches = finetune.draw_batches(
            site.model, corpus, size=site.share, part_size=part_size, rng=rng
        )
        for batch in batches:
            trainer.step(batch, planned=planned, start={})


# The interface to jobs.


class PersonalWithDP(finetune.FinetuneWithDP):
    """The federated model of each site, trained with differential privacy.

    Nothing is mixed or distilled, because a model trained on the notes without
    protection would reveal facts about them.
    """

    required_settings = MappingProxyType(
        {**AveragingWithDP.required_settings, "mix": 1.0, "distil_epochs": 0}
    )

    def make_initial_parameters(
        self, config: Config | finetune.Config, agreed: Tensors
    ) -> dict[str, Tensor]:
        """Return the shared parameters before training."""
        if isinstance(config, finetune.Config):
            return super().make_initial_parameters(config, agreed)
        return make_initial_parameters(config)


class Personal(finetune.Finetune):
    """Personal models, for a job.

    The conditions alone and pooled are ordinary fine-tuning, so their settings are a
    `finetune.Config`.
    """

    config_class = Config
    site_class = Site
    presets = read_presets("personal")
    dp = PersonalWithDP()
    personal: Mapping[str, Any] = MappingProxyType({"share_outputs": "none"})

    def train(self, federation: Federation, config: Config | finetune.Config) -> State:
        """Run the global cycles; at their end, each site distils."""
        if isinstance(config, finetune.Config):
            return finetune.train(federation, config)
        return train(federation, config)

    def make_site(
        self, data: SiteData, config: Config | finetune.Config, **options: Any
    ) -> finetune.Site:
        """Return a site with two models, or with one for settings of fine-tuning."""
        if isinstance(config, finetune.Config):
            return finetune.Site(data, config, **options)
        return Site(data, config, **options)

    def read_model_config(self, table: Mapping[str, Any]) -> TokenClassifierConfig:
        """Return the settings of a token classifier; `train` defaults to "lora".

        Raises:
            ConfigError: The table names another kind of model.
        """
        settings = {"kind": "token-classifier", "train": "lora"} | dict(table)
        if settings["kind"] != "token-classifier":
            error = make_unsupported_kind_error("personal", settings["kind"])
            if settings["kind"] != "type-scorer":
                raise error
            raise ConfigError(
                "personal models mix scores of tags, and a type scorer scores no tags: "
                f"{error}"
            )
        config = any_model(settings, where="")
        assert isinstance(config, TokenClassifierConfig)
        return config

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the class of the token classifier's settings."""
        return {"token-classifier": TokenClassifierConfig}

    def shares_outputs(self, config: Any) -> bool:
        """Return whether rows of the classifier are shared."""
        return bool(config.share_outputs != "none")

    def configure(self, config: Config, sites: Sequence[SiteData]) -> Config:
        """Return the settings with the union of tags and the tags of shared rows."""
        tags = unite_tags(sites)
        sites_with = Counter(tag for site in sites for tag in site.tags.tags)
        all_alike = len({frozenset(site.tags.tags) for site in sites}) == 1
        common = tuple(
            tag
            for tag in tags.tags
            if all_alike or (tag != "O" and sites_with[tag] > 1)
        )
        shared = common if config.share_outputs == "common" else ()
        return replace(config, tags=tags, shared_tags=shared, sites=len(sites))

    def configure_alone(
        self, config: Config, sites: Sequence[SiteData]
    ) -> tuple[finetune.Config, ...]:
        """Return each site's fine-tuning settings, which also train its local model."""
        return super().configure_alone(make_finetune_config(config, config.tags), sites)

    def configure_control(self, config: Config) -> Config | None:
        """Return the settings with which each site mixes two unshared models.

        A federation's gain over this mixture comes from the other sites. With
        differential privacy nothing is mixed, so there is no control.
        """
        if config.privacy is not None:
            return None
        return replace(config, share_change=False, share_outputs="none", shared_tags=())

    def configure_pooled(
        self,
        config: Config,
        sites: Sequence[SiteData],
        complete: Sequence[SiteData] | None,
    ) -> tuple[tuple[SiteData, ...], finetune.Config]:
        """Return the pooled data and the settings of fine-tuning with LoRA adapters."""
        return super().configure_pooled(
            make_finetune_config(config, config.tags), sites, complete
        )

    def estimate_traffic(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a site sends and receives."""
        del sizes
        sent, received = averaging.estimate_traffic(
            config, make_initial_parameters(config)
        )
        # In each cycle, COUNTED has the number of notes behind each shared row.
        row_counts_bytes = FLOAT_BYTES * len(config.shared_tags)
        return sent + config.cycles * row_counts_bytes, received

    def list_warnings(self, config: Config) -> tuple[str, ...]:
        """Warn if the encoder is an already trained classifier."""
        return list_earlier_classifier_warnings(config)

    def ends_with_one_model(self, config: Config | finetune.Config) -> bool:
        """Return whether sites end with equal models, as only fine-tuning's can."""
        return isinstance(config, finetune.Config) and not config.private

    def save_model(
        self, config: Config | finetune.Config, final: State, folder: Path
    ) -> bool:
        """Write nothing, because the server does not know any site's model."""
        del config, final, folder
        return False

    def needs_each_update(self, config: Config) -> bool:
        """Return False, because classifier rows are weighted in a sum."""
        del config
        return False


METHOD = Personal()
