"""The CRF's recursions on eight sentences at a time.

Each of the eight sentences of a group fills one lane of a vector, and every operation
treats all lanes alike. Therefore no bit of a sentence's result depends on its lane, on
the other sentences, on padding or on thread settings.

log Z and the expected counts come from the scaled forward-backward algorithm (Rabiner
1989, V.A) in exp space: one `exp` per emission, and products of small matrices with
vectors. For each sentence, with M = exp(transitions) and f_t = exp(emissions_t):

    alpha_1 = exp(start) * f_1        alpha_t = (alpha_t-1 @ M) * f_t
    beta_L  = exp(end)                beta_t  = M @ after_t+1,  after_t = beta_t * f_t

    Z                      = alpha_L @ exp(end)
    p(y_t = i)             = alpha_t[i] beta_t[i] / Σ_k alpha_t[k] beta_t[k]
    p(y_t = i, y_t+1 = j)  = alpha_t[i] M[i, j] after_t+1[j] / Σ_k alpha_t[k] beta_t[k]

Messages are multiplied by a power of two at every fourth position, which changes no
digit. Posteriors are normalised at each position, so these scales do not matter.

The result is used for a sentence only if it provably loses no precision: every factor,
and every message before it is scaled, is either a structural zero (forbidden) or so far
above the smallest double that no product can underflow. Relative to the maximum:

    message >= 1e-100, exp(transition) >= 1e-50, exp(emission) >= 1e-150

Smaller factors are raised to 1e-150, so the message that they meet breaks the first
rule. Other sentences (for example, with emissions some 230 apart) are left to the
recursions in log space in `crf_kernels.py`.

The best tags come from the Viterbi algorithm:

    score_1[j] = start[j] + emissions_1[j]
    score_t[j] = max_i (score_t-1[i] + transitions[i, j]) + emissions_t[j]

Arrays of lanes have the shape (tokens, columns, LANES). The scaled algorithm computes
four tags at once, and sums the counts of four positions at once. Its arrays therefore
have columns = tags, rounded up to a multiple of four, and four unused positions after
the last token.
"""

# mypy: ignore-errors
# ruff: noqa: ARG001, ARG002
# The kernels' types are those of their numba signatures, and numba prescribes the
# parameters of functions that extend it.

from __future__ import annotations

import math
import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import (
    intrinsic,
    lower_builtin,
    lower_cast,
    models,
    register_model,
)
from numba.np.arrayobj import make_array
from numba.np.unsafe.ndarray import to_fixed_tuple

from fednotes.core.kernels import kernel_by_type, part

LANES = 8

# ---- vectors of lanes ----------------------------------------------------------------
# numba has no type for a vector, and LLVM vectorises few loops over eight numbers in
# arrays, because it must assume that these overlap.
#
# An `@intrinsic` describes a function that kernels call. It receives the types of the
# call's arguments, and returns the function's type, result(parameters), and `generate`,
# which returns its LLVM instructions; `args` there are the arguments. An array of
# floats is only aligned to 8 bytes, so vectors are loaded and stored with `align=8`.

_FLOATS = ir.VectorType(ir.DoubleType(), LANES)
_BITS = ir.VectorType(ir.IntType(64), LANES)
_MAY_FUSE = ("contract",)  # as in `core.kernels.part`


