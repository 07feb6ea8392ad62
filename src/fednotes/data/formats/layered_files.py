"""Reading of files whose mentions are in one of several layers (`layers.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.data.formats.choices import get_choice
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import (
    ReadDocument,
    ReadFile,
    gather_documents,
    stream_files,
)
from fednotes.data.formats.layers import Layer, choose_layer_to_read
from fednotes.data.formats.problems import Problems


class DocumentLayers(NamedTuple):
    """The layers of one document.

    Attributes:
        used: The layers with annotations.
        declared: All layers that its file declares.
    """

    used: set[Layer]
    declared: set[Layer]


@dataclass(frozen=True)
class LayeredFormat:
    """A format whose mentions are in one layer, the same in all files of a corpus.

    The functions receive the folder to which ids are relative before the file.

    Attributes:
        title: The format's name, for messages.
        accepts: Returns whether a file has this format.
        find_layers: Yields the layers of each document of a file. It may raise
            DataError; reading the file then reports the problem.
        read_file: Yields the documents of a file, with the mentions of a layer.
    """

    title: str
    accepts: Callable[[Path], bool]
    find_layers: Callable[[Path, Path], Iterable[DocumentLayers]]
    read_file: Callable[[Path, Layer, Path, Problems], Iterable[ReadDocument]]

    def read(self, path: Path, problems: Problems) -> tuple[Document, ...]:
        """Return the documents of a file, or of all files of a folder."""
        files = self._find_files(path)
        return gather_documents(files, self._choose_reader(path, files), problems)

    def stream(self, path: Path, problems: Problems) -> Iterator[ReadDocument]:
        """Yield the documents of `read` one by one."""
        files = self._find_files(path)
        return stream_files(files, self._choose_reader(path, files), problems)

    def _find_files(self, path: Path) -> list[Path]:
        """Return the files of a corpus that have this format."""
        return find_corpus_files(path, self.accepts, self.title, recursive=True)

    def _choose_reader(self, path: Path, files: Iterable[Path]) -> ReadFile:
        """Return the function that reads a file with the layer of the corpus."""
        base = path if path.is_dir() else path.parent
        used: set[Layer] = set()
        declared: set[Layer] = set()
        for file in files:
            with suppress(DataError):
                for document_layers in self.find_layers(base, file):
                    used |= document_layers.used
                    declared |= document_layers.declared
        layer = choose_layer_to_read(get_choice(), used, declared, path)
        return partial(self.read_file, base, layer)
