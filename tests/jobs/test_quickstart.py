"""The notebook runs from its first cell to its last, and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

BOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(BOOK, as_version=4)
    nbformat.validate(book)
    assert [cell.outputs for cell in book.cells if cell.cell_type == "code" and cell.outputs] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(BOOK.parents[1] / "src"))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    book = nbformat.read(BOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=where).execute()
    shown = [
        "".join(o.get("text", "") or o.data["text/plain"] for o in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code" and cell.outputs
    ]
    assert "notes.jsonl:3: 3:30 is no stretch of the text (8 characters)" in shown[0]
    assert shown[1] == "[2, 2, 0]"
    assert "'federated': " in shown[2]
    assert len(shown[3].splitlines()) == 8  # three sites and their mean, alone and federated
    assert "not calibrated" in shown[4]
    assert "Drug      lisinopril" in shown[4]  # what a reader sees first is right
    assert [line.split()[2] for line in shown[5].splitlines()] == ["21", "19", "36"]
    assert "'O': " in shown[6]
