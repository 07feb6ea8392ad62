"""Three adversarial baselines of federated domain adaptation, as Wang et al. 2023 set
them up (Appendix A).

"ganin"  Ganin et al. 2016, Domain-adversarial training of neural networks: a discriminator
         learns which site a hidden state is from, the features learn to hide it (its gradient
         is reversed on the way down).
"peng"   Peng et al. 2019, Federated adversarial domain adaptation: the same, and the states
         below the output scores are taken apart into what tells the site and what tells the
         entity. (Their dynamic attention of one target site to the others has no place here:
         every site is source and target.)
"hong"   Hong et al. 2021, Federated adversarial debiasing: half the squared adversarial loss,
         whose gradient is the loss times the plain one, so that the sites that are told worst
         weigh most; and predictions of the types that the site does not annotate are made
         certain (low entropy).

    paper   here
    K       `Config.platforms`
    K × d   one `domain.<layer>` a layer that represents text, linear, without bias; for
            "peng" one more, `domain.outputs`, on the states below the output scores

Numbers that travel beyond the model's own, each way, with every copy of it: the paper
counts 12·K·d, against 10·d for the gradient of q that instance weighting sends. But
bart-base has 6 encoder layers (and 6 decoder layers, which have no discriminator), so
here it is 6·K·d, and 7·K·d for "peng": with d = 768 and the six platforms of OntoNotes
27,648 and 32,256, with three 13,824 and 16,128, against 7,680 of q. All are small
beside the prompts' 11,066,880.

A site sees only its own notes, so its discriminators learn there that everything is its
own; what makes them discriminators is that the server averages them with the others'
(Hong et al. study this loss of which each site has one side). That changes one thing
(`matching_loss`): the reversed gradient rests where a state tells its site no better
than chance does. Without that the loss grew for ever and the tagger forgot its task. No
feature of a note leaves its site. All else (annotation, rounds, aggregation) is
`methods/distill.py`, whose pseudo-complete annotation the baselines share: Hong et
al.'s entropy is defined on it.
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
from fednotes.core.settings import checked
from fednotes.core.tensors import nbytes, snapshot
from fednotes.core.types import SiteData
from fednotes.methods import distill, presets
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Losses, Model
from fednotes.taggers.saving import build_model

MOST = 1000.0  # of strength and entropy
# keeps the projection defined where rows of a discriminator depend on others
RIDGE = 1e-6


@checked(frozen=True)
class Config(distill.Config):
    """Settings of the adversarial baselines.

    Attributes:
        weighting: The baselines have no instance weights: only false is accepted.
        variant: Whose baseline is run.
        strength: Final strength of the reversed gradient. It grows from 0 in the first
            round by the schedule of Ganin et al., who end at 1, which small taggers did
            not bear.
        entropy: Weight of the entropy of Hong et al., and of the disentanglement of
            Peng et al.
        platforms: The sites' names. A job fills them in.
    """

    weighting: bool = False
    variant: Literal["ganin", "peng", "hong"] = "ganin"
    strength: Annotated[float, Interval(ge=0, le=MOST)] = 0.1
    entropy: Annotated[float, Interval(ge=0, le=MOST)] = 0.1
    platforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        distill.Config.__post_init__(self)
        if self.weighting:
            raise ConfigError(
                "the adversarial baselines have no instance weights: leave weighting out, "
                'or set method = "distill"'
            )


def train(federation: Federation, config: Config) -> State:
    """Algorithm 1 of Wang et al. 2023 without weights; the discriminators travel with
    θ."""
    return distill.train(federation, config, initial(config))


def initial(config: Config) -> dict[str, Tensor]:
    """θ_1 and the discriminators, which follow from the seed."""
    model = build_model(config.model, config.tags, config.seed)
    return snapshot(model.trainable() | discriminators(config, model))


def discriminators(config: Config, model: Model) -> dict[str, nn.Parameter]:
    """`domain.0` … (K, width) for each hidden layer; `domain.outputs` for "peng".

    None with fewer than two sites: there is nothing to tell apart.
    """
    sites = len(config.platforms)
    if sites < 2:
        return {}
    widths = {f"domain.{layer}": width for layer, width in enumerate(model.widths)}
    if config.variant == "peng":
        widths["domain.outputs"] = model.output_width
    made = {}
    for name, width in widths.items():
        generator = torch.Generator().manual_seed(seed_of(config.seed, "init", name))
        values = torch.randn(sites, width, generator=generator) / math.sqrt(width)
        made[name] = nn.Parameter(values.to(model.device))
    return made


class Site(distill.Site):
    """A site of `methods/distill.py` that also trains discriminators."""

    config: Config

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        super().__init__(data, config, **options)
        if len(config.platforms) > 1 and not self.model.widths:
            raise ConfigError(
                "the adversarial baselines need a layer that represents text and learns: give "
                "the tagger project, cnn_filters or lstm_units"
            )
        self.discriminators = discriminators(config, self.model)
        self.parameters |= self.discriminators
        self.label = config.platforms.index(data.id) if self.discriminators else 0

    def described(self) -> str:
        """What is trained and sent, and how much of it is discriminators."""
        numbers = sum(value.numel() for value in self.discriminators.values())
        return f"{super().described()}, {numbers:,} of them in discriminators"

    def _objective(
        self,
        corpus: PreparedCorpus,
        indices: np.ndarray,
        weights: np.ndarray,
        how: str,
        round: int,
    ) -> tuple[Tensor, float, float]:
        losses = self.model.losses(corpus, indices, states=bool(self.discriminators))
        total, source, target = distill.weighted_loss(losses, weights[indices], how)
        if self.discriminators:
            total = total + adversarial_loss(
                losses,
                self.discriminators,
                self.label,
                round / self.config.rounds,
                self.config,
            )
        return total, source, target


def adversarial_loss(
    losses: Losses,
    weights: dict[str, nn.Parameter],
    label: int,
    progress: float,
    config: Config,
) -> Tensor:
    """What a baseline adds to the loss of a mini-batch.

    label: the site's number. progress: the part of the rounds that is done, 0 to 1.
    """
    strength = config.strength * reversal_strength(progress)  # [tagsets appendix a]
    by_layer = [
        matching_loss(hidden, weights[f"domain.{layer}"], label, strength)
        for layer, hidden in enumerate(losses.hidden)
    ]
    domain = torch.stack(by_layer).mean()  # [tagsets appendix a]
    if config.variant == "hong":
        # [tagsets appendix a]
        return domain.square() / 2 + config.entropy * pseudo_entropy(losses)
    if config.variant == "peng":
        assert losses.outputs is not None
        weight = weights["domain.outputs"]
        # It learns where the site shows; the states are not to show it more for that.
        own = domain_loss(
            losses.outputs.detach(), weight, label
        )  # [tagsets appendix a]
        # [tagsets appendix a]
        return domain + own + config.entropy * disentanglement(losses, weight)
    return domain


def reversal_strength(progress: float) -> float:
    """2 / (1 + exp(-10 p)) - 1 (Ganin et al. 2016, section 5.2.2)."""
    return 2 / (1 + math.exp(-10 * progress)) - 1


def matching_loss(
    states: Tensor, weight: Tensor, label: int, strength: float
) -> Tensor:
    """`domain_loss`, which the discriminator lowers and the states raise.

    A state is left alone as soon as its site is told no better than by chance. In one
    place, the other domains' states would keep the discriminator in balance; here a
    site has only its own, and a loss without an upper bound would be raised for ever.
    """
    with torch.no_grad():
        logs = F.log_softmax(states @ weight.T, dim=1)[:, label]  # (rows,)
        told = (logs > -math.log(len(weight))).to(states.dtype)
    return domain_loss(reverse(states, strength * told[:, None]), weight, label)


def domain_loss(states: Tensor, weight: Tensor, label: int) -> Tensor:
    """Cross-entropy of telling the site from states (rows, width); weight (K, width)."""
    scores = states @ weight.T  # (rows, K)
    return F.cross_entropy(
        scores, torch.full((len(scores),), label, device=scores.device)
    )


def reverse(states: Tensor, strength: Tensor) -> Tensor:
    """The states; on the way back their gradient times -strength, (rows, 1)."""
    found = states.view_as(states)
    found.register_hook(lambda gradient: -strength * gradient)
    return found


def pseudo_entropy(losses: Losses) -> Tensor:
    """Mean entropy, in nats, of the predictions at targets of pseudo-annotated types.

    Of a CRF's predictions, what the scores of the single tokens say.
    """
    assert losses.outputs is not None
    assert losses.pseudo is not None
    assert losses.score is not None
    entropies = _entropy(losses.score(losses.outputs))[losses.pseudo]
    return entropies.mean() if len(entropies) else losses.outputs.sum() * 0


def disentanglement(losses: Losses, weight: Tensor) -> Tensor:
    """Peng et al.'s disentanglement with no parameters but one discriminator (K,
    width).

    What of a state tells the site (`domain_specific`) must not tell the target: the
    entropy of what it alone would predict is made high. As there, what predicts is held
    fixed: the gradient goes to the state and to the discriminator only.
    """
    assert losses.outputs is not None
    assert losses.score is not None
    specific = domain_specific(losses.outputs, weight)  # (steps, width)
    alone = specific.detach().requires_grad_()
    certainty = -_entropy(losses.score(alone)).mean()
    (slope,) = torch.autograd.grad(certainty, alone)
    return certainty.detach() + (slope * (specific - specific.detach())).sum()


def domain_specific(states: Tensor, weight: Tensor) -> Tensor:
    """The projection of states (rows, width) onto the rows of a discriminator (K,
    width).

    It tells the site as well as the state itself does (weight @ projection = weight @
    state); the rest of the state is orthogonal to every row and tells nothing of it.
    That holds by construction, in place of the mutual information that Peng et al.
    minimise with networks.
    """
    rows = weight.double()  # rows that are nearly parallel cost half of the digits
    gram = rows @ rows.T + RIDGE * torch.eye(
        len(rows), dtype=rows.dtype, device=rows.device
    )
    basis: Tensor = torch.linalg.solve(gram, rows).to(states.dtype)  # (K, width)
    return (states @ weight.T) @ basis


def _entropy(scores: Tensor) -> Tensor:
    """(rows,) of softmax over the allowed candidates of scores (rows, candidates)."""
    logs = F.log_softmax(scores, dim=1)
    return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(1)


# what a job asks of a method


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with what only the sites together can say."""
    return replace(
        distill.for_sites(config, sites), platforms=tuple(site.id for site in sites)
    )


METHOD = replace(
    distill.METHOD,
    Config=Config,
    Site=Site,
    train=train,
    presets=presets("adversarial"),
    for_sites=for_sites,
    # without discriminators
    alone=lambda config, sites: distill.alone(replace(config, platforms=()), sites),
    pooled=lambda config, *sites: distill.pooled(replace(config, platforms=()), *sites),
    traffic=lambda config, sizes: distill.messages(config, nbytes(initial(config))),
    private="parameters after local steps leave a site, and those of what tells its notes apart",
)
