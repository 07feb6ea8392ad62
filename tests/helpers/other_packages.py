"""Leave out what other packages register, where a test is of this repository alone.

A contributor runs the tests with a package of their own installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from unittest import mock

from fednotes.core import plugins


def leave_out_others(group: plugins.Group, names: Iterable[str]) -> list[str]:
    """Return the names that no other package registers, in their order.

    Args:
        group: The group of entry points.
        names: Names of built-in and registered objects of this group.
    """
    entries = plugins.list_entries(group)
    return [
        name for name in names if name not in entries or _is_of_fednotes(entries[name])
    ]


@contextmanager
def hiding_other_packages() -> Iterator[None]:
    """Run a block in which the entry points of other packages are not found."""
    list_all_entries = plugins.list_entries

    def list_entries(group: plugins.Group) -> Mapping[str, EntryPoint]:
        entries = list_all_entries(group)
        return {
            name: entry for name, entry in entries.items() if _is_of_fednotes(entry)
        }

    with mock.patch.object(plugins, "list_entries", list_entries):
        yield


def _is_of_fednotes(entry: EntryPoint) -> bool:
    """Return whether an entry point names an object of fednotes."""
    return entry.module.partition(".")[0] == "fednotes"
