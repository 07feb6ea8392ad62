"""Define, read and write the result files of a run, such as summary.json.

Simulations and real sites write these files; reports and comparisons read them.
`metrics.jsonl` has a line for each evaluation. Readers treat missing values, and scores
that are not numbers, as gaps: a site may have no test data, and real sites send scores
of their own.
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

# Version of summary.json; the oldest files have none.
VERSION = 1
# The privacy guarantee of a run, stored beside a real site's scores.
PROMISED = "promise.json"
# The control of method "personal": each site mixes two models of its own.
OWN_MIX = "own-mix"
CONDITIONS = ("alone", OWN_MIX, "federated", "pooled")
# Conditions that the federated models are compared with at each site.
BASELINES = ("alone", OWN_MIX)
SUMMARY, METRICS, AUDIT = "summary.json", "metrics.jsonl", "audit.json"
_SHOWN = shipped("jobs/scores.toml")
# How each kind of score is shown.
SCORES: Mapping[str, Mapping[str, Any]] = _SHOWN["scores"]
# How each measure of the evaluations is shown.
CURVES: Mapping[str, Mapping[str, Any]] = _SHOWN["curves"]
# Remarks on the scores of a run.
HINTS: Mapping[str, str] = shipped("jobs/hints.toml")
# Kind of score → measure → number, as `metrics/` computes them.
Scores = Mapping[str, Any]


# Largest number of sites in a summary: a report has a section for each.
MOST_SITES = 10_000
Number = Annotated[int | FiniteFloat, Interval(ge=-LARGEST, le=LARGEST)] | None
Share = Annotated[FiniteFloat, Interval(ge=0, le=1)]
M = TypeVar("M", bound=BaseModel)


class PairedDifference(BaseModel):
    """Hold the difference in strict F1 of two models, tested by a paired bootstrap.

    Both models are scored on the same test documents.

    Attributes:
        difference: Federated minus the other condition, as a fraction.
        low: Lower end of the 95% confidence interval.
        high: Upper end of the 95% confidence interval.
        p_value: Two-sided p-value of the bootstrap.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    difference: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    p_value: Share


