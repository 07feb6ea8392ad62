"""The server in process: what it answers and refuses, and what it never shows."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fastapi.testclient import TestClient

from fednotes.apps.serving import gate
from fednotes.apps.serving.app import create_app
from fednotes.apps.serving.limits import Limits
from fednotes.apps.serving.metrics import Metrics
from fednotes.apps.serving.model_queue import BATCH_INPUTS, ModelQueue
from fednotes.apps.serving.server import read_token, serve
from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.parsing import parse_json
from fednotes.core.types import Document, Span
from fednotes.core.work import count_items
from fednotes.jobs.models import load

LOCAL = "http://127.0.0.1:8000"
SECRET = "Xylocain-Zebra"  # a word of notes, which must not appear anywhere else
TOKEN = "0123456789abcdef0123456789abcdef"


class CapitalWords:
    """Finds words that begin with a capital; the confidence is 1 / their length.

    Attributes:
        batch_sizes: Number of texts in each call.
    """

    reads = "documents"
    types = ("NAME",)
    confidence = "1 / the number of letters"

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def __call__(self, texts: Sequence[str]) -> list[Document]:
        self.batch_sizes.append(len(texts))
        return [Document("", text, tuple(self._spans(text))) for text in texts]

    def _spans(self, text: str) -> Iterator[Span]:
        start = 0
        for word in text.split(" "):
            if word[:1].isupper():
                yield Span(start, start + len(word), "NAME", confidence=1 / len(word))
            start += len(word) + 1


@pytest.fixture
def model() -> CapitalWords:
    return CapitalWords()


@pytest.fixture
def client(model: CapitalWords) -> Iterator[TestClient]:
    with TestClient(create_app(model), base_url=LOCAL) as test_client:
        yield test_client


def test_offsets_refer_to_the_text_as_it_was_sent(client: TestClient) -> None:
    text = "\r\n\t 😀 Anna saw e\u0301 Bo"
    sent = {"texts": [text, "", "none here"]}
    first, second, third = client.post("/predict", json=sent).json()["results"]
    assert [text[s["start"] : s["end"]] for s in first["spans"]] == ["Anna", "Bo"]
    assert [s["confidence"] for s in first["spans"]] == [0.25, 0.5]
    assert second == third == {"spans": []}


def test_offsets_can_count_utf16_code_units(client: TestClient) -> None:
    """The expected words are cut from the bytes of UTF-16, as substring() does in Java."""
    text = "😀 Anna 😀😀 Bo😀x Cy"
    sent = {"text": text, "offsets": "utf16"}
    (result,) = client.post("/predict", json=sent).json()["results"]
    units = text.encode("utf-16-le")
    words = [
        units[2 * s["start"] : 2 * s["end"]].decode("utf-16-le")
        for s in result["spans"]
    ]
    assert words == ["Anna", "Bo😀x", "Cy"]


def test_a_threshold_leaves_out_mentions_with_a_lower_confidence(
    client: TestClient,
) -> None:
    sent = {"text": "Anna saw Bo", "threshold": 0.3}
    (result,) = client.post("/predict", json=sent).json()["results"]
    assert [s["confidence"] for s in result["spans"]] == [0.5]


def test_the_server_reports_its_health_and_describes_its_model(
    client: TestClient,
) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    about = client.get("/model").json()
    assert about["types"] == ["NAME"]
    assert about["confidence"] == CapitalWords.confidence


def test_the_openapi_schema_lists_fields_and_refusals(client: TestClient) -> None:
    """There are no documentation pages, which would load scripts from elsewhere."""
    schema = client.get("/openapi.json").json()
    predict = schema["paths"]["/predict"]["post"]
    body = predict["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert set(schema["components"]["schemas"][body.split("/")[-1]]["properties"]) == {
        *("text", "texts", "threshold", "offsets")
    }
    assert {"200", "401", "413", "422", "429"} <= set(predict["responses"])
    # FastAPI's own error would echo the input.
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 422, "body"),
        (b"{\n[", 422, "line 2"),
        (b"[1, 2]", 422, "body"),
        (b'{"text": "%s", "more": 1}' % SECRET.encode(), 422, "body.…: Extra"),
        (b'{"text": "a", "%s": 1}' % SECRET.encode(), 422, "body.…: Extra"),
        (b'{"text": ["%s"]}' % SECRET.encode(), 422, "body.text"),
        (b'{"text": {"%s": 1}}' % SECRET.encode(), 422, "body.text"),
        (b'{"texts": "%s"}' % SECRET.encode(), 422, "body.texts"),
        (b'{"texts": [1]}', 422, "body.texts.0"),
        (b'{"text": "a", "texts": ["b"]}', 422, "`text` or `texts`"),
        (b"{}", 422, "`text` or `texts`"),
        (b'{"text": "a", "threshold": 2}', 422, "body.threshold"),
        (b'{"text": "a", "threshold": NaN}', 422, "NaN"),
        (b'{"text": "a", "threshold": "%s"}' % SECRET.encode(), 422, "body.threshold"),
        (b'{"text": "a", "offsets": "%s"}' % SECRET.encode(), 422, "body.offsets"),
        (b'{"text": "%s \\ud800"}' % SECRET.encode(), 422, "half a character"),
        (b'{"text": "\xff"}', 422, "UTF-8"),
        (b'{"text": "%s", "text": "b"}' % SECRET.encode(), 422, "twice"),
        (b"[" * 10_000, 422, "too deep"),
        (b"[" * 100_000, 422, "values"),
        (b'{"texts": [%s]}' % b",".join([b'"a"'] * 65), 413, "at most 64"),
        (b'{"text": "%s"}' % (b"a" * 100_001), 413, "text 1 has 100,001"),
        (b'{"text": "%s"}' % (b"," * 2_100_000), 413, "text 1 has 2,100,000"),
        (b'{"text": "%s"}' % (b"a" * 4_000_000), 413, "at most 4,000,000 bytes"),
    ],
)
def test_a_refusal_names_the_error_and_quotes_no_text(
    client: TestClient, model: CapitalWords, body: bytes, status: int, message: str
) -> None:
    answer = client.post(
        "/predict", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert message in answer.json()["detail"]
    assert SECRET not in answer.text
    assert model.batch_sizes == []


def test_a_body_needs_the_content_type_of_json(client: TestClient) -> None:
    """A web page may send plain text to any server, but JSON only with permission."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        sent = client.post(
            "/predict", content=b'{"text": "Anna"}', headers={"content-type": kind}
        )
        assert sent.status_code == 415
    preflight = {
        "origin": "http://evil.example",
        "access-control-request-method": "POST",
    }
    allowed = client.options("/predict", headers=preflight)
    assert "access-control-allow-origin" not in allowed.headers
    answer = client.post(
        "/predict", json={"text": "Anna"}, headers={"origin": "http://e.example"}
    )
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("::1", 403),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("evil.example:127", 403),
        ("", 403),
        ("[::1", 403),
        ("10.0.0.1", 403),
    ],
)
def test_only_loopback_names_are_answered_without_a_token(
    client: TestClient, host: str, status: int
) -> None:
    for path in ("/health", "/metrics"):
        assert client.get(path, headers={"host": host}).status_code == status


