"""Extensions of fednotes by applications and other packages, through entry points.

A package registers an object under a name in one of these groups of its
`pyproject.toml`:

    [project.entry-points."fednotes.methods"]
    capitals = "my_package.capitals:METHOD"     # an instance of a Method

    group                  object
    fednotes.methods       a `Method` of methods/base.py
    fednotes.taggers       a `Kind` of taggers/model.py
    fednotes.models        a subclass of `PatientModel` of jobs/patient_models.py, under
                           the stem of the JSON file in its saved models
    fednotes.site_kinds    a `SiteKind` of jobs/job.py, named as it names itself
    fednotes.exports       an `ExportForm` of jobs/export_forms.py
    fednotes.export_commands  a function, available as `fednotes export NAME`
    fednotes.trackers      a `TrackerKind` of jobs/tracking.py
    fednotes.formats       a module with `accepts` and `read`, as in data/formats/
    fednotes.attacks       a sequence of attacks on a job's updates, which an audit of
                           the job tries
    fednotes.jobs_at_home  a function (job file, settings, site, site file, total) that
                           loads a deployed job with one site's notes
    fednotes.commands      a function, or a `typer.Typer` with several commands
    fednotes.jobs          a package whose folder contains job files
    fednotes.ledgers       a module with `is_kit(folder)` and `read_ledger(kit)`, which
                           shows everything that left a site
    fednotes.approvals     an `ApprovalDesk` of jobs/site_approvals.py, where the people
                           of a site decide on jobs
    fednotes.api           a function, available as `fednotes.NAME`

The applications of fednotes itself (`fednotes.apps`) register their extensions in the
same way. Nothing is imported before it is used. To guess the format of a file, all
formats are used.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal, get_args

from fednotes.core.errors import ConfigError, suggest_name

Group = Literal[
    "methods",
    "taggers",
    "models",
    "site_kinds",
    "exports",
    "export_commands",
    "formats",
    "attacks",
    "trackers",
    "jobs_at_home",
    "commands",
    "jobs",
    "ledgers",
    "approvals",
    "api",
]

# The usual name of an entry point's object in its module.
_CONSTANTS = {
    "fednotes.methods": "METHOD",
    "fednotes.taggers": "KIND",
    "fednotes.site_kinds": "KIND",
    "fednotes.exports": "FORM",
    "fednotes.approvals": "DESK",
    "fednotes.trackers": "TRACKER",
}


@cache
def list_modules(*folders: str) -> tuple[str, ...]:
    """Return the names of the modules in a package's folders.

    The result is cached, because a site needs it at every request.
    """
    return tuple(module.name for module in pkgutil.iter_modules(folders))


@cache
def list_entries(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by their names.

    Raises:
        ConfigError: Two packages register the same name.
    """
    by_name: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"fednotes.{group}"):
        earlier = by_name.setdefault(entry.name, entry)
        if earlier.value == entry.value:
            continue  # it is the first one, or the same one is listed twice
        packages = (entry, earlier)
        foreign = [each for each in packages if not _is_of_fednotes(each)]
        if len(foreign) == 1:
            raise ConfigError(_describe_taken_name(foreign[0], group))
        raise ConfigError(
            f"the packages {_name_package(earlier)} and {_name_package(entry)} both "
            f"register {entry.name!r} in fednotes.{group}: uninstall one of them"
        )
    return by_name


def list_added_entries(
    group: Group, built_in: Collection[str]
) -> dict[str, EntryPoint]:
    """Return the entry points of a group, none of which has a built-in name.

    Raises:
        ConfigError: A package registers a built-in name, or two packages register the
            same name.
    """
    by_name = dict(list_entries(group))
    for name in by_name.keys() & set(built_in):
        raise ConfigError(_describe_taken_name(by_name[name], group))
    return by_name


def suggest_entry(name: object, group: Group, known: Iterable[str]) -> str:
    """Return a hint for an unknown name of a group.

    Args:
        name: The name.
        group: The group that it should be in.
        known: The names that exist, built-in ones too.

    Returns:
        The package that registers the name in a group with a misspelt name, or else the
        most similar known name.
    """
    right_group = f"fednotes.{group}"
    valid_groups = {f"fednotes.{valid}" for valid in get_args(Group)}
    for entry in entry_points(name=str(name)):
        is_valid = entry.group in valid_groups
        if not is_valid and get_close_matches(entry.group, [right_group], cutoff=0.8):
            return (
                f"the package {_name_package(entry)} registers it in {entry.group}: "
                f"rename this group to {right_group}, and install the package again"
            )
    return suggest_name(name, known)


