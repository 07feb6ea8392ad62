"""Notes tokenised once: flat token ids on disk, mapped into memory, with their bounds.

    <folder>/<key>/ids.bin         every token of every sentence, uint16 or uint32
                   sentences.bin   int64 bounds of sentences in the ids
                   documents.bin   int64 bounds of documents in the sentences
                   facts.json      counts, types and the key's parts

The key is a hash of the notes' texts, the tokenizer, and how notes are cut into
sentences and read, so a cache is used again exactly as long as all of them are the
same. A note is read as one text: the blank between two sentences, which byte-level
tokenizers write into a sub-word, belongs to the second one. Ids are as sensitive as the
notes; folder and files can be read by their owner only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from fednotes.core.errors import DataError, ModelError, on_disk
from fednotes.core.parsing import read_json
from fednotes.core.store import try_lock_folder, write_folder
from fednotes.data.clinical import RECIPE, sentences
from fednotes.data.notes import Key, Note, patient_of
from fednotes.encoders.features import clear_cache

Tokenize = Callable[[list[str]], list[list[int]]]
_BATCH = 2000  # sentences given to the tokenizer at once
_NAMES: Final = ("ids", "sentences", "documents")
_FORMAT = 2  # raise it when the same note gives other ids


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenised corpus.

    ids: (tokens,) uint16 or uint32. sentences: (sentences + 1,) int64 bounds in `ids`.
    documents: (documents + 1,) int64 bounds in `sentences`. No sentence and no document
    is empty. patients: whose notes they are, the site's sample size in pre-training.
    dropped: notes in which the tokenizer found nothing.
    """

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    patients: int = 0
    dropped: int = 0


