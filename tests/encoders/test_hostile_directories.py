"""A stranger's encoder directory causes neither network access nor endless work."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.allocation import MAX_TENSORS
from fednotes.core.errors import ModelError
from fednotes.encoders import pretrained
from fednotes.encoders.pretrained import open_config, open_pretrained, open_tokenizer


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(content | changes), "utf-8")


@pytest.fixture
def hostile(bert: Path, tmp_path: Path) -> Path:
    """Return a copy of a small BERT's whole directory, for a test to change."""
    return Path(shutil.copytree(bert, tmp_path / "hostile"))


def replace_letter(times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


def character_table(replacement: bytes, index_bytes: int = 4) -> dict[str, Any]:
    """Return a normalizer of SentencePiece with a table of one replacement."""
    table = index_bytes.to_bytes(4, "little") + bytes(index_bytes) + replacement
    text = base64.b64encode(table + b"\0").decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def use_all_rules(directory: Path) -> None:
    """Have the whole tokenizer.json read; the class of BERT ignores its normalizer."""
    file = directory / "tokenizer_config.json"
    change_json(file, tokenizer_class="PreTrainedTokenizerFast")


def test_a_model_named_by_a_configuration_is_not_fetched(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the host name of the server is looked up.

    Downloads from the hub work again afterwards.
    """
    from huggingface_hub import constants

    looked_up: list[object] = []
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *name, **_: looked_up.append(name)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    change_json(
        hostile / "config.json",
        model_type="dpt",
        backbone="somebody/model",
        use_pretrained_backbone=True,
        is_hybrid=False,
    )
    with pytest.raises(ModelError, match="names another model, which is not fetched"):
        open_pretrained(hostile, "AutoModel")
    assert looked_up == []
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.slow
def test_a_million_small_layers_are_not_built(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MAX_LAYERS", 10**6)
    change_json(
        hostile / "config.json",
        num_hidden_layers=10**6,
        hidden_size=1,
        intermediate_size=1,
        num_attention_heads=1,
    )
    with pytest.raises(ModelError, match=f"over {MAX_TENSORS:,} tensors"):
        open_pretrained(hostile, "AutoModel")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**9), ("block_repeats", [1, 10**9]), ("n_layer", 1e9)],
)
def test_layers_that_share_their_weights_are_bounded(
    hostile: Path, key: str, value: Any
) -> None:
    """A thousand million layers of ALBERT are opened at once, but never end."""
    change_json(hostile / "config.json", model_type="albert", **{key: value})
    with pytest.raises(ModelError, match=rf"{key}: more than 1,000 layers"):
        open_pretrained(hostile, "AutoModel")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("as_list", [True, False])
def test_a_tokenizer_of_very_many_special_tokens_is_refused(
    hostile: Path, file: str, as_list: bool
) -> None:
    """The library would compare each with all others: 155,000 take 87 s."""
    names = [f"q{number}" for number in range(pretrained.MAX_SPECIAL_TOKENS + 1)]
    changes: dict[str, Any] = {f"{name}_token": name for name in names}
    if as_list:
        changes = {"additional_special_tokens": names}
    if not (hostile / file).exists():
        (hostile / file).write_text("{}", "utf-8")
    change_json(hostile / file, **changes)
    with pytest.raises(ModelError, match="special tokens: the tokenizer is damaged"):
        open_tokenizer(hostile)


@pytest.mark.parametrize("step", ["normalizer", "pre_tokenizer"])
def test_a_tokenizer_that_makes_texts_endless_is_refused(
    hostile: Path, step: str
) -> None:
    """Each of three rules replaces one letter by a thousand."""
    parts = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[step]
    inner = {"type": "Sequence", parts: [replace_letter(1000)] * 2}
    rules = {"type": "Sequence", parts: [inner, replace_letter(1000)]}
    change_json(hostile / "tokenizer.json", **{step: rules})
    with pytest.raises(ModelError, match=r"a text [\d,]+ times as long"):
        open_tokenizer(hostile)


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "ByteLevel"},
        {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "x"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    ],
)
def test_a_rule_that_is_repeated_until_texts_are_endless_is_refused(
    hostile: Path, rule: dict[str, Any]
) -> None:
    """Each rule doubles a text, so thirty of them made a billion letters of one."""
    rules = {"type": "Sequence", "normalizers": [rule] * 30}
    change_json(hostile / "tokenizer.json", normalizer=rules)
    with pytest.raises(ModelError, match=r"a text [\d,]+ times as long"):
        open_tokenizer(hostile)


def test_a_tokenizer_that_adds_endless_special_tokens_is_refused(
    hostile: Path,
) -> None:
    """A template of 125 KB put ten million tokens around each text."""
    mark = {"id": "[CLS]", "ids": [0] * 10_000, "tokens": ["[CLS]"] * 10_000}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    change_json(
        hostile / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * 1000
            + text[:1],
            "pair": text,
            "special_tokens": {"[CLS]": mark},
        },
    )
    use_all_rules(hostile)
    with pytest.raises(ModelError, match="puts 10,000,000 special tokens around"):
        open_tokenizer(hostile)


def test_a_table_of_characters_that_makes_texts_endless_is_refused(
    hostile: Path,
) -> None:
    """A table of 100 KB made a note of 1,000 letters take 3 GB."""
    table = character_table(b"X" * 100_000)
    change_json(hostile / "tokenizer.json", normalizer=table)
    with pytest.raises(ModelError, match="a text 100,000 times as long"):
        open_tokenizer(hostile)


def test_a_table_of_characters_of_a_false_size_is_refused(hostile: Path) -> None:
    """The library would allocate the memory for an index of 4 GB."""
    table = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    change_json(hostile / "tokenizer.json", normalizer=table)
    with pytest.raises(ModelError, match="its table of characters is damaged"):
        open_tokenizer(hostile)


def test_the_rules_of_the_tokenizer_that_is_opened_are_checked(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library can make a tokenizer of other files than tokenizer.json."""
    change_json(hostile / "tokenizer.json", normalizer=replace_letter(10_000))
    use_all_rules(hostile)
    monkeypatch.setattr(pretrained, "_read_steps", lambda _: ())
    with pytest.raises(ModelError, match="a text 10,000 times as long"):
        open_tokenizer(hostile)


@pytest.mark.parametrize("limit", ["", {}, float("inf"), float("nan"), -1, 0])
def test_a_length_that_is_not_a_valid_number_is_refused(
    hostile: Path, limit: object
) -> None:
    change_json(hostile / "tokenizer_config.json", model_max_length=limit)
    with pytest.raises(ModelError, match=r"model_max_length = .* is not a number of"):
        open_tokenizer(hostile)


def test_a_model_for_other_data_than_text_is_refused_in_one_line(hostile: Path) -> None:
    """It has no table of sub-words, and its class raises an error for that."""
    change_json(hostile / "config.json", model_type="vision-text-dual-encoder")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_pretrained(hostile, "AutoModel")


def test_a_tokenizer_with_few_replacements_is_accepted(hostile: Path) -> None:
    rules = {"type": "Sequence", "normalizers": [replace_letter(3)] * 2}
    change_json(hostile / "tokenizer.json", normalizer=rules)
    assert open_tokenizer(hostile).is_fast


@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "templates"])
def test_a_link_that_leads_out_of_the_directory_is_refused(
    hostile: Path, tmp_path: Path, name: str
) -> None:
    """A tokenizer that is saved again would hold a private key word by word."""
    (tmp_path / "id_rsa").write_text("private")
    (hostile / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ModelError, match=f"{name}: a link that leads out"):
        open_pretrained(hostile, "AutoModel")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["vocab", "init_inputs", "vocab_file"])
