"""ELMo from its published files: options JSON and weights HDF5.

    M. E. Peters, M. Neumann, M. Iyyer, M. Gardner, C. Clark, K. Lee, L. Zettlemoyer:
    Deep contextualized word representations. NAACL 2018.

    layer 0   word → 50 byte ids → embedding (16) → CNN, maximum over positions, ReLU
              (2048) → 2 highway layers → projection (512), twice
    layer 1   LSTM 4096 → 512, forward | backward
    layer 2   LSTM 4096 → 512, forward | backward, plus its own input

The sizes are in the options file; the published ones are in parentheses. Every sentence
starts from a zero state. The published program carries the state from one batch to the
next, which makes a note's vectors depend on other notes. The weights file has these
datasets:

    char_embed (261, 16) │ CNN/W_cnn_i (1, width, 16, filters), b_cnn_i
    CNN_high_k/W_carry, b_carry, W_transform, b_transform │ CNN_proj/W_proj, b_proj
    RNN_d/RNN/MultiRNNCell/Cell_l/LSTMCell/W_0 (input + state, 4 * cell), B, W_P_0
    (cell, state)

with d = 0 forward, 1 backward. The gates in W_0 and B have the order input, candidate,
forget, output, and the forget gate gets 1 added to its bias at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fednotes.core.errors import ModelError, needs
from fednotes.core.parsing import NotAFile, read_json, require_regular_files
from fednotes.core.work import count_items
from fednotes.data.text import Passage
from fednotes.encoders.encoder import batch_similar_lengths, to_half
from fednotes.encoders.pretrained import compute_fingerprint

# Byte values are 0-255. In memory every id is one higher, and 0 means "no word".
BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = 256, 257, 258, 259, 260
CHARACTERS = 261

# The largest LSTM batch: words with padding (128 MB of gates at the published size),
# and sentences.
BUDGET = 2048
ROWS = 128
# Words in one CNN batch.
WORDS = 256

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh}


def find_files(directory: Path) -> tuple[Path, Path] | None:
    """Return a directory's options and weights files; None if it has neither.

    Raises:
        ModelError: One of the two is missing or not unique.
    """
    options = sorted(directory.glob("*options.json"))
    weights = sorted(directory.glob("*weights.hdf5")) or sorted(
        directory.glob("*.hdf5")
    )
    if not options and not weights:
        return None
    if len(options) != 1 or len(weights) != 1:
        raise ModelError(
            f"{directory}: ELMo needs one file named …options.json and one named "
            "…weights.hdf5, "
            f"but there are {len(options)} and {len(weights)}"
        )
    return options[0], weights[0]


def encode_characters(word: str | int, length: int = 50) -> np.ndarray:
    """Return the character ids of a word, each plus 1, as int64 (length,).

    The UTF-8 bytes, truncated to fit, are between the markers of the word's start and
    end. Padding follows.

    Args:
        word: A word, or one of BEGIN_SENTENCE and END_SENTENCE.
        length: Number of ids.
    """
    inner = [word] if isinstance(word, int) else list(word.encode("utf-8", "ignore"))
    ids = [BEGIN_WORD, *inner[: length - 2], END_WORD]
    return np.array(ids + [PADDING] * (length - len(ids)), dtype=np.int64) + 1


class _Config:
    """The settings of an options file."""

    def __init__(self, path: Path) -> None:
        try:
            options = read_json(path, strict=False)
            cnn = options["char_cnn"]
            lstm = options["lstm"]
            self.filters = [(int(width), int(n)) for width, n in cnn["filters"]]
            activation = str(cnn["activation"])
            self.embedding = int(cnn["embedding"]["dim"])
            self.characters = int(cnn["max_characters_per_token"])
            self.highways = int(cnn.get("n_highway") or 0)
            self.cell = int(lstm["dim"])
            self.state = int(lstm["projection_dim"])
            self.layers = int(lstm.get("n_layers", 1))
            self.cell_clip: float | None = lstm.get("cell_clip") or None
            self.state_clip: float | None = lstm.get("proj_clip") or None
            self.skip = bool(lstm["use_skip_connections"])
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        except KeyError as error:
            raise ModelError(f"{path}: not ELMo options: {error} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{path}: not ELMo options: {error}") from error
        if activation not in ACTIVATIONS:
            raise ModelError(f"{path}: activation {activation!r} is not relu or tanh")
        self.activation = ACTIVATIONS[activation]
        widest = max((width for width, _ in self.filters), default=0)
        if not 1 <= widest <= self.characters or self.layers < 1 or self.characters < 3:
            raise ModelError(f"{path}: impossible sizes of filters, layers or words")


Read = Callable[..., Tensor]


@contextmanager
def _reading_weights(path: Path, dtype: torch.dtype) -> Iterator[Read]:
    """Open an HDF5 file.

    Yields:
        A function read(name, *shape) that checks a dataset's shape and numbers and
        returns it as a tensor. None in the shape allows any size.
    """
    with needs("h5py", "elmo"):
        import h5py
    try:
        require_regular_files([path])
        file = h5py.File(path, "r")
    except NotAFile as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise ModelError(
            f"{path}: not a readable HDF5 file: download it again"
        ) from error

    # A small file may claim that a dataset has any size or is in another file.
    numbers_left = path.stat().st_size  # upper bound: each takes at least one byte

    def read(name: str, *shape: int | None) -> Tensor:
        nonlocal numbers_left
        try:
            dataset = file[name]
            numbers_left -= dataset.size
            is_elsewhere = dataset.file.filename != file.filename
            if is_elsewhere or dataset.is_virtual or dataset.external:
                raise ModelError(
                    f"{path}: {name!r} is in another file: download the weights again"
                )
            if numbers_left < 0:
                raise ModelError(
                    f"{path}: {name!r} has more numbers than the file has bytes: "
                    "download the weights again"
                )
            array = np.asarray(dataset)
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            raise ModelError(
                f"{path}: dataset {name!r} is missing or unreadable: download the "
                "weights again"
            ) from error
        fits = array.ndim == len(shape) and all(
            want in (None, have) for want, have in zip(shape, array.shape, strict=True)
        )
        if not fits:
            wanted = tuple("any" if size is None else size for size in shape)
            raise ModelError(
                f"{path}: {name!r} has shape {array.shape}, but the options say "
                f"{wanted}"
            )
        is_number = array.dtype.kind == "f" and array.dtype.itemsize <= 8
        if not is_number or not np.isfinite(array).all():
            raise ModelError(f"{path}: {name!r} has values that are not finite numbers")
        return torch.from_numpy(array).to(dtype)

    with file:
        yield read


class _Cell:
    """One LSTM layer in one direction, whose input has the size of the state."""

    def __init__(self, read: Read, config: _Config, direction: int, layer: int) -> None:
        name = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
        state = config.state
        cell = config.cell
        weights = read(f"{name}/W_0", 2 * state, 4 * cell)
        self.inputs = weights[:state].contiguous()
        self.recurrent = weights[state:].contiguous()
        self.bias = read(f"{name}/B", 4 * cell).clone()
        self.bias[2 * cell : 3 * cell] += 1  # forget gate
        self.project = read(f"{name}/W_P_0", cell, state) if state < cell else None
        self.cell_clip = config.cell_clip
        self.state_clip = config.state_clip

    def run(self, words: Tensor) -> Tensor:
        """Return states (batch, length, state) of inputs (batch, length, state)."""
        batch, length, _ = words.shape
        # One product for all inputs; only the recurrent half needs the previous step.
        gates = (words.flatten(0, 1) @ self.inputs + self.bias).view(batch, length, -1)
        state = words.new_zeros(batch, self.recurrent.shape[0])
        memory = words.new_zeros(batch, self.recurrent.shape[1] // 4)
        states = []
        for step in range(length):
            # (batch, 4 * cell)
            now = torch.addmm(gates[:, step], state, self.recurrent)
            enter, candidate, forget, leave = now.chunk(4, 1)
            memory = enter.sigmoid() * candidate.tanh() + forget.sigmoid() * memory
            if self.cell_clip:
                memory = memory.clamp(-self.cell_clip, self.cell_clip)
            state = leave.sigmoid() * memory.tanh()
            if self.project is not None:
                state = state @ self.project
                if self.state_clip:
                    state = state.clamp(-self.state_clip, self.state_clip)
            states.append(state)
        return torch.stack(states, 1)


def _read_filters(read: Read, config: _Config) -> list[tuple[Tensor, Tensor]]:
    """Return weights, (filters, embedding, width), and bias of each width."""
    filters = []
    for i, (width, count) in enumerate(config.filters):
        weight = read(f"CNN/W_cnn_{i}", 1, width, config.embedding, count)[0]
        bias = read(f"CNN/b_cnn_{i}", count)
        filters.append((weight.permute(2, 1, 0).contiguous(), bias))
    return filters


class Elmo:
    """The frozen bidirectional language model; see `features.FrozenEncoder`.

    `encode` returns all of its layers.

    Args:
        options: The published options file.
        weights: The published weights file.
        dtype: The dtype of the computation.

    Raises:
        ModelError: A file is damaged, or the two files do not match.
        MissingExtra: The package h5py is missing.
    """

    def __init__(
        self, options: Path, weights: Path, dtype: torch.dtype = torch.float32
    ) -> None:
        self._source = weights
        self.config = config = _Config(options)
        self.layers = config.layers + 1
        self.dim = 2 * config.state
        with _reading_weights(weights, dtype) as read:
            table = read("char_embed", None, config.embedding)
            if len(table) < CHARACTERS:
                raise ModelError(
                    f"{weights}: 'char_embed' has {len(table)} characters, but "
                    f"{CHARACTERS} are needed"
                )
            self._table = torch.cat([table.new_zeros(1, config.embedding), table])
            n = sum(count for _, count in config.filters)
            self._filters = _read_filters(read, config)
            self._highways = [
                (
                    read(f"CNN_high_{k}/W_carry", n, n),
                    read(f"CNN_high_{k}/b_carry", n),
                    read(f"CNN_high_{k}/W_transform", n, n),
                    read(f"CNN_high_{k}/b_transform", n),
                )
                for k in range(config.highways)
            ]
            # The file has no projection if filters and state have the same size.
            self._project = None
            if n != config.state:
                weight = read("CNN_proj/W_proj", n, config.state)
                self._project = weight, read("CNN_proj/b_proj", config.state)
            self._cells = [
                [
                    _Cell(read, config, direction, layer)
                    for layer in range(config.layers)
                ]
                for direction in range(2)
            ]
        # Computed now because the files may change later.
        self.fingerprint = compute_fingerprint(
            (options, weights), kind="elmo", version=1
        )

    def encode(self, sentences: Sequence[Passage]) -> np.ndarray:
        """Return (words of all sentences, layers, 2 * state) float16.

        ELMo reads only the words, not the text between them.
        """
        return to_half(self.compute_hidden(sentences), self._source)

    @torch.inference_mode()
    def compute_hidden(self, sentences: Sequence[Passage]) -> Tensor:
        """Return the same vectors as `encode`, in the dtype of the computation."""
        ids: dict[str | int, int] = {BEGIN_SENTENCE: 0, END_SENTENCE: 1}
        rows = [
            [ids.setdefault(word, len(ids)) for word in each.forms]
            for each in sentences
        ]
        vectors = self._embed(list(ids))  # (unique words, state)
        lengths = [len(row) for row in rows]
        starts = np.cumsum([0, *lengths])
        out = torch.zeros(int(starts[-1]), self.layers, self.dim, dtype=vectors.dtype)
        batches = batch_similar_lengths([n + 2 for n in lengths], BUDGET, ROWS)
        for batch in count_items(batches, "reading sentences"):
            chosen = [i for i in batch if lengths[i]]
            if not chosen:
                continue
            longest = max(lengths[i] for i in chosen) + 2
            index = torch.zeros(len(chosen), longest, dtype=torch.long)
            for row, i in enumerate(chosen):
                index[row, : lengths[i] + 2] = torch.tensor([0, *rows[i], 1])
            sizes = torch.tensor([lengths[i] + 2 for i in chosen])
            states = self._run_layers(vectors, index, sizes)
            for row, i in enumerate(chosen):
                out[starts[i] : starts[i + 1]] = states[row, 1 : lengths[i] + 1]
        return out

    def _embed(self, words: list[str | int]) -> Tensor:
        """Return the CNN's vectors of words from their characters, (words, state)."""
        parts = []
        for first in range(0, len(words), WORDS):
            ids = np.stack(
                [
                    encode_characters(w, self.config.characters)
                    for w in words[first : first + WORDS]
                ]
            )
            embedded = self._table[torch.from_numpy(ids)]  # (words, 50, embedding)
            parts.append(self._convolve(embedded.transpose(1, 2)))
        return torch.cat(parts)

    def _convolve(self, characters: Tensor) -> Tensor:
        """Return (words, state) of characters (words, embedding, characters)."""
        activation = self.config.activation
        word = torch.cat(
            [
                activation(functional.conv1d(characters, w, b).amax(2))
                for w, b in self._filters
            ],
            1,
        )  # (words, filters)
        for carry, carry_bias, transform, transform_bias in self._highways:
            gate = (word @ carry + carry_bias).sigmoid()
            word = gate * (word @ transform + transform_bias).relu() + (1 - gate) * word
        if self._project is not None:
            word = word @ self._project[0] + self._project[1]
        return word

    def _run_layers(self, vectors: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
        """Return (batch, length, layers, 2 * state).

        The backward direction reads each sentence reversed within its length, so
        padding comes last in both directions and has no effect.

        Args:
            vectors: (unique words, state).
            index: (batch, length) indices of the words in `vectors`.
            sizes: (batch,) number of words of each sentence.
        """
        positions = torch.arange(index.shape[1])
        reversed_positions = sizes[:, None] - 1 - positions  # (batch, length)
        reverse = torch.where(reversed_positions >= 0, reversed_positions, positions)
        batch = torch.arange(len(index))[:, None]
        ways = []
        for direction, order in enumerate((positions.expand_as(reverse), reverse)):
            current = vectors[index[batch, order]]  # (batch, length, state)
            layers = [current]
            for number, cell in enumerate(self._cells[direction]):
                after = cell.run(current)
                current = after + current if number and self.config.skip else after
                layers.append(current)
            states = torch.stack(layers, 2)  # (batch, length, layers, state)
            ways.append(states[batch, order])
        return torch.cat(ways, 3)
