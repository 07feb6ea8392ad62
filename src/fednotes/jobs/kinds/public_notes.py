"""Read the public notes of a job, which all of its sites have."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from fednotes.core.errors import ConfigError, naming_place
from fednotes.core.types import PublicNotes
from fednotes.data import synthetic
from fednotes.data.formats import examine
from fednotes.jobs.job import Job, Sites

_SYNTHETIC_SENTENCES = 200


def read_public_notes(job: Job, sites: Sites) -> Sites:
    """Return the sites with the public notes that each site's table names.

    Simulated sites of [silos] have the public notes of the first table, and generated
    sites have the texts of one more generated site.

    Raises:
        ConfigError: A site's table names no public notes.
        DataError: The notes cannot be read.
    """
    if job.synthetic is not None:
        public = _generate(job.seed)
        return replace(
            sites, data=tuple(replace(site, public=public) for site in sites.data)
        )

    # Cached, because sites may share a file.
    @cache
    def read(path: Path) -> PublicNotes:
        """Return the texts of a file or folder."""
        documents, problems = examine(path)
        # Problems of the annotation do not matter, because only the text is used.
        problems.raise_if_refused("skip", documents)
        return PublicNotes.of(documents)

    data = []
    for site in sites.data:
        name = site.id if site.id in job.sites else next(iter(job.sites))
        key = f"sites.{name}.public"
        text = job.sites[name].public
        if not text:
            raise ConfigError(
                f"{key}: method = {job.method!r} needs public notes, the same at every "
                "site: give the path of a file or folder of notes that anybody may read"
            )
        with naming_place(f"site {site.id!r}", ConfigError):
            path = job.locate(text, key)
        data.append(replace(site, public=read(path)))
    return replace(sites, data=tuple(data))


def _generate(seed: int) -> PublicNotes:
    """Return generated public notes, which differ from those of generated sites."""
    (site,) = synthetic.generate(1, _SYNTHETIC_SENTENCES, seed + 1_000_003)
    return PublicNotes.of(site.data.train)
