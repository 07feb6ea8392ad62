"""Billing codes, their categories, and the outputs that stage 1 predicts.

A code is written `<system>:<code>`, in capitals and without a dot. The system is needed
because "4019" is hypertension among ICD-9 diagnoses and something else among
procedures. A job may write it with the dot and in any case ("ICD9:401.9").

    system     codes                          category (what remains of the code)
    icd9       ICD-9-CM diagnoses             first 3 characters: icd9:401, icd9:V45
    icd9proc   ICD-9-CM procedures            first 2 digits: icd9proc:36
    cpt        CPT (and HCPCS)                all 5 characters: cpt:99254
    icd10      ICD-10(-CM) diagnoses          first 3 characters: icd10:N44
    icd10pcs   ICD-10-PCS procedures          first 3 characters: icd10pcs:BT4
    condition  OMOP condition concept         the concept itself
    procedure  OMOP procedure concept         the concept itself

Liu, Dligach and Miller 2019 write only "174 ICD or CPT codes", after Dligach and Miller
2018. The first three rules are from the latter's published program. That program reads
procedure codes as numbers, so it loses leading zeros ("0331" becomes 33), and reads CPT
codes from the column of numbers, where codes with a letter are missing. We read both as
strings, so a few outputs may differ from the paper's 174. In the code book, an ICD-9
external cause has 4 characters (`whole_causes`); the program truncates it to 3 like the
others. The other four rules are ours.

A code in a job stands for every code that begins with it: icd10:E11 includes
icd10:E119. A CPT code is complete with its five characters, and an OMOP concept
stands only for itself, because 3 is unrelated to 316866.

Sites agree on the outputs without revealing any site's own list:
`list_public_categories` lists every possible category, each site counts its patients in
each of them, and only the sum of these counts goes into `choose_categories`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from string import ascii_uppercase, digits
from sys import intern
from typing import Final

import numpy as np

from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, UNLABELLED
from fednotes.core.errors import ConfigError, DataError, suggest_name

Codes = Mapping[str, Collection[str]]  # the codes of each patient

_LONGEST_CODE: Final = 8  # characters, with a dot


# ---- coding systems ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class System:
    """A coding system.

    Attributes:
        length: Number of leading characters of a code that form its category. None
            means all characters; a code then includes no longer codes.
        form: The pattern of a complete code. It must match codes that end in zeros,
            because prefixes of codes are recognised by appending zeros.
        example: A code, for messages.
        categories: The patterns of categories. Capitals stand for themselves,
            lower-case letters for the characters in `_PLACES`.
    """

    length: int | None
    form: re.Pattern[str]
    example: str
    categories: tuple[str, ...] = ()


_PCS = "".join(c for c in digits + ascii_uppercase if c not in "IO")
_PLACES: Final = {
    "d": digits,
    "m": digits + "FMTU",
    "p": _PCS,
    "u": ascii_uppercase,
    "v": ascii_uppercase[:22],
}
_ICD9 = r"(?:[0-9]{3}|V[0-9]{2})(?:\.?[0-9]{1,2})?|E[0-9]{3}(\.?[0-9])?"
# Neither ICD-10 system has an O or I after the first letter, where they could be
# mistaken for 0 and 1.
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


def get_system(name: str) -> System:
    """Return the coding system of this name.

    Raises:
        ConfigError: There is no such system.
    """
    if name not in SYSTEMS:
        raise ConfigError(
            f"unknown coding system {name!r}: {suggest_name(name, SYSTEMS)}"
        )
    return SYSTEMS[name]


# ---- codes ---------------------------------------------------------------------------


@lru_cache(maxsize=1 << 17)
def normalise_code(system: str, text: str) -> str | None:
    """Return the code `<system>:<code>` for a text in a table.

    A dot must be where the system has it: "4019.0", as a spreadsheet writes 4019, is
    not a code. A lost leading zero cannot be noticed: both "389" and "0389" are
    codes.

    Returns:
        The code; None if the text is not a code of the system.
    """
    code = text.strip().upper()
    if SYSTEMS[system].form.fullmatch(code) is None:
        return None
    return intern(f"{system}:{code.replace('.', '')}")


def parse_code(name: str) -> tuple[str, str]:
    """Return the system and the code of `<system>:<code>`, in any case.

    The code may be a prefix of codes.

    Raises:
        ConfigError: The name has another form, or no code of the system begins with it,
            so it would never match.
    """
    prefix, colon, suffix = name.partition(":")
    system = prefix.strip().lower()
    code = suffix.strip().upper()
    if not colon or not code:
        raise ConfigError(
            f"{name!r} is not a code: write <system>:<code>, such as icd10:I10"
        )
    facts = get_system(system)
    if not _can_begin_code(facts, code):
        raise ConfigError(
            f"{name!r}: codes of {system} do not begin like this: write one such "
            f"as {system}:{facts.example}"
        )
    return system, code.replace(".", "")


def _can_begin_code(system: System, text: str) -> bool:
    """Return whether a text is a code or a prefix of one.

    A prefix becomes a code by appending zeros: "C7" and "E11." do, "E1." does not.
    """
    return any(
        system.form.fullmatch(text + "0" * zeros) for zeros in range(_LONGEST_CODE)
    )


class _CodeNames:
    """Finds which names in a job include a code.

    The time for a code does not depend on the number of names.

    Args:
        names: Names as `<system>:<code>`.

    Raises:
        ConfigError: A name is not a code.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names_of_code: dict[str, list[str]] = {}
        self._names_of_prefix: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            system, code = parse_code(name)
            is_complete = SYSTEMS[system].length is None
            names_of = self._names_of_code if is_complete else self._names_of_prefix
            names_of.setdefault(f"{system}:{code}", []).append(name)

    def find(self, code: str) -> list[str]:
        """Return the names that include a code."""
        names = list(self._names_of_code.get(code, ()))
        for end in range(1, len(code) + 1):
            names += self._names_of_prefix.get(code[:end], ())
        return names


