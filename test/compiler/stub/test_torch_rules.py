"""Torch functions around launches are taken back as autograd takes them back, in torch code that the gate allows."""

from pathlib import Path

import pytest
import torch
from compiler.stub.torch_only import candidate, gradients

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.gate.layout import shares_memory

X, ROW = (4, 6), (6,)
ONE = (
    "-x", "torch.exp(x)", "torch.exp2(x)", "torch.expm1(x)", "x.abs().add(0.5).log()", "(x.abs() + 0.5).log2()",
    "torch.log1p(x.abs())", "(x * x + 1.0).sqrt()", "torch.rsqrt(x.square() + 1.0)", "1.0 / (x.abs() + 1.0)",
    "(x.abs() + 1.0).reciprocal()", "x.square()", "x.sigmoid()", "torch.tanh(x)", "x.sin()", "x.cos()", "torch.erf(x)",
    "torch.nn.functional.silu(x)", "torch.relu(x)", "x.clamp(-0.5, 0.5)", "x.clamp(min=0.1)", "x ** 3", "2.0 - x",
    "x * 3.0", "x / 7", "torch.where(x > 0.0, x * 2.0, x)", "x.masked_fill(x > 0.0, 5.0)", "x.tril()", "x.flip(1)",
    "x.mean()", "x.mean(1)", "x.mean(0, keepdim=True)", "x.sum(1)", "x.logsumexp(0)", "x.softmax(-1)",
    "torch.log_softmax(x, 1)", "x[1:, ::2]", "x[:, 2]", "x.narrow(1, 1, 3)", "x.select(0, 2)", "x.t().reshape(-1)[3:9]",
    "torch.cat((x, x * 2.0), 1)", "torch.stack((x, x.exp()), -1)", "x.unbind(1)[2] + x.unbind(1)[0]",
    "x.chunk(2, 1)[1].exp()", "x.float().double().exp().float()", "(x - x.mean(1, keepdim=True)) / 2.0",
    "x.amax(1)", "x.amin((0, 1))", "torch.amax(x, dim=0, keepdim=True) * x", "x.max()", "x.max(1).values",
    "torch.min(x, 0, keepdim=True)[0]", "torch.sort(x, dim=1)[0]", "x.topk(3, dim=1).values", "torch.cummax(x, 0)[0]",
    "x.sort(descending=True).values", "x.cumsum(1)", "x.roll(2, 1)", "torch.roll(x, (1, -2), (0, 1))",
    "torch.nn.functional.pad(x, (1, 2))", "torch.nn.functional.pad(x, (1, 2, 0, 3), value=2.0)",
    "x.repeat_interleave(3, dim=1)", "torch.nn.functional.leaky_relu(x, 0.2)", "torch.nn.functional.gelu(x)",
    "torch.nn.functional.gelu(x, approximate='tanh')", "x.var(1)", "torch.std(x, dim=0, keepdim=True)",
    "x.var(0, unbiased=False)", "torch.nn.functional.softplus(x)", "torch.nn.functional.logsigmoid(x)",
    "torch.nn.functional.softmax(x, 1)", "torch.nn.functional.softmax(x * 2.0, dim=0)",
    "x.clamp_min(0.1)", "x.clamp_max(max=0.3)", "x.gather(1, x.argsort(1))", "x.index_select(0, x[:, 0].argsort())",
    "torch.round(x * 3.0) * x", "x.floor() + x", "x * x.sign()",
    "x / (x.detach().abs().max() + 1.0)", "x * x.detach()", "x.split([2, 4], 1)[1]", "x.split(3, 1)[0].exp()",
)  # fmt: skip
TWO = (
    "x + w", "x - w", "w - x", "x * w", "x / (w.abs() + 1.0)", "torch.maximum(x, w)", "torch.minimum(w, x)",
    "x @ w.expand(6, 6)", "x @ x.mT * w[:4]", "torch.nn.functional.linear(x, w.unsqueeze(0))",
    "(x * w).sum(1) * x[:, 0]", "torch.where(x > 0.0, x, w)", "x.exp() * w + x * w.exp()",
    "x @ w", "w @ x.t()", "torch.mv(x, w)", "torch.dot(x[0], w)", "torch.outer(w, x[:, 1])", "w @ x[1]",
    "torch.addmm(w, x @ x.t(), x)", "torch.einsum('mn,n->m', x, w)", "torch.einsum('mn,kn->mk', x, x * w)",
    "(x * 2.0).view(-1).view_as(x) * w", "(w * 2.0).expand_as(x) * x", "(x * w).t().reshape_as(x)", "x.type_as(w) * w",
    "(x * w).to(w)", "torch.broadcast_tensors(w, x)[0] * x",
    "torch.broadcast_tensors(w, x)[1] * torch.broadcast_tensors(w, x)[0]",
)  # fmt: skip


