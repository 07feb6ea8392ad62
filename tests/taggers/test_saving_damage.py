"""A saved model of which anything was changed: it loads, or one line says why."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fednotes.cli import app
from fednotes.core.errors import ModelError
from fednotes.core.types import TagSet
from fednotes.taggers.saving import build_model, load_model, model_config, save_model

ODD = (None, True, -1, 1.5, 10**30, "x", [], {}, [1], [[]], {"a": None})
DEEP = (
    "[" * 100_000,
    '{"format":1,"config":' * 20_000,
    '{"format":' * 60 + "1" + "}" * 60,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tagger"
    config = model_config(
        {"kind": "tagger", "char_filters": 6, "cnn_filters": 5, "lstm_units": 4}
    )
    save_model(build_model(config, TagSet(("ADR", "Drug")), 1), folder)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    for key, inner in inside.items() if isinstance(inside, dict) else ():
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    found = copy.deepcopy(value)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = to
    return found


def test_any_description_loads_or_is_one_line(saved: Path, tmp_path: Path) -> None:
    """Every value of the description in turn is replaced by every odd one."""
    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "tagger.json"
    whole = json.loads(file.read_text())
    lines = []
    for path in places(whole):
        for odd in ODD:
            if path[:1] == ("tensors",):
                continue  # for people
            file.write_text(json.dumps(changed(whole, path, odd)))
            try:
                load_model(tmp_path / "m")
            except ModelError as error:
                lines.append(str(error))
    assert len(lines) > 100
    assert not [
        line for line in lines if "\n" in line or str(tmp_path / "m") not in line
    ]


@pytest.mark.parametrize("text", DEEP)
def test_predict_on_a_nested_description_is_one_line(
    saved: Path,
    tmp_path: Path,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / "tagger.json").write_text(text)
    (tmp_path / "note.txt").write_text("took aspirin")
    words = ["fednotes", "predict", str(tmp_path / "m"), str(tmp_path / "note.txt")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "tagger.json" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64],
)
def test_tensors_of_another_type_are_refused(
    saved: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    shutil.copytree(saved, tmp_path / "m")
    file, described = (
        tmp_path / "m" / "tagger.safetensors",
        tmp_path / "m" / "tagger.json",
    )
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, file)
    facts = json.loads(described.read_text())
    facts["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    described.write_text(json.dumps(facts))
    with pytest.raises(
        ModelError, match=r"has type torch\.\w+, but torch\.float32 is needed"
    ):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    "key", ["hashed_words", "char_filters", "cnn_filters", "lstm_units"]
)
def test_a_description_of_a_huge_model_is_refused_before_it_is_built(
    key: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a layer would take over 32 GiB; nothing near that is asked for."""
    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "tagger.json"
    facts = json.loads(file.read_text())
    facts["config"][key] = 2**33
    file.write_text(json.dumps(facts))
    largest = 0
    empty = torch.empty

    def watched(*size: Any, **options: Any) -> Any:
        nonlocal largest
        made = empty(*size, **options)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    with pytest.raises(ModelError, match=r"tagger\.json: "):
        load_model(tmp_path / "m")
    assert largest < 2**20