class _Lanes(types.Type):
    """The numba type of a float64 number for each lane."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    """How `_Lanes` is represented: as a vector of LLVM."""

    def __init__(self, manager, lanes) -> None:
        super().__init__(manager, lanes, _FLOATS)


@infer_global(operator.add)
@infer_global(operator.sub)
@infer_global(operator.mul)
@infer_global(operator.truediv)
class _Arithmetic(AbstractTemplate):
    """Types of `a + b` and others, where a or b may be one number for all lanes."""

    def generic(self, args, kws):
        """Return the types of an operation on lanes; None for other operands."""
        if _lanes in args and all(a in (_lanes, types.float64) for a in args):
            return signature(_lanes, _lanes, _lanes)
        return None


@lower_builtin(operator.add, _lanes, _lanes)
def _lower_add(context, builder, signature, args):
    """Return the instruction for `a + b` of lanes."""
    return builder.fadd(*args, flags=_MAY_FUSE)


@lower_builtin(operator.sub, _lanes, _lanes)
def _lower_sub(context, builder, signature, args):
    """Return the instruction for `a - b` of lanes."""
    return builder.fsub(*args, flags=_MAY_FUSE)


@lower_builtin(operator.mul, _lanes, _lanes)
def _lower_mul(context, builder, signature, args):
    """Return the instruction for `a * b` of lanes."""
    return builder.fmul(*args, flags=_MAY_FUSE)


@lower_builtin(operator.truediv, _lanes, _lanes)
def _lower_truediv(context, builder, signature, args):
    """Return the instruction for `a / b` of lanes."""
    return builder.fdiv(*args)


@lower_cast(types.float64, _lanes)
def _lower_spread(context, builder, from_type, to_type, value):
    """Return the instructions that convert one number to a number for each lane."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, everywhere)


def _find_pointer(context, builder, array_type, array, indices):
    """Return the address of an element of a contiguous array."""
    contents = make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, contents, indices)


def _find_vector_address(context, builder, array_type, array, indices):
    """Return the address of the vector array[t, j], as a pointer to `_FLOATS`.

    Its first number is the element [t, j, 0].
    """
    first_lane = [*indices, ir.Constant(indices[0].type, 0)]
    address = _find_pointer(context, builder, array_type, array, first_lane)
    return builder.bitcast(address, _FLOATS.as_pointer())


@intrinsic
def _spread(typing_context, value):
    """Return one number for all lanes."""

    def generate(context, builder, signature, args):
        return args[0]  # after the cast

    return _lanes(_lanes), generate


@intrinsic
def _spread_element(typing_context, array, i, j):
    """Return array[i, j] for all lanes."""

    def generate(context, builder, signature, args):
        address = _find_pointer(context, builder, signature.args[0], args[0], args[1:])
        return _lower_spread(context, builder, None, None, builder.load(address))

    return _lanes(array, types.intp, types.intp), generate


@intrinsic
def _load(typing_context, array, t, j):
    """Return the vector array[t, j] of an array (tokens, columns, LANES)."""

    def generate(context, builder, signature, args):
        array_value, t_value, j_value = args
        address = _find_vector_address(
            context, builder, array, array_value, [t_value, j_value]
        )
        return builder.load(address, align=8)

    return _lanes(array, types.intp, types.intp), generate


@intrinsic
def _store(typing_context, array, t, j, value):
    """Set the vector array[t, j] of an array (tokens, columns, LANES)."""

    def generate(context, builder, signature, args):
        array_value, t_value, j_value, vector = args
        address = _find_vector_address(
            context, builder, array, array_value, [t_value, j_value]
        )
        builder.store(vector, address, align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, _lanes), generate


@intrinsic
def _gather(typing_context, numbers, begins, k):
    """Return numbers[begins[lane] + k] for each lane, as float64."""

    def generate(context, builder, signature, args):
        vector = ir.Constant(
            ir.VectorType(context.get_value_type(numbers.dtype), LANES), ir.Undefined
        )
        numbers_value, begins_value, k_value = args
        for lane in range(LANES):
            place = builder.add(builder.extract_value(begins_value, lane), k_value)
            address = _find_pointer(context, builder, numbers, numbers_value, [place])
            number = builder.load(address)
            vector = builder.insert_element(vector, number, ir.IntType(32)(lane))
        return vector if vector.type == _FLOATS else builder.fpext(vector, _FLOATS)

    return _lanes(numbers, begins, types.intp), generate


@intrinsic
def _scatter(typing_context, numbers, begins, k, value):
    """Set numbers[begins[lane] + k] for each lane."""

    def generate(context, builder, signature, args):
        dtype = context.get_value_type(numbers.dtype)
        numbers_value, begins_value, k_value, vector = args
        if dtype != ir.DoubleType():
            vector = builder.fptrunc(vector, ir.VectorType(dtype, LANES))
        for lane in range(LANES):
            place = builder.add(builder.extract_value(begins_value, lane), k_value)
            address = _find_pointer(context, builder, numbers, numbers_value, [place])
            number = builder.extract_element(vector, ir.IntType(32)(lane))
            builder.store(number, address)
        return context.get_dummy_value()

    return types.void(numbers, begins, types.intp, _lanes), generate


