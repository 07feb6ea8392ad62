"""Sites with models and settings of their own, and the public notes that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import TAGGER
from tiny_models import save_bert

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, Span
from fednotes.data.formats import write
from fednotes.jobs.card import CARD, write_cards
from fednotes.jobs.job import Job
from fednotes.jobs.job_check import rehearse
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.parts import estimate_traffic, prepare
from fednotes.jobs.simulate import simulate
from fednotes.taggers.prompt_bart import PromptBartConfig
from fednotes.taggers.saving import load_model

NAMES = ("north", "south", "west")
DRUGS = ("zolvex", "mirtal", "pexor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the notes of three sites, public notes and an encoder."""
    place = tmp_path_factory.mktemp("sites")
    for name, drug in zip(NAMES, DRUGS, strict=True):
        write(make_notes(drug, 30), place / f"{name}.jsonl", "jsonl")
    write(make_notes("aspirin", 6), place / "public.jsonl", "jsonl")
    write(make_notes("aspirin", 5), place / "other.jsonl", "jsonl")
    pytest.importorskip("transformers")
    save_bert(place / "bert", max_position_embeddings=512)
    return place


def make_notes(drug: str, count: int) -> tuple[Document, ...]:
    notes = []
    for number in range(count):
        before = f"Case {number} took "
        span = Span(len(before), len(before) + len(drug), "Drug")
        notes.append(Document(f"{drug}-{number}", f"{before}{drug} .", (span,)))
    return tuple(notes)


def make_job(folder: Path, site: dict[str, Any] | None = None, **changes: Any) -> Job:
    """Return a job of three sites.

    Args:
        folder: Folder of the sites' files.
        site: Further keys of the site "south".
        **changes: Other tables of the job.
    """
    sites = {
        name: {"path": f"{name}.jsonl", "public": "public.jsonl"} for name in NAMES
    }
    sites["south"] |= site or {}
    table = {
        "method": "fedmd",
        "conditions": ["alone", "federated"],
        "training": {"rounds": 1, "first_epochs": 1, "local_epochs": 1},
        "model": TAGGER,
        "sites": sites,
        **changes,
    }
    return parse_job(table, "tiny", folder, "tiny.toml")


OWN: dict[str, Any] = {
    "model": {"kind": "token-classifier", "encoder": "bert", "train": "lora"},
    "training": {"learning_rate": 1e-3, "first_epochs": 2},
}


def test_a_site_trains_and_saves_its_own_kind_of_model(
    folder: Path, tmp_path: Path
) -> None:
    job = make_job(folder, OWN)
    _, _, parts = prepare(job)
    rehearse(job, parts)
    result = simulate(job, tmp_path)
    for condition, place in (("alone", "alone/{}"), ("federated", "federated")):
        for name in NAMES:
            path = tmp_path / place.format(name) / "sites" / name / "model"
            kind = load_model(path).config.kind
            assert kind == ("token-classifier" if name == "south" else "tagger")
            assert condition in result.sites[name]
    write_cards(tmp_path)
    for condition in ("alone/south", "federated"):
        card = (tmp_path / condition / "sites" / "south" / "model" / CARD).read_text()
        assert "`model.encoder` = bert\n" in card
        assert "`training.first_epochs` = 2\n" in card
        assert "`training.local_epochs` = 1\n" in card
        assert "hashed" not in card
    of_job = tmp_path / "federated" / "sites" / "west" / "model" / CARD
    assert "`training.first_epochs` = 1\n" in of_job.read_text()
    sent = tmp_path / "federated" / "sites" / "south" / "sent" / "round-1.tsv"
    assert sent.read_text().startswith("word\tB-Drug\tI-Drug\n")


def test_settings_of_a_site_replace_those_of_the_job(folder: Path) -> None:
    _, config, parts = prepare(make_job(folder, OWN))
    alone = {part.site: part.config for part in parts if part.condition == "alone"}
    assert [alone[name].first_epochs for name in NAMES] == [2, 3, 2]
    assert alone["south"].learning_rate == 1e-3
    assert alone["south"].model.encoder == str(folder / "bert")
    assert config.for_site("south").rounds == 1
    assert alone["south"].rounds == 0


