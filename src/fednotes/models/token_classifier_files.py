"""Directories that the library opens as `…ForTokenClassification`.

A new model takes a directory's encoder. A trained one, saved here or elsewhere, is taken whole:
its labels may stand in any order in `config.json`, the classifier's rows are put in the order of
the tag set, so the same labels get the same scores as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.parsing import read_json
from fednotes.core.types import Scheme, TagSet
from fednotes.models.pretrained import open_config, open_pretrained, require_complete

AUTO = "AutoModelForTokenClassification"
NEVER = -100.0  # bias of a tag that the saved model does not know: it is not predicted


@lru_cache(maxsize=2)
def opened(path: Path, tags: tuple[str, ...], dropout: float | None, stamp: Any) -> tuple[Any, Any]:
    """Tokenizer and model to be copied. `stamp` makes a directory that changed a new one."""
    settings: dict[str, Any] = {} if dropout is None else _rates(open_config(path), dropout)
    tokenizer, model, missing = open_pretrained(
        path,
        AUTO,
        num_labels=len(tags),
        id2label=dict(enumerate(tags)),
        label2id={tag: i for i, tag in enumerate(tags)},
        ignore_mismatched_sizes=True,  # the classifier of an earlier tag set
        **settings,
    )
    require_complete(path, tuple(n for n in missing if not n.startswith("classifier.")))
    require_classifier(path, model)
    return tokenizer, model.requires_grad_(False)


def _rates(config: Any, dropout: float) -> dict[str, float]:
    """Every dropout rate that a configuration has, set to this one."""
    return {
        name: dropout
        for name, value in config.to_dict().items()
        if "dropout" in name and type(value) in (int, float, type(None))
    }


def trained_names(where: str, model: Any, train: str, top: int) -> set[str]:
    """Names of a model's parameters that are trained; see `TokenClassifierConfig`.

    Raises ConfigError where there are no such layers. where: how messages call the model.
    """
    named = dict(model.named_parameters())
    if train == "all":
        return set(named)
    if train == "encoder":
        words = model.get_input_embeddings().weight
        return {name for name, parameter in named.items() if parameter is not words}
    depth = int(getattr(model.config, "num_hidden_layers", 0))
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if not stacks:
        raise ConfigError(f"{where}: its layers cannot be told apart; train = 'encoder'")
    if top > depth:
        raise ConfigError(f"top = {top}: {where} has {depth} layers")
    upper = {id(p) for stack in stacks for p in stack[-top:].parameters()}
    below = f"{model.base_model_prefix}."
    return {n for n, p in named.items() if id(p) in upper or not n.startswith(below)}


def require_classifier(where: str | Path, model: Any) -> None:
    """Raises ModelError where the model is no encoder with a linear classifier on top."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{where}: is an encoder-decoder; give an encoder")
    if not isinstance(getattr(model, "classifier", None), nn.Linear):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(f"{where}: models of the kind {kind!r} have no linear token classifier")


def saved_by_us(directory: Path) -> bool:
    """Whether `save_model` wrote this Hugging Face directory."""
    try:
        facts = read_json(directory / "config.json", strict=False)
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "fednotes" in facts


def open_trained(directory: Path) -> tuple[Any, Any, TagSet, dict[str, Any]]:
    """Tokenizer, model, its tag set, and the settings that `TokenClassifier.save` left there.

    Raises ModelError (another kind of model, damaged, pickled or missing weights, labels that
    are no tags), MissingExtra.
    """
    facts = _facts(directory)
    names = facts.get("architectures") or ["?"]
    if not str(names[0]).endswith("ForTokenClassification"):
        raise ModelError(
            f"{directory}: holds a {names[0]}, which does not find entities yet; fine-tune it: "
            'a job with [model] kind = "token-classifier" and this folder as its encoder'
        )
    # Shapes that do not fit count as missing, with a clearer line than the library's.
    tokenizer, model, missing = open_pretrained(directory, AUTO, ignore_mismatched_sizes=True)
    require_complete(directory, missing)
    require_classifier(directory, model)
    tagset, rows = tagset_of(directory, model.config.id2label, model.classifier.out_features)
    _order(model, tagset, rows)
    own = facts.get("fednotes", {})
    if not isinstance(own, dict):
        raise ModelError(f"{directory / 'config.json'}: damaged ('fednotes' is no table)")
    return tokenizer, model, tagset, {k: v for k, v in own.items() if k != "version"}


def tagset_of(
    directory: Path, labels: Mapping[int, str], size: int
) -> tuple[TagSet, tuple[int, ...]]:
    """The tag set that some labels write, and the classifier's row of each of its tags.

    labels: row → "O", "B-x", "I-x", "E-x" or "S-x". Types are in the order of their first row;
    the scheme is the smallest that has all prefixes. A tag that is not among them has row -1.
    Raises ModelError for other labels.
    """
    row_of = {label: row for row, label in sorted(labels.items())}
    types: dict[str, None] = {}
    prefixes = set()
    for label in row_of:
        prefix, dash, name = label.partition("-")
        if label != "O" and (prefix not in ("B", "I", "E", "S") or not dash or not name):
            raise ModelError(
                f"{directory}: its label {label!r} is no tag; O, B-…, I-… (E-…, S-…) are needed: "
                "name them so in config.json (id2label), if that is what the model was trained on"
            )
        if label != "O":
            types.setdefault(name)
            prefixes.add(prefix)
    if not types or "O" not in row_of or len(row_of) != size or max(labels, default=0) >= size:
        raise ModelError(
            f"{directory}: {len(row_of)} distinct labels, {len(types)} of them entity types, for a "
            f"classifier of {size} rows: config.json (id2label) must name each row, one of them O"
        )
    scheme: Scheme = "BIOES" if prefixes & {"E", "S"} else "BIO" if "B" in prefixes else "IO"
    tagset = TagSet(tuple(types), scheme)
    return tagset, tuple(row_of.get(tag, -1) for tag in tagset.tags)


@torch.no_grad()
def _order(model: Any, tagset: TagSet, rows: tuple[int, ...]) -> None:
    """Put the classifier's rows and the labels in the tag set's order."""
    old: nn.Linear = model.classifier
    if rows != tuple(range(old.out_features)):
        at = torch.tensor(rows)
        new = nn.utils.skip_init(nn.Linear, old.in_features, len(rows))
        new.weight.copy_(torch.where((at < 0)[:, None], 0.0, old.weight[at]))
        bias = torch.zeros(old.out_features) if old.bias is None else old.bias
        new.bias.copy_(torch.where(at < 0, NEVER, bias[at]))
        model.classifier = new
    model.num_labels = len(rows)
    model.config.id2label = dict(enumerate(tagset.tags))
    model.config.label2id = {tag: i for i, tag in enumerate(tagset.tags)}


def _facts(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        facts = read_json(file, strict=False)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{file}: damaged (not JSON: {error}); copy the folder again") from error
    if not isinstance(facts, dict):
        raise ModelError(f"{file}: not a model's configuration")
    return facts
