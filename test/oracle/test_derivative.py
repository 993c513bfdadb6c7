"""The derivative of a PyTorch function in lines: the formulas one finds in books, out of autograd alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_agent.oracle.derivative.constants import Derivation, resolved
from kernel_agent.oracle.derivative.derive import derive
from kernel_agent.oracle.facts.dims import by_size
from kernel_agent.oracle.leaves import leaf_call

SIZES = {"M": 6, "N": 14}


def lines_of(function, *args, sizes=None, leaves=None):
    """Lines without comments, by what they give."""
    names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
    floats = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    call = leaf_call(args, {}, {names[place]: place for place in (floats if leaves is None else leaves)})
    found = resolved(derive(function, call, names, sizes or SIZES, {0: "out"}), None)
    return dict(line.split(" = ", 1) for line in found if " = " in line and not line.startswith("#"))


def rows():
    return torch.randn(6, 14)


def columns():
    return torch.randn(14)


def test_layer_norm_becomes_the_formula_of_three_means():
    def normed(x, weight, bias):
        return F.layer_norm(x, (14,), weight, bias, 1e-5)

    lines = lines_of(normed, rows(), columns(), columns())
    assert lines["t1"] == "(x - mean_N(x)) * rstd"
    assert lines["t2"] == "grad_out * weight"
    assert lines["dx"] == "rstd * (t2 - mean_N(t2) - t1 * mean_N(t2 * t1))"
    assert lines["dweight"] == "sum_M(grad_out * t1)"
    assert lines["dbias"] == "sum_M(grad_out)"


def test_softmax_keeps_its_probabilities():
    def softmax(x):
        return torch.softmax(x, -1)

    lines = lines_of(softmax, rows())
    assert lines == {"p": "softmax_N(x)", "dx": "grad_out * p - p * sum_N(grad_out * p)"}


def test_cross_entropy_is_softmax_minus_one_at_the_label():
    def loss(logits, labels):
        return F.cross_entropy(logits, labels, reduction="none")

    labels = torch.randint(0, 14, (6,))
    lines = lines_of(loss, rows(), labels)
    placed = next(name for name, text in lines.items() if text.startswith("scatter_N(-1 at "))
    probabilities = next((name for name, text in lines.items() if text == "softmax_N(logits)"), "softmax_N(logits)")
    assert lines["dlogits"] == f"{placed} - {probabilities} * sum_N({placed})"


def test_a_product_names_which_side_is_transposed():
    def product(a, b):
        return a @ b

    lines = lines_of(product, rows(), torch.randn(14, 7), sizes={"M": 6, "K": 14, "N": 7})
    assert lines == {"db": "a^T @ grad_out", "da": "grad_out @ b^T"}


def test_a_transposed_operand_is_told_however_it_was_transposed():
    # `.T` and `.permute` reach autograd as other operations than `.t()`; a dropped one would swap dq and dk unseen.
    def by_name(a, b):
        return a @ b.T

    def by_order(a, b):
        return a @ b.permute(1, 0)

    for function in (by_name, by_order):
        lines = lines_of(function, rows(), torch.randn(7, 14), sizes={"M": 6, "K": 14, "N": 7})
        assert lines == {"db": "grad_out^T @ a", "da": "grad_out @ b"}


def test_attention_goes_by_the_names_of_its_author():
    def attention(q, k, v):
        scores = q @ k.transpose(-1, -2) * 22**-0.5
        probs = torch.softmax(scores, -1)
        return probs @ v

    q, k, v = torch.randn(2, 6, 22), torch.randn(2, 14, 22), torch.randn(2, 14, 22)
    lines = lines_of(attention, q, k, v, sizes={"B": 2, "T": 6, "S": 14, "D": 22})
    assert lines["probs"] == "softmax_S(scores)"
    assert lines["dv"] == "probs^T @ grad_out"
    assert lines["dscores"] == "t1 - probs * sum_S(t1)"
    assert "(1/sqrt(D))" in lines["scores"]


def test_a_mean_is_recognised_in_a_sum_divided_by_its_count():
    def scaled(x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    assert lines_of(scaled, rows())["dx"] == "grad_out * rstd - mean_N(grad_out * x) * rstd^3 * x"


def test_a_sum_over_what_autograd_expanded_counts_it():
    # The gradient of a bias that one row is given for is N times the cotangent, not a sum of nothing.
    def total(x, shift):
        return (x + shift).sum(-1)

    lines = lines_of(total, rows(), torch.randn(6, 1))
    assert lines["dshift"] == "N * grad_out"


def test_a_recurrence_is_told_by_one_of_its_steps():
    def recurrence(x, a):
        h = torch.zeros_like(x[0])
        out = []
        for t in range(x.shape[0]):
            h = a * h + x[t]
            out.append(h)
        return torch.stack(out)

    call = leaf_call((torch.randn(8, 5), torch.randn(5)), {}, {"x": 0, "a": 1})
    found = resolved(derive(recurrence, call, ["x", "a"], {"T": 8, "D": 5}, {0: "out"}), None)
    assert len(found) < 20, found
    assert any(line.startswith("repeat ") for line in found)
    assert any(line.startswith("dx = all of T: ") for line in found)


def test_an_update_in_place_changes_what_is_read_later():
    def doubled(x):
        y = x.clone()
        y.mul_(3.0)
        return y * x

    # d(3 x * x) = 6 x: with the value from before the update it would be 2 x.
    assert lines_of(doubled, rows())["dx"] == "6 * grad_out * x"


def test_a_number_goes_by_the_name_of_its_argument():
    def scaled(x, scale=1.7):
        return torch.exp(x * scale)

    assert lines_of(scaled, rows())["dx"].count("scale") == 2


def test_an_input_without_influence_gets_zero():
    def first(x, y):
        return x * 2.0

    assert lines_of(first, rows(), rows())["dy"] == "0"


def test_what_the_function_raises_is_raised():
    def broken(x):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        lines_of(broken, rows())


def test_an_iteration_that_uses_its_value_twice_is_not_searched_for_ever():
    # Each step doubles the ways down to the first one; 40 steps would outlast every limit.
    def newton(x):
        y = x
        for _ in range(40):
            y = y - (y * y * y - x) / (3.0 * y * y)
        return y

    assert "dx" in lines_of(newton, rows().abs() + 1.0)


def at(*constants, **symbols):
    """A derivation whose one line shows its first constant."""
    return Derivation(("dx = \x020\x03 * x",), constants, symbols)


def test_a_constant_is_written_in_the_dims_that_give_it_at_two_calls():
    # At the first call 1/105 is also 1/(B*H*W): told by one call alone, the formula would be wrong at every other.
    first = at(1 / 105, B=3, C=12, H=5, W=7, groups=4)
    second = at(1 / (9 * 10 * 21), B=6, C=72, H=10, W=21, groups=8)
    assert resolved(first, second) == ("dx = (groups/(C*H*W)) * x",)


def test_roots_and_named_factors_are_found():
    first, second = at(22**-0.5 / 5, D=22, cap=5.0), at(66**-0.5 / 5, D=66, cap=5.0)
    assert resolved(first, second) == ("dx = (1/(sqrt(D)*cap)) * x",)


def test_a_constant_that_the_dims_do_not_give_stays_a_number():
    first, second = at(0.044715, D=22), at(0.044715, D=66)
    assert resolved(first, second) == ("dx = 0.044715 * x",)
    assert resolved(at(1 / 105, B=3), None) == ("dx = 0.00952381 * x",)


def test_a_group_of_channels_is_called_by_what_divides_them():
    sizes = {"B": 2, "C": 24, "H": 6, "W": 22, "groups": 8}
    assert by_size(3, sizes) == "C/groups"
    assert by_size(132, sizes) == "H*W"
    assert by_size(5, sizes) == "5", "no name is better than a wrong one"
