"""Keys of a job file that name a file or folder on the machine that reads the job.

Each such key is marked in its declaration by the type `LocalFile`. A job may be written
on one machine and run on others, so paths in these keys are resolved against the job
file's folder, and each real site has paths of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fednotes import methods
from fednotes.core.errors import ModelError, raising_if_unreadable
from fednotes.core.settings import Mark, list_marked_fields
from fednotes.encoders.pretrained import compute_fingerprint, compute_folder_fingerprint
from fednotes.jobs import kinds
from fednotes.jobs.job import ConfigTable, Job
from fednotes.methods.base import Method
from fednotes.taggers import saving


def list_model_classes(method: Method) -> Mapping[str, type[Any]]:
    """Return the classes that may read [model], by its `kind`.

    The kind is "" if the table has no key `kind`.
    """
    classes = method.list_models()
    if classes is not None:
        return classes
    return {kind: saving.find_config_class(kind) for kind in saving.list_model_kinds()}


def list_model_file_keys(method: Method) -> frozenset[str]:
    """Return the keys of a method's [model] that name a local file."""
    marked = (
        list_marked_fields(cls, Mark.LOCAL_FILE)
        for cls in list_model_classes(method).values()
    )
    return frozenset().union(*marked)


def list_site_path_keys() -> frozenset[str]:
    """Return the keys of [sites.NAME] that name a local file, over all kinds."""
    marked = (
        list_marked_fields(kind.site_config, Mark.LOCAL_FILE)
        for kind in kinds.list_kinds()
    )
    return frozenset().union(*marked)


def list_file_keys_by_table() -> dict[str, frozenset[str]]:
    """Return the keys that name a local file, by table, over all methods and kinds."""
    of_models = (
        list_model_file_keys(methods.find_method(name))
        for name in methods.list_method_names()
    )
    by_table = {"model": frozenset[str]().union(*of_models)}
    for kind in kinds.list_kinds():
        for name, table in kind.tables.items():
            if isinstance(table, ConfigTable):
                keys = list_marked_fields(table.config, Mark.LOCAL_FILE)
                by_table[name] = by_table.get(name, frozenset()) | keys
    return {name: keys for name, keys in by_table.items() if keys}


def list_tables_with_files(
    table: Mapping[str, Any],
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], frozenset[str]]]:
    """Yield the tables of a job, apart from [sites.NAME], that may name local files.

    Args:
        table: The tables of a job.

    Yields:
        The names that lead to the table, such as ("model",) or ("sites", "mercy",
        "model"); its keys; and the keys of such tables that name a local file.
    """
    keys_by_table = list_file_keys_by_table()
    for name, file_keys in keys_by_table.items():
        settings = table.get(name)
        if isinstance(settings, Mapping):
            yield (name,), settings, file_keys
    sites = table.get("sites")
    for name, site in sites.items() if isinstance(sites, Mapping) else ():
        settings = site.get("model") if isinstance(site, Mapping) else None
        if isinstance(settings, Mapping):
            yield ("sites", name, "model"), settings, keys_by_table["model"]


def digest_model_files(job: Job) -> dict[str, str]:
    """Return SHA-256 of the files that a job's tables name, by dotted key.

    The files of sites are not among them: they hold notes, whose digests are the kind's
    (`SiteKind.fingerprint`).

    Args:
        job: The job.

    Raises:
        ModelError: A file cannot be read.
    """
    digests = {}
    for key, path in _list_named_files(job):
        with raising_if_unreadable(path, ModelError):
            if path.is_file():
                digests[key] = compute_fingerprint([path])
            elif path.is_dir():
                digests[key] = compute_folder_fingerprint(path)
    return digests


def _list_named_files(job: Job) -> Iterator[tuple[str, Path]]:
    """Yield each key that names a file, such as "model.encoder", and the path."""
    for names, settings, file_keys in list_tables_with_files(job.table):
        for key in sorted(file_keys & settings.keys()):
            value = settings[key]
            if isinstance(value, str) and value:
                where = ".".join([*names, key])
                yield where, job.locate(value, where)
