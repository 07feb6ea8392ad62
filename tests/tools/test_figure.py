"""The figures show what the tables of the pages state."""

from __future__ import annotations

from pathlib import Path

from figure import DRAWN, PROGRAMS, Point, growth, scores, sites_points

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
TABLE = """\
| run | condition | MB a site | s | micro strict f1 | gap closed |
| maccrobat, one place | pooled | – | 180 ± 56 | 57.2 ± 0.8 |  |
| maccrobat, 20 silos, alone | alone | – | 1021 ± 43 | 31.0 ± 2.2 |  |
| maccrobat, 20 silos, FedAvg | federated | 260.34 ± 0.00 | 206 ± 67 | 22.9 ± 1.9 | -0.31 ± 0.12 |
"""


def test_scores_are_read_from_the_column_of_f1() -> None:
    """By hand: not the seconds before it, nor the gap behind it."""
    expected = {
        "": {1: (57.2, 0.8)},
        "alone": {20: (31.0, 2.2)},
        "FedAvg": {20: (22.9, 1.9)},
    }
    assert scores(TABLE) == expected


def test_the_page_has_every_score_of_the_figure() -> None:
    table_scores = scores(PAGE.read_text("utf-8"))
    assert {row: [*table_scores[row]] for row in DRAWN} == {
        row: [5, 10, 20] for row in DRAWN
    }
    assert [*table_scores[""]] == [1]


def test_growth_is_read_from_the_table_of_its_section() -> None:
    """Not tables of other sections, which have as many columns."""
    page = """
| notes read, one thread | 10 | 1 | 1 |

## Growth

| work | size | seconds | MB |
|---|---:|---:|---:|
| notes read, one thread | 1,000 | 2.5 | 30 |
| notes read, one thread | 16,000,000 | 0.00045 | 0 |
| terms, matched | 5 | 7 | 9 |

## Predictions

| notes read, one thread | 11 | 1 | 1 |
"""
    assert growth(page) == {
        "notes read, one thread": [Point(1000, 2.5, 30), Point(16e6, 0.00045, 0)],
        "terms, matched": [Point(5, 7, 9)],
    }


def test_the_page_of_performance_has_every_kind_of_work() -> None:
    page = (PAGE.parent / "performance.md").read_text("utf-8")
    assert [len(points) >= 3 for points in growth(page).values()] == [True] * 5


def test_numbers_of_sites_are_read_from_the_table_beside_flower() -> None:
    """Not from the table of sites before it, which has as many columns."""
    page = """
## Number of sites

| 3 | 0.03 | 0.50 ms | | 0.51 GB |
| 4 | 0.03 | 5 | 6.5 | 7 |

### Compared with Flower's simulation

| sites | fednotes, s per round | MB | Flower, s per round | MB |
|---:|---:|---:|---:|---:|
| 1,000 | 4.370 | 2,095 | 48.883 | 6,913 |

## Predictions

| 5 | 0.03 | 5 | 6.5 | 7 |
"""
    assert sites_points(page) == {
        "fednotes": [Point(1000, 4.37, 2095)],
        "Flower": [Point(1000, 48.883, 6913)],
    }


def test_the_page_of_performance_has_both_programs_at_each_number_of_sites() -> None:
    page = (PAGE.parent / "performance.md").read_text("utf-8")
    points = sites_points(page)
    assert [*points] == [*PROGRAMS]
    assert {
        program: [int(point.size) for point in points[program]] for program in points
    } == {program: [3, 30, 300, 1000] for program in PROGRAMS}
