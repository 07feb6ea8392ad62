"""Names of files from ids of documents, for formats with a file for each document.

Each part of an id between slashes is the name of a folder or of the file. Characters
that are not allowed in names of files are written as %XX.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from urllib.parse import quote, unquote

# The %XX that `_encode_part` writes. A % in an id is escaped only if it begins such a
# code.
_CODE = "%(?:[01][0-9A-F]|22|25|2A|2E|3A|3C|3E|3F|5C|7C|7F)"
_ESCAPED = re.compile(_CODE)
_UNSAFE = re.compile(rf'[\x00-\x1f\x7f\\:*?"<>|]|(?={_CODE})%')


def file_of_id(id: str) -> str:
    """Return the relative path, without suffix, of the file of a document."""
    return "/".join(_encode_part(part) for part in id.split("/"))


def id_of_file(stem: PurePath) -> str:
    """Return the id for a relative path without suffix; the inverse of `file_of_id`."""
    return "/".join(_decode_part(part) for part in stem.parts)


def _encode_part(part: str) -> str:
    """Return the name of the file or folder for a part of an id.

    The name is not empty, hidden or relative, and has no unusual characters.
    """
    if part == "":
        return "%"
    if part == "%":
        return "%25"
    bare = part.lstrip(".")
    dots = "%2E" * (len(part) - len(bare))
    return dots + _UNSAFE.sub(lambda match: quote(match.group(), safe=""), bare)


def _decode_part(name: str) -> str:
    """Return the part of an id for a name: the inverse of `_encode_part`."""
    if name == "%":
        return ""
    return _ESCAPED.sub(lambda match: unquote(match.group()), name)
