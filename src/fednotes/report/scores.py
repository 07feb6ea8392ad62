"""The parts of the report that show test scores: by site, and by entity type."""

from __future__ import annotations

from collections.abc import Sequence

from fednotes.report.charts import dot_chart, figure, legend
from fednotes.report.run import Json, Run, escape, finite, get, mapping

_MEASURES = (
    ("strict", "Strict", ("precision", "recall", "f1")),
    ("relaxed", "Relaxed", ("precision", "recall", "f1")),
    ("relaxed_one_to_one", "One to one", ("f1",)),
    ("unseen", "Unseen forms", ("f1",)),
    ("masked", "Masked words", ("loss", "perplexity", "accuracy")),
    ("next_sentence", "Next sentence", ("accuracy",)),
    ("phenotypes", "Macro", ("precision", "recall", "f1")),
    ("present", "Present", ("precision", "recall", "f1")),
    ("ranking", "Ranking", ("auroc", "auprc")),
    ("calibration", "Calibration", ("brier",)),
    ("codes", "Codes (stage 1)", ("loss", "auroc")),
)
_LEADS = ("strict", "phenotypes")  # whose F1 is compared with that of the site alone
_SHORT = {
    **{"precision": "P", "recall": "R", "f1": "F1", "accuracy": "Accuracy", "loss": "Loss"},
    **{"auroc": "AUROC", "auprc": "AUPRC", "brier": "Brier"},
}
_DOTS = (
    ("strict", "f1", "Strict F1"),
    ("relaxed", "f1", "Relaxed F1"),
    ("masked", "accuracy", "Masked words guessed"),
    ("phenotypes", "f1", "Macro F1"),
    ("ranking", "auroc", "AUROC"),
    ("codes", "auroc", "AUROC of codes"),  # where they are all that was learnt
)
_OF_MENTIONS = (
    "Fractions; micro averages over entity types. <b>Strict</b>: exact offsets and type. "
    "<b>Relaxed</b>: any overlap with a mention of the same type. <b>One to one</b>: overlap, "
    "each mention in one pair at most. <b>Unseen forms</b>: strict, on mentions whose form is "
    "not in the training data. <b>Δ</b>: strict F1 against "
    "the site alone. The best strict F1 of a site is bold."
)
_OF_WORDS = (
    "Held-out notes of each site, masked in the same way every time. <b>Loss</b>: mean negative "
    "log likelihood of a masked word (nats); perplexity is its exponential. <b>Accuracy</b>: the "
    "share of masked words that were guessed right."
)
_OF_PATIENTS = (
    "Fractions, on patients that no model was trained on. <b>Macro</b>: for each disease the mean "
    "over its classes (present, absent, and questionable where a model knows it), then the mean "
    "over diseases; F1 is thus a mean of F1s, not the harmonic mean of the P and R beside it. "
    "<b>Present</b>: of the class present alone, the mean over diseases. <b>AUROC</b>: the chance "
    "that a patient with the disease ranks above one without, mean over diseases that have both; "
    "<b>AUPRC</b>: average precision; in brackets 95 % intervals, by resampling patients. "
    "<b>Brier</b>: mean squared error of the probability of present, 0 at best. <b>Codes</b>: "
    "cross-entropy and mean AUROC of the billing codes that stage 1 learns from. <b>Δ</b>: "
    "macro F1 against the site alone. The best macro F1 of a site is bold."
)


def site_scores(run: Run) -> str:
    """Dots and a table: each site under each condition. Empty if nothing was scored."""
    groups = [(name, mapping(site)) for name, site in run.sites.items()]
    mean = mapping(run.summary.get("mean"))
    if not any(mapping(site.get(c)) for _, site in [*groups, ("", mean)] for c in run.conditions):
        return ""
    everything = [*groups, ("Mean of sites", mean)] if mean else groups
    kinds = {kind for _, site in everything for c in site.values() for kind in mapping(c)}
    charts = [
        dot_chart(f"dots-{key}", title, f"{title} of each site by condition", rows, looks)
        for key, measure, title in _DOTS
        if not (key == "codes" and "phenotypes" in kinds)
        if (rows := _dots(run, everything, key, measure))
        for looks in [{name: i for i, name in enumerate(run.conditions)}]
    ]
    title, what, words = _described(kinds)
    picture = ""
    if charts:
        caption = f"{what}; the axis need not begin at zero."
        picture = legend(run.conditions) + figure(charts, caption, run.source)
    return (
        f"<section>\n<h2>Scores on {title}</h2>\n<p>{words}</p>\n"
        f"{picture}{_score_table(run, everything, bool(mean))}</section>\n"
    )


def _described(kinds: set[str]) -> tuple[str, str, str]:
    """What the sites are judged on: for the heading, for the picture, and the definitions."""
    if "masked" in kinds:
        return "held-out notes", "Held-out notes", _OF_WORDS
    if kinds & {"phenotypes", "codes"}:
        return "the test patients", "Scores on the test patients", _OF_PATIENTS
    return "the test sets", "F1 on the test sets", _OF_MENTIONS


def _dots(
    run: Run, groups: Sequence[tuple[str, Json]], key: str, measure: str
) -> list[tuple[str, dict[str, float]]]:
    rows = []
    for name, site in groups:
        found = {c: v for c in run.conditions if (v := get(site, c, key, measure)) is not None}
        if found:
            rows.append((name, found))
    return rows


