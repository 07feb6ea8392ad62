"""A job for real sites: what is added to it, and which files it may not name."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from applications import has_app

from fednotes.apps.deployment.site import AgreedSite, _Participation
from fednotes.apps.deployment.site_agreement import (
    Description,
    decode_descriptions,
    derive_config,
    describe_site,
    encode_descriptions,
)
from fednotes.apps.deployment.site_file import (
    insert_local_paths,
    load_site_data,
    parse_site_job,
    read_site_file,
)
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.types import TagSet
from fednotes.engines.launch import Setup
from fednotes.jobs.declaration import load_declared, parse_declared
from fednotes.taggers.saving import build_model, save_model
from fednotes.taggers.tagger import TaggerConfig

NER = 'method = "fedner"\n[model]\ntagger = "cnn-clstm-crf"\n'


def declared(folder: Path, text: str, *sites: str) -> dict[str, Any]:
    path = folder / "job.toml"
    path.write_text(text + "".join(f"[sites.{name}]\n" for name in sites))
    return load_declared(path)[1]


def site_file(folder: Path, more: str = "") -> Any:
    (folder / "notes.conll").write_text("Took\tO\naspirin\tB-Drug\n\n")
    path = folder / "site.toml"
    path.write_text(f'[data]\ntrain = "notes.conll"\ntest = "notes.conll"\n{more}')
    return read_site_file(path)


def test_three_sites_use_a_secure_sum_by_default(tmp_path: Path) -> None:
    assert declared(tmp_path, NER, "a", "b", "c")["job"]["federation"] == {
        "secure_sum": True
    }
    assert "federation" not in declared(tmp_path, NER, "a", "b")["job"]
    open_job = NER + "[federation]\nsecure_sum = false\ntimeout = 9\n"
    federation = declared(tmp_path, open_job, "a", "b", "c")["job"]["federation"]
    assert federation == {"secure_sum": False, "timeout": 9}
    with_default = declared(
        tmp_path, NER + "[federation]\ntimeout = 9\n", "a", "b", "c"
    )
    assert with_default["job"]["federation"] == {"secure_sum": True, "timeout": 9}


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd",
        "~/x",
        "../x.txt",
        "$TOKEN",
        "$UNSET",
        "private.txt",
        "x#y",
        "#private.txt#",  # as editors name their copies
        "minilm#/../private.txt",
        "minilm#first\n",
        "none#private.txt",
    ],
)
def test_a_job_opens_no_file_of_a_site(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither content nor presence of a file, nor a variable, is in what the server is
    told."""
    monkeypatch.setenv("TOKEN", "hunter2")
    (tmp_path / "private.txt").write_text("jane smith")
    table = {**_table(NER), "model": {"tagger": "cnn-clstm-crf", "word_vectors": place}}
    with pytest.raises(
        ConfigError, match=r"word_vectors names a file: give its path"
    ) as refusal:
        parse_site_job({"name": "j", "job": table}, "a", site_file(tmp_path))
    assert not {"hunter2", "jane", "passwd", place} & set(str(refusal.value).split())


@pytest.mark.parametrize("encoder", ["minilm", "minilm#first#layers=4"])
def test_a_job_may_name_the_packaged_encoder_with_options(
    encoder: str, tmp_path: Path
) -> None:
    table = {
        **_table(NER),
        "model": {"tagger": "cnn-clstm-crf", "contextual": encoder},
        "sites": {"a": {}},
    }
    job = parse_site_job({"name": "j", "job": table}, "a", site_file(tmp_path))
    assert job.config.model.contextual == encoder


FILE_KEYS = [
    ("model", "word_vectors"),
    ("model", "contextual"),
    ("model", "encoder"),
    ("model", "backbone"),
]
if has_app("phenotyping"):
    FILE_KEYS += [
        ("model", "representation"),
        ("concepts", "dictionary"),
        ("concepts", "vectors"),
        ("text", "encoder"),
    ]


