"""The ELMo loader, compared with a program of NumPy and loops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from passages import passage, passages

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.work import reporting_to
from fednotes.encoders.elmo import BEGIN_SENTENCE, Elmo, encode_characters, find_files
from fednotes.encoders.features import load_encoder

h5py = pytest.importorskip("h5py")

SENTENCES = [
    ["No", "nausea", "after", "metoprolol", "."],
    ["Zoloft"],
    ["β-blocker", "naïve", "—", "x" * 60, "", "é" * 30],
    [],
    ["No", "pain", "No", "pain", "No"],
]
OPTIONS: dict[str, Any] = {
    "char_cnn": {
        "activation": "relu",
        "embedding": {"dim": 5},
        "filters": [[1, 4], [2, 5], [3, 6]],
        "max_characters_per_token": 50,
        "n_characters": 262,
        "n_highway": 2,
    },
    "lstm": {
        "dim": 9,
        "projection_dim": 6,
        "n_layers": 2,
        "cell_clip": 0.4,
        "proj_clip": 0.3,
        "use_skip_connections": True,
    },
}
VARIANTS = {
    "published": OPTIONS,
    "three layers, tanh, short words, no clip": {
        "char_cnn": {
            **OPTIONS["char_cnn"],
            "activation": "tanh",
            "max_characters_per_token": 12,
        },
        "lstm": {
            **OPTIONS["lstm"],
            "n_layers": 3,
            "cell_clip": None,
            "proj_clip": None,
        },
    },
    "no highway, no projections, no skip": {
        "char_cnn": {**OPTIONS["char_cnn"], "n_highway": 0},
        "lstm": {
            **OPTIONS["lstm"],
            "dim": 15,
            "projection_dim": 15,
            "use_skip_connections": False,
        },
    },
}


def write(
    directory: Path, options: dict[str, Any], seed: int = 0
) -> dict[str, np.ndarray]:
    """Write a random model in the published layout; return its arrays."""
    rng = np.random.default_rng(seed)
    cnn, lstm = options["char_cnn"], options["lstm"]
    n, embedding = sum(f for _, f in cnn["filters"]), cnn["embedding"]["dim"]
    cell, state = lstm["dim"], lstm["projection_dim"]
    shapes: dict[str, tuple[int, ...]] = {"char_embed": (261, embedding)}
    for i, (width, filters) in enumerate(cnn["filters"]):
        shapes[f"CNN/W_cnn_{i}"] = (1, width, embedding, filters)
        shapes[f"CNN/b_cnn_{i}"] = (filters,)
    for k in range(cnn["n_highway"]):
        for part in ("carry", "transform"):
            shapes[f"CNN_high_{k}/W_{part}"], shapes[f"CNN_high_{k}/b_{part}"] = (
                (n, n),
                (n,),
            )
    if n != state:
        shapes["CNN_proj/W_proj"], shapes["CNN_proj/b_proj"] = (n, state), (state,)
    for way in range(2):
        for layer in range(lstm["n_layers"]):
            name = f"RNN_{way}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            shapes[f"{name}/W_0"], shapes[f"{name}/B"] = (
                (2 * state, 4 * cell),
                (4 * cell,),
            )
            if state < cell:
                shapes[f"{name}/W_P_0"] = (cell, state)
    weights = {name: rng.normal(0, 0.7, shape) for name, shape in shapes.items()}
    directory.mkdir(exist_ok=True)
    (directory / "tiny_options.json").write_text(json.dumps(options))
    with h5py.File(directory / "tiny_weights.hdf5", "w") as file:
        for name, array in weights.items():
            file[name] = array
    return weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference_word(
    ids: list[int], w: dict[str, np.ndarray], options: dict[str, Any]
) -> np.ndarray:
    """Compute one word: embedding, convolutions by loops, highway layers,
    projection."""
    cnn = options["char_cnn"]
    length = cnn["max_characters_per_token"]
    embedded = np.array([w["char_embed"][i] for i in ids + [260] * (length - len(ids))])
    act = {"relu": lambda v: max(v, 0.0), "tanh": np.tanh}[cnn["activation"]]
    x = []
    for i, (width, filters) in enumerate(cnn["filters"]):
        for f in range(filters):
            kernel = w[f"CNN/W_cnn_{i}"][0, :, :, f]
            sums = [
                np.sum(embedded[p : p + width] * kernel)
                for p in range(length - width + 1)
            ]
            x.append(act(max(sums) + w[f"CNN/b_cnn_{i}"][f]))
    x = np.array(x)
    for k in range(cnn["n_highway"]):
        gate = sigmoid(x @ w[f"CNN_high_{k}/W_carry"] + w[f"CNN_high_{k}/b_carry"])
        transformed = np.maximum(
            x @ w[f"CNN_high_{k}/W_transform"] + w[f"CNN_high_{k}/b_transform"], 0
        )
        x = gate * transformed + (1 - gate) * x
    if "CNN_proj/W_proj" in w:
        x = x @ w["CNN_proj/W_proj"] + w["CNN_proj/b_proj"]
    return x


def reference_lstm(
    inputs: list[np.ndarray],
    prefix: str,
    w: dict[str, np.ndarray],
    lstm: dict[str, Any],
) -> list[np.ndarray]:
    """Run one LSTM over one sequence, step by step."""
    n = lstm["dim"]
    h, c, out = np.zeros(lstm["projection_dim"]), np.zeros(n), []
    for x in inputs:
        z = np.concatenate([x, h]) @ w[f"{prefix}/W_0"] + w[f"{prefix}/B"]
        i, m, f, o = z[:n], z[n : 2 * n], z[2 * n : 3 * n], z[3 * n :]
        c = sigmoid(f + 1.0) * c + sigmoid(i) * np.tanh(m)
        if lstm["cell_clip"]:
            c = np.clip(c, -lstm["cell_clip"], lstm["cell_clip"])
        h = sigmoid(o) * np.tanh(c)
        if f"{prefix}/W_P_0" in w:
            h = h @ w[f"{prefix}/W_P_0"]
            if lstm["proj_clip"]:
                h = np.clip(h, -lstm["proj_clip"], lstm["proj_clip"])
        out.append(h)
    return out


def reference(
    sentence: list[str], w: dict[str, np.ndarray], options: dict[str, Any]
) -> np.ndarray:
    """Return (words, layers, 2 * state) of one sentence on its own."""
    room = options["char_cnn"]["max_characters_per_token"] - 2
    words = [[258, 256, 259]]
    words += [[258, *word.encode("utf-8")[:room], 259] for word in sentence]
    words += [[258, 257, 259]]
    tokens = [reference_word(ids, w, options) for ids in words]
    layers = [[np.concatenate([t, t]) for t in tokens]]
    ahead, back = tokens, tokens[::-1]
    for layer in range(options["lstm"]["n_layers"]):
        name = f"RNN/MultiRNNCell/Cell{layer}/LSTMCell"
        new_ahead = reference_lstm(ahead, f"RNN_0/{name}", w, options["lstm"])
        new_back = reference_lstm(back, f"RNN_1/{name}", w, options["lstm"])
        if layer and options["lstm"]["use_skip_connections"]:
            new_ahead = [a + b for a, b in zip(new_ahead, ahead, strict=True)]
            new_back = [a + b for a, b in zip(new_back, back, strict=True)]
        ahead, back = new_ahead, new_back
        layers.append([np.concatenate(p) for p in zip(ahead, back[::-1], strict=True)])
    return np.array(layers).transpose(1, 0, 2)[1:-1]


def load(directory: Path) -> Elmo:
    files = find_files(directory)
    assert files is not None
    return Elmo(*files, dtype=torch.float64)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_layers_equal_those_of_the_numpy_program(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Every layer of every word, against `reference` above."""
    weights = write(tmp_path / "m", options)
    elmo = load(tmp_path / "m")
    expected = np.concatenate([reference(s, weights, options) for s in SENTENCES if s])
    vectors = elmo.compute_hidden(passages(SENTENCES)).numpy()
    assert vectors.shape == (sum(map(len, SENTENCES)), elmo.layers, elmo.dim)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.1


