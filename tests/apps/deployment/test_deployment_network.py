"""Three hospitals and a server as processes that connect over loopback.

One test goes from the kits to a prediction by the commands of `docs/deploy.md`; others
run every method. The expected weights are those of `simulate` on the same job and
notes, to the last bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from applications import has_app
from hospital_jobs import DISTILL, FEDERATION, FINETUNE, NAMES, PRIVATE, SITES, corpus
from hospitals import lines, simulated, simulated_one, weights
from places import Place, alive, opened, until
from proxy import Proxy, proxy
from tiny_models import save_bert
from tracked_events import read_events
from ward_places import project, stopped

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.rules.guard import read_pending_jobs
from fednotes.data.synthetic import generate
from fednotes.jobs.card import render_card
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.results import PROMISED

pytestmark = [pytest.mark.slow, pytest.mark.network]
JOB = f"""
method = "fedner"
seed = 1

[federation]
secure_sum = true
pause = 1

[training]
private = ["words", "lstm", "crf"]
learning_rate = 0.004
epochs = 4
batch_size = 32

[model]
tagger = "cnn-clstm-crf"
hashed_words = 256
word_dim = 16
char_dim = 8
char_filters = 16
cnn_filters = 24
lstm_units = 16

{SITES}
"""


# A run between real sites is also tracked, where TensorBoard is there.
CAN_TRACK = has_app("tracking") and find_spec("tensorboard") is not None
TRACK = ("--track", "tensorboard=events") if CAN_TRACK else ()


def require_tracked(events: Path, run: Path) -> None:
    """Check that the curve that TensorBoard reads is that of the run's metrics."""
    (tracked,) = events.iterdir()
    losses = read_events(tracked / "federated").Scalars("loss")
    entries = read_metrics(run)
    assert len(entries) > 1
    assert {point.step: point.value for point in losses} == pytest.approx(
        {entry["round"] + 1: entry["loss"] for entry in entries}, rel=1e-5
    )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)
    stopped(Place(tmp_path))


@pytest.fixture
def hospital() -> Iterator[Proxy]:
    with proxy() as running:
        yield running


