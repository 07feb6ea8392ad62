"""Links that lead out, FIFOs, sockets and devices among notes are refused at once."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from applications import has_app
from time_limits import no_waiting

from fednotes.core.errors import DataError
from fednotes.data.formats import files, read
from fednotes.data.formats.files import open_file
from fednotes.data.notes import read_notes
from fednotes.jobs.inputs import open_inputs

SECRET = "Zyxwolan was given."

READERS: dict[str, Callable[[Path], object]] = {
    "read": read,
    **{
        form: partial(read, format=form)
        for form in ("brat", "i2b2", "conll", "jsonl", "pubtator")
    },
    "notes": lambda path: list(read_notes(path)),
    "predict": lambda path: tuple(open_inputs(str(path))),
}
READERS_OF_FILES = ["read", "notes", "predict"]  # which take one file as well

if has_app("phenotyping"):
    from patient_readers import PATIENT_READERS, PATIENT_READERS_OF_FILES

    READERS |= PATIENT_READERS
    READERS_OF_FILES += PATIENT_READERS_OF_FILES


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Fail a test whose reader waits."""
    with no_waiting():
        yield


def corpus(folder: Path) -> Path:
    """Write one brat pair."""
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("He has rash.")
    (folder / "a.ann").write_text("T1\tADE 7 11\trash\n")
    return folder


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    """As `mknod` would; a link into /dev is refused as a link, so this needs root."""
    try:
        os.mknod(path, 0o020666, os.makedev(1, 5))  # /dev/zero, without end
    except PermissionError:
        pytest.skip("needs the right to make devices")


def outward(path: Path, name: str = "secret.txt") -> None:
    outside = path.parent.parent / "other"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    path.symlink_to(outside / name)


def outward_folder(path: Path) -> None:
    outward(path, ".")


PROBLEMS = {
    pipe: "a FIFO, but only files are read",
    device: "a device, but only files are read",
    outward: "a link that leads out of",
    outward_folder: "a link that leads out of",
}


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_refuses_a_foreign_link_or_special_file_by_name(
    tmp_path: Path, reader: str, make: Callable[[Path], None]
) -> None:
    folder = corpus(tmp_path / "corpus")
    make(folder / "b.txt")
    with pytest.raises(
        DataError, match=rf"^{folder}/b\.txt: {PROBLEMS[make]}"
    ) as refusal:
        READERS[reader](folder)
    assert SECRET not in str(refusal.value)