def stub(expression: str, names: str) -> str:
    return f"def stub({names}):\n    y = {expression}\n    return y"


def agree(text: str, arguments: list[torch.Tensor], folder: Path) -> str:
    found = candidate(text, arguments, folder)
    returned, true = gradients(found, arguments, folder)
    for got, want in zip(returned, true, strict=True):
        assert got.shape == want.shape
        # The gate refuses the gradient of a sum as `expand` gives it: what changes it in place would do so many times.
        assert not shares_memory(tuple(got.shape), got.stride())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return found.backward


@pytest.mark.parametrize("expression", ONE)
def test_functions_of_one_tensor_have_their_derivative(expression: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    agree(stub(expression, "x"), [torch.randn(X)], tmp_path)


@pytest.mark.parametrize("expression", TWO)
def test_functions_of_two_tensors_have_the_derivative_of_each_summed_to_its_shape(
    expression: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    agree(stub(expression, "x, w"), [torch.randn(X), torch.randn(ROW)], tmp_path)


def test_a_broadcast_that_other_shapes_would_not_have_is_summed_where_it_occurs(tmp_path: Path) -> None:
    # The call that is followed has equal shapes, so that nothing is summed in it; the one that is made broadcasts.
    torch.manual_seed(0)
    found = candidate(stub("x * w", "x, w"), [torch.randn(4, 6), torch.randn(4, 6)], tmp_path)
    returned, true = gradients(found, [torch.randn(4, 6), torch.randn(1, 6)], tmp_path)
    for got, want in zip(returned, true, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "body",
    [
        "y = torch.empty_like(x)\n    y.copy_(w)\n    y.add_(x)",
        "y = x.clone()\n    y += w",
        "y = x * 2.0\n    y[:, 1:3] = w[:2].expand(4, 2)",
        "y = x * 2.0\n    y[1:].zero_()",
        "y = x * w\n    y *= 3.0\n    y /= x.shape[0]",
        "y = x.clone()\n    y.mul_(w.detach()).div_(x.detach().abs().sum())",
        "y = x * 2.0\n    y[0] = 3.0",
    ],
)
def test_what_is_written_over_has_no_gradient_and_what_is_written_has(body: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    agree(f"def stub(x, w):\n    {body}\n    return y", [torch.randn(X), torch.randn(ROW)], tmp_path)


def test_a_value_that_is_changed_before_the_end_is_not_used_by_the_backward(tmp_path: Path) -> None:
    # d exp(x) needs exp(x), which is y before it is doubled in place: what y holds at the end is wrong by two
    text = "def stub(x):\n    y = x.exp()\n    z = y * y\n    y.zero_()\n    return z"
    with pytest.raises(CannotDerive, match=r"`y`.*is changed later"):
        candidate(text, [torch.randn(X)], tmp_path)


def test_functions_without_a_rule_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(CannotDerive, match=r"torch's `cumprod` \(line 10\)"):
        candidate(stub("torch.cumprod(x, 0)", "x"), [torch.randn(X)], tmp_path)


def test_several_outputs_add_up_in_what_they_share(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = "def stub(x):\n    y = x.exp()\n    z = y.sum(0)\n    return y, z"
    assert "torch.stack((" in agree(text, [torch.randn(X)], tmp_path)


@pytest.mark.parametrize("part", ["x[0]", "x[:, 1:3]", "x.select(1, 0)", "x.unbind(0)[0]"])
def test_the_gradient_of_a_part_that_is_all_there_is_in_this_call_has_zeros_in_others(
    part: str, tmp_path: Path
) -> None:
    # Zeros around a part that is the whole are written, filled and read for nothing; other calls need them.
    torch.manual_seed(0)
    shape = {"x[0]": (1, 6), "x.unbind(0)[0]": (1, 6), "x[:, 1:3]": (4, 6), "x.select(1, 0)": (4, 1)}[part]
    found = candidate(stub(f"({part}).exp()", "x"), [torch.randn(shape)], tmp_path)
    assert (".reshape(" in found.backward) == (shape != (4, 6))
    for given in (shape, (4, 6)):
        returned, true = gradients(found, [torch.randn(given)], tmp_path)
        for got, want in zip(returned, true, strict=True):
            torch.testing.assert_close(got, want)


def test_the_gradient_of_a_permutation_of_all_rows_is_permuted_back(tmp_path: Path) -> None:
    # As many elements as the whole, in another order: reshaped, they would be the gradients of other rows.
    torch.manual_seed(0)
    text = "def stub(x):\n    y = x[[2, 0, 3, 1]].exp()\n    return y"
    agree(text, [torch.randn(X)], tmp_path)
