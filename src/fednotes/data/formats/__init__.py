"""Corpora in many formats; each module reads and writes one.

A module of this folder, or of `published/`, is a format if it has these two functions;
the format's name is that of the module:

    accepts(path)           whether a file seems to have the format, by its content
    read(path, problems)    the documents of a file or folder; unusable parts are added
                            to `problems`, and reading continues

A format may also have `stream(path, problems)`, which yields the documents one by one,
each with its place, and `write(documents, path)`. Formats do not declare what they
cannot represent; it is measured: this package's `write` reads back and compares
everything before it is moved to its destination. Other packages add formats by entry
points (`core/plugins.py`).

Modules whose names begin with an underscore define the functions below; the others
(`files`, `folders`, `problems`, `gathering`, `mentions`, …) are shared by the readers.
"""

from fednotes.data.formats._comparison import count_differences
from fednotes.data.formats._conversion import Conversion, convert, make_format_table
from fednotes.data.formats._reading import examine, read, stream
from fednotes.data.formats._registry import (
    FORMATS,
    discover,
    guess_format,
    list_writable_formats,
    read_known_corpora,
    require_format,
)
from fednotes.data.formats._writing import LossyError, count_losses, write
from fednotes.data.formats.choices import extract_format_name
from fednotes.data.formats.problems import OnError, Problems

__all__ = [
    "FORMATS",
    "Conversion",
    "LossyError",
    "OnError",
    "Problems",
    "convert",
    "count_differences",
    "count_losses",
    "discover",
    "examine",
    "extract_format_name",
    "guess_format",
    "list_writable_formats",
    "make_format_table",
    "read",
    "read_known_corpora",
    "require_format",
    "stream",
    "write",
]
