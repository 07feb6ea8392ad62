"""Test tables of notes over HTTP: the lines of `predict`, and refused tables."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

import pyarrow
import pyarrow.parquet
from fastapi.testclient import TestClient

from fednotes.apps.serving.app import create_app
from fednotes.apps.serving.limits import Limits
from fednotes.apps.serving.model_queue import BATCH_INPUTS
from fednotes.core import bounds
from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, Span
from fednotes.jobs.models import load

LOCAL = "http://127.0.0.1:8000"
SECRET = "Xylocain-Zebra"
CSV = {"content-type": "text/csv"}
TABLE = b'note_key,text,patient,visit\n7,Anna fell,p1,v1\n8,"no\nBo",p2,\n'
ROWS = [
    {"id": "7", "text": "Anna fell", "patient": "p1", "visit": "v1"},
    {"id": "8", "text": "no\nBo", "patient": "p2"},
]


class CapitalWords:
    """Finds words that begin with a capital, with confidence 1 / length."""

    reads = "documents"
    types = ("NAME",)
    confidence = "1 / the number of letters"

    def __call__(self, inputs: Sequence[str | Document]) -> list[Document]:
        texts = [each.text if isinstance(each, Document) else each for each in inputs]
        return [Document("", text, tuple(self._spans(text))) for text in texts]

    def _spans(self, text: str) -> Iterator[Span]:
        for word in text.split():
            if word[:1].isupper():
                start = text.index(word)
                yield Span(start, start + len(word), "NAME", (), 1 / len(word))


@pytest.fixture
def client() -> Iterator[TestClient]:
    limits = Limits(max_bytes=50_000, max_characters=1000, max_texts=2)
    with TestClient(
        create_app(CapitalWords(), limits, batch=True), base_url=LOCAL
    ) as test_client:
        yield test_client


def parquet() -> bytes:
    columns = {key: [row.get(key) for row in ROWS] for key in ROWS[0]}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


TSV = b'id\ttext\tpatient\tvisit\n7\tAnna fell\tp1\tv1\n8\t"no\nBo"\tp2\t\n'
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMMA = TABLE.replace(b"note_key", b"id")


@pytest.mark.parametrize(
    ("table", "kind", "query"),
    [
        (COMMA, "text/csv; charset=utf-8", ""),
        (b"\xef\xbb\xbf" + COMMA, "text/csv", ""),
        (COMMA.decode().encode("utf-16"), "text/csv", ""),
        (TSV, "text/tab-separated-values", ""),
        (LINES, "application/x-ndjson", ""),
        (LINES, "application/octet-stream", "?format=jsonl"),
        (parquet(), "application/vnd.apache.parquet", ""),
        (gzip.compress(COMMA, mtime=0), "application/gzip", "?format=csv"),
        (pyarrow.compress(COMMA, "zstd", asbytes=True), "text/csv", ""),
        (COMMA.replace(b"text", b"body"), "text/csv", "?column=body"),
        (TABLE, "text/csv", "?id_column=note_key"),
        (COMMA.replace(b",", b";"), "text/csv", ""),
    ],
)
def test_each_note_of_a_table_keeps_its_ids(
    client: TestClient, table: bytes, kind: str, query: str
) -> None:
    answer = client.post(
        f"/batch{query}", content=table, headers={"content-type": kind}
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    first, second = map(json.loads, answer.text.splitlines())
    anna = {"start": 0, "end": 4, "label": "NAME", "confidence": 0.25}
    bo = {"start": 3, "end": 5, "label": "NAME", "confidence": 0.5}
    assert first == {**ROWS[0], "spans": [anna]}
    assert second == {**ROWS[1], "spans": [bo]}


def test_a_small_table_of_very_many_notes_is_refused() -> None:
    """A compressed table of 193 bytes with empty notes took half a minute."""
    table = gzip.compress(b"id,text\n" + b"1,\n" * 50_000, mtime=0)
    assert len(table) < 1000
    app = create_app(CapitalWords(), Limits(max_notes=99), batch=True)
    with TestClient(app, base_url=LOCAL) as client:
        answer = client.post("/batch", content=table, headers=CSV)
    assert answer.status_code == 413
    assert "over 99 notes: send fewer" in answer.json()["detail"]


def test_a_table_may_have_a_content_encoding(client: TestClient) -> None:
    packed = {**CSV, "content-encoding": "gzip"}
    answer = client.post(
        "/batch?threshold=0.3", content=gzip.compress(COMMA, mtime=0), headers=packed
    )
    spans = [json.loads(line)["spans"] for line in answer.text.splitlines()]
    assert [len(each) for each in spans] == [0, 1]


def test_a_table_may_have_more_notes_than_a_request_may_have_texts(
    client: TestClient,
) -> None:
    table = b"id,text\n" + b"".join(b"%d,Bo\n" % n for n in range(3 * BATCH_INPUTS + 1))
    answer = client.post("/batch", content=table, headers=CSV)
    ids = [json.loads(line)["id"] for line in answer.text.splitlines()]
    assert ids == [str(number) for number in range(3 * BATCH_INPUTS + 1)]


@pytest.mark.parametrize(
    ("table", "query", "headers", "status", "message"),
    [
        (
            COMMA,
            "",
            {"content-type": "text/plain"},
            415,
            "send a table, with one of these",
        ),
        (
            COMMA,
            "",
            {"content-type": "application/gzip"},
            415,
            "the table's format is missing",
        ),
        (COMMA, "", {**CSV, "content-encoding": "br"}, 415, "with gzip or zstd"),
        (COMMA, "?format=xls", CSV, 422, "csv"),
        (
            COMMA,
            "?column=note",
            CSV,
            422,
            "there is no column 'note': the columns are id, text",
        ),
        (COMMA, "?encoding=klingon", CSV, 422, "no such encoding"),
        (COMMA, "?threshold=2", CSV, 422, "threshold"),
        (COMMA + b"9,x,y,z,w\n", "", CSV, 422, "notes.csv:5: the row has 5 columns"),
        (COMMA + b'9,"Xylocain-Zebra', "", CSV, 422, "the file ends inside a quoted"),
        (COMMA + b"9,caf\xe9,,\n", "", CSV, 422, "is not UTF-8"),
        (
            gzip.compress(COMMA, mtime=0)[:-9],
            "",
            CSV,
            422,
            "check that the file is complete",
        ),
        (b"PAR1 Xylocain-Zebra", "?format=parquet", CSV, 422, "notes.parquet"),
        (b"id,text\n1," + b"a" * 1001, "", CSV, 413, "note 1 has 1,001 characters"),
        (b"id,text\n1," + b"a" * 50_000, "", CSV, 413, "at most 50,000 bytes"),
    ],
)
def test_a_wrong_table_is_refused_before_any_note_is_predicted(
    client: TestClient,
    table: bytes,
    query: str,
    headers: dict[str, str],
    status: int,
    message: str,
) -> None:
    answer = client.post(f"/batch{query}", content=table, headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["detail"]
    assert SECRET not in answer.text
    assert tempfile.gettempdir() not in answer.text


def test_a_table_that_unpacks_to_too_much_is_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many notes exceed the limit of characters; empty lines exceed the ratio of sizes."""
    table = gzip.compress(b"id,text\n" + (b"1," + b"a" * 900 + b"\n") * 2000)
    answer = client.post("/batch", content=table, headers=CSV)
    assert answer.status_code == 413
    assert (
        "the notes of this table have over 500,000 characters"
        in answer.json()["detail"]
    )
    monkeypatch.setattr(bounds, "PACKED_FREE", 100_000)
    table = gzip.compress(b"id,text\n1,Bo\n" + b"\n" * 2_000_000)
    answer = client.post("/batch", content=table, headers=CSV)
    assert answer.status_code == 422
    assert "notes.csv.gz: it grows more than 100-fold when unpacked" in answer.text


