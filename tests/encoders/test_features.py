"""Features of a corpus: cached features equal computed ones, even after damage."""

from __future__ import annotations

import hashlib
import resource
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from passages import passage

from fednotes.core.errors import ConfigError, FednotesError, MissingExtra, ModelError
from fednotes.data.text import Passage
from fednotes.encoders import features, pretrained
from fednotes.encoders.encoder import batch_similar_lengths
from fednotes.encoders.features import (
    clear_cache,
    compute_features_with_cache,
    find_default_cache,
    load_encoder,
)


class Hashing:
    """An encoder whose vector is a hash of the word, its place and its sentence."""

    layers, dim = 2, 3

    def __init__(self, fingerprint: str = "a") -> None:
        self.fingerprint = fingerprint
        self.encoded_sentences: list[tuple[str, ...]] = []

    def encode(self, passages: Sequence[Passage]) -> np.ndarray:
        sentences = [tuple(passage.forms) for passage in passages]
        self.encoded_sentences += sentences
        rows = [
            vector(sentence, i) for sentence in sentences for i in range(len(sentence))
        ]
        return np.array(rows, np.float16).reshape(-1, 2, 3)


def vector(sentence: Sequence[str], place: int) -> np.ndarray:
    digest = hashlib.sha256("\0".join([*sentence, str(place)]).encode()).digest()
    return np.frombuffer(digest[:6], np.uint8).astype(np.float16).reshape(2, 3)


FORMS = tuple(f"form{i}" for i in range(40))


def corpus(count: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random sentences, the last third of them copies, one of them empty."""
    rng = np.random.default_rng(seed)
    sentences = [rng.integers(0, len(FORMS), rng.integers(1, 9)) for _ in range(count)]
    sentences += [*sentences[: count // 2], np.zeros(0, np.int64), *sentences[:3]]
    return np.concatenate(sentences), np.cumsum([0, *map(len, sentences)])


def lazy_passages(
    form: np.ndarray, bounds: np.ndarray, forms: Sequence[str] = FORMS
) -> list[Passage]:
    """Return the sentences as they are read."""
    return [passage([forms[i] for i in form[a:b]]) for a, b in pairwise(bounds)]


def expected(form: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the features sentence by sentence, word by word."""
    rows = []
    for start, end in pairwise(bounds):
        words = [FORMS[i] for i in form[start:end]]
        rows += [vector(words, i) for i in range(len(words))]
    return np.array(rows)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK", 4)


def test_cached_features_equal_those_computed_on_the_fly(tmp_path: Path) -> None:
    """Both equal the loop above, equal sentences computed once; a second call computes
    nothing."""
    form, bounds = corpus()
    encoder = Hashing()
    memory = compute_features_with_cache(encoder, lazy_passages(form, bounds), None)
    np.testing.assert_array_equal(memory, expected(form, bounds))
    cached = compute_features_with_cache(encoder, lazy_passages(form, bounds), tmp_path)
    np.testing.assert_array_equal(cached, memory)
    assert isinstance(cached, np.memmap)
    assert cached.dtype == memory.dtype == np.float16
    assert not cached.flags.writeable
    assert not memory.flags.writeable
    sentences = {tuple(form[a:b]) for a, b in pairwise(bounds) if b > a}
    assert len(encoder.encoded_sentences) == 2 * len(sentences)
    encoder.encoded_sentences.clear()
    np.testing.assert_array_equal(
        compute_features_with_cache(encoder, lazy_passages(form, bounds), tmp_path),
        memory,
    )
    assert encoder.encoded_sentences == []


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_resumed_features_equal_those_of_an_uninterrupted_run(
    tmp_path: Path, chunks: int
) -> None:
    """Killed after some chunks; those are not computed again."""
    form, bounds = corpus()
    encoder = Hashing()

    def kill(done: int, total: int) -> None:
        if done == 4 * chunks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_features_with_cache(
            encoder, lazy_passages(form, bounds), tmp_path, kill
        )
    before = set(encoder.encoded_sentences)
    assert len(before) == 4 * chunks
    encoder.encoded_sentences.clear()
    progress_calls: list[tuple[int, int]] = []
    cached = compute_features_with_cache(
        encoder,
        lazy_passages(form, bounds),
        tmp_path,
        lambda done, total: progress_calls.append((done, total)),
    )
    np.testing.assert_array_equal(cached, expected(form, bounds))
    assert not before & set(encoder.encoded_sentences)
    total = len(before) + len(encoder.encoded_sentences)
    assert progress_calls[0] == (4 * chunks, total)
    assert progress_calls[-1] == (total, total)


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "header", "progress", "no progress"]
)
def test_features_of_a_damaged_cache_are_computed_again(
    tmp_path: Path, damage: str
) -> None:
    form, bounds = corpus()
    if damage in ("progress", "no progress"):
        with pytest.raises(KeyboardInterrupt):
            compute_features_with_cache(
                Hashing(), lazy_passages(form, bounds), tmp_path, interrupt
            )
        (file,) = (tmp_path / "features").glob("*.part")
        content = file.read_bytes()
        file.write_bytes(content[:-8] + (b"\xff" * 8 if damage == "progress" else b""))
    else:
        compute_features_with_cache(Hashing(), lazy_passages(form, bounds), tmp_path)
        (file,) = (tmp_path / "features").glob("*.npy")
        content = file.read_bytes()
        size = {"truncated": len(content) - 1, "empty": 0, "header": len(content)}[
            damage
        ]
        file.write_bytes(content[:size] if damage != "header" else b"x" * size)
    recomputed = compute_features_with_cache(
        Hashing(), lazy_passages(form, bounds), tmp_path
    )
    np.testing.assert_array_equal(recomputed, expected(form, bounds))


