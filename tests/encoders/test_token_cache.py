"""The token cache: written once, completely or not at all, for its owner only."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from forked import fork
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, Whitespace

from fednotes.core.errors import DataError, FednotesError, ModelError
from fednotes.core.store import trying_to_lock_folder
from fednotes.data.notes import Note, read_notes
from fednotes.encoders import token_cache
from fednotes.encoders.packing import plan_full
from fednotes.encoders.token_cache import (
    Tokenize,
    Tokens,
    clear_tokens,
    make_fast_tokenizer,
    tokenize_with_cache,
)

TEXTS = ["Has pain. No fever.", "  ", "Well.\n\nPlan:\nrest", "Dr. Who."]


def _notes(texts: list[str] = TEXTS) -> list[Note]:
    return [Note(str(i), t, f"p{i // 2}", None, "s") for i, t in enumerate(texts)]


def _characters(calls: list[int] | None = None) -> Tokenize:
    """Return a tokenizer of characters that counts its calls."""

    def tokenize(texts: list[str]) -> list[list[int]]:
        if calls is not None:
            calls.append(len(texts))
        return [[ord(c) for c in text if not c.isspace()] for text in texts]

    return tokenize


def _cached(
    folder: Path,
    notes: list[Note] | None = None,
    calls: list[int] | None = None,
    **more: object,
) -> Tokens:
    cached_notes = _notes() if notes is None else notes
    options = {"fingerprint": "f", "vocabulary": 1 << 16, **more}
    return tokenize_with_cache(
        lambda: cached_notes, _characters(calls), folder=folder, **options
    )  # type: ignore[arg-type]


def test_the_cache_holds_the_tokens_of_sentences_and_documents(tmp_path: Path) -> None:
    """Characters by hand: sentences and documents are where the bounds say."""
    tokens = _cached(tmp_path)
    text = "".join(map(chr, tokens.ids.tolist()))
    parts = [
        [text[tokens.sentences[i] : tokens.sentences[i + 1]] for i in range(start, end)]
        for start, end in zip(tokens.documents, tokens.documents[1:], strict=False)
    ]
    assert parts == [["Haspain.", "Nofever."], ["Well.", "Plan:rest"], ["Dr.Who."]]
    assert (tokens.ids.dtype, tokens.sentences.dtype) == (np.uint16, np.int64)
    assert (tokens.patients, tokens.dropped) == (2, 1)
    assert isinstance(tokens.ids, np.memmap)
    assert _cached(tmp_path, vocabulary=(1 << 16) + 1).ids.dtype == np.uint32


def test_the_cache_is_reused_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    first = _cached(tmp_path, calls=calls)
    assert (len(calls), len(list(tmp_path.iterdir()))) == (1, 1)
    again = _cached(tmp_path, calls=calls)
    assert (len(calls), again.ids.tolist()) == (1, first.ids.tolist())
    assert (again.patients, again.dropped) == (2, 1)
    _cached(tmp_path, calls=calls, fingerprint="g")
    monkeypatch.setattr(token_cache, "RECIPE", "other")
    _cached(tmp_path, calls=calls)
    monkeypatch.undo()
    _cached(tmp_path, _notes([*TEXTS, "More."]), calls)
    _cached(tmp_path, _notes(["Has pain. ", "No fever.", *TEXTS[1:]]), calls)
    assert (len(calls), len(list(tmp_path.iterdir()))) == (5, 5)


def test_only_the_owner_can_read_the_cache(tmp_path: Path) -> None:
    previous_umask = os.umask(0)
    try:
        _cached(tmp_path / "new" / "cache")
    finally:
        os.umask(previous_umask)
    (folder,) = (tmp_path / "new/cache").iterdir()
    for path in (folder.parent, folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_damaged_cache_is_written_again(tmp_path: Path) -> None:
    calls: list[int] = []
    token_ids = _cached(tmp_path, calls=calls).ids.tolist()
    (folder,) = tmp_path.iterdir()
    for name in ("ids.bin", "facts.json"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-3])
        assert _cached(tmp_path, calls=calls).ids.tolist() == token_ids
    (folder / "sentences.bin").unlink()
    assert _cached(tmp_path, calls=calls).ids.tolist() == token_ids
    assert len(calls) == 4


def _write_until_killed(folder: Path) -> None:
    def tokenize(texts: object) -> list[list[int]]:
        os.kill(os.getpid(), signal.SIGKILL)

    notes = [Note("0", "Has pain.", None, None, "s")]
    tokenize_with_cache(lambda: notes, tokenize, "f", 1 << 16, folder)


def test_a_killed_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    """A process is killed in the middle of tokenising; the next one starts anew and
    cleans up."""
    writer = fork(_write_until_killed, tmp_path)
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    (temporary,) = tmp_path.iterdir()
    assert temporary.name.startswith(".")
    notes = [Note("0", "Has pain.", None, None, "s")]
    assert len(_cached(tmp_path, notes).ids) == 8
    (finished,) = tmp_path.iterdir()
    assert not finished.name.startswith(".")


def test_clearing_removes_only_cached_corpora(tmp_path: Path) -> None:
    """Not what another process writes, nor what is no corpus of this cache."""
    assert clear_tokens(tmp_path / "tokens") == 0
    _cached(tmp_path / "tokens")
    size = sum(
        f.stat().st_size for f in (tmp_path / "tokens").rglob("*") if f.is_file()
    )
    remaining = [
        tmp_path / "tokens" / f".{'a' * 32}.{'0' * 16}.tmp",
        tmp_path / "tokens" / "mine",
    ]
    for folder in remaining:
        folder.mkdir()
    abandoned = tmp_path / "tokens" / f".{'b' * 32}.{'0' * 16}.tmp"
    abandoned.mkdir()
    with trying_to_lock_folder(remaining[0]) as ours:
        assert ours
        assert clear_tokens(tmp_path / "tokens") == size > 0
    assert sorted((tmp_path / "tokens").iterdir()) == sorted(remaining)


def test_writers_with_the_same_process_number_do_not_collide(tmp_path: Path) -> None:
    """As of two containers on one volume: the second begins while the first is at work."""
    second: list[list[int]] = []

    def tokenize(texts: list[str]) -> list[list[int]]:
        if not second:
            second.append([])
            second[0] = _cached(tmp_path).ids.tolist()
        return _characters()(texts)

    first = tokenize_with_cache(_notes, tokenize, "f", 1 << 16, tmp_path)
    assert first.ids.tolist() == second[0]
    (folder,) = tmp_path.iterdir()
    assert re.fullmatch("[0-9a-f]{32}", folder.name)


def test_a_failure_leaves_no_cache(tmp_path: Path) -> None:
    for notes, message in [
        ([], "no notes with text"),
        (_notes([" "]), "found no tokens"),
    ]:
        with pytest.raises(DataError, match=message):
            _cached(tmp_path, notes)
    with pytest.raises(
        ModelError, match=r"the id 118, but the model's vocabulary has 100 entries: use"
    ):
        _cached(tmp_path, vocabulary=100)
    with pytest.raises(ModelError, match=r"0 lists for 5 sentences"):
        tokenize_with_cache(_notes, lambda texts: [], "f", 9, tmp_path)
    passes = iter([_notes(), _notes()[:1]])
    with pytest.raises(DataError, match="the notes changed"):
        tokenize_with_cache(lambda: next(passes), _characters(), "f", 1 << 16, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(FednotesError, match="cannot be written"):
        _cached(tmp_path / "file" / "cache")


def test_notes_are_streamed_in_batches(tmp_path: Path) -> None:
    """More sentences than a batch, a note longer than one, bounds across batches."""
    texts = [f"Note {i}. Well." for i in range(1500)] + ["Stable overnight. " * 12_000]
    calls: list[int] = []

    def notes() -> Iterator[Note]:
        for i, text in enumerate(texts):
            yield Note(str(i), text, None, None, "s")

    source: Callable[[], Iterator[Note]] = notes
    tokens = tokenize_with_cache(source, _characters(calls), "f", 1 << 16, tmp_path)
    assert len(calls) > 1
    assert sum(calls) == 3000 + 12_000
    expected = [ord(c) for t in texts for c in t if not c.isspace()]
    assert tokens.ids.tolist() == expected
    assert tokens.patients == 1501
    assert np.diff(tokens.documents).tolist() == [2] * 1500 + [12_000]
    assert (np.diff(tokens.sentences) > 0).all()


def test_fast_tokenizers_report_their_vocabulary_and_continuations() -> None:
    """Continuations by each model's own mark; truncation is off; the given one is
    unchanged."""
    words = {w: i for i, w in enumerate(["[UNK]", "[CLS]", "pain", "##ful", "no"])}
    wordpiece = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    wordpiece.pre_tokenizer = Whitespace()
    wordpiece.enable_truncation(2)
    fast = make_fast_tokenizer(wordpiece)
    assert fast.tokenize(["painful no pain no", ""]) == [[2, 3, 4, 2, 4], []]
    assert (fast.vocabulary, fast.continues.tolist()) == (
        5,
        [False, False, False, True, False],
    )
    assert wordpiece.truncation is not None
    assert make_fast_tokenizer(wordpiece).fingerprint == fast.fingerprint
    bpe = Tokenizer(BPE({"<s>": 0, "a": 1, "Ġ": 2, "Ġa": 3, "b": 4}, [("Ġ", "a")]))
    bpe.add_special_tokens(["<s>"])
    second_tokenizer = make_fast_tokenizer(bpe)
    assert second_tokenizer.continues.tolist() == [False, True, False, False, True]
    assert second_tokenizer.fingerprint != fast.fingerprint


@pytest.mark.corpora
def test_tokens_of_real_notes_are_cached_and_packed(
    corpora: Path, tmp_path: Path
) -> None:
    """ACI-Bench by the WordPiece vocabulary: all its tokens in a full plan, the cache
    used."""
    lines = (
        (corpora / "vectors/bert_base_uncased_vocab.txt")
        .read_text("utf-8")
        .splitlines()
    )
    tokenizer = Tokenizer(
        WordPiece({w: i for i, w in enumerate(lines)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    fast = make_fast_tokenizer(tokenizer)

    def tokenized() -> Tokens:
        return tokenize_with_cache(
            lambda: read_notes(corpora / "aci_bench"),
            fast.tokenize,
            fast.fingerprint,
            fast.vocabulary,
            tmp_path,
        )

    tokens = tokenized()
    assert (len(tokens.documents) - 1, tokens.patients, tokens.dropped) == (207, 207, 0)
    plan = plan_full(tokens, 128, 0, 0)
    assert int(np.diff(plan.stretches).sum()) == len(tokens.ids)
    assert tokenized().ids.tolist() == tokens.ids.tolist()


def test_a_corpus_that_another_process_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digit in "ab":
        folder = tmp_path / (digit * 32)
        folder.mkdir()
        (folder / "ids.bin").write_bytes(b"12")

    def lock_too_late(folder: Path) -> AbstractContextManager[bool]:
        if folder.name.startswith("a"):
            shutil.rmtree(folder)
        return nullcontext(enter_result=True)

    monkeypatch.setattr(token_cache, "trying_to_lock_folder", lock_too_late)
    assert clear_tokens(tmp_path) == 2
    assert not list(tmp_path.iterdir())
