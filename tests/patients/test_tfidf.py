"""TF-IDF against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfTransformer

from fednotes.core.errors import DataError
from fednotes.patients.classifiers import document_frequencies, inverse_document_frequencies, tfidf
from fednotes.patients.cohort import Bags


def bags(seed: int, patients: int = 40, vocabulary: int = 25) -> Bags:
    rng = np.random.default_rng(seed)
    return Bags.of(
        [rng.integers(vocabulary - 3, size=rng.integers(0, 12)) for _ in range(patients)],
        vocabulary,
    )


def counts(given: Bags) -> np.ndarray:
    """(patients, vocabulary), one patient after the other."""
    rows = [given.concepts[a:b] for a, b in zip(given.offsets, given.offsets[1:], strict=False)]
    return np.stack([np.bincount(row, minlength=given.vocabulary) for row in rows])


def dense(given: Bags, idf: np.ndarray) -> np.ndarray:
    found = tfidf(given, idf)
    out = np.zeros((len(found), found.width))
    row = np.repeat(np.arange(len(found)), np.diff(found.offsets))
    out[row, found.columns] = found.values
    return out


def test_features_are_scikit_learns() -> None:
    """TfidfTransformer of the same counts; patients without concepts and unseen ones included."""
    train, new = bags(1), bags(2)
    fitted = TfidfTransformer().fit(counts(train))
    idf = inverse_document_frequencies(document_frequencies(train), len(train))
    assert np.array_equal(idf, fitted.idf_)
    for given in (train, new):
        assert np.allclose(dense(given, idf), fitted.transform(counts(given)).toarray())
    assert (np.diff(tfidf(train, idf).offsets) == 0).any()  # somebody without concepts


def test_frequencies_add_over_sites() -> None:
    """Counted by hand over the patients of both."""
    a, b = bags(3), bags(4)
    wanted = (counts(a) > 0).sum(0) + (counts(b) > 0).sum(0)
    assert np.array_equal(document_frequencies(a) + document_frequencies(b), wanted)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="25 concepts for frequencies of 24"):
        tfidf(bags(1), np.ones(24))