# ---- categories ----------------------------------------------------------------------


@lru_cache(maxsize=1 << 17)
def find_category(code: str, *, whole_causes: bool = False) -> str:
    """Return the category of a code.

    Args:
        code: The code, as `<system>:<code>`.
        whole_causes: Whether ICD-9 external causes keep 4 characters instead of 3.
    """
    system, characters = parse_code(code)
    length = _choose_category_length(system, characters, whole_causes=whole_causes)
    return intern(f"{system}:{characters[:length]}")


def _choose_category_length(
    system: str, code: str, *, whole_causes: bool
) -> int | None:
    """Return the number of characters of a code's category; None for all of them."""
    is_cause = system == "icd9" and code.startswith("E")
    return 4 if whole_causes and is_cause else SYSTEMS[system].length


def list_job_categories(
    names: Iterable[str], *, whole_causes: bool = False
) -> tuple[str, ...]:
    """Return the categories that a job names as outputs, in the job's order.

    Args:
        names: The names as `<system>:<code>`.
        whole_causes: As in `find_category`.

    Raises:
        ConfigError: A name is repeated, is not a code, or is longer or shorter than a
            category and would therefore never be present.
    """
    categories: dict[str, None] = {}
    for name in names:
        system, code = parse_code(name)
        own_category = find_category(name, whole_causes=whole_causes)
        if own_category != f"{system}:{code}":
            raise ConfigError(
                f"{name!r} is within the category {own_category}, but outputs are "
                "categories: list the category"
            )
        length = _choose_category_length(system, code, whole_causes=whole_causes)
        if length is not None and len(code) < length:
            example = find_category(f"{system}:{SYSTEMS[system].example}")
            raise ConfigError(
                f"{name!r} covers several categories: list each of them, such as "
                f"{example}"
            )
        if own_category in categories:
            raise ConfigError(f"{name!r} is repeated: list each category once")
        categories[own_category] = None
    return tuple(categories)


def count_categories(
    codes: Codes, names: Sequence[str], *, whole_causes: bool = False
) -> np.ndarray:
    """Return the number of patients in each category.

    Args:
        codes: The codes of each patient. A patient counts once in a category.
        names: The categories. They must be a public list, such as
            `list_public_categories`, so that a sum over sites may be revealed.
        whole_causes: As in `find_category`.

    Returns:
        (names,) int64.
    """
    counts: Counter[str] = Counter()
    for billed in codes.values():
        counts.update(
            {find_category(code, whole_causes=whole_causes) for code in billed}
        )
    return np.fromiter((counts[name] for name in names), np.int64, len(names))


def choose_categories(total_counts: Mapping[str, int], minimum: int) -> tuple[str, ...]:
    """Return the categories of at least `minimum` patients, sorted by name.

    Args:
        total_counts: Number of patients in each category, over all sites.
        minimum: Minimum number of patients for which a category is an output.

    Raises:
        DataError: No category has enough patients.
    """
    chosen = [name for name, count in total_counts.items() if count >= minimum]
    if not chosen:
        largest = max(total_counts.values(), default=0)
        raise DataError(
            f"no category of codes has {minimum} patients (the most common "
            f"one has {largest}): lower [training] minimum, or use more "
            "patients"
        )
    return tuple(sorted(chosen))


