"""Three hospitals and a server as processes on loopback, from nothing to a prediction.

Every step is a command, as `docs/deploy.md` gives it. Expected weights are those of `simulate`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from hospitals import SITES, simulated, weights
from places import Place, opened, project, stopped, until
from proxy import Proxy, proxy

from fednotes.data.synthetic import generate, write_sites
from fednotes.engines.nvflare import processes

pytestmark = [pytest.mark.slow, pytest.mark.network]
NAMES = ("discharge", "reports", "posts")
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
PARTS = ("train", "valid", "test")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)
    stopped(Place(tmp_path))


@pytest.fixture
def hospital() -> Iterator[Proxy]:
    with proxy() as made:
        yield made


def test_the_walk_through(place: Place, hospital: Proxy) -> None:
    """Provision, check, start, approve, run, kill a site, resume, predict, abort, stop."""
    base = place.folder
    write_sites(generate(num_sites=3, sentences_per_site=60, seed=1), base / "notes", "conll")
    data = {
        name: {part: str(base / "notes" / name / f"{part}.conll") for part in PARTS}
        for name in NAMES
    }
    project(base, NAMES)
    (base / "job.toml").write_text(JOB)
    for name in NAMES:
        lines = "".join(f'{part} = "notes/{name}/{part}.conll"\n' for part in PARTS)
        (base / f"{name}.toml").write_text(f"[data]\n{lines}")
    assert "next:" in place.give("provision", "project.toml", "--out", "kits")
    assert "does not answer" in place.give("preflight", "kits/sites/posts", code=2)
    assert "next: fednotes server start" in place.give("preflight", "kits/server")
    place.give("server", "start", "kits/server")
    for name in NAMES:
        behind = {"https_proxy": hospital.url} if name == "reports" else {}
        words = ("site", "start", f"kits/sites/{name}", "--site", f"{name}.toml")
        assert f"{name} runs" in Place(base, **behind).give(*words)
    until(lambda: "answers" in place.give("preflight", "kits/sites/posts"))
    run = place.begin("run", "job.toml", "--on", "kits/admin", "--out", "run")
    for name in NAMES:
        until(lambda name=name: (base / f"kits/sites/{name}/rules/pending.json").exists())
        assert "approved: job" in place.give("site", "approve", f"kits/sites/{name}", "--yes")
    state = next(path for path in (base / "kits/server/state").iterdir() if path.is_dir())
    until(lambda: list((state / "server").glob("round-*")))
    killed = processes.status(base / "kits/sites/posts")
    for pid, _ in processes.of_kit((base / "kits/sites/posts").resolve()):
        os.kill(pid, signal.SIGKILL)
    assert killed.running
    place.give("site", "start", "kits/sites/posts")
    told, _ = run.communicate(timeout=240)
    assert run.returncode == 0, told
    assert "each site has its model and its own scores" in told
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
    assert hospital.asked
    again = place.give("run", "--attach", "--out", "run")
    assert "done:" in again
    (base / "next.toml").write_text(JOB.replace("seed = 1", "seed = 2"))
    waits = place.begin("run", "next.toml", "--on", "kits/admin", "--out", "next")
    until(lambda: (base / "kits/sites/posts/rules/pending.json").exists())
    assert "hands it in no more" in place.give("run", "--abort", "--out", "next")
    told, _ = waits.communicate(timeout=60)
    assert waits.returncode == 2
    assert "was aborted by a person" in told
    until(lambda: "aborted" in place.give("server", "status", "kits/server"), 60)
    for kit in ("server", *(f"sites/{site}" for site in NAMES)):
        assert "has stopped" in place.give(
            "server" if kit == "server" else "site", "stop", f"kits/{kit}"
        )
    assert opened(base / "kits") + opened(base / "run") == []
    assert "bytes in all" in place.give("site", "forget", "kits/sites/posts", name)
    assert not list((base / "kits/sites/posts").rglob("*.safetensors"))
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "stat=,command="], capture_output=True, text=True, check=True
    )
    assert not [x for x in listing.stdout.splitlines() if str(base) in x and x[0] != "Z"]