@intrinsic
def _select_where_less(typing_context, a, b, value, otherwise):
    """Return `value` in the lanes where a < b, else `otherwise`; NaN is not less."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), *args[2:])

    return _lanes(_lanes, _lanes, _lanes, _lanes), generate


@intrinsic
def _select_where_equal(typing_context, a, b, value, otherwise):
    """Return `value` in the lanes where a == b, else `otherwise`."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("==", args[0], args[1]), *args[2:])

    return _lanes(_lanes, _lanes, _lanes, _lanes), generate


_EXPONENT_MASK = 0x7FF << 52


@intrinsic
def _raise_two(typing_context, rounded):
    """Return 2**n for n = rounded - _ROUND, an integer."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], _BITS)
        exponent = builder.shl(bits, ir.Constant(_BITS, 52))
        power = builder.add(exponent, ir.Constant(_BITS, 1023 << 52))
        return builder.bitcast(power, _FLOATS)

    return _lanes(_lanes), generate


@intrinsic
def _find_exponent(typing_context, x):
    """Return the n of 2**n <= x < 2**(n + 1), for positive x."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], _BITS)
        biased = builder.lshr(bits, ir.Constant(_BITS, 52))
        # An integer below 2**52 becomes a float64 number as the low bits of 2**52.
        as_float = builder.or_(biased, ir.Constant(_BITS, (1023 + 52) << 52))
        offset = ir.Constant(_FLOATS, 2.0**52 + 1023)
        return builder.fsub(builder.bitcast(as_float, _FLOATS), offset)

    return _lanes(_lanes), generate


@intrinsic
def _invert_power(typing_context, x):
    """Return 2**-n for 2**n <= x < 2**(n + 1), for positive x."""

    def generate(context, builder, signature, args):
        bits = builder.bitcast(args[0], _BITS)
        exponent = builder.and_(bits, ir.Constant(_BITS, _EXPONENT_MASK))
        inverse = builder.sub(ir.Constant(_BITS, 2046 << 52), exponent)
        return builder.bitcast(inverse, _FLOATS)

    return _lanes(_lanes), generate


# ---- groups of sentences -------------------------------------------------------------


@part
def _make_aligned_array(rows, columns):
    """Return an array (rows, columns, LANES) in which no lanes cross a cache line."""
    size = rows * columns * LANES
    memory = np.empty(size + LANES)
    skip = (-memory.ctypes.data % 64) // 8
    return memory[skip : skip + size].reshape(rows, columns, LANES)


@part
def _order_by_length(lengths, tokens):
    """Return the numbers of the sentences, shorter ones first."""
    begins = np.zeros(tokens + 2, np.int64)  # of the sentences with each length
    for n in range(lengths.size):
        begins[lengths[n] + 1] += 1
    for length in range(tokens + 1):
        begins[length + 1] += begins[length]
    order = np.empty_like(lengths)
    for n in range(lengths.size):
        order[begins[lengths[n]]] = n
        begins[lengths[n]] += 1
    return order


@part
def _choose_group(order, begin, lengths, sentences, group_lengths, last_positions):
    """Set the numbers, lengths and last positions of a group's sentences.

    Returns the number of sentences. The last one also fills the lanes that remain.
    """
    group_size = min(LANES, order.size - begin)
    for lane in range(LANES):
        n = order[begin + min(lane, group_size - 1)]
        sentences[lane] = n
        group_lengths[lane] = lengths[n]
        last_positions[0, 0, lane] = lengths[n] - 1
    return group_size


# ---- parts of the scaled algorithm ---------------------------------------------------