def test_settings_that_name_a_file_elsewhere_are_refused(
    hostile: Path, tmp_path: Path, file: str, key: str
) -> None:
    """A BERT without a tokenizer.json took the lines of this file as its vocabulary."""
    secret = tmp_path / "id_rsa"
    secret.write_text("private\n")
    (hostile / "tokenizer.json").unlink()
    value = [str(secret)] if key == "init_inputs" else str(secret)
    settings = {"tokenizer_class": "BertTokenizer", key: value}
    (hostile / file).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"{file}: {key} can name another file"):
        open_tokenizer(hostile)


def test_a_version_of_the_tokenizer_in_another_file_is_refused(hostile: Path) -> None:
    """Its rules would not be those that are checked."""
    change_json(
        hostile / "tokenizer_config.json",
        fast_tokenizer_files=["tokenizer.json", "../tokenizer.4.json"],
    )
    with pytest.raises(ModelError, match="fast_tokenizer_files can name another file"):
        open_tokenizer(hostile)


def test_paths_of_the_machine_where_a_tokenizer_was_saved_are_accepted(
    hostile: Path,
) -> None:
    change_json(
        hostile / "tokenizer_config.json",
        special_tokens_map_file="/home/author/.cache/special_tokens_map.json",
        vocab_file=str(hostile / "config.json"),
        vocab={"a": 0},  # of a tokenizer that was made in memory
        init_inputs=[],
        fast_tokenizer_files=["tokenizer.json"],
    )
    assert open_tokenizer(hostile).is_fast


