"""Export a phenotyping model as a scikit-learn pipeline, without a pickle.

    pipeline.skops   (patients, concepts) counts, sparse or not, or vectors of text →
                     a list with (patients, classes) probabilities for each disease
    fednotes.json    the diseases in their order, and the meaning of the columns

All steps are scikit-learn's own, so that the pipeline loads if only that library is
trusted. The network's mean of vectors and its dense layer are linear maps
(`TruncatedSVD`); its bias with the ReLU is a `MinMaxScaler` that clips at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import LABELS
from fednotes.apps.phenotyping.dan import Dan
from fednotes.apps.phenotyping.features import (
    ConceptFeatures,
    Features,
    load_features,
)
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.core.errors import ConfigError, needs
from fednotes.core.store import write_json
from fednotes.jobs.export_forms import ExportForm

_INFINITE: Final = 1e30  # an upper bound that no value reaches
_Step = tuple[str, Any]  # of a pipeline: its name and its estimator


def make_writer(model: Path, dictionary: str | None = None) -> Callable[[Path], None]:
    """Return a function that writes a saved model into an empty folder.

    Args:
        model: Folder of the saved model.
        dictionary: New location of the model's dictionary or encoder, if it has moved.

    Raises:
        ConfigError: The model has no classifiers.
        ModelError: The model is damaged, or its dictionary or encoder is not found.
        MissingExtra: scikit-learn or skops is not installed.
    """
    phenotyper = load_phenotyper(model)
    if phenotyper.attention is not None:
        raise ConfigError(
            f"{model}: this model tunes an encoder, which scikit-learn cannot run: use "
            "it with fednotes"
        )
    svms = phenotyper.svms
    if svms is None:
        raise ConfigError(
            f"{model}: this model ends with stage 1 and has no classifiers of "
            "phenotypes to export"
        )
    with needs("skops", "sklearn"):
        import skops.io
        from sklearn.pipeline import Pipeline
    features = load_features(phenotyper.space.recipe, dictionary)
    classifiers = _make_classifiers(phenotyper, svms)
    pipeline = Pipeline([*_make_feature_steps(phenotyper), ("diseases", classifiers)])
    learned = [
        name
        for name, classes in zip(phenotyper.phenotypes, svms.classes, strict=True)
        if classes
    ]
    facts = {"phenotypes": learned, "columns": _name_columns(features)}

    def fill(folder: Path) -> None:
        skops.io.dump(pipeline, folder / "pipeline.skops")
        write_json(folder / "fednotes.json", facts, private=False)

    return fill


def _name_columns(features: Features) -> tuple[str, ...] | int:
    """Return the names of the input's columns; for vectors, their number."""
    width = features.space.width
    if not isinstance(features, ConceptFeatures):
        return width
    names = features.matcher.dictionary.concepts
    if width > len(names):  # mentions that do not hold have columns of their own
        names += tuple(f"{name} (not the patient's)" for name in names)
    return names


# ---- features ------------------------------------------------------------------------


def _make_feature_steps(model: Phenotyper) -> Iterator[_Step]:
    """Yield the steps that compute the classifiers' features from counts or vectors."""
    from sklearn.feature_extraction.text import TfidfTransformer

    if model.network is not None:
        yield from _make_network_steps(model.network, model.space.width)
        if model.scale == "l2":
            yield "length", _make_normalizer("l2")
    elif model.idf is not None:
        yield (
            "tfidf",
            _make_fitted(TfidfTransformer(), model.space.width, idf_=model.idf),
        )


def _make_network_steps(network: Dan, width: int) -> Iterator[_Step]:
    """Yield the steps of a network.

    Args:
        network: The network.
        width: Number of columns of the input.
    """
    from sklearn.preprocessing import MinMaxScaler

    state = {name: value.detach().numpy() for name, value in network.state().items()}
    if network.embedding is not None:
        yield from _make_mean_steps(network, state["embedding"], width)
    yield "dense", _make_linear(state["hidden_weight"])
    bias = state["hidden_bias"].astype(np.float64)
    clips = network.config.layer == "rectified"
    scaler = MinMaxScaler(feature_range=(0.0, _INFINITE), clip=clips)
    yield (
        "rectified",
        _make_fitted(scaler, len(bias), scale_=np.ones(len(bias)), min_=bias),
    )


