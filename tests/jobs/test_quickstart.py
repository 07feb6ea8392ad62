"""What a newcomer tries first: the notebook's cells and README's sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fednotes as fn
from fednotes.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
BOOK = DOCS / "tutorials" / "laptop.ipynb"
README = DOCS.parent / "README.md"


def test_the_notebook_is_stored_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(BOOK, as_version=4)
    nbformat.validate(book)
    assert [
        cell.outputs for cell in book.cells if cell.cell_type == "code" and cell.outputs
    ] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = (
        pytest.importorskip("nbformat"),
        pytest.importorskip("nbclient"),
    )
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent / "src"))
    for name in (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "IPYTHONDIR",
        "JUPYTER_RUNTIME_DIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    book = nbformat.read(BOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        book, timeout=900, kernel_name="python3", resources=resources
    ).execute()
    outputs = [
        "".join(o.get("text", "") or o.data["text/plain"] for o in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code" and cell.outputs
    ]
    checked, proposed, scores, mentions, streamed, explained = outputs
    assert checked.startswith("0 problems")
    assert proposed.startswith("distill - ")
    # three sites and their mean, alone and federated
    assert len(scores.splitlines()) == 8
    # what a reader sees first is right
    assert "Drug      lisinopril" in mentions
    assert "Dosage    10 mg daily" in mentions
    assert [line.split()[2] for line in streamed.splitlines()] == ["21", "19", "36"]
    assert "'O': " in explained


# The mentions of README's sentence, by the types that each of the demo's sites
# annotates.
MENTIONS = [("lisinopril", "Drug"), ("10 mg daily", "Dosage"), ("atenolol", "Drug")]


def readme_example() -> tuple[str, str]:
    """Return the model and the sentence of the command in README."""
    readme = README.read_text("utf-8").replace("\\\n", " ")
    (example,) = re.findall(r'fednotes predict runs/demo/(\S+) +--text "(.+)"', readme)
    model, text = example
    return model, text


def test_other_pages_show_the_sentence_of_the_notebook() -> None:
    """A sentence that no test reads is soon one that the demo's models read wrongly."""
    _, text = readme_example()
    for page in ("use.md", "bert.md", "notes.md"):
        sentences = re.findall(r'--text "(.+)"', (DOCS / page).read_text("utf-8"))
        assert set(sentences) == {text}, page


@pytest.mark.slow
def test_the_demo_predicts_the_sentence_of_the_readme(tmp_path: Path) -> None:
    """The model of README's command finds every mention, and no other."""
    place, text = readme_example()
    job = fn.job("demo", conditions=["federated"])
    fn.simulate(job, tmp_path / "demo")
    assert (tmp_path / "demo" / place).is_dir()
    spans = fn.load(tmp_path / "demo" / place)(text).spans
    assert [(text[span.start : span.end], span.label) for span in spans] == MENTIONS


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On notes that the command named beside it generates, fewer than it would by itself."""
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    command = ["corpus", "synthesise", "hospitals", "--sentences", "60"]
    assert CliRunner().invoke(app, command).exit_code == 0
    space: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), space)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("discharge federated 0.") for line in lines)
    document = space["model"]("Patient was on lisinopril 10 mg daily.")
    mentions = {
        document.text[span.start : span.end]: span.label for span in document.spans
    }
    assert mentions["lisinopril"] == "Drug"
