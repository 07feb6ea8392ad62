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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"spans": {"a": 1}}, 'the key "spans" is no list of spans'),
        ({"spans": {}}, 'the key "spans" is no list'),
        ({"entities": "Zyxwolan"}, 'the key "entities" is no list'),
        ({"labels": 3}, 'the key "labels" is no list'),
        ({"label": "Zyxwolan"}, 'the key "label" is no list'),
        ({"label": False}, 'the key "label" is no list'),
        ({"spans": None, "label": "Zyxwolan"}, 'the key "label" is no list'),
        ({"spans": [], "entities": {"a": 1}}, 'the key "entities" is no list'),
        ({"spans": ["Zyxwolan"]}, "no start and end"),
        ({"spans": [None]}, "no start and end"),
        ({"label": ["Zyxwolan"]}, "no start and end"),
        ({"spans": [{"start": "0", "end": 2, "label": "X"}]}, "no start and end"),
        ({"spans": [{"start": 0.0, "end": 2, "label": "X"}]}, "no start and end"),
        ({"label": [[False, True, "X"]]}, "no start and end"),
        ({"label": [[0, 99, "X"]]}, "0:99 is no stretch"),
        ({"label": [[-1, 2, "X"]]}, "-1:2 is no stretch"),
        ({"label": [[2, 2, "X"]]}, "2:2 is no stretch"),
        ({"spans": [], "entities": [[0, 99, "X"]]}, "0:99 is no stretch"),
    ],
)
def test_jsonl_wrong_spans(
    file: File, complains: Complains, more: dict[str, object], message: str
) -> None:
    """An annotation that cannot be read is never a record without annotations."""
    lines = '{"text": "ok"}\n' + json.dumps({"text": "Zyxwolan", **more}) + "\n"
    complains(file(lines, "a.jsonl"), f"a.jsonl:2: .*{message}")


@pytest.mark.parametrize(
    ("more", "spans"),
    [
        ({"label": None}, 0),
        ({"label": []}, 0),
        ({"spans": None, "entities": None, "labels": None}, 0),
        ({"spans": None, "label": [[0, 2, "X"]]}, 1),
        ({"spans": [], "entities": [[0, 2, "X"]]}, 1),
        ({"label": [], "labels": [[0, 2, "X"]]}, 1),
        ({"spans": [], "label": "positive"}, 0),
        ({"spans": [{"start": 0, "end": 2, "label": "X"}], "label": ["positive"]}, 1),
    ],
)
def test_jsonl_keys_that_are_fine(file: File, more: dict[str, object], spans: int) -> None:
    """Nothing annotated, or a document's class beside its spans (kept in meta)."""
    (document,) = read(file(json.dumps({"text": "abc", **more})))
    assert document.spans == (Span(0, 2, "X"),) * spans
    if more.get("label") in ("positive", ["positive"]):
        assert document.meta["label"] in ("positive", ("positive",))
