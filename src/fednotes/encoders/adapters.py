"""What is trained beside a frozen transformer: prompts, and low-rank changes of its
weights.

Prompts: trainable keys and values beside those that a frozen transformer computes.

Chen et al. 2022 (LightNER), as Wang et al. 2023, Appendix B, use it. One array q is
shared by all layers; a layer's own two matrices make its keys and values of q
(`Prompts`, Eq. 15), and each self-attention sees them beside the text's
(`prompt_attention`, Eq. 14), whatever the mask hides of the text; no position moves.
How they reach the attention of any Hugging Face model:

    attentions = install(model)                      # once; its self-attentions, bottom to top
    prompts = Prompts(len(attentions), heads, width)
    model(ids, mask, prompts=joined(attentions, prompts()))

The keyword argument goes down to every attention with the call, so nothing is kept
between calls, and without it an installed model gives the very numbers that it gave
before. (A prefix in a `DynamicCache`, the common way, moves a decoder's positions and
cannot serve an encoder.)

LoRA: low-rank changes of a frozen model's weights (Hu et al. 2021).

Each chosen linear map becomes W + (scale / rank) · B A. B starts as zero, so that the
first step is the frozen model's, bit for bit. W is never touched: the change is added
to the map's output while `applied` is open, so models that share one frozen encoder do
not meet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError, needs
from fednotes.core.tensors import seeded

# maps, by name
CHANGED = "query value q v q_lin v_lin q_proj v_proj query_proj value_proj".split()
NAME = "fednotes_prompts"  # of the attention, in the Hugging Face registry

Changed = Literal["attention", "all"]
# each (heads, prompts, d_head) or (batch, heads, ...)
KeyValues = tuple[Tensor, Tensor]


class Prompts(nn.Module):
    """q and the projections that make each layer's keys and values of it.

    q: (count, width). w1: (layers, width, hidden). w2: (layers, hidden, 2 * width). No
    biases, as Eq. 15 has none. heads: of every layer, or one number for each. First
    values: q from N(0, 1), w1 and w2 uniform as in `nn.Linear`, from the seed alone.
    Raises ConfigError for sizes below 1 or a width that the heads do not divide.
    """

    def __init__(
        self,
        num_layers: int,
        heads: int | Sequence[int],
        width: int,
        count: int = 10,
        hidden: int = 400,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.heads = (heads,) * num_layers if isinstance(heads, int) else tuple(heads)
        sizes = (num_layers, width, count, hidden, *self.heads)
        if len(self.heads) != num_layers or min(sizes) < 1:
            raise ConfigError(
                f"prompts: {num_layers} layers, heads {list(self.heads)}, width {width}, "
                f"{count} prompts, hidden {hidden}: at least 1 each, and heads for each layer"
            )
        if any(width % h for h in self.heads):
            raise ConfigError(
                f"prompts: width {width} is no multiple of heads {list(self.heads)}"
            )
        with seeded(seed, "prompts"):
            self.q = nn.Parameter(torch.randn(count, width))
            self.w1 = nn.Parameter(_uniform(num_layers, width, hidden))
            self.w2 = nn.Parameter(_uniform(num_layers, hidden, 2 * width))

    def forward(self) -> list[KeyValues]:
        """Keys and values of every layer from q, (heads, count, width / heads) each."""
        both = (
            torch.tanh(self.q @ self.w1) @ self.w2
        )  # (layers, count, 2 width) [tagsets eq 15]
        pairs = []
        for layer, heads in zip(both.unbind(0), self.heads, strict=True):
            keys, values = (
                layer.view(len(self.q), 2, heads, -1).transpose(0, 2).unbind(1)
            )
            pairs.append((keys, values))
        return pairs

    @torch.no_grad()
    def pull(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of the keys and values that were made of q → of q, for many losses
        at once.

        gradients: keys, values, keys, ... of each layer in turn, (batch, heads, count,
            d_head).
        Returns (batch, count, width): row b is the vector-Jacobian product of row b of
            each.
        """
        size = len(gradients[0])
        flat = [part.transpose(-3, -2).flatten(-2).flatten(0, 1) for part in gradients]
        layers = zip(flat[::2], flat[1::2], strict=True)
        # (layers, rows, 2 width)
        both = torch.stack([torch.cat(pair, dim=1) for pair in layers])
        slope = 1 - torch.tanh(self.q @ self.w1).square()  # (layers, count, hidden)
        inner = (both @ self.w2.mT).unflatten(1, (size, -1)) * slope.unsqueeze(1)
        return (inner.flatten(1, 2) @ self.w1.mT).sum(dim=0).unflatten(0, (size, -1))


