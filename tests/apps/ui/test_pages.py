"""The local page: who may ask, what is escaped, and where decisions go."""

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

import pytest
from pages import Tree
from tiny_taggers import MODEL

from fednotes.apps.ui.pages import Desk, application, opened, shown
from fednotes.apps.ui.review import Filter, Later, Review, compared, filter_of
from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.formats import read
from fednotes.taggers.saving import build_model, save_model

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

ROOT = "http://127.0.0.1:8000"
TEXT = "Took aspirin and codeine daily, then a rash and severe headache came."


def at(words: str, label: str, text: str = TEXT) -> Span:
    """The first place of some words."""
    start = text.index(words)
    return Span(start, start + len(words), label)


GOLD = (
    at("aspirin", "Drug"),
    at("codeine", "Drug"),
    at("rash", "ADR"),
    at("headache", "ADR"),
)
SAID = (
    at("aspirin", "Drug"),
    at("codeine daily", "Drug"),
    at("rash", "Drug"),
    at("Took", "Drug"),
)
# in the order of the text
KINDS = ["spurious", "correct", "boundary", "type", "missed"]


def review(
    file: Path,
    documents: Sequence[Document] = (Document("note", TEXT, GOLD),),
    said: Sequence[Span] = SAID,
    name: str = "notes",
) -> Review:
    """Documents whose predictions are the same spans in each."""

    def predict(documents: Sequence[Document]) -> list[Document]:
        return [replace(document, spans=tuple(said)) for document in documents]

    labels = sorted({s.label for d in documents for s in (*d.spans, *said)})
    return Review((compared(name, documents, labels, predict),), file, name)


def client(made: Review, *, enter: bool = True) -> TestClient:
    """A browser of the page, with its cookie."""
    desk = Desk(
        Later(lambda: made), lambda given: [replace(d, spans=SAID[:1]) for d in given]
    )
    found = TestClient(
        application(desk), base_url=ROOT + desk.root, headers={"origin": ROOT}
    )
    if enter:
        assert found.get(f"/?token={desk.token}").status_code == 200
    return found


@pytest.fixture
def file_of(tmp_path: Path) -> Path:
    return tmp_path / "corrections.json"


# ---- who may ask


def test_nobody_reads_without_the_token(file_of: Path) -> None:
    browser = client(review(file_of), enter=False)
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
    assert not file_of.exists()


def test_the_cookie_is_for_no_other_program_of_this_computer(file_of: Path) -> None:
    """Cookies know no ports: what tells them apart is a folder that nobody else is
    told."""
    browser = client(review(file_of))
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


def test_another_site_in_the_browser_neither_reads_nor_writes(file_of: Path) -> None:
    """A name that leads here (DNS rebinding) is refused, and so is another page's form."""
    browser = client(review(file_of))
    assert browser.get("/errors").status_code == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:1", ""):
        assert browser.get("/errors", headers={"host": host}).status_code == 421
    for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1"):
        given = {"headers": {"origin": origin}, "data": {"action": "delete"}}
        assert browser.post("/errors/1", **given).status_code == 403
    assert not file_of.exists()


def test_what_every_answer_says(file_of: Path) -> None:
    browser = client(review(file_of))
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
    desk = Desk(model=lambda given: given)
    cookie = TestClient(application(desk), base_url=ROOT).get(
        f"{desk.root}/?token={desk.token}", follow_redirects=False
    )
    said = cookie.headers["set-cookie"].lower()
    assert "httponly" in said
    assert "samesite=strict" in said
    assert "token" not in cookie.headers["location"]


def test_pages_need_no_other_host_and_no_inline_script(file_of: Path) -> None:
    browser = client(review(file_of))
    for path in ("/errors", "/errors/0", "/try"):
        text = browser.get(path).text
        for tag, name, value in Tree(text).attributes:
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("href", "src", "action"):
                assert str(value).startswith(("/", "#")), value
        assert not re.search(r"<script(?! src)|<style", text)


# ---- what is shown


def test_errors_are_counted_filtered_and_found_by_their_neighbours(
    file_of: Path,
) -> None:
    """By hand: one mention of each kind, in the order of the text."""
    made = review(file_of)
    assert [item.kind for item in made.items] == KINDS
    browser = client(made)
    rows = Tree(browser.get("/errors").text).rows
    assert [row[1:] for row in rows if row[0] in ("Drug", "ADR")] == [
        ["0", "0", "1", "0", "1", "0"],
        ["1", "1", "0", "0", "0", "1"],
    ]
    assert [item.number for item in made.select(Filter())] == [0, 2, 3, 4]
    assert [item.number for item in made.select(Filter(label="ADR"))] == [3, 4]
    page = browser.get("/errors/3?label=ADR").text
    assert "1 of 2" in page
    assert re.search(r'rel="next" href="/[\w-]{22}/errors/4\?label=ADR#here"', page)
    assert 'rel="prev"' not in page
    assert "[annotated ADR:" in page  # for who does not see lines
    assert "predicted Drug:" in page