_SMALLEST_MESSAGE = 1e-100
_SMALLEST_TRANSITION = -115.0  # natural logarithm of 1e-50
_SMALLEST_EMISSION = -345.0  # natural logarithm of 1e-150
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# 1.5 * 2**52: adding it rounds to an integer, kept in the low bits
_ROUND = 6755399441055744.0


@part
def _compute_exp(x):
    """Return exp(x) for x <= 0: 0 for -inf, 1e-150 for others below -345, NaN for NaN.

    exp(x) = 2**n exp(r), |r| <= ln(2)/2, Taylor to degree 13 (error below 1e-17).
    """
    clamped = _select_where_less(x, _SMALLEST_EMISSION, _SMALLEST_EMISSION, x)
    rounded = clamped * _LOG2E + _ROUND
    n = rounded - _ROUND
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return _select_where_equal(x, -np.inf, 0.0, p * _raise_two(rounded))


@part
def _exponentiate_scores(scores, out):
    """Set out to exp(score - maximum), 0 where forbidden.

    Returns the maximum, and whether no product can underflow.
    """
    maximum = -np.inf
    is_safe = True
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            maximum = max(maximum, scores[i, j])
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            x = scores[i, j]
            if x != -np.inf:
                is_safe = is_safe and x - maximum >= _SMALLEST_TRANSITION  # not if NaN
                out[i, j] = math.exp(x - maximum)
    return maximum, is_safe and math.isfinite(maximum)


@part
def _exponentiate_all_scores(start, transitions, end, exp_start, matrix, exp_end):
    """Set exp_start, matrix and exp_end to exp(score - maximum) of each kind of score.

    Returns the maxima of start, transitions and end, and whether no product can
    underflow.
    """
    max_start, start_is_safe = _exponentiate_scores(start, exp_start)
    max_transition, transitions_are_safe = _exponentiate_scores(transitions, matrix)
    max_end, end_is_safe = _exponentiate_scores(end, exp_end)
    are_safe = start_is_safe and transitions_are_safe and end_is_safe
    return (max_start, max_transition, max_end), are_safe


@part
def _set_factors(emissions, begins, shortest, longest, last_positions, factors, shifts):
    """Set factors to exp(emission - maximum), 0 after a sentence's end.

    shifts is set to Σ maximum_t.
    """
    tags = emissions.shape[2]
    numbers = emissions.reshape(emissions.size)
    last = _load(last_positions, 0, 0)
    shift = _spread(0.0)
    for t in range(longest):
        position = _spread(float(t))
        maximum = _gather(numbers, begins, t * tags)
        for j in range(tags):
            x = _gather(numbers, begins, t * tags + j)
            _store(factors, t, j, x)
            maximum = _select_where_less(maximum, x, x, maximum)
        shift = shift + _select_where_less(last, position, 0.0, maximum)
        for j in range(tags):
            _store(factors, t, j, _compute_exp(_load(factors, t, j) - maximum))
        if t >= shortest:
            for j in range(tags):
                factor = _load(factors, t, j)
                _store(factors, t, j, _select_where_less(last, position, 0.0, factor))
    _store(shifts, 0, 0, shift)


@part
def _multiply(source, s, matrix, target, t):
    """Set target[t] to source[s] @ matrix.

    Columns are processed in fours, so that the sums stay in registers.
    """
    rows, columns = matrix.shape
    for j in range(0, columns, 4):
        a = _spread(0.0)
        b = _spread(0.0)
        c = _spread(0.0)
        d = _spread(0.0)
        for i in range(rows):
            x = _load(source, s, i)
            a = a + x * _spread_element(matrix, i, j)
            b = b + x * _spread_element(matrix, i, j + 1)
            c = c + x * _spread_element(matrix, i, j + 2)
            d = d + x * _spread_element(matrix, i, j + 3)
        _store(target, t, j, a)
        _store(target, t, j + 1, b)
        _store(target, t, j + 2, c)
        _store(target, t, j + 3, d)


@part
def _rescale(messages, t, tags):
    """Multiply messages[t] by 2**-n so that their sum is from 1 to 2; return n."""
    total = _load(messages, t, 0)
    for j in range(1, tags):
        total = total + _load(messages, t, j)
    inverse = _invert_power(total)
    for j in range(tags):
        _store(messages, t, j, _load(messages, t, j) * inverse)
    return _find_exponent(total)


