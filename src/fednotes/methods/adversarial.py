"""Three adversarial baselines of federated domain adaptation.

They are set up as in Wang et al. 2023, Appendix A.

"ganin": Ganin et al. 2016, "Domain-adversarial training of neural networks". A
discriminator learns to predict the site of a hidden state, and the features learn to
hide the site, because the discriminator's gradient is reversed during backpropagation.

"peng": Peng et al. 2019, "Federated adversarial domain adaptation". In addition, the
states below the output scores are disentangled into a part that predicts the site and a
part that predicts the entity. (Their dynamic attention from one target site to the
others does not apply, because every site is source and target.)

"hong": Hong et al. 2021, "Federated adversarial debiasing". The adversarial loss is
squared and halved, so its gradient is the plain gradient times the loss, and sites that
are recognised worst have the largest weight. Predictions of types that the site does
not annotate are pushed towards certainty (low entropy).

    paper   here
    K       `Config.platforms`
    K × d   one `domain.<layer>` for each layer that represents text: linear, without
            bias; "peng" has one more, `domain.outputs`, on the states below the output
            scores

Numbers transmitted in addition to the model, each way, with every copy of it: the paper
counts 12·K·d, against 10·d for the gradient of q that instance weighting sends. But
bart-base has 6 encoder layers (and 6 decoder layers, which have no discriminator), so
here it is 6·K·d, and 7·K·d for "peng". With d = 768 and the six platforms of OntoNotes
that makes 27,648 and 32,256 numbers, with three platforms 13,824 and 16,128, against
7,680 of q. All of these are small compared with the prompts' 11,066,880.

A site sees only its own notes, so its discriminators learn to assign everything to that
site. Only the server's average over sites discriminates (Hong et al. study this loss,
of which each site computes one side). Therefore `compute_matching_loss` differs from
the papers in one point: the reversed gradient is zero where a state reveals its site no
better than chance. Otherwise the loss would grow without bound, and the tagger would
forget its task. No feature of a note leaves its site.

Everything else (annotation, rounds, aggregation) is `methods/distill.py`. The baselines
share its pseudo-complete annotation, on which Hong et al.'s entropy is defined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.federation import Federation, State
from fednotes.core.seeds import seed_of
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import copy_tensors, nbytes
from fednotes.core.types import SiteData
from fednotes.methods import distill, read_presets
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Losses, Model
from fednotes.taggers.saving import build_model

LARGEST_FACTOR = 1000.0  # of strength and entropy
# Keeps the projection defined if the rows of a discriminator are linearly dependent.
RIDGE = 1e-6


@checked(frozen=True)
class Config(distill.Config):
    """Settings of the adversarial baselines.

    Attributes:
        weighting: Only false is accepted, because the baselines have no instance
            weights.
        variant: Authors of the baseline to run.
        strength: Final strength of the reversed gradient. It grows from 0 in the first
            round by the schedule of Ganin et al., who end at 1; small taggers did not
            converge at 1.
        entropy: Weight of the entropy loss (Hong et al.) or of the disentanglement loss
            (Peng et al.).
        platforms: The sites' names. A job fills them in.
    """

    weighting: bool = False
    variant: Literal["ganin", "peng", "hong"] = "ganin"
    strength: Annotated[float, Interval(ge=0, le=LARGEST_FACTOR)] = 0.1
    entropy: Annotated[float, Interval(ge=0, le=LARGEST_FACTOR)] = 0.1
    platforms: FilledIn[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        distill.Config.__post_init__(self)
        if self.weighting:
            raise ConfigError(
                "the adversarial baselines have no instance weights: leave weighting "
                'out, or set method = "distill"'
            )


def train(federation: Federation, config: Config) -> State:
    """Run Algorithm 1 of Wang et al. 2023 without weights and with discriminators.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's final state; discriminators are part of θ.
    """
    return distill.train(federation, config, make_initial_parameters(config))


def make_initial_parameters(config: Config) -> dict[str, Tensor]:
    """Return θ_1 and the initial discriminators, derived from the seed.

    Raises:
        ConfigError: The model has no layer whose states a discriminator could read.
    """
    model = build_model(config.model, config.tags, config.seed)
    return copy_tensors(model.trainable() | make_discriminators(config, model))


def make_discriminators(config: Config, model: Model) -> dict[str, nn.Parameter]:
    """Return the discriminators by name, each (K, width).

    With fewer than two sites there are none.

    Args:
        config: The settings of the run.
        model: The model whose hidden states they read.

    Returns:
        `domain.0`, `domain.1`, … for the hidden layers; for "peng" also
        `domain.outputs`.

    Raises:
        ConfigError: The model has no layer whose states a discriminator could read.
    """
    sites = len(config.platforms)
    if sites < 2:
        return {}
    if not model.widths:
        raise _make_missing_layer_error(config.model.kind)
    widths = {f"domain.{layer}": width for layer, width in enumerate(model.widths)}
    if config.variant == "peng":
        widths["domain.outputs"] = model.output_width
    weights = {}
    for name, width in widths.items():
        generator = torch.Generator().manual_seed(seed_of(config.seed, "init", name))
        values = torch.randn(sites, width, generator=generator) / math.sqrt(width)
        weights[name] = nn.Parameter(values.to(model.device))
    return weights


def _make_missing_layer_error(kind: str) -> ConfigError:
    """Return the error for a model without a layer that discriminators can read."""
    is_light = kind == "tagger"
    return ConfigError(
        f'model kind "{kind}" has no layer that represents text and is trained '
        "(`widths` is empty), and the adversarial baselines need one: "
        + (
            "give the tagger project, cnn_filters or lstm_units"
            if is_light
            else "use another kind, or the method distill"
        )
    )


class Site(distill.Site):
    """A site of `methods/distill.py` that also trains discriminators.

    Args:
        data: The site's documents.
        config: The settings of the run.
        **options: As for `MentionSite`.

    Attributes:
        discriminators: The discriminators by name.
        label: The site's index among all sites.

    Raises:
        ConfigError: The model has no layer whose states a discriminator can read.
    """

    config: Config

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        super().__init__(data, config, **options)
        self.discriminators = make_discriminators(config, self.model)
        self.parameters |= self.discriminators
        self.label = config.platforms.index(data.id) if self.discriminators else 0

    def describe_parameters(self) -> str:
        """Describe how many parameters are trained and sent, and in discriminators."""
        numbers = sum(value.numel() for value in self.discriminators.values())
        return f"{super().describe_parameters()}, {numbers:,} of them in discriminators"

    def _compute_objective(
        self,
        corpus: PreparedCorpus,
        indices: np.ndarray,
        weights: np.ndarray,
        treatment: distill.Unannotated,
        round: int,
    ) -> tuple[Tensor, float, float]:
        """Return the mini-batch's loss, and its source and target parts as numbers."""
        losses = self.model.losses(
            corpus, indices, with_states=bool(self.discriminators)
        )
        total, source, target = distill.compute_weighted_loss(
            losses, weights[indices], treatment
        )
        if self.discriminators:
            total = total + compute_adversarial_loss(
                losses,
                self.discriminators,
                self.label,
                progress=round / self.config.rounds,
                config=self.config,
            )
        return total, source, target


