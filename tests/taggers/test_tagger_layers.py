"""The taggers' layers, compared with torch's modules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from fednotes.taggers.layers import (
    BEGIN,
    CHARACTERS,
    END,
    FIRST,
    INVENTORY,
    UNKNOWN,
    BiLSTM,
    Characters,
    PackedLayout,
    WordCNN,
    _run_recurrence,
    apply_linear,
    dropout,
    make_character_table,
    run_bilstm,
)

LENGTHS = [[1], [5, 5, 5], [3, 9, 1, 4, 9, 2]]
CPU = torch.device("cpu")


def _batch(
    lengths: list[int], columns: int
) -> tuple[list[Tensor], PackedLayout, Tensor]:
    """Return sentences in layout order, the layout, and the same as flat rows."""
    layout = PackedLayout.of(np.array(lengths), CPU)
    torch.manual_seed(len(lengths))
    sentences = [torch.randn(lengths[s], columns) for s in layout.order]
    flat = torch.stack(
        [sentences[r][t] for t, r in zip(layout.step, layout.row, strict=True)]
    )
    return sentences, layout, flat


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_layout_of_a_batch_equals_a_packed_sequence(lengths: list[int]) -> None:
    """Loops over sentences and steps; torch's packed sequence has the same rows."""
    sentences, layout, flat = _batch(lengths, 3)
    packed = pack_sequence(sentences)
    assert torch.equal(packed.data, flat)
    assert layout.sizes == tuple(packed.batch_sizes.tolist())
    place = {
        (int(t), int(r)): n
        for n, (t, r) in enumerate(zip(layout.step, layout.row, strict=True))
    }
    for (t, r), n in place.items():
        length = lengths[layout.order[r]]
        assert layout.reverse[n] == place[length - 1 - t, r]
        for offset in (-2, -1, 0, 1, 2):
            assert layout.find_shifted_rows(offset)[n] == place.get(
                (t + offset, r), layout.tokens
            )
        assert layout.find_padded_rows()[r, t] == n
    assert (
        int((layout.find_padded_rows() < layout.tokens).sum())
        == layout.tokens
        == sum(lengths)
    )