def joined(
    attentions: Sequence[nn.Module], pairs: Sequence[KeyValues]
) -> dict[nn.Module, KeyValues]:
    """The `prompts=` argument of a forward pass: which attention takes which prompts."""
    return dict(zip(attentions, pairs, strict=True))


def install(model: Any) -> list[nn.Module]:
    """Let a loaded Hugging Face model take prompts; return its self-attentions, bottom
    to top.

    Of an encoder-decoder the encoder's come first, then the decoder's; cross-attentions
    are left out. Changes the model's attention implementation, not one of its
    parameters.

    Raises ModelError for a model that does not take its attention from the registry or
    whose self-attentions cannot be told; MissingExtra without transformers.
    """
    with needs("transformers", "transformers"):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(NAME, prompt_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    found = self_attentions(model)
    if not found or model.config._attn_implementation != NAME:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"a model of the kind {kind!r} takes no prompts; BERT's and BART's do"
        )
    return found


def self_attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attentions of a BERT-like encoder or a BART-like encoder-decoder, in
    order."""
    return [
        module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("SelfAttention", "BartAttention"))
        and hasattr(module, "is_causal")
        and not name.endswith(("encoder_attn", "crossattention.self"))
    ]


def prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    prompts: Mapping[nn.Module, KeyValues] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention over [K; Φ_K] and [V; Φ_V] (row concatenation).

    query, key, value: (batch, heads, queries or keys, d_head). attention_mask: bool,
    True where a query may look, broadcast to (batch, heads, queries, keys), or None.
    prompts: as `joined` gives them; where there is none for `module` this is
    transformers' own attention, unchanged.
    Returns (batch, queries, heads, d_head), and None in place of the attention's
        weights.

    Eq. 14 divides the scores by d; that is a misprint for √d_head, by which the frozen
    model divided in its own training and LightNER divides too. So do we.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    pair = None if prompts is None else prompts.get(module)
    if pair is not None:
        mask = _mask(module, query, key, attention_mask)
        added_keys, added_values = (part.expand(len(key), -1, -1, -1) for part in pair)
        if mask is not None:
            seen = mask.new_ones(()).expand(*mask.shape[:-1], added_keys.shape[-2])
            # (batch or 1, 1, queries, keys + prompts)
            mask = torch.cat([mask, seen], dim=-1)
        # [tagsets eq 14] (batch, heads, keys + prompts, d_head)
        key = torch.cat([key, added_keys], dim=-2)
        value = torch.cat([value, added_values], dim=-2)  # [tagsets eq 14]
        attention_mask, options = mask, {**options, "is_causal": False}
    out, _ = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        **options,
    )
    return out, None


def _mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None
) -> Tensor | None:
    """The mask, written out where transformers left it to the kernel: causal, aligned
    right."""
    if mask is not None:
        return mask
    queries, keys = query.shape[-2], key.shape[-2]
    if queries == 1 or not getattr(module, "is_causal", False):
        return None
    whole = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return whole.tril(keys - queries)[None, None]  # (1, 1, queries, keys)


def _uniform(layers: int, inputs: int, outputs: int) -> Tensor:
    """(layers, inputs, outputs) uniform in ±1/√inputs, as `nn.Linear` starts."""
    return (torch.rand(layers, inputs, outputs) * 2 - 1) / inputs**0.5


# ---- LoRA ----------------------------------------------------------------------------


class LoRA(nn.Module):
    """Low-rank changes of some linear maps of an encoder.

    down: (maps, rank, inputs), A, and up: (maps, outputs, rank), B, where all are of
    one size; else side by side, (rank, Σ inputs) and (Σ outputs, rank). Initial values
    come from the seed and the layer's name alone. maps: what is changed, see `targets`.
    """

    def __init__(
        self,
        maps: Sequence[nn.Linear],
        rank: int = 8,
        alpha: float = 16.0,
        seed: int = 0,
        layer: str = "lora",
    ) -> None:
        super().__init__()
        self.scale = alpha / rank
        self._sizes = [(linear.out_features, linear.in_features) for linear in maps]
        outputs, inputs = zip(*self._sizes, strict=True)
        alike = len(set(self._sizes)) == 1
        first = (len(maps), rank, inputs[0]) if alike else (rank, sum(inputs))
        # of each column
        roots = torch.tensor([n**0.5 for n in inputs for _ in range(n)])
        with seeded(seed, layer):
            drawn = torch.rand(first) * 2 - 1
        self.down = nn.Parameter(drawn / inputs[0] ** 0.5 if alike else drawn / roots)
        shape = (len(maps), outputs[0], rank) if alike else (sum(outputs), rank)
        self.up = nn.Parameter(torch.zeros(shape))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A (rank, inputs) and B (outputs, rank) of each map."""
        if self.down.dim() == 3:
            return zip(self.down, self.up, strict=True)
        outputs, inputs = (list(sizes) for sizes in zip(*self._sizes, strict=True))
        return zip(self.down.split(inputs, dim=1), self.up.split(outputs), strict=True)

    @contextmanager
    def applied(self, maps: Sequence[nn.Linear]) -> Iterator[None]:
        """While open, these maps (in the order of `targets`) compute with their
        changes.

        For one forward pass at a time: it changes what the shared modules do.
        """
        with ExitStack() as stack:
            for linear, (down, up) in zip(maps, self._pairs(), strict=True):
                hook = linear.register_forward_hook(_change(down, up, self.scale))
                stack.callback(hook.remove)
            yield

    @torch.no_grad()
    def merge(self, maps: Sequence[nn.Linear]) -> None:
        """Add the changes to these maps' own weights, for good."""
        for linear, (down, up) in zip(maps, self._pairs(), strict=True):
            linear.weight += self.scale * up @ down


