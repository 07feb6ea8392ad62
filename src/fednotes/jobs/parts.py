"""The parts of a run: one training run per condition and per site alone.

The condition "left-out" has two parts for each site that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fednotes.core.errors import ConfigError, naming_place
from fednotes.core.federation import MethodSite
from fednotes.core.seeds import Draws
from fednotes.core.wording import format_count, format_size
from fednotes.encoders.features import find_default_cache
from fednotes.engines.sampling import RoundSampling
from fednotes.jobs.job import Job, Progress, Sites, load_sites
from fednotes.jobs.left_out_sites import choose_left_out_sites
from fednotes.jobs.results import LEFT_OUT, OWN_MIX
from fednotes.methods.base import Method
from fednotes.privacy.secure_sum import FEWEST_SITES
from fednotes.taggers.model import ModelConfig
from fednotes.training.site_sampling import (
    count_drawn_sites,
    remove_sampling,
    require_fewer_drawn_sites,
)


@dataclass(frozen=True)
class Part:
    """One training run of a job: a condition, and the site that it is about, if any.

    Attributes:
        condition: "alone", "own-mix", "federated", "pooled" or "left-out".
        sites: Data of the sites that take part.
        config: The method's config for this part.
        site: Name of the site that trains alone, or that is left out; empty otherwise.
        training: What the other sites train if a site is left out; empty otherwise.
        method: The method in simulations, which observe sites individually.
        unit: Name of training examples, such as "sentences".
        is_private: Whether the part is trained with differential privacy.
        personal_epochs: Number of epochs that each site trains by itself at the end.
    """

    condition: str
    sites: tuple[Any, ...] = field(repr=False)
    config: Any
    site: str = ""
    training: Literal["", "federated", "pooled"] = ""
    method: Method | None = None
    unit: str = "sentences"
    is_private: bool = False
    personal_epochs: int = 0

    @property
    def name(self) -> str:
        """The part's folder, relative to the run's folder."""
        return "/".join(filter(None, (self.condition, self.site, self.training)))

    @property
    def is_federation(self) -> bool:
        """Whether several sites train together and share what they send."""
        return (self.training or self.condition) == "federated"

    @property
    def is_logged(self) -> bool:
        """Whether its evaluations are logged, one curve for each condition.

        A curve without one site would be much like that of all sites together.
        """
        return not self.training

    @property
    def epochs(self) -> int:
        """The epochs of all rounds together; 0 if the method does not count epochs."""
        if self.method is None:
            return 0
        length_key = self.method.name_length_key(self.config, "valid_f1")
        return int(self.config.epochs) if length_key == "epochs" else 0


@dataclass(frozen=True)
class Traffic:
    """An upper bound on the bytes that one site exchanges in federated training.

    The larger numbers of a secure sum are included; its keys and the framing of the
    transport are not.

    Attributes:
        rounds: Largest number of rounds in which sites exchange updates.
        up: Bytes from the site to the server in all rounds.
        down: Bytes from the server to the site in all rounds.
    """

    rounds: int
    up: int
    down: int

    def __str__(self) -> str:
        """Return the bound as a readable sentence."""
        rounds = max(1, self.rounds)
        up = format_size(self.up / rounds)
        down = format_size(self.down / rounds)
        total = format_size(self.up + self.down)
        count = format_count(self.rounds, "round")
        return (
            f"federated: at most {count}; in each, a site sends about "
            f"{up} and receives about {down} ({total} per site in all rounds)"
        )


def prepare(
    job: Job, progress: Progress | None = None
) -> tuple[Sites, Any, list[Part]]:
    """Read a job's data, configure its method and list the parts, without training.

    Args:
        job: The job.
        progress: Progress callback of `load_sites`.

    Returns:
        The sites, the method's config for them, and the parts of the run.

    Raises:
        FednotesError: The data cannot be read, or do not match the job.
    """
    sites = load_sites(job, progress)
    config = configure(job, sites.data)
    return sites, config, list_parts(job, sites, config)


def configure(job: Job, sites: Sequence[Any]) -> Any:
    """Return the method's config, completed with the facts of all sites.

    Args:
        job: The job.
        sites: Data of all sites of the job, including those that are left out.

    Raises:
        ConfigError: The job does not match the sites, or a setting of its model is
            about an entity type that no site has.
    """
    config = job.module.configure(job.config, sites)
    model = getattr(config, "model", None)
    if isinstance(model, ModelConfig):
        model.require_known_types(config.tags.types)
    return config


def list_parts(job: Job, sites: Sites, config: Any) -> list[Part]:
    """Return the parts of a run: one for each condition, and each site alone.

    Args:
        job: The job.
        sites: Data of the job's sites.
        config: The method's config, completed with the facts of all sites.

    Raises:
        ConfigError: The job does not match the sites.
    """
    method = job.module
    parts: list[Part] = []
    unsampled = remove_sampling(config)
    if "alone" in job.conditions:
        configs = method.configure_alone(unsampled, sites.data)
        parts += [
            _make_part(job, "alone", (data,), alone, site=data.id)
            for data, alone in zip(sites.data, configs, strict=True)
        ]
    if OWN_MIX in job.conditions:
        control = method.configure_control(unsampled)
        parts.append(_make_part(job, OWN_MIX, sites.data, control))
    if "federated" in job.conditions:
        require_fewer_drawn_sites(config, len(sites.data))
        parts.append(_make_part(job, "federated", sites.data, config))
    if "pooled" in job.conditions:
        data, pooled = method.configure_pooled(unsampled, sites.data, sites.complete)
        parts.append(_make_part(job, "pooled", data, pooled))
    if LEFT_OUT in job.conditions:
        for site in choose_left_out_sites(job, sites.data):
            with naming_place(f"{LEFT_OUT}/{site.id}", ConfigError):
                parts += _list_parts_without(job, sites, site.id)
    return parts


def _list_parts_without(job: Job, sites: Sites, site: str) -> Iterator[Part]:
    """Yield what the others train while a site is left out.

    Args:
        job: The job.
        sites: Data of the job's sites.
        site: Name of the site.
    """
    method = job.module
    others = tuple(each for each in sites.data if each.id != site)
    if job.federation.secure_sum and len(others) < FEWEST_SITES:
        raise ConfigError(
            f"{len(others)} sites are left when one is left out, but the secure sum "
            f"needs {FEWEST_SITES}: set secure_sum = false in [federation], or give "
            "more sites"
        )
    complete = None
    if sites.complete is not None:
        complete = tuple(each for each in sites.complete if each.id != site)
    config = method.configure(job.config, others)
    require_fewer_drawn_sites(config, len(others))
    yield _make_part(job, LEFT_OUT, others, config, site=site, training="federated")
    data, pooled = method.configure_pooled(remove_sampling(config), others, complete)
    yield _make_part(job, LEFT_OUT, data, pooled, site=site, training="pooled")


def _make_part(
    job: Job,
    condition: str,
    sites: tuple[Any, ...],
    config: Any,
    *,
    site: str = "",
    training: Literal["", "federated", "pooled"] = "",
) -> Part:
    """Return a part of a job's run."""
    method = job.module
    return Part(
        condition,
        sites,
        config,
        site=site,
        training=training,
        method=method,
        unit=job.kind.example_name,
        is_private=job.privacy is not None,
        personal_epochs=method.count_personal_epochs(config),
    )