def test_a_table_leaves_no_file_behind(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for table in (COMMA, b"\x00\xff"):
        client.post("/batch", content=table, headers=CSV)
        assert not list(tmp_path.iterdir())


def test_a_table_that_does_not_fit_on_the_disk_leaves_room_for_others(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was written of it is deleted at once, and its client learns the reason."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def write_a_part(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_a_part)
        answer = client.post("/batch", content=TABLE, headers=CSV)
        assert not list(tmp_path.iterdir())
    assert answer.status_code == 507
    assert "No space left on device" in answer.json()["detail"]
    assert str(tmp_path) not in answer.text
    assert client.post("/batch", content=TABLE, headers=CSV).status_code == 200


def test_a_table_needs_the_token_of_the_server() -> None:
    token = "0123456789abcdef0123456789abcdef"
    app = create_app(CapitalWords(), token=token, batch=True)
    with TestClient(app, base_url=LOCAL) as test_client:
        assert test_client.post("/batch", content=COMMA, headers=CSV).status_code == 401
        bearer = {**CSV, "authorization": f"Bearer {token}"}
        assert (
            test_client.post("/batch", content=COMMA, headers=bearer).status_code == 200
        )


def test_tables_are_refused_unless_batch_is_set() -> None:
    with TestClient(create_app(CapitalWords()), base_url=LOCAL) as test_client:
        answer: Any = test_client.post("/batch", content=COMMA, headers=CSV)
        assert answer.status_code == 415
        answer = test_client.post("/batch", json={})
        assert answer.status_code == 404


def test_batch_is_refused_for_a_phenotyping_model(tmp_path: Path) -> None:
    needs_app("phenotyping")
    from patient_files import save_model

    place = save_model(tmp_path / "model", "synthetic", tmp_path, "asthma", "gout")
    with pytest.raises(ConfigError, match="`batch` needs a model that finds mentions"):
        create_app(load(place), batch=True)
