"""A recipe gives the numbers of training again, and says where its dictionary is another one."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednotes.core.errors import ConfigError, ModelError
from fednotes.patients.cohort import Bags, Vectors
from fednotes.patients.concepts import Notes
from fednotes.patients.features import ConceptsConfig, TextConfig, features_for, opened

NOTES = {"p": ["Has gout and a cough.", "No gout."], "q": ["Well."], "r": ["cough " * 9]}


def features_of(
    recipe: Mapping[str, Any], notes: Notes, dictionary: str | None = None
) -> tuple[tuple[str, ...], Bags | Vectors]:
    return opened(recipe, dictionary).make(notes)[:2]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "terms.tsv"
    path.write_text("C1\tgout\nC2\tcough\n")
    return path


@pytest.mark.parametrize("context", ["drop", "off", "mark"])
def test_a_recipe_gives_the_same_bags(table: Path, context: str) -> None:
    """Through JSON, as a saved model has it; the bags are read off the texts."""
    config = ConceptsConfig("terms.tsv", context=context, most=5)  # type: ignore[arg-type]
    features = features_for(config, table.parent)
    recipe = json.loads(json.dumps(dict(features.space.recipe)))
    assert recipe == {**features.space.recipe, "dictionary": str(table), "names": 2}
    patients, bags = features_of(recipe, NOTES)
    assert patients == ("p", "q")  # r has more than five
    assert isinstance(bags, Bags)
    assert bags.concepts.tolist() == {"drop": [0, 1], "off": [0, 1, 0], "mark": [0, 1, 2]}[context]
    assert bags.vocabulary == features.space.width == (4 if context == "mark" else 2)


def test_another_or_a_missing_dictionary(table: Path, tmp_path: Path) -> None:
    recipe = features_for(ConceptsConfig(str(table)), tmp_path).space.recipe
    moved = table.rename(tmp_path / "moved.tsv")
    with pytest.raises(ModelError, match=r"terms\.tsv cannot be read .*--dictionary"):
        features_of(recipe, NOTES)
    assert features_of(recipe, NOTES, dictionary=str(moved))[0] == ("p", "q", "r")
    moved.write_text("C1\tgout\nC3\tcough\n")
    with pytest.raises(ModelError, match=r"moved\.tsv is not the one .*terms\.tsv.*--dictionary"):
        features_of(recipe, NOTES, dictionary=str(moved))
    with pytest.raises(ModelError, match="unknown kind 'x'"):
        features_of({"kind": "x"}, NOTES)


def test_a_variable_stays_one(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMS_HERE", str(table.parent))
    recipe = features_for(ConceptsConfig("$TERMS_HERE/terms.tsv"), Path()).space.recipe
    assert recipe["dictionary"] == "$TERMS_HERE/terms.tsv"
    assert len(features_of(recipe, NOTES)[0]) == 3
    monkeypatch.delenv("TERMS_HERE")
    with pytest.raises(ModelError, match=r"TERMS_HERE is not set.*--dictionary"):
        features_of(recipe, NOTES)
    with pytest.raises(ConfigError, match="TERMS_HERE is not set"):
        features_for(ConceptsConfig("$TERMS_HERE/terms.tsv"), Path())


def test_the_generated_dictionary_by_its_name(tmp_path: Path) -> None:
    features = features_for(ConceptsConfig("synthetic"), tmp_path)
    patients, bags = features_of(features.space.recipe, {"x": ["History of gout.", "Denies gout."]})
    assert isinstance(bags, Bags)
    assert (patients, len(bags.concepts)) == (("x",), 1)


class Encoder:
    """Each word is (its number of letters, 1) in both of two layers; counts its calls."""

    fingerprint, layers, dim = "letters", 2, 2

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, sentences: list[list[str]]) -> np.ndarray:
        self.calls += 1
        words = [word for sentence in sentences for word in sentence]
        return np.array([[[len(w), 1]] * 2 for w in words], dtype=np.float16)


def test_vectors_are_kept_and_named_by_their_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over notes of the mean over words, by hand: ((3+4+3+1+5+1)/6 + (2+4+1)/3) / 2."""
    encoder = Encoder()
    monkeypatch.setattr("fednotes.patients.features.load_encoder", lambda spec: encoder)
    features = features_for(TextConfig("x"), tmp_path)
    told: list[tuple[int, int]] = []
    made = features.make({**NOTES, "e": [" "]}, lambda *n: told.append(n), tmp_path / "cache")
    assert isinstance(made.values, Vectors)
    mean = ((3 + 4 + 3 + 1 + 5 + 1) / 6 + (2 + 4 + 1) / 3) / 2
    assert made.values.values[0].tolist() == pytest.approx([mean, 1, mean, 1], rel=1e-3)
    assert made.values.values[3].tolist() == [0] * 4
    assert (made.counts["without"], made.counts["notes"], told[-1]) == (1, 5, (4, 4))
    calls = encoder.calls
    again = features.make({**NOTES, "e": [" "]}, None, tmp_path / "cache").values
    assert isinstance(again, Vectors)
    assert (encoder.calls, again.values.tobytes()) == (calls, made.values.values.tobytes())
    (folder,) = (tmp_path / "cache").iterdir()
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())} == {0o700, 0o600}
    encoder.fingerprint = "others"
    with pytest.raises(ModelError, match=r"the encoder x is not the one .*--backbone"):
        features_of(features.space.recipe, NOTES)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"most": "5"}, "recipe most = '5': expected a whole number"),
        ({"most": 0}, "recipe: most = 0: at least 1"),
        ({"context": "no"}, "recipe context = 'no': expected one of"),
        ({"format": 3}, "recipe format = 3"),
        ({"dictionary": 7}, "recipe dictionary = 7: expected text"),
        ({"dictionary": ""}, "name the file of a dictionary"),
        ({"scopes": "EXACT"}, "recipe scopes = 'EXACT': expected a list"),
        ({"scopes": [["EXACT"]]}, "recipe scopes = .*expected text"),
        ({"fingerprint": 3}, "recipe fingerprint = 3: expected text"),
        ({"mode": "x"}, "unknown key 'mode'"),
        ({"kind": "text"}, "the key 'encoder' is missing"),
        ({"kind": ["text"]}, "unknown kind"),
    ],
)
def test_values_that_no_recipe_has(table: Path, changes: dict[str, object], told: str) -> None:
    recipe = features_for(ConceptsConfig(str(table)), Path()).space.recipe
    with pytest.raises(ModelError, match=told):
        features_of({**recipe, **changes}, NOTES)