@part
def _find_smallest(messages, t, tags, smallest):
    """Return the smallest of `smallest` and the messages that are not 0."""
    for j in range(tags):
        message = _load(messages, t, j)
        nonzero = _select_where_equal(message, 0.0, 1.0, message)
        smallest = _select_where_less(nonzero, smallest, nonzero, smallest)
    return smallest


@part
def _run_forward(  # noqa: PLR0913 - the arrays of a compiled kernel
    longest, exp_start, matrix, factors, alpha, last_positions, exponents, smallest
):
    """Set alpha to the messages that leave each position, from the first token on.

    exponents is set to Σ n over the scales 2**-n, smallest to the smallest message.
    """
    tags = matrix.shape[0]
    last = _load(last_positions, 0, 0)
    exponent = _spread(0.0)
    least = _spread(1.0)
    for t in range(longest):
        if t == 0:
            for j in range(tags):
                _store(alpha, 0, j, _spread_element(exp_start, 0, j))
        else:
            _multiply(alpha, t - 1, matrix, alpha, t)
        for j in range(tags):
            _store(alpha, t, j, _load(alpha, t, j) * _load(factors, t, j))
        least = _find_smallest(alpha, t, tags, least)
        if t % 4 == 3:
            n = _rescale(alpha, t, tags)
            exponent = exponent + _select_where_less(last, float(t), 0.0, n)
    _store(exponents, 0, 0, exponent)
    _store(smallest, 0, 0, least)


@part
def _run_backward(  # noqa: PLR0913 - the arrays of a compiled kernel
    shortest, longest, exp_end, matrix_t, factors, alpha, beta, last_positions,
    smallest, begins, gold, sentences, lengths, unary,
):  # fmt: skip
    """Replace factors by the messages `after`, and alpha by alpha_t / Σ alpha_t beta_t.

    unary[n, t] is set to the posteriors alpha_t beta_t / Σ alpha_t beta_t, less the
    gold tags, and smallest to the smallest message. beta is scratch space for one
    position.
    """
    posteriors = unary.reshape(unary.size)
    tags = matrix_t.shape[0]
    last = _load(last_positions, 0, 0)
    after = factors
    least = _spread(1.0)
    for j in range(tags):
        _store(after, longest, j, _spread(0.0))
    for t in range(longest - 1, -1, -1):
        position = _spread(float(t))
        _multiply(after, t + 1, matrix_t, beta, 0)
        if t >= shortest - 1:
            for j in range(tags):
                arriving = _load(beta, 0, j)
                ending = _spread_element(exp_end, 0, j)
                message = _select_where_equal(last, position, ending, arriving)
                _store(beta, 0, j, message)
        for j in range(tags):
            _store(after, t, j, _load(beta, 0, j) * _load(factors, t, j))
        least = _find_smallest(after, t, tags, least)
        if t % 4 == 3:
            _rescale(after, t, tags)
        _normalise(alpha, beta, t, tags, last)
        for j in range(tags):
            _scatter(posteriors, begins, t * tags + j, _load(beta, 0, j))
        if gold.size:
            _subtract_tags(beta, t, gold, sentences, lengths, unary)
    _store(smallest, 0, 0, least)


@part
def _normalise(alpha, beta, t, tags, last):
    """Divide alpha[t] by Σ alpha[t] beta[0], and set beta[0] to the posteriors.

    Both are 0 after a sentence's end.
    """
    total = _spread(0.0)
    for j in range(tags):
        total = total + _load(alpha, t, j) * _load(beta, 0, j)
    scale = _select_where_less(last, float(t), 0.0, _spread(1.0) / total)
    for j in range(tags):
        scaled = _load(alpha, t, j) * scale
        _store(alpha, t, j, scaled)
        _store(beta, 0, j, scaled * _load(beta, 0, j))


