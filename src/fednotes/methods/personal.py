"""A model of each site's own, taught by what it learns alone and by what all learn
together.

For sites with different tag sets, so that none loses by taking part. A site trains two
token classifiers on its own tags. One is its own and never hears of the others. The
other one is
federated: beside a low-rank change that all sites share and average there is one that
stays, and of the outputs the sites share the tags that mean the same. Both are mixed
where they predict, and the federated one learns from the mix; it is what is saved,
tested and used.

What it builds on: Arivazhagan, Aggarwal, Singh and Choudhary 2019, "Federated learning
with personalization layers" (parameters that stay); Mansour, Mohri, Ro and Suresh 2020,
"Three approaches for personalization with applications to federated learning" (a
mixture of the own and the common model); Hinton, Vinyals and Dean 2015, "Distilling the
knowledge in a neural network"; averaging as in Liu and Miller 2020 (`averaging.py`, Eq.
1). The whole is no published method.

    there                   here
    W_B, base layers        `Site.shared`: "lora" and the rows of `Config.shared_tags`
    W_P, personal layers    `Site.private`: "private" and the other rows of the classifier
    h_l, the local model    `Site.own`, a `finetune.Site`: as it would be alone, to the bit
    h_c, the central model  `Site.model`, what is federated
    λ_k, the mixture        `Config.mix`, one for all sites
    soft targets, q         `Site.targets`
    n_k                     notes; of a row of the classifier, those of the sites that have its tag

Every site sends tensors of equal names and shapes: of a row that it lacks zeros, and
"counted" says which it has. Sums of these are all that the server sees, and it divides
each row's by the notes of the sites that have it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fednotes.core.counts import round_counts
from fednotes.core.errors import ConfigError
from fednotes.core.federation import Federation, Method, State
from fednotes.core.settings import checked
from fednotes.core.tensors import below, load_into, prefixed, snapshot
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.batches import with_spans
from fednotes.methods import averaging, finetune, presets
from fednotes.methods.averaging import (
    CHANGES,
    Averaging,
    AveragingSite,
    private_by,
    run_cycles,
)
from fednotes.metrics.spans import SpanCounts, forms_of
from fednotes.privacy.promise import Privacy
from fednotes.taggers.corpora import EncoderCorpus, PreparedCorpus
from fednotes.taggers.model import Model
from fednotes.taggers.partial import Soft
from fednotes.taggers.saving import build_model
from fednotes.taggers.saving import model_config as any_model
from fednotes.taggers.token_classifier import TokenClassifier, TokenClassifierConfig
from fednotes.training.server_steps import by_each
from fednotes.training.sites import (
    Count,
    Number,
    Rate,
    all_tags,
    begun_from,
    judged_mentions,
)

OUTPUTS, COUNTED = "classifier", "counted"
# of distilling, in rates of training: validation data of pays/unlike preferred it to 1
RATE = 0.1
_RATES = ("learning_rate", "lora_learning_rate")
Half = Annotated[float, Interval(ge=0, le=1)]


@checked(frozen=True)
class Config(Averaging):
    """Settings of fine-tuning with a model of its own for each site.

    With differential privacy both changes of the federated model are trained privately,
    and only that model is kept, because the scores of a model that has seen the notes
    unprotected would tell about them.

    Attributes:
        model: The token classifier that every site trains, with train = "lora".
        share_outputs: Tags for which sites share the classifier's row: "common" are
            those that two or more sites have ("O" only where all sites annotate the
            same types, because it otherwise means different things), "none" shares no
            row.
        share_change: Whether the low-rank change is shared. Without it, and with
            share_outputs = "none", a site mixes two models of its own, which is the
            control that a federation has to beat.
        mix: Weight of the federated model in the mix; the site's own model has the
            rest.
        distil_epochs: Epochs in which the federated model learns from the mix, at a
            tenth of the learning rates; with 0 it is saved as it is, whatever `mix`
            says.
        tags: The complete tag set, the union over the sites. A job fills it in.
        shared_tags: Tags whose row is shared. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: TokenClassifierConfig = field(
        default_factory=lambda: TokenClassifierConfig(train="lora")
    )
    cycles: Count = 6
    learning_rate: Rate = 3e-4
    share_outputs: Literal["common", "none"] = "common"
    share_change: bool = True
    mix: Half = 0.5
    distil_epochs: Number = 3
    tags: TagSet = field(default_factory=lambda: TagSet(()))
    shared_tags: tuple[str, ...] = ()
    privacy: Privacy | None = None
    min_sites: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        super().__post_init__()
        if by_each(self):
            raise ConfigError(
                f'aggregation = "{self.aggregation}": the method personal weighs each row of the '
                'classifier by the sites that have its tag, in a sum: aggregation = "mean"'
            )
        if self.model.train != "lora":
            raise ConfigError(
                f'train = "{self.model.train}": the method personal trains low-rank changes of a '
                'frozen encoder: train = "lora"'
            )


