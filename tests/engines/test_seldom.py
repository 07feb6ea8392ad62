"""Repeated log lines: what passes is counted against a run of NVFlare's own warnings."""

from __future__ import annotations

import json
import logging
import logging.config
from pathlib import Path

from fednotes.engines.provision import _logging
from fednotes.engines.seldom import Seldom

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


def test_the_kit_s_log_uses_it(tmp_path: Path) -> None:
    settings = json.loads(json.dumps(_logging()))
    log = tmp_path / "fednotes.log"
    settings["handlers"]["file"]["filename"] = str(log)
    settings["loggers"] = {"nvflare_test": {"level": "WARNING", "handlers": ["file"]}}
    logging.config.dictConfig(settings)
    logger = logging.getLogger("nvflare_test")
    try:
        for number in range(1000):
            logger.warning("%s", late(number))
        assert log.read_text().count("Late stream error") == 1
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
