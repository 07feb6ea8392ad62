"""A kit's log: repeated lines are limited, and files rotate."""

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

from fednotes.apps.deployment.nvflare import kit
from fednotes.apps.deployment.nvflare.processes import KIT_VARIABLE, RateLimit

AGAIN = "Failed to get_task from server. Will try it again."
CELLS = "nvflare.fuel.f3.cellnet.core_cell.CoreCell"


def passes(
    seldom: RateLimit, name: str, text: str, level: int = logging.WARNING
) -> bool:
    return seldom.filter(logging.LogRecord(name, level, "", 0, text, None, None))


def late(number: int) -> str:
    job = f"11fc898f-1fc4-4b3c-9533-{number:012x}"
    return f"Late stream error: stream_id={number} failed_destination=server.{job}: unreachable"


def test_a_repeated_line_is_logged_once_a_minute_with_a_count() -> None:
    clock = [0.0]
    seldom = RateLimit(now=lambda: clock[0])
    passed = []
    for tick in range(2500):  # 125 s of a retry each 50 ms
        clock[0] = tick * 0.05
        for name, text in (("nvflare.a", AGAIN), ("nvflare.b", late(10**15 + tick))):
            line = logging.LogRecord(name, logging.WARNING, "", 0, text, None, None)
            if seldom.filter(line):
                passed.append((round(clock[0]), name, line.getMessage()))
    assert [(at, name) for at, name, _ in passed] == [
        (at, name) for at in (0, 60, 120) for name in ("nvflare.a", "nvflare.b")
    ]
    assert passed[0][2] == AGAIN
    assert passed[2][2] == f"{AGAIN} (1199 more like this left out)"


@pytest.mark.parametrize(
    ("lines", "passed"),
    [
        # other kinds, levels and loggers
        ([("nvflare.a", AGAIN)] * 2, [True, False]),
        ([("nvflare.a", AGAIN), ("nvflare.a", AGAIN, logging.ERROR)], [True, True]),
        ([("nvflare.a", AGAIN), ("nvflare.b", AGAIN)], [True, True]),
        ([("nvflare.a", AGAIN), ("nvflare.a", "client h1 was refused")], [True, True]),
        # our own lines, unless they are equal
        (
            [("fednotes.x", f"refused give ({n})") for n in (7, 8, 8)],
            [True, True, False],
        ),
        ([("fednotes_not.ours", f"refused give ({n})") for n in (7, 8)], [True, False]),
        # two sites are two kinds
        *(
            ([("nvflare.a", f"no answer of {site}") for site in sites], [True, True])
            for sites in (
                ("dead", "beef"),
                ("h1", "h2"),
                ("site-1", "site-2"),
                ("w_7", "w_8"),
            )
        ),
        # NVFlare 2.9.0's lines at a healthy start; who is away is told once, elsewhere
        *(
            ([(who, f"[ME=server D=h1.17] {text}", logging.ERROR)], [who != CELLS])
            for who in (CELLS, "nvflare.other")
            for text in (
                "no connection to h1.17",
                "cannot send to 'h1.17': target_unreachable",
            )
        ),
        ([(CELLS, "no callback for request", logging.ERROR)], [True]),
        # a run that has no progress yet
        *(
            ([(who, f"no app command func for topic {topic}", logging.ERROR)], [kept])
            for who, topic, kept in (
                ("nvflare.server", "fednotes.progress", False),
                ("nvflare.server", "other", True),
            )
        ),
    ],
)
def test_the_log_passes_a_limited_number_of_lines_a_minute(
    lines: list[tuple[str, str]], passed: list[bool]
) -> None:
    seldom = RateLimit(now=lambda: 0.0)
    assert [passes(seldom, *line) for line in lines] == passed


def test_memory_for_repeated_lines_is_bounded() -> None:
    seldom = RateLimit(now=lambda: 0.0)
    letters = [chr(97 + a) + chr(97 + b) for a in range(26) for b in range(26)]
    assert all(passes(seldom, "nvflare.a", x) for x in letters)
    assert len(seldom._kinds) == 256
    assert not passes(seldom, "nvflare.a", letters[-1])


WRITER = """
import json, logging, logging.config, sys
logging.config.dictConfig(json.loads(sys.argv[1]))
for number in range(int(sys.argv[3])):
    logging.getLogger("fednotes.test").info("%s %05d", sys.argv[2], number)
"""


def configured(limit: int = 2_000_000) -> str:
    settings = copy.deepcopy(kit._read_tables()["both"]["local/log_config.json"])
    settings["handlers"]["file"]["most"] = limit
    return json.dumps(settings)


def write_lines(
    folder: Path, names: str, count: int, limit: int = 2_000_000
) -> list[str]:
    """Return the lines that one process for each name writes at the same time."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, KIT_VARIABLE: str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-c", WRITER, configured(limit)]
    writers = [
        subprocess.Popen([*command, name, str(count)], env=environment)
        for name in names
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * len(names)
    logs = [log.read_text().splitlines() for log in folder.glob("fednotes.log*")]
    return [line.split(": ", 1)[1] for log in logs for line in log]


def test_processes_share_the_log_of_a_kit(tmp_path: Path) -> None:
    """Every line of each is there, whole and in its order."""
    lines = write_lines(tmp_path, "ab", 400)
    assert [path.name for path in tmp_path.iterdir()] == ["fednotes.log"]
    for name in "ab":
        process_lines = [line for line in lines if line.startswith(name)]
        assert process_lines == [f"{name} {number:05d}" for number in range(400)]


def test_processes_rotate_a_shared_log_without_losing_lines(tmp_path: Path) -> None:
    """No line is torn or written twice, and the size is bounded: 12,000 lines of 60
    bytes."""
    lines = write_lines(tmp_path, "abc", 4000, limit=20_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["fednotes.log", *(f"fednotes.log.{n}" for n in (1, 2, 3))]
    assert all(path.stat().st_size < 25_000 for path in tmp_path.iterdir())
    assert all(re.fullmatch(r"[abc] \d{5}", line) for line in lines)
    assert len(set(lines)) == len(lines) > 900


def test_the_log_of_a_kit_uses_the_rate_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