def test_the_commands_of_the_deployment_page_work_from_kits_to_predictions(
    place: Place, hospital: Proxy
) -> None:
    """Provision, check, start, approve, run, kill a site, resume, predict, abort, stop."""
    base = place.folder
    data = corpus(base / "notes", 60)
    project(base, NAMES)
    (base / "job.toml").write_text(JOB)
    for name in NAMES:
        # bits of a simulation
        table = f"[data]\n{lines(data[name])}[policy]\ndraws = 'job'\n"
        (base / f"{name}.toml").write_text(table)
    assert "next:" in place.give("provision", "project.toml", "--out", "kits")
    assert "does not answer" in place.give("preflight", "kits/sites/posts", code=2)
    assert "next: fednotes server start" in place.give("preflight", "kits/server")
    place.give("server", "start", "kits/server")
    for name in NAMES:
        behind = {"https_proxy": hospital.url} if name == "reports" else {}
        words = ("site", "start", f"kits/sites/{name}", "--site-file", f"{name}.toml")
        assert f"{name} is running" in Place(base, **behind).give(*words)
    until(lambda: "answers" in place.give("preflight", "kits/sites/posts"))
    run = place.begin("run", "job.toml", "--on", "kits/admin", "--out", "run", *TRACK)
    place.give(
        "site", "approve", "kits/sites/discharge", "--yes", "--wait", "--timeout", "240"
    )

    def missing() -> str:
        """Return the sites whose approval the server says it waits for."""
        status = place.give("server", "status", "kits/server")
        return status.partition("waiting for the approval of: ")[2]

    until(lambda: "reports (" in missing() or "posts (" in missing())
    # known once the server has asked it again
    until(lambda: "discharge (" not in missing())
    for name in ("reports", "posts"):
        words = (
            "site",
            "approve",
            f"kits/sites/{name}",
            "--yes",
            "--wait",
            "--timeout",
            "240",
        )
        assert "approved: job" in place.give(*words)
    state = next(
        path for path in (base / "kits/server/state").iterdir() if path.is_dir()
    )
    until(lambda: list((state / "server").glob("round-*")))
    killed = processes.read_status(base / "kits/sites/posts")
    for pid, _ in processes.list_processes((base / "kits/sites/posts").resolve()):
        os.kill(pid, signal.SIGKILL)
    assert killed.is_running
    place.give("site", "start", "kits/sites/posts")
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert "each site has its model and its own scores" in output
    if TRACK:
        require_tracked(base / "events", base / "run")
    name = state.name
    expected = simulated(JOB, data, base / "sim")
    for site in NAMES:
        results = base / "kits" / "sites" / site / "results" / name
        assert weights(results / "model") == expected[site]
        assert (results / "scores.json").exists()
    assert "unbroken" in place.give("ledger", "verify", "kits/sites/posts")
    assert "strict F1" in place.give("site", "status", "kits/sites/posts")
    model = f"kits/sites/posts/results/{name}/model"
    assert '"spans"' in place.give("predict", model, "--text", "Took aspirin.")
    assert hospital.addresses
    again = place.give("run", "--attach", "--out", "run")
    assert "done:" in again
    (base / "next.toml").write_text(JOB.replace("seed = 1", "seed = 2"))
    waits = place.begin("run", "next.toml", "--on", "kits/admin", "--out", "next")
    until(lambda: read_pending_jobs(base / "kits/sites/posts"))
    assert "does not resubmit it" in place.give("run", "--abort", "--out", "next")
    output, _ = waits.communicate(timeout=300)
    assert waits.returncode == 2
    assert "was aborted by a person" in output
    until(lambda: "aborted" in place.give("server", "status", "kits/server"))
    for kit in ("server", *(f"sites/{site}" for site in NAMES)):
        assert "has stopped" in place.give(
            "server" if kit == "server" else "site", "stop", f"kits/{kit}"
        )
    assert opened(base / "kits") + opened(base / "run") == []
    assert "bytes in all" in place.give("site", "forget", "kits/sites/posts", name)
    assert not list((base / "kits/sites/posts").rglob("*.safetensors"))
    assert alive(base) == []


# every method, a job after the other in one project

SECURE = "[federation]\npause = 1\nsecure_sum = true\n"
TAGS = DISTILL.replace("rounds = 3", "rounds = 2")
ALIGNED = re.sub(r"unannotated.*\nweighting.*", 'variant = "ganin"', TAGS)
JOBS = {
    "distill": TAGS,
    "adversarial": ALIGNED.replace('"distill"', '"adversarial"'),
    "finetune": FINETUNE,
    "pretrain": FINETUNE.replace('"finetune"', '"pretrain"')
    .replace("cycles = 2", "cycles = 1")
    .replace("learning_rate = 1e-3\n", ""),
    "private": PRIVATE,
}
if has_app("phenotyping"):
    from patient_hospitals import PHENOTYPE, patients

    JOBS["phenotype"] = PHENOTYPE

POLICY = "[policy]\nfreeze_embeddings = false\ndraws = 'job'\n"


@dataclass(frozen=True)
class Ward:
    place: Place
    bert: Path
    data: Mapping[str, Mapping[str, Any]]  # kind → site → its [data] table