def make_method_sites(
    job: Job,
    part: Part,
    folders: Sequence[Path | None],
    device: str = "cpu",
    cache: Path | None = None,
    progress: Progress | None = None,
    sites: Sequence[Any] | None = None,
) -> list[MethodSite]:
    """Make the method's site objects for a part, with models and data.

    Args:
        job: The job.
        part: The part.
        folders: Folder for each site's model; None for a site that saves no model.
        device: PyTorch device.
        cache: Folder in which encoded data are cached; None uses the default.
        progress: Called with the features computed so far and their total.
        sites: Data of the sites to make; None makes all sites of the part.

    Raises:
        FednotesError: A site cannot be made from its data and config.
    """
    cache = cache or find_default_cache()
    return [
        job.module.make_site(
            data,
            part.config,
            directory=folder,
            device=device,
            cache=cache,
            progress=progress,
        )
        for data, folder in zip(
            part.sites if sites is None else sites, folders, strict=True
        )
    ]


def is_summed_securely(job: Job, part: Part) -> bool:
    """Return whether a secure sum adds up a part's updates."""
    return job.federation.secure_sum and part.is_federation


def find_sampling(job: Job, part: Part) -> RoundSampling | None:
    """Return how a simulation draws the sites of a part's rounds; None if it does not.

    The draws follow from the job's seed.
    """
    drawn = count_drawn_sites(part.config)
    if drawn is None or not part.is_federation:
        return None
    return RoundSampling(drawn, Draws(job.seed), job.module.site_class.for_all_sites)


def plan_rounds(
    method: Method, config: Any, sizes: Sequence[int], num_sites: int
) -> tuple[int, int]:
    """Return the maximum number of rounds and the expected examples per round.

    Args:
        method: The method.
        config: The settings of the run.
        sizes: Number of training examples of each site, or of all sites together.
        num_sites: Number of sites.
    """
    rounds, examples = method.plan_rounds(config, sizes)
    drawn = count_drawn_sites(config)
    if drawn is not None:
        examples = math.ceil(examples * drawn / num_sites)
    return rounds, examples


def count_examples_of_few_sentences(job: Job) -> int:
    """Return how many sentences are read in all training on a site's few sentences."""
    settings = job.left_out
    training_runs = 2 * len(settings.sentences)  # fine-tuned, and from scratch
    return training_runs * settings.steps * settings.batch_size


def estimate_traffic(job: Job, config: Any, sites: Sequence[Any]) -> Traffic | None:
    """Estimate the traffic of a job's federated part.

    Args:
        job: The job.
        config: The method's config, completed with the facts of all sites.
        sites: The sites' data.

    Returns:
        The traffic of one site; None if the job has no federated part or the method
        cannot estimate it.
    """
    if "federated" not in job.conditions:
        return None
    sizes = [job.kind.count_examples(site) for site in sites]
    estimate = job.module.estimate_traffic(config, sizes)
    if estimate is None:
        return None

    up, down = estimate
    # A secure sum sends eight bytes per number, twice as many as for a float32.
    if job.federation.secure_sum and not job.module.sends_integers(config):
        up *= 2
    return Traffic(job.module.count_exchanges(config, sizes), up, down)


def explain_incomparable_conditions(parts: Sequence[Part]) -> dict[str, str]:
    """Return why the scores of conditions are not comparable with the others'.

    Args:
        parts: Parts of the run.

    Returns:
        The reason by condition, for those that are not comparable.
    """
    reasons = {}
    epochs = {part.condition: part.personal_epochs for part in parts if part.is_logged}
    longer = {
        condition: count
        for condition, count in epochs.items()
        if count > epochs.get("pooled", count)
    }
    if longer:
        others = " and ".join(longer)
        reasons["pooled"] = (
            f"The pooled model is trained without the {max(longer.values())} personal "
            f"epochs at the end of {others}, so federated may exceed it"
        )
    if any(part.condition == LEFT_OUT for part in parts):
        reasons[LEFT_OUT] = (
            "Left-out: the federation of the other sites, which has seen none of the "
            "site's notes; it is scored only on types that one of the others "
            "annotates, and unseen forms are those that the others' training data lack"
        )
    return reasons