def test_links_within_the_hugging_face_cache_are_followed(
    hostile: Path, tmp_path: Path
) -> None:
    """Nor is a link within the directory refused, or one of the weights."""
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "4d"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(hostile.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs", str(number)))
    (snapshot / "notes.txt").symlink_to("config.json")
    open_pretrained(snapshot, "AutoModel")
    shutil.move(blobs, tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="a link that leads out"):
        open_pretrained(snapshot, "AutoModel")


def test_weights_may_be_a_link_out_of_the_directory(
    hostile: Path, tmp_path: Path
) -> None:
    shutil.move(hostile / "model.safetensors", tmp_path / "weights")
    (hostile / "model.safetensors").symlink_to(tmp_path / "weights")
    open_pretrained(hostile, "AutoModel")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_that_names_foreign_code_is_refused(
    hostile: Path, key: str
) -> None:
    """transformers would run a package of a hub that was fetched before."""
    for config in ({key: "somebody/kernel"}, {"text_config": {key: "a/b@main:f"}}):
        change_json(hostile / "config.json", **config)
        with pytest.raises(ModelError, match=f"{key} names code that is not part"):
            open_pretrained(hostile, "AutoModel")
    change_json(hostile / "config.json", **{key: "sdpa", "text_config": None})
    open_pretrained(hostile, "AutoModel")


@pytest.mark.parametrize(
    "changes",
    [{"num_labels": 10**10}, {"id2label": {str(n): "x" for n in range(100_001)}}],
    ids=["counted", "listed"],
)
def test_an_unbounded_number_of_labels_is_refused_before_names_are_generated(
    hostile: Path, changes: dict[str, Any]
) -> None:
    change_json(hostile / "config.json", **changes)
    for opened in (open_config, open_tokenizer):
        with pytest.raises(ModelError, match="more than 100,000 labels"):
            opened(hostile)


@pytest.mark.parametrize("what", ["a long name", "many tensors", "a length"])
def test_the_header_of_a_weights_file_is_bounded_before_it_is_parsed(
    hostile: Path, what: str
) -> None:
    """A name of 90 MB took 5 GB of memory; a million tensors took minutes."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    names = {
        "a long name": ["x" * 2**24],
        "many tensors": [str(number) for number in range(MAX_TENSORS + 1)],
        "a length": [],
    }
    header = json.dumps(dict.fromkeys(names[what], entry)).encode()
    length = len(header) if names[what] else 2**63
    weights = struct.pack("<Q", length) + header
    (hostile / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match="names more than 20,000 tensors"):
        open_pretrained(hostile, "AutoModel")


def test_gradient_checkpointing_of_an_earlier_training_is_dropped(
    hostile: Path,
) -> None:
    """With gradient checkpointing, training ended with an error of torch."""
    change_json(hostile / "config.json", gradient_checkpointing=True)
    _, model, _ = open_pretrained(hostile, "AutoModelForTokenClassification")
    settings = [getattr(each, "gradient_checkpointing", 0) for each in model.modules()]
    assert not any(settings)


def test_a_tokenizer_that_makes_its_library_panic_is_refused_in_one_line(
    hostile: Path,
) -> None:
    """Its index of characters is empty, and an added token is looked up in it."""
    file = hostile / "tokenizer.json"
    token = json.loads(file.read_text("utf-8"))["added_tokens"][0]
    change_json(
        file,
        normalizer=character_table(b"y", index_bytes=1),
        added_tokens=[token | {"normalized": True}],
    )
    use_all_rules(hostile)
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_tokenizer(hostile)


def test_an_interrupt_while_a_model_is_loaded_is_passed_on(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "_open_tokenizer", stop)
    with pytest.raises(KeyboardInterrupt):
        open_tokenizer(hostile)
