"""JSONL: the records of several tools, and what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.types import Span
from fednotes.data.formats import read

File = Callable[..., Path]
Complains = Callable[..., None]


def test_jsonl_of_other_tools(file: File) -> None:
    """Prodigy's and doccano's three forms say the same."""
    text = "Took aspirin."
    prodigy = {"text": text, "spans": [{"start": 5, "end": 12, "label": "Drug", "token_end": 1}]}
    prodigy |= {"tokens": [{"text": "Took", "start": 0, "end": 4, "id": 0}], "answer": "accept"}
    records = [
        prodigy,
        {"id": 7, "text": text, "label": [[5, 12, "Drug"]]},
        {"id": 7, "text": text, "labels": [[5, 12, "Drug"]], "source": ["a"]},
        {
            "text": text,
            "entities": [{"id": 1, "start_offset": 5, "end_offset": 12, "label": "Drug"}],
        },
        {"text": text, "answer": "reject"},
    ]
    documents = read(file("\n".join(map(json.dumps, records))))
    assert [d.id for d in documents] == ["f:1", "7", "7~2", "f:4"]
    assert all(d.text == text and d.spans == (Span(5, 12, "Drug"),) for d in documents)
    assert documents[0].tokens == ((0, 4),)
    assert documents[2].meta == {"source": ("a",)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "no JSON"),
        ('{"text": 1}', 'key "text"'),
        ("[1]", "no JSON object"),
        ('{"text": "abc", "spans": [{"start": 0, "end": 4, "label": "X"}]}', "0:4 is no stretch"),
        ('{"text": "abc", "spans": [{"start": 2, "end": 1, "label": "X"}]}', "2:1 is no stretch"),
        ('{"text": "abc", "spans": [{"start": 0, "end": true, "label": "X"}]}', "no start and end"),
        ('{"text": "abc", "spans": [{"start": 1, "end": 1, "label": "X"}]}', "1:1 is no"),
        ('{"text": "abc", "spans": [{"start": 0, "end": 1}]}', "no label"),
        ('{"text": "abc", "label": [[0, 1]]}', "no label"),
        ('{"text": "abc", "label": ["X"]}', "no start and end"),
        ('{"text": "abc", "tokens": 3}', '"tokens" is no list'),
        ('{"text": "abc", "sentences": [[0, 2], [1, 3]]}', '"sentences" is not in order'),
        ('{"text": "\\ud800"}', "surrogate"),
        ("{" * 5000, "no JSON"),
    ],
)
def test_jsonl_errors(file: File, line: str, message: str, complains: Complains) -> None:
    """Path and line; never the text."""
    complains(file(f'{{"text": "ok"}}\n{line}\n'), f"f.txt:2: .*{message}")


def test_jsonl_all_rejected(file: File, complains: Complains) -> None:
    """Nothing would be left."""
    complains(file('{"text": "a", "answer": "ignore"}'), "every record is marked")