@pytest.mark.parametrize(("table", "key"), FILE_KEYS)
def test_a_job_may_name_no_file_of_a_site_in_any_table(
    table: str, key: str, tmp_path: Path
) -> None:
    """Refused, unless the site's own file says where this machine keeps it."""
    job = {"name": "j", "job": {**_table(NER), table: {key: "/etc/passwd"}}}
    with pytest.raises(ConfigError, match=rf"\[{table}\]: {key} names a file: give"):
        parse_site_job(job, "a", site_file(tmp_path))

    (tmp_path / "own.txt").write_text("")
    file = site_file(tmp_path, f'[files]\n{key} = "own.txt"\n')
    assert insert_local_paths(file, job["job"])[table] == {
        key: str(tmp_path / "own.txt")
    }


def test_other_values_of_a_job_are_used_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "cnn-clstm-crf")
    table = {**_table(NER), "model": {"tagger": "$TOKEN"}}
    with pytest.raises(
        ConfigError, match=r"\[model\] tagger: a job may not name an environment"
    ) as refusal:
        parse_site_job({"name": "j", "job": table}, "a", site_file(tmp_path))
    assert "cnn" not in str(refusal.value)


def test_a_file_of_the_site_replaces_that_of_the_job(tmp_path: Path) -> None:
    """Its own place, for whatever the job calls it."""
    (tmp_path / "vectors.txt").write_text("took 0.5 1\naspirin 1 2\n")
    table = {
        **_table(NER),
        "model": {"tagger": "cnn-clstm-crf", "word_vectors": "/x/glove.txt"},
    }
    file = site_file(tmp_path, '[files]\nword_vectors = "vectors.txt"\n')
    job = parse_site_job({"name": "j", "job": table}, "a", file)
    assert job.config.model.word_vectors == str(tmp_path / "vectors.txt")
    plain = parse_site_job({"name": "j", "job": _table(NER)}, "a", file)
    assert plain.config.model.word_vectors == ""


# ---- sites with their own models, and public notes -----------------------------------

OWN_MODELS = """
method = "fedmd"
[model]
tagger = "cnn-clstm-crf"
[sites.a]
[sites.a.training]
learning_rate = 1e-2
[sites.b.model]
kind = "token-classifier"
encoder = "biobert"
"""


def own_models(folder: Path) -> dict[str, Any]:
    path = folder / "job.toml"
    path.write_text(OWN_MODELS)
    return load_declared(path)[1]


def test_a_site_reads_its_own_model_and_no_other_sites(tmp_path: Path) -> None:
    """Site a lacks the encoder of site b."""
    declaration = own_models(tmp_path)
    job = parse_site_job(declaration, "a", site_file(tmp_path))
    config = job.config.for_site("a")
    assert config.model.kind == "tagger"
    assert config.learning_rate == 1e-2
    with pytest.raises(
        ConfigError, match=r"\[sites.b.model\]: encoder names a file: give its path"
    ):
        parse_site_job(declaration, "b", site_file(tmp_path))

    (tmp_path / "encoder").mkdir()
    file = site_file(tmp_path, '[files]\nencoder = "encoder"\n')
    job = parse_site_job(declaration, "b", file)
    assert job.config.for_site("b").model.encoder == str(tmp_path / "encoder")


OWN_MODEL = """
[data.model]
kind = "encoder-tagger"
encoder = "encoder"
[data.training]
learning_rate = 5e-4
"""


def test_a_site_may_choose_its_model_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    job = parse_site_job(own_models(tmp_path), "b", site_file(tmp_path, OWN_MODEL))
    config = job.config.for_site("b")
    assert config.model.kind == "encoder-tagger"
    assert config.model.encoder == str(tmp_path / "encoder")
    assert config.learning_rate == 5e-4


