"""A cache of tokenised notes, as flat token ids on disk.

    <folder>/<key>/ids.bin         every token of every sentence, uint16 or uint32
                   sentences.bin   int64 bounds of sentences in the ids
                   documents.bin   int64 bounds of documents in the sentences
                   facts.json      counts, types and the key's parts

The files are mapped into memory. The key is a hash of the notes' texts, the tokenizer,
and the version of sentence splitting and reading, so a cached corpus is used only while
all of these stay the same. A note is read as one text: the blank between two sentences,
which byte-level tokenizers include in a sub-word, belongs to the second one. Ids are as
sensitive as the notes, so only their owner can read the folder and files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from fednotes.core.errors import DataError, ModelError, raising_os_errors_as
from fednotes.core.parsing import read_json
from fednotes.core.store import trying_to_lock_folder, write_folder
from fednotes.data.clinical import RECIPE, list_note_sentences
from fednotes.data.notes import Note, make_patient_key
from fednotes.encoders.features import clear_cache, open_cache
from fednotes.encoders.reading import converting_panics

Tokenize = Callable[[list[str]], list[list[int]]]
_BATCH = 2000  # sentences in one call of the tokenizer
_ARRAY_NAMES: Final = ("ids", "sentences", "documents")
_FORMAT = 2  # increase it if the same note gives different ids


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenised corpus. No sentence and no document is empty.

    Attributes:
        ids: (tokens,) uint16 or uint32.
        sentences: (sentences + 1,) int64 bounds in `ids`.
        documents: (documents + 1,) int64 bounds in `sentences`.
        patients: Number of patients, the site's sample size in pre-training.
        dropped: Number of notes without any token.
    """

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    patients: int = 0
    dropped: int = 0


def tokenize_with_cache(
    notes: Callable[[], Iterable[Note]],
    tokenize: Tokenize,
    fingerprint: str,
    vocabulary: int,
    folder: Path,
) -> Tokens:
    """Return the tokens of notes from a cache; tokenise them first if necessary.

    Args:
        notes: Iterates over all notes. It is called once for the key and once to
            tokenise, so that only a batch of notes is in memory.
        tokenize: Maps sentences to ids without special tokens.
        fingerprint: Identifies the tokenizer.
        vocabulary: Number of ids.
        folder: The cache.

    Raises:
        DataError: There are no tokens, or the notes change between the two passes.
        ModelError: An id is outside the vocabulary.
        FednotesError: The cache cannot be written.
    """
    content, patients = _compute_digest(notes())
    if not patients:
        raise DataError("the corpus is empty: there are no notes with text")
    parts = [str(_FORMAT), content, fingerprint, str(vocabulary), RECIPE]
    key = hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]
    path = folder / key
    open_cache(folder)
    cached = _load(path)
    if cached is not None:
        return cached
    _remove_leftovers(folder, key)

    def fill(target: Path) -> None:
        """Write the corpus into an empty folder."""
        digest = hashlib.sha256()
        facts = _write_corpus(target, _hash_each(notes(), digest), tokenize, vocabulary)
        if digest.hexdigest() != content:
            raise DataError("the notes changed while they were tokenised: start again")
        facts |= {"patients": patients, "content": content, "recipe": RECIPE}
        (target / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    write_folder(path, fill)
    written = _load(path)
    if written is None:
        raise DataError(
            f"{path}: the cache was written, but cannot be read: check the disk"
        )
    return written


def _remove_leftovers(folder: Path, key: str) -> None:
    """Remove unfinished folders of processes that were killed."""
    for leftover in folder.glob(f".{key}.*.tmp") if folder.is_dir() else []:
        with trying_to_lock_folder(leftover) as is_locked:
            if is_locked:
                shutil.rmtree(leftover, ignore_errors=True)


def clear_caches(cache: Path) -> int:
    """Delete the cached features, tokens and concepts of notes.

    Args:
        cache: The folder of all caches.

    Returns:
        The number of bytes freed.
    """
    folders = (cache / "tokens", cache / "concepts")
    return clear_cache(cache) + sum(map(clear_tokens, folders))


def clear_tokens(folder: Path) -> int:
    """Remove the corpora of a token cache, or of a cache of concepts.

    The folders of both have names of the same form. Folders that another process is
    writing are kept.

    Returns:
        The number of bytes freed.

    Raises:
        DataError: A folder cannot be removed.
    """
    freed = 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = re.fullmatch(
            r"\.?[0-9a-f]{32}(?P<unfinished>\.[0-9a-f]+\.(tmp|old))?", path.name
        )
        if name is None or not path.is_dir():
            continue
        with trying_to_lock_folder(path) as is_locked:
            is_unfinished = bool(name["unfinished"])
            if is_unfinished and not is_locked:
                continue
            # Another process may clear the cache at the same time.
            with (
                raising_os_errors_as(DataError, path, action="be removed"),
                suppress(FileNotFoundError),
            ):
                size = sum(file.stat().st_size for file in path.iterdir())
                shutil.rmtree(path)
                freed += size
    return freed


def _compute_digest(notes: Iterable[Note]) -> tuple[str, int]:
    """Return a hash of all texts and their patients, and the number of patients."""
    digest = hashlib.sha256()
    patients = {make_patient_key(note) for note in _hash_each(notes, digest)}
    return digest.hexdigest(), len(patients)


def _hash_each(notes: Iterable[Note], digest: Any) -> Iterator[Note]:
    """Yield notes, adding each one's patient and text to a hash."""
    for note in notes:
        for part in (*make_patient_key(note), note.text):
            data = part.encode("utf-8")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        yield note


def _write_corpus(
    folder: Path,
    notes: Iterable[Note],
    tokenize: Tokenize,
    vocabulary: int,
) -> dict[str, Any]:
    """Tokenise notes into ids.bin, sentences.bin and documents.bin; return facts.json.

    The caller still adds what identifies the notes.
    """
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    tokens = sentence_count = documents = dropped = 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / f"{name}.bin").open("wb"))
            for name in _ARRAY_NAMES
        }
        for name in ("sentences", "documents"):
            files[name].write(np.zeros(1, np.int64).tobytes())
        for batch in _batch_notes(notes):
            lengths, counts, ids = _encode(batch, tokenize, vocabulary)
            ends = tokens + np.cumsum(lengths)
            document_ends = sentence_count + np.cumsum(counts)
            files["ids"].write(ids.astype(dtype).tobytes())
            files["sentences"].write(ends.astype(np.int64).tobytes())
            files["documents"].write(document_ends.astype(np.int64).tobytes())
            tokens += len(ids)
            sentence_count += len(lengths)
            documents += len(counts)
            dropped += len(batch) - len(counts)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not tokens:
        raise DataError(
            "the corpus is empty: the tokenizer found no tokens in any note"
        )
    sizes = {
        "ids": tokens,
        "sentences": sentence_count + 1,
        "documents": documents + 1,
    }
    return {"format": _FORMAT, "dtype": dtype.name, "sizes": sizes, "dropped": dropped}


