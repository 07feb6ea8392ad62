"""Write a run's report from a summary and lines of metrics, and read it again."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fednotes.report.html import write_report

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Tree(HTMLParser):
    """Checks that tags nest, and keeps every table as rows of cell texts and every
    attribute."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def report(
    folder: Path, values: dict[str, Any], lines: list[dict[str, Any]] | None = None
) -> str:
    (folder / "summary.json").write_text(json.dumps(values), encoding="utf-8")
    if lines is not None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def charts(page: str) -> list[ET.Element]:
    return [
        ET.fromstring(svg)
        for svg in re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL)
    ]
