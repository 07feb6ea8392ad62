"""Prompts in the attention of tiny random BERT and BART models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.encoders.adapters import (
    Prompts,
    assign_prompts,
    compute_prompt_attention,
    install_prompts,
)

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 2], [9, 8, 4, 1, 1, 1, 1]])
MASK = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]])
TARGET = torch.tensor([[2, 5, 6, 7], [2, 9, 8, 1]])


def bert() -> Any:
    sizes = {
        "vocab_size": 20,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
    }
    config = transformers.BertConfig(
        num_attention_heads=4, initializer_range=0.4, **sizes
    )
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


def bart() -> Any:
    sizes = {
        "vocab_size": 20,
        "d_model": 32,
        "max_position_embeddings": 24,
        "init_std": 0.4,
    }
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": 2,
            f"{side}_attention_heads": 4,
            f"{side}_ffn_dim": 48,
        }
    torch.manual_seed(0)
    return transformers.BartModel(transformers.BartConfig(**sizes)).eval()


def run(model: Any, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the last states of either kind of model."""
    inputs = (
        {"decoder_input_ids": TARGET, "use_cache": False}
        if hasattr(model, "decoder")
        else {}
    )
    with torch.no_grad():
        return model(IDS, attention_mask=mask, **inputs, **options).last_hidden_state