def test_every_request_but_health_needs_the_token(model: CapitalWords) -> None:
    with TestClient(
        create_app(model, token=TOKEN), base_url="http://notes.example"
    ) as client:
        assert client.get("/health").status_code == 200
        for value in (
            None,
            "",
            TOKEN,
            f"Basic {TOKEN}",
            f"Bearer {TOKEN[:-1]}",
            "Bearer é",
        ):
            headers = {} if value is None else {"authorization": value.encode()}
            for path in ("/metrics", "/model", "/openapi.json", "/nothing"):
                assert client.get(path, headers=headers).status_code == 401
            answer = client.post("/predict", json={"text": "Anna"}, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        headers = {"authorization": f"bearer  {TOKEN}"}
        answer = client.post("/predict", json={"text": "Anna"}, headers=headers)
        assert answer.status_code == 200
    assert model.batch_sizes == [1]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (TOKEN, 0o600, ""),
        (f"\n{TOKEN}\n", 0o400, ""),
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        ("short", 0o600, "20 letters"),
        ("", 0o600, "20 letters"),
        ("two words of more than twenty", 0o600, "one word"),
        ("ä" * 30, 0o600, "one word"),
    ],
)
def test_only_the_owner_may_read_a_token_file(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content, "utf-8")
    path.chmod(mode)
    if not message:
        assert read_token(path) == TOKEN
        return
    with pytest.raises(ConfigError, match=message) as raised:
        read_token(path)
    assert not content or content not in str(raised.value)


def test_a_host_other_than_loopback_needs_a_token_file(model: CapitalWords) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "notes.example"):
        with pytest.raises(ConfigError, match="`token_file`"):
            serve(model, host)
    with pytest.raises(ConfigError, match="go together"):
        serve(model, key=Path("key.pem"))
    assert model.batch_sizes == []