# ---- names ---------------------------------------------------------------------------


class _Rows(nn.Module):
    """A matrix made of rows that are parameters of their own."""

    def forward(self, *rows: Tensor) -> Tensor:
        """(1, …) each → (rows, …)."""
        return torch.cat(rows)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """(rows, …) → (1, …) each."""
        return torch.split(whole, 1)


def parameters_of(model: Model) -> dict[str, nn.Parameter]:
    """All that a model trains, by name: its changes, and of its classifier each tag's
    row, "classifier.weight.TAG" (1, width) and "classifier.bias.TAG" (1,), made a
    parameter here."""
    assert isinstance(model, TokenClassifier)
    found = {n: p for n, p in model.trainable().items() if n.split(".")[0] in CHANGES}
    for part, _ in list(model.classifier.named_parameters()):
        parametrize.register_parametrization(model.classifier, part, _Rows())
        rows = model.classifier.get_submodule(f"parametrizations.{part}")
        for place, tag in enumerate(model.tagset.tags):
            found[f"{OUTPUTS}.{part}.{tag}"] = rows.get_parameter(f"original{place}")
    return found


def _single(model: TokenClassifier) -> TokenClassifier:
    """A copy whose classifier is in one piece again."""
    rows = model.classifier
    # draws nothing
    whole = nn.Linear(rows.in_features, rows.out_features, device="meta")
    whole.weight, whole.bias = (
        nn.Parameter(p.detach().clone()) for p in (rows.weight, rows.bias)
    )
    return model.with_classifier(whole)


def tag_of(name: str) -> str:
    """The tag of a row, by the name of its parameter; "" of any other parameter."""
    layer, _, rest = name.partition(".")
    return rest.partition(".")[2] if layer == OUTPUTS else ""


def initial(config: Config) -> dict[str, Tensor]:
    """What sites share, before training."""
    shared = (*([""] if config.share_change else []), *config.shared_tags)
    parameters = parameters_of(build_model(config.model, config.tags, config.seed))
    return {n: p.detach() for n, p in sorted(parameters.items()) if tag_of(n) in shared}


# ---- server --------------------------------------------------------------------------


def train(federation: Federation, config: Config | finetune.Config) -> State:
    """Global cycles (`averaging.run_cycles`), at whose end each site distils.
    Fine-tuning for its settings, those of a site alone and of all data pooled."""
    if isinstance(config, finetune.Config):
        return finetune.train(federation, config)
    server = Server(config, initial(config), judged_mentions, federation.resume())
    return run_cycles(federation, server)


