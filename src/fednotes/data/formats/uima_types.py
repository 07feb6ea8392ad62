"""Type systems of UIMA, which declare the types and features of annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.data.formats.layers import Layer
from fednotes.data.formats.xml_files import parse_elements

STRING = "uima.cas.String"
_MAX_DEPTH = 100  # types between an annotation and the root of all types
_TEXTS = ("name", "supertypeName", "rangeTypeName")


@dataclass
class TypeSystem:
    """The types of a file.

    Attributes:
        supertypes: The name of each type's supertype.
        features: The range of each feature, by type and name.
    """

    supertypes: dict[str, str] = field(default_factory=dict)
    features: dict[str, dict[str, str]] = field(default_factory=dict)

    def list_ancestors(self, type: str) -> list[str]:
        """Return a type and its supertypes, the nearest first."""
        line = [type]
        above = self.supertypes.get(type)
        while above and len(line) < _MAX_DEPTH:
            line.append(above)
            above = self.supertypes.get(above)
        return line

    def is_derived_from(self, type: str, ancestor: str) -> bool:
        """Return whether a type is another one, or is derived from it."""
        return ancestor in self.list_ancestors(type)

    def find_layer(self, type: str, feature: str) -> Layer | None:
        """Return the layer that declares a feature of a type; None if none does."""
        for ancestor in self.list_ancestors(type):
            if feature in self.features.get(ancestor, {}):
                return Layer(ancestor, feature)
        return None

    def has_string(self, layer: Layer) -> bool:
        """Return whether a feature is a string, perhaps with a set of values."""
        return self.is_derived_from(self.features[layer.type][layer.feature], STRING)

    def list_layers(self) -> list[Layer]:
        """Return a layer for each string feature of each annotation type."""
        layers = [
            Layer(type, feature)
            for type, features in self.features.items()
            if self.is_derived_from(type, "uima.tcas.Annotation")
            for feature in features
        ]
        return [layer for layer in layers if self.has_string(layer)]


def parse_type_system(file: BinaryIO, path: Path) -> TypeSystem:
    """Return the type system of an XML file.

    Args:
        file: The open file.
        path: Its path, for messages.

    Raises:
        DataError: It is not XML, is truncated or unsafe, or declares more types than
            any program has.
    """
    types = TypeSystem()
    description: dict[str, str] = {}  # the texts of the newest type or feature
    newest_type = ""
    for element in parse_elements(file, path, _TEXTS, can_have_doctype=False):
        is_start = element.attributes is not None
        if is_start:
            if element.name in ("typeDescription", "featureDescription"):
                description = {}
            continue
        if element.name in _TEXTS:
            description[element.name] = element.text.strip()
            # A type is added at its supertype, because its features end before it does.
            # Its name comes before its supertype in UIMA's schema.
            if element.name == "supertypeName":
                newest_type = _add_type(types, description)
        elif element.name == "featureDescription":
            _add_feature(types, newest_type, description)
        features = types.features.get(newest_type, {})
        largest = max(len(types.supertypes), len(features))
        if largest > bounds.ENTITY_TYPES:
            raise DataError.at(
                path,
                element.line,
                f"more than {bounds.ENTITY_TYPES:,} types, or features of a type: "
                "check that the file is a type system of UIMA",
            )
    return types


def _add_type(types: TypeSystem, description: Mapping[str, str]) -> str:
    """Add a type; return its name.

    Args:
        types: The type system.
        description: The texts of its description, by element.
    """
    name = description.get("name", "")
    types.supertypes[name] = description["supertypeName"]
    types.features.setdefault(name, {})
    return name


def _add_feature(types: TypeSystem, type: str, description: Mapping[str, str]) -> None:
    """Add a feature of a type, unless it has no name.

    Args:
        types: The type system.
        type: The name of the type.
        description: The texts of its description, by element.
    """
    name = description.get("name", "")
    if name and type in types.features:
        types.features[type][name] = description.get("rangeTypeName", "")
