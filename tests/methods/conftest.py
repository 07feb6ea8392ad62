"""A tiny random BART, the one of the model's own tests, for methods that train it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory; tests only read it."""
    pytest.importorskip("transformers")
    source = Path(__file__).parents[1] / "models" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_bart", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.save_bart(tmp_path_factory.mktemp("bart"))
    return folder
