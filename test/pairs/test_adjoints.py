"""Which functions a backward may compute with is decided by what the stub calls."""

from __future__ import annotations

import pytest

from kernel_agent.pairs.adjoints import declarable, plain_name


@pytest.mark.parametrize("name", ["mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"])
def test_all_spellings_of_a_function_are_one(name: str) -> None:
    assert plain_name(name) == "mul"


@pytest.mark.parametrize(
    ("name", "plain"),
    [("__rsub__", "sub"), ("__truediv__", "div"), ("__rpow__", "pow"), ("__invert__", "invert"), ("relu_", "relu")],
)
def test_other_names_stay_what_they_are(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("op", "needed"),
    [
        ("tanh", "tanh mul sub"),
        ("sigmoid", "sigmoid mul sub"),
        ("exp", "exp mul"),
        ("log", "div"),
        ("__pow__", "pow mul sub"),
        ("clamp_", "where ge le mul"),
        ("softmax", "softmax mul sub"),
        ("log_softmax", "exp mul sub"),
        ("matmul", "matmul mm bmm"),
        ("silu", "sigmoid mul add sub"),
        ("layer_norm", "mul sub rsqrt"),
        ("where", "where"),
        ("amax", "eq where div"),
        ("gather", "scatter_add"),
    ],
)
def test_the_adjoint_of_a_stubs_function_can_be_computed(op: str, needed: str) -> None:
    """Promised in the prompt; refusing it costs the user an ask."""
    assert set(needed.split()) <= declarable([op])


@pytest.mark.parametrize("op", ["tanh", "mul", "softmax", "layer_norm", "clamp", "exp", "__radd__"])
@pytest.mark.parametrize("other", ["matmul", "einsum", "cumsum", "index_add", "conv2d"])
def test_no_adjoint_of_elementwise_work_is_a_product_a_scan_or_a_scatter(op: str, other: str) -> None:
    """Or a stub that only scales would let a backward run on torch's kernels."""
    assert other not in declarable([op])


def test_a_function_that_is_not_known_allows_itself_alone() -> None:
    assert declarable(["cross"]) == {"cross"}
    assert declarable([]) == frozenset()