class RunResult(BaseModel):
    """Hold the content of summary.json; scores are fractions, not percent.

    Attributes:
        version: Version of the file; 0 for the oldest ones.
        title: Title of the job.
        method: Name of the method.
        holds: Kind of data that the method's sites hold.
        seed: Seed of the job.
        run: Name of a run between real sites; empty for simulations.
        command: Command that repeats a simulation.
        seconds: Duration of all parts.
        bytes_up: Bytes that all sites sent in federated training.
        bytes_down: Bytes that all sites received in federated training.
        eta: Fraction of the model that is trained and sent.
        annotated: Site → the entity types that it annotates.
        sites: Site → condition → scores on the site's test data; empty where a site
            does not disclose its scores.
        mean: Condition → unweighted means of the scores over the sites.
        micro: Condition → scores on the test data of all sites together.
        valid: Condition → validation scores of the selected models: their "mean", and
            those of the "sites".
        privacy: Condition → the privacy guarantee of its training
            (`privacy/promise.py`).
        metrics: Metrics computed from sums, in runs between real sites.
        conditions: Condition → its rounds, seconds and bytes.
        marks: Condition → why its scores are not directly comparable with the others'.
        paired: Condition → site → the difference between the federated model and this
            condition by a paired test, where both were scored on the same documents.
        paired_mean: Condition → the same difference for the means over the sites.
        config: Tables of the job.
        versions: Versions of the software, and the machine.
        notes: Remarks on the data and the scores.
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
        """Convert a summary in an older layout to the current one.

        Older runs between real sites had a list of sites, and the scores beside it.
        """
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
        """Return the report's wording for the sites' kind of data (`scores.toml`)."""
        return mapping(_SHOWN["holds"].get(self.holds) or _SHOWN["holds"]["documents"])

    def gap(self, site: str | None = None) -> Gap | None:
        """Return how much of the gap between alone and pooled the federation closes.

        Args:
            site: The site; None for the means over the sites.

        Returns:
            The gap; None if it cannot be computed.
        """
        found = self.verdict(site)
        return None if found is None else found.gap

    def verdict(
        self, site: str | None = None, against: str = "alone"
    ) -> Verdict | None:
        """Return whether, and by how much, the federation improves on a condition.

        The verdict comes from the paired test if the run has one, and from an unpaired
        interval otherwise.

        Args:
            site: The site; None for the means over the sites.
            against: "alone", or "own-mix" in a run of method "personal".

        Returns:
            The verdict; None if it cannot be computed.
        """
        if site is None:
            return verdict(
                [*self.sites.values()], self.paired_mean.get(against), against
            )
        paired = self.paired.get(against, {}).get(site)
        return verdict([self.sites.get(site, {})], paired, against)

    def interval(self, site: str, condition: str) -> tuple[float, float] | None:
        """Return the 95% confidence interval of the main score of a site's model.

        Args:
            site: The site.
            condition: The condition.

        Returns:
            Lower and upper end, as fractions; None if there is no such score.
        """
        found = main_score(mapping(mapping(self.sites.get(site)).get(condition)))
        # a main score below 0 is a negated loss, which has no such interval
        if found is None or found[0] < 0:
            return None
        return max(0.0, found[0] - 1.96 * found[1]), min(
            1.0, found[0] + 1.96 * found[1]
        )

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each site and condition, then rows for "mean" over sites.

        Returns:
            Rows with "site", "condition", and the scores on the test data as fractions,
            under names such as "strict_f1".
        """
        return [
            {"site": site, "condition": condition, **_flat(mapping(of[condition]))}
            for site, of in [*self.sites.items(), ("mean", self.mean)]
            for condition in CONDITIONS
            if condition in of
        ]

    def to_pandas(self) -> Any:
        """Return `table` as a pandas DataFrame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        with needs("pandas", "pandas"):
            import pandas
        return pandas.DataFrame(self.table())

    def _repr_html_(self) -> str:
        """Return `table` as HTML for notebooks, with all texts escaped."""
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
        """Return the cost of the federation per site, for people, as far as it is known.

        The cost is the bytes of a site, and the time divided by the number of sites: a
        simulation trains the sites one after the other.
        """
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
        """Write summary.json into a folder."""
        write_json(folder / SUMMARY, self.model_dump(exclude_defaults=True))


def _flat(scores: Mapping[str, Any]) -> dict[str, float]:
    names = [
        (kind, name) for kind, of in SCORES.items() for name in of.get("measures", ())
    ]
    found = {f"{kind}_{name}": number(scores, kind, name) for kind, name in names}
    return {name: value for name, value in found.items() if value is not None}


def some_of(names: Sequence[str], most: int = 6) -> str:
    """Return the first names as a list for people, and how many more there are.

    Args:
        names: The names.
        most: Largest number of names to list.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class Outcome(BaseModel):
    """Hold the content of done.json: the outcome of a finished part of a run.

    Attributes:
        scores: Site → scores on its test data.
        rounds: Number of rounds.
        seconds: Duration.
        bytes_up: Bytes that all sites sent.
        bytes_down: Bytes that all sites received.
        examples: Number of training examples of all sites of the part.
        described: How much of the model is sent, for people.
        eta: Fraction of the model that is trained and sent.
        valid: Site → validation score of its model; None without validation data.
        documents: Site → counts of each of its test documents
            (`MethodSite.document_counts`), from which two conditions are compared.
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
    """Hold the result of one attack on a job's updates (`apps/audit/`), as fractions.

    Attributes:
        attack: Name of the attack.
        sees: What the attacker must be able to see.
        closes: Which defence stops the attack.
        applies: Whether the attack applies to this job.
        why: Why the attack does not apply or could not be tried.
        success: Success rate on the job as it is; None if it was not tried.
        chance: Success rate of guessing.
        low: Lower end of the 95% confidence interval of `success`.
        high: Upper end of the 95% confidence interval of `success`.
        control: Success rate of the same attack without any defence.
        proven: Whether the control succeeded; otherwise `success` has no meaning.
        details: Further measurements by name.
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
        """Return the largest plausible success above chance.

        It uses the upper end of the interval, so that few trials cannot hide a leak.
        """
        return max(self.success or 0.0, self.high or 0.0, self.chance) - self.chance


