"""A hospital's own tables of codes and labels, in jobs and in scores.

The expected values are read off small files that are written here. The notes of patient
i name term i % 3.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patient_files import SECRET, job, labels_of, load, save_model, write, write_terms

from fednotes.api import evaluate
from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.store import trying_to_lock_folder
from fednotes.encoders.token_cache import clear_caches
from fednotes.jobs.job import load_sites

TERMS = ("asthma", "cough", "gout")
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write 30 patients with notes, 4 more in a test part, and their codes and labels.

    All but patients 0 and 1 have codes; patients 0 to 31 have labels. codes.csv has a
    row per patient, with MIMIC-IV's columns under other names; patient 99 has no notes.
    labels.csv is long: gout where the notes name it, asthma for every second patient;
    one pair is labelled twice, one row is damaged; patients 98 and 99 have no notes.
    """
    write_terms(tmp_path, *TERMS)
    for name, numbers in (("notes", range(30)), ("test", range(30, 34))):
        notes = [f'{i},"{SECRET} has {TERMS[i % 3]}."' for i in numbers]
        write(tmp_path / f"{name}.csv", "patient,text", notes)
    coded = [
        f"{i},{'4019' if i % 2 else 'I10'},{9 if i % 2 else 10}"
        for i in (*range(2, 30), 99)
    ]
    write(tmp_path / "codes.csv", "mrn,icd_code,icd_version", [*coded, "1,2"])
    judged = [f"{i},gout,{'Y' if i % 3 == 2 else 'N'}" for i in range(32)]
    judged += [f"{i},asthma,{i % 3}" for i in range(0, 32, 2)]
    judged += ["0,gout,Y", "98,gout,Y", "99,gout,N", "5,gout,perhaps"]
    write(tmp_path / "labels.csv", "patient,phenotype,label", judged)
    return tmp_path


CODES = {"codes": "codes.csv", "codes_format": "table", "patient_column": "mrn"}
SITE = {"notes": "notes.csv", **CODES, "labels": "labels.csv"}


def expected(i: int) -> list[int]:
    """Return a patient's labels of asthma and gout; 0's gout has two different labels."""
    asthma = i % 3 if i % 2 == 0 and i < 32 else -1
    return [asthma, -1 if i == 0 or i >= 32 else int(i % 3 == 2)]


def test_codes_and_labels_of_tables_are_read(place: Path) -> None:
    """Files become each patient's bag, codes and labels; counts are reported."""
    loaded = load(place, sites={"a": SITE})
    (site,) = loaded.data
    assert site.phenotypes == ("asthma", "gout")
    assert labels_of(site) == {str(i): expected(i) for i in range(30)}
    assert site.codes == {
        str(i): {"icd9:4019" if i % 2 else "icd10:I10"} for i in range(2, 30)
    }
    codes, labels = place / "codes.csv", place / "labels.csv"
    twice = f"the same pair has another label at {labels}:2: neither is used"
    assert loaded.remarks[:7] == (
        f"a: {labels}:53: the label is not one of present, absent, questionable; Y, N, Q, U; 1, 0, 2",
        f"a: {labels}:50: {twice}",
        "a: left out 4 labelled patients without notes at this site",
        f"a: {codes}:31: 2 columns instead of 3",
        "a: 30 patients with 30 notes",
        "a: kept 2 patients without codes; the codes count as unknown",
        "a: left out 1 patient with codes but no notes at this site",
    )
    assert SECRET not in "".join(loaded.remarks)


def test_a_test_part_may_have_its_own_labels(place: Path) -> None:
    """A wide table; both tables label some patients; patient 33 has no label."""
    (place / "judged.tsv").write_text("person_id\tgout\tasthma\n31\tN\tY\n32\tQ\t\n")
    site = {**SITE, "test": "test.csv", "test_labels": "judged.tsv"}
    loaded = load(place, sites={"a": site})
    (loaded_site,) = loaded.data
    assert loaded_site.test.patients == ("30", "31", "32", "33")
    assert loaded_site.test.labels.tolist() == [expected(30), [1, 0], [-1, 2], [-1, -1]]
    assert "a: 1 patient without a label for any phenotype" in loaded.remarks
    table = {k: v for k, v in site.items() if k != "test_labels"}
    (alone,) = load(place, sites={"a": table}).data
    assert alone.test.labels.tolist() == [expected(i) for i in range(30, 34)]


