"""The local web UI: who may see it, what is escaped, and where decisions are saved."""

from __future__ import annotations

import io
import json
import re
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from pages import Tree
from tiny_taggers import MODEL

from fednotes.apps.ui.access import Access
from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.content import Content, load_content
from fednotes.apps.ui.marked_text import to_html
from fednotes.apps.ui.pages import create_app
from fednotes.apps.ui.review import Filter, Review, parse_filter, predict_notes
from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.formats import read
from fednotes.taggers.saving import build_model, save_model

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

ROOT = "http://127.0.0.1:8000"
TEXT = "Took aspirin and codeine daily, then a rash and severe headache came."


def mention(words: str, label: str, text: str = TEXT) -> Span:
    """Return the first place of some words in a text."""
    start = text.index(words)
    return Span(start, start + len(words), label)


GOLD = (
    mention("aspirin", "Drug"),
    mention("codeine", "Drug"),
    mention("rash", "ADR"),
    mention("headache", "ADR"),
)
PREDICTED = (
    mention("aspirin", "Drug"),
    mention("codeine daily", "Drug"),
    mention("rash", "Drug"),
    mention("Took", "Drug"),
)
# The kinds of error, in the order of the text.
KINDS = ["spurious", "correct", "boundary", "type", "missed"]


def make_review(
    file: Path,
    documents: Sequence[Document] = (Document("note", TEXT, GOLD),),
    predicted: Sequence[Span] = PREDICTED,
    name: str = "notes",
) -> Review:
    """Return a review of documents for which a model predicts the same spans each."""

    def predict(documents: Sequence[Document]) -> list[Document]:
        return [replace(document, spans=tuple(predicted)) for document in documents]

    labels = sorted({s.label for d in documents for s in (*d.spans, *predicted)})
    return Review([predict_notes(name, documents, labels, predict)], file, name)


def browse(review: Review, *, enter: bool = True) -> TestClient:
    """Return a browser of the pages; with `enter`, it has the cookie."""
    content = Content(
        review=BackgroundWork(lambda: review),
        model=lambda documents: [replace(d, spans=PREDICTED[:1]) for d in documents],
    )
    access = Access()
    browser = TestClient(
        create_app(content, access),
        base_url=ROOT + access.root,
        headers={"origin": ROOT},
    )
    if enter:
        assert browser.get(f"/?token={access.token}").status_code == 200
    return browser


@pytest.fixture
def corrections(tmp_path: Path) -> Path:
    """The file of decisions, which does not exist yet."""
    return tmp_path / "corrections.json"


# ---- access


def test_no_page_is_shown_without_the_token(corrections: Path) -> None:
    browser = browse(make_review(corrections), enter=False)
    for path in (
        "/",
        "/errors",
        "/errors/1",
        "/export/jsonl",
        "/try",
        "/static/app.js",
        "/none",
    ):
        for tried in ("", "?token=", "?token=guess", "?token=%ff%00é"):
            answer = browser.get(path + tried)
            assert (answer.status_code, "aspirin" in answer.text) == (403, False), (
                path + tried
            )
    assert browser.post("/errors/1", data={"action": "gold"}).status_code == 403
    assert not corrections.exists()


def test_the_cookie_is_not_sent_to_other_programs_of_this_computer(
    corrections: Path,
) -> None:
    """Cookies are not bound to a port, so this one is bound to a random folder."""
    browser = browse(make_review(corrections))
    (cookie,) = browser.cookies.jar
    assert re.fullmatch(r"/[\w-]{22}", cookie.path)
    assert browser.get(f"{ROOT}{cookie.path}/errors").status_code == 200
    with TestClient(browser.app, base_url=ROOT, cookies=None) as stranger:
        for path in (
            "/",
            "/errors",
            cookie.path,
            f"{cookie.path}/",
            f"{cookie.path}/errors",
        ):
            answer = stranger.get(path)
            assert answer.status_code == 403
            assert cookie.path not in answer.text + str(answer.headers)


def test_another_site_in_the_browser_neither_reads_nor_writes(
    corrections: Path,
) -> None:
    """A name that leads here (DNS rebinding) is refused, and so is another page's form."""
    browser = browse(make_review(corrections))
    assert browser.get("/errors").status_code == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:1", ""):
        assert browser.get("/errors", headers={"host": host}).status_code == 421
    for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1"):
        answer = browser.post(
            "/errors/1", headers={"origin": origin}, data={"action": "delete"}
        )
        assert answer.status_code == 403
    assert not corrections.exists()