def targets(
    model: nn.Module,
    which: Changed = "attention",
    *,
    other: str = 'set [model] maps = "all"',
) -> list[nn.Linear]:
    """Return the linear maps that are changed, bottom to top.

    Args:
        model: The encoder.
        which: "attention", the queries and values; "all", every map of the stacked
            layers.
        other: What to do where an encoder has stacked layers without queries and
            values.

    Raises:
        ConfigError: The maps cannot be found, or, of attention, differ in size.
    """
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if which == "all":
        maps = [linear for name, linear in named if re.search(r"\.\d+\.", name)]
    else:
        maps = [linear for name, linear in named if name.rsplit(".", 1)[-1] in CHANGED]
    if not maps or (
        which == "attention" and len({tuple(m.weight.shape) for m in maps}) > 1
    ):
        kind = getattr(
            getattr(model, "config", None), "model_type", type(model).__name__
        )
        lacks = {
            "attention": "no query and value projections of one size",
            "all": "no linear maps in stacked layers",
        }
        stacked = any(re.search(r"\.\d+\.", name) for name, _ in named)
        raise ConfigError(
            f"low-rank changes cannot be made to an encoder of the kind {kind!r} ({lacks[which]}): "
            f"{other if stacked and which == 'attention' else 'take an encoder such as BERT'}"
        )
    return maps


def _change(down: Tensor, up: Tensor, scale: float) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * F.linear(F.linear(inputs[0], down), up)

    return hook
