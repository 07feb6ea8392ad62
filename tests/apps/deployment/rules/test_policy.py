"""A site's rules: each breach is refused, and its valid twin passes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest

from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    build_policy,
    check_audit,
    check_count_step,
    check_difference,
    check_participation,
    check_request,
    check_storage,
    check_update,
)
from fednotes.core.errors import ConfigError
from fednotes.core.messages import Request

Wish = Callable[..., None]  # of a policy; a key that is given again is another wish
NIGHT = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
LSTM = ("lstm.weight_ih", "cnn.weight")
WORDS = (*LSTM, "encoder.embeddings.word_embeddings.weight")
COVERED = {"tokens": 900, "steps": 12, "patients": 8}
JOB = partial(
    check_participation, method="fedner", sites=3, threshold=3, rounds=20, secure=True
)
ASK = {n: Request("job", 1, 1, "train", round=n) for n in (4, 99, 100)}
EACH = Request("job", 1, 1, "train", round=4, each=True)
REQUEST = partial(
    check_request, request=ASK[4], sites=3, threshold=3, secure=True, now=NIGHT
)
REPLY = partial(
    check_update, task="train", round=4, tensors=LSTM, covered=COVERED, size=5_000, secure=True,
    scores=False, num_sent=None,
)  # fmt: skip

COUNTS = partial(check_count_step, method="homely", rounds_counts=False)
APART = partial(check_difference, view="sentences", earlier="job 1")


def at(clock: str, zone: timezone = UTC) -> datetime:
    return datetime.fromisoformat(f"2026-07-01T{clock}:00").replace(tzinfo=zone)


def covered(**change: int | None) -> dict[str, Any]:
    return {"covered": {k: v for k, v in (COVERED | change).items() if v is not None}}


# The site's table; a wish that breaks it; what makes it a permitted one; words of the
# refusal.
SHARED = {"share_scores": True}
CASES: list[tuple[str, dict[str, Any], Wish, dict[str, Any], str]] = [
    ("min_sites", {}, partial(JOB, sites=2, threshold=2), {"sites": 3, "threshold": 3},
     "over 2 sites; this site allows 3 sites or more"),
    ("min_sites", {"min_sites": 5}, partial(JOB, sites=6, threshold=4), {"threshold": 5},
     "may be opened with 4 of 6 sites; this site allows 5"),
    ("min_sites", {}, partial(REQUEST, sites=1), {"sites": 4}, "over 1 sites; this site allows 3"),
    ("min_sites", {}, partial(REQUEST, sites=8, threshold=2), {"threshold": 7},
     "opened with 2 of 8 sites"),
    ("methods", {"methods": ["fedner", "distill"]}, partial(JOB, method="finetune"),
     {"method": "distill"}, "method is 'finetune'; this site allows fedner, distill"),
    ("max_rounds", {"max_rounds": 100}, partial(JOB, rounds=1500), {"rounds": 100},
     "asks for 1,500 rounds; this site allows at most 100"),
    ("max_rounds", {"max_rounds": 100}, partial(JOB, rounds=101), {"rounds": 100},
     "asks for 101 rounds"),
    ("max_rounds", {"max_rounds": 100}, partial(JOB, rounds=None), {"rounds": 1},
     "does not say how many rounds"),
    ("max_rounds", {"max_rounds": 100}, partial(REQUEST, request=ASK[100]), {"request": ASK[99]},
     "round 100 was asked for; this site allows rounds 0 to 99"),
    ("max_rounds", {"max_rounds": 100}, partial(REPLY, num_sent=101), {"num_sent": 100},
     "would be number 101 of this job; this site allows 100 rounds; a new approval starts the count again"),
    ("secure_sum", {"secure_sum": "required"}, partial(JOB, secure=False), {"secure": True},
     "the job is without a secure sum; this site allows only masked replies"),
    ("secure_sum", {"secure_sum": "required"}, partial(REQUEST, secure=False),
     {"secure": True}, "round 4 is without a secure sum"),
    ("secure_sum", {"secure_sum": "required"}, partial(REPLY, secure=False), {"secure": True},
     "the reply to task 'train' of round 4 is without a secure sum"),
    ("secure_sum", {}, partial(REPLY, secure=False, **covered(steps=1)), covered(steps=2),
     "gradient of one step without a secure sum"),
    ("secure_sum", {}, partial(REPLY, secure=False, **covered(steps=None)), {"tensors": ()},
     "gradient of one step"),
    ("secure_sum", {"freeze_embeddings": False}, partial(REPLY, secure=False, tensors=WORDS),
     {"secure": True}, "show a table of words without a secure sum"),
    ("freeze_embeddings", {}, partial(REPLY, tensors=WORDS), {"tensors": LSTM},
     "table of words, 'encoder.embeddings.word_embeddings.weight'; this site allows no such table"),
    ("freeze_embeddings", {"secure_sum": "off"},
     partial(REPLY, tensors=("words.weight", "words.hashed")),
     {"tensors": ("characters.embedding",)}, "'words.hashed' and 1 more"),
    ("denied_layers", {"denied_layers": ["lstm"]}, REPLY, {"tensors": ("lstmx",)},
     "contains 'lstm.weight_ih'; this site allows all except lstm"),
    ("denied_layers", {"allowed_layers": ["cnn.*"], "denied_layers": ["*.weight"]},
     partial(REPLY, tensors=("cnn.weight",)), {"tensors": ("cnn.bias",)}, "all except *.weight"),
    ("allowed_layers", {"allowed_layers": ["lstm.*", "crf"]}, REPLY,
     {"tensors": ("lstm.bias", "crf.start")}, "contains 'cnn.weight'; this site allows lstm.*, crf"),
    ("allowed_layers", {"allowed_layers": []}, REPLY, {"tensors": ()}, "no tensor at all"),
    ("min_tokens", {"min_tokens": 901}, REPLY, covered(tokens=901),
     "covers 900 tokens; this site allows 901 or more"),
    ("min_tokens", {"min_tokens": 1}, partial(REPLY, **covered(tokens=None)), covered(tokens=1),
     "unknown number of tokens"),
    ("min_steps", {"min_steps": 13}, REPLY, covered(steps=13), "covers 12 steps"),
    ("min_patients", {"min_patients": 10}, REPLY, {"tensors": ()}, "covers 8 patients"),
    ("min_batch", {"min_batch": 9}, partial(REPLY, **covered(batch=8)), covered(batch=9),
     "covers 8 examples of a mini-batch; this site allows 9 or more"),
    ("min_difference", {"min_difference": 3}, partial(APART, number=1), {"number": 0},
     "(sentences) differ by 1 from those of job 1, so the sums of both jobs would "
     "reveal these few; this site allows a job on the same examples as that one, or "
     "one that differs by 3 or more"),
    ("min_difference", {"min_difference": 3}, partial(APART, number=2), {"number": 3},
     "differ by 2 from"),
    ("count_step", {"count_step": 10}, COUNTS, {"rounds_counts": True},
     "sites of the method 'homely' send exact weights and counts, because their class has no "
     "`rounds_counts = True`; this site allows multiples of 10 (another method, or count_step = 1"),
    ("max_bytes", {"max_bytes": 4_999}, REPLY, {"size": 4_999},
     "has 5,000 bytes; this site allows at most 4,999"),
    ("max_stored_bytes", {"max_stored_bytes": 4_999}, partial(check_storage, size=5_000),
     {"size": 4_999}, "would store 5,000 bytes for this run; this site allows at most 4,999"),
    ("max_stored_bytes", {}, partial(check_storage, size=10**11), {"size": 5 * 10**10},
     "allows at most 50,000,000,000"),
    ("share_scores", {}, partial(JOB, secure=False), {"secure": True},
     "the counts of this site's own evaluations; this site allows them in a secure sum only "
     "([federation] secure_sum = true, three sites or more)"),
    ("share_scores", {}, partial(REQUEST, secure=False), {"secure": True}, "'train' of round 4"),
    ("share_scores", {}, partial(REPLY, scores=True, tensors=()), {"scores": False}, "own eval"),
    ("individual_updates", SHARED, partial(JOB, secure=False, inspects_each=True), {"inspects_each": False},
     "the job lets the server see each site's update; this site allows its update only as part"),
    ("individual_updates", SHARED, partial(REQUEST, request=EACH, secure=False),
     {"request": ASK[4]}, "task 'train' of round 4 lets the server see"),
    ("hours", {"hours": "19:00-06:00", "timezone": "UTC"}, partial(REQUEST, now=at("06:00")),
     {"now": at("05:59")}, "asked for at 06:00; this site allows 19:00-06:00 (UTC time)"),
    ("hours", {"hours": "19:00-06:00", "timezone": "UTC"}, partial(REQUEST, now=at("18:59")),
     {"now": at("19:00")}, "at 18:59"),
    ("hours", {"hours": "08:00-16:30", "timezone": "UTC"}, partial(REQUEST, now=at("16:30")),
     {"now": at("08:00")}, "at 16:30"),
    ("hours", {"hours": "08:00-24:00", "timezone": "Europe/Berlin"},
     # summer: two hours
     partial(REQUEST, now=at("05:59")), {"now": at("06:00")}, "at 07:59"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "table", "wish", "mended", "words"), CASES)
def test_a_request_that_breaks_a_rule_is_refused(
    rule: str, table: dict[str, Any], wish: Wish, mended: dict[str, Any], words: str
) -> None:
    """The server is told the rule alone: no number, and nothing of where the file is."""
    policy = build_policy(table, "[policy] of /srv/ward7/site.toml")
    with pytest.raises(PolicyRefusal) as refusal:
        wish(policy)
    message, public = str(refusal.value), refusal.value.public
    assert refusal.value.rule == rule
    assert words in message
    assert message.endswith(f"Only the site can change this: {rule} in {policy.source}")
    wish(policy, **mended)
    assert public.startswith(f"refused by {rule} of this site's policy; ")
    assert not any(c.isdigit() for c in public)
    assert "/" not in public
    assert refusal.value.later == (rule == "hours")
    assert ("secure_sum = true" in public) == (rule in ("share_scores", "secure_sum"))


def test_every_rule_has_a_case() -> None:
    others = {"approvals", "approvers"}  # test_approvers.py
    others |= {"max_epsilon", "max_delta", "epsilon_unit"}  # test_budget.py
    others |= {"audit", "audit_bound"}  # tests/apps/deployment/test_approval_screen.py
    others |= {"draws"}  # tests/apps/deployment/test_deployment_draws.py
    keys = (
        set(Policy.__dataclass_fields__)
        - {"source", "timezone", "steady_replies"}
        - others
    )
    assert {case[0] for case in CASES} == keys


@pytest.mark.parametrize(
    ("table", "wish"),
    [
        ({"secure_sum": "off"}, partial(REPLY, secure=False, **covered(steps=1))),
        (SHARED, partial(REPLY, scores=True)),
        (SHARED, partial(JOB, secure=False)),
        (
            SHARED | {"individual_updates": True},
            partial(JOB, secure=False, inspects_each=True),
        ),
        (
            SHARED | {"individual_updates": True},
            partial(REQUEST, request=EACH, secure=False),
        ),
        ({"freeze_embeddings": False}, partial(REPLY, tensors=WORDS)),
        ({}, partial(JOB, rounds=None, method="anything")),
        ({"count_step": 1}, COUNTS),
        ({"max_stored_bytes": 0}, partial(check_storage, size=10**15)),
        ({"hours": "19:00-06:00"}, REPLY),  # served at night, ready in the morning
    ],
)
def test_a_permissive_policy_allows_the_request(
    table: dict[str, Any], wish: Wish
) -> None:
    wish(build_policy(table, "h"))


def test_an_audited_attack_may_succeed_up_to_the_bound() -> None:
    policy = Policy(audit="required", audit_bound=0.25)
    check_audit(policy, 0.25)
    check_audit(policy, -0.1)  # worse than chance
    with pytest.raises(
        PolicyRefusal, match=r"may be 0\.251 above chance.* 0\.25 at most"
    ):
        check_audit(policy, 0.251)
    with pytest.raises(PolicyRefusal, match="there is no audit of this job"):
        check_audit(policy, None)
    check_audit(replace(policy, audit="off"), None)


def test_the_first_broken_rule_is_reported() -> None:
    policy = Policy(methods=("fedner",), max_rounds=10, secure_sum="required")
    with pytest.raises(PolicyRefusal, match="method is 'x'"):
        JOB(policy, method="x", sites=2, rounds=11, secure=False)


def test_permitted_hours_equal_a_list_of_minutes() -> None:
    """Brute force: the open minutes are listed one by one from the start on."""
    for start, end in (
        (0, 1),
        (0, 1440),
        (1140, 360),
        (360, 1140),
        (1439, 1438),
        (700, 701),
    ):
        text = f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
        policy = Policy(hours=text, timezone="UTC")
        open_minutes, minute = set(), start
        while minute != end:
            open_minutes.add(minute % 1440)
            minute = minute + 1 if end > start or minute < 1439 else 0
        for minute in range(1440):
            now = datetime(2026, 1, 5, minute // 60, minute % 60, 59, tzinfo=UTC)
            try:
                REQUEST(policy, now=now)
                refused = False
            except PolicyRefusal:
                refused = True
            assert refused == (minute not in open_minutes), (text, minute)


def test_permitted_hours_follow_the_time_zone_of_the_site() -> None:
    policy = Policy(hours="19:00-06:00", timezone="Europe/Berlin")
    REQUEST(policy, now=datetime(2026, 1, 5, 18, 0, tzinfo=UTC))  # 19:00
    far = timezone(timedelta(hours=9))
    REQUEST(policy, now=datetime(2026, 1, 6, 3, 0, tzinfo=far))  # the same
    with pytest.raises(PolicyRefusal, match=r"at 18:59.*Europe/Berlin time"):
        REQUEST(policy, now=datetime(2026, 1, 5, 17, 59, tzinfo=UTC))
    local_noon = datetime(2026, 1, 5, 12, 0).astimezone()  # noon on this machine
    REQUEST(Policy(hours="12:00-12:01"), now=local_noon)
    with pytest.raises(PolicyRefusal, match="local time"):
        REQUEST(Policy(hours="12:01-12:00"), now=local_noon)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min_site = 3", "unknown key 'min_site': did you mean 'min_sites'"),
        ('source = "x"', "unknown key 'source'"),
        ('min_sites = "3"', "expected a whole number"),
        ("min_sites = 0", "at least 1"),
        ("max_rounds = -1", "at least 0"),
        ('secure_sum = "maybe"', "expected one of 'required', 'revealing', 'off'"),
        ('hours = "7-19"', "19:00-06:00"),
        ('hours = "19:60-06:00"', "19:00-06:00"),
        ('hours = "24:00-06:00"', "19:00-06:00"),
        ('hours = "07:00-24:01"', "19:00-06:00"),
        ('hours = "07:00-07:00"', "leave hours out"),
        ('timezone = "Mars/Olympus"', "Europe/Berlin"),
        ('timezone = "../etc"', "Europe/Berlin"),
        ('allowed_layers = [""]', "at least 1 character"),
        ("share_scores = 1", "true or false"),
    ],
)
def test_a_wrong_policy_is_an_error_that_names_its_file(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_policy(tomllib.loads(text), "[policy] of h1.toml")
    assert words in str(refusal.value)
    assert "h1.toml" in str(refusal.value)


def test_control_characters_in_foreign_names_are_escaped_and_names_shortened() -> None:
    with pytest.raises(PolicyRefusal) as refusal:
        JOB(Policy(methods=("fedner",)), method="x\x1b[2J" + "y" * 500)
    assert "\x1b" not in str(refusal.value)
    assert len(str(refusal.value)) < 400
