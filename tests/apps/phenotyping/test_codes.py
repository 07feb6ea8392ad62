"""Codes and categories, compared with rules written by hand and with plain loops."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from time_limits import processor_time_below

from fednotes.apps.phenotyping.code_tables import read_codiesp, read_mimic
from fednotes.apps.phenotyping.codes import (
    SYSTEMS,
    choose_categories,
    count_categories,
    find_category,
    list_job_categories,
    list_public_categories,
    make_output_labels,
    make_phenotype_labels,
    normalise_code,
    parse_code,
    remove_held_out_codes,
)
from fednotes.core.errors import ConfigError, DataError


def _patients(count: int, seed: int, name: str = "p") -> dict[str, frozenset[str]]:
    """Return random codes of three systems, some patients without any."""
    rng = random.Random(seed)
    every = [
        f"icd9:{n}"
        for n in ("4019", "4011", "0389", "25000", "V4581", "E8801", "E8859")
    ]
    every += ["icd9proc:0331", "icd9proc:3605", "cpt:99254", "cpt:99255"]
    return {
        f"{name}{i}": frozenset(rng.sample(every, rng.randint(0, 6)))
        for i in range(count)
    }


WRITTEN = {  # system → text in a table → the code
    "icd9": {
        **{
            "0389": "0389",
            " 401.9 ": "4019",
            "v45.81": "V4581",
            "E880.1": "E8801",
            "389": "389",
        },
        **dict.fromkeys(("4019.0", "4.02E+03", "40", "401999", "٤٠١")),
    },
    "icd9proc": {"03.31": "0331", "3": None, "V45": None},
    "cpt": {
        "00100": "00100",
        "0075T": "0075T",
        "G0364": "G0364",
        "99254.0": None,
        "9925": None,
    },
    "icd10": {"n44.8": "N448", "C7A.00": "C7A00", "N4.48": None},
    "icd10pcs": {"bw03zzz": "BW03ZZZ", "OI1": None},
    "condition": {"320128": "320128", "0": None},
    "procedure": {"": None},
}


@pytest.mark.parametrize("system", WRITTEN)
def test_written_codes_are_normalised_per_system(system: str) -> None:
    for text, code in WRITTEN[system].items():
        assert normalise_code(system, text) == (code and f"{system}:{code}"), text


def test_codes_are_grouped_by_the_rule_of_their_system() -> None:
    """External causes keep four characters on request."""
    for code, expected, whole_category in (
        ("icd9:0389", "icd9:038", None),
        ("icd9:401", "icd9:401", None),
        ("icd9:4019", "icd9:401", "icd9:401"),
        ("icd9:V4581", "icd9:V45", None),
        ("icd9:E8801", "icd9:E88", "icd9:E880"),
        ("icd9proc:0331", "icd9proc:03", None),
        ("cpt:99254", "cpt:99254", None),
        ("icd10:N448", "icd10:N44", None),
        ("icd10:E1165", "icd10:E11", "icd10:E11"),
        ("icd10pcs:BW03ZZZ", "icd10pcs:BW0", None),
        ("condition:320128", "condition:320128", None),
    ):
        assert find_category(code) == find_category(find_category(code)) == expected
        assert find_category(code, whole_causes=True) == (whole_category or expected)


def test_a_job_may_name_any_prefix_of_a_code() -> None:
    """Texts of up to three characters and longer ones are compared with all codes."""
    categories = [f"{n:03d}" for n in range(1000)] + [f"V{n:02d}" for n in range(100)]
    codes = {
        code + more for code in categories for more in ("", *_digits(1), *_digits(2))
    }
    codes |= {f"E{n:03d}" + more for n in range(1000) for more in ("", *_digits(1))}
    beginnings = {code[:n] for code in codes for n in range(1, 7)}
    rng = random.Random(4)
    texts = ["".join(t) for n in (1, 2, 3) for t in product("0379EVXZ", repeat=n)]
    texts += [
        "".join(rng.choices("0123456789EV", k=rng.randint(4, 6))) for _ in range(500)
    ]
    for text in texts:
        if text in beginnings:
            assert parse_code(f"icd9:{text}") == ("icd9", text)
        else:
            with pytest.raises(
                ConfigError, match="codes of icd9 do not begin like this"
            ):
                parse_code(f"icd9:{text}")


def _digits(length: int) -> list[str]:
    return [f"{n:0{length}d}" for n in range(10**length)]


def test_code_names_of_a_job_are_normalised() -> None:
    for name, expected in {
        **{"ICD9:274": ("icd9", "274"), "ICD10:e11.9": ("icd10", "E119")},
        **{
            "icd10:E11.": ("icd10", "E11"),
            " Condition:316866 ": ("condition", "316866"),
        },
        **{"icd10:C7": ("icd10", "C7"), "icd10:M1A": ("icd10", "M1A")},
        **{"cpt:992": ("cpt", "992"), "icd10pcs:BW0": ("icd10pcs", "BW0")},
    }.items():
        assert parse_code(name) == expected
    for name in ("4019", "icd9:", "icd11:4019", ":401"):
        for use in (find_category, lambda name: remove_held_out_codes({}, [name])):
            with pytest.raises(ConfigError):
                use(name)


@pytest.mark.parametrize(
    "name",
    ["icd9:zzz", "icd10:M1O", "icd10:E1.1", "icd10:11", "icd9proc:V4", "cpt:99254.0", "cpt:99Z",
     "condition:E11", "condition:0", "icd10pcs:OI1"],
)  # fmt: skip
def test_impossible_code_prefixes_are_refused(name: str) -> None:
    """They are refused, and the message has a code in the right form."""
    system = name.partition(":")[0]
    example = f"{system}:{SYSTEMS[system].example}"
    assert normalise_code(*example.split(":")) == ":".join(parse_code(example))
    with pytest.raises(
        ConfigError, match=f"codes of {system} do not begin like this: .* {example}$"
    ):
        remove_held_out_codes({}, [name])
    with pytest.raises(ConfigError, match="do not begin like this"):
        make_phenotype_labels([], {}, {"x": [name]})


def test_outputs_named_by_a_job_are_accepted() -> None:
    names = [
        "ICD9:401",
        "icd9:v45",
        "condition:316866",
        "icd9proc:36",
        "cpt:99254",
        "icd9:E88",
    ]
    assert list_job_categories(names) == (
        *(
            "icd9:401",
            "icd9:V45",
            "condition:316866",
            "icd9proc:36",
            "cpt:99254",
            "icd9:E88",
        ),
    )
    every = list_public_categories(("icd9", "icd9proc", "icd10"))
    assert list_job_categories(every) == every
    with_whole_causes = list_public_categories(("icd9",), whole_causes=True)
    assert (
        list_job_categories(with_whole_causes, whole_causes=True) == with_whole_causes
    )
    for name, message in (
        ("icd9:4019", "within the category icd9:401"),
        ("icd9:E880", "within the category icd9:E88"),
        ("icd9:40", "covers several categories.* icd9:401$"),
        ("cpt:992", "covers several categories.* cpt:99254$"),
        ("ICD9:401", "'ICD9:401' is repeated"),
        ("icd9:zz", "do not begin like this"),
    ):
        with pytest.raises(ConfigError, match=message):
            list_job_categories(["icd9:401", name])
    with pytest.raises(ConfigError, match="covers several categories"):
        list_job_categories(["icd9:E88"], whole_causes=True)


def test_counts_cover_patients_and_add_up_over_sites() -> None:
    """Counted in a loop over patients; the counts of the parts of a split add up."""
    patients = _patients(200, 0)
    expected: dict[str, int] = {}
    for codes in patients.values():
        for name in {find_category(code) for code in codes}:
            expected[name] = expected.get(name, 0) + 1
    names = list_public_categories()
    parts = [dict(list(patients.items())[site::3]) for site in range(3)]
    vectors = [count_categories(part, names) for part in parts]
    assert {
        n: int(c) for n, c in zip(names, sum(vectors), strict=True) if c
    } == expected
    assert all(vector.dtype == np.int64 for vector in vectors)


def test_the_chosen_outputs_depend_only_on_the_total() -> None:
    totals = {"icd9:401": 1001, "icd9:038": 1000, "cpt:99254": 5000}
    assert choose_categories(totals, 1001) == ("cpt:99254", "icd9:401")
    assert choose_categories(totals, 1000) == ("cpt:99254", "icd9:038", "icd9:401")
    assert choose_categories(dict(reversed(totals.items())), 1000) == choose_categories(
        totals, 1000
    )
    with pytest.raises(DataError, match=r"has 6000 patients .* has 5000"):
        choose_categories(totals, 6000)
    with pytest.raises(DataError, match="has 0\\)"):
        choose_categories({}, 1)


def test_the_public_lists_hold_each_category_once() -> None:
    for systems, whole_causes, count in (
        (("icd9",), False, 1_200),
        (("icd9",), True, 2_100),
        (("icd9proc",), False, 100),
        (("cpt",), False, 360_000),
        (("icd10",), False, 8_840),
        (("icd10pcs",), False, 34**3),
    ):
        names = list_public_categories(systems, whole_causes=whole_causes)
        assert len(names) == len(set(names)) == count
        for name in random.Random(0).sample(names, 50):
            zero = "0" * (":E" in name and systems == ("icd9",) and not whole_causes)
            assert normalise_code(systems[0], name.partition(":")[2] + zero)
    assert "icd9:E880" in list_public_categories(("icd9",), whole_causes=True)
    with pytest.raises(ConfigError, match="no list of all categories of 'condition'"):
        list_public_categories(("condition",))


def test_the_output_matrix_equals_a_loop() -> None:
    """The expected matrix comes from a loop over patients, codes and outputs."""
    coded = _patients(150, 1)
    patients = [*coded, "uncoded"]
    outputs = sorted(
        {find_category(code) for codes in coded.values() for code in codes}
    )[2:]
    labels = make_output_labels(patients, coded, outputs)
    assert labels.dtype == np.int8
    for row, patient in zip(labels.tolist(), patients, strict=True):
        known = coded.get(patient)
        expected = [
            -1 if known is None else any(find_category(c) == o for c in known)
            for o in outputs
        ]
        assert row == expected
    # A site without a disease at all: its column is all absent, not missing.
    matrix_of_two = make_output_labels(
        ["a", "b"], {"a": {"icd9:4019"}, "b": {"icd9:0389"}}, ["icd9:401", "icd9:571"]
    )
    assert matrix_of_two.tolist() == [[1, 0], [0, 0]]
    assert make_output_labels([], {}, ["icd9:401", "icd9:571"]).shape == (0, 2)


def test_held_out_codes_are_removed_and_their_patients_kept() -> None:
    codes = {
        "a": {"icd10:E119", "icd10:I10", "icd10:N448"},
        "b": {"icd10:E1165"},
        "c": {"icd10pcs:E119000", "icd10:I110"},
        "d": set[str](),
    }
    remaining, counts = remove_held_out_codes(
        codes, ["icd10:E11", "icd10:i10", "icd10:F17"]
    )
    assert remaining == codes | {"a": {"icd10:N448"}, "b": set()}
    assert counts == {"icd10:E11": 2, "icd10:i10": 1, "icd10:F17": 0}
    narrow, _ = remove_held_out_codes(codes, ["icd10:E11.9"])
    assert narrow["b"] == {"icd10:E1165"}
    assert codes["b"] == {"icd10:E1165"}


@pytest.mark.parametrize("system", ["condition", "procedure"])
def test_a_concept_id_matches_only_itself(system: str) -> None:
    """3 begins 316866 but is another concept; a CPT code has five characters."""
    codes = {"a": {f"{system}:316866", "cpt:99254"}, "b": {f"{system}:3", "cpt:99255"}}
    remaining, counts = remove_held_out_codes(codes, [f"{system}:3", "cpt:99254"])
    assert remaining == {"a": {f"{system}:316866"}, "b": {"cpt:99255"}}
    assert counts == {f"{system}:3": 1, "cpt:99254": 1}
    labels = make_phenotype_labels(
        ["a", "b"],
        codes,
        {"x": [f"{system}:3"], "y": [f"{system}:316866"], "z": ["cpt:9925"]},
    )
    assert labels.tolist() == [[0, 1, 1], [1, 0, 1]]


def test_thousands_of_names_of_codes_are_compared_in_linear_time() -> None:
    """A job of 1 MB can name tens of thousands of codes."""
    names = [f"condition:{number}" for number in range(1, 4001)]
    codes = {f"p{number}": frozenset({name}) for number, name in enumerate(names)}
    with processor_time_below(3):  # it was twenty seconds
        remaining, counts = remove_held_out_codes(codes, names)
        assert not any(remaining.values())
        assert set(counts.values()) == {1}
        assert make_phenotype_labels(list(codes), codes, {"any": names}).all()


def test_phenotypes_are_derived_from_codes() -> None:
    """A phenotype that nobody has gets a column with one class."""
    codes = {"a": {"icd10:E119"}, "b": {"icd10:I10"}, "c": {"icd10:N448"}}
    phenotypes = {"diabetes": ["icd10:E10", "icd10:E11"], "tobacco": ["icd10:F17"]}
    labels = make_phenotype_labels(["a", "b", "c", "x"], codes, phenotypes)
    assert labels.dtype == np.int8
    assert labels.tolist() == [[1, 0], [0, 0], [0, 0], [-1, -1]]


@pytest.mark.corpora
def test_outputs_of_the_demo_patients_equal_a_loop(corpora: Path) -> None:
    """A loop over rows gives the counts; parts of a hospital agree on its outputs."""
    codes = read_mimic(corpora / "mimic_iii_demo").codes
    names = list_public_categories()
    totals = dict(zip(names, count_categories(codes, names).tolist(), strict=True))
    outputs = choose_categories(totals, 30)
    assert make_output_labels(list(codes), codes, outputs).sum(0).min() >= 30
    assert ("icd9:401" in outputs) == (
        sum(any(c.startswith("icd9:401") for c in g) for g in codes.values()) >= 30
    )
    halves = [dict(list(codes.items())[i::2]) for i in range(2)]
    counted = sum(count_categories(half, names) for half in halves)
    assert dict(zip(names, counted.tolist(), strict=True)) == totals


@pytest.mark.corpora
def test_held_out_phenotypes_of_codiesp_have_the_expected_counts(corpora: Path) -> None:
    """Hypertension, diabetes and tobacco: no output of stage 1 is one of them."""
    codes = read_codiesp(corpora / "codiesp", "D").codes
    held_out = {
        "hypertension": ["icd10:I10"],
        "diabetes": ["icd10:E11"],
        "tobacco": ["icd10:F17"],
    }
    labels = make_phenotype_labels(list(codes), codes, held_out)
    remaining, counts = remove_held_out_codes(
        codes, [name for names in held_out.values() for name in names]
    )
    assert labels.sum(0).tolist() == list(counts.values())
    assert min(counts.values()) > 20
    names = list_public_categories(("icd10",))
    counted = dict(zip(names, count_categories(remaining, names).tolist(), strict=True))
    outputs = choose_categories(counted, 20)
    assert not set(outputs) & {name for names in held_out.values() for name in names}
    assert len(remaining) == len(codes)
