"""What a worker reports about a command: events, and at the end the result."""

from __future__ import annotations

from typing import Any

# Names of events.
BEGIN = "begin"
END = "end"
FEATURES = "features"
RESULT = "result"
ROUND = "round"


def make_event(name: str, *values: Any) -> dict[str, Any]:
    """Return an event, or a result, as JSON values."""
    return {"event": name, "values": values}
