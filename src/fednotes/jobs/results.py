"""Hold the results of a run, and read and write summary.json.

Simulations and real sites write these files; reports and comparisons read them. Readers
treat missing values, and scores that are not numbers, as gaps: a site may have no test
data, and the scores of real sites come from the sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, FiniteFloat, model_validator

from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.errors import DataError, needs
from fednotes.core.numbers import Fraction
from fednotes.core.parsing import as_mapping, find_number
from fednotes.core.store import write_json
from fednotes.core.wording import format_duration, format_size
from fednotes.jobs.causes import Cause
from fednotes.jobs.left_out_table import (
    LeftOutScores,
    LeftOutTable,
    make_left_out_table,
)
from fednotes.jobs.metrics_file import METRICS
from fednotes.jobs.run_files import OptionalNumber, read_versioned
from fednotes.jobs.score_layouts import SCORES, WORDINGS, DataWording
from fednotes.metrics.gap import Gap, Verdict, find_main_score, judge_gain

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.json"
# The privacy guarantee of a run, stored beside a real site's scores.
PROMISED = "promise.json"
# The control of method "personal": each site mixes two models of its own.
OWN_MIX = "own-mix"
# Each site in turn takes no part in training the models that are scored on its data.
LEFT_OUT = "left-out"
CONDITIONS = ("alone", OWN_MIX, "federated", "pooled", LEFT_OUT)
# Conditions that the federated models are compared with at each site.
BASELINES = ("alone", OWN_MIX)
# Largest number of sites in a summary: a report has a section for each.
MAX_SITES = 10_000

# Kind of score → measure → number, as `metrics/` computes them.
Scores = Mapping[str, Any]

# Kinds of data of old runs, which did not record theirs.
_OLD_KINDS = {"phenotype": "patients", "pretrain": "notes"}
_Z = 1.96  # half-width of a 95% interval in standard errors


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
    p_value: Fraction


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
        left_out: Left-out site → model → its scores on the site's test data
            (`jobs/left_out.py`).
        left_out_mean: Model → the means of these scores over the left-out sites. It
            lacks models without a score at one of them.
        left_out_types: Left-out site → the entity types that are scored there.
        config: Tables of the job.
        versions: Versions of the software, and the machine.
        workers: Number of worker processes of a simulation; 1 if there were none.
        processors: Names of the workers' processors, in a simulation on a cluster.
        threads: Number of CPU threads of each process of a simulation.
        notes: Remarks on the data and the scores.
        causes: What the scores show about causes of poor results, for a diagnosis; the
            notes have the same in words.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 0
    title: str = ""
    method: str = ""
    holds: str = ""
    seed: int | None = None
    run: str = ""
    command: str = ""
    seconds: OptionalNumber = None
    bytes_up: OptionalNumber = None
    bytes_down: OptionalNumber = None
    eta: OptionalNumber = None
    annotated: dict[str, list[str]] = {}
    sites: Annotated[dict[str, dict[str, dict[str, Any]]], MaxLen(MAX_SITES)] = {}
    mean: dict[str, dict[str, Any]] = {}
    micro: dict[str, dict[str, Any]] = {}
    valid: dict[str, dict[str, Any]] = {}
    privacy: dict[str, dict[str, Any]] = {}
    metrics: dict[str, Any] = {}
    conditions: dict[str, dict[str, Any]] = {}
    marks: dict[str, str] = {}
    paired: dict[str, dict[str, PairedDifference]] = {}
    paired_mean: dict[str, PairedDifference] = {}
    left_out: LeftOutScores = {}
    left_out_mean: dict[str, dict[str, Any]] = {}
    left_out_types: dict[str, list[str]] = {}
    config: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    workers: int = 1
    processors: list[str] = []
    threads: int = 1
    notes: list[str] = []
    causes: list[Cause] = []

    @model_validator(mode="before")
    @classmethod
    def _convert_old(cls, table: Any) -> Any:
        """Convert a summary in an older layout to the current one.

        Older runs between real sites had a list of sites, and the scores beside it.
        """
        if not isinstance(table, dict):
            return table
        converted = dict(table)
        method = str(table.get("method"))
        converted.setdefault("holds", _OLD_KINDS.get(method, ""))
        if isinstance(table.get("sites"), list):
            scores = as_mapping(table.get("scores"))
            converted["sites"] = {
                site: {"federated": scores[site]} if site in scores else {}
                for site in map(str, table["sites"])
            }
            costs = ("rounds", "seconds", "bytes_up", "bytes_down")
            converted["conditions"] = {
                "federated": {name: table.get(name) for name in costs}
            }
        return converted

    @property
    def wording(self) -> DataWording:
        """The wording for runs on this kind of data."""
        return WORDINGS.get(self.holds, WORDINGS["documents"])

    def gap(self, site: str | None = None) -> Gap | None:
        """Return how much of the gap between alone and pooled the federation closes.

        Args:
            site: The site; None for the means over the sites.

        Returns:
            The gap; None if it cannot be computed.
        """
        compared = self.verdict(site)
        return None if compared is None else compared.gap

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
            scores = list(self.sites.values())
            paired = self.paired_mean.get(against)
        else:
            scores = [self.sites.get(site, {})]
            paired = self.paired.get(against, {}).get(site)
        return judge_gain(scores, paired, against)

    def interval(self, site: str, condition: str) -> tuple[float, float] | None:
        """Return the 95% confidence interval of the main score of a site's model.

        Args:
            site: The site.
            condition: The condition.

        Returns:
            Lower and upper end, as fractions; None if there is no such score.
        """
        main = find_main_score(as_mapping(self.sites.get(site, {}).get(condition)))
        # A negative main score is a negated loss, which has no such interval.
        if main is None or main.score < 0:
            return None
        margin = _Z * main.error
        return max(0.0, main.score - margin), min(1.0, main.score + margin)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each site and condition, then rows for "mean" over sites.

        Returns:
            Rows with "site", "condition", and the scores on the test data as fractions,
            under names such as "strict_f1".
        """
        rows = []
        for site, by_condition in [*self.sites.items(), ("mean", self.mean)]:
            for condition in CONDITIONS:
                if condition in by_condition:
                    scores = _flatten_scores(as_mapping(by_condition[condition]))
                    rows.append({"site": site, "condition": condition, **scores})
        return rows

    def to_pandas(self) -> pd.DataFrame:
        """Return `table` as a pandas DataFrame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        with needs("pandas", "pandas"):
            import pandas as pd
        return pd.DataFrame(self.table())

    def _repr_html_(self) -> str:
        """Return `table` as HTML for notebooks, with all texts escaped."""
        rows = self.table()
        names = dict.fromkeys(name for row in rows for name in row)
        heads = "".join(f"<th>{escape(name)}</th>" for name in names)
        lines = []
        for row in rows:
            texts = (_format_cell(row.get(name, "")) for name in names)
            cells = "".join(
                f"<td>{escape(clean_to_one_line(text))}</td>" for text in texts
            )
            lines.append(f"<tr>{cells}</tr>")
        title = escape(clean_to_one_line(f"{self.title} (seed {self.seed})"))
        return (
            f"<table><caption>{title}</caption><tr>{heads}</tr>{''.join(lines)}</table>"
        )

    @property
    def left_out_table(self) -> LeftOutTable | None:
        """The table of models at left-out sites; None if there are no such sites."""
        if not self.left_out:
            return None
        return make_left_out_table(
            self.left_out, self.left_out_mean, self.left_out_types
        )

    @property
    def cost(self) -> str:
        """The cost of the federation for each site in words, as far as it is known.

        The cost is the bytes per site, and the time of one site: a simulation trains as
        many sites at a time as it has workers, and the others after them.
        """
        costs = as_mapping(self.conditions.get("federated"))
        sites = max(1, len(self.sites))
        up = find_number(costs, "bytes_up")
        down = find_number(costs, "bytes_down")
        seconds = find_number(costs, "seconds")
        words = []
        if up is not None and down is not None:
            words.append(format_size((up + down) / sites))
        if seconds is not None:
            at_once = min(sites, max(1, self.workers))
            words.append(format_duration(seconds * at_once / sites))
        return ", ".join(words) or "–"

    def write(self, folder: Path) -> None:
        """Write summary.json into a folder."""
        write_json(folder / SUMMARY, self.model_dump(exclude_defaults=True))


def _flatten_scores(scores: Scores) -> dict[str, float]:
    """Return the known numbers of scores under names such as "strict_f1"."""
    flat = {}
    for kind, layout in SCORES.items():
        for measure in layout.measures:
            value = find_number(scores, kind, measure)
            if value is not None:
                flat[f"{kind}_{measure}"] = value
    return flat


def _format_cell(value: object) -> str:
    """Return a value of `RunResult.table` as text, with three digits of a fraction."""
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
        described: Description of how much of the model is sent.
        eta: Fraction of the model that is trained and sent.
        valid: Site → validation score of its model; None without validation data.
        documents: Site → counts of each of its test documents
            (`MethodSite.find_document_counts`), from which two conditions are compared.
        reading: Site → counts of how its model reads the training data
            (`MethodSite.measure_reading`), for a diagnosis.
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
    reading: dict[str, dict[str, int]] = {}


class LeftOutOutcome(Outcome):
    """Hold the scores of several models on the test data of a left-out site.

    `scores` and `documents` are those of the federated model.

    Attributes:
        models: Model → its scores, and the number of "types" that they count.
        types: The entity types that the site and one of the others annotate.
        remarks: What could not be trained, in words.
    """

    models: dict[str, dict[str, Any]]
    types: list[str]
    remarks: list[str] = []


def read_result(folder: Path) -> RunResult:
    """Return a run's summary.json.

    Raises:
        DataError: The file is missing, damaged, or of a later version.
    """
    path = folder / SUMMARY
    if not path.is_file():
        if (folder / METRICS).is_file():
            raise DataError(
                f"{folder}: the run has not ended, so it has no summary.json yet; "
                "`fednotes doctor` and `fednotes ui` show what there is so far, and "
                "its command continues it with --resume"
            )
        raise DataError(
            f"{folder}: no summary.json there: give the folder of a run that has ended"
        )
    return read_versioned(path, RunResult)
