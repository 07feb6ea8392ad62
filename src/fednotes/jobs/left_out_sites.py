"""Choose the sites that the condition "left-out" leaves out, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fednotes.core.errors import ConfigError
from fednotes.core.types import SiteData
from fednotes.core.wording import format_count
from fednotes.jobs.job import Job

# When one of them is left out, two must remain for a federation.
_FEWEST_SITES = 3


def choose_left_out_sites(job: Job, sites: Sequence[SiteData]) -> list[SiteData]:
    """Return the sites on whose test data models of the other sites can be scored.

    Args:
        job: The job.
        sites: Data of all its sites.

    Raises:
        ConfigError: There are too few sites, or no site can be left out.
    """
    if len(sites) < _FEWEST_SITES:
        raise ConfigError(
            f'conditions has "left-out", but the job has '
            f"{format_count(len(sites), 'site')}: it needs {_FEWEST_SITES} or more, so "
            "that two train together while one is left out: give more sites, or remove "
            '"left-out" from conditions'
        )
    chosen = [
        site
        for site in sites
        if site.test and list_shared_types(job, site, list_others(sites, site))
    ]
    if not chosen:
        reasons = "; ".join(explain_others_not_left_out(job, sites))
        raise ConfigError(
            f'conditions has "left-out", but no site can be left out: {reasons}; use '
            "label_map to give types that mean the same the same name"
        )
    return chosen


def explain_others_not_left_out(job: Job, sites: Sequence[SiteData]) -> Iterator[str]:
    """Yield the reason for each site that cannot be left out.

    Args:
        job: The job.
        sites: Data of all its sites.
    """
    for site in sites:
        if not site.test:
            yield f"{site.id} is not left out: it has no test data"
        elif not list_shared_types(job, site, list_others(sites, site)):
            yield f"{site.id} is not left out: no other site annotates one of its types"


def list_others(sites: Sequence[SiteData], site: SiteData) -> list[SiteData]:
    """Return all sites except one."""
    return [other for other in sites if other.id != site.id]


def list_shared_types(
    job: Job, site: SiteData, others: Sequence[SiteData]
) -> tuple[str, ...]:
    """Return the types on which models of other sites can be scored at a site.

    Args:
        job: The job.
        site: The site.
        others: Data of the other sites.
    """
    learned = {name for other in others for name in other.tags.types}
    judged: Sequence[str] = job.module.inner_site_class.list_judged_types(site)
    return tuple(name for name in judged if name in learned)