def test_a_phenotyping_model_labels_each_patient(tmp_path: Path) -> None:
    """The classifiers are set by hand: a label is present if the notes name it."""
    needs_app("phenotyping")
    from patient_files import save_model

    folder = save_model(tmp_path / "model", "synthetic", tmp_path, "asthma", "gout")
    model = load(folder)
    with TestClient(create_app(model), base_url=LOCAL) as client:
        assert client.get("/model").json()["types"] == ["asthma", "gout"]
        sent = {
            "p1": ["Seen today.", "Known gout."],
            "😀": ["Has asthma."],
            "": [],
            "x": [""],
        }
        findings = client.post("/predict", json={"patients": sent}).json()["results"]
        ill = {
            e["patient"]: [n for n, v in e["labels"].items() if v == "present"]
            for e in findings
        }
        assert ill == {"p1": ["gout"], "😀": ["asthma"], "": [], "x": []}
        assert client.post("/predict", json={"text": "Known gout."}).status_code == 422
        response = client.post("/predict", json={"patients": {SECRET: [1]}})
        assert response.json()["detail"].startswith("body.patients.….0: ")
        half = b'{"patients": {"\\ud800": ["a"]}}'
        refused = client.post(
            "/predict", content=half, headers={"content-type": "application/json"}
        )
        assert refused.status_code == 422
        many = {"patients": {"p1": ["a"] * 40, "p2": ["a"] * 40}}
        assert client.post("/predict", json=many).status_code == 413
        # The answer for patients without notes may be a thousand times as long.
        without_notes = {"patients": {f"p{number}": [] for number in range(65)}}
        assert client.post("/predict", json=without_notes).status_code == 413


# ---- FHIR ----------------------------------------------------------------------------