def _score_table(run: Run, groups: Sequence[tuple[str, Json]], has_mean: bool) -> str:
    present = [
        (key, title, measures)
        for key, title, measures in _MEASURES
        if any(
            get(site, condition, key, measure) is not None
            for _, site in groups
            for condition in run.conditions
            for measure in measures
        )
    ]
    top = "".join(
        f'<th scope="colgroup" colspan="{len(measures) + (key in _LEADS)}">{title}</th>'
        for key, title, measures in present
    )
    second = "".join(
        "".join(f'<th scope="col">{_SHORT.get(m, m.capitalize())}</th>' for m in measures)
        + ('<th scope="col">Δ</th>' if key in _LEADS else "")
        for key, _, measures in present
    )
    bodies = [
        _score_rows(run, name, site, present, has_mean and place == len(groups) - 1)
        for place, (name, site) in enumerate(groups)
    ]
    return (
        '<div class="wide">\n<table>\n<thead>\n<tr><th scope="col" class="text" rowspan="2">Site'
        f'</th><th scope="col" class="text" rowspan="2">Trained</th>{top}</tr>\n'
        f"<tr>{second}</tr>\n</thead>\n{''.join(bodies)}</table>\n</div>\n"
    )


def _score_rows(
    run: Run, name: str, site: Json, present: Sequence[tuple[str, str, tuple[str, ...]]], mean: bool
) -> str:
    conditions = [c for c in run.conditions if mapping(site.get(c))]
    if not conditions:
        return ""
    lead = next((key for key, _, _ in present if key in _LEADS), "strict")
    alone = get(site, "alone", lead, "f1")
    best = max((f for c in conditions if (f := get(site, c, lead, "f1")) is not None), default=None)
    rows = []
    for place, condition in enumerate(conditions):
        cells = []
        if place == 0:
            head = f'<th scope="rowgroup" rowspan="{len(conditions)}">{escape(name)}</th>'
            cells.append(head)
        cells.append(f'<th scope="row" class="sub">{escape(condition)}</th>')
        for key, _, measures in present:
            for measure in measures:
                value = get(site, condition, key, measure)
                bold = key == lead and measure == "f1" and value is not None and value == best
                bounds = mapping(mapping(site.get(condition)).get(key)).get(f"{measure}_interval")
                cells.append(cell(value, "best" if bold else "", interval(bounds)))
            if key in _LEADS:
                cells.append(_change(get(site, condition, lead, "f1"), alone, condition))
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    opening = '<tbody class="mean">' if mean else "<tbody>"
    return f"{opening}\n{''.join(rows)}</tbody>\n"


def cell(value: float | None, css: str = "", after: str = "") -> str:
    """A table cell with a fraction to three places, or a dash. after: small print behind it."""
    text = f"{value:.3f}" if value is not None else "—"
    text += f" <small>{escape(after)}</small>" if after and value is not None else ""
    return f'<td class="{css}">{text}</td>' if css else f"<td>{text}</td>"


def interval(bounds: object) -> str:
    """A pair of numbers as an interval; empty where it is none."""
    pair = bounds if isinstance(bounds, list | tuple) and len(bounds) == 2 else (None, None)
    low, high = map(finite, pair)
    return "" if low is None or high is None else f"({low:.2f}\u2013{high:.2f})"


def _change(value: float | None, alone: float | None, condition: str) -> str:
    if value is None or alone is None or condition == "alone":
        return "<td></td>"
    change = value - alone
    css = "up" if change >= 0.0005 else "down" if change <= -0.0005 else ""
    return f'<td class="{css}">{change:+.3f}</td>' if css else f"<td>{change:+.3f}</td>"


def type_scores(run: Run) -> str:
    """A table for each site: strict and relaxed F1 of every entity type."""
    tables = [_type_table(run, name, mapping(site)) for name, site in run.sites.items()]
    tables = [table for table in tables if table]
    if not tables:
        return ""
    return f"<section>\n<h2>F1 by entity type</h2>\n{''.join(tables)}</section>\n"


def _type_table(run: Run, name: str, site: Json) -> str:
    by_type = {c: mapping(mapping(site.get(c)).get("by_type")) for c in run.conditions}
    conditions = [c for c in run.conditions if by_type[c]]
    kinds = sorted({kind for c in conditions for kind in by_type[c]})
    if not kinds:
        return ""
    support = {
        kind: next((n for c in conditions if (n := get(by_type[c], kind, "support"))), None)
        for kind in kinds
    }
    heads = "".join(f'<th scope="col">{escape(c)}</th>' for c in conditions) * 2
    rows = "".join(
        f'<tr><th scope="row" class="sub">{escape(kind)}</th>'
        f"<td>{'—' if support[kind] is None else f'{support[kind]:.0f}'}</td>"
        + "".join(
            cell(_type_f1(by_type[c].get(kind), key))
            for key in ("strict", "relaxed")
            for c in conditions
        )
        + "</tr>\n"
        for kind in kinds
    )
    span = len(conditions)
    return (
        f"<details open>\n<summary>{escape(name)}</summary>\n"
        '<div class="wide">\n<table>\n<thead>\n'
        '<tr><th scope="col" class="text" rowspan="2">Type</th>'
        '<th scope="col" rowspan="2">Mentions</th>'
        f'<th scope="colgroup" colspan="{span}">Strict F1</th>'
        f'<th scope="colgroup" colspan="{span}">Relaxed F1</th></tr>\n'
        f"<tr>{heads}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n</details>\n"
    )


def _type_f1(scores: object, key: str) -> float | None:
    """F1 under a definition; plain {precision, recall, f1} counts as strict."""
    f1 = get(scores, key, "f1")
    return get(scores, "f1") if f1 is None and key == "strict" else f1
