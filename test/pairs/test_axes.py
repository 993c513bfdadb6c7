"""Shapes in dim names: told from how sizes change, and never guessed."""

from __future__ import annotations

from collections.abc import Callable

from kernel_agent.pairs.axes import Seen, axis_names
from kernel_agent.pairs.spec import KernelSpec


def test_sizes_that_follow_dims_are_named() -> None:
    seen = [Seen({"B": 2, "H": 3, "T": 8}, (6, 8, 64, 16)), Seen({"B": 5, "H": 7, "T": 11}, (35, 11, 64, 22))]
    assert axis_names(seen) == ("B*H", "T", "64", "2*T")


def test_one_entry_alone_names_only_what_is_unambiguous() -> None:
    # M and N coincide: a guess would tell a model to index with the wrong size.
    assert axis_names([Seen({"M": 8, "N": 8, "K": 5}, (8, 5, 3))]) == ("?", "K", "?")


def test_a_size_that_no_expression_explains_is_a_question_mark() -> None:
    assert axis_names([Seen({"N": 10}, (17,)), Seen({"N": 11}, (23,))]) == ("?",)


def test_the_stub_is_looked_at_beside_the_smallest_entry(observed: Callable[..., KernelSpec], scale_text: str) -> None:
    spec = observed(scale_text)
    assert spec.inputs[0].axes == ("N",)
    assert spec.outputs[0].axes == ("N",)


def test_the_dtypes_that_sweep_names_are_looked_at(observed: Callable[..., KernelSpec], scale_text: str) -> None:
    text = scale_text.replace('device="cuda")', 'dtype="float32", device="cuda")')
    text = text.replace("dict(N=7)", 'dict(N=7), dict(N=900, dtype="bfloat16")')
    text = text.replace("torch.randn(N, device=device)", "torch.randn(N, device=device).to(getattr(torch, dtype))")
    spec = observed(text)
    assert spec.inputs[0].dtypes == ("float32", "bfloat16")


def test_a_forward_that_takes_one_size_alone_is_described_all_the_same(
    observed: Callable[..., KernelSpec], scale_text: str
) -> None:
    # What a probe raises says nothing against the user's file: SWEEP does not name that size.
    text = scale_text.replace("    y = torch", "    assert x.numel() in (7, 40)\n    y = torch", 1)
    assert observed(text).inputs[0].axes == ("N",)


def test_a_size_that_is_an_exponent_does_not_fill_the_memory(
    observed: Callable[..., KernelSpec], scale_text: str
) -> None:
    # A prime beside a number of levels asks for 2**37 elements: what is ours to choose must not cost the user a run.
    text = scale_text.replace("torch.randn(N, device=device)", "torch.randn(7 if N == 7 else 2**37, device=device)")
    assert observed(text).inputs[0].shape == (7,)