@part
def _subtract_tags(posteriors, t, gold, sentences, lengths, unary):
    """Set unary[n, t] to p(y_t = j) - 1 for the gold tag j of each lane's sentence n.

    The difference is rounded only once, to the type of unary.
    """
    for lane in range(LANES):
        n = sentences[lane]
        if t < lengths[lane]:
            tag = gold[n, t]
            unary[n, t, tag] = posteriors[0, tag, lane] - 1.0


@part
def _count_pairs(longest, alpha, after, pair_sums):
    """Set pair_sums[i, j] to Σ_t alpha[t, i] after[t + 1, j].

    Positions are processed in fours, so that each sum is loaded less often.
    """
    tags = pair_sums.shape[0]
    for i in range(tags):
        for j in range(tags):
            _store(pair_sums, i, j, _spread(0.0))
        for t in range(longest, longest + 4):  # read by the last block of four
            _store(alpha, t, i, _spread(0.0))
            _store(after, t, i, _spread(0.0))
    for t in range(0, longest - 1, 4):
        for i in range(tags):
            a = _load(alpha, t, i)
            b = _load(alpha, t + 1, i)
            c = _load(alpha, t + 2, i)
            d = _load(alpha, t + 3, i)
            for j in range(tags):
                early = a * _load(after, t + 1, j) + b * _load(after, t + 2, j)
                late = c * _load(after, t + 3, j) + d * _load(after, t + 4, j)
                _store(pair_sums, i, j, _load(pair_sums, i, j) + (early + late))


@part
def _write_expected_transitions(pair_sums, matrix, sentences, pairs):
    """Set pairs[n, i, j] to pair_sums[i, j] matrix[i, j] of sentence n's lane.

    pair_sums (tags, tags, LANES) are the results of `_count_pairs`, matrix (tags, tags)
    holds exp(transition - maximum), sentences (LANES,) is the sentence of each lane,
    and pairs (batch, tags, tags) gets the expected transitions.
    """
    tags = matrix.shape[0]
    counts = pairs.reshape(pairs.size)
    begins = to_fixed_tuple(sentences * (tags * tags), LANES)
    for i in range(tags):
        for j in range(tags):
            count = _load(pair_sums, i, j) * _spread_element(matrix, i, j)
            _scatter(counts, begins, i * tags + j, count)


@part
def _subtract_transitions(gold, group_size, sentences, lengths, pairs):
    """Subtract the gold transitions of the sentences n of a group from pairs[n]."""
    for lane in range(group_size):
        n = sentences[lane]
        for t in range(1, lengths[lane]):
            pairs[n, gold[n, t - 1], gold[n, t]] -= 1.0


@part
def _sum_last_position(alpha, exp_end, last_place, lane, tags):
    """Return Z of one lane, alpha_L @ exp_end, where L is `last_place`.

    Like alpha and exp_end, Z is scaled.
    """
    total = 0.0
    for j in range(tags):
        total += alpha[last_place, j, lane] * exp_end[0, j]
    return total


@part
def _write_log_z(  # noqa: PLR0913 - the arrays of a compiled kernel
    alpha, exp_end, tags, maxima, shifts, exponents, smallest, group_size, sentences,
    lengths, log_z, fits,
):  # fmt: skip
    """Set log_z[n] and fits[n] of the sentences n of a group, from forward messages.

    The messages were divided by exp of the maxima of the scores, by exp of those of the
    emissions (their sums are shifts) and by powers of two (whose exponents have the
    sums exponents). log Z gets all these back.
    """
    max_start, max_transition, max_end = maxima
    for lane in range(group_size):
        n = sentences[lane]
        length = lengths[lane]
        total = _sum_last_position(alpha, exp_end, length - 1, lane, tags)
        fits[n] = total > 0.0 and smallest[0, 0, lane] >= _SMALLEST_MESSAGE
        log_z[n] = math.log(total) + exponents[0, 0, lane] * _LN2
        log_z[n] += (
            shifts[0, 0, lane] + max_start + max_end + (length - 1) * max_transition
        )


