"""The page on methods agrees with `fednotes init` and with the results."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from site_facts import facts_of, facts_of_patients

from fednotes.jobs.proposal import Choices, Facts, propose

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "which-method.md"
RESULTS = (ROOT / "docs" / "results.md").read_text("utf-8")
# The notes of each row of the page's first table, and whether `minilm` is installed.
SAME = {"a": {"Drug": 50}, "b": {"Drug": 70}}
DIFFERENT = {"a": {"Drug": 50}, "b": {"Disease": 70}}
NOTES: dict[str, tuple[Facts, bool]] = {
    "annotated with the same entity types": (facts_of(SAME), True),
    "annotated with the same entity types; the extra `transformers` is not installed": (
        facts_of(SAME),
        False,
    ),
    "annotated with different entity types": (facts_of(DIFFERENT), True),
    "annotated with different entity types; the extra `transformers` is not installed": (
        facts_of(DIFFERENT),
        False,
    ),
    "not annotated, with a table of patient labels": (
        facts_of_patients("a", "b"),
        True,
    ),
    "not annotated": (facts_of({"a": {}, "b": {}}), True),
}


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a page's tables, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [at for at, row in enumerate(rows) if set("".join(row)) <= set("-:")]
    return [
        row for at, row in enumerate(rows) if at not in rules and at + 1 not in rules
    ]


def section(anchor: str) -> str:
    """Return the section of docs/results.md with an anchor, with the sections below it."""
    lines = RESULTS.splitlines()
    for first, line in enumerate(lines):
        heading = re.fullmatch(r"(#+) (.+)", line)
        if heading is None:
            continue
        slug = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        if slug == anchor:
            level = len(heading[1])
            end = re.compile(rf"#{{1,{level}}} ")
            last = next(
                (n for n in range(first + 1, len(lines)) if end.match(lines[n])),
                len(lines),
            )
            return "\n".join(lines[first:last])
    raise AssertionError(f"docs/results.md has no section #{anchor}")


def test_the_page_recommends_what_init_proposes() -> None:
    rows = {row[0]: row[1:] for row in table_rows(PAGE.read_text("utf-8"))}
    for words, (facts, has_minilm) in NOTES.items():
        proposal = propose(facts, Choices(), has_minilm=has_minilm)
        method, model = rows[words]
        assert method == f"`{proposal.method.value}`", words
        assert model.strip("`") == proposal.model.value, words


def test_the_first_job_of_the_notes_page_is_the_one_that_init_proposes() -> None:
    """The sites of docs/notes.md annotate the same types."""
    text = (ROOT / "docs" / "notes.md").read_text("utf-8")
    block = re.search(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    proposal = propose(facts_of(SAME), Choices(), has_minilm=True)
    assert tomllib.loads(block[1])["method"] == proposal.method.value


@pytest.mark.parametrize("page", ["which-method.md", "notes.md"])
def test_types_are_rare_up_to_the_expected_mentions_that_the_page_names(
    page: str,
) -> None:
    """Both sites have as many notes, so as many mentions are expected at each."""
    text = " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    limit = re.search(r"(\d+) mentions would be expected in its notes", text)
    assert limit is not None
    expected = int(limit[1])
    methods = []
    for mentions in (expected - 1, expected):
        sites = {"a": {"Drug": 50, "Dose": mentions}, "b": {"Drug": 70}}
        proposal = propose(facts_of(sites), Choices(), has_minilm=True)
        methods.append(proposal.method.value)
    assert methods == ["finetune", "distill"]


def test_every_row_of_the_proposals_table_is_tested() -> None:
    table = PAGE.read_text("utf-8").partition("\n## ")[0]
    assert [row[0] for row in table_rows(table)] == list(NOTES)


@pytest.mark.parametrize("path", [PAGE, ROOT / "README.md"], ids=lambda path: path.stem)
def test_numbers_are_in_the_section_that_their_row_links(path: Path) -> None:
    """There, a reader finds how a number was measured."""
    checked = 0
    for row in table_rows(path.read_text("utf-8")):
        anchors = re.findall(r"results\.md#([\w-]+)\)", " ".join(row))
        if not anchors:
            continue
        source = "\n".join(map(section, anchors))
        known = set(re.findall(r"\d+\.\d+", source))
        numbers = {
            number for cell in row for number in re.findall(r"\b\d+\.\d+\b", cell)
        }
        assert numbers - known == set(), row
        checked += len(numbers)
    assert checked > 10


def test_the_readme_shows_the_two_stage_method_beside_the_bag_of_concepts() -> None:
    """The row links to the two-stage method, but its F1 is that of the bag.

    The list below the table names that of the two-stage method.
    """
    results = table_rows(section("two-stage-phenotyping"))
    f1 = {row[0]: row[4] for row in results if "federated" in row}
    text = (ROOT / "README.md").read_text("utf-8")
    (row,) = (row for row in table_rows(text) if "#two-stage-phenotyping)" in row[0])
    assert "bag of concepts" in row[0]
    two_stage = f1["7 federated representation, federated"]
    assert f"the federated two-stage method reaches {two_stage}" in text
    assert row[2] == f1["2 bag, federated"]