def test_sites_with_different_files_agree_on_phenotypes_by_name(place: Path) -> None:
    """One table is long, one wide in another order; equal ids get different names."""
    rows = [f"{i},{i % 2},{'U' if i % 2 else 'Q'}" for i in range(30)]
    write(place / "wide.csv", "patient,gout,asthma", rows)
    second_site = {"notes": "notes.csv", "labels": "wide.csv", "unmentioned": "absent"}
    a, b = load(place, sites={"a": SITE, "b": second_site}).data
    assert a.phenotypes == b.phenotypes == ("asthma", "gout")
    assert labels_of(b) == {f"b/{i}": [0 if i % 2 else 2, i % 2] for i in range(30)}
    (place / "few.csv").write_text("patient,gout\n1,Y\n")
    few = {"notes": "notes.csv", "labels": "few.csv"}
    with pytest.raises(DataError, match=r"have different phenotypes \(asthma\)"):
        load(place, sites={"a": SITE, "b": few})


def test_phenotypes_are_derived_from_codes_of_a_table(place: Path) -> None:
    (place / "more.csv").write_text(
        "patient,code,system\n3,401.9,icd9\n3,0331,icd9proc\n"
    )
    site = {"notes": "notes.csv", "codes": ["more.csv"], "codes_format": "table"}
    (loaded_site,) = load(
        place, sites={"a": site}, phenotypes={"hypertension": ["icd9:401"]}
    ).data
    assert labels_of(loaded_site) == {str(i): [1 if i == 3 else -1] for i in range(30)}
    assert loaded_site.codes == {"3": {"icd9proc:0331"}}


@pytest.mark.parametrize(
    ("site", "error", "message"),
    [
        (
            {**SITE, "labels": "none.csv"},
            DataError,
            "site 'a': .*none.csv: no such file",
        ),
        (
            {**SITE, "labels": "terms.tsv"},
            DataError,
            "terms.tsv:1: there is no column 'patient'",
        ),
        (
            {**SITE, "labels": "odd.csv"},
            DataError,
            "none of the 1 labelled patients has notes",
        ),
        (
            {"labels": "labels.csv"},
            ConfigError,
            "a table of labels has no notes: give `notes`",
        ),
        (
            {**SITE, "judgment": "textual"},
            ConfigError,
            "judgment applies to the obesity challenge",
        ),
        (
            {**SITE, "test_labels": "x"},
            ConfigError,
            "test_labels needs `test` and `labels`",
        ),
        (
            {**SITE, "patient_column": "id"},
            DataError,
            "codes.csv:1: there is no column 'id'",
        ),
        ({**SITE, "codes_format": "mimic"}, DataError, "no such folder of tables"),
        ({**SITE, "codes_format": "tabel"}, ConfigError, "codes_format"),
        (
            {"notes": "notes.csv", "system": "icd10"},
            ConfigError,
            'apply only with codes_format = "table"',
        ),
        (
            {"notes": "notes.csv", "patient_column": "x"},
            ConfigError,
            "patient_column needs a tab",
        ),
        (
            {**SITE, "system": "icd"},
            ConfigError,
            "unknown coding system 'icd': did you mean",
        ),
    ],
)
def test_an_error_names_the_place_of_a_mistake(
    place: Path, site: dict[str, Any], error: type[Exception], message: str
) -> None:
    (place / "odd.csv").write_text("patient,gout,asthma\n77,Y,N\n")
    with pytest.raises(error, match=message) as caught:
        load(place, sites={"a": site})
    assert SECRET not in str(caught.value)
    with pytest.raises(
        FednotesError,
        match=r"\[sites.a\]: labels cannot be combined with \[phenotypes\]",
    ):
        load(place, sites={"a": SITE}, phenotypes={"x": ["icd9:401"]})


def test_a_second_test_part_for_the_obesity_challenge_is_refused(place: Path) -> None:
    (place / "folder").mkdir()
    site = {**SITE, "labels": "folder", "test": "test.csv", "test_labels": "labels.csv"}
    with pytest.raises(
        ConfigError, match="the obesity challenge already has a test part"
    ):
        load(place, sites={"a": site})


# evaluate


