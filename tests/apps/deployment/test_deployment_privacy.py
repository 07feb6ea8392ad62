"""What leaves a site in a deployed job is in the ledger and holds no word of a note."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from hospital_jobs import FEDNER, PRIVATE, SECURE, SHORT, corpus
from hospitals import Hospitals, simulated

from fednotes.apps.deployment.rules.guard import RULES
from fednotes.apps.deployment.rules.ledger import (
    Ledger,
    read_ledger_lines,
    verify_ledger,
)
from fednotes.apps.deployment.site import NOISE_KEY_FILE

NOISE = "secure_sum = 'required'\nfreeze_embeddings = false\nmax_epsilon = 8.0\n"
NOISE += "steady_replies = false\n"
PROMISE = '[privacy]\nepsilon = 8.0\nrate = 0.5\nunit = "document"\n'
TAUGHT = SECURE.replace("weighting = true\n", PROMISE)


@pytest.mark.slow
def test_every_frame_that_left_is_in_the_ledger(
    site_notes: Any, tmp_path: Path
) -> None:
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    hospitals.run()
    replies = hospitals.network.frames[1::2]
    hashes: list[str] = []
    for name in hospitals.names:
        path = Ledger.in_kit(hospitals.setups[name].kit).path
        assert verify_ledger(path).is_intact
        hashes += [line["sha256"] for line in read_ledger_lines(path)]
    assert sorted(hashes) == sorted(
        hashlib.sha256(reply).hexdigest() for reply in replies
    )


@pytest.mark.slow
def test_a_secure_sum_gives_the_same_model(site_notes: Any, tmp_path: Path) -> None:
    """That of the embedded engine under the secure sum, to the last bit."""
    pytest.importorskip("cryptography")
    expected = simulated(SECURE, site_notes, tmp_path / "sim")
    policy = "secure_sum = 'required'\nfreeze_embeddings = false\ndraws = 'job'\n"
    hospitals = Hospitals(tmp_path, SECURE, site_notes, policy=policy)
    hospitals.run()
    assert hospitals.ends() == expected
    assert "refused" not in hospitals.texts()  # that scores stay is no news
    assert "scores" not in hospitals.texts()


def test_no_name_of_a_patient_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """200 planted names and record numbers, in training, validation and test notes:
    none is on the wire, in a log, a checkpoint, a journal, a model, scores, the ledger
    or at the server."""
    rng = random.Random(7)
    planted = [
        f"{rng.choice('BDGKLMNPRSTVZ')}{''.join(rng.choices('aeioulnrst', k=7))}q{n}"
        for n in range(100)
    ]
    planted += [f"{rng.randrange(10**8, 10**9)}" for _ in range(100)]
    data = corpus(tmp_path / "notes")
    names_left = list(planted)
    for table in data.values():
        for part in table.values():
            path = Path(part)
            lines = path.read_text().splitlines()
            for at, line in enumerate(lines):
                if (
                    line.strip()
                    and not line.startswith("#")
                    and names_left
                    and rng.random() < 0.5
                ):
                    lines[at] = (
                        names_left.pop()
                        + line[line.index("\t" if "\t" in line else " ") :]
                    )
            path.write_text("\n".join(lines) + "\n")
            names_left = names_left or list(planted)
    caplog.set_level("DEBUG")
    hospitals = Hospitals(tmp_path, FEDNER, data)
    hospitals.network.kill = ("posts", 40)
    hospitals.run()
    byte_strings = [
        *hospitals.network.frames,
        caplog.text.encode(),
        json.dumps(hospitals.network.lines).encode(),
    ]
    files = [path for path in (tmp_path / "kits").rglob("*") if path.is_file()]
    assert len(files) > 50
    byte_strings += [path.read_bytes() for path in files]
    everything = b"\n".join(byte_strings)
    assert [name for name in planted if name.encode() in everything] == []
    assert any(
        planted[0] in Path(part).read_text()
        for t in data.values()
        for part in t.values()
    )


@pytest.mark.slow
def test_no_name_of_a_file_leaves(
    site_notes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A note's file is often called by the patient or the record. One trouble after the
    other at a site whose files and folders are called so: the server hears of each, and
    no name; the site's own log has them all."""
    ward, note = "WARD_MILLER", "SMITH_JANE_MRN0042"
    folder = tmp_path / ward
    folder.mkdir()
    data = {name: dict(table) for name, table in site_notes.items()}
    for part, source in data["posts"].items():
        data["posts"][part] = str(folder / f"{note}-{part}.conll")
        (folder / f"{note}-{part}.conll").write_bytes(Path(source).read_bytes())
    hospitals = Hospitals(folder, SHORT, data)
    kit = hospitals.setups["posts"].kit
    notes, site_file = Path(data["posts"]["train"]), kit / "site.toml"
    decided = kit / RULES / "approvals.json"
    contents = {path: path.read_bytes() for path in (notes, site_file, decided)}
    troubles: list[tuple[Path, bytes]] = [
        (notes, b"aspirin B-Drug\nand I-Drug O O\n"),
        (notes, b"\xff\xfe\x00"),
        (site_file, contents[site_file] + b"\n[unknown]\nx = 1\n"),
        (
            site_file,
            contents[site_file].replace(b"SMITH", b"NOBODY_SMITH"),
        ),  # its notes are missing
        (decided, b"{"),
    ]
    failures: list[str] = []
    caplog.set_level("INFO")

    def trouble() -> None:
        failures.extend(hospitals.network.failed.values())
        for path, content in contents.items():
            path.write_bytes(content)
        if troubles:
            path, content = troubles.pop(0)
            path.write_bytes(content)

    hospitals.network.meanwhile = trouble
    hospitals.run()
    assert len(failures) == 5
    assert all("see the site's log" in line for line in failures)
    assert "its notes cannot be read" in failures[3]
    server = hospitals.setups[""].kit
    texts = [*failures, json.dumps(hospitals.network.lines)]
    raw = [
        *hospitals.network.frames,
        *(p.read_bytes() for p in server.rglob("*") if p.is_file()),
    ]
    everything = "\n".join(texts).encode() + b"\n".join(raw)
    assert [
        name
        for name in (ward, "MILLER", "SMITH", "MRN0042")
        if name.encode() in everything
    ] == []
    logged = [
        record.getMessage() for record in caplog.records if record.levelname == "ERROR"
    ]
    assert sum(note in line for line in logged) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("job", [PRIVATE, TAUGHT], ids=["fedner", "distill"])
