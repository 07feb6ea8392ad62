"""Open the templates of this package that are written as plain text."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def make_text_environment() -> Environment:
    """Return a new Jinja environment of `templates/`, for files that are not HTML.

    A name that a template uses without getting a value for it is an error.
    """
    return Environment(
        loader=PackageLoader("fednotes.jobs"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
