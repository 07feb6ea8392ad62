"""Craft parameters with which an encoder's update reveals the words of a chosen sentence.

A server knows the encoder's word, position and type embeddings. It changes the linear
layers of the encoder's lowest layer by low-rank matrices. If a job trains LoRA
adapters, these become the matrices; otherwise, the matrices are added to the weights:

1. Each attention head looks for a chosen word. If a sentence has this word, every token
   of the sentence gets a flag: large values in a few coordinates.
2. Each unit of the feed-forward layer that is used responds to the flag together with
   one position, and to nothing else. The update of the unit's weights then comes from a
   single token.
3. Adam keeps little more than the signs of a gradient. The server computes the signs of
   the state that each word of the vocabulary would have at this position, and names the
   word with the most equal signs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
}
LAYER = "encoder.layer.0."
QUERY, KEY, VALUE = (
    f"{LAYER}attention.self.{name}" for name in ("query", "key", "value")
)
OUTPUT, FEED_FORWARD = (
    f"{LAYER}{name}" for name in ("attention.output.dense", "intermediate.dense")
)
FIRST_POSITION = 1  # position 0 has [CLS]
RANK = 8  # of a LoRA adapter, which therefore has units for eight positions
POSITIONS = 24  # number of positions that are read if all weights are sent
ATTENTION = 20.0  # score of the chosen word
LOUD = 16.0  # key and value of the chosen word; the encoder's own are small
FLAG = 14.0  # length of the flag before the layer norm
FLAG_COORDINATES = 16  # the signs of the other coordinates still reveal the word
FLAG_PART = 0.9  # of a unit's response; the rest comes from the position
OTHER_WORDS = 0.3  # maximum of the chosen word's direction in other words
FAINT = 0.15  # maximum of the flag in sentences without the chosen word
THRESHOLD = 0.3  # of a unit, between 0 (anything else) and 1 (flag and position)
WEAK = 0.85  # part of the flag that remains after dropout
STEEP = 20.0  # factor of a unit's response, so that the unit is on or off


def save_encoder(folder: Path, words: Sequence[str], seed: int) -> Path:
    """Write a small BERT with random weights that has these words in its vocabulary."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted({letter for word in words for letter in word})
    entries = [*MARKS, *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = list(dict.fromkeys(entries))
    (folder / "vocab.txt").write_text("\n".join(vocabulary), "utf-8")
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)

    config = transformers.BertConfig(vocab_size=len(vocabulary), **SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.BertForPreTraining(config).save_pretrained(folder)
    return folder


def load_embeddings(encoder: Path) -> dict[str, Tensor]:
    """Return the embedding tables of a saved encoder by their names in `BertModel`."""
    from safetensors.torch import load_file

    prefix = "bert."
    return {
        name.removeprefix(prefix): value
        for name, value in load_file(encoder / "model.safetensors").items()
        if name.startswith(f"{prefix}embeddings.")
    }


@dataclass(frozen=True)
class LowRank:
    """The change up @ down of a linear map.

    Attributes:
        down: (rank, inputs).
        up: (outputs, rank).
        bias: (outputs,), if the bias changes, too.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None = None


class SentenceTrap:
    """The changes of an encoder that reveal one sentence, and how to read it.

    Args:
        embeddings: The embedding tables of the encoder, as `load_embeddings` returns them.
        chosen: The id of the word whose sentence is to be read.
        is_low_rank: Whether the job changes maps by matrices of rank `RANK`, and no
            bias; otherwise, it sends all weights and biases of a layer.
    """

    def __init__(
        self, embeddings: Mapping[str, Tensor], chosen: int, *, is_low_rank: bool
    ) -> None:
        self.is_low_rank = is_low_rank
        self.words = embeddings["embeddings.word_embeddings.weight"].float()
        self.positions = embeddings["embeddings.position_embeddings.weight"].float()
        self.type = embeddings["embeddings.token_type_embeddings.weight"][0].float()
        self.read_at = range(
            FIRST_POSITION, FIRST_POSITION + (RANK if is_low_rank else POSITIONS)
        )

        # Directions without a part in any position, so positions add no noise.
        self.constant = self._outside(self.type, [*self.positions])
        self.target = self._outside(self.words[chosen], [*self.positions, self.type])
        self.flag = self._draw_flag(chosen)

        # The amounts of these directions in a token.
        typical = self.embedded(torch.tensor([chosen]), FIRST_POSITION)[0]
        self.target_size = float(self.target @ typical)
        self.constant_size = float(self.constant @ typical)

    @staticmethod
    def _outside(vector: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the part of a vector that is orthogonal to others, scaled to length 1."""
        basis = torch.linalg.qr(torch.stack(list(others), dim=1)).Q
        return normalize(vector - basis @ (basis.T @ vector), dim=0)

    def _draw_flag(self, seed: int) -> Tensor:
        """Return a vector (width,) of length 1 and mean 0 with few nonzero coordinates."""
        generator = torch.Generator().manual_seed(seed)
        coordinates = torch.randperm(len(self.type), generator=generator)
        flag = torch.zeros(len(self.type))
        flag[coordinates[: FLAG_COORDINATES // 2]] = 1.0
        flag[coordinates[FLAG_COORDINATES // 2 : FLAG_COORDINATES]] = -1.0
        return normalize(flag, dim=0)

    def embedded(self, words: Tensor, position: int) -> Tensor:
        """Return the embeddings (words, width) of words at a position."""
        summed = self.words[words] + self.positions[position] + self.type
        return layer_norm(summed, summed.shape[1:])

    def flagged(self, position: int, part: float = 1.0) -> Tensor:
        """Return the input of a unit (vocabulary, width) for each word at a position.

        Args:
            position: The position of the word.
            part: The part of the flag that the word's sentence gets.
        """
        every_word = torch.arange(len(self.words))
        marked = self.embedded(every_word, position) + part * FLAG * self.flag
        return layer_norm(marked, marked.shape[1:])

    def units(self) -> tuple[Tensor, Tensor]:
        """Return the weights (positions, width) and biases (positions,) of the units.

        The threshold of a unit is between the responses to its own flagged position and to
        everything else. A LoRA adapter has no bias, so its threshold is a multiple of the
        constant direction, which all tokens have in about the same amount.
        """
        places = []
        for position in self.read_at:
            others = [*self.positions[:position], *self.positions[position + 1 :]]
            places.append(self._outside(self.positions[position], [*others, self.type]))
        part = 0.6 if self.is_low_rank else FLAG_PART
        weights = part * self.flag + torch.stack(places)

        def respond(states: Tensor) -> Tensor:
            """Return the responses of all units to states, before the thresholds."""
            responses = states @ weights.T
            if self.is_low_rank:
                return responses / (states @ self.constant)[:, None]
            return responses

        lowest = torch.zeros(len(weights))
        highest = torch.full((len(weights),), -torch.inf)
        for position in range(len(self.positions)):
            flagged = respond(self.flagged(position))
            faint = respond(self.flagged(position, FAINT)).amax(dim=0)
            wrong = torch.maximum(flagged.amax(dim=0), faint)
            if position in self.read_at:
                unit = position - FIRST_POSITION
                lowest[unit] = respond(self.flagged(position, WEAK))[:, unit].amin()
                wrong[unit] = faint[unit]
            highest = torch.maximum(highest, wrong)

        thresholds = highest + THRESHOLD * (lowest - highest)
        if self.is_low_rank:
            return weights - thresholds[:, None] * self.constant, 0 * thresholds
        return weights, -thresholds

    def changes(self) -> dict[str, LowRank]:
        """Return the change of each map by the map's name."""
        width, inner = len(self.type), SIZES["intermediate_size"]
        heads = SIZES["num_attention_heads"]
        head_width = width // heads
        changes = {
            name: LowRank(torch.zeros(RANK, width), torch.zeros(width, RANK))
            for name in (QUERY, KEY, VALUE, OUTPUT)
        }

        # One coordinate of each head is enough. All heads look for the word, because
        # dropout removes the attention of single heads.
        firsts = torch.arange(0, width, head_width)
        changes[QUERY].down[0] = self.constant / self.constant_size
        changes[QUERY].up[firsts, 0] = ATTENTION * head_width**0.5 / LOUD
        target = self.target / self.target_size
        constant = self.constant / self.constant_size
        changes[KEY].down[0] = target
        changes[VALUE].down[0] = (target - OTHER_WORDS * constant) / (1 - OTHER_WORDS)
        for name in (KEY, VALUE):
            changes[name].up[firsts, 0] = LOUD
        changes[OUTPUT].down[0, firsts] = 1.0 / (heads * LOUD)
        changes[OUTPUT].up[:, 0] = FLAG * self.flag

        weights, biases = self.units()
        up = STEEP * torch.eye(inner, len(weights))
        changes[FEED_FORWARD] = LowRank(weights, up, bias=up @ biases)
        return changes

    def name_words(self, moved: Tensor) -> list[int]:
        """Return the word that is read at each position; -1 if its unit's weights did not move.

        Args:
            moved: (positions, width), the change of each unit's weights.
        """
        words = []
        for row, position in zip(moved.float(), self.read_at, strict=True):
            if not row.abs().max() > 0:
                words.append(-1)
                continue
            patterns = torch.sign(self.flagged(position))
            # The loss may move a unit in either direction, and other tokens may add a part
            # that all words have in common.
            patterns = normalize(patterns - patterns.mean(dim=0), dim=1)
            likeness = (patterns @ row).abs()
            likeness[: len(MARKS)] = 0
            words.append(int(likeness.argmax()))
        return words


def low_rank_places() -> dict[str, tuple[slice, slice]]:
    """Return where each map lies in "lora.down" and "lora.up" of a job, by its name."""
    width, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    outputs_of = {QUERY: width, KEY: width, VALUE: width, OUTPUT: width}
    outputs_of[FEED_FORWARD] = inner

    places = {}
    first_input = first_output = 0
    for name, outputs in outputs_of.items():
        places[name] = (
            slice(first_input, first_input + width),
            slice(first_output, first_output + outputs),
        )
        first_input += width
        first_output += outputs
    return places


def find_map(tensors: Mapping[str, Tensor], map_name: str) -> str:
    """Return the name of a map's weight among a job's tensors."""
    return next(name for name in tensors if name.endswith(f"{map_name}.weight"))


def has_maps(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether these tensors are parameters with the maps that a trap changes."""
    if "lora.down" in tensors:
        return tensors["lora.down"].dim() > 1
    names = [name for name in tensors if name.endswith(f"{FEED_FORWARD}.weight")]
    return any(tensors[name].dim() > 1 for name in names)


def set_trap(
    tensors: Mapping[str, Tensor], trap: SentenceTrap, scale: float
) -> dict[str, Tensor]:
    """Return a job's tensors with the trap in them.

    Args:
        tensors: What an honest server sends.
        trap: The changes of the encoder.
        scale: alpha / rank of the job's LoRA adapters.
    """
    trapped = {name: value.clone() for name, value in tensors.items()}
    if "lora.down" not in trapped:
        for name, change in trap.changes().items():
            weight = find_map(tensors, name)
            trapped[weight] += change.up @ change.down
            if change.bias is not None:
                trapped[weight.removesuffix("weight") + "bias"] += change.bias
        return trapped

    for name, change in trap.changes().items():
        inputs, outputs = low_rank_places()[name]
        trapped["lora.down"][:, inputs] = change.down
        trapped["lora.up"][outputs] = change.up / scale
    return trapped


def find_units(change: Mapping[str, Tensor]) -> Tensor:
    """Return the change (units, width) of the input weights of the trap's units."""
    if "lora.down" in change:
        inputs, _ = low_rank_places()[FEED_FORWARD]
        return change["lora.down"][:, inputs]
    return change[find_map(change, FEED_FORWARD)]