def notes_of_sites(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a table of notes, without annotations, for each site."""
    tables = {}
    for name, site in zip(NAMES, generate(num_sites=3, seed=1), strict=True):
        rows = [
            {"patient": document.id, "text": document.text}
            for document in site.data.train
        ]
        path = folder / f"notes-{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tables[name] = {"path": str(path)}
    return tables


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    pytest.importorskip("transformers")
    base = tmp_path_factory.mktemp("ward")
    bert = save_bert(base / "bert", max_position_embeddings=512)
    data = {"documents": corpus(base / "documents"), "notes": notes_of_sites(base)}
    if has_app("phenotyping"):
        data["patients"] = {
            name: patients(base / f"patients-{name}", i) for i, name in enumerate(NAMES)
        }
    place = Place(base)
    project(base, NAMES)
    place.give("provision", "project.toml", "--out", "kits")
    files = f"[files]\nencoder = '{bert}'\n"
    (base / "server.toml").write_text(files)
    place.give("server", "start", "kits/server", "--server-file", "server.toml")
    for name in NAMES:
        data_tables = [
            f"[data.{kind}]\n{lines(sites[name])}" for kind, sites in data.items()
        ]
        (base / f"{name}.toml").write_text(files + "".join(data_tables) + POLICY)
        place.give("site", "start", f"kits/sites/{name}", "--site-file", f"{name}.toml")
    until(lambda: "answers" in place.give("preflight", "kits/sites/posts"))
    yield Ward(place, bert, data)
    stopped(place)


@pytest.mark.parametrize("method", list(JOBS))
def test_a_deployed_job_ends_with_the_weights_of_a_simulation(
    method: str, ward: Ward
) -> None:
    job = JOBS[method].replace("BERT", str(ward.bert)).replace(FEDERATION, SECURE)
    base, place = ward.place.folder, ward.place
    (base / f"{method}.toml").write_text(job)
    kits = {name: base / "kits" / "sites" / name for name in NAMES}
    before = {name: set(kit.glob("results/*")) for name, kit in kits.items()}
    run = place.begin(
        "run", f"{method}.toml", "--on", "kits/admin", "--out", f"run-{method}"
    )
    try:
        for name, kit in kits.items():
            until(lambda site=kit: read_pending_jobs(site) or run.poll() is not None)
            assert run.poll() is None, run.communicate()
            output = place.give("site", "approve", f"kits/sites/{name}", "--yes")
            assert f"approved: {method}" in output
            assert ("ε = 8.00" in output) == (method == "private")
        output, _ = run.communicate(timeout=240)
        assert run.returncode == 0, output
    finally:
        run.kill()
        run.communicate()
    kind = {"pretrain": "notes", "phenotype": "patients"}.get(method, "documents")
    if method == "private":  # its noise is nobody else's
        _promised_everywhere(base / f"run-{method}", output, before, ward.place)
        return
    simulated_one(job, ward.data[kind], base / f"sim-{method}")
    simulation = base / f"sim-{method}" / "federated"
    for name, kit in kits.items():
        joint_model = simulation / "model"  # of all sites, or each site's own
        expected = weights(
            joint_model
            if joint_model.exists()
            else simulation / "sites" / name / "model"
        )
        (result,) = set(kit.glob("results/*")) - before[name]
        assert weights(result / "model") == expected
        assert "unbroken" in place.give("ledger", "verify", f"kits/sites/{name}")


def _promised_everywhere(
    out: Path, output: str, before: Mapping[str, Any], place: Place
) -> None:
    """ε, δ and the unit are said by the run, its summary, its report, and at each site
    by its status and its model's card; a site has spent what was promised."""
    words = "differential privacy for each document of a site, against whoever sees only sums: ε = "
    assert f"{words}8.00 at δ = 1e-05" in " ".join(output.split())
    promise = json.loads((out / "summary.json").read_text())["privacy"]["federated"]
    assert 7.9 < promise["epsilon"] <= 8
    assert (promise["delta"], promise["unit"], promise["shares"]) == (
        1e-5,
        "document",
        2,
    )
    page = (out / "report.html").read_text()
    assert "ε guaranteed" in page
    assert "at δ = 1e-05, of each document of a site" in page
    for name, results_before in before.items():
        kit = place.folder / "kits" / "sites" / name
        (result,) = set(kit.glob("results/*")) - results_before
        saved_promise = json.loads((result / PROMISED).read_text())
        assert {key: saved_promise[key] for key in promise} == promise
        described = render_card(result / "model")
        for line in (
            f"epsilon: {promise['epsilon']}",
            "delta: 1e-05",
            "unit: document",
        ):
            assert f"- {line}" in described
        assert "without differential privacy" not in described
        status = " ".join(place.give("site", "status", f"kits/sites/{name}").split())
        assert f"{words}8.00 at δ = 1e-05" in status
        (spent,) = json.loads((kit / "rules" / "privacy.json").read_text()).values()
        assert len(spent["answers"]) == promise["rounds"]
        assert spent["epsilon"] == promise["epsilon"]