@lru_cache(maxsize=16)
def list_public_categories(
    systems: tuple[str, ...] = ("icd9", "icd9proc", "cpt"),
    *,
    whole_causes: bool = False,
) -> tuple[str, ...]:
    """Return every category that a code of these systems can have.

    ICD-9 has 1,200 (with `whole_causes` 2,100), its procedures 100, CPT 360,000, ICD-10
    8,840 and ICD-10-PCS 39,304.

    Args:
        systems: Names of coding systems.
        whole_causes: As in `find_category`.

    Raises:
        ConfigError: A system belongs to OMOP, whose concepts have no such list.
    """
    categories: list[str] = []
    for name in systems:
        system = get_system(name)
        if system.length is None:
            raise ConfigError(
                f"there is no list of all categories of {name!r}: list the concepts to "
                "predict in [training] outputs"
            )
        for form in system.categories:
            places = form + "d" if whole_causes and form[0] == "E" else form
            codes = product(*(_PLACES.get(place, place) for place in places))
            categories += [f"{name}:{''.join(code)}" for code in codes]
    return tuple(categories)


# ---- labels --------------------------------------------------------------------------


def make_output_labels(
    patients: Sequence[str],
    codes: Codes,
    outputs: Sequence[str],
    *,
    whole_causes: bool = False,
) -> np.ndarray:
    """Return which patients have a code of each category: the labels of stage 1.

    Args:
        patients: The patients.
        codes: The codes of each patient who was coded.
        outputs: Categories of codes.
        whole_causes: As in `find_category`.

    Returns:
        (patients, outputs) int8: 1 if the patient has a code of the category, 0 if the
        patient has only others. A patient who is missing in `codes` is -1, unlabelled:
        nobody coded the stay, so no code is known to be absent.
    """
    columns = {name: column for column, name in enumerate(outputs)}
    labels = np.full((len(patients), len(columns)), UNLABELLED, dtype=np.int8)
    for row, patient in enumerate(patients):
        if patient not in codes:
            continue
        labels[row] = ABSENT
        for code in codes[patient]:
            column = columns.get(find_category(code, whole_causes=whole_causes))
            if column is not None:
                labels[row, column] = PRESENT
    return labels


def remove_held_out_codes(
    codes: Codes, names: Iterable[str]
) -> tuple[dict[str, frozenset[str]], dict[str, int]]:
    """Remove the codes of phenotypes, which stage 2 predicts, from those of stage 1.

    Args:
        codes: The codes of each patient.
        names: Names as `<system>:<code>`. Every code that begins with a name is
            removed: icd10:E11 removes icd10:E119, while condition:3 removes only that
            concept.

    Returns:
        The remaining codes of all patients, of whom some may have none; and the number
        of patients who had a code of each name.

    Raises:
        ConfigError: A name is not a code.
    """
    counts = dict.fromkeys(names, 0)
    held_out = _CodeNames(counts)
    remaining: dict[str, frozenset[str]] = {}
    for patient, billed in codes.items():
        names_of_codes = {code: held_out.find(code) for code in billed}
        for name in set().union(*names_of_codes.values()):
            counts[name] += 1
        remaining[patient] = frozenset(
            code for code in billed if not names_of_codes[code]
        )
    return remaining, counts


def make_phenotype_labels(
    patients: Sequence[str], codes: Codes, phenotypes: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Return which patients have phenotypes by their codes: the labels of stage 2.

    Args:
        patients: The patients.
        codes: The codes of each patient who was coded.
        phenotypes: The codes of each phenotype, named as in `remove_held_out_codes`.

    Returns:
        (patients, phenotypes) int8: 1 if the patient has any code of the phenotype,
        otherwise 0. A patient who is missing in `codes` is -1, unlabelled.
    """
    columns_of_name: dict[str, list[int]] = {}
    for column, names in enumerate(phenotypes.values()):
        for name in dict.fromkeys(names):
            columns_of_name.setdefault(name, []).append(column)
    labelling = _CodeNames(columns_of_name)
    labels = np.full((len(patients), len(phenotypes)), UNLABELLED, dtype=np.int8)
    for row, patient in enumerate(patients):
        if patient not in codes:
            continue
        labels[row] = ABSENT
        for code in codes[patient]:
            for name in labelling.find(code):
                labels[row, columns_of_name[name]] = PRESENT
    return labels