def test_confidence_bounds_and_orders(file_of: Path) -> None:
    said = [
        replace(span, confidence=c)
        for span, c in zip(SAID, (0.2, 0.5, 0.7, 0.9), strict=True)
    ]
    made = review(file_of, said=said)
    numbers = {
        by: [item.number for item in made.select(by)]
        for by in (
            Filter("all", order="certain"),
            Filter("all", order="uncertain"),
            Filter("all", least=50.0),
            Filter("all", least=20.0, most=50.0),
        )
    }
    assert [*numbers.values()] == [[0, 3, 2, 1, 4], [1, 2, 3, 0, 4], [0, 2, 3], [1, 2]]


def test_of_an_address_what_is_no_value_is_left_out() -> None:
    odd = {
        "kind": "x",
        "least": "nan",
        "order": "",
        "site": "s",
        "open": "",
        "page": "2",
    }
    assert filter_of(odd) == Filter(site="s")
    good = {
        "kind": "all",
        "least": "12.5",
        "order": "certain",
        "most": "-1",
        "open": "1",
    }
    assert filter_of(good) == Filter("all", least=12.5, order="certain", open=True)


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
def test_nothing_that_notes_or_names_hold_becomes_markup(
    hostile: str, file_of: Path
) -> None:
    """The page has the tags and attributes that it has with plain words in their place."""

    def tags(words: str) -> list[tuple[list[tuple[str, str]], str]]:
        text = f"{words} took {words}"
        gold, said = Span(0, len(words), words), Span(0, len(text), f"{words}!")
        document = Document(words, text, (gold,))
        made = review(file_of, [document], [said], name=words)
        browser = client(made)
        made.decide(made.items[0], "label-gold", "new")
        pages = [browser.get("/errors?kind=all"), browser.get("/errors/0?kind=all")]
        pages.append(
            browser.get(
                "/errors", params={"label": words, "site": words, "kind": words}
            )
        )
        pages.append(browser.post("/try", data={"text": text}))
        pages.append(browser.get("/export/" + "x" * 5 + "<b>"))
        made.decide(made.items[0], "undo")
        assert [page.status_code for page in pages] == [200] * 4 + [400]
        return [
            ([each[:2] for each in Tree(page.text).attributes], page.text)
            for page in pages
        ]

    assert len(INJECTIONS) == 30
    for (plain, _), (found, text) in zip(tags("plain"), tags(hostile), strict=True):
        assert found == plain
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202e]", text)


def test_notes_are_shown_as_they_are() -> None:
    assert shown("a\tb\r\nc\xa0d 👩‍🔬 é") == "a\tb\nc\xa0d 👩‍🔬 é"
    assert shown("<i>\x1b\u202e") == "&lt;i&gt;\\x1b\\u202e"


def test_a_long_note_is_shown_around_its_mention(file_of: Path) -> None:
    text = "x" * 40_000 + " rash " + "y" * 40_000
    page = client(
        review(file_of, [Document("n", text, (at("rash", "ADR", text),))], ())
    ).get("/errors/0")
    assert 'id="here">rash</span>' in page.text
    assert len(page.text) < 20_000
    assert "characters 34,001 to 46,005 of 80,006" in page.text


# ---- what is decided


def test_decisions_are_kept_and_reach_every_export(
    file_of: Path, tmp_path: Path
) -> None:
    """By hand: each kind of decision once; a new start finds them again."""
    browser = client(review(file_of))
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
    assert file_of.stat().st_mode & 0o077 == 0
    assert TEXT[5:12] not in file_of.read_text("utf-8")
    again = review(file_of)
    assert len(again.decisions) == 4
    expected = [
        at("aspirin", "Drug"),
        at("codeine daily", "Drug"),
        at("rash", "Skin"),
        GOLD[3],
    ]
    (corrected,) = again.corrected()
    assert [*corrected.spans] == expected

    (tmp_path / "c.jsonl").write_bytes(browser.get("/export/jsonl").content)
    assert [*read(tmp_path / "c.jsonl")[0].spans] == expected
    with zipfile.ZipFile(io.BytesIO(browser.get("/export/brat").content)) as packed:
        packed.extractall(tmp_path / "brat")
    assert [*read(tmp_path / "brat")[0].spans] == expected

    browser.post("/errors/2", data={"action": "undo"})
    assert at("codeine", "Drug") in review(file_of).corrected()[0].spans