def _batch_notes(notes: Iterable[Note]) -> Iterator[list[list[str]]]:
    """Yield batches of about `_BATCH` sentences, grouped by note."""
    batch: list[list[str]] = []
    size = 0
    for note in notes:
        batch.append(list_note_sentences(note.text))
        size += len(batch[-1])
        if size >= _BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _encode(
    batch: list[list[str]], tokenize: Tokenize, vocabulary: int
) -> tuple[list[int], list[int], np.ndarray]:
    """Tokenise the sentences of some documents, leaving out those without tokens.

    Returns:
        The number of tokens of each sentence, the number of sentences of each document,
        and all ids.
    """
    flat = [
        f" {sentence}" if number else sentence
        for document in batch
        for number, sentence in enumerate(document)
    ]
    encoded = tokenize(flat) if flat else []
    if len(encoded) != len(flat):
        raise ModelError(
            f"the tokenizer gave {len(encoded)} lists for {len(flat)} sentences"
        )
    lengths = [len(ids) for ids in encoded if len(ids)]
    counts = []
    start = 0
    for document in batch:
        end = start + len(document)
        count = sum(len(ids) > 0 for ids in encoded[start:end])
        start = end
        if count:
            counts.append(count)
    ids = np.fromiter(chain.from_iterable(encoded), np.int64, count=sum(lengths))
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        worst = int(ids.min() if ids.min() < 0 else ids.max())
        raise ModelError(
            f"the tokenizer gives the id {worst}, but the model's vocabulary has "
            f"{vocabulary} entries: use the tokenizer in the model's own directory"
        )
    return lengths, counts, ids


def _load(path: Path) -> Tokens | None:
    """Return the corpus in a cache folder, or None if it is unusable.

    It is unusable if it is missing, damaged or in another format.
    """
    try:
        facts = read_json(path / "facts.json")
        if facts["format"] != _FORMAT:
            return None
        kinds = {"ids": facts["dtype"], "sentences": "int64", "documents": "int64"}
        arrays = {}
        for name in _ARRAY_NAMES:
            file = path / f"{name}.bin"
            size = int(facts["sizes"][name])
            if file.stat().st_size != size * np.dtype(kinds[name]).itemsize:
                return None
            arrays[name] = np.memmap(file, dtype=kinds[name], mode="r", shape=(size,))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Tokens(
        **arrays, patients=int(facts["patients"]), dropped=int(facts["dropped"])
    )


@dataclass(frozen=True, eq=False)
class FastTokenizer:
    """The parts of a tokenizer that pre-training uses.

    Attributes:
        tokenize: Maps sentences to ids without special tokens.
        fingerprint: Identifies the tokenizer.
        vocabulary: Number of ids.
        continues: (vocabulary,) bool, whether a token continues the preceding word.
    """

    tokenize: Tokenize
    fingerprint: str
    vocabulary: int
    continues: np.ndarray


def make_fast_tokenizer(tokenizer: Tokenizer) -> FastTokenizer:
    """Return a tokenizer of the `tokenizers` package without padding or truncation.

    It works on a copy and adds no special tokens.
    """
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.no_padding()
    copied.no_truncation()

    def tokenize(texts: list[str]) -> list[list[int]]:
        with converting_panics():
            encoded = copied.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    continues = _find_continuations(copied)
    digest = hashlib.sha256(copied.to_str().encode("utf-8")).hexdigest()
    return FastTokenizer(tokenize, digest, len(continues), continues)


def _find_continuations(tokenizer: Tokenizer) -> np.ndarray:
    """Return whether each token continues the preceding word, (vocabulary,) bool.

    WordPiece marks continuations with `##`. Byte-level BPE marks new words with `Ġ`,
    and SentencePiece with `▁`.
    """
    words = tokenizer.get_vocab(with_added_tokens=True)
    continues = np.zeros(max(words.values()) + 1, dtype=bool)
    if any(word.startswith("##") for word in words):
        for word, index in words.items():
            continues[index] = word.startswith("##")
        return continues

    marks = tuple(m for m in ("Ġ", "▁") if any(w.startswith(m) for w in words))
    if not marks:
        return continues
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for word, index in words.items():
        continues[index] = not word.startswith(marks) and word not in added
    return continues