def test_the_card_at_a_site_describes_the_model_of_its_own_file(tmp_path: Path) -> None:
    """It names the encoder without its folder, which is private."""
    (tmp_path / "encoder").mkdir()
    declaration = own_models(tmp_path)
    file = site_file(tmp_path, OWN_MODEL)
    setup = Setup(
        kit=tmp_path,
        site="b",
        job=declaration,
        job_id="1",
        run="run1",
        sites=("a", "b"),
        min_sites=2,
        folder=tmp_path,
        state=tmp_path,
    )
    job = parse_site_job(declaration, "b", file)
    participation = _Participation(
        setup=setup,
        file=file,
        job=job,
        table=declaration,
        data=None,
        description=Description(),
        draws=None,
    )
    model = participation.results / "model"
    model.mkdir(parents=True)
    save_model(build_model(TaggerConfig(hashed_words=4), TagSet(("Drug",)), 1), model)
    participation.write_card()
    card = (model / "README.md").read_text()
    assert "`model.encoder` = encoder\n" in card
    assert "`training.learning_rate` = 0.0005\n" in card
    assert "model.tagger" not in card
    assert str(tmp_path) not in card


def test_a_method_with_one_model_ignores_the_one_of_a_sites_file(
    tmp_path: Path,
) -> None:
    file = site_file(tmp_path, '[data.model]\nkind = "encoder-tagger"\n')
    job = parse_site_job({"name": "j", "job": _table(NER)}, "a", file)
    assert job.config.model.tagger == "cnn-clstm-crf"


def test_sites_agree_on_public_notes_by_their_digest(tmp_path: Path) -> None:
    """The server has neither the notes nor any model."""
    (tmp_path / "public.conll").write_text("Some\tO\npublic\tO\nwords\tO\n\n")
    file = site_file(tmp_path)
    data = {**file.data, "public": "public.conll", "hold_out": 0.0, "repeats": "keep"}
    data["valid"] = data["train"]
    job = parse_site_job(own_models(tmp_path), "a", replace(file, data=data))
    (notes,) = load_site_data(job).data
    assert notes.public is not None
    described = describe_site(job, notes)
    assert described.public == notes.public.digest
    assert described.encoder == ""

    server_job = parse_declared(own_models(tmp_path), tmp_path, "job")
    both = decode_descriptions(encode_descriptions({"a": described, "b": described}))
    config = derive_config(server_job, both)
    assert config.shared_types == ("Drug",)
    assert config.public_words == 0
    assert derive_config(job, both).shared_types == ("Drug",)
    with pytest.raises(ConfigError, match="'a' and 'b' have different public notes"):
        derive_config(
            server_job, {"a": described, "b": replace(described, public="5" * 64)}
        )


def _table(text: str) -> dict[str, Any]:
    return json.loads(json.dumps({**tomllib.loads(text), "sites": {"a": {}}}))


@pytest.mark.parametrize("key", ["pause", "timeout"])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 1e300])
def test_a_job_cannot_keep_the_server_and_the_sites_busy(
    key: str, seconds: float, tmp_path: Path
) -> None:
    """Without a pause, the server would ask the sites hundreds of times a second until
    people have approved or rejected the job."""
    table = {**_table(NER), "federation": {key: seconds}, "sites": {"a": {}}}
    bound = "at most 10,000,000" if seconds > 1 else r"at least 0\.1"
    with pytest.raises(ConfigError, match=rf"\b{key} = .*: expected {bound}"):
        parse_site_job({"name": "j", "job": table}, "a", site_file(tmp_path))


def test_a_state_from_before_the_agreement_leaves_a_new_site_without_one(
    tmp_path: Path,
) -> None:
    def make_site() -> AgreedSite:
        return AgreedSite(
            "a",
            parse_declared(declared(tmp_path, NER, "a", "b"), tmp_path, "job"),
            ("a", "b"),
            description=Description(),
            make_site=lambda config: pytest.fail("the sites have not agreed"),
            results=tmp_path,
            write_card=lambda: pytest.fail("the run has not ended"),
        )

    site = make_site()
    site.restore(make_site().state())
    with pytest.raises(TrainingError, match="has not agreed with the others yet"):
        site.finish({})