def attend(q: Any, k: Any, v: Any, visible: Any, scale: float) -> np.ndarray:
    """Compute the attention of one head in NumPy, float64, by loops over queries."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    out = []
    for i in range(len(q)):
        scores = np.where(visible[i], k @ q[i] * scale, -np.inf)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v)
    return np.array(out)


@pytest.mark.parametrize("make", [bert, bart])
@pytest.mark.parametrize("mask", [MASK, torch.ones_like(MASK)])
def test_a_model_without_prompts_is_unchanged(make: Any, mask: torch.Tensor) -> None:
    """Bit for bit what the model gives that was never touched (transformers' own
    attention)."""
    stock, installed = make(), make()
    install_prompts(installed)
    torch.testing.assert_close(run(installed, mask), run(stock, mask), rtol=0, atol=0)
    assert all(
        torch.equal(p, q)
        for p, q in zip(*map(nn.Module.parameters, (stock, installed)), strict=True)
    )


@pytest.mark.parametrize("case", ["bidirectional", "padded", "causal", "cached"])
def test_attention_with_prompts_equals_numpy(case: str) -> None:
    """Against `attend` on [K; Φ_K], [V; Φ_V]; √d_head divides. [tagsets eq 14]"""
    torch.manual_seed(1)
    queries, keys, count, size, heads = (2 if case == "cached" else 5), 5, 3, 8, 2
    q = torch.randn(2, heads, queries, size)
    k, v = torch.randn(2, 2, heads, keys, size).unbind(0)
    pair = (torch.randn(heads, count, size), torch.randn(2, heads, count, size))
    module = nn.Module()
    module.is_causal = case in ("causal", "cached")
    module.training = False
    visible = np.ones((2, queries, keys), bool)
    if module.is_causal:
        visible &= np.tri(queries, keys, keys - queries, dtype=bool)
    mask = None
    if case == "padded":
        visible[1, :, 2:] = False
        mask = torch.from_numpy(visible)[:, None]
    out, _ = compute_prompt_attention(
        module, q, k, v, mask, scaling=size**-0.5, prompts={module: pair}
    )
    assert out.shape == (2, queries, heads, size)
    every = np.concatenate([visible, np.ones((2, queries, count), bool)], axis=2)
    for row in range(2):
        for head in range(heads):
            whole_keys = torch.cat([k[row, head], pair[0][head]])
            whole_values = torch.cat([v[row, head], pair[1][row, head]])
            expected = attend(
                q[row, head], whole_keys, whole_values, every[row], 1 / np.sqrt(size)
            )
            np.testing.assert_allclose(out[row, :, head], expected, atol=1e-5)


@pytest.mark.parametrize("make", [bert, bart])
def test_padding_does_not_change_the_result(make: Any) -> None:
    """A sentence in a padded batch as alone, with prompts."""
    model = make()
    attentions = install_prompts(model)
    prompts = assign_prompts(
        attentions, Prompts(len(attentions), 4, 32, count=3, hidden=8)()
    )
    together = run(model, MASK, prompts=prompts)[1]
    options = (
        {} if make is bert else {"decoder_input_ids": TARGET[1:], "use_cache": False}
    )
    with torch.no_grad():
        alone = model(IDS[1:, :3], prompts=prompts, **options).last_hidden_state[0]
    size = 3 if make is bert else 4
    torch.testing.assert_close(together[:size], alone[:size], rtol=0, atol=1e-5)
    assert (run(model, MASK)[1][:size] - alone[:size]).abs().max() > 1e-3


def test_prompts_are_installed_in_every_self_attention() -> None:
    """Of BART the encoder's, then the decoder's; never a cross-attention."""
    model = bart()
    names = {module: name for name, module in model.named_modules()}
    assert [names[m] for m in install_prompts(model)] == [
        f"{side}.layers.{layer}.self_attn"
        for side in ("encoder", "decoder")
        for layer in (0, 1)
    ]
    model = bert()
    names = {module: name for name, module in model.named_modules()}
    assert [names[m] for m in install_prompts(model)] == [
        f"encoder.layer.{layer}.attention.self" for layer in range(3)
    ]


def test_each_layer_has_its_own_prompts() -> None:
    """A layer's prompts change that layer's output and what is above it, nothing below."""
    model = bart()
    attentions = install_prompts(model)
    pairs = Prompts(4, 4, 32, count=3, hidden=8)()
    with torch.no_grad():
        plain = model.encoder(IDS, MASK, output_hidden_states=True).hidden_states
        second = model.encoder(
            IDS, MASK, output_hidden_states=True, prompts={attentions[1]: pairs[1]}
        ).hidden_states
    assert torch.equal(plain[1], second[1])
    assert not torch.allclose(plain[2], second[2], atol=1e-3)


def test_the_projection_of_prompts_equals_numpy() -> None:
    """A loop over layers, prompts and heads in float64. [tagsets eq 15]"""
    prompts = Prompts(2, (4, 2), 8, count=3, hidden=5, seed=3)
    assert sorted(dict(prompts.named_parameters())) == ["q", "w1", "w2"]
    q, w1, w2 = (
        p.detach().double().numpy() for p in (prompts.q, prompts.w1, prompts.w2)
    )
    pairs = prompts()
    for layer, heads in enumerate((4, 2)):
        size = 8 // heads
        for c in range(3):
            projected = np.tanh(q[c] @ w1[layer]) @ w2[layer]
            for head in range(heads):
                part = slice(head * size, head * size + size)
                for prompt, expected in zip(
                    pairs[layer], (projected[:8], projected[8:]), strict=True
                ):
                    assert prompt.shape == (heads, 3, size)
                    np.testing.assert_allclose(
                        prompt[head, c].detach(), expected[part], atol=1e-6, rtol=1e-5
                    )


def test_pulled_gradients_equal_autograd() -> None:
    """Gradients of q for many losses at once, against autograd one by one, float64."""
    prompts = Prompts(3, (2, 4, 1), 8, count=4, hidden=5).double()
    parts = [part for pair in prompts() for part in pair]
    pulls = [torch.randn(6, *part.shape, dtype=torch.float64) for part in parts]
    pulled = prompts.pull_back(pulls)
    assert pulled.shape == (6, 4, 8)
    for row in range(6):
        weights = [part[row] for part in pulls]
        (expected,) = torch.autograd.grad(parts, prompts.q, weights, retain_graph=True)
        torch.testing.assert_close(pulled[row], expected, rtol=1e-10, atol=1e-12)


def test_impossible_sizes_and_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="width 10 is not a multiple of heads"):
        Prompts(2, 4, 10)
    with pytest.raises(ConfigError, match="each must be at least 1"):
        Prompts(2, 4, 8, count=0)
    with pytest.raises(ConfigError, match="heads for each layer"):
        Prompts(2, (4,), 8)
    config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match="'gpt2' do not take prompts"):
        install_prompts(transformers.GPT2Model(config))
