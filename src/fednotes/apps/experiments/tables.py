"""Write the table of a grid as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fednotes.apps.experiments.grid_runs import HELD_OUT
from fednotes.jobs.left_out_table import LeftOutCell, make_left_out_table
from fednotes.metrics.paired_tests import FEWEST_SEEDS
from fednotes.report.markdown import escape_names, format_markdown_table

Table = Mapping[str, Any]  # the content of results.json
TableRow = Mapping[str, Any]  # one row and condition of a table
Number = Mapping[str, float | None]  # "mean" and "std" over seeds

KINDS = ("strict", "relaxed")
RATES = ("precision", "recall", "f1")
MISSING = {"mean": None, "std": None, "n": 0}  # a number that no run has

_PERCENT = 100.0  # factor for fractions
_NONE = "–"  # stands for a missing number
_DISEASE_COLUMNS = (("precision", "P"), ("recall", "R"), ("f1", "F1"))
# Last words of the columns whose numbers are not fractions.
_PLAIN_COLUMNS = ("up", "down", "site", "s", "loss", "perplexity", "brier")


# ---- the page ------------------------------------------------------------------------


def format_results_page(table: Table) -> str:
    """Return a table as Markdown: percent, mean ± standard deviation over seeds."""
    if "markdown" in table:
        return str(table["markdown"])
    return join_paragraphs(_list_paragraphs(table))


def join_paragraphs(paragraphs: Iterable[str]) -> str:
    """Return a Markdown page of paragraphs and tables."""
    return "\n\n".join(paragraphs) + "\n"


def _list_paragraphs(table: Table) -> Iterator[str]:
    """Yield the paragraphs and tables of the page."""
    yield f"### {table['title']}"
    if table.get("settings"):
        yield f"Changed settings: {_join_settings(table['settings'])}."
    for setting, place in table.get("skipped_settings", ()):
        yield f"`{setting}` does not apply to {place}."
    yield from _list_omitted(table)
    if table.get("by_output"):
        yield from _list_disease_tables(table)
    else:
        yield from _list_run_tables(table)
    yield from _list_left_out_tables(table)
    yield from _list_searches(table)
    yield from _list_pair_tests(table)
    if table["paper"] and not table.get("by_output"):
        yield from _list_paper_table(table)


def _list_omitted(table: Table) -> Iterator[str]:
    """Yield the rows that could not run, with the reason."""
    omitted = table.get("omitted", ())
    if omitted:
        yield "Omitted, because it cannot run here:"
        yield "\n".join(f"- {'; '.join(names)}: {reason}" for reason, names in omitted)


def _list_left_out_tables(table: Table) -> Iterator[str]:
    """Yield title, table and footnote of each row's models at left-out sites."""
    for row in table["rows"]:
        if "left_out_sites" not in row:
            continue
        numbers = row["left_out_sites"]
        scores = make_left_out_table(
            numbers["scores"], numbers["mean"], numbers["types"]
        )
        yield (
            f"{row['label']}, at a site that took no part: strict F1 in percent; types "
            f"that are scored: {escape_names(scores.types_in_words)}."
        )
        rows = [
            [name, *(_format_left_out_cell(cell) for cell in cells)]
            for name, cells in scores.rows
        ]
        yield format_markdown_table(("model", *scores.sites, "mean"), rows)
        if scores.has_partial_scores:
            yield (
                "\\* This model knows only some of these types, and is scored only on "
                "those."
            )


def _format_left_out_cell(cell: LeftOutCell | None) -> str:
    """Return the F1 of a model at a left-out site."""
    if cell is None:
        return _NONE
    text = _format_cell({"mean": cell.f1, "std": cell.std})
    return text if cell.counts_all else f"{text} \\*"


def _list_searches(table: Table) -> Iterator[str]:
    """Yield the settings chosen by validation data, and those that were tried."""
    searching = [row for row in table["rows"] if row["tried"]]
    if not searching:
        return
    yield (
        "These settings were chosen by the mean of the sites' validation scores, which "
        "are shown in brackets for each candidate:"
    )
    yield "\n".join(_format_search(row) for row in searching)
    if any(tried["held_out"] for row in searching for tried in row["tried"]):
        yield (
            "The job has no validation data. For the search alone, "
            f"{HELD_OUT:.0%} of the training sentences were held out; the "
            "runs of the table train on all of them. Test data are not used "
            "for any choice."
        )


