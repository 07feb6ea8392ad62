"""Trainable additions to a frozen transformer: prompts and LoRA adapters.

Prompts are trainable keys and values in addition to those that a frozen transformer
computes (Chen et al. 2022, LightNER; Wang et al. 2023, Appendix B). All layers share
one array q. Each layer maps q to its keys and values by two matrices (`Prompts`, Eq.
15). Each self-attention attends to them and to the keys and values of the text
(`compute_prompt_attention`, Eq. 14), regardless of the text's mask; positions do not
shift. With any Hugging Face model:

    attentions = install(model)       # once; the self-attentions, bottom to top
    prompts = Prompts(len(attentions), heads, width)
    model(ids, mask, prompts=joined(attentions, prompts()))

The keyword argument is passed to every attention. No state is kept between calls, and
without the argument an installed model computes exactly the same numbers as before.
(The usual way, a prefix in a `DynamicCache`, shifts a decoder's positions and does not
work for an encoder.)

LoRA (Hu et al. 2021) adds a low-rank adapter to each chosen linear layer, whose weights
become W + (alpha / rank) · B A. B starts at zero, so the model initially equals the
frozen one, bit for bit. W itself never changes: the adapter's output is added to that
of the layer while `LoRA.applying` is open, so models that share a frozen encoder do not
affect each other.
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
from fednotes.core.tensors import seeding_layer

# The names of the maps of queries and values in several architectures.
CHANGED = "query value q v q_lin v_lin q_proj v_proj query_proj value_proj".split()
# The name of `compute_prompt_attention` in the registry of the Hugging Face library.
NAME = "fednotes_prompts"

Changed = Literal["attention", "all"]
# Keys and values, each (heads, prompts, d_head) or (batch, heads, prompts, d_head).
KeyValues = tuple[Tensor, Tensor]


class Prompts(nn.Module):
    """The array q and the projections of q to each layer's keys and values.

    The parameters are q (count, width), w1 (layers, width, hidden) and w2 (layers,
    hidden, 2 * width). There are no biases, as Eq. 15 has none. q is initialised from
    N(0, 1), w1 and w2 uniformly as in `nn.Linear`, all derived only from the seed.

    Args:
        num_layers: Number of attentions.
        heads: Number of heads of every attention, or one number for each.
        width: Width of the states.
        count: Number of prompts.
        hidden: Width of the inner layer.
        seed: The seed of the initial values.

    Raises:
        ConfigError: A size is below 1, or the heads do not divide the width.
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
                f"prompts: {num_layers} layers, heads {list(self.heads)}, width "
                f"{width}, {count} prompts, hidden {hidden}: each must be at least 1, "
                "with heads for each layer"
            )
        if any(width % h for h in self.heads):
            raise ConfigError(
                f"prompts: width {width} is not a multiple of heads {list(self.heads)}"
            )
        with seeding_layer(seed, "prompts"):
            self.q = nn.Parameter(torch.randn(count, width))
            self.w1 = nn.Parameter(_draw_uniform(num_layers, width, hidden))
            self.w2 = nn.Parameter(_draw_uniform(num_layers, hidden, 2 * width))

    def forward(self) -> list[KeyValues]:
        """Return keys and values of each layer, each (heads, count, width / heads)."""
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
    def pull_back(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return gradients of q from gradients of its keys and values.

        It handles many losses at once.

        Args:
            gradients: The gradients of keys, values, keys, … of each layer in turn,
                each (batch, heads, count, d_head).

        Returns:
            (batch, count, width): row b is the vector-Jacobian product of rows b.
        """
        size = len(gradients[0])
        flat = [part.transpose(-3, -2).flatten(-2).flatten(0, 1) for part in gradients]
        layers = zip(flat[::2], flat[1::2], strict=True)
        # (layers, rows, 2 width)
        both = torch.stack([torch.cat(pair, dim=1) for pair in layers])
        slope = 1 - torch.tanh(self.q @ self.w1).square()  # (layers, count, hidden)
        inner = (both @ self.w2.mT).unflatten(1, (size, -1)) * slope.unsqueeze(1)
        return (inner.flatten(1, 2) @ self.w1.mT).sum(dim=0).unflatten(0, (size, -1))


def assign_prompts(
    attentions: Sequence[nn.Module], pairs: Sequence[KeyValues]
) -> dict[nn.Module, KeyValues]:
    """Return the argument `prompts` of a forward pass: prompts by attention."""
    return dict(zip(attentions, pairs, strict=True))


def install_prompts(model: Any) -> list[nn.Module]:
    """Make a loaded Hugging Face model accept prompts; return its self-attentions.

    The self-attentions are ordered from bottom to top. In an encoder-decoder, those of
    the encoder come before those of the decoder; cross-attentions are excluded. The
    model's attention implementation changes, but its parameters do not.

    Raises:
        ModelError: The model does not take its attention from the library's registry,
            or its self-attentions cannot be identified.
        MissingExtra: The package transformers is missing.
    """
    with needs("transformers", "transformers"):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(NAME, compute_prompt_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    attentions = find_self_attentions(model)
    if not attentions or model.config._attn_implementation != NAME:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"models of kind {kind!r} do not take prompts: give a BERT or a BART"
        )
    return attentions


def find_self_attentions(model: nn.Module) -> list[nn.Module]:
    """Return the self-attentions of a model like BERT or BART, in order."""
    return [
        module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("SelfAttention", "BartAttention"))
        and hasattr(module, "is_causal")
        and not name.endswith(("encoder_attn", "crossattention.self"))
    ]


def compute_prompt_attention(  # noqa: PLR0913 - the library's interface
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
    """Compute dot-product attention over [K; Φ_K] and [V; Φ_V] (row concatenation).

    Eq. 14 divides the scores by d. That is a misprint for √d_head, which the frozen
    model used in its own training, and which LightNER and this function use.

    Args:
        module: The attention.
        query: (batch, heads, queries, d_head).
        key: (batch, heads, keys, d_head).
        value: (batch, heads, keys, d_head).
        attention_mask: bool, True where a query may attend, which broadcasts to (batch,
            heads, queries, keys); or None.
        dropout: Dropout rate of the weights.
        scaling: Factor of the scores; None is 1 / √d_head.
        prompts: The prompts, from `assign_prompts`. Without prompts for `module`, this
            is the library's own attention.
        **options: Passed to the library's attention.

    Returns:
        (batch, queries, heads, d_head), and None in place of the attention's weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    pair = None if prompts is None else prompts.get(module)
    if pair is not None:
        mask = _make_mask_explicit(module, query, key, attention_mask)
        added_keys, added_values = (part.expand(len(key), -1, -1, -1) for part in pair)
        if mask is not None:
            shape = (*mask.shape[:-1], added_keys.shape[-2])
            prompts_are_visible = mask.new_ones(()).expand(*shape)
            # (batch or 1, 1, queries, keys + prompts)
            mask = torch.cat([mask, prompts_are_visible], dim=-1)
        # [tagsets eq 14] (batch, heads, keys + prompts, d_head)
        key = torch.cat([key, added_keys], dim=-2)
        value = torch.cat([value, added_values], dim=-2)  # [tagsets eq 14]
        attention_mask = mask
        options["is_causal"] = False
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


def _make_mask_explicit(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Return the mask, made explicit if the library leaves it to the kernel.

    An implicit mask is causal and right-aligned.
    """
    if mask is not None:
        return mask
    queries = query.shape[-2]
    keys = key.shape[-2]
    if queries == 1 or not getattr(module, "is_causal", False):
        return None
    ones = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return ones.tril(keys - queries)[None, None]  # (1, 1, queries, keys)


def _draw_uniform(layers: int, inputs: int, outputs: int) -> Tensor:
    """Return (layers, inputs, outputs), uniform in ±1/√inputs as in `nn.Linear`."""
    return (torch.rand(layers, inputs, outputs) * 2 - 1) / inputs**0.5


# ---- LoRA ----------------------------------------------------------------------------


class LoRA(nn.Module):
    """LoRA adapters of some linear layers of an encoder.

    The parameters are down (A) and up (B). If all layers have the same size, they are
    (layers, rank, inputs) and (layers, outputs, rank); otherwise they are concatenated,
    (rank, Σ inputs) and (Σ outputs, rank). Initial values depend only on the seed and
    the layer's name.

    Args:
        linears: The linear layers to adapt; see `find_linears`.
        rank: The rank of the adapters.
        alpha: The scale of the adapters times the rank.
        seed: The seed of the initial values.
        layer: The name of the layer.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        rank: int = 8,
        alpha: float = 16.0,
        seed: int = 0,
        layer: str = "lora",
    ) -> None:
        super().__init__()
        self.scale = alpha / rank
        self._sizes = [(linear.out_features, linear.in_features) for linear in linears]
        outputs, inputs = zip(*self._sizes, strict=True)
        self._is_stacked = len(set(self._sizes)) == 1
        down_shape: tuple[int, ...] = (rank, sum(inputs))
        up_shape: tuple[int, ...] = (sum(outputs), rank)
        if self._is_stacked:
            down_shape = (len(linears), rank, inputs[0])
            up_shape = (len(linears), outputs[0], rank)

        with seeding_layer(seed, layer):
            drawn = torch.rand(down_shape) * 2 - 1
        if self._is_stacked:
            down = drawn / inputs[0] ** 0.5
        else:
            # √inputs of each column
            down = drawn / torch.tensor([n**0.5 for n in inputs for _ in range(n)])
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(up_shape))

    def _iterate_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return A (rank, inputs) and B (outputs, rank) of each layer."""
        if self._is_stacked:
            return zip(self.down, self.up, strict=True)
        outputs, inputs = (list(sizes) for sizes in zip(*self._sizes, strict=True))
        return zip(self.down.split(inputs, dim=1), self.up.split(outputs), strict=True)

    @contextmanager
    def applying(self, linears: Sequence[nn.Linear]) -> Iterator[None]:
        """While the context is open, add the adapters' outputs to those of the layers.

        Open it for one forward pass at a time, because it affects shared modules.

        Args:
            linears: The layers, in the order in which the adapters were created.
        """
        with ExitStack() as stack:
            for linear, (down, up) in zip(linears, self._iterate_pairs(), strict=True):
                hook = linear.register_forward_hook(_make_hook(down, up, self.scale))
                stack.callback(hook.remove)
            yield

    @torch.no_grad()
    def merge(self, linears: Sequence[nn.Linear]) -> None:
        """Add the adapters permanently to the weights of the layers.

        Args:
            linears: The layers, in the order in which the adapters were created.
        """
        for linear, (down, up) in zip(linears, self._iterate_pairs(), strict=True):
            linear.weight += self.scale * up @ down


def find_linears(
    model: nn.Module,
    changed: Changed = "attention",
    *,
    remedy: str = 'set [model] maps = "all"',
) -> list[nn.Linear]:
    """Return the linear layers for LoRA adapters, bottom to top.

    Args:
        model: The encoder.
        changed: "attention" for those of queries and values; "all" for every linear
            layer of the encoder's stack.
        remedy: The remedy in the message if an encoder has stacked layers but none of
            queries and values.

    Raises:
        ConfigError: There are no such layers, or those of attention differ in size.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    stacked = [m for name, m in linears.items() if re.search(r"\.\d+\.", name)]
    if changed == "all":
        layers = stacked
        problem = "no linear maps in stacked layers"
        is_usable = bool(layers)
    else:
        layers = [
            m for name, m in linears.items() if name.rsplit(".", 1)[-1] in CHANGED
        ]
        problem = "no query and value projections of equal size"
        is_usable = len({tuple(m.weight.shape) for m in layers}) == 1
    if is_usable:
        return layers

    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if not stacked or changed != "attention":
        remedy = "use an encoder such as BERT"
    raise ConfigError(
        f"LoRA adapters do not fit encoders of kind {kind!r} ({problem}): {remedy}"
    )


def _make_hook(down: Tensor, up: Tensor, scale: float) -> Any:
    """Return a forward hook that adds a LoRA adapter to a linear layer's output."""

    def add_adapter(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * F.linear(F.linear(inputs[0], down), up)

    return add_adapter
