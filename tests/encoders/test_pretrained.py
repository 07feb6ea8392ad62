"""Opening of local directories, with a tiny random BERT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import save_encoder, save_tokenizer

from fednotes.core.errors import ModelError
from fednotes.encoders.pretrained import open_config, open_pretrained, write_pretrained

transformers = pytest.importorskip("transformers")

WORDS = [*"abcdefghij"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("bert"), words=WORDS)


def test_a_model_is_opened_as_by_the_library_and_new_weights_are_reported(
    bert: Path,
) -> None:
    """The states equal those of the library; a head that was not saved is named."""
    tokenizer, model, missing = open_pretrained(bert, "AutoModel")
    assert (missing, model.training, tokenizer.mask_token_id) == ((), False, 4)
    ids = torch.tensor([[2, 5, 6, 3]])
    expected = transformers.BertModel.from_pretrained(bert).eval()(ids)[0]
    assert torch.equal(model(ids)[0], expected)
    names = {"num_labels": 3, "id2label": {0: "O", 1: "B", 2: "I"}}
    _, tagger, missing = open_pretrained(
        bert, "AutoModelForTokenClassification", **names
    )
    assert missing == ("classifier.bias", "classifier.weight")
    assert tagger.config.id2label[2] == "I"


def test_new_weights_are_the_same_on_each_load(bert: Path) -> None:
    """They do not depend on the global random state, and do not change it."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = open_pretrained(bert, "AutoModelForTokenClassification")[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = open_pretrained(bert, "AutoModelForTokenClassification")[1]
    assert torch.equal(first.classifier.weight, second.classifier.weight)
    assert bool(first.classifier.weight.any())


def test_weights_of_another_shape_are_replaced_only_on_request(
    bert: Path, tmp_path: Path
) -> None:
    transformers.BertForTokenClassification.from_pretrained(
        bert, num_labels=5
    ).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, WORDS)
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_pretrained(tmp_path, "AutoModelForTokenClassification", num_labels=3)
    _, model, missing = open_pretrained(
        tmp_path,
        "AutoModelForTokenClassification",
        num_labels=3,
        ignore_mismatched_sizes=True,
    )
    assert missing == ("classifier.bias", "classifier.weight")
    assert model.classifier.weight.shape == (3, 16)


def test_a_missing_or_damaged_directory_is_refused_in_one_line(
    bert: Path, tmp_path: Path
) -> None:
    """Each message is one line."""
    with pytest.raises(ModelError, match="no such directory"):
        open_pretrained(tmp_path / "none", "AutoModel")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_config(tmp_path)
    path = tmp_path / "m"
    shutil.copytree(bert, path)
    save_tokenizer(path, [*WORDS, "zz"])
    with pytest.raises(
        ModelError, match=r"tokenizer has 16 tokens, but the model's vocabulary has 15"
    ):
        open_pretrained(path, "AutoModel")
    save_tokenizer(path, WORDS[:-1])  # fewer tokens than rows are common: padded tables
    open_pretrained(path, "AutoModel")
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_pretrained(path, "AutoModel")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        open_pretrained(path, "AutoModel")


def test_a_written_folder_has_no_path_of_this_machine(
    bert: Path, tmp_path: Path
) -> None:
    """It can be read again, and none of its text files has a path of this machine."""
    tokenizer, model, _ = open_pretrained(bert, "AutoModel")
    write_pretrained(tmp_path, model, tokenizer)
    again = open_pretrained(tmp_path, "AutoModel")[1]
    ids = torch.tensor([[2, 5, 6, 3]])
    assert torch.equal(model(ids)[0], again(ids)[0])
    for file in tmp_path.glob("*.json"):
        assert str(bert) not in json.dumps(json.loads(file.read_text()))


@pytest.mark.parametrize("model_type", ["bert", "evil"])
def test_code_in_a_directory_is_never_run(
    bert: Path, tmp_path: Path, model_type: str
) -> None:
    """An `auto_map` is ignored, whether the type of the model is known or not."""
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    (folder / "evil.py").write_text(code)
    classes = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
    config = json.loads((folder / "config.json").read_text())
    config.update(auto_map=classes, model_type=model_type)
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    file.write_text(json.dumps(settings))
    if model_type == "bert":
        assert type(open_pretrained(folder, "AutoModel")[1]).__name__ == "BertModel"
    else:
        with pytest.raises(ModelError, match="cannot be loaded"):
            open_pretrained(folder, "AutoModel")
    assert not marker.exists()
