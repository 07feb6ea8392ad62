"""A model before ConText in a medspaCy pipeline, in the environment of `make
test-medspacy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_taggers import save_three_words

pytestmark = [
    pytest.mark.medspacy,
    pytest.mark.filterwarnings("default"),  # of spaCy 3.7 and what it needs
]
TEXT = "Patient denies pain but has nausea. Takes metoprolol. No evidence of nausea."


@pytest.fixture
def nlp(tmp_path: Path) -> Any:
    import medspacy

    nlp = medspacy.load(medspacy_enable=["medspacy_pyrush", "medspacy_context"])
    model = str(save_three_words(tmp_path / "model"))
    nlp.add_pipe("fednotes", config={"model": model}, before="medspacy_context")
    return nlp


def test_context_applies_to_mentions_of_the_model(nlp: Any) -> None:
    """By hand: the first and the last mention are negated, "but" ends the first one's
    scope."""
    assert nlp.pipe_names[-2:] == ["fednotes", "medspacy_context"]
    for doc in (nlp(TEXT), *nlp.pipe([TEXT])):
        negations = [(ent.text, ent.label_, ent._.is_negated) for ent in doc.ents]
        assert negations == [
            ("pain", "ADR", True),
            ("nausea", "ADR", False),
            ("metoprolol", "Drug", False),
            ("nausea", "ADR", True),
        ]
        assert all(0.5 < ent._.confidence < 1.0 for ent in doc.ents)


def test_the_environment_has_the_versions_of_medspacy(nlp: Any) -> None:
    """Or it would show nothing that tests/apps/serving/test_spacy.py does not."""
    import numpy
    import spacy

    assert (spacy.__version__[:3], numpy.__version__[:2]) == ("3.7", "1.")