def _document(text: str, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(text.encode()).decode()
    attachment = {
        "contentType": "text/plain; charset=utf-8",
        "data": data,
        "title": "Note",
    }
    resource = {"resourceType": "DocumentReference", "id": "d1", "status": "current"}
    return {**resource, "content": [{"attachment": attachment}], **more}


def test_fhir_resources_gain_mentions_and_are_otherwise_unchanged(
    client: TestClient,
) -> None:
    """fhir.resources accepts the answer, which is the request but for the extensions."""
    valid = pytest.importorskip("fhir.resources.R4B.bundle").Bundle
    other_extension = {"url": "urn:other", "valueString": "stays"}
    old_extension = {
        "url": "urn:fednotes:mention",
        "extension": [{"url": "label", "valueString": "OLD"}],
    }
    text = "😀 Anna saw Bo \r\n and Cy"
    first = _document(
        text,
        extension=[other_extension, old_extension],
        subject={"reference": "Patient/7"},
    )
    second = {
        **{"resourceType": "DiagnosticReport", "id": "r1", "status": "final"},
        "code": {"text": "Discharge summary"},
        "presentedForm": [first["content"][0]["attachment"]],
    }
    patient = {"resourceType": "Patient", "id": "7"}
    entries = [{"resource": each} for each in (patient, first, second)]
    sent = {"resourceType": "Bundle", "type": "collection", "entry": entries}
    headers = {"content-type": "application/fhir+json; charset=utf-8"}
    answer = client.post(
        "/fhir?threshold=0.4", content=json.dumps(sent), headers=headers
    )
    assert answer.headers["content-type"] == "application/fhir+json"
    valid.model_validate(answer.json())
    resources = [entry["resource"] for entry in answer.json()["entry"]]
    assert [each["id"] for each in resources] == ["d1", "r1"]
    for each, was in zip(resources, (first, second), strict=True):
        extensions = each.pop("extension")
        assert {k: v for k, v in was.items() if k != "extension"} == each
        mentions = [
            e["extension"] for e in extensions if e["url"] == "urn:fednotes:mention"
        ]
        places = [
            [p["valueInteger"] for p in m if "valueInteger" in p] for m in mentions
        ]
        assert [text[start:end] for start, end in places] == ["Bo", "Cy"]
        assert [e for e in extensions if e["url"] == "urn:other"] == [
            other_extension
        ] * (was is first)


@pytest.mark.parametrize("field", ["id", "\ud800"])
def test_fhir_with_half_a_character_is_refused_before_the_model_reads_it(
    client: TestClient, model: CapitalWords, field: str
) -> None:
    resource = json.dumps(_document("Anna", **{field: "\ud800"}))
    headers = {"content-type": "application/fhir+json"}
    answer = client.post("/fhir", content=resource, headers=headers)
    assert answer.status_code == 422
    assert "half a character" in answer.json()["issue"][0]["diagnostics"]
    assert model.batch_sizes == []


@pytest.mark.parametrize(
    ("resource", "code", "message"),
    [
        ({"resourceType": "Bundle", "entry": 5}, "invalid", "entry"),
        (
            _document("a", content=[{"attachment": {"contentType": "text/html"}}]),
            "invalid",
            "plain",
        ),
        (_document("a" * 100_001), "too-long", "100,001"),
        ([1], "invalid", "dictionary"),
        (_document("a", extension={"url": "b"}), "invalid", "list of objects"),
        (_document("a", extension=["b"]), "invalid", "list of objects"),
        (
            {"resourceType": "Patient", "id": "7"},
            "invalid",
            "send a DocumentReference or a",
        ),
    ],
)
def test_refused_fhir_is_answered_with_an_operation_outcome(
    client: TestClient, model: CapitalWords, resource: Any, code: str, message: str
) -> None:
    valid = pytest.importorskip("fhir.resources.R4B.operationoutcome").OperationOutcome
    answer = client.post("/fhir", json=resource)
    assert answer.status_code in (413, 422)
    (issue,) = valid.model_validate(answer.json()).issue
    assert issue.code == code
    assert message in issue.diagnostics
    assert model.batch_sizes == []


# ---- concurrent requests -------------------------------------------------------------


class SlowModel(CapitalWords):
    """Waits for `go`; fails if one of the texts is "fail"."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.began = threading.Event(), threading.Event()

    def __call__(self, texts: Sequence[str]) -> list[Document]:
        self.began.set()
        assert self.go.wait(20)
        if "fail" in texts:
            raise ValueError(f"{SECRET} in {texts}")
        return super().__call__(texts)


def test_waiting_requests_share_calls_of_the_model() -> None:
    slow, answers = SlowModel(), dict[int, Any]()
    with TestClient(create_app(slow), base_url=LOCAL) as client:

        def ask(number: int) -> None:
            texts = [f"Aa{'a' * number} b", "none"]
            answers[number] = client.post("/predict", json={"texts": texts}).json()[
                "results"
            ]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(40)]
        threads[0].start()
        assert slow.began.wait(20)
        for thread in threads[1:]:
            thread.start()
        _wait_until(
            lambda: b"fednotes_under_way 40.0" in client.get("/metrics").content
        )
        slow.go.set()
        for thread in threads:
            thread.join(20)
    assert slow.batch_sizes[0] <= 2
    assert max(slow.batch_sizes) == BATCH_INPUTS
    assert sum(slow.batch_sizes) == 80
    for number in range(40):  # each client gets the answer to its own request
        (first,), second = answers[number][0]["spans"], answers[number][1]["spans"]
        assert (first["start"], first["end"], second) == (0, 2 + number, [])


def test_a_request_beyond_the_limit_learns_when_to_retry() -> None:
    slow, limits = SlowModel(), Limits(max_requests=2)
    codes: list[int] = []
    with TestClient(create_app(slow, limits), base_url=LOCAL) as client:

        def ask() -> None:
            codes.append(client.post("/predict", json={"text": "Anna"}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        _wait_until(lambda: b"fednotes_under_way 2.0" in client.get("/metrics").content)
        refused = client.post("/predict", json={"text": "Anna"})
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert client.get("/health").status_code == 200
        slow.go.set()
        for thread in threads:
            thread.join(20)
        assert codes == [200, 200]
        assert client.post("/predict", json={"text": "Anna"}).status_code == 200
        assert b"fednotes_under_way 0.0" in client.get("/metrics").content


def test_a_text_that_fails_affects_no_other_request_and_is_not_quoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow, answers = SlowModel(), dict[str, Any]()
    slow.go.set()
    with TestClient(create_app(slow), base_url=LOCAL) as client:

        def ask(text: str) -> None:
            answers[text] = client.post(
                "/predict", json={"texts": [text, f"{SECRET} B"]}
            )

        threads = [
            threading.Thread(target=ask, args=(text,))
            for text in ("fail", "A", "B", "C")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        metrics = client.get("/metrics").text
    assert {text: answer.status_code for text, answer in answers.items()} == {
        **{"A": 200, "B": 200, "C": 200},
        "fail": 500,
    }
    log_lines = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("fednotes")
    ]
    assert len(log_lines) == 1
    assert "ValueError at test_server.py" in log_lines[0]
    for output in (answers["fail"].text, metrics, caplog.text):
        assert SECRET not in output


def test_metrics_count_requests_texts_and_characters(client: TestClient) -> None:
    client.post("/predict", json={"texts": ["Anna", "Bo"]})
    client.post("/predict", json={"texts": [1]})
    client.get(f"/{SECRET}")
    metrics = client.get("/metrics").text
    assert 'fednotes_requests_total{path="/predict",status="200"} 1.0' in metrics
    assert 'fednotes_requests_total{path="/predict",status="422"} 1.0' in metrics
    assert 'fednotes_requests_total{path="other",status="404"} 1.0' in metrics
    assert "fednotes_texts_total 2.0" in metrics
    assert "fednotes_characters_total 6.0" in metrics
    assert SECRET not in metrics


# ---- endless bodies and clients that disconnect --------------------------------------


async def _post(
    app: Any, messages: list[Any], *, reads: bool = True, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of the answer to a request that arrives in messages.

    Args:
        app: The application.
        messages: Messages of ASGI, which are taken from this list. After a None, or
            after the last one, nothing arrives any more.
        reads: Whether the client reads the answer.
        headers: Further headers.

    Returns:
        0 and {} if the application sends nothing.
    """
    answer: list[Any] = []
    fields = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/predict",
        "raw_path": b"/predict",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
    }

    async def receive() -> Any:
        message = messages.pop(0) if messages else None
        if message is None:
            await asyncio.sleep(60)
        return message

    async def send(message: Any) -> None:
        if not reads:
            await asyncio.sleep(60)
        answer.append(message)

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    if not answer:
        return 0, {}
    start, *parts = answer
    body = b"".join(part.get("body", b"") for part in parts)
    return start["status"], json.loads(body)


