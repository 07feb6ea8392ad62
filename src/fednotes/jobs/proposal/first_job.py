"""Make a proposed job, check its settings and write its file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fednotes.core.errors import MissingExtra, ModelError, ParameterError
from fednotes.core.store import write_text
from fednotes.encoders.pretrained import find_encoder_directory
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.proposal.decisions import MINILM, Choices, Proposal, propose
from fednotes.jobs.proposal.facts import Facts
from fednotes.jobs.proposal.writing import format_job


@dataclass(frozen=True)
class FirstJob:
    """A proposed job and its file.

    Attributes:
        proposal: The facts about the notes, and each decision with its reason.
        text: The job's file.
        path: Path of the file; None if it was not written.
    """

    proposal: Proposal
    text: str = field(repr=False)
    path: Path | None = None

    @property
    def table(self) -> Mapping[str, Any]:
        """The job's tables, as `fn.job` and `fn.simulate` accept them."""
        return tomllib.loads(self.text)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: facts, decisions with reasons, and the job."""
        proposal = self.proposal
        return {
            "sites": [site.to_dict() for site in proposal.facts.sites],
            "method": proposal.method._asdict(),
            "model": proposal.model._asdict(),
            "label_maps": [asdict(each) for each in proposal.label_maps],
            "silos": None if proposal.silos is None else asdict(proposal.silos),
            "remarks": list(proposal.remarks),
            "job": dict(self.table),
            "path": None if self.path is None else str(self.path),
        }


def has_minilm() -> bool:
    """Return whether the encoder "minilm" and its packages are installed."""
    try:
        find_encoder_directory(MINILM)
    except MissingExtra:
        return False
    return find_spec("transformers") is not None


def require_output(out: Path | None, *, overwrite: bool) -> None:
    """Raise ParameterError if a job file must not, or cannot, be written."""
    if out is None:
        return
    if not overwrite and os.path.lexists(out):
        raise ParameterError(
            f"{out} exists: choose another `out`, or set `overwrite` to replace it"
        )
    # Missing folders will be created in the nearest one that exists.
    folder = next(each for each in out.absolute().parents if os.path.exists(each))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ParameterError(
            f"`out` {out}: no file can be written in {folder}: choose another `out`"
        )


def make_first_job(
    facts: Facts, choices: Choices, out: Path | None, *, overwrite: bool = False
) -> FirstJob:
    """Propose a job, and write its file.

    Args:
        facts: The facts about the notes.
        choices: The user's decisions.
        out: The file; None writes none.
        overwrite: Whether an existing file may be replaced.

    Raises:
        ConfigError: A choice does not match the notes, or the file exists.
        DataError: There are too few notes.
        MissingExtra: The job needs an encoder, and none is installed.
        FednotesError: The file cannot be written.
    """
    require_output(out, overwrite=overwrite)
    _require_encoder(choices.encoder)
    proposal = propose(facts, choices, has_minilm=has_minilm())
    if proposal.model.value == MINILM and not has_minilm():
        raise MissingExtra("transformers", "transformers")
    folder = Path() if out is None else out.parent
    text = format_job(proposal, folder)
    name = "job" if out is None else out.stem
    parse_job(tomllib.loads(text), name, folder.resolve(), str(out or name))
    if out is not None:
        write_text(out, text, private=False)
    return FirstJob(proposal, text, out)


def _require_encoder(encoder: str) -> None:
    """Raise ParameterError if an encoder is a directory that does not exist."""
    if encoder in ("", "none", MINILM):
        return
    try:
        find_encoder_directory(encoder)
    except ModelError as error:
        raise ParameterError(
            f"`encoder` {encoder}: no such directory: give a Hugging Face directory, "
            '"minilm", or "none" for a light tagger'
        ) from error