def test_every_answer_has_the_security_headers(corrections: Path) -> None:
    browser = browse(make_review(corrections))
    for path in (
        "/errors",
        "/errors/2",
        "/try",
        "/static/app.css",
        "/export/jsonl",
        "/errors/99",
    ):
        headers = browser.get(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'self'; base-uri 'none'"
        )
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
    access = Access()
    browser = TestClient(create_app(Content(), access), base_url=ROOT)
    entry = browser.get(f"{access.root}/?token={access.token}", follow_redirects=False)
    cookie = entry.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "token" not in entry.headers["location"]


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example", "/\\evil"])
def test_the_first_address_leads_to_no_other_host(path: str) -> None:
    access = Access()
    browser = TestClient(create_app(Content(), access), base_url=ROOT)
    address = f"{ROOT}{path}?token={access.token}"
    location = browser.get(address, follow_redirects=False).headers["location"]
    assert urljoin(f"{ROOT}/", location.replace("\\", "/")).startswith(f"{ROOT}/")


def test_pages_use_no_other_host_and_no_inline_script(corrections: Path) -> None:
    browser = browse(make_review(corrections))
    for path in ("/errors", "/errors/0", "/try"):
        text = browser.get(path).text
        for tag, name, value in Tree(text).attributes:
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("href", "src", "action"):
                assert str(value).startswith(("/", "#")), value
        assert not re.search(r"<script(?! src)|<style", text)


# ---- lists and notes


def test_errors_are_counted_filtered_and_linked_to_their_neighbours(
    corrections: Path,
) -> None:
    """By hand: one mention of each kind, in the order of the text."""
    review = make_review(corrections)
    assert [item.kind for item in review.items] == KINDS
    browser = browse(review)
    rows = Tree(browser.get("/errors").text).rows
    assert [row[1:] for row in rows if row[0] in ("Drug", "ADR")] == [
        ["0", "0", "1", "0", "1", "0"],
        ["1", "1", "0", "0", "0", "1"],
    ]
    assert [item.number for item in review.select(Filter())] == [0, 2, 3, 4]
    assert [item.number for item in review.select(Filter(label="ADR"))] == [3, 4]
    page = browser.get("/errors/3?label=ADR").text
    assert "1 of 2" in page
    assert re.search(r'rel="next" href="/[\w-]{22}/errors/4\?label=ADR#here"', page)
    assert 'rel="prev"' not in page
    assert "[annotated ADR:" in page  # for screen readers
    assert "predicted Drug:" in page


def test_confusion_counts_each_pair_of_types(corrections: Path) -> None:
    """By hand: one mention of each kind; boundaries do not matter."""
    browser = browse(make_review(corrections))
    rows = Tree(browser.get("/confusion").text).rows
    assert rows[2:] == [
        ["ADR", "0", "150 %", "150 %"],  # a number, and its share of the row
        ["Drug", "0", "2100 %", "0"],
        ["Nothing annotated", "0", "1", ""],
    ]
    text = browser.get("/confusion").text
    assert re.search(r'ADR" class="chip g|chip g">ADR', text)
    (address,) = re.findall(r'href="/[\w-]{22}(/errors\?[^"]*gold=ADR[^"]*)"', text)
    page = browser.get(address.replace("&amp;", "&")).text
    assert '<h2 id="list">1 mention</h2>' in page
    assert "Only mentions annotated as" in page
    review = make_review(corrections)
    assert [item.number for item in review.select(Filter("all", gold="Drug"))] == [1, 2]
    both = Filter("all", gold="ADR", predicted="Drug")
    assert [item.number for item in review.select(both)] == [3]


def test_confidence_is_scored_as_by_calibrate(corrections: Path) -> None:
    """One of four predictions is correct; bins and error are computed by hand."""
    confidences = (0.9, 0.9, 0.3, 0.3)
    predicted = [
        replace(span, confidence=confidence)
        for span, confidence in zip(PREDICTED, confidences, strict=True)
    ]
    text = (
        browse(make_review(corrections, predicted=predicted)).get("/calibration").text
    )
    rows = Tree(text).rows
    assert [row[:4] for row in rows if row[0].startswith(("27", "87"))] == [
        ["27 to 33 %", "2", "30.0 %", "0.0 %"],
        ["87 to 93 %", "2", "90.0 %", "50.0 %"],
    ]
    error = (2 * 0.3 + 2 * 0.4) / 4
    assert f"<dd>{error:.3f}<small>0 is best" in text
    assert "25 % of the predictions are correct: the model is too confident" in text
    assert ["Drug", "4", "60.0 %", "25.0 %", f"{error:.3f}"] in rows