def _part(content: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": content, "more_body": True}


def test_a_body_that_is_too_large_is_refused_before_its_end(
    model: CapitalWords,
) -> None:
    """Of 50 parts of 100 bytes, none is read if the header says that it is too large,
    and 11 without that header."""
    app = create_app(model, Limits(max_bytes=1000))
    parts = [_part(b"x" * 100) for _ in range(50)]
    status, _ = asyncio.run(_post(app, parts, **{"content-length": "5000"}))
    assert (status, len(parts)) == (413, 50)
    status, answer = asyncio.run(_post(app, parts))
    assert (status, len(parts)) == (413, 39)
    assert "1,000 bytes" in answer["detail"]


def test_a_request_of_two_lengths_is_refused_and_its_connection_closed(
    model: CapitalWords,
) -> None:
    """What a proxy takes for one request could be two (RFC 9112, section 6.1)."""
    parts = [_part(b"{}")]
    lengths = {"content-length": "2", "transfer-encoding": "chunked"}
    status, answer = asyncio.run(_post(create_app(model), parts, **lengths))
    assert status == 400
    assert len(parts) == 1
    assert "not both" in answer["detail"]


def test_a_length_of_thousands_of_digits_is_too_large(model: CapitalWords) -> None:
    app = create_app(model, Limits(max_bytes=1000))
    parts = [_part(b"x")]
    status, answer = asyncio.run(_post(app, parts, **{"content-length": "9" * 5000}))
    assert status == 413
    assert len(parts) == 1
    assert "1,000 bytes" in answer["detail"]


def test_a_body_that_does_not_arrive_is_refused(model: CapitalWords) -> None:
    app = create_app(model, Limits(body_seconds=0.05))
    status, _ = asyncio.run(_post(app, [_part(b"{"), None]))
    assert status == 408


def test_nothing_more_is_predicted_for_a_client_that_disconnected() -> None:
    slow = SlowModel()
    app = create_app(slow)
    body = json.dumps({"texts": ["A"] * 64}).encode()
    messages = [
        {"type": "http.request", "body": body, "more_body": False},
        {"type": "http.disconnect"},
    ]

    threading.Timer(0.2, slow.go.set).start()
    assert asyncio.run(_post(app, messages)) == (0, {})
    assert sum(slow.batch_sizes) <= BATCH_INPUTS


class _StepModel(CapitalWords):
    """Takes two seconds for a call, in steps that it counts as a model does.

    Attributes:
        steps: Number of steps of all calls.
        ended: Set at the end of each call, however it ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.ended = threading.Event()

    def __call__(self, texts: Sequence[str]) -> list[Document]:
        try:
            for _ in count_items(range(100), "reading"):
                self.steps += 1
                time.sleep(0.02)
        finally:
            self.ended.set()
        return super().__call__(texts)


def test_the_model_stops_when_nobody_waits() -> None:
    model = _StepModel()

    async def leave() -> None:
        queue = ModelQueue(model, Metrics())
        worker = asyncio.ensure_future(queue.run())
        request = asyncio.ensure_future(queue.predict(["A"]))
        while not model.steps:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.to_thread(model.ended.wait)
        stopped_after = model.steps
        (answer,) = await queue.predict(["Bo"])  # the next request is answered
        worker.cancel()
        assert stopped_after < 100
        assert [span.label for span in answer.spans] == ["NAME"]

    asyncio.run(leave())


class _FaultyModel(CapitalWords):
    """Fails for some texts, as a model of a plugin may."""

    def __call__(self, texts: Sequence[str]) -> list[Document]:
        if "stop" in texts:
            raise StopIteration
        return super().__call__([text for text in texts if text != "none"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("stop", "stopped before its result"), ("none", "0 results for 1 inputs")],
)
def test_a_model_that_fails_oddly_does_not_end_the_queue(
    text: str, message: str
) -> None:
    async def ask() -> None:
        queue = ModelQueue(_FaultyModel(), Metrics())
        worker = asyncio.ensure_future(queue.run())
        with pytest.raises(ModelError, match=message):
            await asyncio.wait_for(queue.predict([text]), 20)
        (answer,) = await asyncio.wait_for(queue.predict(["Bo"]), 20)
        worker.cancel()
        assert answer.text == "Bo"

    asyncio.run(ask())


def test_the_model_goes_on_if_one_of_two_clients_waits() -> None:
    model = _StepModel()

    async def leave() -> None:
        queue = ModelQueue(model, Metrics())
        requests = [asyncio.ensure_future(queue.predict([text])) for text in "AB"]
        await asyncio.sleep(0)
        worker = asyncio.ensure_future(queue.run())
        while not model.steps:
            await asyncio.sleep(0.01)
        requests[0].cancel()
        (answer,) = await requests[1]
        worker.cancel()
        assert answer.text == "B"

    asyncio.run(leave())
    assert (model.batch_sizes, model.steps) == ([2], 100)


def test_a_client_that_does_not_read_does_not_block_others(
    model: CapitalWords,
) -> None:
    app = create_app(model, Limits(max_requests=1, body_seconds=0.05))
    body = json.dumps({"text": "A"}).encode()

    async def post_one_after_another() -> list[int]:
        statuses = []
        for reads in (False, True):
            message = {**_part(body), "more_body": False}
            status, _ = await _post(app, [message, None], reads=reads)
            statuses.append(status)
        return statuses

    begin = time.monotonic()
    assert asyncio.run(post_one_after_another()) == [0, 200]
    assert time.monotonic() - begin < 30


def _wait_until(is_true: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_log_holds_no_text_of_a_request(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fednotes"):
        client.post("/predict", json={"text": SECRET})
        client.post("/predict", json={"text": [SECRET]})
    assert SECRET not in caplog.text


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    client: TestClient,
) -> None:
    """Commas within a text do not count."""
    content_type = {"content-type": "application/json"}
    body = '{"texts":[' + "1," * 1_900_000 + "1]}"
    refused = client.post("/predict", content=body, headers=content_type)
    assert refused.status_code == 422
    assert "more than 20,000 values" in refused.text
    commas = client.post("/predict", json={"text": "a, " * 30_000})
    assert commas.status_code == 200


def test_other_requests_are_answered_while_a_body_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parser waits until /health has answered."""
    began, go = threading.Event(), threading.Event()

    def parse_slowly(body: bytes, **limits: Any) -> Any:
        began.set()
        assert go.wait(5)
        return parse_json(body, **limits)

    monkeypatch.setattr(gate, "parse_json", parse_slowly)
    codes: list[int] = []
    with TestClient(create_app(CapitalWords()), base_url=LOCAL) as client:

        def ask() -> None:
            codes.append(client.post("/predict", json={"text": "Anna"}).status_code)

        thread = threading.Thread(target=ask)
        thread.start()
        assert began.wait(20)
        assert client.get("/health").status_code == 200
        assert codes == []
        go.set()
        thread.join(20)
    assert codes == [200]
