"""A deployed job in one process: server and sites joined by an in-memory pipe.

Expected weights are those of `simulate` on the same job and notes, to the last bit:
another engine, which knows nothing of messages, restarts or rules.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from applications import needs_app
from hospital_jobs import DISTILL, FEDMD, FEDNER, FINETUNE, NAMES, corpus
from hospitals import OPEN, Hospitals, simulated, simulated_one, weights
from tiny_models import save_bert

from fednotes.apps.deployment.site import site_main
from fednotes.core.kernels import Kernel
from fednotes.jobs.results import read_result


@pytest.mark.slow
@pytest.mark.parametrize("job", [FEDNER, DISTILL], ids=["fedner", "distill"])
def test_weights_equal_those_of_a_simulation(job: str, tmp_path: Path) -> None:
    data = corpus(tmp_path / "notes")
    expected = simulated(job, data, tmp_path / "sim")
    hospitals = Hospitals(tmp_path, job, data)
    hospitals.run()
    for name in data:
        assert weights(hospitals.results(name) / "model") == expected[name]
        text = (hospitals.results(name) / "model" / "README.md").read_text()
        scores = json.loads((hospitals.results(name) / "scores.json").read_text())
        # and no mean beside it
        assert f"| Strict | f1 | {100 * scores['strict']['f1']:.1f} |\n" in text
        assert f'condition "federated"; {len(data)} sites.' in text
        assert "Secure sum of the sites' updates: " in text
        assert not any(
            word in text for word in (*data, "examples", "simulated", str(tmp_path))
        )
    scores = json.loads((hospitals.results("posts") / "scores.json").read_text())
    summary = json.loads((tmp_path / "sim" / "summary.json").read_text())
    assert scores == summary["sites"]["posts"]["federated"]
    shared = read_result(hospitals.server).sites
    assert {
        n: conditions["federated"] for n, conditions in summary["sites"].items()
    } == {n: conditions["federated"] for n, conditions in shared.items()}


def test_a_site_compiles_its_kernels_before_its_first_task(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, FEDNER, corpus(tmp_path / "notes"))
    (name, *_) = hospitals.names
    with mock.patch.object(Kernel, "compile", autospec=True) as compiled:
        site_main(hospitals.setups[name])
    kernels = {kernel._function.__name__ for ((kernel,), _) in compiled.call_args_list}
    assert {"compute_scaled_partition", "_compute_cells", "_multiply"} <= kernels


@pytest.mark.slow
def test_different_models_equal_those_of_a_simulation(tmp_path: Path) -> None:
    """One site's model is named by the job, another one's by the site's own file; both
    stay where they are, and the secure sum adds the predictions."""
    data = corpus(tmp_path / "notes")
    public = data["posts"]["valid"]
    data = {name: {**table, "public": public} for name, table in data.items()}
    own = {"tagger": "cnn-crf", "hashed_words": 32, "char_dim": 4, "char_filters": 6}
    with_own = {**data, "posts": {**data["posts"], "model": own}}
    expected = simulated(FEDMD, with_own, tmp_path / "sim")
    dotted = {f"model.{key}": value for key, value in own.items()}
    in_files = {**data, "posts": {**data["posts"], **dotted}}
    hospitals = Hospitals(tmp_path, FEDMD, in_files)
    hospitals.run()
    assert len({frozenset(each) for each in expected.values()}) > 1  # their parameters
    for name in data:
        assert weights(hospitals.results(name) / "model") == expected[name]
        assert (hospitals.results(name) / "sent" / "round-1.tsv").is_file()
    assert not (hospitals.server / "model").exists()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bert"), max_position_embeddings=512)


@pytest.mark.slow
def test_a_fine_tuned_bert_equals_that_of_a_simulation(
    bert: Path, tmp_path: Path
) -> None:
    """The sites' models are one, and the server has it too; here sites keep BERT
    elsewhere."""
    job = FINETUNE.replace("BERT", str(bert))
    data = corpus(tmp_path / "notes")
    simulated_one(job, data, tmp_path / "sim")
    expected = weights(tmp_path / "sim" / "federated" / "model")
    moved = tmp_path / "elsewhere"
    shutil.copytree(bert, moved)
    files = f"[files]\nencoder = '{moved}'\n"
    hospitals = Hospitals(
        tmp_path, job, data, files=files, policy=f"{OPEN}max_rounds = 2\n"
    )
    hospitals.run()
    for folder in (*map(hospitals.results, data), hospitals.server):
        assert weights(folder / "model") == expected


@pytest.mark.slow
def test_a_phenotyping_model_equals_that_of_a_simulation(tmp_path: Path) -> None:
    """Two stages, codes held out, calibration; the test part by the job's fractions.
    The sites allow as many rounds as it takes and no more."""
    needs_app("phenotyping")
    from patient_hospitals import PHENOTYPE, patients

    data = {name: patients(tmp_path / name, n) for n, name in enumerate(NAMES)}
    simulated_one(PHENOTYPE, data, tmp_path / "sim")
    expected = weights(tmp_path / "sim" / "federated" / "model")
    hospitals = Hospitals(tmp_path, PHENOTYPE, data, policy=f"{OPEN}max_rounds = 4\n")
    hospitals.run()
    for name in data:
        assert weights(hospitals.results(name) / "model") == expected
    scores = json.loads((hospitals.results("posts") / "scores.json").read_text())
    summary = json.loads((tmp_path / "sim" / "summary.json").read_text())
    assert scores == summary["sites"]["posts"]["federated"]
