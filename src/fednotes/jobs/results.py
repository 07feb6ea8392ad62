"""What a run leaves, typed: `summary.json`, and `metrics.jsonl` with a line per
evaluation.

Simulations and real sites write it, reports and comparisons read it. What a file lacks
is a gap, and so is a score that is no number: a site may have nothing held out, and
real ones send their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Interval, MaxLen
from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from fednotes.core import bounds
from fednotes.core.cleaning import one_line
from fednotes.core.errors import DataError, TrainingError, needs, on_disk
from fednotes.core.parsing import (
    LARGEST,
    JsonError,
    has_more_values,
    mapping,
    number,
    open_regular,
    parse_json,
    shipped,
)
from fednotes.core.store import write_json, write_text
from fednotes.metrics.gap import Gap, Verdict, main_score, verdict

if TYPE_CHECKING:
    from fednotes.engines.rounds import RoundResult

VERSION = 1  # of summary.json; before it, files had none
# beside a real site's own scores: what was promised of privacy
PROMISED = "promise.json"
# each site mixes two models of its own: the control of method "personal"
OWN_MIX = "own-mix"
CONDITIONS = ("alone", OWN_MIX, "federated", "pooled")
BASELINES = ("alone", OWN_MIX)  # what the federation is compared with at each site
SUMMARY, METRICS, AUDIT = "summary.json", "metrics.jsonl", "audit.json"
_SHOWN = shipped("jobs/scores.toml")
# how each kind of score is shown
SCORES: Mapping[str, Mapping[str, Any]] = _SHOWN["scores"]
# likewise, what evaluations measure
CURVES: Mapping[str, Mapping[str, Any]] = _SHOWN["curves"]
# what a run says beside its scores
HINTS: Mapping[str, str] = shipped("jobs/hints.toml")
Scores = Mapping[str, Any]  # kind of score → measure → number, as `metrics/` makes them


MOST_SITES = 10_000  # of a summary: a page has a part for each
Number = Annotated[int | FiniteFloat, Interval(ge=-LARGEST, le=LARGEST)] | None
Share = Annotated[FiniteFloat, Interval(ge=0, le=1)]
M = TypeVar("M", bound=BaseModel)


class PairedDifference(BaseModel):
    """A difference of two models' strict F1 on the same test documents, by a paired
    bootstrap.

    difference: federated − another condition, a fraction. low, high: the 95 % interval.
    p_value: the two-sided bootstrap p.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    difference: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    p_value: Share


