"""Every method over the network: one project of three sites, a job after the other by commands.

Expected weights are those of `simulate` on the same job and notes, to the last bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")
pytest.importorskip("transformers")

from hospitals import SITES, SMALL, corpus, patients, simulated_one, weights
from places import Place, project, stopped, until
from tiny_models import save_bert

pytestmark = [pytest.mark.slow, pytest.mark.network]

NAMES = ("discharge", "reports", "posts")
HEAD = """
seed = 3
[federation]
pause = 1
secure_sum = true
"""
TAGS = f"""
method = "distill"
{HEAD}
[training]
rounds = 2
unannotated = "pseudo"
weighting = true
{SMALL}
{SITES}
"""
ADVERSARIAL = f"""
method = "adversarial"
{HEAD}
[training]
rounds = 2
variant = "ganin"
{SMALL}
{SITES}
"""
BERT = """
[training]
cycles = 2
batch_size = 8
learning_rate = 1e-3
[model]
encoder = "{bert}"
"""
FINETUNE = f"""
method = "finetune"
{HEAD}
{BERT}
{SITES}
"""
PRETRAIN = f"""
method = "pretrain"
{HEAD}
[training]
cycles = 1
batch_size = 8
[model]
encoder = "{{bert}}"
{SITES}
"""
PHENOTYPE = f"""
method = "phenotype"
{HEAD}
[concepts]
dictionary = "synthetic"
[training]
cycles = 2
classifier_cycles = 2
minimum = 10
min_patients = 10
[model]
network = {{{{ embedding = 6, hidden = 8 }}}}
[phenotypes]
pneumonia = ["icd9:485"]
back = ["icd9:722"]
{"".join(f"[sites.{name}]{chr(10)}valid_fraction = 0.2{chr(10)}" for name in NAMES)}
"""
JOBS = {
    **{"distill": TAGS, "adversarial": ADVERSARIAL, "finetune": FINETUNE},
    **{"pretrain": PRETRAIN, "phenotype": PHENOTYPE},
}
POLICY = "[policy]\nfreeze_embeddings = false\n"


@dataclass(frozen=True)
class Ward:
    place: Place
    bert: Path
    data: Mapping[str, Mapping[str, Any]]  # kind → site → its [data] table


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    base = tmp_path_factory.mktemp("ward")
    bert = save_bert(base / "bert", max_position_embeddings=512)
    tables = {name: patients(base / f"patients-{name}", i) for i, name in enumerate(NAMES)}
    data = {
        "documents": corpus(base / "notes"),
        "notes": {name: {"path": table["notes"]} for name, table in tables.items()},
        "patients": tables,
    }
    place = Place(base)
    project(base, NAMES)
    place.give("provision", "project.toml", "--out", "kits")
    place.give("server", "start", "kits/server")
    for name in NAMES:
        own = [f"[data.{kind}]\n{_lines(sites[name])}" for kind, sites in data.items()]
        files = f"[files]\nencoder = '{bert}'\n"
        (base / f"{name}.toml").write_text(files + "".join(own) + POLICY)
        place.give("site", "start", f"kits/sites/{name}", "--site", f"{name}.toml")
    until(lambda: "answers" in place.give("preflight", "kits/sites/posts"))
    yield Ward(place, bert, data)
    stopped(place)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


@pytest.mark.parametrize("method", list(JOBS))
def test_a_deployed_job_ends_with_the_weights_of_a_simulation(method: str, ward: Ward) -> None:
    job = JOBS[method].format(bert=ward.bert)
    base, place = ward.place.folder, ward.place
    (base / f"{method}.toml").write_text(job)
    kits = {name: base / "kits" / "sites" / name for name in NAMES}
    before = {name: set(os.listdir(_results(kit))) for name, kit in kits.items()}
    run = place.begin("run", f"{method}.toml", "--on", "kits/admin", "--out", f"run-{method}")
    try:
        for name, kit in kits.items():
            asked = kit / "rules" / "pending.json"
            until(lambda asked=asked: asked.exists() or run.poll() is not None)
            told = run.stdout.read() if run.poll() is not None else ""
            assert not told
            told = place.give("site", "approve", f"kits/sites/{name}", "--yes")
            assert f"approved: {method}" in told
        told, _ = run.communicate(timeout=240)
        assert run.returncode == 0, told
    finally:
        run.kill()
        run.communicate()
    kind = {"pretrain": "notes", "phenotype": "patients"}.get(method, "documents")
    simulated_one(job, ward.data[kind], base / f"sim-{method}")
    made = base / f"sim-{method}" / "federated"
    for name, kit in kits.items():
        one = made / "model"  # of all sites, or each site's own
        expected = weights(one if one.exists() else made / "sites" / name / "model")
        (new,) = set(os.listdir(_results(kit))) - before[name]
        assert weights(kit / "results" / new / "model") == expected
        assert "unbroken" in place.give("ledger", "verify", f"kits/sites/{name}")


def _results(kit: Path) -> Path:
    found = kit / "results"
    found.mkdir(exist_ok=True)
    return found