def test_reading_can_be_stopped_between_batches(tmp_path: Path) -> None:
    write(tmp_path / "m", OPTIONS)
    listener = mock.Mock()
    listener.advance.side_effect = InterruptedError
    with pytest.raises(InterruptedError), reporting_to(listener):
        load(tmp_path / "m").compute_hidden(passages(SENTENCES))
    listener.begin.assert_called_once_with("reading sentences", None)
    listener.advance.assert_called_once_with(1)


def test_batches_padding_and_order_do_not_change_vectors(tmp_path: Path) -> None:
    """A sentence alone, among longer ones, and after any others: no state is carried."""
    write(tmp_path / "m", OPTIONS)
    elmo = load(tmp_path / "m")
    alone = torch.cat([elmo.compute_hidden([passage(s)]) for s in SENTENCES])
    torch.testing.assert_close(
        elmo.compute_hidden(passages(SENTENCES)), alone, rtol=0, atol=1e-12
    )
    long = [["word"] * 90, *SENTENCES]
    torch.testing.assert_close(
        elmo.compute_hidden(passages(long))[90:], alone, rtol=0, atol=1e-12
    )
    assert torch.equal(
        elmo.compute_hidden(passages(SENTENCES)),
        elmo.compute_hidden(passages(SENTENCES)),
    )