def test_what_a_format_cannot_hold_is_named_before_it_is_saved(file_of: Path) -> None:
    """A type with a blank in it: brat has words alone."""
    browser = client(
        review(file_of, [Document("n", TEXT, (at("rash", "Skin ADR"),))], ())
    )
    asked = browser.get("/export/brat")
    assert (asked.status_code, "cannot hold all" in asked.text) == (409, True)
    assert '/export/brat?anyway=1"' in asked.text
    assert browser.get("/export/brat?anyway=1").content.startswith(b"PK")
    assert browser.get("/export/jsonl").status_code == 200


def test_an_export_that_takes_long_is_waited_for(
    file_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page in between; a decision since begins it anew."""
    made, go = review(file_of), threading.Event()
    whole = made.export
    monkeypatch.setattr("fednotes.apps.ui.pages._PATIENCE", 0.01)
    monkeypatch.setattr(made, "export", lambda *given: go.wait(10) and whole(*given))
    browser = client(made)
    assert 'data-poll="2"' in browser.get("/export/jsonl").text
    go.set()
    for _ in range(200):
        if not (found := browser.get("/export/jsonl")).text.startswith("<!DOCTYPE"):
            break
    assert '"label": "ADR"' in found.text
    made.decide(made.items[4], "label-gold", "Pain")
    monkeypatch.setattr("fednotes.apps.ui.pages._PATIENCE", 10.0)
    assert '"label": "Pain"' in browser.get("/export/jsonl").text


def test_two_exports_at_a_time_both_end(
    file_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tabs that ask in turns: neither begins the other's anew."""
    made, begun = review(file_of), list[str]()
    whole = made.export

    def slow(format: str, allow_loss: bool) -> tuple[str, bytes]:
        begun.append(format)
        time.sleep(0.1)
        return whole(format, allow_loss)

    monkeypatch.setattr("fednotes.apps.ui.pages._PATIENCE", 0.01)
    monkeypatch.setattr(made, "export", slow)
    browser, waiting = client(made), {"jsonl", "label-studio"}
    for _ in range(200):
        for format in sorted(waiting):
            if not browser.get(f"/export/{format}").text.startswith("<!DOCTYPE"):
                waiting.remove(format)
    assert not waiting
    assert sorted(begun) == ["jsonl", "label-studio"]


def test_mentions_in_pieces_keep_them(file_of: Path) -> None:
    """Of two with the same start, end and type one is compared; the other stays as it
    is."""
    one, two = (Span(5, 31, "Drug", ((5, 12), (last, 31))) for last in (13, 25))
    documents = [Document("note", TEXT, (one, two))]
    made = review(file_of, documents, ())
    (item,) = made.items
    assert item.gold == one
    made.decide(item, "delete")
    assert [*made.corrected()[0].spans] == [two]
    made.decide(item, "label-gold", "Dose")
    for each in (made, review(file_of, documents, ())):
        assert [*each.corrected()[0].spans] == [replace(one, label="Dose"), two]


def test_decisions_of_version_1_are_read(file_of: Path) -> None:
    made = review(file_of)
    made.decide(made.items[2], "delete")
    table = json.loads(file_of.read_text("utf-8"))
    for decision in table["decisions"]:
        for side in ("gold", "predicted"):
            decision[side] = decision[side] and decision[side][:3]
    file_of.write_text(json.dumps({**table, "version": 1}), "utf-8")
    again = review(file_of)
    assert (again.strays, again.corrected()) == (0, made.corrected())


def test_what_the_model_does_not_know_stays_in_the_notes(file_of: Path) -> None:
    """Types of other annotators, nested and discontinuous mentions, which are not
    compared."""
    broken = Span(5, 24, "Drug", ((5, 12), (17, 24)))
    spans = (*GOLD, at("daily", "Dose"), broken)
    made = compared("n", [Document("note", TEXT, spans)], ["Drug", "ADR"], lambda d: d)
    kept = Review((made,), file_of, "n")
    assert [item.kind for item in kept.items] == ["correct"] * 3
    kept.decide(next(i for i in kept.items if i.gold == GOLD[2]), "delete")
    assert set(kept.corrected()[0].spans) == {*spans} - {GOLD[2]}


def test_decisions_of_another_text_are_kept_and_change_nothing(file_of: Path) -> None:
    made = review(file_of)
    made.decide(made.items[2], "delete")
    other = TEXT.replace("daily", "often")
    changed = review(file_of, [Document("note", other, GOLD)])
    assert changed.strays == 1
    assert changed.corrected()[0].spans == GOLD
    assert "fit no mention here" in client(changed).get("/errors").text
    changed.decide(changed.items[2], "delete")
    assert len(review(file_of).decisions) == 2


@pytest.mark.parametrize(
    ("number", "action", "label", "told"),
    [
        (0, "gold", "", "no gold mention"),
        (4, "label-predicted", "X", "no predicted mention"),
        (4, "label-gold", " ", "the label is empty"),
        (4, "label-gold", "a\nb", "line ends"),
        (4, "label-gold", "x" * 201, "over 200"),
        (4, "fly", "", "no such action"),
        (5, "gold", "", "there is no mention 5"),
        ("9" * 5000, "gold", "", "there is no mention 999"),
        ("-1", "gold", "", "there is no mention -1"),
    ],
)
def test_impossible_decisions_are_refused(
    number: object, action: str, label: str, told: str, file_of: Path
) -> None:
    answer = client(review(file_of)).post(
        f"/errors/{number}", data={"action": action, "label": label}
    )
    assert answer.status_code == 400
    assert told in answer.text
    assert not file_of.exists()


def test_a_file_that_changed_meanwhile_is_not_written_over(file_of: Path) -> None:
    """Two pages on one file: the second one's decision is refused, the first one's
    stays."""
    one, two = review(file_of), review(file_of)
    one.decide(one.items[2], "delete")
    before = file_of.read_bytes()
    with pytest.raises(FednotesError, match="another program changed it"):
        two.decide(two.items[3], "delete")
    assert file_of.read_bytes() == before


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
def test_another_file_is_refused_and_stays(content: str, file_of: Path) -> None:
    file_of.write_text(content, "latin-1")
    with pytest.raises(DataError, match="--corrections"):
        review(file_of)
    assert file_of.read_text("latin-1") == content


# ---- odd requests


def test_what_is_too_long_or_no_form_is_refused(file_of: Path) -> None:
    browser = client(review(file_of))
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
    assert "written are jsonl, brat" in browser.get("/export/exe").text
    for query in (
        "page=-1",
        "page=99999999999",
        "least=nan",
        "most=1e999",
        "kind=x&order=y",
    ):
        assert browser.get(f"/errors?{query}").status_code == 200


def test_notes_are_read_while_the_page_waits(file_of: Path) -> None:
    """What goes wrong in the thread is told on the page."""

    def fail() -> Review:
        raise DataError("n.tsv:3: no tag")

    desk = Desk(Later(fail))
    browser = TestClient(application(desk), base_url=ROOT + desk.root)
    answer = browser.get(f"/errors?token={desk.token}")
    assert (answer.status_code, "n.tsv:3: no tag" in answer.text) == (400, True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tagger; tests only read it."""
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(build_model(MODEL, TagSet(("ADR", "Drug")), 1), folder)
    return folder


def test_notes_may_be_in_a_named_encoding(model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_bytes('{"text": "Übelkeit"}'.encode("cp1252"))
    with pytest.raises(DataError, match="is not UTF-8: name the encoding"):
        opened([model, notes])
    found = opened([model, notes], encoding="cp1252").review
    assert found is not None
    assert (made := found.get(20)) is not None
    assert [own.text for own in made.sources[0].documents] == ["Übelkeit"]


def test_wrong_lines_of_notes_may_be_left_out(model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_text('{"text": "A rash."}\n{"text": \n')
    with pytest.raises(DataError, match=r"notes.jsonl:2"):
        opened([model, notes])
    found = opened([model, notes], on_error="skip").review
    assert found is not None
    assert (made := found.get(20)) is not None
    assert len(made.sources[0].documents) == 1


def test_where_decisions_cannot_be_written_is_said_at_the_start(
    model: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "note.txt"
    notes.write_text("A rash.")
    for file in (notes / "kept.json", tmp_path):
        with pytest.raises(
            ConfigError, match=f"{file}: decisions cannot be written there"
        ):
            opened([model, notes], file=file)
    opened([model, notes], file=tmp_path / "new" / "kept.json")


def test_paths_that_are_no_model_and_notes_are_refused(
    give: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, told = give("ui", tmp_path)
    assert (code, told.count("\n")) == (2, 1)
    assert "fednotes ui MODEL NOTES" in told
