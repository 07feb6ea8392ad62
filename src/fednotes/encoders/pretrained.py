"""Local Hugging Face directories, opened in one way: quiet, from safetensors alone, no network.

Every module that reads such a directory (frozen encoders, taggers, language models, BART) opens
it here, so that a damaged directory or one with pickled weights gives the same clear line.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fednotes.core.errors import MissingExtra, ModelError
from fednotes.core.parsing import read_json

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def open_pretrained(
    directory: Path, auto: str, **settings: Any
) -> tuple[Any, Any, tuple[str, ...]]:
    """Tokenizer and model of a directory, and the names of weights that it does not hold.

    auto: a class of transformers with `from_pretrained` ("AutoModel", "AutoModelForMaskedLM"
    …). settings go to it (num_labels, id2label, attn_implementation …); float32 and its own
    configuration unless they say otherwise. The model is in evaluation mode, on the CPU.

    The third value are parameters that were missing or of another shape, sorted: they have
    initial values of the library's own kind that are the same each time. The caller decides
    what may be missing and draws those from its own seed. The global random state is kept.

    Raises ModelError (no such directory, no safetensors, damaged, a slow tokenizer, one that
    does not fit the model), MissingExtra.
    """
    check_weights(directory)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        tokenizer = _named(directory, lambda: _tokenizer(directory))
        options = {"dtype": torch.float32, **_LOCAL, **settings}
        model, report = _named(
            directory,
            lambda: _class(auto).from_pretrained(
                directory, use_safetensors=True, output_loading_info=True, **options
            ),
        )
    require_fit(directory, tokenizer, model)
    new = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    return tokenizer, model.eval(), tuple(sorted(new))


def open_tokenizer(directory: Path) -> Any:
    """The fast tokenizer of a directory, whether or not there are weights beside it.

    Raises ModelError (none there, damaged, a slow one), MissingExtra.
    """
    with quiet():
        return _named(directory, lambda: _tokenizer(directory))


def open_config(directory: Path) -> Any:
    """The configuration of a directory (its `model_type` says what kind of model it is).

    Raises ModelError (none there, damaged, of an unknown kind), MissingExtra.
    """
    with quiet():
        return _named(directory, lambda: _class("AutoConfig").from_pretrained(directory, **_LOCAL))


def write_pretrained(folder: Path, model: Any, tokenizer: Any) -> None:
    """Model, configuration and tokenizer in the library's own layout, into an empty folder.

    Nothing in it says where the model came from on this machine.
    """
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"  # the library writes the tokenizer's place into it
    settings = read_json(file, strict=False)
    kept = {k: v for k, v in settings.items() if not re.search("path|_dir|name_or", k)}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


def require_fit(directory: Path, tokenizer: Any, model: Any) -> None:
    """Every id of the tokenizer has a row in the model's table. Raises ModelError."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(table, "weight", None)
    if weight is None or weight.dim() != 2:
        return  # no text model; whoever runs it will say so
    tokens, rows = max(tokenizer.get_vocab().values(), default=-1) + 1, len(weight)
    if tokens > rows:
        raise ModelError(
            f"{directory}: the tokenizer has {tokens} tokens, the model's vocabulary {rows}: "
            "they are not of one model; put the tokenizer that the model was trained with there"
        )


def check_weights(directory: Path) -> None:
    """Refuse pickled weights before any library looks at them. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(
            f"{directory}: no such directory; give a Hugging Face directory (config.json, "
            "model.safetensors, tokenizer.json)"
        )
    if any(directory.glob("*.safetensors")):
        return
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ModelError(
            f"{directory}: has pickled weights only, which can run code when opened; where you "
            "trust them, convert them once with transformers: "
            "AutoModel.from_pretrained(OLD).save_pretrained(NEW), AutoTokenizer the same"
        )
    raise ModelError(f"{directory}: no *.safetensors file beside config.json")


def require_complete(directory: Path, missing: tuple[str, ...]) -> None:
    """No weight may be left to chance. Raises ModelError that names the first."""
    if missing:
        raise ModelError(
            f"{directory}: the weights lack {missing[0]!r} and {len(missing) - 1} more"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No bars, no advice, while the library loads; its settings are put back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.utils import logging
        except ImportError:
            raise MissingExtra("transformers", "transformers") from None
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def _tokenizer(directory: Path) -> Any:
    auto = _class("AutoTokenizer")
    tokenizer = auto.from_pretrained(directory, **_LOCAL)
    if getattr(tokenizer, "add_prefix_space", None) is False:
        # Byte-level tokenisers take words one by one only with their space before.
        tokenizer = auto.from_pretrained(directory, add_prefix_space=True, **_LOCAL)
    if not tokenizer.is_fast:
        raise ModelError(f"{directory}: needs a fast tokeniser (tokenizer.json)")
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        # Where its files are missing the library makes one that knows marks alone.
        raise ModelError(
            f"{directory}: no tokenizer beside config.json: put the model's tokenizer.json there"
        )
    return tokenizer


def _class(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "transformers") from None
    return getattr(transformers, name)


def _named(directory: Path, load: Callable[[], Any]) -> Any:
    """What `load` gives; its errors as one line that names the directory."""
    try:
        return load()
    except (ModelError, MissingExtra):
        raise
    except Exception as error:  # every library below has its own way to fail
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{directory}: cannot be loaded ({reason}): copy the directory again"
        ) from error