def test_characters_have_the_published_ids() -> None:
    """The published scheme, by hand: 258 bytes 259, 260 behind, each plus one."""
    assert encode_characters("né", 8).tolist() == [
        259,
        111,
        196,
        170,
        260,
        261,
        261,
        261,
    ]
    assert encode_characters("abcdef", 5).tolist() == [259, 98, 99, 100, 260]
    assert encode_characters(BEGIN_SENTENCE, 5).tolist() == [259, 257, 260, 261, 261]
    assert encode_characters("").shape == (50,)


def test_load_encoder_opens_elmo(tmp_path: Path) -> None:
    """By directory, float16, one object a process, a new one when the file changes."""
    write(tmp_path / "m", OPTIONS)
    encoder = load_encoder(str(tmp_path / "m"))
    assert (encoder.layers, encoder.dim) == (3, 12)
    vectors = encoder.encode(passages(SENTENCES))
    assert vectors.dtype == np.float16
    np.testing.assert_allclose(
        vectors,
        load(tmp_path / "m").compute_hidden(passages(SENTENCES)),
        atol=1e-3,
        rtol=1e-3,
    )
    assert load_encoder(str(tmp_path / "m")) is encoder
    write(tmp_path / "m", OPTIONS, seed=1)
    assert load_encoder(str(tmp_path / "m")).fingerprint != encoder.fingerprint
    with pytest.raises(ConfigError, match="ELMo takes no options"):
        load_encoder(f"{tmp_path / 'm'}#first")


def test_an_error_names_a_damaged_file(tmp_path: Path) -> None:
    """A missing dataset, a wrong shape, NaN, no HDF5, no JSON: one clear error each."""
    directory = tmp_path / "m"
    path = directory / "tiny_weights.hdf5"

    def broken(name: str, array: np.ndarray | None) -> None:
        write(directory, OPTIONS)
        with h5py.File(path, "a") as file:
            del file[name]
            if array is not None:
                file[name] = array

    broken("CNN/b_cnn_1", None)
    with pytest.raises(
        ModelError, match="dataset 'CNN/b_cnn_1' is missing or unreadable"
    ):
        load(directory)
    broken("CNN_proj/W_proj", np.zeros((3, 3)))
    with pytest.raises(
        ModelError, match=r"shape \(3, 3\), but the options say \(15, 6\)"
    ):
        load(directory)
    broken("CNN_proj/b_proj", np.full(6, np.nan))
    with pytest.raises(ModelError, match="not finite"):
        load(directory)
    broken("CNN_proj/b_proj", np.zeros(6, np.longdouble))
    with pytest.raises(ModelError, match="not finite"):
        load(directory)
    broken("char_embed", np.zeros((100, 5)))
    with pytest.raises(ModelError, match="100 characters, but 261 are needed"):
        load(directory)
    path.write_bytes(b"no")
    with pytest.raises(ModelError, match="not a readable HDF5"):
        load(directory)
    (directory / "tiny_options.json").write_text('{"lstm": {}}')
    with pytest.raises(ModelError, match="'char_cnn' is missing"):
        load(directory)
    (directory / "tiny_options.json").write_text("{")
    with pytest.raises(ModelError, match="not ELMo options"):
        load(directory)
    (directory / "tiny_options.json").unlink()
    with pytest.raises(ModelError, match="there are 0 and 1"):
        find_files(directory)


def test_oversized_and_external_datasets_are_refused(tmp_path: Path) -> None:
    """HDF5 stores neither what is zero everywhere nor what lies in another file."""
    write(tmp_path / "elmo", OPTIONS)
    path = tmp_path / "elmo/tiny_weights.hdf5"
    external = tmp_path / "other.hdf5"
    shutil.copy(path, external)

    def with_embedding(change: Callable[[Any], None]) -> None:
        shutil.copy(external, path)
        with h5py.File(path, "a") as file:
            del file["char_embed"]
            change(file)
        load_encoder(str(tmp_path / "elmo"))

    with pytest.raises(ModelError, match="has more numbers than the file has bytes"):
        with_embedding(
            lambda file: file.create_dataset(
                "char_embed", (10**9, 5), "f4", chunks=(1000, 5)
            )
        )
    link = h5py.ExternalLink(str(external), "char_embed")
    with pytest.raises(ModelError, match="'char_embed' is in another file"):
        with_embedding(lambda file: file.update({"char_embed": link}))
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(261 * 5 * 4))
    with pytest.raises(ModelError, match="'char_embed' is in another file"):
        with_embedding(
            lambda file: file.create_dataset(
                "char_embed", (261, 5), "f4", external=[(str(raw), 0, 261 * 5 * 4)]
            )
        )
