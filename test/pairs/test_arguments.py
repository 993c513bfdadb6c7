"""The rule by which make_args is called, and what its result means."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_agent.errors import InputError
from kernel_agent.pairs.arguments import Arguments, argument_names, build_arguments
from kernel_agent.pairs.spec import ShapeEntry


def call(make_args: Callable[..., Any], seed: int = 3, **dims: Any) -> Arguments:
    module = types.ModuleType("user")
    module.__file__ = __file__
    module.make_args = make_args  # type: ignore[attr-defined]
    return build_arguments(module, ShapeEntry(dims=dims), device="cpu", seed=seed)


def test_named_dims_are_passed_by_name() -> None:
    assert call(lambda M, N: (M, N), N=2, M=1).args == (1, 2)


def test_one_unnamed_parameter_gets_the_dict() -> None:
    assert call(lambda dims: (dims["M"], sorted(dims)), M=1, causal=True).args == (1, ["M", "causal"])


def test_one_unnamed_parameter_beside_ours_gets_the_dict() -> None:
    """`device` has no default here, yet it is ours to fill and does not count as a second dim."""
    assert call(lambda dims, device, seed=0: (dims, device, seed), M=1).args == ({"M": 1}, "cpu", 3)


def test_a_single_dim_that_sweep_names_is_no_dict() -> None:
    assert call(lambda N: (N,), N=5).args == (5,)


def test_device_and_seed_only_when_named() -> None:
    assert call(lambda M, device, seed: (M, device, seed), M=1).args == (1, "cpu", 3)
    assert call(lambda **dims: (sorted(dims),), M=1).args == (["M"],)


def test_keyword_only_parameters_are_filled() -> None:
    assert call(lambda M, *, device, dtype: (M, device, dtype), M=1).args == (1, "cpu", torch.float32)


def test_dtype_comes_from_the_entry_then_from_the_default() -> None:
    assert call(lambda M, dtype="float32": (dtype,), M=1, dtype="bfloat16").args == ("bfloat16",)
    assert call(lambda M, dtype="float32": (dtype,), M=1).args == ("float32",)
    assert call(lambda M: (M,), M=1, dtype="bfloat16").args == (1,)


def test_a_stored_dtype_comes_back_as_a_dtype() -> None:
    """SWEEP entries travel as JSON; `dict(dtype=torch.float16)` must reach make_args as written."""
    assert call(lambda M, dtype: (dtype,), M=1, dtype="torch.float16").args == (torch.float16,)


@pytest.mark.parametrize(
    ("result", "args", "kwargs"),
    [
        ((1, 2), (1, 2), {}),
        ([1, 2], (1, 2), {}),
        (7, (7,), {}),
        (((1, 2), {"a": 3}), (1, 2), {"a": 3}),
        (([1], {}), (1,), {}),
        ((1, {"a": 3}), (1, {"a": 3}), {}),
        ([(1, 2), {"a": 3}], ((1, 2), {"a": 3}), {}),
        (((1,), {"a": 3}, 4), ((1,), {"a": 3}, 4), {}),
    ],
)
def test_only_a_pair_of_sequence_and_dict_holds_keywords(result: Any, args: Any, kwargs: Any) -> None:
    """A dict may be an argument of its own: only the exact form (sequence, dict) means keywords."""
    assert call(lambda M: result, M=1) == Arguments(args, kwargs)


def test_without_a_seed_parameter_the_global_generator_is_seeded() -> None:
    first, again, other = (call(lambda N: (torch.randn(N),), seed=s, N=4).args[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    call(lambda N: (torch.randn(N),), N=4)
    assert torch.equal(before, torch.get_rng_state())


def test_make_args_that_raises_is_blamed_on_its_line() -> None:
    def make_args(N: int) -> Any:
        raise ValueError("N must be even\nand more")

    with pytest.raises(InputError, match=r"make_args fails for N=3: ValueError: N must be even") as caught:
        call(make_args, N=3)
    assert caught.value.line == make_args.__code__.co_firstlineno + 1
    assert "\n" not in caught.value.message


def test_a_dim_that_make_args_does_not_take_is_named() -> None:
    with pytest.raises(InputError, match="has no parameter `K`"):
        call(lambda M, N: (), M=1, N=2, K=3)


def test_a_parameter_that_no_entry_fills_is_named() -> None:
    with pytest.raises(InputError, match="wants `N`, `K`"):
        call(lambda M, N, K: (), M=1)


def test_arguments_are_named_after_the_parameters_they_reach() -> None:
    def stub(x: Any, *rest: Any, eps: float = 0.0) -> None: ...

    assert argument_names(stub, Arguments((1, 2, 3), {"eps": 4})) == ("x", "rest[0]", "rest[1]", "eps")


@pytest.mark.parametrize(
    ("view", "remedy"),
    [
        (lambda z: z.conj().imag, "`.resolve_neg()`"),
        (lambda z: torch._neg_view(z.real.contiguous()), "`.resolve_neg()`"),
        (lambda z: [z.conj()], "`.resolve_conj()`"),
    ],
    ids=["imaginary-part", "contiguous", "in-a-list"],
)
def test_a_view_whose_signs_torch_has_put_off_is_refused(view: Callable[..., Any], remedy: str) -> None:
    """A kernel reads its memory, and saw other numbers than the truth; one with strides ended as a defect of ours."""

    def make_args(N: int) -> Any:
        return (view(torch.randn(N, dtype=torch.complex64)),)

    with pytest.raises(InputError, match=r"a lazy (negative|conjugate) view for N=3") as caught:
        call(make_args, N=3)
    assert remedy in caught.value.remedy
    assert caught.value.line == make_args.__code__.co_firstlineno
