"""The model that all sites end with, at the server: where the method has one for all.

Sites of other methods (FedNER's, and any with private layers) each have their own, which stays
there. A phenotyping model is made at the sites too, of calibrations that the server forgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fednotes.core.tensors import load_into
from fednotes.federation import State
from fednotes.jobs import Job
from fednotes.models.build import build_model
from fednotes.models.saving import save_model


def save_global_model(job: Job, config: Any, final: State, folder: Path) -> bool:
    """Write the model of a run's last state, ready for `fednotes predict`.

    Returns False, and writes nothing, where each site has a model of its own.
    """
    if job.method == "pretrain":
        from fednotes.methods.pretrain_site import shared_model

        language = shared_model(config.model, config.seed, "cpu")
        load_into(language.parameters, _chosen(final, language.parameters, "kept."))
        language.model.save(folder)
        return True
    if job.method not in ("distill", "adversarial", "finetune") or getattr(
        config, "private", False
    ):
        return False
    model = build_model(config.model, config.tags, config.seed)
    parameters = model.trainable()
    best = "kept." if job.method == "finetune" else "best."
    load_into(parameters, _chosen(final, parameters, best))
    save_model(model, folder)
    return True


def _chosen(final: State, parameters: Mapping[str, Any], best: str) -> dict[str, Tensor]:
    """The parameters that the run ends with: those it kept as the best, if it did."""
    kept = all(f"{best}{name}" in final.tensors for name in parameters)
    return {n: final.tensors[f"{best if kept else 'shared.'}{n}"] for n in parameters}
