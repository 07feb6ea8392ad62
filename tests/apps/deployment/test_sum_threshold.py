"""How many sites a deployed secure sum needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fault_toy import JOB

from fednotes.apps.deployment.site_agreement import compute_sum_threshold
from fednotes.engines.secure import SecureSeal, SecureSum


@pytest.mark.parametrize("sites", range(3, 11))
def test_no_deployed_sum_has_fewer_sites_than_the_threshold(sites: int) -> None:
    """At both ends of a deployed job, at every `min_sites`: lists are confirmed
    wherever a lying server could open a sum of fewer
    (`test_a_lying_server_cannot_open_a_sum_of_one_site`)."""
    names = tuple(f"s{i}" for i in range(sites))
    for least in range(sites + 1):
        job: Any = SimpleNamespace(
            federation=SimpleNamespace(secure_sum=True, min_sites=least)
        )
        threshold = compute_sum_threshold(
            job, cast("Any", SimpleNamespace(sites=names, min_sites=1))
        )
        terms: dict[str, Any] = {"job": JOB, "threshold": threshold}
        ends = SecureSum(names, **terms), SecureSeal(names[0], names, **terms)
        assert threshold == ends[0].least == max(least or sites, sites // 2 + 1)
        assert [end._parties.threshold for end in ends] == [threshold] * 2
        assert [end._parties.confirmed for end in ends] == [threshold < sites] * 2
