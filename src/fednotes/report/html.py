"""A report of one run as a single HTML file: no script, no font, nothing from a network.

Reads the result files alone (`summary.json`, and `metrics.jsonl` where there is one), so that
no note can get into it. What a file lacks is left out of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fednotes.core.store import write_out, write_text
from fednotes.report.curves import traffic, training_curves
from fednotes.report.phenotypes import phenotype_scores
from fednotes.report.run import Run, duration, escape, finite, get, mapping, read, size
from fednotes.report.scores import site_scores, type_scores
from fednotes.report.style import STYLE

_TILES = (
    ("strict", "f1", "strict F1"),
    ("masked", "accuracy", "words guessed"),
    ("phenotypes", "f1", "macro F1"),
    ("ranking", "auroc", "AUROC"),
    ("codes", "auroc", "AUROC of codes"),
)


def write_report(run_directory: Path, output: Path | None = None) -> Path:
    """Write the report of a run, by default to `report.html` beside its results.

    Raises DataError if `summary.json` is missing or a result file is not what it should be,
    FednotesError if the report cannot be written.
    """
    directory = Path(run_directory)
    run = read(directory)
    target = Path(output) if output is not None else directory / "report.html"
    (write_text if output is None else write_out)(target, _page(run))
    return target


def _page(run: Run) -> str:
    title = str(run.summary.get("title") or f"{run.summary.get('method', 'fednotes')} run")
    sections = (
        site_scores(run),
        training_curves(run),
        phenotype_scores(run),
        type_scores(run),
        traffic(run),
        _settings(run),
    )
    body = "\n".join(part for part in sections if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header>\n<p class="kicker">fednotes report</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="soft">{run.source}</p>\n{_tiles(run)}</header>\n{body}\n'
        "<footer>Made from the run's result files alone; it holds scores and settings, "
        "and no text of any note.</footer>\n</main>\n</body>\n</html>\n"
    )


def _tiles(run: Run) -> str:
    mean = mapping(run.summary.get("mean"))
    tiles: list[tuple[str, str, str]] = []
    diseases = any("phenotypes" in mapping(scores) for scores in mean.values())
    for *path, what in _TILES:
        if diseases and path[0] == "codes":
            continue  # what stage 1 learns from, not what the run is for
        alone = get(mean, "alone", *path)
        for name in run.conditions:
            score = get(mean, name, *path)
            if score is not None:
                against = f", {score - alone:+.3f}" if alone is not None and name != "alone" else ""
                tiles.append((name.capitalize(), f"{score:.3f}", f"mean {what}{against}"))
    if run.sites:
        tiles.append(("Sites", str(len(run.sites)), ""))
    seconds = finite(run.summary.get("seconds"))
    if seconds is not None:
        tiles.append(("Time", duration(seconds), ""))
    up, down = (finite(run.summary.get(key)) for key in ("bytes_up", "bytes_down"))
    if up is not None and down is not None:
        note = f"{size(up)} up, {size(down)} down"
        tiles.append(("Bytes sent", size(up + down), note))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        f"{f'<small>{escape(note)}</small>' if note else ''}</dd></div>\n"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">\n{cells}</dl>\n' if cells else ""


def _settings(run: Run) -> str:
    parts = []
    for key, title in (("config", "Configuration"), ("versions", "Versions")):
        rows = "".join(
            f'<tr><th scope="row" class="key">{escape(name)}</th><td>{escape(value)}</td></tr>\n'
            for name, value in _flat(run.summary.get(key))
        )
        if rows:
            parts.append(
                f'<h2>{title}</h2>\n<div class="wide">\n<table class="settings">\n'
                f"<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
            )
    notes = run.summary.get("notes")
    remarks = notes if isinstance(notes, list) else [notes] if isinstance(notes, str) else []
    if remarks:
        items = "".join(f"<li>{escape(str(remark))}</li>\n" for remark in remarks)
        parts.append(f"<h2>Remarks</h2>\n<ul>\n{items}</ul>\n")
    return f"<section>\n{''.join(parts)}</section>\n" if parts else ""


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted key, value)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, inner in enumerate(value, 1):
            yield from _flat(inner, f"{prefix}.{place}")
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    elif value is not None and prefix:
        yield prefix, str(value)
