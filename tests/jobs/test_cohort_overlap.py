"""Sites whose patients' ids overlap: told apart, counted, and warned of.

Expected counts are of the sites' own parts, by plain loops over ids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fednotes.cli import app
from fednotes.jobs.job import Sites, load_sites
from fednotes.jobs.job_file import parse_job

SECRET = "Wilhelmina"
JOB = """\
method = "phenotype"
[concepts]
dictionary = "terms.tsv"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Notes of a: 0 to 29, b: 20 to 49, c: 40 to 59, d: 60 to 79; all coded."""
    (tmp_path / "terms.tsv").write_text("C1\tgout\nC2\tcough\n")
    for name, numbers in SITES.items():
        notes = [f'{i},"{SECRET} has gout."' for i in numbers]
        (tmp_path / f"{name}.csv").write_text("\n".join(["patient,text", *notes]) + "\n")
    codes = [f"{i},4019,9" for i in range(80)]
    table = "\n".join(["patient,icd_code,icd_version", *codes])
    (tmp_path / "codes.csv").write_text(table + "\n")
    return tmp_path


SITES = {"a": range(30), "b": range(20, 50), "c": range(40, 60), "d": range(60, 80)}


def site(name: str) -> dict[str, Any]:
    return {"notes": f"{name}.csv", "codes": "codes.csv", "codes_format": "table"}


def load(folder: Path, **tables: Any) -> Sites:
    given = {"method": "phenotype", "concepts": {"dictionary": "terms.tsv"}, **tables}
    return load_sites(parse_job(given, "j", folder, "j.toml"), cache=folder / "cache")


def test_who_may_be_trained_on_and_tested_is_counted(place: Path) -> None:
    """b shares ten ids with a, c ten with b, which are renamed there; d none."""
    made = load(place, sites={name: site(name) for name in SITES})
    warnings = [line for line in made.notes if line.startswith("warning: ")]
    parts: dict[str, dict[str, set[int]]] = {}
    for each in made.data:
        groups = {"test": (each.test,), "train": (each.train, each.valid)}
        parts[each.id] = {
            what: {int(p.rpartition("/")[2]) for cohort in of for p in cohort.patients}
            for what, of in groups.items()
        }
    crossed = {
        (x, y): sum(
            (i in parts[x]["train"] and i in parts[y]["test"])
            or (i in parts[x]["test"] and i in parts[y]["train"])
            for i in range(80)
        )
        for x, y in (("a", "b"), ("b", "c"))
    }
    assert min(crossed.values()) > 0
    assert warnings == [
        f"warning: {y}: 10 patients' ids are another site's too: told apart; if they are the "
        f"same people, {number} are trained on at one site and tested at another"
        for (_, y), number in crossed.items()
    ]
    everyone = [p for s in made.data for c in (s.train, s.valid, s.test) for p in c.patients]
    assert len(everyone) == len(set(everyone)) == 100


def test_a_common_test_part_is_no_overlap(place: Path) -> None:
    sites = {name: {**site(name), "test": "d.csv"} for name in "ac"}
    assert not any("warning" in line for line in load(place, sites=sites).notes)


def test_check_warns(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = "".join(
        f'[sites.{n}]\nnotes = "{n}.csv"\ncodes = "codes.csv"\ncodes_format = "table"\n'
        for n in "ab"
    )
    few = "[training]\nmin_patients = 1\n"  # or a simulation would refuse them, and so the check
    (place / "job.toml").write_text(JOB + few + tables)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(sys, "argv", ["fednotes", "check", str(place / "job.toml")])
    app.main()
    caught = capsys.readouterr()
    told = (caught.out + caught.err).splitlines()
    assert sum(line.startswith("warning: b: 10 patients' ids") for line in told) == 1
    assert not any(line.startswith("note: warning") for line in told)
    assert SECRET not in caught.out + caught.err