def interrupt(done: int, total: int) -> None:
    if done:
        raise KeyboardInterrupt


def test_the_cache_key_depends_on_encoder_and_corpus(tmp_path: Path) -> None:
    """Another fingerprint, form, order, cut or text between words: another file, never
    another's vectors."""
    form, bounds = corpus()
    moved = bounds.copy()
    moved[1] += 1
    calls = [
        (Hashing(), lazy_passages(form, bounds)),
        (Hashing("b"), lazy_passages(form, bounds)),
        (Hashing(), lazy_passages(form, bounds, ("other", *FORMS[1:]))),
        (Hashing(), lazy_passages(form[::-1].copy(), bounds)),
        (Hashing(), lazy_passages(form, moved)),
        (
            Hashing(),
            [
                each._replace(text=f"{each.text}.")
                for each in lazy_passages(form, bounds)
            ],
        ),
    ]
    for n, call in enumerate(calls, 1):
        compute_features_with_cache(*call, tmp_path)
        assert len(list((tmp_path / "features").glob("*.npy"))) == n
    assert all(len(p.stem) == 64 for p in (tmp_path / "features").iterdir())


def test_only_the_owner_can_read_cached_features(tmp_path: Path) -> None:
    form, bounds = corpus()
    (tmp_path / "features").mkdir(mode=0o755)
    compute_features_with_cache(Hashing(), lazy_passages(form, bounds), tmp_path)
    assert stat.S_IMODE((tmp_path / "features").stat().st_mode) == 0o700
    (file,) = (tmp_path / "features").glob("*.npy")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(word.encode() in file.read_bytes() for word in FORMS)


def test_a_full_disk_leaves_no_partial_features(tmp_path: Path) -> None:
    """The system itself refuses the write (file size limit): one error, nothing left."""
    form, bounds = corpus(300)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(FednotesError, match="free some space"):
            compute_features_with_cache(
                Hashing(), lazy_passages(form, bounds), tmp_path
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "features").iterdir()) == []
    uncached = compute_features_with_cache(
        Hashing(), lazy_passages(form, bounds), tmp_path
    )
    np.testing.assert_array_equal(uncached, expected(form, bounds))