@part
def _write_pairs(  # noqa: PLR0913 - the arrays of a compiled kernel
    longest, alpha, after, matrix, pair_sums, gold, group_size, sentences, lengths,
    pairs,
):  # fmt: skip
    """Set pairs[n] to the expected transitions, less those of gold, of a group."""
    _count_pairs(longest, alpha, after, pair_sums)
    _write_expected_transitions(pair_sums, matrix, sentences, pairs)
    if gold.size:
        _subtract_transitions(gold, group_size, sentences, lengths, pairs)


_SCORES = "float64[:, ::1], float64[:, ::1], float64[:, ::1]"
# For emissions of either type; the first counts have that type too.
SIGNATURES = [
    f"int64({of_emissions}, int64[::1], {_SCORES}, int64[:, ::1], b1,"
    f" float64[::1], {of_emissions}, float64[:, :, ::1], b1[::1])"
    for of_emissions in ("float32[:, :, ::1]", "float64[:, :, ::1]")
]


@kernel_by_type(*SIGNATURES)
def compute_scaled_partition(  # noqa: PLR0913 - the arrays of a compiled kernel
    emissions, lengths, start, transitions, end, gold, with_counts, log_z, unary,
    pairs, fits,
):  # fmt: skip
    """Set log_z (batch,) to log Z and, with `with_counts`, the expected counts.

    The expected counts are unary (batch, tokens, tags), the posteriors, which are 0
    after a sentence's end, and pairs (batch, tags, tags), the expected transitions.
    Unless gold (batch, tokens) is empty, the counts of these tags are subtracted. Other
    arguments are as in `crf_kernels.py`.

    Returns the number of sentences for which the algorithm may lose precision. For such
    a sentence, fits (batch,) is set to False and its other results are undefined.
    """
    batch, tokens, tags = emissions.shape
    # Four tags and four positions are computed at once; see the module's docstring.
    columns = (tags + 3) // 4 * 4
    positions = tokens + 4
    exp_start = np.zeros((1, columns))
    exp_end = np.zeros((1, columns))
    matrix = np.zeros((tags, columns))
    maxima, are_safe = _exponentiate_all_scores(
        start, transitions, end, exp_start, matrix, exp_end
    )
    if not are_safe:
        fits[:] = False
        return batch
    matrix_t = np.zeros((tags, columns))
    for i in range(tags):
        for j in range(tags):
            matrix_t[j, i] = matrix[i, j]

    order = _order_by_length(lengths, tokens)
    factors = _make_aligned_array(positions, columns)
    alpha = _make_aligned_array(positions, columns)
    beta = _make_aligned_array(1, columns)
    pair_sums = _make_aligned_array(tags, tags)
    # One number for each lane:
    last_positions = _make_aligned_array(1, 1)
    shifts = _make_aligned_array(1, 1)
    exponents = _make_aligned_array(1, 1)
    smallest_alpha = _make_aligned_array(1, 1)
    smallest_after = _make_aligned_array(1, 1)
    sentences = np.empty(LANES, np.int64)
    group_lengths = np.empty(LANES, np.int64)

    for begin in range(0, batch, LANES):
        group_size = _choose_group(
            order, begin, lengths, sentences, group_lengths, last_positions
        )
        shortest = group_lengths[0]
        longest = group_lengths[group_size - 1]
        begins = to_fixed_tuple(sentences * (tokens * tags), LANES)

        _set_factors(
            emissions, begins, shortest, longest, last_positions, factors, shifts
        )
        _run_forward(
            longest, exp_start, matrix, factors, alpha, last_positions, exponents,
            smallest_alpha,
        )  # fmt: skip
        _write_log_z(
            alpha, exp_end, tags, maxima, shifts, exponents, smallest_alpha, group_size,
            sentences, group_lengths, log_z, fits,
        )  # fmt: skip
        if not with_counts:
            continue

        _run_backward(
            shortest, longest, exp_end, matrix_t, factors, alpha, beta, last_positions,
            smallest_after, begins, gold, sentences, group_lengths, unary,
        )  # fmt: skip
        # `_run_backward` has normalised alpha and replaced the factors by messages.
        after = factors
        _write_pairs(
            longest, alpha, after, matrix, pair_sums, gold, group_size, sentences,
            group_lengths, pairs,
        )  # fmt: skip
        for lane in range(group_size):
            n = sentences[lane]
            # `_run_backward` has set the positions before `longest`.
            unary[n, longest:] = 0.0
            fits[n] = fits[n] and smallest_after[0, 0, lane] >= _SMALLEST_MESSAGE

    unfit = 0
    for n in range(batch):
        if not fits[n]:
            unfit += 1
    return unfit