class RunResult(BaseModel):
    """summary.json: fractions, not percent.

    holds: what the method's sites hold. run: its name, between real sites; command: what repeats
    a simulation. annotated: each site's own types. sites: site → condition → its scores on test
    data; empty where a site keeps them. mean: condition → plain means over sites; micro: of all
    test data together; valid: what the kept models were judged by, `mean` and `sites`. privacy:
    condition → what its training promises (`privacy/promise.py`). metrics: of sums, between real
    sites. conditions: rounds, seconds and bytes of each. marks: condition → why its scores are not
    to be read beside the others' as they are. config: the job's tables. paired: condition → site →
    federated − that condition by a paired test, where both models were judged on the same
    documents; paired_mean: condition → that of the means over the sites.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 0
    title: str = ""
    method: str = ""
    holds: str = ""
    seed: int | None = None
    run: str = ""
    command: str = ""
    seconds: Number = None
    bytes_up: Number = None
    bytes_down: Number = None
    eta: Number = None
    annotated: dict[str, list[str]] = {}
    sites: Annotated[dict[str, dict[str, dict[str, Any]]], MaxLen(MOST_SITES)] = {}
    mean: dict[str, dict[str, Any]] = {}
    micro: dict[str, dict[str, Any]] = {}
    valid: dict[str, dict[str, Any]] = {}
    privacy: dict[str, dict[str, Any]] = {}
    metrics: dict[str, Any] = {}
    conditions: dict[str, dict[str, Any]] = {}
    marks: dict[str, str] = {}
    paired: dict[str, dict[str, PairedDifference]] = {}
    paired_mean: dict[str, PairedDifference] = {}
    config: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    notes: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _older(cls, table: Any) -> Any:
        """Runs between real sites once had a list of sites, and scores beside it."""
        if not isinstance(table, dict):
            return table
        holds = {"phenotype": "patients", "pretrain": "notes"}.get(
            str(table.get("method")), ""
        )
        table = {"holds": holds, **table}
        if not isinstance(table.get("sites"), list):
            return table
        own = mapping(table.get("scores"))
        sites = {
            s: {"federated": own[s]} if s in own else {}
            for s in map(str, table["sites"])
        }
        spent = {
            k: table.get(k) for k in ("rounds", "seconds", "bytes_up", "bytes_down")
        }
        return {**table, "sites": sites, "conditions": {"federated": spent}}

    @property
    def words(self) -> Mapping[str, Any]:
        """What is said of a run by what its sites hold (`scores.toml`)."""
        return mapping(_SHOWN["holds"].get(self.holds) or _SHOWN["holds"]["documents"])

    def gap(self, site: str | None = None) -> Gap | None:
        """How much of pooled - alone the federation closes: at one site, or of the
        means."""
        found = self.verdict(site)
        return None if found is None else found.gap

    def verdict(
        self, site: str | None = None, against: str = "alone"
    ) -> Verdict | None:
        """Return what the federation gave over another condition: to one site, or to
        the means.

        It comes from the paired test where the run has one, else from an unpaired
        interval.

        Args:
            site: The site; None for the means over the sites.
            against: "alone", or "own-mix" in a run of method "personal".
        """
        if site is None:
            return verdict(
                [*self.sites.values()], self.paired_mean.get(against), against
            )
        paired = self.paired.get(against, {}).get(site)
        return verdict([self.sites.get(site, {})], paired, against)

    def interval(self, site: str, condition: str) -> tuple[float, float] | None:
        """Where the F1 of one site's model lies in 95 % of tests with as much test
        data."""
        found = main_score(mapping(mapping(self.sites.get(site)).get(condition)))
        if found is None or found[0] < 0:  # of a loss
            return None
        return max(0.0, found[0] - 1.96 * found[1]), min(
            1.0, found[0] + 1.96 * found[1]
        )

    def table(self) -> list[dict[str, Any]]:
        """A row for each site and condition, then for "mean", over sites: scores on
        test data, as fractions, by names such as "strict_f1"."""
        return [
            {"site": site, "condition": condition, **_flat(mapping(of[condition]))}
            for site, of in [*self.sites.items(), ("mean", self.mean)]
            for condition in CONDITIONS
            if condition in of
        ]

    def to_pandas(self) -> Any:
        """The table as a DataFrame. Raises MissingExtra without pandas."""
        with needs("pandas", "pandas"):
            import pandas
        return pandas.DataFrame(self.table())

    def _repr_html_(self) -> str:
        """The table in a notebook; all of it escaped."""
        rows = self.table()
        heads = [*dict.fromkeys(name for row in rows for name in row)]
        shown = [
            [escape(one_line(_cell(row.get(name, "")))) for name in heads]
            for row in rows
        ]
        lines = [
            f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in shown
        ]
        top = "".join(f"<th>{escape(name)}</th>" for name in heads)
        title = escape(one_line(f"{self.title} (seed {self.seed})"))
        return (
            f"<table><caption>{title}</caption><tr>{top}</tr>{''.join(lines)}</table>"
        )

    @property
    def cost(self) -> str:
        """What the federation took a site, where it is known: bytes and, of one machine
        that trains the sites in turn, a site's part of the time."""
        spent, sites = (
            mapping(self.conditions.get("federated")),
            max(1, len(self.sites)),
        )
        sent = [number(spent, name) for name in ("bytes_up", "bytes_down")]
        told = [size(sum(filter(None, sent)) / sites)] if None not in sent else []
        if (seconds := number(spent, "seconds")) is not None:
            told.append(duration(seconds / sites))
        return ", ".join(told) or "–"

    def write(self, folder: Path) -> None:
        """Write summary.json."""
        write_json(folder / SUMMARY, self.model_dump(exclude_defaults=True))


def _flat(scores: Mapping[str, Any]) -> dict[str, float]:
    names = [
        (kind, name) for kind, of in SCORES.items() for name in of.get("measures", ())
    ]
    found = {f"{kind}_{name}": number(scores, kind, name) for kind, name in names}
    return {name: value for name, value in found.items() if value is not None}


