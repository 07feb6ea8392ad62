"""A site's rules: each wish that breaks one is refused in its own words, its twin passes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.rules.policy import (
    Facts,
    JobFacts,
    Policy,
    PolicyRefusal,
    RequestFacts,
    UpdateFacts,
    broken_rules,
    check_job,
    check_request,
    check_update,
    policy_from,
    read_policy,
    reveals,
    word_tables,
)

NIGHT = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
LSTM = {"lstm.weight_ih": (40, 30), "cnn.weight": (3, 8)}
WORDS = {**LSTM, "encoder.embeddings.word_embeddings.weight": (30522, 768)}
JOB = JobFacts("fedner", 3, rounds=20, secure=True, threshold=3, tensors=LSTM, bytes=5_000)
ASKED = RequestFacts("train", 4, 3, NIGHT, secure=True, threshold=3, tensors=LSTM)
REPLY = UpdateFacts(
    "train", 4, LSTM, secure=True, tokens=900, steps=12, patients=8, bytes=5_000, scores=False
)


def at(clock: str, zone: timezone = UTC) -> datetime:
    return datetime.fromisoformat(f"2026-07-01T{clock}:00").replace(tzinfo=zone)


def check(policy: Policy, facts: Facts) -> None:
    if isinstance(facts, JobFacts):
        check_job(policy, facts)
    elif isinstance(facts, RequestFacts):
        check_request(policy, facts)
    else:
        check_update(policy, facts)


# The site's table; a wish that breaks it; what makes it a permitted one; words of the refusal.
CASES: list[tuple[str, dict[str, Any], Facts, dict[str, Any], str]] = [
    ("min_sites", {}, replace(JOB, sites=2, threshold=2), {"sites": 3, "threshold": 3},
     "over 2 sites; this site allows 3 sites and more"),
    ("min_sites", {"min_sites": 5}, replace(JOB, sites=6, threshold=4), {"threshold": 5},
     "may be opened with 4 of 6 sites; this site allows 5"),
    ("min_sites", {}, replace(ASKED, sites=1, threshold=None), {"sites": 4},
     "over 1 sites; this site allows 3"),
    ("min_sites", {}, replace(ASKED, sites=8, threshold=2), {"threshold": 7},
     "opened with 2 of 8 sites"),
    ("methods", {"methods": ["fedner", "distill"]}, replace(JOB, method="finetune"),
     {"method": "distill"}, "method is 'finetune'; this site allows fedner, distill"),
    ("max_rounds", {"max_rounds": 100}, replace(JOB, rounds=1500), {"rounds": 100},
     "asks for 1,500 rounds; this site allows at most 100"),
    ("max_rounds", {"max_rounds": 100}, replace(JOB, rounds=None), {"rounds": 1},
     "does not say how many rounds"),
    ("max_rounds", {"max_rounds": 100}, replace(ASKED, round=100), {"round": 99},
     "round 100 was asked for; this site allows rounds 0 to 99"),
    ("max_rounds", {"max_rounds": 100}, replace(REPLY, rounds=101), {"rounds": 100},
     "would be number 101 of this job; this site allows 100 rounds; a new approval counts anew"),
    ("secure_sum", {"secure_sum": "required"}, replace(JOB, secure=False), {"secure": True},
     "the job is without a secure sum; this site allows masked replies only"),
    ("secure_sum", {"secure_sum": "required"}, replace(ASKED, secure=False, tensors={}),
     {"secure": True}, "round 4 is without a secure sum"),
    ("secure_sum", {"secure_sum": "required"}, replace(REPLY, secure=False), {"secure": True},
     "the reply to task 'train' of round 4 is without a secure sum"),
    ("secure_sum", {}, replace(REPLY, secure=False, steps=1), {"steps": 2},
     "gradient of one step without a secure sum"),
    ("secure_sum", {}, replace(REPLY, secure=False, steps=None), {"tensors": {}},
     "gradient of one step"),
    ("secure_sum", {}, replace(JOB, secure=False, steps=1), {"steps": None},
     "gradient of one step"),
    ("secure_sum", {"freeze_embeddings": False}, replace(ASKED, secure=False, tensors=WORDS),
     {"secure": True}, "show a table of words without a secure sum"),
    ("freeze_embeddings", {}, replace(JOB, tensors=WORDS), {"tensors": LSTM},
     "table of words, 'encoder.embeddings.word_embeddings.weight'; this site allows none"),
    ("freeze_embeddings", {"secure_sum": "off"},
     replace(REPLY, tensors={"words.weight": (9, 2), "words.hashed": (4, 2)}),
     {"tensors": {"characters.embedding": (99, 30)}}, "'words.hashed' and 1 more"),
    ("denied_layers", {"denied_layers": ["lstm"]}, JOB, {"tensors": {"lstmx": (1,)}},
     "holds 'lstm.weight_ih'; this site allows all but lstm"),
    ("denied_layers", {"allowed_layers": ["cnn.*"], "denied_layers": ["*.weight"]},
     replace(REPLY, tensors={"cnn.weight": (3,)}), {"tensors": {"cnn.bias": (3,)}},
     "all but *.weight"),
    ("allowed_layers", {"allowed_layers": ["lstm.*", "crf"]}, ASKED,
     {"tensors": {"lstm.bias": (4,), "crf.start": (4,)}},
     "holds 'cnn.weight'; this site allows lstm.*, crf"),
    ("allowed_layers", {"allowed_layers": []}, REPLY, {"tensors": {}}, "no tensor at all"),
    ("min_tokens", {"min_tokens": 901}, REPLY, {"tokens": 901},
     "has 900 tokens behind it; this site allows 901 and more"),
    ("min_tokens", {"min_tokens": 1}, replace(REPLY, tokens=None), {"tokens": 1},
     "unknown number of tokens"),
    ("min_steps", {"min_steps": 13}, REPLY, {"steps": 13}, "has 12 steps behind it"),
    ("min_patients", {"min_patients": 10}, REPLY, {"tensors": {}}, "has 8 patients behind it"),
    ("min_batch", {"min_batch": 9}, replace(REPLY, batch=8), {"batch": 9},
     "has 8 examples of a mini-batch behind it; this site allows 9 and more"),
    ("max_bytes", {"max_bytes": 4_999}, REPLY, {"bytes": 4_999},
     "has 5,000 bytes; this site allows at most 4,999"),
    ("max_bytes", {"max_bytes": 4_999}, replace(REPLY, bytes=None), {"bytes": 0},
     "unknown number of bytes"),
    ("max_bytes", {"max_bytes": 4_999}, JOB, {"bytes": None}, "the job's updates have 5,000"),
    ("share_scores", {}, replace(JOB, scores=True), {"scores": False},
     "the counts of this site's own evaluations; this site allows them in a secure sum only "
     "([federation] secure_sum = true, three sites or more)"),
    ("share_scores", {}, replace(ASKED, scores=True), {"scores": False}, "'train' of round 4"),
    ("share_scores", {}, replace(REPLY, scores=True, tensors={}), {"scores": False}, "own eval"),
    ("hours", {"hours": "19:00-06:00", "timezone": "UTC"}, replace(ASKED, now=at("06:00")),
     {"now": at("05:59")}, "asked for at 06:00; this site allows 19:00-06:00 (UTC time)"),
    ("hours", {"hours": "19:00-06:00", "timezone": "UTC"}, replace(ASKED, now=at("18:59")),
     {"now": at("19:00")}, "at 18:59"),
    ("hours", {"hours": "08:00-16:30", "timezone": "UTC"}, replace(ASKED, now=at("16:30")),
     {"now": at("08:00")}, "at 16:30"),
    ("hours", {"hours": "08:00-24:00", "timezone": "Europe/Berlin"},
     replace(ASKED, now=at("05:59")), {"now": at("06:00")}, "at 07:59"),  # summer: two hours
]  # fmt: skip


@pytest.mark.parametrize(("rule", "table", "wish", "mended", "words"), CASES)
def test_a_wish_that_breaks_a_rule_is_refused(
    rule: str, table: dict[str, Any], wish: Facts, mended: dict[str, Any], words: str
) -> None:
    policy = policy_from(table, "[policy] of h2.toml")
    with pytest.raises(PolicyRefusal) as found:
        check(policy, wish)
    message = str(found.value)
    assert found.value.rule == rule
    assert words in message
    assert message.endswith(f"Only the site can change this: {rule} in [policy] of h2.toml")
    assert broken_rules(policy, wish) == (message,)
    check(policy, replace(wish, **mended))
    assert broken_rules(policy, replace(wish, **mended)) == ()


@pytest.mark.parametrize(("rule", "table", "wish", "mended", "words"), CASES)
def test_the_server_is_told_the_rule_alone(
    rule: str, table: dict[str, Any], wish: Facts, mended: dict[str, Any], words: str
) -> None:
    """No number, and nothing of where the file is."""
    policy = policy_from(table, "[policy] of /srv/ward7/site.toml")
    with pytest.raises(PolicyRefusal, match="ward7") as found:
        check(policy, wish)
    public = found.value.public
    assert public.startswith(f"refused by {rule} of this site's policy; ")
    assert not any(c.isdigit() for c in public)
    assert "/" not in public
    assert found.value.later == (rule == "hours")
    assert ("secure_sum = true" in public) == (rule in ("share_scores", "secure_sum"))


def test_every_rule_has_a_case() -> None:
    of_people = {"approvals", "approvers"}  # tests/privacy/test_approvers.py
    keys = set(Policy.__dataclass_fields__) - {"source", "timezone", "steady_replies"} - of_people
    assert {case[0] for case in CASES} == keys


@pytest.mark.parametrize(
    ("table", "wish"),
    [
        ({"secure_sum": "off"}, replace(REPLY, secure=False, steps=1)),
        ({"share_scores": True}, replace(REPLY, scores=True)),
        ({"freeze_embeddings": False}, replace(JOB, tensors=WORDS)),
        ({}, replace(JOB, rounds=None, bytes=None, method="anything")),
        ({"hours": "19:00-06:00"}, replace(REPLY)),  # served at night, ready in the morning
    ],
)
def test_a_site_may_allow_it(table: dict[str, Any], wish: Facts) -> None:
    check(policy_from(table, "h"), wish)


def test_all_broken_rules_are_listed() -> None:
    policy = Policy(methods=("fedner",), max_rounds=10, secure_sum="required")
    wish = JobFacts("x", 2, rounds=11, tensors=WORDS, scores=True)
    keys = [line.split("change this: ")[1].split(" in ")[0] for line in broken_rules(policy, wish)]
    expected = "methods min_sites max_rounds secure_sum share_scores freeze_embeddings"
    assert keys == expected.split()
    with pytest.raises(RefusedError, match="method is 'x'"):
        check_job(policy, wish)


def test_the_hours_of_every_minute() -> None:
    """Brute force: the open minutes are listed one by one from the start on."""
    for start, end in ((0, 1), (0, 1440), (1140, 360), (360, 1140), (1439, 1438), (700, 701)):
        text = f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
        policy = Policy(hours=text, timezone="UTC")
        open_minutes, minute = set(), start
        while minute != end:
            open_minutes.add(minute % 1440)
            minute = minute + 1 if end > start or minute < 1439 else 0
        for minute in range(1440):
            now = datetime(2026, 1, 5, minute // 60, minute % 60, 59, tzinfo=UTC)
            refused = bool(broken_rules(policy, replace(ASKED, now=now)))
            assert refused == (minute not in open_minutes), (text, minute)


def test_hours_are_of_the_sites_clock() -> None:
    policy = Policy(hours="19:00-06:00", timezone="Europe/Berlin")
    check_request(policy, replace(ASKED, now=datetime(2026, 1, 5, 18, 0, tzinfo=UTC)))  # 19:00
    far = timezone(timedelta(hours=9))
    check_request(policy, replace(ASKED, now=datetime(2026, 1, 6, 3, 0, tzinfo=far)))  # the same
    with pytest.raises(PolicyRefusal, match=r"at 18:59.*Europe/Berlin time"):
        check_request(policy, replace(ASKED, now=datetime(2026, 1, 5, 17, 59, tzinfo=UTC)))
    here = datetime(2026, 1, 5, 12, 0).astimezone()  # noon on this machine
    check_request(Policy(hours="12:00-12:01"), replace(ASKED, now=here))
    with pytest.raises(PolicyRefusal, match="local time"):
        check_request(Policy(hours="12:01-12:00"), replace(ASKED, now=here))
    with pytest.raises(ValueError, match="time zone"):
        check_request(policy, replace(ASKED, now=datetime(2026, 1, 5)))


def test_word_tables_are_known_by_name() -> None:
    """Names as Transformers and this package give them, sorted by hand."""
    tables = (
        "bert.embeddings.word_embeddings.weight embedding words.weight words.hashed "
        "tagger.words.weight model.shared.weight shared.weight model.decoder.embed_tokens.weight "
        "transformer.wte.weight lm_head.weight lm_head.bias lm_head.decoder.weight "
        "cls.predictions.decoder.weight cls.predictions.bias vocab_projector.bias "
        "final_logits_bias Embedding.weight new_embedder.table"
    ).split()
    others = (
        "bert.embeddings.position_embeddings.weight bert.embeddings.token_type_embeddings.weight "
        "bert.embeddings.LayerNorm.weight model.encoder.embed_positions.weight "
        "model.encoder.layernorm_embedding.bias characters.embedding tagger.characters.embedding "
        "lstm.weight_ih_l0 crf.transitions cls.predictions.transform.dense.weight "
        "vocab_transform.weight vocab_layer_norm.bias lm_head.dense.weight lm_head.layer_norm.bias "
        "classifier.bias keywords.weight not_shared.weight lora.layer.0.query.down"
    ).split()
    assert word_tables([*others, *tables]) == tuple(sorted(tables))
    assert reveals(tables[:1], 50)
    assert reveals(others, 1)
    assert not reveals(others, 2)
    assert not reveals(others, None)
    assert not reveals([], 0)


def test_a_policy_is_read_from_the_sites_file(tmp_path: Path) -> None:
    path = tmp_path / "h1.toml"
    path.write_text('[site]\nname = "h1"\n')
    assert read_policy(path) == Policy(source=f"[policy] of {path}")
    path.write_text('[policy]\nmin_sites = 4\nhours = "20:00-05:00"\ndenied_layers = ["crf"]\n')
    policy = read_policy(path)
    assert (policy.min_sites, policy.window, policy.denied_layers) == (4, (1200, 300), ("crf",))
    with pytest.raises(PolicyRefusal, match=r"min_sites in \[policy\] of .*h1\.toml"):
        check_job(policy, JOB)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min_site = 3", "unknown key 'min_site'; did you mean 'min_sites'"),
        ('source = "x"', "unknown key 'source'"),
        ('min_sites = "3"', "expected a whole number"),
        ("min_sites = 0", "at least 1"),
        ("max_rounds = -1", "0 is no rule"),
        ('secure_sum = "maybe"', "expected one of 'required', 'revealing', 'off'"),
        ('hours = "7-19"', "19:00-06:00"),
        ('hours = "19:60-06:00"', "19:00-06:00"),
        ('hours = "24:00-06:00"', "19:00-06:00"),
        ('hours = "07:00-24:01"', "19:00-06:00"),
        ('hours = "07:00-07:00"', "leave hours out"),
        ('timezone = "Mars/Olympus"', "Europe/Berlin"),
        ('timezone = "../etc"', "Europe/Berlin"),
        ('allowed_layers = [""]', "empty text"),
        ("share_scores = 1", "true or false"),
    ],
)
def test_a_wrong_policy_is_an_error_of_its_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "h1.toml"
    path.write_text(f"[policy]\n{text}\n")
    with pytest.raises(ConfigError) as found:
        read_policy(path)
    assert words in str(found.value)
    assert str(path) in str(found.value)


def test_a_policy_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h1.toml"
    path.write_text('policy = "none"\n')
    with pytest.raises(ConfigError, match=r"expected a table, \[policy\]"):
        read_policy(path)


def test_names_from_outside_cannot_write_on_the_screen() -> None:
    wish = replace(JOB, method="x\x1b[2J" + "y" * 500)
    with pytest.raises(PolicyRefusal) as found:
        check_job(Policy(methods=("fedner",)), wish)
    assert "\x1b" not in str(found.value)
    assert len(str(found.value)) < 400