@pytest.fixture
def run(run_cli: Callable[..., tuple[int, str, str]]) -> Run:
    """Return a function that runs a command and returns stdout and stderr."""

    def run_command(*arguments: object) -> tuple[str, str]:
        _, out, err = run_cli(*arguments)
        assert SECRET not in err
        return out, err

    return run_command


@pytest.fixture
def model(place: Path) -> Path:
    return save_model(place / "model", "terms.tsv", place, "asthma", "gout")


def test_evaluate_scores_against_a_table_of_labels(
    run: Run, model: Path, place: Path
) -> None:
    """Scores equal those with labels in the lines of notes; gout is always right."""
    out, err = run("evaluate", model, place / "notes.csv", "--labels", place / "labels.csv",
                   "--json")  # fmt: skip
    scores = json.loads(out)
    assert scores["by_output"]["gout"]["macro"]["f1"] == 1
    assert scores["by_output"]["gout"]["present"]["support"] == 10
    words = {-1: None, 0: "absent", 1: "present", 2: "questionable"}
    lines = []
    for i in range(30):
        expected_labels = dict(
            zip(("asthma", "gout"), (words[x] for x in expected(i)), strict=True)
        )
        labels = {name: word for name, word in expected_labels.items() if word}
        text = f"{SECRET} has {TERMS[i % 3]}."
        lines.append(json.dumps({"patient": str(i), "text": text, "labels": labels}))
    (place / "gold.jsonl").write_text("\n".join(lines))
    assert scores == evaluate(model, place / "gold.jsonl").to_dict()
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith(
        f"note: {place / 'labels.csv'}:53: the label is not one of"
    )
    assert (
        f"note: left out 4 labelled patients without notes in {place / 'notes.csv'}"
        in notes
    )


def test_evaluate_refuses_notes_without_labels(
    run: Run, model: Path, place: Path
) -> None:
    assert (
        "or a table of labels beside" in run("evaluate", model, place / "notes.csv")[1]
    )
    (place / "odd.csv").write_text("patient,gout\n77,Y\n")
    err = run("evaluate", model, place / "notes.csv", "--labels", place / "odd.csv")[1]
    assert "odd.csv: no patients with notes in" in err
    (place / "other.csv").write_text("patient,Zoster\n7,Y\n8,Y\n")
    err = run("evaluate", model, place / "notes.csv", "--labels", place / "other.csv")[
        1
    ]
    assert "other.csv has labels for Zoster, but the model knows asthma, gout" in err
    assert "rename them with --map" in err
    assert "note: left out 28 patients with notes but no labels" in err
    err = run("evaluate", place, place / "notes.csv", "--labels", place / "other.csv")[
        1
    ]
    assert f"{place}: no model here" in err


# the cache of concepts


def test_concepts_in_the_cache_of_a_site_can_be_cleared(place: Path) -> None:
    """They lie in a folder of their own; the rest of the folder is left as it is."""
    folder = place / "shared"
    folder.mkdir()
    other = folder / "others.txt"
    other.write_text("")
    for path, mode in ((folder, 0o755), (other, 0o644)):
        path.chmod(mode)
    load_sites(job(place, sites={"a": SITE}), cache=folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE(other.stat().st_mode) == 0o644
    assert clear_caches(folder) > 0
    assert sorted(folder.iterdir()) == [folder / "concepts", other]
    assert list((folder / "concepts").iterdir()) == []


def test_clearing_the_cache_removes_concepts(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that another process writes stay, and so do other files."""
    folder = place / "own"
    monkeypatch.setenv("FEDNOTES_CACHE", str(folder))
    load_sites(job(place, sites={"a": SITE}), cache=folder)
    (entry,) = (folder / "concepts").iterdir()
    (entry / "concepts.npy").write_bytes(bytes(2_500_000))
    abandoned = folder / "concepts" / f".{'b' * 32}.{'0' * 16}.old"
    remaining = [
        folder / "concepts" / f".{'a' * 32}.{'0' * 16}.tmp",
        folder / "concepts" / "mine",
    ]
    for each in (abandoned, *remaining):
        each.mkdir()
    with trying_to_lock_folder(remaining[0]):
        assert run("cache", "clear")[0] == f"2.5 MB freed in {folder}\n"
    assert sorted((folder / "concepts").iterdir()) == sorted(remaining)