def test_the_estimate_of_traffic_counts_the_public_words(folder: Path) -> None:
    """By hand: 6 notes of 5 words, 2 tags, 1 type, 4 bytes a number, 1 exchange."""
    job = make_job(folder, federation={"secure_sum": False})
    sites, config, _ = prepare(job)
    traffic = estimate_traffic(job, config, sites.data)
    assert traffic is not None
    assert (traffic.up, traffic.down) == (4 * (30 * 2 + 1), 4 * (30 * 2 + 1))
    text = str(traffic)
    assert "at most 1 round; in each, a site sends about 244 B" in text
    assert "(488 B per site in all rounds)" in text


@pytest.mark.parametrize(
    ("method", "site", "message"),
    [
        (
            "distill",
            {"model": TAGGER},
            r"\[sites.south.model\]: with method = 'distill'",
        ),
        ("fedner", {"training": {"epochs": 2}}, r"\[sites.south.training\]: with"),
        (
            "fedmd",
            {"training": {"rounds": 2}},
            "a site cannot set 'rounds' for itself",
        ),
        ("fedmd", {"training": {"batch_size": 0}}, r"south.training\]: batch_size = 0"),
        ("fedmd", {"model": {"kind": "taggr"}}, r"\[sites.south.model\]: unknown kind"),
        ("fedmd", {"model": 3}, "model"),
    ],
)
def test_wrong_settings_of_a_site_are_refused(
    method: str, site: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(folder, site, method=method, training={})


def test_sites_need_the_same_public_notes(folder: Path) -> None:
    with pytest.raises(ConfigError, match="have different public notes"):
        prepare(make_job(folder, {"public": "other.jsonl"}))
    with pytest.raises(ConfigError, match=r"sites.south.public: .* needs public notes"):
        prepare(make_job(folder, {"public": ""}))


def test_simulated_sites_have_the_public_notes_and_no_own_models(folder: Path) -> None:
    silos = {"number": 2}
    sites, config, _ = prepare(make_job(folder, silos=silos))
    assert [site.id for site in sites.data] == ["silo1", "silo2"]
    assert len({site.public.digest for site in sites.data}) == 1
    assert config.public_words == 30
    with pytest.raises(
        ConfigError, match=r"\[sites.south\]: \[silos\] distributes the notes"
    ):
        make_job(folder, OWN, silos=silos)


def test_other_methods_do_not_read_public_notes(folder: Path) -> None:
    job = make_job(folder, {"public": "missing.jsonl"}, method="fedner", training={})
    sites, _, _ = prepare(job)
    assert all(site.public is None for site in sites.data)


def test_differential_privacy_is_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(ConfigError, match="trained on the notes without noise"):
        make_job(folder, privacy={"epsilon": 8.0})


def test_a_description_of_a_type_that_no_site_has_is_refused(folder: Path) -> None:
    """Descriptions of the types of a left-out site stay allowed."""
    model = {
        "kind": "type-scorer",
        "encoder": "bert",
        "descriptions": {"Durg": "a medicine"},
    }
    settings: dict[str, Any] = {"method": "finetune", "training": {}}
    with pytest.raises(ConfigError, match="unknown type 'Durg': did you mean 'Drug'"):
        prepare(make_job(folder, model=model, **settings))

    model["descriptions"] = {"Drug": "a medicine", "Remedy": "what only south has"}
    job = make_job(
        folder,
        {"label_map": {"Drug": "Remedy"}},
        model=model,
        conditions=["left-out"],
        federation={"secure_sum": False},
        **settings,
    )
    _, config, _ = prepare(job)
    assert config.model.descriptions == model["descriptions"]


def test_words_for_a_type_that_no_site_has_are_refused() -> None:
    config = PromptBartConfig(label_words={"Durg": "medicine"})
    with pytest.raises(ConfigError, match="unknown type 'Durg': did you mean 'Drug'"):
        config.require_known_types(["Drug"])
