"""Causes that the settings of a job and the sizes of its sites show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fednotes import methods
from fednotes.core.errors import ConfigError
from fednotes.core.wording import list_names
from fednotes.jobs.causes import Cause, Evidence, Importance, Setting
from fednotes.jobs.job import Job
from fednotes.jobs.settings_to_try import list_longer_training
from fednotes.privacy.promise import Privacy

# Presets were chosen for real corpora; in the experiments of docs/results.md, rates
# within a factor of five of one learned too.
FAR = 5.0
# An output layer starts at random, and Adam moves a number by about the learning rate
# in a step: fewer than a hundred steps rarely suffice.
FEW_STEPS = 100
# The sum of a round has a signal of at most (number of units) · C and noise of σ · C in
# each number. Below ten units for each σ, few rounds point in the right direction.
LEAST_SIGNAL = 10.0
# A site of which fewer than one unit is drawn in a round mostly adds noise.
LEAST_UNITS = 1.0
# Values of `train` in [model] that need other learning rates than whole layers.
FEW_PARAMETERS = ("biases", "lora")


class Rates(NamedTuple):
    """A job's learning rate beside those of presets for the same kind of model.

    Attributes:
        rate: The job's learning rate.
        low: The lowest one of the presets.
        high: The highest one of the presets.
    """

    rate: float
    low: float
    high: float

    @property
    def is_low(self) -> bool:
        """Whether the rate is far below those of all presets."""
        return self.rate * FAR < self.low

    @property
    def is_high(self) -> bool:
        """Whether the rate is far above those of all presets."""
        return self.rate > FAR * self.high

    def to_evidence(self, method: str) -> Evidence:
        """Return the rates as evidence.

        Args:
            method: Name of the method.
        """
        of_presets = f"{self.low:g}"
        if self.low != self.high:
            of_presets += f" to {self.high:g}"
        return Evidence(
            f"learning_rate {self.rate:g}; presets of {method}: {of_presets}",
            "job.json",
            {"learning_rate": self.rate, "lowest": self.low, "highest": self.high},
        )


# ---- the learning rate ---------------------------------------------------------------


def find_rates(job: Job) -> Rates | None:
    """Return a job's learning rate and those of similar presets.

    A preset is similar if it has the job's kind of model, and trains LoRA adapters or
    biases if the job does.

    Returns:
        The rates; None if the method has no learning rate, or no preset is similar.
    """
    rate = _read_learning_rate(job)
    if rate is None or job.privacy is not None:
        return None  # no preset is for noisy gradients
    rates = []
    for preset in methods.find_method(job.method).presets.values():
        training = preset.get("training", {})
        model = preset.get("model", {})
        if "learning_rate" in training and _trains_alike(job, model):
            rates.append(float(training["learning_rate"]))
    return Rates(rate, min(rates), max(rates)) if rates else None


def _read_learning_rate(job: Job) -> float | None:
    """Return the learning rate; None for a method that has none."""
    return getattr(job.config, "learning_rate", None)


def _trains_alike(job: Job, model: Mapping[str, Any]) -> bool:
    """Return whether a preset's [model] table trains what a job trains.

    LoRA adapters and biases need much larger rates than all parameters of the same
    model.
    """
    try:
        preset = methods.find_method(job.method).read_model_config(model)
    except ConfigError:  # the preset leaves a required key to the job
        return True
    config = job.config.model
    is_same_kind = getattr(config, "kind", "") == getattr(preset, "kind", "")
    return is_same_kind and _find_few_trained(config) == _find_few_trained(preset)


def _find_few_trained(model_config: Any) -> str:
    """Return the value of `train` if it is one of `FEW_PARAMETERS`, or ""."""
    # Not all kinds of models have this key.
    train: str = getattr(model_config, "train", "")
    return train if train in FEW_PARAMETERS else ""


def list_lower_rates(job: Job) -> tuple[Setting, ...]:
    """Return a learning rate that is less likely to diverge; () without any rate."""
    rate = _read_learning_rate(job)
    if rate is None:
        return ()
    rates = find_rates(job)
    value = rate / FAR
    if rates is not None and rates.is_high:
        value = rates.high
    value = float(f"{value:.2g}")
    return (Setting.of("training", "learning_rate", value=value, current=rate),)


def find_rate_causes(job: Job) -> Iterator[Cause]:
    """Yield a cause if the learning rate is far from those of the presets."""
    rates = find_rates(job)
    if rates is None or not (rates.is_low or rates.is_high):
        return
    if rates.is_high:
        code = "rate_high"
        value = rates.high
        distance = f"{rates.rate / rates.high:,.0f} times above"
        advice = "lower it, or training may diverge"
    else:
        code = "rate_low"
        value = rates.low
        distance = f"{rates.low / rates.rate:,.0f} times below"
        advice = "raise it, or training hardly moves the model"
    yield Cause(
        code,
        "high",
        "training",
        f"the learning rate is {distance} those of the presets that train the same "
        "parts of this kind of model",
        advice,
        evidence=(rates.to_evidence(job.method),),
        settings=(
            Setting.of("training", "learning_rate", value=value, current=rates.rate),
        ),
    )


# ---- the number of steps -------------------------------------------------------------


def find_step_causes(
    job: Job, facts: Mapping[str, Mapping[str, Any]], config: Any
) -> Iterator[Cause]:
    """Yield a cause if the shared model takes few optimizer steps.

    Args:
        job: The job.
        facts: Counts of each site's data; empty if they are unknown.
        config: The method's config, completed with the facts of all sites as far as
            they are known.
    """
    sizes = [int(of_site["examples"]) for of_site in facts.values() if of_site]
    if not sizes or not sum(sizes):
        return
    steps = job.module.count_steps(config, sizes)
    if steps is None or steps >= FEW_STEPS:
        return
    factor = min(20, math.ceil(2 * FEW_STEPS / max(1, steps)))
    importance: Importance = "high" if steps < FEW_STEPS / 2 else "medium"
    yield Cause(
        "few_steps",
        importance,
        "training",
        f"the shared model takes at most {steps:,} optimizer steps",
        "train longer, or with smaller batches",
        evidence=(
            Evidence(
                f"{sum(sizes):,} training examples at {len(sizes)} sites, "
                f"batch_size {config.batch_size:,}",
                "job.json",
                {"steps": steps, "examples": sum(sizes), "batch": config.batch_size},
            ),
        ),
        settings=list_longer_training(job, factor=factor),
    )


# ---- differential privacy ------------------------------------------------------------


def find_noise_causes(
    job: Job,
    facts: Mapping[str, Mapping[str, Any]],
    promise: Mapping[str, Any],
) -> Iterator[Cause]:
    """Yield the causes of low scores that are due to the noise of differential privacy.

    Args:
        job: The job.
        facts: Counts of each site's data; empty if they are unknown.
        promise: The guarantee of the federated training, as returned by
            `Promise.to_dict`.
    """
    privacy = job.privacy
    units = {
        site: int(each["units"]) for site, each in facts.items() if "units" in each
    }
    if privacy is None or not units or "noise" not in promise:
        return
    yield from _find_weak_signal(privacy, units, promise)
    yield from _find_noisy_sites(privacy, units)


def _find_weak_signal(
    privacy: Privacy, units: Mapping[str, int], promise: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield a cause if the noise of a round hides the sum of its updates.

    Args:
        privacy: The settings of differential privacy.
        units: Each site's number of protected units.
        promise: The guarantee of the federated training, as returned by
            `Promise.to_dict`.
    """
    num_units = sum(units.values())
    drawn = privacy.rate * num_units  # expected number in a round
    noise = float(promise["noise"])  # σ in the sum of a round
    if privacy.where == "site":
        noise *= math.sqrt(len(units))
    signal = drawn / noise
    if signal >= LEAST_SIGNAL:
        return
    rate = min(1.0, float(f"{privacy.rate * LEAST_SIGNAL / signal:.1g}"))
    settings = [Setting.of("privacy", "rate", value=rate, current=privacy.rate)]
    epsilon = privacy.epsilon
    if epsilon:
        settings.append(
            Setting.of("privacy", "epsilon", value=2 * epsilon, current=epsilon)
        )
    yield Cause(
        "noise_large",
        "high",
        "privacy",
        f"the noise of a round hides its signal: {signal:.1f} {privacy.unit}s for "
        f"each σ, and {LEAST_SIGNAL:g} are needed",
        "draw more of them into each round, allow a larger ε, or protect smaller units",
        evidence=(
            Evidence(
                f"σ = {noise:.3g} in the sum of a round, of about {drawn:,.0f} "
                f"{privacy.unit}s of {num_units:,} (rate {privacy.rate:g}), over "
                f"{int(promise.get('rounds', 0)):,} rounds",
                "summary.json",
                {"noise": noise, "units": num_units, "drawn": drawn},
            ),
        ),
        settings=tuple(settings),
    )


def _find_noisy_sites(privacy: Privacy, units: Mapping[str, int]) -> Iterator[Cause]:
    """Yield a cause for sites of which hardly any unit is drawn in a round."""
    small = {
        site: number
        for site, number in units.items()
        if privacy.rate * number < LEAST_UNITS
    }
    if not small:
        return
    smallest = min(small.values())
    # With this rate, two units of the smallest site are drawn on average.
    value = min(1.0, float(f"{2 * LEAST_UNITS / max(1, smallest):.1g}"))
    yield Cause(
        "units_few",
        "medium",
        list_names(list(small)),
        f"fewer than one {privacy.unit} is drawn in a round, so these sites mostly "
        "add noise",
        "raise the rate, or leave these sites out",
        evidence=tuple(
            Evidence(
                f"{site}: {number:,} {privacy.unit}s at rate {privacy.rate:g}",
                "job.json",
                {"units": number},
            )
            for site, number in small.items()
        ),
        settings=(Setting.of("privacy", "rate", value=value, current=privacy.rate),),
    )
