"""What launches are given gets a name that it keeps; what the stub computes stays the same."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive
from kernel_agent.compiler.stub.spelled import spelled
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=4)

TWO_PARTS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def parts_kernel(X, A, B, N, COS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(A + at, tl.cos(x) if COS else tl.sin(x), mask=at < N)
    tl.store(B + at, x * x, mask=at < N)


@triton.jit
def product_kernel(A, B, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + at, mask=at < N, other=0.0)
    tl.store(Y + at, a * tl.load(B + at, mask=at < N, other=0.0), mask=at < N)


@autodiff
def stub(x, cos):
    N = x.numel()
    x = x.contiguous()
    a, b = torch.empty(2, N, device=x.device)
    parts_kernel[(triton.cdiv(N, 32),)](x, a, b, N, COS=cos, BLOCK=32)
    y = torch.empty_like(x)
    product_kernel[(triton.cdiv(N, 32),)](a, b, y, N, BLOCK=32)
    return y


SWEEP = [dict(N=50, cos=True), dict(N=41, cos=False)]


def make_args(N, cos, device="cuda"):
    return torch.randn(N, device=device), cos
"""

TAIL = "    return y\n"


def text_of(*lines: str) -> str:
    return "import torch\n\n\ndef stub(x):\n" + "".join(f"    {line}\n" for line in lines) + TAIL


def test_a_number_that_is_bound_again_behind_its_launch_has_another_name_before() -> None:
    # The backward of the first launch would be given the second number.
    found = spelled(text_of("n, m = split(x)", "kernel[(n,)](x, n)", "n, k = split(m)", "kernel[(n,)](x, n)"), "stub")
    assert found == text_of("n_1, m = split(x)", "kernel[n_1,](x, n_1)", "n, k = split(m)", "kernel[(n,)](x, n)")


def test_names_of_branches_parameters_and_functions_within_are_left_alone() -> None:
    for lines in (
        ("n = 1", "kernel[(n,)](x)", "if x:", "    n = 2"),
        ("kernel[(1,)](x)", "x = x.t()", "kernel[(1,)](x)"),
        ("n = 1", "grid = lambda meta: (n,)", "kernel[grid](x, n)", "n = 2"),
    ):
        assert spelled(text_of(*lines), "stub") == text_of(*lines)


def test_parts_of_a_new_tensor_are_tensors_of_their_own() -> None:
    # In one tensor, the gradient of either part is a zeroed tensor of both.
    for given, one in (
        ("torch.empty(2, min(n, 3), device=x.device)", "torch.empty(min(n, 3), device=x.device)"),
        ("torch.full([2, n, 3], 1.0)", "torch.full((n, 3), 1.0)"),
    ):
        assert spelled(text_of(f"a, b = {given}"), "stub") == text_of(f"a = {one}", f"b = {one}")


def test_parts_of_a_new_tensor_whose_sizes_are_not_written_out_are_parts_of_a_name() -> None:
    # `sizes` may be (2,) or an iterator, and whoever is called may count its calls.
    for whole in ("torch.empty(sizes)", "torch.empty(2)", "torch.empty(2, size())", "torch.empty_like(x)"):
        found = spelled(text_of(f"a, b = {whole}"), "stub")
        assert found == text_of(f"a_and_b = {whole}", "a, b = (a_and_b[0], a_and_b[1])")


def test_each_tensor_of_a_list_has_a_name() -> None:
    found = spelled(text_of("y = [torch.empty_like(x) for _ in range(2)]"), "stub")
    assert found == text_of("y_0 = torch.empty_like(x)", "y_1 = torch.empty_like(x)", "y = [y_0, y_1]")


def test_lists_whose_elements_differ_or_whose_number_is_not_told_stay() -> None:
    for line in ("y = [torch.empty(n) for n in range(2)]", "y = [torch.empty(2) for _ in range(x)]"):
        assert spelled(text_of(line), "stub") == text_of(line)


def test_names_are_kept_apart_within_a_loop() -> None:
    # The trip's first launch would be given the second number in the backward.
    found = spelled(
        text_of(
            "for i in range(2):",
            "    n = i * 2",
            "    kernel[(n,)](x, n)",
            "    a, b = torch.empty(2, 3)",
            "    n = i + 1",
            "    kernel[(n,)](a, n)",
            "y = [torch.empty_like(x) for _ in range(1)]",
        ),
        "stub",
    )
    assert found == text_of(
        "for i in range(2):",
        "    n_1 = i * 2",
        "    kernel[n_1,](x, n_1)",
        "    a = torch.empty(3)",
        "    b = torch.empty(3)",
        "    n = i + 1",
        "    kernel[(n,)](a, n)",
        "y_0 = torch.empty_like(x)",
        "y = [y_0]",
    )


def test_a_loop_that_is_given_another_name_is_still_spelled_within() -> None:
    # Lines of a loop that had changed twice, whole and in part, were left over behind it.
    lines = ("n = 1", "for i in range(2):", "    a, b = torch.empty(2, 3)", "    kernel[(n,)](a, b)", "n = 2")
    assert spelled(text_of(*lines), "stub") == text_of(
        "n_1 = 1",
        "for i in range(2):",
        "    a = torch.empty(3)",
        "    b = torch.empty(3)",
        "    kernel[n_1,](a, b)",
        "n = 2",
    )


def test_a_name_that_trips_hand_on_and_a_loop_in_one_line_are_left_alone() -> None:
    # With another name the first launch of each trip would not have what the trip before left.
    for lines in (
        ("n = 1", "for i in range(2):", "    kernel[(n,)](x)", "    n = n + 1"),
        ("for i in range(2): a, b = torch.empty(2, 3)",),
    ):
        assert spelled(text_of(*lines), "stub") == text_of(*lines)


def test_parts_of_a_new_tensor_have_gradients_in_every_configuration(tmp_path: Path, sandbox: Sandbox) -> None:
    # Each configuration has tensors of its own: a part looked for among those of the first is none of the second.
    path = tmp_path / "forward.py"
    path.write_text(TWO_PARTS)
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    assert found.verdict.green
    assert "b = torch.empty(N, device=x.device)" in found.draft.candidate.forward
