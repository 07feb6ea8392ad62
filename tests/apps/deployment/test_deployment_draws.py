"""Random draws of real sites follow from a secret of the site."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hospital_jobs import DISTILL, FEDNER, SHORT
from hospitals import OPEN, Hospitals, simulated
from method_runs import LEAST_MISSED
from two_jobs import MOST, missed

from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal
from fednotes.apps.deployment.site import DRAWS_KEY_FILE, accepts_option, load_draws
from fednotes.core.messages import decode_reply, decode_request
from fednotes.core.update import Total
from fednotes.data.synthetic import generate, write_sites
from fednotes.methods import find_method, list_method_names

HIDDEN = OPEN.replace("draws = 'job'\n", "")


def with_secrets(folder: Path, job: str, data: Any) -> Hospitals:
    """Return hospitals whose draws follow from secrets that the test knows."""
    hospitals = Hospitals(folder, job, data, policy=HIDDEN)
    for name in hospitals.names:
        path = hospitals.setups[name].state / DRAWS_KEY_FILE
        path.parent.mkdir(parents=True)
        path.write_bytes(secret_of(name))
    return hospitals


def secret_of(name: str) -> bytes:
    return name.encode().ljust(32, b"!")


@pytest.mark.slow
@pytest.mark.parametrize("job", [FEDNER, DISTILL], ids=["fedner", "distill"])
def test_killed_processes_do_not_change_the_result(
    job: str, site_notes: Any, tmp_path: Path
) -> None:
    """A site is killed, and later the server."""
    uninterrupted = with_secrets(tmp_path / "whole", job, site_notes)
    uninterrupted.run()

    killed = with_secrets(tmp_path / "killed", job, site_notes)
    network, kills = killed.network, [("server", 20)]
    network.kill = ("posts", 20)

    def kill_next() -> None:
        if network.kill[0] == "" and kills:
            network.kill = kills.pop()

    network.meanwhile = kill_next
    killed.run()
    assert (network.kill[0], kills) == ("", [])  # both were
    assert killed.ends() == uninterrupted.ends()
    assert uninterrupted.ends() != simulated(job, site_notes, tmp_path / "simulation")


@pytest.mark.slow
def test_each_run_has_its_own_lasting_secret(site_notes: Any, tmp_path: Path) -> None:
    """It is in no message, no model and no log line, in bytes, hexadecimal or as a
    number."""
    secrets = set()
    for run in ("run1", "run2"):
        hospitals = Hospitals(tmp_path / run, SHORT, site_notes, policy=HIDDEN, run=run)
        hospitals.run()
        for name in hospitals.names:
            key_file = hospitals.setups[name].state / DRAWS_KEY_FILE
            secret = key_file.read_bytes()
            assert len(secret) == 32
            assert key_file.stat().st_mode & 0o077 == 0
            secrets.add(secret)
            forms = (
                secret,
                secret.hex().encode(),
                str(int.from_bytes(secret, "big")).encode(),
            )
            sent = b"".join(hospitals.network.frames) + hospitals.texts().encode()
            model = b"".join(
                p.read_bytes()
                for p in hospitals.results(name).rglob("*")
                if p.is_file()
            )
            assert not any(form in sent + model for form in forms)
    assert len(secrets) == 2 * len(site_notes)


def round_of(hospitals: Hospitals) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors that the first round of training began with, and each site's
    update."""
    start: dict[str, Any] = {}
    updates: dict[str, Any] = {}
    for request_frame, answered in zip(
        *[iter(hospitals.network.frames)] * 2, strict=True
    ):
        request = decode_request(request_frame)
        reply = decode_reply(answered)
        if request.task == "begin" and request.round == 0:
            start = {n: v.double() for n, v in request.tensors.items()} or start
        if request.task == "train" and request.round == 0 and reply.update is not None:
            updates[reply.site] = reply.update
    return start, updates


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["job", "secret"])
def test_two_approved_jobs_do_not_reveal_a_site(draws: str, tmp_path: Path) -> None:
    """The same with three sites and with four; the server adds what it knows by the
    secure sum."""
    hospitals_data = generate(num_sites=4, sentences_per_site=24, seed=5)
    write_sites(hospitals_data, tmp_path / "notes", "conll")
    data = {
        site.data.id: {
            part: str(tmp_path / "notes" / site.data.id / f"{part}.conll")
            for part in ("train", "valid", "test")
        }
        for site in hospitals_data
    }
    names, rounds = list(data), []
    for number in (4, 3):
        job = SHORT.partition("[sites.")[0] + "".join(
            f"[sites.{n}]\n" for n in names[:number]
        )
        hospitals = Hospitals(
            tmp_path / str(number),
            job.replace("weighting = true", "weighting = false"),
            {name: data[name] for name in names[:number]},
            policy=f"{HIDDEN}draws = '{draws}'\n",
        )
        hospitals.run()
        rounds.append(round_of(hospitals))
    (start, more), (other_start, less) = rounds
    totals = [Total.of(updates[n] for n in updates) for updates in (more, less)]
    distance = missed(*totals, Total.of([more[names[3]]]), [start, other_start])
    assert distance < MOST if draws == "job" else distance > LEAST_MISSED


def test_methods_whose_sites_accept_no_draws_are_refused(tmp_path: Path) -> None:
    class Site:
        def __init__(
            self, data: Any, config: Any, *, directory: Any = None
        ) -> None: ...

    job: Any = SimpleNamespace(
        method="homely", module=SimpleNamespace(inner_site_class=Site)
    )
    with pytest.raises(
        PolicyRefusal, match="sites of the method homely take no `draws`"
    ) as refusal:
        load_draws(job, Policy(), tmp_path)
    assert refusal.value.rule == "draws"
    assert load_draws(job, Policy(draws="job"), tmp_path) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", list_method_names())
def test_every_method_accepts_draws(name: str) -> None:
    assert accepts_option(find_method(name).site_class, "draws")