def test_faults_do_not_change_the_result_or_cost_of_a_private_run(
    job: str, site_notes: Any, tmp_path: Path
) -> None:
    """Sites keep what their noise is made of: a killed site and a killed server change
    nothing, so no round is paid twice, and noisy counts are told once. The server has
    no loss, no count but those, and says what was promised."""
    ends, scores, counted = [], set(), 'unit = "document"\ncounts = 4.0'
    job = job.replace('unit = "document"', counted)
    for kill in ("", "posts", "server"):
        hospitals = Hospitals(
            tmp_path / (kill or "none"), job, site_notes, policy=NOISE
        )
        for name in hospitals.names:
            path = hospitals.setups[name].state / NOISE_KEY_FILE
            path.parent.mkdir(parents=True)
            path.write_bytes(name.encode().ljust(32))
        hospitals.network.kill = (kill, 20)
        hospitals.run()
        assert hospitals.network.kill[0] == ""  # it was
        ends.append(hospitals.ends())
        summary = json.loads((hospitals.server / "summary.json").read_text())
        rounds = summary["privacy"]["federated"]["rounds"]
        assert summary["metrics"].keys() == {"epsilon", "valid_f1"}
        scores.add(summary["metrics"]["valid_f1"])
        assert (
            summary["metrics"]["epsilon"] == summary["privacy"]["federated"]["epsilon"]
        )
        assert 7.5 < summary["metrics"]["epsilon"] <= 8
        for name in hospitals.names:
            kit = hospitals.setups[name].kit
            host: Any = hospitals.network.members[name]
            noisy = host._site.site
            # or a lie about drop-outs would tell
            assert noisy._name_request() == host.question != b""
            (spent,) = json.loads((kit / RULES / "privacy.json").read_text()).values()
            assert len(spent["counts"]) == 1
            assert (len(spent["answers"]), spent["epsilon"]) == (
                rounds,
                summary["metrics"]["epsilon"],
            )
    assert ends[0] == ends[1] == ends[2]
    assert len(scores) == 1


PHENOTYPES = """
method = "phenotype"
[federation]
secure_sum = true
[concepts]
dictionary = "terms.tsv"
[privacy]
epsilon = 8.0
rate = 0.5
{counts}
[training]
{outputs}
cycles = 1
local_epochs = 1
classifier_cycles = 1
[model]
representation = "{representation}"
[model.classifier]
loss = "log"
class_weights = "none"
[model.network]
embedding = 4
hidden = 4
[phenotypes]
back = ["icd9:722"]
[sites.s0]
[sites.s1]
[sites.s2]
"""


FIXED_OUTPUTS = {"counts": "", "outputs": 'outputs = ["icd9:401", "icd9:250"]'}
COMMON = "admission"  # of most patients, more than ten deviations of the noise
COUNTED = {
    "counts": "counts = 2.0\ncounted = 4.0",
    "outputs": "minimum = 40\nleast_occurrences = 20",
}


@pytest.mark.parametrize(
    ("model", "rounds"),
    [
        pytest.param(
            {"representation": "learn", **FIXED_OUTPUTS}, 4, marks=pytest.mark.slow
        ),
        pytest.param(
            {"representation": "none", **FIXED_OUTPUTS}, 2, marks=pytest.mark.slow
        ),
        pytest.param({"representation": "learn", **COUNTED}, 4, marks=pytest.mark.slow),
    ],
    ids=["learn", "none", "counted"],
)
def test_phenotyping_is_approved_and_run_with_one_promise(
    model: dict[str, str], rounds: int, tmp_path: Path
) -> None:
    """What sites approve before they have told what they hold is what the run keeps;
    noisy counts that it begins with are told once, however often a site is killed."""
    needs_app("phenotyping")
    from patient_hospitals import patients

    pytest.importorskip("cryptography")
    data = {f"s{n}": patients(tmp_path / f"s{n}", n) for n in range(3)}
    rules = f"{NOISE}min_patients = 10\nmax_rounds = {2 * rounds}\n"
    hospitals = Hospitals(tmp_path, PHENOTYPES.format(**model), data, policy=rules)
    (tmp_path / "terms.tsv").write_text(f"C0000001\tasthma\nC0000002\t{COMMON}\n")
    for name in hospitals.names:
        hospitals.change(
            name, "[data]", f"[files]\ndictionary = '{tmp_path / 'terms.tsv'}'\n[data]"
        )
    hospitals.network.kill = ("s1", 14)
    hospitals.run()
    assert hospitals.network.kill[0] == ""  # it was
    for name in hospitals.names:
        kit = hospitals.setups[name].kit
        (spent,) = json.loads((kit / RULES / "privacy.json").read_text()).values()
        saved_promise = json.loads(
            (hospitals.results(name) / "promise.json").read_text()
        )
        assert saved_promise["rounds"] == rounds
        assert len(spent["answers"]) == rounds
        assert len(spent["counts"]) == bool(model["counts"])