def load_all(group: Group, expected: type | tuple[type, ...]) -> dict[str, Any]:
    """Import all objects of a group.

    Args:
        group: The group.
        expected: The objects' type, or several possible types.

    Returns:
        The objects by name, those of fednotes itself first.

    Raises:
        ConfigError: An object cannot be imported or has another type, or two packages
            register the same name.
    """
    entries = list_entries(group)
    built_in_first = sorted(
        entries, key=lambda name: not _is_of_fednotes(entries[name])
    )
    return {name: load_entry(entries[name], expected) for name in built_in_first}


def load_entry(entry: EntryPoint, expected: type | tuple[type, ...]) -> Any:
    """Import the object that an entry point names.

    Args:
        entry: An entry point from `list_entries`.
        expected: The object's type, or several possible types.

    Raises:
        ConfigError: The package cannot be imported, or the object has another type.
    """
    try:
        loaded = entry.load()
    # The import of another package can fail in any way, and it may call `sys.exit`.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise _make_load_error(entry, reason) from error
    if not isinstance(loaded, expected):
        types = expected if isinstance(expected, tuple) else (expected,)
        raise _make_type_error(entry, loaded, types)
    return loaded


def load_module(entry: EntryPoint, functions: Collection[str]) -> ModuleType:
    """Import the module that an entry point names.

    Args:
        entry: An entry point from `list_entries`.
        functions: The names of the functions that the module must define.

    Raises:
        ConfigError: The package cannot be imported, the object is not a module, or the
            module lacks a function.
    """
    module: ModuleType = load_entry(entry, ModuleType)
    missing = [name for name in functions if not callable(getattr(module, name, None))]
    if missing:
        names = " and ".join(f"`{name}`" for name in missing)
        raise _make_load_error(entry, f"the module does not define {names}")
    return module


def _make_load_error(entry: EntryPoint, reason: str) -> ConfigError:
    """Return the error for an entry point that cannot be used."""
    return ConfigError(
        f"the package {_name_package(entry)} cannot be loaded "
        f"({entry.group}: {entry.name} = {entry.value}: {reason}): update or uninstall "
        "it, or, if it is yours, fix this error"
    )


def _make_type_error(
    entry: EntryPoint, loaded: Any, types: tuple[type, ...]
) -> ConfigError:
    """Return the error for an entry point whose object has the wrong type.

    Args:
        entry: The entry point.
        loaded: The object.
        types: The types expected in the group.
    """
    where = f"{entry.name!r} in {entry.group}"
    package = f"the package {_name_package(entry)}"
    if isinstance(loaded, type) and issubclass(loaded, types):
        constant = _CONSTANTS.get(entry.group, "ENTRY")
        return ConfigError(
            f"{package} registers the class {loaded.__name__} as {where}: register an "
            f"instance, such as {constant} = {loaded.__name__}(…) in its module, "
            "instead of the class"
        )
    is_class = isinstance(loaded, type)
    registered = f"the class {loaded.__name__}" if is_class else type(loaded).__name__
    wanted = " or ".join(kind.__name__ for kind in types)
    return ConfigError(
        f"{package} registers {registered} as {where}, expected {wanted}: "
        "update or uninstall it"
    )


def _describe_taken_name(entry: EntryPoint, group: Group) -> str:
    """Return the message for another package that registers a built-in name."""
    return (
        f"the package {_name_package(entry)} registers {entry.name!r} in "
        f"fednotes.{group}, which is built in: uninstall the package, or ask its "
        "authors for another name"
    )


def _is_of_fednotes(entry: EntryPoint) -> bool:
    """Return whether fednotes itself registers an entry point."""
    return entry.dist is not None and entry.dist.name == "fednotes"


def _name_package(entry: EntryPoint) -> str:
    """Return the name of the package that registers an entry point, in quotes."""
    return repr(entry.dist.name) if entry.dist is not None else repr(entry.module)