def some_of(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class Outcome(BaseModel):
    """done.json: what a finished part of a run left. scores: of each site, valid
    likewise.

    examples: of all its sites, that it was trained on. described: how much of the model
    travels, for people. eta: the trained and sent share. documents: site → counts of
    each of its test documents (`MethodSite.document_counts`), by which two conditions
    are compared.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    scores: dict[str, dict[str, Any]]
    rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int
    examples: int = 0
    described: str = ""
    eta: float | None = None
    valid: dict[str, float | None] = {}
    documents: dict[str, list[list[int]]] = {}


class Leak(BaseModel):
    """How one attack went on what a job would send (`apps/audit/`): fractions.

    sees: what its adversary must see. closes: what closes it. applies: to this job;
    why: if not, or if it could not be tried. success: on the job as it is, low to high
    in 95 % of such trials;
    chance: of who sees nothing; control: of the same attack without any defence.
    proven: whether that one succeeded, without which the others say nothing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    attack: str
    sees: str = ""
    closes: str = ""
    applies: bool = True
    why: str = ""
    success: Share | None = None
    chance: Share = 0.0
    low: Share | None = None
    high: Share | None = None
    control: Share | None = None
    proven: bool = False
    details: dict[str, FiniteFloat] = {}

    @property
    def advantage(self) -> float:
        """By how much it may succeed above chance, by its interval: few trials hide no
        leak."""
        return max(self.success or 0.0, self.high or 0.0, self.chance) - self.chance


class Audit(BaseModel):
    """audit.json: what attacks read off what a job would send, of one site's own notes.

    fingerprint: of the job as it is declared.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = VERSION
    title: str = ""
    method: str = ""
    site: str = ""
    fingerprint: str = ""
    command: str = ""
    seconds: FiniteFloat = 0.0
    attacks: list[Leak] = []

    @property
    def worst(self) -> float:
        """The largest advantage of an attack."""
        return max((leak.advantage for leak in self.attacks), default=0.0)

    @property
    def unproven(self) -> list[str]:
        """The attacks that would apply and say nothing: they were not tried, or fail
        undefended."""
        return [
            leak.attack for leak in self.attacks if leak.applies and not leak.proven
        ]

    @property
    def untried(self) -> list[str]:
        """The attacks that would apply and failed before they said anything."""
        return [
            leak.attack
            for leak in self.attacks
            if leak.applies and leak.success is None
        ]

    @property
    def summary(self) -> str:
        """How it went, in a line."""
        best = max(
            self.attacks, key=lambda leak: leak.advantage, default=Leak(attack="none")
        )
        silent = f"; say nothing: {', '.join(self.unproven)}" if self.unproven else ""
        return f"the best attack, {best.attack}, may be {best.advantage:.3f} above chance{silent}"


def read_audit(folder: Path) -> Audit | None:
    """A folder's audit.json; None where there is none.

    Raises DataError as `read_result`.
    """
    path = folder / AUDIT
    return read_table(path, Audit) if path.is_file() else None


def read_result(folder: Path) -> RunResult:
    """A run's summary.json.

    Raises DataError where it is missing, damaged or of a later version.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise DataError(
            f"{folder}: no summary.json there; give the folder of a run that has ended"
        )
    return read_table(path, RunResult)


def read_table(path: Path, kind: type[M]) -> M:
    """Return a versioned result file.

    Raises:
        DataError: It is damaged, or of a later version.
    """
    table = _object(path, 1, _text_of(path, bounds.FILE + 1))
    version = table.get("version", 0)
    if not isinstance(version, int):
        raise DataError(
            f"{path}: its version is not an integer; copy the run's folder again"
        )
    if version > VERSION:
        raise DataError(
            f"{path}: its version is {version!r}, known is {VERSION}: update fednotes"
        )
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {place}: {first['msg']}") from error


def read_lines(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the lines of metrics.jsonl, if there is one, without half a last line of a
    killed run.

    Raises:
        DataError: A line is not a JSON object, or the file exceeds `bounds.FILE` or
            `bounds.JSON_VALUES`.
    """
    path = folder / METRICS
    if not path.is_file():
        return []
    text = _metrics_text(path)
    rows = [(n, row) for n, row in enumerate(text.split("\n"), 1) if row.strip()]
    found = []
    for n, row in rows:
        try:
            found.append(_object(path, n, row))
        except DataError:
            if n != rows[-1][0]:
                raise
    return found


def rewound(path: Path, part: str, round: int) -> list[dict[str, Any]]:
    """Drop a part's lines from `round` on, which are written again, and what is cut
    short.

    Returns:
        The lines that stay.

    Raises:
        DataError: The file cannot be read, or is larger than `read_lines` reads.
    """
    kept = []
    for line in _metrics_text(path).splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line, strict=False)
            if entry["part"] != part or entry["round"] < round:
                kept.append(entry)
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))
    return kept


def line_of(
    result: RoundResult, part: str, condition: str, **more: Any
) -> dict[str, Any]:
    """An evaluation's line."""
    spent = {"bytes_up": result.bytes_up, "bytes_down": result.bytes_down}
    of = {"part": part, "condition": condition, "round": result.round}
    return {
        **of,
        **result.metrics,
        **more,
        **spent,
        "seconds": round(result.seconds, 3),
    }


def add_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Raises TrainingError where the file cannot be written."""
    with on_disk(path, TrainingError), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _metrics_text(path: Path) -> str:
    """Return the text of a metrics.jsonl, whose size is bounded before any line is
    parsed."""
    text = _text_of(path, bounds.FILE + 1)
    if len(text.encode()) > bounds.FILE:
        raise DataError(
            f"{path}: over {bounds.FILE:,} bytes; fednotes reads no larger file"
        )
    if has_more_values(text, bounds.JSON_VALUES):
        raise DataError(
            f"{path}: more than {bounds.JSON_VALUES:,} values; fednotes reads no larger file"
        )
    return text


def _text_of(path: Path, most: int) -> str:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(most).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__})") from error


def _object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        value = parse_json(text, strict=False)
    except JsonError as error:
        raise DataError.at(
            path, line + error.line - 1, f"not JSON ({error})"
        ) from error
    if not isinstance(value, dict):
        raise DataError.at(path, line, "expected a JSON object")
    return value


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return (
                f"{count:.3g} {unit}" if abs(count) < 99.95 else f"{count:.0f} {unit}"
            )
        count /= 1000
    raise AssertionError("the last unit takes any number")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds % 60):02d} s"
