"""Which sites of a run are not connected, since when, and whether they ever were."""

from __future__ import annotations

import json
from pathlib import Path

from fednotes.apps.deployment.absence import (
    SITES_FILE,
    AbsentSites,
    describe_strangers,
    describe_unknown_sites,
    read_known_sites,
    record_known_sites,
)


def test_a_site_that_ever_connected_is_known(tmp_path: Path) -> None:
    assert read_known_sites(tmp_path) == frozenset()
    record_known_sites(tmp_path, {"posts"}, 10.0)
    record_known_sites(tmp_path, {"posts", "reports"}, 20.0)
    record_known_sites(tmp_path, set(), 30.0)
    assert read_known_sites(tmp_path) == {"posts", "reports"}
    times = json.loads((tmp_path / SITES_FILE).read_text())
    assert times == {"posts": 10.0, "reports": 20.0}


def test_an_unknown_site_is_reported_with_a_similar_connected_one() -> None:
    sites = ("discharge", "reports", "post")
    known = {"discharge", "reports", "posts"}
    assert describe_unknown_sites(sites, known, known) == (
        "no site 'post' has ever connected (connected, but not in this job: posts; did "
        "you mean 'posts'?)"
    )
    assert describe_unknown_sites(sites, known, ()) == (
        "no site 'post' has ever connected"
    )
    assert describe_unknown_sites(("a", "b"), (), ()) == (
        "no site 'a' or 'b' has ever connected"
    )
    assert describe_unknown_sites(("reports", "posts"), known, known) == ""


def test_connected_sites_of_the_job_are_not_reported_as_strangers() -> None:
    assert describe_strangers(["a"], ["a", "b"], ["b"]) == ""
    assert describe_strangers(["a"], ["a"], ["zebra"]) == (
        "connected, but not in this job: zebra"
    )


def test_absent_sites_are_reported_when_they_change_and_every_five_minutes() -> None:
    absent = AbsentSites()
    sites = ("a", "b")
    assert not absent.update(sites, {"a", "b"}, 0.0)
    assert not absent.update(sites, {"a"}, 10.0)
    assert absent.update(sites, {"a"}, 25.0)
    assert not absent.update(sites, {"a"}, 324.0)
    assert absent.update(sites, {"a"}, 325.0)
    assert absent.since == {"b": 10.0}
    assert not absent.update(sites, set(), 330.0)
    assert absent.update(sites, set(), 345.0)
    assert absent.since == {"a": 330.0, "b": 10.0}
    assert not absent.update(sites, {"a", "b"}, 350.0)
    assert absent.since == {}


def test_a_site_that_reconnects_after_a_restart_is_not_reported_as_absent() -> None:
    absent = AbsentSites()
    assert not absent.update(("a", "b"), set(), 0.0)
    assert not absent.update(("a", "b"), {"a"}, 5.0)
    assert not absent.update(("a", "b"), {"a", "b"}, 10.0)
    assert not absent.update(("a", "b"), set(), 20.0)
    assert absent.since == {"a": 20.0, "b": 20.0}
