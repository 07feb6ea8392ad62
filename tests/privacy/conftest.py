"""What the tests of privacy share: small generated corpora."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _few_sentences(few_sentences: None) -> None:
    """Generate small corpora in all of them."""
