"""Write a proposed job as a commented file, using `templates/first_job.toml`."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from fednotes.core.cleaning import NAME, clean_to_one_line
from fednotes.core.databases import DatabaseAddress
from fednotes.core.errors import ConfigError
from fednotes.core.wording import format_count, list_names
from fednotes.data.encodings import AUTO
from fednotes.data.notes import DEFAULT_TABLE, NoteDatabase
from fednotes.jobs.label_maps import LabelMap
from fednotes.jobs.proposal.decisions import MINILM, Proposal
from fednotes.jobs.proposal.facts import Facts, SiteFacts
from fednotes.jobs.text_templates import make_text_environment
from fednotes.jobs.toml_text import format_key, format_value

_WIDTH = 88  # columns of a comment


def format_job(proposal: Proposal, folder: Path) -> str:
    """Return a proposed job as the text of its file.

    Args:
        proposal: The job.
        folder: The folder of the file; relative paths are written relative to it.

    Raises:
        ConfigError: A path cannot be written in a job.
    """
    environment = make_text_environment()
    environment.filters |= {"comment": format_comment, "toml": format_value}
    template = environment.get_template("first_job.toml")
    return template.render(
        proposal=proposal,
        method=proposal.method.value,
        encoder=_format_encoder(proposal.model.value, folder),
        minilm=MINILM,
        tables=_list_tables(proposal, folder),
        sites=[
            {
                "name": site.name,
                "about": describe_site_notes(site),
                "keys": list(_list_site_keys(site, proposal.facts, folder)),
                "label_maps": [
                    _format_label_map(each)
                    for each in proposal.label_maps
                    if each.site == site.name
                ],
            }
            for site in proposal.sites
        ],
    )


def _list_tables(proposal: Proposal, folder: Path) -> dict[str, list[str]]:
    """Return the lines of the tables that a method for labels of patients needs."""
    labels = proposal.sites[0].labels
    if labels is None:
        return {}
    encoder_table, encoder_key = labels.encoder_key
    tables = {}
    for name, keys in labels.tables.items():
        values = dict(keys)
        if name == encoder_table:
            values[encoder_key] = _format_encoder(proposal.model.value, folder)
        tables[name] = [_format_line(key, value) for key, value in values.items()]
    return tables


def format_comment(text: str) -> str:
    """Return a text as lines of a comment."""
    return textwrap.fill(
        clean_to_one_line(text, None),
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe_site_notes(site: SiteFacts) -> str:
    """Describe the notes of a site in one sentence."""
    words = f"{format_count(site.words.median, 'word')} in the median note"
    notes = format_count(site.notes, "note")
    text = f"{notes} ({clean_to_one_line(site.format, NAME)}), {words}"
    if site.patients:
        text += f", {format_count(site.patients, 'patient')}"
    if site.holds == "mentions":
        types = [
            f"{clean_to_one_line(label, NAME)} {number:,}"
            for label, number in site.types.items()
        ]
        text += f", {format_count(site.mentions, 'mention')}: {list_names(types)}"
    if site.labels is not None:
        counts = [
            f"{clean_to_one_line(label, NAME)} {number:,}"
            for label, number in site.labels.counts.items()
        ]
        patients = format_count(site.labels.patients, "patient")
        text += f", labels of {patients}: {list_names(counts)}"
    return f"{text}."


# ---- keys of a site ------------------------------------------------------------------


def _list_site_keys(site: SiteFacts, facts: Facts, folder: Path) -> Iterator[str]:
    """Yield the lines of a site's table, except its label_map."""
    options = facts.options
    if isinstance(site.root, NoteDatabase):
        yield from _list_database_keys(site.root, folder)
    for part, path in site.parts.items():
        yield _format_line(part, format_job_path(path, folder))
    if options.format:
        yield _format_line("format", options.format)
    if options.column:
        yield _format_line("column", options.column)
    if options.encoding != AUTO:
        yield _format_line("encoding", options.encoding)
    if site.holds == "mentions":
        if options.on_error != "refuse":
            yield _format_line("on_error", options.on_error)
        if site.split_by:
            yield _format_line("split", site.split_by)
        if site.overlapping or site.discontinuous:
            yield _format_line("flatten", "outermost")


def _list_database_keys(database: NoteDatabase, folder: Path) -> Iterator[str]:
    """Yield the lines that locate the notes of a site in a database."""
    address = DatabaseAddress(database.address).relative_to(folder)
    yield _format_line("path", address.text)
    if database.query:
        yield _format_line("query", database.query)
    else:
        yield _format_line("omop", database.omop or DEFAULT_TABLE)


def _format_line(key: str, value: object) -> str:
    """Return a key and its value as a line of TOML."""
    return f"{format_key(key)} = {format_value(value)}"


def _format_label_map(label_map: LabelMap) -> str:
    """Return the lines that rename a type: a comment with the reason, then the line.

    The line is a comment too if a person has to decide.
    """
    line = f"{format_value(label_map.old)} = {format_value(label_map.new)}"
    if not label_map.is_active:
        line = f"# {line}"
    return f"{format_comment(label_map.reason)}\n{line}"


def format_job_path(path: Path, folder: Path) -> str:
    """Return a path as written in a job in a folder.

    An absolute path stays absolute.

    Raises:
        ConfigError: The path has a "$" that a job would read as a variable.
    """
    text = str(path)
    if not path.is_absolute():
        text = os.path.relpath(path, folder)
    if re.search(r"\$\{?\w", text) or text.startswith("~"):
        raise ConfigError(
            f"{path}: a job file would replace $NAME and ~ in this path with other "
            "text: rename the folder"
        )
    return text


def _format_encoder(encoder: str, folder: Path) -> str:
    """Return an encoder as written in a job in a folder: a name, or else a path."""
    if encoder in (MINILM, "none"):
        return encoder
    return format_job_path(Path(encoder), folder)