# ---- the Viterbi algorithm -----------------------------------------------------------


@part
def _find_best_scores(  # noqa: PLR0913 - the arrays of a compiled kernel
    emissions, begins, longest, start, transitions, last_positions, scores, previous,
    broken,
):  # fmt: skip
    """Set the best score of each tag at each position, and the tag before it.

    Of equal scores, the lower tag wins. broken is set to 1 for sentences with an
    emission that is NaN or +inf, and to 0 for others.
    """
    tags = emissions.shape[2]
    numbers = emissions.reshape(emissions.size)
    last = _load(last_positions, 0, 0)
    flags = _spread(0.0)
    for t in range(longest):
        position = _spread(float(t))
        for j in range(tags):
            highest = _spread_element(start, 0, j)
            tag = _spread(0.0)
            if t > 0:
                highest = _spread(-np.inf)
                for i in range(tags):
                    score = _load(scores, t - 1, i) + _spread_element(transitions, i, j)
                    tag = _select_where_less(highest, score, float(i), tag)
                    highest = _select_where_less(highest, score, score, highest)
            x = _gather(numbers, begins, t * tags + j)
            _store(scores, t, j, highest + x)
            _store(previous, t, j, tag)
            flag = _select_where_less(x, np.inf, flags, 1.0)
            flags = _select_where_less(last, position, flags, flag)
    _store(broken, 0, 0, flags)


@part
def _trace_back(scores, previous, end, lane, last_place, best):
    """Set best (tokens,) to the tags of one lane, 0 after its last position.

    Returns whether any sequence is allowed.
    """
    tag = 0
    highest = -np.inf
    for i in range(end.shape[1]):
        score = scores[last_place, i, lane] + end[0, i]
        if score > highest:
            tag = i
            highest = score
    best[last_place + 1 :] = 0
    best[last_place] = tag
    for t in range(last_place, 0, -1):
        tag = np.int64(previous[t, tag, lane])
        best[t - 1] = tag
    return highest > -np.inf


@kernel_by_type(
    f"int64(float32[:, :, ::1], int64[::1], {_SCORES}, int64[:, ::1])",
    f"int64(float64[:, :, ::1], int64[::1], {_SCORES}, int64[:, ::1])",
)
def write_best_tags(emissions, lengths, start, transitions, end, best):
    """Set best (batch, tokens) to the tags with the highest score.

    Ties go to the lower tag; tags are 0 after a sentence's end. Returns the first
    sentence for which no sequence is allowed or an emission is not finite, or -1.
    """
    batch, tokens, tags = emissions.shape
    order = _order_by_length(lengths, tokens)
    scores = _make_aligned_array(tokens, tags)
    previous = _make_aligned_array(tokens, tags)
    last_positions = _make_aligned_array(1, 1)
    broken = _make_aligned_array(1, 1)
    sentences = np.empty(LANES, np.int64)
    group_lengths = np.empty(LANES, np.int64)
    failed = batch
    for begin in range(0, batch, LANES):
        group_size = _choose_group(
            order, begin, lengths, sentences, group_lengths, last_positions
        )
        longest = group_lengths[group_size - 1]
        begins = to_fixed_tuple(sentences * (tokens * tags), LANES)
        _find_best_scores(
            emissions, begins, longest, start, transitions, last_positions, scores,
            previous, broken,
        )  # fmt: skip
        for lane in range(group_size):
            n = sentences[lane]
            last_place = group_lengths[lane] - 1
            is_allowed = _trace_back(scores, previous, end, lane, last_place, best[n])
            if broken[0, 0, lane] > 0.0 or not is_allowed:
                failed = min(failed, n)
    return failed if failed < batch else -1
