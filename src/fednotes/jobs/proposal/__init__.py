"""Propose a first job for the notes of sites: `fednotes init`.

places        which of the paths are sites, and which files are their parts
folder_content  what lies beside the sites in a folder
facts         what the notes of each site hold: counts, never text
decisions     a method, a model and the sites' tables: a function of the facts
writing       the job's file, with a reason for each choice
first_job     the proposal with its file
"""

from fednotes.jobs.label_maps import LabelMap, find_label_maps
from fednotes.jobs.proposal.decisions import Choices, Proposal, list_methods, propose
from fednotes.jobs.proposal.facts import Facts, ReadOptions, SiteFacts, read_facts
from fednotes.jobs.proposal.first_job import (
    FirstJob,
    has_minilm,
    make_first_job,
    require_output,
)
from fednotes.jobs.proposal.places import Place, Places, find_places
from fednotes.jobs.proposal.writing import format_job

__all__ = [
    "Choices",
    "Facts",
    "FirstJob",
    "LabelMap",
    "Place",
    "Places",
    "Proposal",
    "ReadOptions",
    "SiteFacts",
    "find_label_maps",
    "find_places",
    "format_job",
    "has_minilm",
    "list_methods",
    "make_first_job",
    "propose",
    "read_facts",
    "require_output",
]
