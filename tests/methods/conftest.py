"""A tiny random BART, the one of the model's own tests, and BERT, for methods that train them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_models import save_bert


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


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with its prediction heads; tests only read it."""
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def bare_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without prediction heads, as encoders are often published."""
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bare_bert"), head=False)