def test_confidence_without_annotations_or_predictions_is_not_scored(
    corrections: Path,
) -> None:
    for documents, predicted in (
        ([Document("note", TEXT)], PREDICTED),
        ([Document("note", TEXT, GOLD)], ()),
    ):
        browser = browse(make_review(corrections, documents, predicted))
        assert "There is nothing to judge" in browser.get("/calibration").text
        assert browser.get("/confusion").status_code == 200


def test_a_filter_bounds_the_confidence_and_sorts_by_it(corrections: Path) -> None:
    predicted = [
        replace(span, confidence=c)
        for span, c in zip(PREDICTED, (0.2, 0.5, 0.7, 0.9), strict=True)
    ]
    review = make_review(corrections, predicted=predicted)
    numbers = {
        by: [item.number for item in review.select(by)]
        for by in (
            Filter("all", order="certain"),
            Filter("all", order="uncertain"),
            Filter("all", min_confidence=50.0),
            Filter("all", min_confidence=20.0, max_confidence=50.0),
        )
    }
    assert [*numbers.values()] == [[0, 3, 2, 1, 4], [1, 2, 3, 0, 4], [0, 2, 3], [1, 2]]


def test_confidences_are_shown_in_percent(corrections: Path) -> None:
    predicted = [replace(span, confidence=0.256) for span in PREDICTED]
    browser = browse(make_review(corrections, predicted=predicted))
    text = browser.get("/errors?kind=all").text
    assert text.count('value="0.256" aria-label="confidence 26 %"') == len(PREDICTED)
    assert text.count("26 %</span>") == len(PREDICTED)


def test_impossible_values_in_an_address_are_ignored() -> None:
    impossible = {
        "kind": "x",
        "min_confidence": "nan",
        "order": "",
        "site": "s",
        "undecided": "",
        "page": "2",
    }
    assert parse_filter(impossible) == Filter(site="s")
    partly_possible = {
        "kind": "all",
        "min_confidence": "12.5",
        "order": "certain",
        "max_confidence": "-1",
        "undecided": "1",
    }
    assert parse_filter(partly_possible) == Filter(
        "all", min_confidence=12.5, order="certain", undecided=True
    )


INJECTIONS = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"><svg onload=alert(1)>",
    "'><b>", "</title><script>alert(1)</script>", "</textarea><script>1</script>",
    "<!--", "-->", "]]>", "&lt;b&gt;", "&#x3c;script&#x3e;", "{{ 7 * 7 }}", "{% raw %}", "${7*7}",
    "javascript:alert(1)", "\" onmouseover=\"alert(1)", "' autofocus onfocus='alert(1)",
    "<a href=//evil.example>", "<base href=//evil.example>", "<style>*{display:none}</style>",
    "<iframe src=//evil.example>", "<form action=//evil.example>", "<meta http-equiv=refresh>",
    "\x00<b>\x1b[31m", "\u202e<b>gnp.exe", "\u200b<i>", "﹤script﹥＜b＞", "<b\n>x</b\n>",
    "../../etc/passwd<b>", "a&b=c;d?e#f<b>%3Cb%3E",
]  # fmt: skip


@pytest.mark.parametrize("hostile", INJECTIONS)
def test_no_content_of_notes_or_names_becomes_markup(
    hostile: str, corrections: Path
) -> None:
    """The pages have the same tags and attributes as with plain words."""

    def tags(words: str) -> list[tuple[list[tuple[str, str]], str]]:
        text = f"{words} took {words}"
        gold = Span(0, len(words), words)
        predicted = Span(0, len(text), f"{words}!")
        document = Document(words, text, (gold,))
        review = make_review(corrections, [document], [predicted], name=words)
        browser = browse(review)
        review.decide(review.items[0], "label-gold", "new")
        pages = [browser.get("/errors?kind=all"), browser.get("/errors/0?kind=all")]
        pages.append(
            browser.get(
                "/errors", params={"label": words, "site": words, "kind": words}
            )
        )
        pages.append(browser.get("/confusion", params={"site": words}))
        pages.append(browser.get("/calibration", params={"site": words}))
        pages.append(browser.post("/try", data={"text": text}))
        pages.append(browser.get("/export/" + "x" * 5 + "<b>"))
        review.decide(review.items[0], "undo")
        assert [page.status_code for page in pages] == [200] * 6 + [400]
        return [
            ([each[:2] for each in Tree(page.text).attributes], page.text)
            for page in pages
        ]

    assert len(INJECTIONS) == 30
    pages = zip(tags("plain"), tags(hostile), strict=True)
    for (plain_tags, _), (hostile_tags, text) in pages:
        assert hostile_tags == plain_tags
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202e]", text)