def test_a_cache_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    form, bounds = corpus()
    (tmp_path / "file").write_text("")
    with pytest.raises(FednotesError, match="FEDNOTES_CACHE"):
        compute_features_with_cache(
            Hashing(), lazy_passages(form, bounds), tmp_path / "file"
        )


def test_three_processes_compute_features_once(tmp_path: Path) -> None:
    """They wait for each other: one computes, all get its vectors, one file stays."""
    form, bounds = corpus(200)
    encoders = [Hashing() for _ in range(3)]
    start = threading.Barrier(3)

    def work(encoder: Hashing) -> np.ndarray:
        start.wait()
        return compute_features_with_cache(
            encoder, lazy_passages(form, bounds), tmp_path
        )

    with ThreadPoolExecutor(3) as pool:
        for result in pool.map(work, encoders):
            np.testing.assert_array_equal(result, expected(form, bounds))
    assert sum(bool(encoder.encoded_sentences) for encoder in encoders) == 1
    assert [p.suffix for p in (tmp_path / "features").iterdir()] == [".npy"]


def test_clearing_the_cache_removes_only_cache_files(tmp_path: Path) -> None:
    form, bounds = corpus()
    assert clear_cache(tmp_path) == 0
    compute_features_with_cache(Hashing(), lazy_passages(form, bounds), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compute_features_with_cache(
            Hashing("b"), lazy_passages(form, bounds), tmp_path, interrupt
        )
    (tmp_path / "features" / "mine.npy").write_text("keep")
    ours = [p for p in (tmp_path / "features").iterdir() if p.name != "mine.npy"]
    size = sum(p.stat().st_size for p in ours)
    assert len(ours) == 2
    assert clear_cache(tmp_path) == size > 0
    assert [p.name for p in (tmp_path / "features").iterdir()] == ["mine.npy"]


def test_the_default_cache_follows_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))
    assert find_default_cache() == tmp_path
    monkeypatch.delenv("FEDNOTES_CACHE")
    assert find_default_cache() == Path.home() / ".cache" / "fednotes"


def test_batches_by_length_hold_every_sentence_within_the_limits() -> None:
    lengths = np.random.default_rng(0).integers(0, 50, 200).tolist()
    batches = batch_similar_lengths(lengths, budget=120, rows=7)
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(
        len(b) <= 7 and len(b) * max(lengths[i] for i in b) <= 120 for b in batches
    )
    assert [
        b.tolist() for b in batch_similar_lengths([500, 3], budget=120, rows=7)
    ] == [
        [0],
        [1],
    ]


def test_load_encoder_refuses_a_wrong_specification_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for absent in (str(tmp_path / "absent"), "n" * 100_000, "~no-such-user/a", "a\0"):
        with pytest.raises(ModelError, match="no such directory"):
            load_encoder(absent)
    with pytest.raises(ModelError, match="no encoder here"):
        load_encoder(str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        load_encoder(f"{tmp_path}#frist")
    with pytest.raises(ConfigError, match="unknown option 'layers=0'"):
        load_encoder(f"{tmp_path}#layers=0")
    monkeypatch.setattr(pretrained, "MINILM", "gt_no_such_model")
    with pytest.raises(MissingExtra, match="gt-no-such-model"):
        load_encoder("minilm")


def test_clearing_the_cache_leaves_files_of_a_running_job(tmp_path: Path) -> None:
    """A part file under another open file's lock stays; the rest goes."""
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "features"
    folder.mkdir()
    busy, finished = "a" * 64, "b" * 64
    for name in (f"{busy}.part", f"{finished}.npy", f"{finished}.json"):
        (folder / name).write_bytes(b"12345")
    with (folder / f"{busy}.part").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert clear_cache(tmp_path) == 10
        assert [f.name for f in folder.iterdir()] == [f"{busy}.part"]
    assert clear_cache(tmp_path) == 5