def _format_search(row: TableRow) -> str:
    """Return a row's chosen settings, and the score of each that it tried."""
    tried = "; ".join(
        f"{_join_settings(each['set'])}: {_format_validation(each['validation'])}"
        for each in row["tried"]
    )
    chosen = _join_settings(row["chosen"])
    return f"- {row['label']}, {row['condition']}: {chosen} ({tried})"


def _format_validation(score: float) -> str:
    """Return a validation score in percent; a negated loss as the plain loss."""
    if score < 0:
        return f"loss {-score:.3f}"
    return f"{_PERCENT * score:.1f}"


def _join_settings(settings: Sequence[str]) -> str:
    """Return settings as code, separated by commas."""
    return ", ".join(f"`{setting}`" for setting in settings)


def _list_paper_table(table: Table) -> Iterator[str]:
    """Yield the paper's own figures: a sentence, then the table."""
    heads = list(next(iter(table["paper"].values())))
    yield f"The paper's own figures. {table['paper_note']}"
    rows = []
    for name, figures in table["paper"].items():
        rows.append([name, *(f"{figures[head]:.2f}" for head in heads)])
    yield format_markdown_table(("run", *heads), rows)


def _describe_seeds(table: Table) -> str:
    """Return the seeds of all rows or, if rows differ, each list of seeds."""
    seed_lists = {tuple(row["seeds"]) for row in table["rows"]}
    if len(seed_lists) == 1:
        noun = "seed" if len(table["seeds"]) == 1 else "seeds"
        return f"{noun} {_join_numbers(table['seeds'])}"
    return "seeds " + " or ".join(map(_join_numbers, sorted(seed_lists, key=len)))


def _join_numbers(numbers: Iterable[int]) -> str:
    """Return numbers separated by commas."""
    return ", ".join(map(str, numbers))


# ---- tests over seeds ----------------------------------------------------------------


def _list_pair_tests(table: Table) -> Iterator[str]:
    """Yield the paired tests over seeds, or a note that there are too few seeds."""
    tested = [pair for pair in table["pairs"] if pair["differences"]]
    if tested:
        yield (
            "Differences in points, with 95 % intervals and p of a paired t test over "
            "seeds (each p is of a single test):"
        )
        yield _format_test_table(tested)

    numbers = {len(row["seeds"]) for row in table["rows"]}
    too_few = sorted(number for number in numbers if number < FEWEST_SEEDS)
    if too_few and table["score"] == "test":
        noun = "seed" if too_few == [1] else "seeds"
        claim = "claimed between the other rows" if tested else "claimed"
        yield f"{' or '.join(map(str, too_few))} {noun}: no difference is {claim}."
    if "untested" in table:
        yield f"No test over seeds: {table['untested']}."