def test_text_is_escaped_and_keeps_its_white_space() -> None:
    assert to_html("a\tb\r\nc\xa0d 👩‍🔬 é") == "a\tb\nc\xa0d 👩‍🔬 é"
    assert to_html("<i>\x1b\u202e") == "&lt;i&gt;\\x1b\\u202e"


def test_only_the_context_of_a_mention_is_shown_for_a_long_note(
    corrections: Path,
) -> None:
    text = "x" * 40_000 + " rash " + "y" * 40_000
    page = browse(
        make_review(
            corrections, [Document("n", text, (mention("rash", "ADR", text),))], ()
        )
    ).get("/errors/0")
    assert 'id="here">rash</span>' in page.text
    assert len(page.text) < 20_000
    assert "characters 34,001 to 46,005 of 80,006" in page.text


# ---- decisions


def test_decisions_are_saved_and_included_in_every_export(
    corrections: Path, tmp_path: Path
) -> None:
    """Each kind of decision once; the expected mentions are listed by hand."""
    browser = browse(make_review(corrections))
    for number, action, label in (
        (0, "delete", ""),
        (2, "predicted", ""),
        (3, "label-gold", "Skin"),
        (4, "gold", ""),
    ):
        answer = browser.post(
            f"/errors/{number}",
            data={"action": action, "label": label},
            follow_redirects=False,
        )
        assert answer.status_code == 303
    assert corrections.stat().st_mode & 0o077 == 0
    assert TEXT[5:12] not in corrections.read_text("utf-8")
    again = make_review(corrections)
    assert len(again.decisions) == 4
    expected = [
        mention("aspirin", "Drug"),
        mention("codeine daily", "Drug"),
        mention("rash", "Skin"),
        GOLD[3],
    ]
    (corrected,) = again.correct_documents()
    assert [*corrected.spans] == expected

    (tmp_path / "c.jsonl").write_bytes(browser.get("/export/jsonl").content)
    assert [*read(tmp_path / "c.jsonl")[0].spans] == expected
    with zipfile.ZipFile(io.BytesIO(browser.get("/export/brat").content)) as packed:
        packed.extractall(tmp_path / "brat")
    assert [*read(tmp_path / "brat")[0].spans] == expected

    browser.post("/errors/2", data={"action": "undo"})
    assert (
        mention("codeine", "Drug")
        in make_review(corrections).correct_documents()[0].spans
    )


def test_losses_of_a_format_are_reported_before_the_export(
    corrections: Path,
) -> None:
    """A type with a blank in it cannot be written as brat."""
    browser = browse(
        make_review(
            corrections, [Document("n", TEXT, (mention("rash", "Skin ADR"),))], ()
        )
    )
    question = browser.get("/export/brat")
    assert question.status_code == 409
    assert "cannot represent everything" in question.text
    assert '/export/brat?anyway=1"' in question.text
    assert browser.get("/export/brat?anyway=1").content.startswith(b"PK")
    assert browser.get("/export/jsonl").status_code == 200