def cached_tokens(
    notes: Callable[[], Iterable[Note]],
    tokenize: Tokenize,
    fingerprint: str,
    vocabulary: int,
    folder: Path,
) -> Tokens:
    """The notes' tokens, from the cache in `folder` if they are there, else written to
    it.

    notes: gives the notes from the first one on; called once for the key and once to
        tokenise, so that no more than a batch of them is in memory.
    tokenize: sentences → ids without special tokens. fingerprint: what tells the
        tokenizer from others. vocabulary: ids are less than this.

    Raises DataError where there is no token, or the notes change between the two
    passes; ModelError for an id outside the vocabulary, FednotesError where it cannot
    be written.
    """
    content, patients = _digest(notes())
    if not patients:
        raise DataError("the corpus is empty: there is no note with text")
    parts = [str(_FORMAT), content, fingerprint, str(vocabulary), RECIPE]
    key = hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]
    path = folder / key
    found = _load(path)
    if found is not None:
        return found
    for left in folder.glob(f".{key}.*.tmp") if folder.is_dir() else []:
        with try_lock_folder(left) as ours:
            if ours:  # a killed process's
                shutil.rmtree(left, ignore_errors=True)

    def fill(made: Path) -> None:
        seen = hashlib.sha256()
        facts = _write(made, _watched(notes(), seen), tokenize, vocabulary)
        if seen.hexdigest() != content:
            raise DataError("the notes changed while they were tokenised: start again")
        facts |= {"patients": patients, "content": content, "recipe": RECIPE}
        (made / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    write_folder(path, fill)
    written = _load(path)
    if written is None:
        raise DataError(
            f"{path}: the cache was written and cannot be read: is the disk sound?"
        )
    return written


def clear_caches(cache: Path) -> int:
    """Delete the features, tokens and concepts that were made from notes.

    Args:
        cache: The folder of all caches.

    Returns:
        The number of bytes freed.
    """
    folders = (cache / "tokens", cache / "concepts")
    return clear_cache(cache) + sum(map(clear_tokens, folders))


def clear_tokens(folder: Path) -> int:
    """Remove the corpora of a token cache, or of concepts, whose folders are named
    alike: bytes freed. What another process is writing is left to it. Raises DataError
    where it may not."""
    freed = 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = re.fullmatch(r"\.?[0-9a-f]{32}(\.[0-9a-f]+\.(tmp|old))?", path.name)
        if name is None or not path.is_dir():
            continue
        with try_lock_folder(path) as ours:
            if name[1] and not ours:
                continue
            size = sum(file.stat().st_size for file in path.iterdir())
            with on_disk(path, DataError, what="be removed"):
                shutil.rmtree(path)
            freed += size
    return freed


def _digest(notes: Iterable[Note]) -> tuple[str, int]:
    """A hash of all texts and who they are of; and the number of patients."""
    sums, patients = hashlib.sha256(), set[Key]()
    for note in _watched(notes, sums):
        patients.add(patient_of(note))
    return sums.hexdigest(), len(patients)


def _watched(notes: Iterable[Note], sums: Any) -> Iterator[Note]:
    for note in notes:
        for part in (*patient_of(note), note.text):
            data = part.encode("utf-8")
            sums.update(len(data).to_bytes(8, "little"))
            sums.update(data)
        yield note


def _write(
    folder: Path,
    notes: Iterable[Note],
    tokenize: Tokenize,
    vocabulary: int,
) -> dict[str, Any]:
    """Tokenise batch by batch into the three files; the facts of the corpus."""
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    tokens = kept = documents = dropped = 0
    with ExitStack() as stack:
        files = {
            n: stack.enter_context((folder / f"{n}.bin").open("wb")) for n in _NAMES
        }
        for name in ("sentences", "documents"):
            files[name].write(np.zeros(1, np.int64).tobytes())
        for batch in _batches(notes):
            lengths, counts, ids = _encode(batch, tokenize, vocabulary)
            files["ids"].write(ids.astype(dtype).tobytes())
            files["sentences"].write(
                (tokens + np.cumsum(lengths)).astype(np.int64).tobytes()
            )
            files["documents"].write(
                (kept + np.cumsum(counts)).astype(np.int64).tobytes()
            )
            tokens, kept = tokens + len(ids), kept + len(lengths)
            documents, dropped = (
                documents + len(counts),
                dropped + len(batch) - len(counts),
            )
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not tokens:
        raise DataError("the corpus is empty: the tokenizer found no token in any note")
    sizes = {"ids": tokens, "sentences": kept + 1, "documents": documents + 1}
    return {"format": _FORMAT, "dtype": dtype.name, "sizes": sizes, "dropped": dropped}


def _batches(notes: Iterable[Note]) -> Iterator[list[list[str]]]:
    batch: list[list[str]] = []
    size = 0
    for note in notes:
        batch.append(sentences(note.text))
        size += len(batch[-1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    batch: list[list[str]], tokenize: Tokenize, vocabulary: int
) -> tuple[list[int], list[int], np.ndarray]:
    """Lengths of sentences, numbers of sentences of documents, and all ids; none of
    them empty."""
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
    counts, at = [], 0
    for document in batch:
        filled = sum(len(ids) > 0 for ids in encoded[at : at + len(document)])
        at += len(document)
        if filled:
            counts.append(filled)
    ids = np.fromiter(chain.from_iterable(encoded), np.int64, count=sum(lengths))
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        worst = int(ids.min() if ids.min() < 0 else ids.max())
        raise ModelError(
            f"the tokenizer gives the id {worst}, the model's vocabulary has {vocabulary}: "
            "the tokenizer does not fit the model; use the one of the model's own directory"
        )
    return lengths, counts, ids


def _load(path: Path) -> Tokens | None:
    """The corpus in a cache folder; None where it is missing, damaged or of another
    format."""
    try:
        facts = read_json(path / "facts.json")
        if facts["format"] != _FORMAT:
            return None
        kinds = {"ids": facts["dtype"], "sentences": "int64", "documents": "int64"}
        arrays = {}
        for name in _NAMES:
            file, size = path / f"{name}.bin", int(facts["sizes"][name])
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
    """What the data layer needs of a tokenizer.

    continues: (vocabulary,) bool, whether a token goes on with the word before it.
    """

    tokenize: Tokenize
    fingerprint: str
    vocabulary: int
    continues: np.ndarray


def fast_tokenizer(tokenizer: Tokenizer) -> FastTokenizer:
    """A tokenizer of the `tokenizers` package: no special tokens, no padding, nothing
    cut off.

    Continuations are told by the marks of WordPiece (`##` before one), of byte-level
    BPE (`Ġ` before a new word) and of SentencePiece (`▁` likewise). Works on a copy.
    """
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    words = own.get_vocab(with_added_tokens=True)
    vocabulary = max(words.values()) + 1
    continues = np.zeros(vocabulary, dtype=bool)
    pieces = any(word.startswith("##") for word in words)
    marks = tuple(
        m for m in ("Ġ", "▁") if not pieces and any(w.startswith(m) for w in words)
    )
    added = {token.content for token in own.get_added_tokens_decoder().values()}
    for word, index in words.items():
        if pieces:
            continues[index] = word.startswith("##")
        elif marks:
            continues[index] = not word.startswith(marks) and word not in added

    def tokenize(texts: list[str]) -> list[list[int]]:
        encoded = own.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    digest = hashlib.sha256(own.to_str().encode("utf-8")).hexdigest()
    return FastTokenizer(tokenize, digest, vocabulary, continues)