def compute_adversarial_loss(
    losses: Losses,
    weights: dict[str, nn.Parameter],
    label: int,
    *,
    progress: float,
    config: Config,
) -> Tensor:
    """Return the term that a baseline adds to the loss of a mini-batch, ().

    Args:
        losses: The mini-batch's losses, with the model's hidden states.
        weights: The discriminators by name.
        label: The site's index.
        progress: The fraction of rounds completed, 0 to 1.
        config: The settings of the run.
    """
    # [tagsets appendix a]
    strength = config.strength * compute_reversal_strength(progress)
    by_layer = [
        compute_matching_loss(hidden, weights[f"domain.{layer}"], label, strength)
        for layer, hidden in enumerate(losses.hidden)
    ]
    domain = torch.stack(by_layer).mean()  # [tagsets appendix a]
    if config.variant == "hong":
        # [tagsets appendix a]
        return domain.square() / 2 + config.entropy * compute_pseudo_entropy(losses)
    if config.variant == "peng":
        assert losses.outputs is not None
        weight = weights["domain.outputs"]
        # This discriminator learns which directions reveal the site. The states are
        # detached, so that they do not learn to reveal it more.
        states = losses.outputs.detach()
        of_outputs = compute_domain_loss(states, weight, label)  # [tagsets appendix a]
        apart = config.entropy * compute_disentanglement(losses, weight)
        return domain + of_outputs + apart  # [tagsets appendix a]
    return domain


def compute_reversal_strength(progress: float) -> float:
    """Return 2 / (1 + exp(-10 p)) - 1 (Ganin et al. 2016, section 5.2.2)."""
    return 2 / (1 + math.exp(-10 * progress)) - 1


def compute_matching_loss(
    states: Tensor, weight: Tensor, label: int, strength: float
) -> Tensor:
    """Return the domain loss that the discriminator minimises and states maximise.

    A state is no longer changed once it reveals its site no better than chance. With
    all data in one place, the states of other domains would balance the discriminator.
    Here a site has only its own states, and maximising a loss without an upper bound
    would make it grow indefinitely.

    Args:
        states: Hidden states, (rows, width).
        weight: The discriminator, (K, width).
        label: The site's index.
        strength: Factor of the reversed gradient.
    """
    with torch.no_grad():
        log_probability = F.log_softmax(states @ weight.T, dim=1)[:, label]  # (rows,)
        is_recognised = log_probability > -math.log(len(weight))
        by_state = strength * is_recognised.to(states.dtype)
    return compute_domain_loss(
        reverse_gradient(states, by_state[:, None]), weight, label
    )