def test_a_page_waits_for_a_long_export(
    corrections: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page shows that it is written; a new decision begins another export."""
    review = make_review(corrections)
    go = threading.Event()
    write_export = review.export

    def wait_and_export(*args: Any, **options: Any) -> tuple[str, bytes]:
        assert go.wait(10)
        return write_export(*args, **options)

    monkeypatch.setattr("fednotes.apps.ui.error_pages._EXPORT_SECONDS", 0.01)
    monkeypatch.setattr(review, "export", wait_and_export)
    browser = browse(review)
    assert 'data-poll="2"' in browser.get("/export/jsonl").text
    go.set()
    for _ in range(200):
        answer = browser.get("/export/jsonl")
        if not answer.text.startswith("<!DOCTYPE"):
            break
    assert '"label": "ADR"' in answer.text
    review.decide(review.items[4], "label-gold", "Pain")
    monkeypatch.setattr("fednotes.apps.ui.error_pages._EXPORT_SECONDS", 10.0)
    assert '"label": "Pain"' in browser.get("/export/jsonl").text


def test_two_exports_at_a_time_are_each_written_once(
    corrections: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tabs ask in turns, and neither restarts the other's export."""
    review = make_review(corrections)
    formats_started: list[str] = []
    write_export = review.export

    def export_slowly(format: str, *, allow_loss: bool) -> tuple[str, bytes]:
        formats_started.append(format)
        time.sleep(0.1)
        return write_export(format, allow_loss=allow_loss)

    monkeypatch.setattr("fednotes.apps.ui.error_pages._EXPORT_SECONDS", 0.01)
    monkeypatch.setattr(review, "export", export_slowly)
    browser = browse(review)
    waiting = {"jsonl", "label-studio"}
    for _ in range(200):
        for format in sorted(waiting):
            if not browser.get(f"/export/{format}").text.startswith("<!DOCTYPE"):
                waiting.remove(format)
    assert not waiting
    assert sorted(formats_started) == ["jsonl", "label-studio"]


def test_discontinuous_mentions_keep_their_pieces(corrections: Path) -> None:
    """Of two with the same start, end and type, one is compared and the other stays."""
    first, second = (Span(5, 31, "Drug", ((5, 12), (last, 31))) for last in (13, 25))
    documents = [Document("note", TEXT, (first, second))]
    review = make_review(corrections, documents, ())
    (item,) = review.items
    assert item.gold == first
    review.decide(item, "delete")
    assert [*review.correct_documents()[0].spans] == [second]
    review.decide(item, "label-gold", "Dose")
    for each in (review, make_review(corrections, documents, ())):
        assert [*each.correct_documents()[0].spans] == [
            replace(first, label="Dose"),
            second,
        ]


def test_decisions_of_version_1_are_read(corrections: Path) -> None:
    review = make_review(corrections)
    review.decide(review.items[2], "delete")
    table = json.loads(corrections.read_text("utf-8"))
    for decision in table["decisions"]:
        for side in ("gold", "predicted"):
            decision[side] = decision[side] and decision[side][:3]
    corrections.write_text(json.dumps({**table, "version": 1}), "utf-8")
    again = make_review(corrections)
    assert again.count_strays() == 0
    assert again.correct_documents() == review.correct_documents()


def test_annotations_that_are_not_compared_stay_in_the_notes(corrections: Path) -> None:
    """Types that the model does not know, nested and discontinuous mentions."""
    broken = Span(5, 24, "Drug", ((5, 12), (17, 24)))
    spans = (*GOLD, mention("daily", "Dose"), broken)
    notes = predict_notes(
        "n",
        [Document("note", TEXT, spans)],
        ["Drug", "ADR"],
        lambda documents: documents,
    )
    review = Review([notes], corrections, "n")
    assert [item.kind for item in review.items] == ["correct"] * 3
    rash = next(item for item in review.items if item.gold == GOLD[2])
    review.decide(rash, "delete")
    assert set(review.correct_documents()[0].spans) == {*spans} - {GOLD[2]}


def test_decisions_about_another_text_are_kept_and_have_no_effect(
    corrections: Path,
) -> None:
    review = make_review(corrections)
    review.decide(review.items[2], "delete")
    changed_text = TEXT.replace("daily", "often")
    changed = make_review(corrections, [Document("note", changed_text, GOLD)])
    assert changed.count_strays() == 1
    assert changed.correct_documents()[0].spans == GOLD
    assert "matches no mention here" in browse(changed).get("/errors").text
    changed.decide(changed.items[2], "delete")
    assert len(make_review(corrections).decisions) == 2


@pytest.mark.parametrize(
    ("number", "action", "label", "message"),
    [
        (0, "gold", "", "no annotated mention"),
        (4, "label-predicted", "X", "no predicted mention"),
        (4, "label-gold", " ", "the type is empty"),
        (4, "label-gold", "a\nb", "one line"),
        (4, "label-gold", "x" * 201, "at most 200"),
        (4, "fly", "", "unknown action: reload the page"),
        (5, "gold", "", "there is no mention 5"),
        ("9" * 5000, "gold", "", "there is no mention 999"),
        ("-1", "gold", "", "there is no mention -1"),
    ],
)
def test_impossible_decisions_are_refused(
    number: object, action: str, label: str, message: str, corrections: Path
) -> None:
    answer = browse(make_review(corrections)).post(
        f"/errors/{number}", data={"action": action, "label": label}
    )
    assert answer.status_code == 400
    assert message in answer.text
    assert not corrections.exists()


def test_a_file_that_another_program_changed_is_not_overwritten(
    corrections: Path,
) -> None:
    """Two pages on one file: the second one's decision is refused, the first one's
    stays."""
    first, second = make_review(corrections), make_review(corrections)
    first.decide(first.items[2], "delete")
    before = corrections.read_bytes()
    with pytest.raises(FednotesError, match="another program has changed this file"):
        second.decide(second.items[3], "delete")
    assert corrections.read_bytes() == before


def test_a_page_shows_the_command_in_a_message_as_code(corrections: Path) -> None:
    browser = browse(make_review(corrections))
    corrections.write_text("{}", "utf-8")
    answer = browser.post("/errors/2", data={"action": "delete"})
    assert answer.status_code == 400
    assert "start <code>fednotes ui</code> again" in answer.text
    assert "`" not in answer.text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 3}',
        '{"decisions": [{"action": "fly"}]}',
        "\xff",
        "[" * 10_000,
    ],
)
def test_a_file_that_holds_no_decisions_is_refused_and_unchanged(
    content: str, corrections: Path
) -> None:
    corrections.write_text(content, "latin-1")
    with pytest.raises(DataError, match="with another file of corrections"):
        make_review(corrections)
    assert corrections.read_text("latin-1") == content


