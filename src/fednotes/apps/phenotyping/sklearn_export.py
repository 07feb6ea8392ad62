"""A phenotyping model as a scikit-learn pipeline, saved by skops without a pickle.

    pipeline.skops   counts of concepts (patients, concepts), sparse or not, or vectors of text →
                     a list, a disease each, of (patients, classes) probabilities
    fednotes.json    the diseases in their order, and what the columns are

Its steps are scikit-learn's own, so it loads where nothing but that library is trusted:
a network's mean of vectors and its dense layer are linear maps (`TruncatedSVD`), and
its bias with the ReLU a `MinMaxScaler` that clips at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.phenotyping.cohort import LABELS
from fednotes.apps.phenotyping.features import ConceptFeatures, load_features
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.core.errors import ConfigError, needs
from fednotes.core.store import write_json
from fednotes.jobs.export_forms import ExportForm

_MOST = 1e30  # no value of a ReLU is larger


def writer(model: Path, dictionary: str | None = None) -> Callable[[Path], None]:
    """What fills a folder with a saved phenotyping model.

    dictionary: where the model's dictionary is, or its encoder, if it has moved. Raises
    ConfigError for a model without classifiers, ModelError, MissingExtra without
    scikit-learn or skops.
    """
    loaded = load_phenotyper(model)
    if loaded.machines is None:
        raise ConfigError(
            f"{model}: ends with stage 1: it has no classifiers of phenotypes"
        )
    with needs("skops", "sklearn"):
        import skops.io
        from sklearn.pipeline import Pipeline
    features = load_features(loaded.space.recipe, dictionary)
    names: tuple[str, ...] = ()
    if isinstance(features, ConceptFeatures):
        names = features.matcher.dictionary.concepts
        if features.space.width > len(
            names
        ):  # those of negated, family and hypothetical mentions
            names += tuple(f"{name} (not the patient's)" for name in names)
    pipeline = Pipeline([*_steps(loaded), ("diseases", _diseases(loaded))])
    both = loaded.phenotypes, loaded.machines.classes
    learnt = [name for name, of in zip(*both, strict=True) if of]
    facts = {"phenotypes": learnt, "columns": names or features.space.width}

    def fill(folder: Path) -> None:
        skops.io.dump(pipeline, folder / "pipeline.skops")
        write_json(folder / "fednotes.json", facts, private=False)

    return fill


def _steps(model: Phenotyper) -> Iterator[tuple[str, Any]]:
    """What makes a patient's features of counts or vectors."""
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import FeatureUnion, Pipeline
    from sklearn.preprocessing import Binarizer, MinMaxScaler, Normalizer

    network, width = model.network, model.space.width
    if network is None:
        if model.idf is not None:
            yield "tfidf", _set(TfidfTransformer(), width, idf_=model.idf)
        return
    config, state = (
        network.config,
        {n: v.detach().numpy() for n, v in network.state().items()},
    )
    if network.embedding is not None:
        rows = np.arange(width)
        if network.known is not None:  # all others share row 0
            rows[:] = 0
            rows[network.known] = np.arange(1, network.rows)
        if config.mean == "concepts":
            yield "once", Binarizer()
        table, fill = state["embedding"][rows], state["embedding"][:1]
        if (
            config.length
        ):  # places = max(n, length), of which row 0 has those that are empty
            at_least = MinMaxScaler(feature_range=(config.length, _MOST), clip=True)
            at_least = _set(at_least, 1, scale_=np.ones(1), min_=np.zeros(1))
            places = Pipeline(
                [("n", _linear(np.ones((1, width)))), ("at_least", at_least)]
            )
            yield (
                "places",
                FeatureUnion([("places", places), ("counts", "passthrough")]),
            )
            yield (
                "shares",
                Normalizer("max"),
            )  # of the places: 1; no count is above them
            table = np.vstack((fill, table - fill))
        else:
            yield "shares", Normalizer("l1")
        yield "mean", _linear(table.T)
    yield "dense", _linear(state["hidden_weight"])
    bias = state["hidden_bias"].astype(np.float64)
    clip = config.layer == "rectified"
    scaler = MinMaxScaler(feature_range=(0.0, _MOST), clip=clip)
    yield "rectified", _set(scaler, len(bias), scale_=np.ones(len(bias)), min_=bias)
    if model.scale == "l2":
        yield "length", Normalizer("l2")


def _linear(weight: np.ndarray) -> Any:
    """weight (outputs, inputs): x → weight · x."""
    from sklearn.decomposition import TruncatedSVD

    made = TruncatedSVD(n_components=len(weight))
    return _set(made, weight.shape[1], components_=weight.astype(np.float64))


def _diseases(model: Phenotyper) -> Any:
    """A classifier a disease; what nothing was learnt of is left out."""
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.multioutput import MultiOutputClassifier

    machines, words = model.machines, {value: word for word, value in LABELS.items()}
    assert machines is not None
    count = len(machines.machines)
    a, b = np.broadcast_to(
        (1.0, 0.0) if model.platt is None else model.platt, (count, 2)
    ).T
    logits = []
    for k in range(count):  # sigmoid(a (w·x + c) + b)
        coef, intercept = (
            a[k] * machines.weight[:, k],
            a[k] * machines.intercept[k] + b[k],
        )
        binary = {"coef_": coef[None], "intercept_": np.array([intercept])}
        logits.append((LogisticRegression(), {**binary, "n_iter_": np.array([1])}))
    made, width = MultiOutputClassifier(LogisticRegression()), model.width
    made.estimators_ = []
    for disease, each in enumerate(machines.classes):
        own = [
            logits[k] for k, (of, _) in enumerate(machines.machines) if of == disease
        ]
        names = np.array([words[value] for value in each])
        if len(each) == 1:
            constant = DummyClassifier(strategy="constant", constant=names[0])
            made.estimators_.append(constant.fit(np.zeros((1, width)), names))
        elif len(each) == 2:
            ((one, binary),) = own
            made.estimators_.append(_set(one, width, classes_=names, **binary))
        elif each:
            several = OneVsRestClassifier(LogisticRegression()).fit(
                np.zeros((3, 1)), names
            )
            several.estimators_ = [
                _set(one, width, classes_=np.array([0, 1]), **binary)
                for one, binary in own
            ]
            several.n_features_in_ = width
            made.estimators_.append(several)
    made.n_features_in_ = width
    made.classes_ = [one.classes_ for one in made.estimators_]
    return made


def _set(made: Any, width: int, **values: Any) -> Any:
    """As if it were fitted, with these values."""
    for name, value in {**values, "n_features_in_": width}.items():
        setattr(made, name, value)
    return made


FORM = ExportForm(writer, options=("dictionary",), of_patients=True)