def _make_mean_steps(
    network: Dan, embedding: np.ndarray, width: int
) -> Iterator[_Step]:
    """Yield the steps that compute the mean vector of a patient's concepts.

    Args:
        network: The network.
        embedding: (rows, dim) vectors. Row 0 is for unknown concepts, and pads empty
            places.
        width: Number of columns of the input.
    """
    from sklearn.pipeline import FeatureUnion
    from sklearn.preprocessing import Binarizer

    row_of_column = np.arange(width)
    if network.known is not None:
        row_of_column[:] = 0
        row_of_column[network.known] = np.arange(1, network.table_rows)
    table = embedding[row_of_column]

    if network.config.mean == "concepts":
        yield "once", Binarizer()
    if network.config.length:
        # A patient has max(n, length) places, and row 0 fills the empty ones. The
        # number of places is a column of its own. No count exceeds it, so dividing by
        # the maximum turns it into 1, and each count into its share of the places.
        places = _make_places_estimator(network.config.length, width)
        union = FeatureUnion([("places", places), ("counts", "passthrough")])
        yield "places", union
        yield "shares", _make_normalizer("max")
        fill = embedding[:1]
        table = np.vstack((fill, table - fill))
    else:
        yield "shares", _make_normalizer("l1")
    yield "mean", _make_linear(table.T)


def _make_places_estimator(length: int, width: int) -> Any:
    """Return an estimator of a patient's number of places, at least `length`."""
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import MinMaxScaler

    scaler = MinMaxScaler(feature_range=(length, _INFINITE), clip=True)
    at_least = _make_fitted(scaler, 1, scale_=np.ones(1), min_=np.zeros(1))
    return Pipeline([("n", _make_linear(np.ones((1, width)))), ("at_least", at_least)])


def _make_normalizer(norm: str) -> Any:
    """Return an estimator that divides each row by its norm."""
    from sklearn.preprocessing import Normalizer

    return Normalizer(norm)


def _make_linear(weight: np.ndarray) -> Any:
    """Return an estimator that multiplies by an (outputs, inputs) matrix."""
    from sklearn.decomposition import TruncatedSVD

    svd = TruncatedSVD(n_components=len(weight))
    return _make_fitted(svd, weight.shape[1], components_=weight.astype(np.float64))


# ---- classifiers ---------------------------------------------------------------------


class _Logit(NamedTuple):
    """The coefficients of one binary classifier, in which calibration is included."""

    coefficients: np.ndarray
    intercept: float

    def make_estimator(self, width: int, classes: np.ndarray) -> Any:
        """Return the classifier of two classes.

        Args:
            width: Number of features.
            classes: Names of the two classes, the predicted one last.
        """
        from sklearn.linear_model import LogisticRegression

        return _make_fitted(
            LogisticRegression(),
            width,
            classes_=classes,
            coef_=self.coefficients[None],
            intercept_=np.array([self.intercept]),
            n_iter_=np.array([1]),
        )


def _make_classifiers(model: Phenotyper, svms: LinearSVMs) -> Any:
    """Return a classifier with an estimator for each disease that was learned."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multioutput import MultiOutputClassifier

    logits = _make_logits(svms, model.platt)
    estimators = []
    for disease, classes in enumerate(svms.classes):
        of_disease = [
            logit
            for logit, (owner, _) in zip(logits, svms.classifiers, strict=True)
            if owner == disease
        ]
        if classes:
            estimators.append(_make_classifier(classes, of_disease, model.width))
    combined = MultiOutputClassifier(LogisticRegression())
    combined.estimators_ = estimators
    combined.n_features_in_ = model.width
    combined.classes_ = [estimator.classes_ for estimator in estimators]
    return combined


def _make_logits(svms: LinearSVMs, platt: np.ndarray | None) -> list[_Logit]:
    """Return the coefficients of each classifier's calibrated probability.

    The probability is sigmoid(a (w·x + c) + b), with the calibration a and b.
    """
    count = len(svms.classifiers)
    calibration = np.broadcast_to((1.0, 0.0) if platt is None else platt, (count, 2))
    return [
        _Logit(a * svms.weight[:, number], a * svms.intercept[number] + b)
        for number, (a, b) in enumerate(calibration)
    ]


def _make_classifier(
    classes: Sequence[int], logits: Sequence[_Logit], width: int
) -> Any:
    """Return the estimator of one disease.

    Args:
        classes: The classes that were learned.
        logits: The classifiers of the disease: none for one class, one for two, and one
            for each of three.
        width: Number of features.
    """
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    words = {value: word for word, value in LABELS.items()}
    names = np.array([words[value] for value in classes])
    if len(classes) == 1:
        constant = DummyClassifier(strategy="constant", constant=names[0])
        return constant.fit(np.zeros((1, width)), names)
    if len(classes) == 2:
        (logit,) = logits
        return logit.make_estimator(width, names)
    several = OneVsRestClassifier(LogisticRegression()).fit(np.zeros((3, 1)), names)
    several.estimators_ = [
        logit.make_estimator(width, np.array([0, 1])) for logit in logits
    ]
    several.n_features_in_ = width
    return several


def _make_fitted(estimator: Any, width: int, **values: Any) -> Any:
    """Return an estimator as if it had been fitted with these values.

    Args:
        estimator: An unfitted estimator.
        width: Number of features.
        values: Attributes of the fitted estimator.
    """
    for name, value in values.items():
        setattr(estimator, name, value)
    estimator.n_features_in_ = width
    return estimator


FORM = ExportForm(make_writer, options=("dictionary",), reads="patients")
