"""A site's examples as bytes: equal in a view that leaves out their difference.

How many examples differ is counted by hand.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from method_cases import CASES
from method_runs import MakeCase

from fednotes.apps.deployment.rules.differences import ExampleRecord, JoinedRun
from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.jobs import kinds
from fednotes.methods import find_method, list_method_names

NOTE = Document(
    "n1", "No fever.\nMild cough.\n", (Span(3, 8, "Sign"), Span(15, 20, "Sign"))
)
TAGS = TagSet(("Sign",))


def differing(first: Any, second: Any) -> dict[str, int]:
    """Return in how many examples two sites' data differ, in each view."""
    kind = kinds.find("notes" if isinstance(first, SiteNotes) else "documents")
    views, others = kind.encode_examples(first), kind.encode_examples(second)
    assert views.keys() == others.keys()
    return {name: len(set(views[name]) ^ set(others[name])) for name in views}


def documents(*train: Document) -> SiteData:
    return SiteData("a", TAGS, train, (), ())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": "n2", "patient": "p"}, (0, 0, 0)),
        ({"text": "No fever.\nMild fever.\n"}, (2, 2, 2)),
        ({"spans": (Span(3, 8, "Sign"), Span(15, 20, "Symptom"))}, (0, 0, 2)),
        ({"spans": (Span(3, 8, "Finding"), Span(15, 20, "Finding"))}, (0, 0, 4)),
        ({"spans": (Span(3, 8, "Sign"),)}, (0, 2, 2)),
        ({"spans": (Span(3, 8, "Finding"),)}, (0, 2, 4)),
    ],
)
def test_examples_of_documents_are_sentences(
    change: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    """One sentence fewer is one example; another sentence, or other labels, are two."""
    names = ("sentences", "sentences with mentions", "sentences with labels")
    difference = differing(documents(NOTE), documents(replace(NOTE, **change)))
    assert difference == dict(zip(names, expected, strict=True))
    more = documents(NOTE, Document("n3", "Seen again.\n"))
    assert differing(documents(NOTE), more) == dict.fromkeys(names, 1)


def notes(*texts: str) -> SiteNotes:
    def read_notes() -> Iterator[Note]:
        return (
            Note(str(number), text, None, None, "s")
            for number, text in enumerate(texts)
        )

    return SiteNotes("a", read_notes, read_notes, len(texts), 0, 0, 0, 0, 0, 0)


def test_a_note_is_an_example_of_pretraining() -> None:
    assert differing(notes("one", "two"), notes("two", "one")) == {"notes": 0}
    assert differing(notes("one", "two"), notes("one")) == {"notes": 1}
    assert differing(notes("one", "two"), notes("one", "three")) == {"notes": 2}


POLICY = Policy(min_difference=3, source="[policy] of site.toml")


def without_last_example(site: Any) -> Any:
    """Return a site with one training sentence, note or patient fewer."""
    if isinstance(site, SiteNotes):
        texts = list(site.train())[:-1]
        return replace(site, train=lambda: iter(texts), train_notes=len(texts))
    if isinstance(site, SiteData):
        return replace(site, train=site.train[:-1])
    return replace(site, train=site.train.take(range(len(site.train) - 1)))


def find_case(method: str) -> MakeCase:
    """Return the first case of a method; an application has its own cases."""
    cases: dict[str, MakeCase] = dict(CASES)
    if find_method(method).__module__.startswith("fednotes.apps."):
        cases = importlib.import_module(f"{method}_cases").CASES
    return next(cases[name] for name in cases if name.partition(",")[0] == method)


@pytest.mark.parametrize("method", list_method_names())
def test_a_job_with_one_example_less_is_refused_with_every_method(
    method: str, bert: Path, tmp_path: Path
) -> None:
    """The same examples are allowed again, and one less is refused."""
    site = find_case(method)(bert).sites[0]
    kind = kinds.find(find_method(method).holds)
    record = ExampleRecord(tmp_path)

    def join(run: str, data: Any) -> None:
        joining = JoinedRun(run, "1" * 64, ("a", "b", "c"))
        record.compare_and_record(joining, lambda: kind.encode_examples(data), POLICY)

    join("run1", site)
    join("run2", site)
    with pytest.raises(PolicyRefusal, match="differ by 1 from"):
        join("run3", without_last_example(site))
