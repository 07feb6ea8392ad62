"""Any kind of model from one TOML table.

kind = "tagger"           light: a CRF on frozen features (default)
kind = "encoder-tagger"   a frozen encoder tuned by prompts or LoRA, a CRF on top
kind = "prompt-bart"      a prompt-tuned encoder-decoder that points into the text
kind = "token-classifier" an encoder fine-tuned whole, a softmax for each word
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.settings import build
from fednotes.core.types import TagSet
from fednotes.models.encoder_tagger import EncoderTaggerConfig, build_encoder_tagger
from fednotes.models.model import Model
from fednotes.models.prompt_bart import PromptBartConfig, build_prompt_bart
from fednotes.models.tagger import build_tagger
from fednotes.models.tagger_config import TaggerConfig, tagger_config
from fednotes.models.token_classifier import TokenClassifierConfig, build_token_classifier

ModelConfig = TaggerConfig | EncoderTaggerConfig | PromptBartConfig | TokenClassifierConfig
# In the order of ModelConfig.
KINDS = ("tagger", "encoder-tagger", "prompt-bart", "token-classifier")


def kind_of(config: ModelConfig) -> str:
    """The `kind` of a specification."""
    return "tagger" if isinstance(config, TaggerConfig) else config.kind


def model_config(table: Mapping[str, Any], where: str = "model") -> ModelConfig:
    """A specification from a TOML table; its key `kind` says of what (default "tagger").

    where: how messages call the table. Raises ConfigError for an unknown kind or key (with
    the nearest name), a value of the wrong type or an impossible one.
    """
    kind = table.get("kind", "tagger")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: unknown kind {kind!r}; {nearest(str(kind), KINDS)}")
    if kind == "tagger":
        settings = {key: value for key, value in table.items() if key != "kind"}
        return tagger_config(settings, where)
    made: ModelConfig = build(model_class(kind), table, where)
    return made


def model_class(kind: str) -> type[Any]:
    """The class of a kind's specification."""
    found: type[Any] = dict(zip(KINDS, get_args(ModelConfig), strict=True))[kind]
    return found


def build_model(
    config: ModelConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> Model:
    """A new model; equal seeds give equal initial values of all that tag sets share.

    The global random state is left as it was. Raises ConfigError (no types, no input),
    ModelError (word vectors, encoder or backbone missing or damaged), MissingExtra.
    """
    if isinstance(config, TaggerConfig):
        return build_tagger(config, tagset, seed, device)
    if isinstance(config, EncoderTaggerConfig):
        return build_encoder_tagger(config, tagset, seed, device)
    if isinstance(config, TokenClassifierConfig):
        return build_token_classifier(config, tagset, seed, device)
    return build_prompt_bart(config, tagset, seed, device)