def compute_domain_loss(states: Tensor, weight: Tensor, label: int) -> Tensor:
    """Return the cross-entropy of predicting the site from hidden states, ().

    Args:
        states: Hidden states, (rows, width).
        weight: The discriminator, (K, width).
        label: The site's index.
    """
    scores = states @ weight.T  # (rows, K)
    targets = torch.full((len(scores),), label, device=scores.device)
    return F.cross_entropy(scores, targets)


def reverse_gradient(states: Tensor, strength: Tensor) -> Tensor:
    """Return the states, whose gradient is multiplied by -strength, (rows, 1)."""
    reversed_states = states.view_as(states)
    reversed_states.register_hook(lambda gradient: -strength * gradient)
    return reversed_states


def compute_pseudo_entropy(losses: Losses) -> Tensor:
    """Return the mean entropy, a scalar in nats, of the steps with pseudo-targets.

    Pseudo-targets are those that a teacher added. For a CRF, predictions use each
    token's emission scores alone.
    """
    assert losses.outputs is not None
    assert losses.is_added is not None
    assert losses.score_states is not None
    entropies = _compute_entropies(losses.score_states(losses.outputs))[losses.is_added]
    if len(entropies):
        return entropies.mean()
    return losses.outputs.sum() * 0  # a zero that can be differentiated


def compute_disentanglement(losses: Losses, weight: Tensor) -> Tensor:
    """Return Peng et al.'s disentanglement loss, with a discriminator as parameters.

    The part of a state that reveals the site (`project_on_discriminator`) must not
    predict the target, so the entropy of its predictions is maximised. As in their
    paper, the predictor is fixed: only the state and the discriminator receive a
    gradient.

    Args:
        losses: The mini-batch's losses, with the states below the output scores.
        weight: The discriminator of these states, (K, width).
    """
    assert losses.outputs is not None
    assert losses.score_states is not None
    specific = project_on_discriminator(losses.outputs, weight)  # (steps, width)
    alone = specific.detach().requires_grad_()
    certainty = -_compute_entropies(losses.score_states(alone)).mean()
    (slope,) = torch.autograd.grad(certainty, alone)
    # The value of the certainty, with its gradient for `specific` alone.
    return certainty.detach() + (slope * (specific - specific.detach())).sum()


def project_on_discriminator(states: Tensor, weight: Tensor) -> Tensor:
    """Return the projection of states onto the rows of a discriminator, (rows, width).

    The projection reveals the site as well as the state itself (weight @ projection =
    weight @ state). The remainder of the state is orthogonal to every row and reveals
    nothing about the site. This holds by construction, whereas Peng et al. train
    networks to minimise mutual information.

    Args:
        states: Hidden states, (rows, width).
        weight: The discriminator, (K, width).
    """
    rows = weight.double()  # nearly parallel rows lose half of the digits
    ridge = RIDGE * torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    gram = rows @ rows.T + ridge
    basis: Tensor = torch.linalg.solve(gram, rows).to(states.dtype)  # (K, width)
    return (states @ weight.T) @ basis


def _compute_entropies(scores: Tensor) -> Tensor:
    """Return the entropy of the softmax over allowed candidates, (rows,).

    Args:
        scores: Logits, (rows, candidates), -inf for candidates that are not allowed.
    """
    logs = F.log_softmax(scores, dim=1)
    return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(1)


# The interface to jobs.


class Adversarial(distill.Distill):
    """The adversarial baselines of Wang et al. 2023, for a job."""

    config_class = Config
    site_class = Site
    presets = read_presets("adversarial")
    reads_layers = True
    dp = None
    no_dp_reason = (
        "a site sends parameters after local steps, including those of its "
        "discriminators"
    )

    def train(self, federation: Federation, config: Config) -> State:
        """Run Algorithm 1 of Wang et al. 2023 with discriminators."""
        return train(federation, config)

    def configure(self, config: Config, sites: Sequence[SiteData]) -> Config:
        """Return the settings with the complete tag set and the sites' names."""
        completed: Config = super().configure(config, sites)
        return replace(completed, platforms=tuple(site.id for site in sites))

    def configure_alone(
        self, config: Config, sites: Sequence[SiteData]
    ) -> tuple[Config, ...]:
        """Return each site's settings, without discriminators."""
        return super().configure_alone(replace(config, platforms=()), sites)

    def configure_pooled(
        self,
        config: Config,
        sites: Sequence[SiteData],
        complete: Sequence[SiteData] | None,
    ) -> tuple[tuple[SiteData, ...], Config]:
        """Return the pooled data and the settings without discriminators."""
        return super().configure_pooled(replace(config, platforms=()), sites, complete)

    def estimate_traffic(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a site sends and receives, discriminators included.

        Raises:
            ConfigError: The model has no layer whose states a discriminator could read.
                `simulate` calls this first, so it refuses such a job before any site
                trains alone.
        """
        del sizes
        return distill.estimate_traffic(config, nbytes(make_initial_parameters(config)))


METHOD = Adversarial()