# ---- odd requests


def test_texts_that_are_too_long_and_bodies_that_are_not_forms_are_refused(
    corrections: Path,
) -> None:
    browser = browse(make_review(corrections))
    assert browser.post("/try", data={"text": "x" * 1_100_000}).status_code == 413
    assert browser.post("/try", data={"text": "x" * 100_001}).status_code == 400
    assert browser.post("/try", content=b"\xff=\xfe").status_code == 400
    assert (
        browser.post("/try", content="&".join("a=b" for _ in range(60))).status_code
        == 400
    )
    assert "aspirin" in browser.post("/try", data={"text": TEXT}).text
    assert browser.delete("/try").status_code == 405
    assert browser.get("/static/..%2f..%2fpages.py").status_code == 404
    assert "known: jsonl, brat" in browser.get("/export/exe").text
    for query in (
        "page=-1",
        "page=99999999999",
        "min_confidence=nan",
        "max_confidence=1e999",
        "kind=x&order=y",
    ):
        assert browser.get(f"/errors?{query}").status_code == 200


def test_an_error_of_background_work_is_shown_on_the_page() -> None:
    def fail() -> Review:
        raise DataError("n.tsv:3: no tag")

    access = Access()
    app = create_app(Content(review=BackgroundWork(fail)), access)
    browser = TestClient(app, base_url=ROOT + access.root)
    answer = browser.get(f"/errors?token={access.token}")
    assert answer.status_code == 400
    assert "n.tsv:3: no tag" in answer.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tagger; tests only read it."""
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(build_model(MODEL, TagSet(("ADR", "Drug")), 1), folder)
    return folder


def wait_for_review(content: Content) -> Review:
    """Return the review once the model has read the notes."""
    assert content.review is not None
    review = content.review.get(20)
    assert review is not None
    return review


def test_notes_are_read_in_the_named_encoding(model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_bytes('{"text": "Übelkeit"}'.encode("cp1252"))
    with pytest.raises(DataError, match="is not UTF-8: give the encoding"):
        load_content([model, notes])
    content = load_content([model, notes], encoding="cp1252")
    (source,) = wait_for_review(content).sources
    assert [document.text for document in source.documents] == ["Übelkeit"]


def test_wrong_lines_of_notes_are_skipped_on_request(
    model: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_text('{"text": "A rash."}\n{"text": \n')
    with pytest.raises(DataError, match=r"notes.jsonl:2"):
        load_content([model, notes])
    content = load_content([model, notes], on_error="skip")
    (source,) = wait_for_review(content).sources
    assert len(source.documents) == 1


def test_a_file_that_cannot_be_written_is_refused_at_the_start(
    model: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "note.txt"
    notes.write_text("A rash.")
    for file in (notes / "saved.json", tmp_path):
        with pytest.raises(
            ConfigError, match=f"{file}: decisions cannot be written there"
        ):
            load_content([model, notes], corrections=file)
    load_content([model, notes], corrections=tmp_path / "new" / "saved.json")


def test_a_folder_of_unknown_kind_is_refused_in_one_line(
    run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, errors = run_cli("ui", tmp_path)
    assert code == 2
    assert errors.count("\n") == 1
    assert "fednotes ui MODEL NOTES" in errors
