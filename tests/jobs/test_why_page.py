"""The Python blocks of docs/why.md run for users who come from another program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from applications import needs_app
from tiny_models import save_bert

import fednotes as fn
from fednotes.data.synthetic import generate, write_sites

needs_app("serving")  # exports, and the component of spaCy

PAGE = Path(__file__).parents[2] / "docs" / "why.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FROM = ("Flower", "NVIDIA FLARE", "spaCy", "Hugging Face")


def sections() -> dict[str, str]:
    """Return what the page says to those who come from another program, by its name."""
    parts = re.split(r"^## Coming from (.+)$", PAGE.read_text("utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with notes of three sites, a job that trains in seconds, and its run."""
    folder = tmp_path_factory.mktemp("why")
    write_sites(generate(3, sentences_per_site=30), folder / "hospitals")
    encoder = save_bert(folder / "bert")
    lines = [
        'method = "finetune"',
        'conditions = ["federated"]',
        "[model]",
        f'encoder = "{encoder}"',
        "[training]",
        "cycles = 1",
    ]
    for site in ("discharge", "reports", "posts"):
        lines.append(f"[sites.{site}]")
        lines += [
            f'{part} = "{folder}/hospitals/{site}/{part}.conll"'
            for part in ("train", "valid", "test")
        ]
    (folder / "job.toml").write_text("\n".join(lines), "utf-8")
    fn.simulate(fn.job(folder / "job.toml"), folder / "runs" / "first")
    return folder


def test_every_program_has_a_table_and_a_pair_of_programs() -> None:
    assert tuple(sections()) == FROM
    for text in sections().values():
        assert text.count("\n|") > 5
        assert text.count("```text") == len(BLOCK.findall(text)) == 1
        assert "import fednotes as fn" in text


@pytest.mark.parametrize("program", FROM)
def test_the_fednotes_blocks_of_the_page_run(
    program: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == "spaCy":
        pytest.importorskip("spacy")
    if program == "Hugging Face":
        pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    (block,) = BLOCK.findall(sections()[program])
    exec(compile(block, f"{PAGE}, {program}", "exec"), {})