def as_torchs(ours: BiLSTM) -> nn.LSTM:
    """Return torch's LSTM with the same weights; its second bias is zero."""
    inputs, layers = ours.get_parameter("weight_ih_l0").shape[2], ours.num_layers
    theirs = nn.LSTM(inputs, ours.units, layers, bidirectional=True)
    with torch.no_grad():
        for layer in range(layers):
            for direction, end in enumerate(("", "_reverse")):
                for kind in ("weight_ih", "weight_hh"):
                    source = ours.get_parameter(f"{kind}_l{layer}")
                    theirs.get_parameter(f"{kind}_l{layer}{end}").copy_(
                        source[direction]
                    )
                bias = ours.get_parameter(f"bias_l{layer}")[direction]
                theirs.get_parameter(f"bias_ih_l{layer}{end}").copy_(bias)
                theirs.get_parameter(f"bias_hh_l{layer}{end}").zero_()
    return theirs


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_lstm_equals_that_of_torch(
    lengths: list[int], layers: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nn.LSTM on the packed sequence with the same weights (its second bias zero):
    outputs and all gradients, the input's too; two frozen or trained parts read as
    their concatenation."""
    if not compiled:

        def plain(
            a: Tensor, b: Tensor, w: Tensor, sizes: tuple[int, ...]
        ) -> tuple[Tensor, Tensor]:
            return _run_recurrence(a, w[0], sizes), _run_recurrence(b, w[1], sizes)

        monkeypatch.setattr("fednotes.taggers.layers.run_bilstm", plain)
    sentences, layout, flat = _batch(lengths, 7)
    units = 5
    ours = BiLSTM(7, units, layers)
    with torch.no_grad():
        for layer in range(layers):
            bias = getattr(ours, f"bias_l{layer}")
            bias.copy_(torch.randn_like(bias))
    theirs = as_torchs(ours)
    for sentence in sentences:
        sentence.requires_grad_()
    flat.requires_grad_()
    out = ours([flat[:, :3], flat[:, 3:]], layout)
    expected = theirs(pack_sequence(sentences))[0]
    torch.testing.assert_close(out, expected.data, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected.data * weights).sum().backward()
    input_grad = pack_sequence([s.grad for s in sentences]).data
    torch.testing.assert_close(flat.grad, input_grad, rtol=1e-4, atol=1e-5)
    for layer in range(layers):
        for d, end in enumerate(("", "_reverse")):
            for mine, name in (
                ("weight_ih", "weight_ih"),
                ("weight_hh", "weight_hh"),
                ("bias", "bias_ih"),
            ):
                grad = getattr(ours, f"{mine}_l{layer}").grad[d]
                torch_grad = getattr(theirs, f"{name}_l{layer}{end}").grad
                torch.testing.assert_close(grad, torch_grad, rtol=1e-4, atol=1e-5)


def test_dropout_applies_between_stacked_lstm_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's LSTM layers one by one, with fixed masks on what goes from one to the
    next.

    Nothing is dropped below the first layer and above the last: the tagger does that.
    """
    sentences, layout, flat = _batch([3, 9, 1, 4, 9, 2], 7)
    stacked = BiLSTM(7, 5, 3)
    masks = [torch.randn(layout.tokens, 10) for _ in range(2)]
    calls: list[tuple[float, bool]] = []

    def masked(x: Tensor, rate: float, training: bool) -> Tensor:
        calls.append((rate, training))
        return x * masks[len(calls) - 1]

    with monkeypatch.context() as patch:
        patch.setattr("fednotes.taggers.layers.dropout", masked)
        out = stacked([flat], layout, 0.3)
    assert calls == [(0.3, True), (0.3, True)]

    packed = pack_sequence(sentences)
    for layer in range(3):
        single = BiLSTM(packed.data.shape[1], 5, 1)
        with torch.no_grad():
            for name in ("weight_ih", "weight_hh", "bias"):
                source = stacked.get_parameter(f"{name}_l{layer}")
                single.get_parameter(f"{name}_l0").copy_(source)
        packed = as_torchs(single)(packed)[0]
        if layer < 2:
            packed = packed._replace(data=packed.data * masks[layer])
    torch.testing.assert_close(out, packed.data, rtol=1e-5, atol=1e-5)

    stacked.eval()
    assert torch.equal(stacked([flat], layout, 0.3), stacked([flat], layout))


def test_the_forget_gate_starts_with_bias_1() -> None:
    """Each layer and direction begins with bias 1 at the forget gate and 0 at all
    others.

    Jozefowicz et al. 2015. torch's own gates say which the forget gate is: with no
    input and no recurrent weights one step multiplies a cell of 1 by sigmoid(1) and
    adds sigmoid(0) tanh(0) = 0.
    """
    theirs = as_torchs(BiLSTM(7, 5, 2))
    for name in ("l0", "l0_reverse", "l1", "l1_reverse"):
        bias = theirs.get_parameter(f"bias_ih_{name}")
        assert bias.sum() == 5
        cell = nn.LSTMCell(7, 5)
        with torch.no_grad():
            for parameter in cell.parameters():
                parameter.zero_()
            cell.bias_ih.copy_(bias)
        hidden, memory = cell(torch.zeros(1, 7), (torch.zeros(1, 5), torch.ones(1, 5)))
        retained = 1 / (1 + np.exp(-1))
        np.testing.assert_allclose(
            memory.detach(), np.full((1, 5), retained), rtol=1e-6
        )
        np.testing.assert_allclose(
            hidden.detach(), np.full((1, 5), np.tanh(retained) / 2), rtol=1e-6
        )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_word_cnn_equals_conv1d(lengths: list[int]) -> None:
    """F.conv1d over each sentence alone, zeros at its ends (an even width has one more
    zero behind), with gradients."""
    _, layout, flat = _batch(lengths, 6)
    flat.requires_grad_()
    cnn = WordCNN(6, 4, (3, 2, 4, 1))
    with torch.no_grad():
        for parameter in cnn.parameters():
            parameter.copy_(torch.randn_like(parameter))
    out = cnn([flat[:, :2], flat[:, 2:]], layout)
    weights = torch.randn_like(out)
    parameters = list(cnn.parameters())
    grads = torch.autograd.grad((out * weights).sum(), [flat, *parameters])
    pieces = []
    for sentence in unpack_sequence(
        torch.nn.utils.rnn.PackedSequence(flat, torch.tensor(layout.sizes))
    ):
        columns = []
        for width in cnn.widths:
            # (filters, d, width)
            kernel = getattr(cnn, f"weight_{width}").permute(1, 2, 0)
            padded = F.pad(sentence.T, ((width - 1) // 2, width // 2))
            columns.append(
                F.conv1d(padded[None], kernel, getattr(cnn, f"bias_{width}"))[0].T
            )
        pieces.append(torch.cat(columns, dim=1).relu())
    expected = pack_sequence(pieces).data
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    expected_grads = torch.autograd.grad(
        (expected * weights).sum(), [flat, *parameters]
    )
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_deep_word_cnn_equals_one_of_torch_modules(
    lengths: list[int], pieces: int
) -> None:
    """F.conv1d over each sentence alone; maximum of the pieces and layer norm, or ReLU;
    sums with the layer below; all gradients."""
    _, layout, flat = _batch(lengths, 6)
    flat.requires_grad_()
    cnn = WordCNN(6, 4, (3, 2), layers=3, pieces=pieces)
    with torch.no_grad():
        for parameter in cnn.parameters():
            parameter.copy_(torch.randn_like(parameter))
    out = cnn([flat[:, :2], flat[:, 2:]], layout)
    packed = nn.utils.rnn.PackedSequence(flat, torch.tensor(layout.sizes))
    sentences = []
    for sentence in unpack_sequence(packed):
        x = _convolved(cnn, sentence)
        for layer in cnn.above:
            x = x + _convolved(layer, x)
        sentences.append(x)
    expected = pack_sequence(sentences).data
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(out)
    inputs = [flat, *cnn.parameters()]
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-3, atol=1e-3)


def test_dropout_applies_to_the_change_of_each_further_cnn_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layer below goes on whole; the tagger drops what leaves the uppermost."""
    _, layout, flat = _batch([3, 9, 1, 4, 9, 2], 6)
    cnn = WordCNN(6, 4, (3,), layers=3, pieces=2)
    masks = [torch.randn(layout.tokens, 4) for _ in range(2)]
    calls: list[tuple[float, bool]] = []

    def masked(x: Tensor, rate: float, training: bool) -> Tensor:
        calls.append((rate, training))
        return x * masks[len(calls) - 1]

    monkeypatch.setattr("fednotes.taggers.layers.dropout", masked)
    out = cnn([flat], layout, 0.3)
    assert calls == [(0.3, True)] * 2
    expected = _lowest(cnn)([flat], layout)
    for layer, mask in zip(cnn.above, masks, strict=True):
        expected = expected + mask * layer([expected], layout)
    torch.testing.assert_close(out, expected)


def _lowest(cnn: WordCNN) -> WordCNN:
    """Return a copy of the first layer."""
    columns = cnn.get_parameter("weight_3").shape[2]
    layer = WordCNN(columns, cnn.filters, cnn.widths, pieces=cnn.pieces)
    names = layer.state_dict()
    layer.load_state_dict({n: v for n, v in cnn.state_dict().items() if n in names})
    return layer


def _convolved(layer: nn.Module, sentence: Tensor) -> Tensor:
    """Return one layer's output for one sentence (tokens, columns)."""
    columns = []
    for width in (3, 2):
        kernel = layer.get_parameter(f"weight_{width}").permute(1, 2, 0)
        padded = F.pad(sentence.T, ((width - 1) // 2, width // 2))
        y = F.conv1d(padded[None], kernel, layer.get_parameter(f"bias_{width}"))[0].T
        of_pieces = y.unflatten(1, (-1, 4))  # (tokens, pieces, filters)
        columns.append(of_pieces.amax(1) if len(of_pieces[0]) > 1 else y.relu())
    out = torch.cat(columns, dim=1)
    if not hasattr(layer, "norm"):
        return out
    centred = out - out.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return scaled * layer.norm.weight + layer.norm.bias


def test_the_character_table_equals_one_made_by_hand() -> None:
    """By hand: markers, an unknown character, a word too long (head and tail stay)."""
    table, lengths = make_character_table(["ab", "患b", "", "abcdefgh"], 7)
    a = FIRST + CHARACTERS.index("a")
    assert table[0].tolist() == [BEGIN, a, a + 1, END, 0, 0, 0]
    assert table[1].tolist() == [BEGIN, UNKNOWN, a + 1, END, 0, 0, 0]
    assert table[2].tolist() == [BEGIN, END, 0, 0, 0, 0, 0]
    assert table[3].tolist() == [BEGIN, a, a + 1, a + 2, a + 6, a + 7, END]
    assert lengths.tolist() == [4, 4, 2, 7]


def test_the_character_inventory_is_fixed_across_versions() -> None:
    """Saved models depend on it: its size and digest never change."""
    import hashlib

    assert len(set(CHARACTERS)) == len(CHARACTERS) == INVENTORY - FIRST <= 251
    assert hashlib.sha256(CHARACTERS.encode()).hexdigest()[:16] == "6b71ab099e2ab5cd"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["compiled", "torch"]
)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_the_character_cnn_equals_conv1d(width: int, dtype: torch.dtype) -> None:
    """Embedding and F.conv1d over each word alone, maximum, ReLU; values and gradients."""
    forms = [
        "aspirin",
        "I",
        "5",
        "HCl",
        "a-b",
        "pseudohypoparathyroidism",
        "µg",
        "aspirin",
    ]
    table, lengths = make_character_table(forms, 16)
    torch.manual_seed(width)
    layer = Characters(6, 9, width).to(dtype)
    with torch.no_grad():
        layer.bias.copy_(torch.randn(9))
    out = layer(table, lengths)
    weights = torch.randn_like(out)
    parameters = [layer.embedding, layer.weight, layer.bias]
    grads = torch.autograd.grad((out * weights).sum(), parameters)
    kernel = layer.weight.permute(1, 2, 0)  # (filters, dim, width)
    rows = []
    for word, length in zip(table, lengths, strict=True):
        embedded = layer.embedding[torch.from_numpy(word[:length].astype(np.int64))].T
        padded = F.pad(embedded, ((width - 1) // 2, width // 2))
        rows.append(F.conv1d(padded[None], kernel, layer.bias)[0].amax(dim=1).relu())
    expected = torch.stack(rows)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    expected_grads = torch.autograd.grad((expected * weights).sum(), parameters)
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_computing_each_word_once_equals_computing_every_token() -> None:
    """Each word computed once and repeated = every token computed: values and
    gradients."""
    forms = ["no", "pain", "no", "gain", "no", "pain"]
    layer = Characters(5, 7, 3)
    every = layer(*make_character_table(forms, 12))
    unique, position = np.unique(forms, return_inverse=True)
    once = F.embedding(
        torch.from_numpy(position), layer(*make_character_table(list(unique), 12))
    )
    assert torch.equal(every, once)
    weights = torch.randn_like(every)
    for by_word, by_token in zip(
        torch.autograd.grad((every * weights).sum(), list(layer.parameters())),
        torch.autograd.grad((once * weights).sum(), list(layer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(by_word, by_token, rtol=1e-5, atol=1e-6)


def test_a_layer_over_parts_equals_one_over_their_concatenation() -> None:
    parts = [
        torch.randn(4, 2),
        torch.randn(4, 3, requires_grad=True),
        torch.randn(4, 1),
    ]
    weight, bias = torch.randn(5, 6, requires_grad=True), torch.randn(5)
    expected = F.linear(torch.cat(parts, 1), weight, bias)
    torch.testing.assert_close(apply_linear(parts, weight, bias), expected)


# Half a unit in the last place of bfloat16, which has 8 significant bits.
BFLOAT16 = 2.0**-8


@pytest.mark.parametrize(
    "make", [lambda: BiLSTM(7, 5, 2), lambda: WordCNN(7, 4, (3, 2))]
)
def test_autocast_rounds_products_and_keeps_float32_between_them(
    make: Callable[[], nn.Module],
) -> None:
    """Beside the same layer in float32, with its outputs and gradients."""
    _, layout, flat = _batch([9, 4, 1], 7)
    layer = make()

    def run() -> tuple[Tensor, list[Tensor]]:
        out = layer([flat], layout)
        return out, list(torch.autograd.grad(out.sum(), list(layer.parameters())))

    exact, exact_gradients = run()
    with torch.autocast("cpu", torch.bfloat16):
        rounded, gradients = run()
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=8 * BFLOAT16)
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.float32
        error = float((gradient - expected).norm() / expected.norm())
        assert error < 8 * BFLOAT16


def test_the_compiled_recurrence_under_autocast_equals_that_of_torch() -> None:
    """Only the products with the recurrent weights are rounded."""
    sizes = (3, 2, 2, 1)
    torch.manual_seed(4)
    gates = torch.randn(sum(sizes), 20)
    across = torch.randn(2, 20, 5)
    with torch.autocast("cpu", torch.bfloat16):
        ahead, back = run_bilstm(gates, gates, across, sizes)
        expected = [_run_recurrence(gates, across[d], sizes) for d in range(2)]
    in_float32, _ = run_bilstm(gates, gates, across, sizes)
    # A difference in float32 can move a product to the next number of bfloat16.
    torch.testing.assert_close(ahead, expected[0], rtol=0, atol=2 * BFLOAT16)
    torch.testing.assert_close(back, expected[1], rtol=0, atol=2 * BFLOAT16)
    assert not torch.equal(ahead, in_float32)


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_dropout_has_the_given_rate_and_keeps_the_mean(rate: float) -> None:
    """A million ones: dropped with the given frequency (5 standard deviations), the
    mean kept, neighbours and columns independent, the gradient the same mask; off
    outside training."""
    x = torch.ones(1000, 1001, requires_grad=True)
    torch.manual_seed(4)
    out = dropout(x, rate, True)
    dropped = (out == 0).double()
    assert (
        abs(dropped.mean().item() - rate) < 5 * (rate * (1 - rate) / x.numel()) ** 0.5
    )
    assert out.unique().numel() == 2
    assert out.max().item() == pytest.approx(1 / (1 - rate), rel=1e-4)
    centred = dropped - dropped.mean()
    for neighbours in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(neighbours.mean().item()) < 5 * rate * (1 - rate) / x.numel() ** 0.5
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)
    assert dropout(x, rate, False) is x
    assert dropout(x, 0.0, True) is x
