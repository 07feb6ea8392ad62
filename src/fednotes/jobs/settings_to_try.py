"""Settings of a job to try, in the words of its method."""

from __future__ import annotations

from typing import Any

from fednotes.jobs.causes import Setting
from fednotes.jobs.job import Job


def list_longer_training(
    job: Job, measure: str = "valid_f1", factor: int = 2
) -> tuple[Setting, ...]:
    """Return the setting that trains longer; () if the method has none.

    Args:
        job: The job.
        measure: The measure that sites evaluate in the training that is to be longer.
        factor: How many times as long.
    """
    key = job.module.name_length_key(job.config, measure)
    current = getattr(job.config, key, None) if key else None
    if not current:
        return ()
    return (Setting.of("training", key, value=factor * current, current=current),)


def advise_longer_training(job: Job) -> str:
    """Return the advice to train longer, with the key of the job's method."""
    settings = list_longer_training(job)
    return f"train longer ({settings[0].key})" if settings else "train longer"


def list_personal_settings(job: Job) -> tuple[Setting, ...]:
    """Return the settings that leave more of the model to each site."""
    return _list_changed_settings(job, job.module.personal)


def list_keep_best_settings(job: Job) -> tuple[Setting, ...]:
    """Return the settings with which the model of the best evaluation is kept."""
    return _list_changed_settings(job, job.module.keep_best)


def _list_changed_settings(job: Job, values: Any) -> tuple[Setting, ...]:
    """Return as settings the values that differ from those of a job.

    Args:
        job: The job.
        values: Values by key of [training].
    """
    settings = []
    for key, value in values.items():
        current = getattr(job.config, key, None)
        if isinstance(current, tuple):
            current = list(current)
        if current != value:
            settings.append(Setting.of("training", key, value=value, current=current))
    return tuple(settings)
