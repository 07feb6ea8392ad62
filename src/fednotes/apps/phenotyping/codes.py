"""Billing codes → categories → the outputs that stage 1 learns to predict.

A code is written `<system>:<code>`, in capitals and without a dot, since "4019" is
hypertension among ICD-9 diagnoses and something else among procedures. A job may write
it with the dot, and in any case ("ICD9:401.9").

    system     what                           category (what is left of the code)
    icd9       ICD-9-CM diagnoses             first 3 characters: icd9:401, icd9:V45, icd9:E88
    icd9proc   ICD-9-CM procedures            first 2 digits: icd9proc:36
    cpt        CPT (and HCPCS)                all 5 characters: cpt:99254
    icd10      ICD-10(-CM) diagnoses          first 3 characters: icd10:N44
    icd10pcs   ICD-10-PCS procedures          first 3 characters: icd10pcs:BT4
    condition  OMOP condition concept         the concept itself
    procedure  OMOP procedure concept         the concept itself

Liu, Dligach and Miller 2019 say no more than "174 ICD or CPT codes", after Dligach and
Miller
2018. The first three rules are those of the latter's published program. That program
reads procedure codes as numbers, so it loses leading zeros ("0331" counts as 33), and
CPT codes from the column of numbers, where codes with a letter are missing; we read
both as strings, so a few outputs may differ from the paper's 174. An ICD-9 external
cause has 4 characters in the code book (`whole_causes`); the program cuts it to 3 like
the others. The other four rules are ours. Where a job names a code, it means every code
that begins so (icd10:E11 is icd10:E119 too); a CPT code is whole with its five
characters, and an OMOP concept means itself alone, since 3 has nothing to do with
316866.

Outputs of several sites are agreed on without any site's own list: `public_categories`
lists every possible category, a site counts its patients in each, and only the sum of
these counts goes into `choose`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from string import ascii_uppercase, digits
from sys import intern
from typing import Final

import numpy as np

from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, UNLABELLED
from fednotes.core.errors import ConfigError, DataError, nearest

Codes = Mapping[str, Collection[str]]  # patient → codes

_PCS = "".join(c for c in digits + ascii_uppercase if c not in "IO")
_LONGEST: Final = 8  # characters of a code with a dot


@dataclass(frozen=True, slots=True)
class System:
    """A coding system.

    length: how many characters of a code make its category; None, all of them, and a
    code then has no longer ones below it. form: of a whole code; ending in zeros must
    be possible in it, so that beginnings can be told. example: a code, for messages.
    categories: their forms, of capitals and the characters that a small letter stands
    for (`_PLACES`).
    """

    length: int | None
    form: re.Pattern[str]
    example: str
    categories: tuple[str, ...] = ()


_PLACES: Final = {
    **{"d": digits, "m": digits + "FMTU", "p": _PCS, "u": ascii_uppercase},
    "v": ascii_uppercase[:22],
}
_ICD9 = r"(?:[0-9]{3}|V[0-9]{2})(?:\.?[0-9]{1,2})?|E[0-9]{3}(\.?[0-9])?"
# Neither book of ICD-10 has an O or I behind the first letter: they would be taken for
# 0 and 1.
_ICD10 = rf"[A-Z][0-9][{_PCS}](?:\.?[{_PCS}]{{1,4}})?"
SYSTEMS: Final[dict[str, System]] = {
    "icd9": System(3, re.compile(_ICD9), "401.9", ("ddd", "Edd", "Vdd")),
    "icd9proc": System(2, re.compile(r"[0-9]{2}(?:\.?[0-9]{1,2})?"), "36.01", ("dd",)),
    "cpt": System(
        5, re.compile(r"[0-9]{4}[0-9FMTU]|[A-V][0-9]{4}"), "99254", ("ddddm", "vdddd")
    ),
    "icd10": System(3, re.compile(_ICD10), "E11.9", ("udp",)),
    "icd10pcs": System(3, re.compile(rf"[{_PCS}]{{3,7}}"), "BW03ZZZ", ("ppp",)),
    "condition": System(None, re.compile(r"[1-9][0-9]*"), "316866"),
    "procedure": System(None, re.compile(r"[1-9][0-9]*"), "4230911"),
}


def system_of(name: str) -> System:
    """The coding system of this name. Raises ConfigError for an unknown one."""
    if name not in SYSTEMS:
        raise ConfigError(f"unknown coding system {name!r}: {nearest(name, SYSTEMS)}")
    return SYSTEMS[name]


@lru_cache(maxsize=1 << 17)
def code_of(system: str, text: str) -> str | None:
    """The code `<system>:<code>` that a table's text stands for; None if it is no such
    code.

    A dot must be where the system has it: "4019.0", a spreadsheet's reading of 4019, is
    none. Leading zeros that were lost already cannot be told: "389" is a code, as
    "0389" is.
    """
    raw = text.strip().upper()
    if SYSTEMS[system].form.fullmatch(raw) is None:
        return None
    return intern(f"{system}:{raw.replace('.', '')}")


def parse(name: str) -> tuple[str, str]:
    """System and code of `<system>:<code>`, as codes are written here; case is of no
    account.

    The code may be the beginning of codes. Raises ConfigError for anything else, and
    for what no code of the system begins with: it would never match, and nobody would
    know.
    """
    named, colon, code = name.partition(":")
    system, raw = named.strip().lower(), code.strip().upper()
    if not colon or not raw:
        raise ConfigError(
            f"{name!r} is no code: write <system>:<code>, such as icd10:I10"
        )
    of = system_of(system)
    # whether a code can begin so, or is this: "C7", "E11.", not "E1."
    if not any(of.form.fullmatch(raw + "0" * zeros) for zeros in range(_LONGEST)):
        raise ConfigError(
            f"{name!r}: no code of {system} begins so: write one such as {system}:{of.example}"
        )
    return system, raw.replace(".", "")


@lru_cache(maxsize=1 << 17)
def category(code: str, whole_causes: bool = False) -> str:
    """The category of a code. whole_causes: ICD-9 external causes keep 4 characters,
    not 3."""
    system, rest = parse(code)
    return intern(f"{system}:{rest[: _length(system, rest, whole_causes)]}")


def _length(system: str, code: str, whole_causes: bool) -> int | None:
    cause = whole_causes and system == "icd9" and code.startswith("E")
    return 4 if cause else SYSTEMS[system].length


def categories_of_job(
    names: Iterable[str], whole_causes: bool = False
) -> tuple[str, ...]:
    """The categories that a job names as outputs, as `category` writes them, in their
    order.

    Raises ConfigError for a name that is no code, one that is a code below a category
    or the beginning of several (neither would ever be present), and one that is there
    twice.
    """
    made: dict[str, None] = {}
    for name in names:
        system, code = parse(name)
        whole = category(name, whole_causes)
        if whole != f"{system}:{code}":
            raise ConfigError(
                f"{name!r} is below the category {whole}: outputs are categories"
            )
        if len(code) < (_length(system, code, whole_causes) or 1):
            example = category(f"{system}:{SYSTEMS[system].example}")
            raise ConfigError(
                f"{name!r} begins several categories: name each, such as {example}"
            )
        if whole in made:
            raise ConfigError(f"{name!r} is there twice")
        made[whole] = None
    return tuple(made)


def category_counts(
    codes: Codes, names: Sequence[str], whole_causes: bool = False
) -> np.ndarray:
    """(names,) int64: patients in each of these categories; a patient counts once in
    each.

    names: a public list such as `public_categories`, so that a sum over sites may be
        shown.
    """
    counted: Counter[str] = Counter()
    for given in codes.values():
        counted.update({category(code, whole_causes) for code in given})
    return np.fromiter((counted[name] for name in names), np.int64, len(names))


def choose(total_counts: Mapping[str, int], minimum: int) -> tuple[str, ...]:
    """The categories of at least `minimum` patients over all sites, in order of their
    names.

    Raises DataError if no category has so many.
    """
    chosen = tuple(
        sorted(name for name, count in total_counts.items() if count >= minimum)
    )
    if not chosen:
        most = max(total_counts.values(), default=0)
        raise DataError(
            f"no category of codes has {minimum} patients (the most common one has {most}): "
            "lower [training] minimum, or give more patients"
        )
    return chosen


@lru_cache(maxsize=16)
def public_categories(
    systems: tuple[str, ...] = ("icd9", "icd9proc", "cpt"), whole_causes: bool = False
) -> tuple[str, ...]:
    """Every category that a code of these systems can have, whether or not it occurs.

    ICD-9 1,200 (with `whole_causes` 2,100), its procedures 100, CPT 360,000, ICD-10
    8,840, ICD-10-PCS 39,304. Raises ConfigError for OMOP's systems, whose concepts have
    no such list: give the concepts that are asked for.
    """
    listed: list[str] = []
    for system in systems:
        if system_of(system).length is None:
            raise ConfigError(
                f"there is no list of all categories of {system!r}: give the concepts to predict"
            )
        for form in SYSTEMS[system].categories:
            places = form + "d" if whole_causes and form[0] == "E" else form
            codes = product(*(_PLACES.get(place, place) for place in places))
            listed += [f"{system}:{''.join(code)}" for code in codes]
    return tuple(listed)


def output_matrix(
    patients: Sequence[str],
    codes: Codes,
    outputs: Sequence[str],
    whole_causes: bool = False,
) -> np.ndarray:
    """The labels of stage 1: (patients, outputs) int8.

    A code's category is present (1); a patient with codes but none of it has it not
    (0). A patient who is not in `codes` at all is unlabelled (-1): nobody coded the
    stay, so nothing is known to be absent.
    """
    column = {name: at for at, name in enumerate(outputs)}
    labels = np.full((len(patients), len(column)), UNLABELLED, dtype=np.int8)
    for row, patient in enumerate(patients):
        if patient in codes:
            labels[row] = ABSENT
            found = {
                column.get(category(code, whole_causes), -1) for code in codes[patient]
            }
            labels[row, list(found - {-1})] = PRESENT
    return labels


def hold_out(
    codes: Codes, names: Iterable[str]
) -> tuple[dict[str, frozenset[str]], dict[str, int]]:
    """The codes without those of phenotypes, so that stage 1 never sees what stage 2
    predicts.

    names: `<system>:<code>`; every code that begins so goes: icd10:E11 takes
    icd10:E119, while condition:3 takes that concept alone. The patients stay, even
    without any code left. Also gives how many patients had each name; 0 says that it
    never occurs. Raises ConfigError for a name that is no code.
    """
    tests = {name: _meant(name) for name in names}
    kept: dict[str, frozenset[str]] = {}
    found = dict.fromkeys(tests, 0)
    for patient, given in codes.items():
        gone = {name: {*filter(is_meant, given)} for name, is_meant in tests.items()}
        kept[patient] = frozenset(given).difference(*gone.values())
        for name, own in gone.items():
            found[name] += bool(own)
    return kept, found


def _meant(name: str) -> Callable[[str], bool]:
    """Whether a code is what a job's name means: itself, or one below it."""
    system, code = parse(name)
    whole = f"{system}:{code}"
    return (
        whole.__eq__
        if SYSTEMS[system].length is None
        else lambda code: code.startswith(whole)
    )


def phenotype_labels(
    patients: Sequence[str], codes: Codes, phenotypes: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Stage 2's labels where phenotypes are defined by codes: (patients, phenotypes)
    int8.

    phenotypes: name → codes, as in `hold_out`: any of them makes it present (1).
    Without them it is absent (0); a patient who is not in `codes` is unlabelled (-1).
    """
    tests = [tuple(_meant(name) for name in names) for names in phenotypes.values()]
    labels = np.full((len(patients), len(tests)), UNLABELLED, dtype=np.int8)
    for row, patient in enumerate(patients):
        if patient in codes:
            given = codes[patient]
            labels[row] = [
                any(meant(code) for code in given for meant in of) for of in tests
            ]
    return labels
