"""Fixtures of the audit's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import save_bert


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny encoder, wide enough for the span of a small batch."""
    return save_bert(tmp_path_factory.mktemp("bert"), hidden_size=96)


@pytest.fixture(scope="module", autouse=True)
def _few_sentences(few_sentences: None) -> None:
    """Audit jobs on small generated corpora."""
