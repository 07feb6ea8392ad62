"""A tiny BERT that tests of tuned encoders read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import save_encoder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a BERT of 3 layers of 16 with room for 12 sub-words; tests only read
    it."""
    pytest.importorskip("transformers")
    return save_encoder(tmp_path_factory.mktemp("encoder") / "bert")