def test_a_kernel_file_without_content_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/kmsg passes for a file; a FIFO that is open for writing takes its part."""
    monkeypatch.setattr("fednotes.core.parsing.require_file", lambda *_: None)
    path = tmp_path / "b.txt"
    pipe(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert files.read_head(path) == []
        assert not files.starts_with(path, (b"PAR1",))
        with pytest.raises(DataError, match=r"b\.txt: cannot .*not available yet"):
            files.read_text(path)
        with pytest.raises(DataError, match=r"b\.txt: cannot .*not available yet"):
            list(files.read_lines(path))
    finally:
        os.close(writer)


def test_a_socket_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = corpus(tmp_path / "corpus")
    monkeypatch.chdir(folder)  # a socket's path may have 108 characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("b.txt")
        with pytest.raises(
            DataError, match=r"b\.txt: a socket, but only files are read"
        ):
            read(folder)


@pytest.mark.parametrize("reader", READERS_OF_FILES)
@pytest.mark.parametrize("name", ["a.txt", "a.ann", "a.csv", "a.jsonl"])
def test_a_fifo_given_as_the_input_is_refused_without_waiting(
    tmp_path: Path, name: str, reader: str
) -> None:
    pipe(tmp_path / name)
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=rf"/{name}: a FIFO, but only files are read"):
        READERS[reader](tmp_path / name)


def test_a_fifo_beside_the_annotations_is_refused_without_waiting(
    tmp_path: Path,
) -> None:
    """A pair is named by one of its files; its other file is looked at too."""
    (tmp_path / "a.ann").write_text("T1\tADE 7 11\trash\n")
    pipe(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt: a FIFO, .* put a file in its place$"):
        read(tmp_path / "a.ann")


def pair_in_folders(base: Path, form: str) -> Path:
    """Write a corpus whose annotations are in a folder of their own, without texts."""
    (base / "ann").mkdir(parents=True)
    if form == "brat":
        (base / "ann/a.ann").write_text("T1\tADE 0 8\tZyxwolan\n")
    else:
        (base / "ann/a.con").write_text('c="zyxwolan" 1:0 1:0||t="problem"\n')
    return base


@pytest.mark.parametrize("form", ["brat", "i2b2"])
def test_a_link_of_a_text_in_a_neighbouring_folder_may_not_lead_out(
    tmp_path: Path, form: str
) -> None:
    """CADEC and i2b2 keep texts in a folder of their own."""
    base = pair_in_folders(tmp_path / "corpus", form)
    (base / "txt").mkdir()
    (tmp_path / "secret.txt").write_text(SECRET)
    (base / "txt/a.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(DataError, match=r"txt/a\.txt: a link that leads out of"):
        read(base / "ann", form)


@pytest.mark.parametrize("form", ["brat", "i2b2"])
@pytest.mark.parametrize("named", [".", "ann"])
def test_a_link_of_the_folder_of_texts_may_not_lead_out(
    tmp_path: Path, form: str, named: str
) -> None:
    """The text itself is no link, but the folder that it is reached through is."""
    base = pair_in_folders(tmp_path / "corpus", form)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text(SECRET)
    (base / "txt").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match=r"txt: a link that leads out of"):
        read(base / named, form)


@pytest.mark.parametrize("form", ["brat", "i2b2"])
def test_the_folder_of_texts_may_be_linked_within_the_corpus(
    tmp_path: Path, form: str
) -> None:
    base = pair_in_folders(tmp_path / "corpus", form)
    (base / "texts").mkdir()
    (base / "texts/a.txt").write_text(SECRET)
    (base / "txt").symlink_to("texts")
    (document,) = read(base / "ann", form)
    assert document.text == SECRET


@pytest.mark.parametrize("form", ["brat", "i2b2"])
@pytest.mark.parametrize("partner", [".txt", "annotations"])
def test_a_link_of_the_partner_of_an_input_file_may_not_lead_out(
    tmp_path: Path, form: str, partner: str
) -> None:
    """Only the file that a person names may be a link."""
    base = pair_in_folders(tmp_path / "corpus", form)
    (annotations,) = (base / "ann").iterdir()
    text = annotations.with_suffix(".txt")
    text.write_text(SECRET)
    linked, named = text, annotations
    if partner == "annotations":
        linked, named = annotations, text
    linked.rename(tmp_path / linked.name)
    linked.symlink_to(tmp_path / linked.name)
    with pytest.raises(DataError, match=rf"{linked.name}: a link that leads out of"):
        read(named, form)
    (document,) = read(linked, form)
    assert document.text == SECRET


def test_an_input_path_may_be_a_link(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "elsewhere" / "corpus")
    note = {"text": "He has rash.", "spans": [{"start": 7, "end": 11, "label": "ADE"}]}
    (folder.parent / "one.jsonl").write_text(json.dumps(note) + "\n")
    (tmp_path / "folder").symlink_to(folder)
    (tmp_path / "file.jsonl").symlink_to(folder.parent / "one.jsonl")
    assert [d.text for d in read(tmp_path / "folder")] == ["He has rash."]
    assert [d.text for d in read(tmp_path / "file.jsonl")] == ["He has rash."]
    assert [n.text for n in read_notes(tmp_path / "file.jsonl")] == ["He has rash."]


def test_a_link_within_the_corpus_is_read(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("He has rash.")
    (tmp_path / "b.txt").symlink_to(tmp_path / "texts/a.txt")
    assert sorted(n.id for n in read_notes(tmp_path)) == ["b", "texts/a"]
    (tmp_path / "again").symlink_to(tmp_path)  # a folder in itself is not entered
    assert len(list(read_notes(tmp_path))) == 2


@pytest.mark.slow
def test_deeply_nested_folders_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        os.mkdir("a")
        os.chdir("a")
    try:
        with pytest.raises(DataError, match=r"its folders are nested too deep: move"):
            read(tmp_path)
    finally:  # pytest cannot remove them
        for _ in range(1200):
            os.chdir("..")
            os.rmdir("a")


def test_a_file_that_becomes_a_fifo_after_the_listing_is_refused_without_waiting(
    tmp_path: Path,
) -> None:
    """What is open is judged, not what lay there before: there is nothing in between to
    use."""
    pipe(tmp_path / "a.txt")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataError, match="a FIFO"):
        open_file(tmp_path / "a.txt")
    assert len(os.listdir("/proc/self/fd")) == before
