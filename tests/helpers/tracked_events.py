"""Read what a run wrote for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_events(folder: Path) -> Any:
    """Return what TensorBoard reads in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events
