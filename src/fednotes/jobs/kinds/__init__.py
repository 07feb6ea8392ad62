"""The kinds of sites: what the sites of a method hold, and how a job reads it.

Annotated documents and notes without annotations are built in. Applications and other
packages add kinds by entry points (`core/plugins.py`).
"""

from __future__ import annotations

from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.jobs.job import SiteKind
from fednotes.jobs.kinds import documents, notes

_BUILT_IN = {kind.name: kind for kind in (documents.KIND, notes.KIND)}


def find(name: str) -> SiteKind:
    """Return the kind of sites of that name.

    Raises:
        ConfigError: No installed package registers it.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    entry = plugins.list_added_entries("site_kinds", _BUILT_IN).get(name)
    if entry is None:
        raise ConfigError(
            f"no installed package registers sites that hold {name}: install fednotes "
            "again, or the package that the method comes from"
        )
    kind: SiteKind = plugins.load_entry(entry, SiteKind)
    return kind


def list_kinds() -> tuple[SiteKind, ...]:
    """Return the built-in kinds, then those that packages register, by name."""
    added = sorted(plugins.list_added_entries("site_kinds", _BUILT_IN))
    return (*_BUILT_IN.values(), *(find(name) for name in added))
