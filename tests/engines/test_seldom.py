"""Repeated log lines: what passes is counted against a run of NVFlare's own warnings."""

from __future__ import annotations

import copy
import json
import logging
import logging.config
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fednotes.engines.nvflare import kit
from fednotes.engines.nvflare.processes import KIT_VARIABLE, Seldom

AGAIN = "Failed to get_task from server. Will try it again."


def record(name: str, text: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, text, None, None)


def late(number: int) -> str:
    job = f"11fc898f-1fc4-4b3c-9533-{number:012x}"
    return f"Late stream error: stream_id={number} failed_destination=server.{job}: unreachable"


def test_a_line_that_comes_again_passes_once_a_minute_and_counts_the_rest() -> None:
    clock = [0.0]
    seldom = Seldom(now=lambda: clock[0])
    passed = []
    for tick in range(2500):  # 125 s of a retry each 50 ms
        clock[0] = tick * 0.05
        for name, text in (("nvflare.a", AGAIN), ("nvflare.b", late(10**15 + tick))):
            line = record(name, text)
            if seldom.filter(line):
                passed.append((round(clock[0]), name, line.getMessage()))
    assert [(at, name) for at, name, _ in passed] == [
        (at, name) for at in (0, 60, 120) for name in ("nvflare.a", "nvflare.b")
    ]
    assert passed[0][2] == AGAIN
    assert passed[2][2] == f"{AGAIN} (1199 more like this left out)"


def test_other_kinds_levels_and_loggers_pass() -> None:
    seldom = Seldom(now=lambda: 0.0)
    assert seldom.filter(record("nvflare.a", AGAIN))
    assert not seldom.filter(record("nvflare.a", AGAIN))
    assert seldom.filter(record("nvflare.a", AGAIN, logging.ERROR))
    assert seldom.filter(record("nvflare.b", AGAIN))
    assert seldom.filter(record("nvflare.a", "client h1 was refused"))


def test_our_own_lines_pass_unless_they_are_equal() -> None:
    seldom = Seldom(now=lambda: 0.0)
    lines = [record("fednotes.engines.host", f"refused give ({n})") for n in (7, 8, 8)]
    assert [seldom.filter(line) for line in lines] == [True, True, False]
    lines = [record("fednotes_not.ours", f"refused give ({n})") for n in (7, 8)]
    assert [seldom.filter(line) for line in lines] == [True, False]


def test_two_sites_are_two_kinds() -> None:
    seldom = Seldom(now=lambda: 0.0)
    for names in (("dead", "beef"), ("h1", "h2"), ("site-1", "site-2"), ("ward_7", "ward_8")):
        for name in names:
            assert seldom.filter(record("nvflare.a", f"no answer of {name}"))


def test_memory_is_bounded() -> None:
    seldom = Seldom(now=lambda: 0.0)
    letters = [chr(97 + a) + chr(97 + b) for a in range(26) for b in range(26)]
    assert all(seldom.filter(record("nvflare.a", x)) for x in letters)
    assert len(seldom._kinds) == 256
    assert not seldom.filter(record("nvflare.a", letters[-1]))


def test_nvflare_s_words_on_who_is_away_never_pass() -> None:
    """Lines that NVFlare 2.9.0 wrote at a healthy start; who is away is told once, elsewhere."""
    seldom, cells = Seldom(now=lambda: 0.0), "nvflare.fuel.f3.cellnet.core_cell.CoreCell"
    for line in (
        "[ME=server O=server D=h1.17 CH=x] no connection to h1.17",
        "[ME=server O=server D=h1.17 CH=x] cannot send to 'h1.17': target_unreachable",
    ):
        assert not seldom.filter(record(cells, line, logging.ERROR))
        assert seldom.filter(record("nvflare.other", line, logging.ERROR))
    assert seldom.filter(record(cells, "no callback for request", logging.ERROR))


WRITER = """
import json, logging, logging.config, sys
logging.config.dictConfig(json.loads(sys.argv[1]))
for number in range(int(sys.argv[3])):
    logging.getLogger("fednotes.test").info("%s %05d", sys.argv[2], number)
"""


def configured(most: int = 2_000_000) -> str:
    settings = copy.deepcopy(kit._tables()["both"]["local/log_config.json"])
    settings["handlers"]["file"]["most"] = most
    return json.dumps(settings)


def written(folder: Path, names: str, count: int, most: int = 2_000_000) -> None:
    """Let a process for each name write lines at once, as NVFlare's jobs do: from elsewhere."""
    environment = {**os.environ, KIT_VARIABLE: str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, configured(most), name, str(count)], env=environment
        )
        for name in names
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * len(names)


def lines_of(folder: Path) -> list[str]:
    return [line for log in folder.glob("fednotes.log*") for line in log.read_text().splitlines()]


def test_processes_share_a_kit_s_log(tmp_path: Path) -> None:
    """Every line of each is there, whole and in its order."""
    written(tmp_path, "ab", 400)
    assert [path.name for path in tmp_path.iterdir()] == ["fednotes.log"]
    found = [line.split(": ")[1] for line in lines_of(tmp_path)]
    for name in "ab":
        own = [line for line in found if line.startswith(name)]
        assert own == [f"{name} {number:05d}" for number in range(400)]


def test_a_log_is_moved_away_by_whoever_finds_it_too_long(tmp_path: Path) -> None:
    """No line is torn or written twice, and the size is bounded: 12,000 lines of 60 bytes."""
    written(tmp_path, "abc", 4000, most=20_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["fednotes.log", *(f"fednotes.log.{n}" for n in (1, 2, 3))]
    assert all(path.stat().st_size < 25_000 for path in tmp_path.iterdir())
    found = [line.split(": ") for line in lines_of(tmp_path)]
    assert all(len(parts) == 2 and re.fullmatch(r"[abc] \d{5}", parts[1]) for parts in found)
    assert len({parts[1] for parts in found}) == len(found) > 900


def test_the_kit_s_log_uses_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KIT_VARIABLE, str(tmp_path))
    settings = json.loads(configured())
    settings["loggers"] = {"nvflare_test": {"level": "WARNING", "handlers": ["file"]}}
    logging.config.dictConfig(settings)
    logger = logging.getLogger("nvflare_test")
    try:
        for number in range(1000):
            logger.warning("%s", late(number))
        assert (tmp_path / "fednotes.log").read_text().count("Late stream error") == 1
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