def _format_test_table(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of paired tests, with a column for each measure."""
    columns = list(
        dict.fromkeys(name for pair in pairs for name in pair["differences"])
    )
    rows = []
    for pair in pairs:
        cells = [f"{pair['first']} − {pair['second']}", str(len(pair["seeds"]))]
        cells += [_format_difference(pair["differences"].get(name)) for name in columns]
        rows.append(cells)
    return format_markdown_table(("first minus second", "seeds", *columns), rows)


def _format_difference(test: Mapping[str, float] | None) -> str:
    """Return a mean difference in points with its interval and p; "" without a test."""
    if test is None:
        return ""
    mean = _PERCENT * test["mean"]
    low = _PERCENT * test["low"]
    high = _PERCENT * test["high"]
    p = "p < 0.001" if test["p_value"] < 0.001 else f"p = {test['p_value']:.3f}"
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}; {p})"


# ---- a row for each run --------------------------------------------------------------


def _list_run_tables(table: Table) -> Iterator[str]:
    """Yield a table with a row for each run, then precision and recall of sites.

    The columns are the grid's own, or strict and relaxed F1 of each site.
    """
    seeds = _describe_seeds(table)
    if table["columns"]:
        yield f"Scores in percent; {seeds}. {table['note']}"
        yield _format_own_columns(table)
        return
    if table["score"] == "test":
        scores = "Test F1 in percent, strict / relaxed"
    else:
        scores = "Validation F1 in percent, strict"
    yield f"{scores}; {seeds}.\n{table['note']}".rstrip()
    yield _format_site_table(table)
    yield from _list_precision_recall_tables(table)


def _format_own_columns(table: Table) -> str:
    """Return the table of a grid that names its columns."""
    cells = [_list_own_cells(table, row) for row in table["rows"]]
    rows = [
        [row["label"], row["condition"], *of_row.values()]
        for row, of_row in zip(table["rows"], cells, strict=True)
    ]
    return format_markdown_table(("run", "condition", *cells[0]), rows, name_columns=2)


def _format_site_table(table: Table) -> str:
    """Return the table of a grid with a column for each site."""
    cells = [_list_site_cells(table, row) for row in table["rows"]]
    has_uneven_seeds = len({tuple(row["seeds"]) for row in table["rows"]}) > 1
    heads = ["run", "condition"]
    if has_uneven_seeds:
        heads.append("seeds")
    rows = []
    for row, of_row in zip(table["rows"], cells, strict=True):
        line = [row["label"], _describe_condition(row)]
        if has_uneven_seeds:
            line.append(str(len(row["seeds"])))
        rows.append([*line, *of_row.values()])
    return format_markdown_table([*heads, *cells[0]], rows, name_columns=2)


def _describe_condition(row: TableRow) -> str:
    """Return the training condition of a row, and what the run adds to the method."""
    if not row["beyond"]:
        return str(row["condition"])
    return f"{row['condition']} + {row['beyond']}"


def _list_precision_recall_tables(table: Table) -> Iterator[str]:
    """Yield a table for strict mentions and one for relaxed ones."""
    for kind in KINDS:
        sites = [
            site
            for site, scores in table["rows"][0]["scores"].items()
            if "precision" in scores.get(kind, {})
        ]
        if not sites:
            continue
        rows = []
        for row in table["rows"]:
            scores = [row["scores"].get(site, {}).get(kind, {}) for site in sites]
            cells = [_format_precision_recall(of_site) for of_site in scores]
            rows.append([row["label"], _describe_condition(row), *cells])
        yield f"Precision / recall in percent, {kind}:"
        yield format_markdown_table(("run", "condition", *sites), rows, name_columns=2)


def _format_precision_recall(scores: Mapping[str, Number]) -> str:
    """Return precision and recall in one cell."""
    precision = _format_cell(scores.get("precision", MISSING))
    recall = _format_cell(scores.get("recall", MISSING))
    return f"{precision} / {recall}"


# ---- cells by heading ----------------------------------------------------------------


def _list_own_cells(table: Table, row: TableRow) -> dict[str, str]:
    """Return a row's cells by heading, for a grid that names its columns."""
    cells = {
        name: _format_column_cell(name, row["columns"][name])
        for name in table["columns"]
    }
    if table["against"]:
        cells[f"behind {table['against']}"] = _format_distance(table, row)
    cells |= _list_not_annotated_cell(table, row)
    cells |= _list_gap_cell(table, row)
    return cells


def _format_distance(table: Table, row: TableRow) -> str:
    """Return how far a row is below another row in the last column."""
    best = row
    for other in table["rows"]:
        if other["label"] == table["against"]:
            best = other
            break
    if row is best:
        return ""
    column = table["columns"][-1]
    best_mean = best["columns"][column]["mean"]
    mean = row["columns"][column]["mean"]
    if best_mean is None or mean is None:
        return ""
    return f"{_PERCENT * (best_mean - mean):.1f}"


def _list_site_cells(table: Table, row: TableRow) -> dict[str, str]:
    """Return a row's cells by heading: the scores of each site, then the costs."""
    cells = {}
    for site, scores in row["scores"].items():
        f1 = [scores[kind]["f1"] for kind in KINDS if scores.get(kind)]
        cells[site] = " / ".join(map(_format_cell, f1))
    cells |= _list_not_annotated_cell(table, row)
    cells |= _list_cost_cells(table, row)
    cells |= _list_gap_cell(table, row)
    return cells


def _list_cost_cells(table: Table, row: TableRow) -> dict[str, str]:
    """Return the cells of costs: scores within the limits, and the total costs."""
    within = row["within"]
    cells = {}
    for name, unit in (("megabytes", "MB"), ("seconds", "s")):
        if table[name]:
            head = f"micro strict within {table[name]:g} {unit}"
            cells[head] = _format_cell(within[name]) if within else ""
    if cells:
        cells["MB"] = f"{row['megabytes']:.1f}" if within else ""
        cells["s"] = f"{row['seconds']:.0f}"
    return cells


def _list_not_annotated_cell(table: Table, row: TableRow) -> dict[str, str]:
    """Return the cell of F1 on types that a site does not annotate.

    {} if no row of the table has such a score.
    """
    if not any(each["not_annotated"] for each in table["rows"]):
        return {}
    score = row["not_annotated"]
    return {"types not annotated": _format_cell(score["f1"]) if score else ""}


def _list_gap_cell(table: Table, row: TableRow) -> dict[str, str]:
    """Return the cell of the share of pooled - alone that a row closes.

    {} if no row of the table has such a share.
    """
    if not any(each.get("gap") for each in table["rows"]):
        return {}
    gap = row.get("gap")
    if not gap:
        text = ""
    elif "why" in gap:
        text = gap["why"]
    else:
        text = _format_cell(gap, digits=2, factor=1)
    return {"gap closed": text}


def _format_column_cell(name: str, number: Number) -> str:
    """Return a number of a column: fractions in percent, other numbers unchanged."""
    if not is_plain(name):
        return _format_cell(number)
    if name.endswith(("loss", "brier")):
        digits = 3
    elif name == "s":
        digits = 0
    else:
        digits = 2
    return _format_cell(number, digits=digits, factor=1)


def is_plain(column: str) -> bool:
    """Return whether a column shows unscaled numbers: bytes, seconds or errors."""
    return column.rsplit(" ", 1)[-1] in _PLAIN_COLUMNS


def _format_cell(number: Number, *, digits: int = 1, factor: float = _PERCENT) -> str:
    """Return mean ± standard deviation."""
    mean = number["mean"]
    std = number["std"]
    if mean is None:
        return _NONE
    text = f"{factor * mean:.{digits}f}"
    if std is None:
        return text
    return f"{text} ± {factor * std:.{digits}f}"


# ---- a row for each disease ----------------------------------------------------------


def _list_disease_tables(table: Table) -> Iterator[str]:
    """Yield a table with a row for each disease and three columns for each run.

    The paper's figures are beside them if the diseases are the same.
    """
    rows = table["rows"]
    paper = table["paper"]
    yield f"Percent; {_describe_seeds(table)}. {table['note']}".rstrip()
    diseases = list(dict.fromkeys(name for row in rows for name in row["by_output"]))
    is_beside = any(name in paper for name in diseases)
    yield _format_disease_table(table, diseases, paper=paper if is_beside else {})
    if paper and not is_beside:
        yield from _list_paper_table(table)
    elif table["paper_note"]:
        yield table["paper_note"]


def _format_disease_table(
    table: Table,
    diseases: Sequence[str],
    *,
    paper: Mapping[str, Mapping[str, float]],
) -> str:
    """Return the table of all diseases and their average."""
    rows = table["rows"]
    cells = {name: _list_disease_cells(rows, name) for name in diseases}
    for name in paper:
        if name != "average" and name not in cells:
            cells[name] = _list_disease_cells(rows, name)
    cells["average"] = [
        _format_average(row, key) for row in rows for key, _ in _DISEASE_COLUMNS
    ]

    heads = ["disease"]
    for row in rows:
        # A single run needs no name.
        prefix = f"{row['label']}, {row['condition']}: " if len(rows) > 1 else ""
        heads += [prefix + head for _, head in _DISEASE_COLUMNS]
    paper_heads = list(next(iter(paper.values()))) if paper else []
    heads += [f"paper: {head}" for head in paper_heads]

    lines = []
    for name, of_disease in cells.items():
        figures = paper.get(name, {})
        of_paper = [
            f"{figures[head]:.1f}" if head in figures else "" for head in paper_heads
        ]
        lines.append([name, *of_disease, *of_paper])
    return format_markdown_table(heads, lines)


def _list_disease_cells(rows: Sequence[TableRow], disease: str) -> list[str]:
    """Return the scores of a disease, three for each row."""
    cells = []
    for row in rows:
        scores = row["by_output"].get(disease, {})
        cells += [_format_cell(scores.get(key, MISSING)) for key, _ in _DISEASE_COLUMNS]
    return cells


def _format_average(row: TableRow, key: str) -> str:
    """Return the mean over diseases of the means over seeds."""
    means = [
        scores[key]["mean"] for scores in row["by_output"].values() if key in scores
    ]
    if not means:
        return _NONE
    return f"{_PERCENT * sum(means) / len(means):.1f}"
