"""Bags of concepts weighted by TF-IDF: the features that need no representation learning.

    tf    how often a concept occurs in a patient's notes
    df    at how many patients it occurs: a sum over sites, so none shows its own
    idf   ln((1 + patients) / (1 + df)) + 1
    each patient's vector is scaled to length 1

These are the definitions of scikit-learn's TfidfTransformer. Liu, Dligach and Miller 2019 name
"TF-IDF weighted sparse bag-of-CUIs vectors" and give no formula.
"""

from __future__ import annotations

import numpy as np

from fednotes.core.errors import DataError
from fednotes.data.cohort import Bags
from fednotes.models.svm import Features


def document_frequencies(bags: Bags) -> np.ndarray:
    """(vocabulary,) int64: at how many patients each concept occurs. It adds over sites."""
    _, column, _ = bags.counts()
    return np.bincount(column, minlength=bags.vocabulary).astype(np.int64)


def inverse_document_frequencies(frequencies: np.ndarray, patients: int) -> np.ndarray:
    """(vocabulary,) float64 from the frequencies of that many patients in all."""
    # [phenotype idf]
    return np.asarray(np.log((1 + patients) / (1 + frequencies.astype(np.float64))) + 1)


def tfidf(bags: Bags, idf: np.ndarray) -> Features:
    """Each patient's weighted concepts, scaled to length 1; none for a patient without any.

    Raises DataError for bags of another vocabulary.
    """
    if bags.vocabulary != len(idf):
        raise DataError(
            f"bags over {bags.vocabulary} concepts for frequencies of {len(idf)}: use the "
            "dictionary that the model was trained with"
        )
    row, column, count = bags.counts()
    value = count * idf[column]  # [phenotype tf-idf]
    length = np.sqrt(np.bincount(row, value**2))  # [phenotype tf-idf]
    return Features.from_entries(row, column, value / length[row], (len(bags), bags.vocabulary))
