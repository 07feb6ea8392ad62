"""Sites of FedNER with differential privacy, which hold a few notes of patients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tiny_notes import tiny_site

from fednotes.core.types import SiteData
from fednotes.methods.fedner import METHOD as FEDNER
from fednotes.methods.private import DPMethod
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import DPSite

MODEL = {
    "hashed_words": 8, "word_dim": 3, "char_dim": 3, "char_filters": 3, "cnn_filters": 4,
    "lstm_units": 3,
}  # fmt: skip
HASHED_MODEL = MODEL | {
    "hashed_prefixes": 5, "hashed_suffixes": 7, "hashed_shapes": 4, "hashes": 2,
    "cnn_layers": 2, "cnn_pieces": 2,
}  # fmt: skip
SECRET = bytes(range(32))


def patients(number: int = 0, size: int = 6, owners: str = "aabbcc") -> SiteData:
    """Return a site whose notes belong to patients, each named by a letter."""
    site = tiny_site(number, size)
    owned = tuple(
        replace(d, patient=p) for d, p in zip(site.train, owners, strict=True)
    )
    return replace(site, train=owned)


def config_of(site: SiteData, **settings: Any) -> Any:
    privacy = {"noise": 1.5, "rate": 0.5, "clip": 0.25} | settings.pop("privacy", {})
    options = {"epochs": 3, "batch_size": 4, "select": "last", **settings}
    options.setdefault("model", FEDNER.read_model_config(MODEL))
    config = FEDNER.config_class(
        privacy=Privacy(**privacy), seed=options.pop("seed", 5), **options
    )
    return replace(FEDNER.configure(config, [site]), sites=3)


def make_private_site(
    site: SiteData | None = None,
    secret: bytes | None = SECRET,
    name_request: Any = bytes,
    **settings: Any,
) -> DPSite:
    """Return a site that trains with differential privacy. secret: None draws a new
    one."""
    site, kind = site or patients(), DPMethod(FEDNER).make_site
    arguments: Any = {"secret": secret, "name_request": name_request}
    arguments["directory"] = settings.pop("directory", None)
    private_site: DPSite = kind(site, config_of(site, **settings), **arguments)
    return private_site


def theta(site: DPSite, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Return parameters that a server may send."""
    return {name: value.detach() * factor for name, value in site.site.shared.items()}