class Server(averaging.Server):
    """The server of `averaging.py`, but that a row of the classifier has a weight of
    its own."""

    config: Config

    def require_returned(
        self, total: Total, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check what sites returned, with the numbers of notes behind each row."""
        tags = self.config.shared_tags
        total.require({**shapes, **({COUNTED: (len(tags),)} if tags else {})})

    def mean(self, total: Total) -> dict[str, Tensor]:
        """A row's mean is that of the sites that have its tag. Where none of them is in
        the sum the row stays as it is."""
        sums = dict(total.tensors)
        counted = sums.pop(COUNTED, torch.zeros(0)).tolist()
        notes = dict(zip(self.config.shared_tags, counted, strict=True))
        found = Total(sums, total.weight, {}).mean()
        for name in sums:
            weight = notes.get(tag_of(name), total.weight)
            if weight > 0:
                found |= Total({name: sums[name]}, weight, {}).mean()
            elif self.config.compression == "none":  # else these are changes, and zero
                found[name] = self.shared[name]
        return found


# ---- sites ---------------------------------------------------------------------------


def plain(config: Config, tags: TagSet, **changes: Any) -> finetune.Config:
    """The same as settings of fine-tuning, of these tags."""
    kept = {each.name: getattr(config, each.name) for each in fields(Averaging)}
    kept |= {"privacy": config.privacy, "min_sites": config.min_sites}
    return finetune.Config(**kept | changes, model=config.model, tags=tags)


class _Student(finetune.Site):
    """A site's model that learns on a corpus with soft targets, in one go."""

    def __init__(self, site: finetune.Site, corpus: EncoderCorpus, epochs: int) -> None:
        once: dict[str, Any] = {
            "cycles": 1,
            "keep_cycle": 0,
            "local_steps": 0,
            "proximal": 0.0,
        }
        once |= {name: RATE * getattr(site.config, name) for name in _RATES}
        config = replace(site.config, **once, local_epochs=epochs)
        given: Any = {
            "weight": 1,
            "examples": site.num_examples,
            "device": site.device,
            "draws": site.draws,
        }
        # so its order and dropout are others than in training
        name = f"{site.id}, distilling"
        AveragingSite.__init__(self, name, config, site.model.trainable(), **given)
        self.config, self.model, self.share = config, site.model, site.share
        self.train_set = self._read = corpus

    def learn(self) -> None:
        """All the epochs, from the present parameters."""
        self.train(snapshot(self.shared), cycle=0)


class Site(finetune.Site):
    """One silo with its two models.

    own: the site's own model, what it would train to alone. Its parameters follow from
    the site's data and the job's settings, whoever takes part and whatever comes. In
    the end its model is the federated one. It sends nothing, so it counts exactly
    whatever `count_step` says. Options and errors are those of `MentionSite`.
    """

    model: TokenClassifier

    def __new__(
        cls, data: SiteData, config: Config | finetune.Config, **options: Any
    ) -> Any:
        """A site of fine-tuning for its settings."""
        if isinstance(config, finetune.Config):
            return finetune.Site(data, config, **options)
        return super().__new__(cls)

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        self._settings = config
        alone = averaging.central(plain(config, data.tags, batch="each"))
        self.own = finetune.Site(data, alone, **options | {"count_step": 1})
        self._own = self.own.model
        self._start = snapshot(self.own.parameters)
        self._go_on(None)
        super().__init__(
            data, plain(config, data.tags), **options | {"directory": None}
        )

    def _go_on(self, resumed: State | None) -> None:
        """Begin, or go on, as what a server is to the own model, which has no other."""
        self._alone = averaging.Server(
            self.own.config, self._start, judged_mentions, resumed
        )

    def _trained(self) -> tuple[Mapping[str, nn.Parameter], Collection[str]]:
        """As there. A row that only others have stands there unused."""
        config, tags = self._settings, self.model.tagset.tags
        self.model.adapt(config.seed, "private")
        own, like = parameters_of(self.model), initial(config)
        self._counted = torch.tensor([float(tag in tags) for tag in config.shared_tags])
        self._lacks = like.keys() - own.keys()
        device = self.model.device
        others = {
            n: nn.Parameter(torch.zeros_like(like[n], device=device))
            for n in self._lacks
        }
        parameters: dict[str, nn.Parameter] = dict(sorted((own | others).items()))
        return parameters, parameters.keys() - like.keys()

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Likewise; the own model's mini-batches are as large."""
        update = super().take_share(tensors, examples=examples)
        self.own.share = self.share
        return update

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """A cycle of both models."""
        update = super().train(tensors, cycle=cycle)
        self._train_own(cycle + 1)
        return update

    def _sends(
        self, tensors: Tensors, metrics: Mapping[str, float], part: float | None = None
    ) -> Update:
        """Nothing but zeros of rows that the site lacks, which count for nothing."""
        sent = {
            n: torch.zeros_like(v) if n in self._lacks else v
            for n, v in tensors.items()
        }
        counted = self._counted * (1.0 if part is None else part)
        own = {COUNTED: counted} if self._settings.shared_tags else {}
        return super()._sends(sent | own, metrics, part)

    def _train_own(self, cycles: int) -> None:
        """Train the own model until it has had so many of the job's cycles, also missed
        ones."""
        while self._alone.round < min(cycles, self._alone.cycles):
            number = self._alone.round
            total = Total.of([self.own.train(self._alone.sent, cycle=number)])
            self._alone.step(total.mean(), total)
            if self._alone.due and self._alone.best.wanted:
                judged = Total.of([self.own.evaluate(self._alone.shared, cycle=number)])
                # else the last is kept
                if judged_mentions(judged.metrics)["held_out"] > -math.inf:
                    self._alone.judge(judged)

    # the end

    def finish(self, tensors: Tensors) -> Update:
        """Distil the mix; test counts of what has learnt from it, which is saved.

        The scores have those of the parts too: "own" and "federated" model, and "mix".
        """
        self.load_kept(tensors)
        if self._settings.privacy is not None:
            self.own.model, self.own.tells_forms = _single(self.model), self.tells_forms
            update, self.scores = self.own.tested(), self.own.scores
            return update
        self.own.model = self._own
        self._train_own(self.config.last_cycle)
        load_into(self.own.parameters, self._alone.result)
        parts = self._parts_scores()
        targets = self.targets() if self._settings.distil_epochs else None
        self.own.model = _single(self.model)
        if targets is not None:
            self._distil(targets)
        tested = self.own.tested()
        self.scores = {**self.own.scores, "parts": parts}
        return Update(metrics=round_counts(tested.metrics, self.count_step))

    def _distil(self, targets: np.ndarray) -> None:
        """Teach the student."""
        corpus: EncoderCorpus = self.own.model.require_corpus(self.own.train_set)
        pairs = np.zeros((corpus.sentences, 0, 0), np.float32)
        # Nothing is known for certain, so the loss is the cross-entropy with the
        # targets.
        soft = replace(corpus, known=frozenset(), soft=Soft(targets, pairs))
        _Student(self.own, soft, self._settings.distil_epochs).learn()

    def targets(self) -> np.ndarray:
        """(tokens, tags) of the training text: half the gold tags, half the mix."""
        mixed = self._emissions(self.train_set)["mix"]
        told = torch.from_numpy(mixed).softmax(-1).numpy()
        gold = np.eye(told.shape[1], dtype=np.float32)[self.train_set.encoded.tags]
        return np.asarray((gold + told) / 2)

    def _emissions(self, corpus: PreparedCorpus) -> dict[str, np.ndarray]:
        """(tokens, tags) logits of both models and, weighted, of the mix. Their mean is
        that of log-probabilities but for a number a word, which no probability shows.
        """
        own, part = self.own.model, np.float32(self._settings.mix)
        assert isinstance(own, TokenClassifier)
        parts = {
            "own": own.emissions(corpus),
            "federated": self.model.emissions(corpus),
        }
        return parts | {"mix": (1 - part) * parts["own"] + part * parts["federated"]}

    def _parts_scores(self) -> dict[str, Any]:
        """Strict and relaxed test scores of each part."""
        found, seen, types = {}, forms_of(self.data.train), self.judged_types(self.data)
        for name, emissions in self._emissions(self.test_set).items():
            predicted = with_spans(self.test_set.encoded, emissions.argmax(-1))
            counts = SpanCounts.of(self.data.test, predicted, seen=seen, types=types)
            found[name] = {
                kind: counts.scores()[kind] for kind in ("strict", "relaxed")
            }
        return found

    def document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of what is saved; see `MethodSite`."""
        return self.own.document_counts(site)

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """As there, of what is saved."""
        return self.own.scores_on(site)

    @property
    def valid_score(self) -> float | None:
        """As there, of what is saved."""
        return self.own.valid_score

    # what a restart must not lose

    def state(self) -> State:
        """Both models'."""
        state = super().state()
        tensors, facts = dict(state.tensors), dict(state.facts)
        for name, part in (("own", self.own.state()), ("alone", self._alone.state())):
            tensors |= prefixed(f"{name}.", part.tensors)
            facts[name] = {"round": part.round, "facts": dict(part.facts)}
        return State(state.round, tensors, facts)

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        super().restore(state)
        for name, take in (("own", self.own.restore), ("alone", self._go_on)):
            kept = state.facts[name]
            take(State(kept["round"], below(state.tensors, f"{name}."), kept["facts"]))


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> TokenClassifierConfig:
    """The [model] table, of a token classifier with train = "lora".

    Raises ConfigError.
    """
    settings = {"kind": "token-classifier", "train": "lora"} | dict(table)
    if settings["kind"] != "token-classifier":
        raise ConfigError(
            f'kind = {settings["kind"]!r} is no model for method = "personal", which takes '
            '"token-classifier"; finetune and distill take others'
        )
    made = any_model(settings)
    assert isinstance(made, TokenClassifierConfig)
    return made


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with the union of the sites' tags, and those whose row is
    shared."""
    tags, had = (
        all_tags(sites),
        Counter(tag for site in sites for tag in site.tags.tags),
    )
    alike = len({frozenset(site.tags.tags) for site in sites}) == 1
    common = tuple(t for t in tags.tags if alike or (t != "O" and had[t] > 1))
    shared = common if config.share_outputs == "common" else ()
    return replace(config, tags=tags, shared_tags=shared, sites=len(sites))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[finetune.Config, ...]:
    """What each site fine-tunes by itself: the own model of a federated run."""
    return finetune.alone(plain(config, config.tags), sites)


def control(config: Config) -> Config | None:
    """Return the settings with which each site mixes two models of its own, without
    partners.

    Only what such a federation gains over this mix comes from the other sites. With
    differential privacy nothing is mixed, so there is no control.
    """
    if config.privacy is not None:
        return None
    return replace(config, share_change=False, share_outputs="none", shared_tags=())


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], finetune.Config]:
    """As fine-tuning's, of the same low-rank changes."""
    return finetune.pooled(plain(config, config.tags), sites, complete)


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run."""
    up, down = averaging.traffic_of(config, initial(config))
    return up + config.cycles * 4 * len(config.shared_tags), down


def private_initial(config: Config | finetune.Config) -> dict[str, Tensor]:
    """What sites share with differential privacy: fine-tuning's for its settings."""
    return (
        finetune.initial(config)
        if isinstance(config, finetune.Config)
        else initial(config)
    )


def one_model(config: Config | finetune.Config) -> bool:
    """Whether sites end with equal models: only where fine-tuning's do."""
    return isinstance(config, finetune.Config) and finetune.one_model(config)


METHOD = Method(
    Config,
    Site,
    train,
    model_config,
    presets("personal"),
    finetune.planned,
    pooled,
    judged_mentions,
    models=lambda: {"token-classifier": TokenClassifierConfig},
    for_sites=for_sites,
    alone=alone,
    control=control,
    traffic=traffic,
    warnings=begun_from,
    size_warnings=averaging.size_warnings,
    one_model=one_model,
    private=private_by(
        private_initial,
        finetune.private_loss,
        settings={"mix": 1.0, "distil_epochs": 0},
    ),
)