class Audit(BaseModel):
    """Hold the content of audit.json: what attacks recover from one site's updates.

    Attributes:
        version: Version of the file.
        title: Title of the job.
        method: Name of the method.
        site: The audited site.
        fingerprint: Fingerprint of the job.
        command: Command that repeats the audit.
        seconds: Duration.
        attacks: Result of each attack.
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
        """Return the largest advantage of an attack; 0 without attacks."""
        return max((leak.advantage for leak in self.attacks), default=0.0)

    @property
    def unproven(self) -> list[str]:
        """Return the attacks that apply but prove nothing.

        They were not tried, or fail even without a defence.
        """
        return [
            leak.attack for leak in self.attacks if leak.applies and not leak.proven
        ]

    @property
    def untried(self) -> list[str]:
        """Return the attacks that apply but have no result."""
        return [
            leak.attack
            for leak in self.attacks
            if leak.applies and leak.success is None
        ]

    @property
    def summary(self) -> str:
        """Return the result of the audit in one line."""
        best = max(
            self.attacks, key=lambda leak: leak.advantage, default=Leak(attack="none")
        )
        silent = f"; say nothing: {', '.join(self.unproven)}" if self.unproven else ""
        return f"the best attack, {best.attack}, may be {best.advantage:.3f} above chance{silent}"


def read_audit(folder: Path) -> Audit | None:
    """Return a folder's audit.json, or None if there is none.

    Raises:
        DataError: The file is damaged, or of a later version.
    """
    path = folder / AUDIT
    return read_table(path, Audit) if path.is_file() else None


def read_result(folder: Path) -> RunResult:
    """Return a run's summary.json.

    Raises:
        DataError: The file is missing, damaged, or of a later version.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise DataError(
            f"{folder}: no summary.json there; give the folder of a run that has ended"
        )
    return read_table(path, RunResult)


def read_table(path: Path, kind: type[M]) -> M:
    """Read a result file that has a version.

    Args:
        path: The file.
        kind: Class of its content.

    Raises:
        DataError: The file is damaged, or of a later version.
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
    """Return the lines of metrics.jsonl; none if there is no such file.

    The last line may be incomplete, because its run was killed; it is then left out.

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
    """Remove a part's lines from `round` on, and incomplete lines, from metrics.jsonl.

    The part repeats these rounds, and writes their lines again.

    Args:
        path: The file.
        part: Name of the part.
        round: First round to remove.

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
    """Return the line of metrics.jsonl for an evaluation.

    Args:
        result: The evaluated round.
        part: Name of the part.
        condition: Condition of the part.
        **more: Further entries of the line.
    """
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
    """Append a line to metrics.jsonl.

    Raises:
        TrainingError: The file cannot be written.
    """
    with on_disk(path, TrainingError), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _metrics_text(path: Path) -> str:
    """Return the text of a metrics.jsonl after checking its size.

    The check comes before any line is parsed, so that a huge file cannot fill memory.
    """
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
    """Format a number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return (
                f"{count:.3g} {unit}" if abs(count) < 99.95 else f"{count:.0f} {unit}"
            )
        count /= 1000
    raise AssertionError("the last unit takes any number")


def duration(seconds: float) -> str:
    """Format a number of seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds % 60):02d} s"
