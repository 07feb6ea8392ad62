"""Write keys and values as in a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_key(key: str) -> str:
    """Return a key, quoted if TOML requires it."""
    return key if _BARE_KEY.fullmatch(key) else format_value(key)


def format_value(value: Any) -> str:
    """Return a value as it is written in TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = ", ".join(
            f"{format_key(key)} = {format_value(each)}" for key, each in value.items()
        )
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(each) for each in value)}]"
    return repr(value)
