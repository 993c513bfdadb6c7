"""Forwards become proven pairs: derived end to end through the gate, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive, drafts
from kernel_agent.compiler.derived import Derived
from kernel_agent.compiler.errors import CannotDerive, NotThisTime
from kernel_agent.data import pairs_root
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Limits, Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)

HEAD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

"""

TWO_LAUNCHES = (
    HEAD
    + """
@triton.jit
def square_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(Y + at, x * x, mask=at < N)


@triton.jit
def shifted_kernel(X, B, Y, N, BLOCK: tl.constexpr, HAS_B: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(X + at, mask=at < N, other=0.0)
    if HAS_B:
        y *= tl.load(B + at, mask=at < N, other=0.0)
    tl.store(Y + at, tl.exp(-y), mask=at < N)


@autodiff
def stub(x, b=None):
    rows = x.transpose(0, 1).contiguous()  # the kernels know no strides
    N = rows.numel()
    squares = torch.empty_like(rows)
    grid = lambda meta: (triton.cdiv(N, meta["BLOCK"]),)
    square_kernel[grid](rows, squares, N, BLOCK=64)
    out0 = torch.empty_like(rows)
    shifted_kernel[grid](squares, b, out0, N, BLOCK=64, HAS_B=b is not None)
    return torch.cat((out0.view(-1), x.reshape(-1))), squares


SWEEP = [dict(M=9, N=7, shifted=True), dict(M=5, N=20, shifted=False)]


def make_args(M, N, shifted, device="cuda"):
    x = torch.randn(M, N, device=device)
    return (x, torch.randn(N * M, device=device)) if shifted else (x,)
"""
)

LAYOUTS = (
    HEAD
    + """
@triton.jit
def cube_kernel(X, Y, M, N, x_m, x_n, y_m, y_n, BLOCK: tl.constexpr):
    m = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    x = tl.load(X + m * x_m + n * x_n, mask=n < N, other=0.0)
    tl.store(Y + m * y_m + n * y_n, x * x * x, mask=n < N)


def launch(x, y):
    M, N = x.shape
    cube_kernel[(M,)](x, y, M, N, *x.stride(), *y.stride(), BLOCK=triton.next_power_of_2(N))


@autodiff
def stub(x):
    if x.stride(0) == 1:
        y = torch.empty(x.shape[1], x.shape[0], device=x.device).t()
    else:
        y = torch.empty(x.shape, device=x.device)
    launch(x, y)
    return y


SWEEP = [dict(M=9, N=7, how="rows"), dict(M=9, N=7, how="columns"), dict(M=9, N=7, how="part")]


def make_args(M, N, how, device="cuda"):
    x = torch.randn(2 * M, 2 * N, device=device)
    part = x[:M, :N]
    return (dict(rows=part.contiguous(), columns=part.t().contiguous().t(), part=part)[how],)
"""
)

IN_A_LOOP = (
    HEAD
    + """
@triton.jit
def scale_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < N) * 2.0, mask=at < N)


@autodiff
def stub(x):
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        scale_kernel[(1,)](x[row], y[row], x.shape[1], BLOCK=64)
    return y


SWEEP = [dict(M=3, N=50)]


def make_args(M, N, device="cuda"):
    return (torch.randn(M, N, device=device),)
"""
)


MEETING = (
    HEAD
    + """
@triton.jit
def meeting_kernel(X, Y, N, shift, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + at, mask=at < N, other=0.0)
    tl.store(Y + row * (N + shift) + at, tl.exp(x), mask=at < N)
    tl.debug_barrier()
    tl.store(Y + row * (N + shift) + shift + at, x * x, mask=at < N)


@autodiff
def stub(x, shift):
    y = torch.empty(x.shape[0], x.shape[1] + shift, device=x.device, dtype=x.dtype)
    meeting_kernel[(x.shape[0],)](x, y, x.shape[1], shift, BLOCK=64)
    return y


SWEEP = [dict(M=3, N=50, shift=7)]


def make_args(M, N, shift, device="cuda"):
    return (torch.randn(M, N, device=device), shift)
"""
)


POWERS = (
    HEAD
    + """
@triton.jit
def power_kernel(X, Y, N, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    y = x
    for _ in tl.static_range(TIMES - 1):
        y *= x
    tl.store(Y + at, y, mask=at < N)


@autodiff
def stub(x, times):
    y = torch.empty_like(x)
    power_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), TIMES=times, BLOCK=64)
    return y


SWEEP = [dict(N=70, times=2)]


def make_args(N, times, device="cuda"):
    return (torch.rand(N, device=device) + 0.5, times)
"""
)


def derived(text: str, folder: Path, sandbox: Sandbox, options: GateOptions = QUICK) -> Derived:
    path = folder / "forward.py"
    path.write_text(text)
    return derive(describe(read_file(path), sandbox), sandbox, options=options)


def test_launches_are_taken_back_in_reverse_through_what_torch_does_between_them(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # `squares` is an output and an input of the second launch: its cotangent is the sum of both. A transposed input,
    # a flattened output and an argument that is None at one entry are all on the way.
    found = derived(TWO_LAUNCHES, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    backward = found.draft.candidate.backward
    assert backward.index("[(triton.cdiv(N, BLOCK),)]") > 0, "the grid's function is written out over a tile of its own"
    assert "BLOCK, num_warps = 64, 4" in backward or "BLOCK = 64" in backward
    assert "torch.stack((" in backward, "two contributions are summed"
    # The part of a cotangent once took the name of the whole, which another part was cut from behind it.
    assert "dout0 = grad_out0.split(" in backward
    assert "is None" in backward, "the two configurations are told apart"


OPTIONAL = (
    HEAD
    + """
@triton.jit
def shifted_kernel(X, W, Bias, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    y = x * tl.load(W + at, mask=at < N, other=0.0)
    if Bias is not None:
        y += tl.load(Bias + at, mask=at < N, other=0.0)
    tl.store(Y + at, y * tl.sigmoid(y), mask=at < N)


@autodiff
def stub(x, w, b=None):
    N = x.numel()
    y = torch.empty_like(x)
    shifted_kernel[(triton.cdiv(N, 64),)](x, w, b, y, N, BLOCK=64)
    return y


SWEEP = [dict(N=100, bias=True), dict(N=64, bias=False)]


def make_args(N, bias, device="cuda"):
    x, w, b = torch.randn(3, N, device=device)
    return x, w, b if bias else None
"""
)


def test_an_argument_that_may_be_none_is_a_flag_of_one_kernel(tmp_path: Path, sandbox: Sandbox) -> None:
    # There were two kernels, and two ways that were told apart by the same question asked twice.
    text = derived(OPTIONAL, tmp_path, sandbox).draft.candidate.backward
    assert text.count("@triton.jit") == 1
    assert "HAS_BIAS: tl.constexpr" in text
    assert "HAS_BIAS=b is not None" in text
    assert "if b is not None:" in text
    assert "b is not None and" not in text


STATE = (
    HEAD
    + """
@triton.jit
def leaky_kernel(X, H, Y, T, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(H + at, mask=at < N, other=0.0)
    for t in range(T):
        h = 0.5 * h + tl.load(X + t * N + at, mask=at < N, other=0.0)
    tl.store(Y + at, h, mask=at < N)


@autodiff
def stub(x, h=None):
    T, N = x.shape
    if h is None:
        h = torch.zeros(N, device=x.device)
    y = torch.empty(N, device=x.device)
    leaky_kernel[(triton.cdiv(N, 64),)](x, h, y, T, N, BLOCK=64)
    return y


SWEEP = [dict(T=5, N=70, state=True), dict(T=2, N=9, state=False)]


def make_args(T, N, state, device="cuda"):
    return torch.randn(T, N, device=device), torch.randn(N, device=device) if state else None
"""
)


def test_what_the_stub_itself_makes_where_an_argument_is_none_has_no_gradient(tmp_path: Path, sandbox: Sandbox) -> None:
    # Both calls launch the same kernels, and the local has the argument's name: dh is that of zeros in one of them.
    found = derived(STATE, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert "h_given = h is not None\n" in (found.draft.candidate.forward or "")
    assert "dh if h_given else None" in found.draft.candidate.backward


def test_stores_that_meet_get_a_copy_of_the_cotangent_to_take_from(tmp_path: Path, sandbox: Sandbox) -> None:
    # 43 of 50 elements of the first store are overwritten by the second; the caller's cotangent must stay as it is
    found = derived(MEETING, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert ".clone()" in found.draft.candidate.backward


def test_gradients_and_cotangents_lie_in_memory_as_inputs_and_outputs_do_in_each_call(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # Which layout the output has depends on the input's, and one input is a part of a larger tensor: buffers of the
    # shape alone, or laid out as at the entry that was followed, give wrong gradients at the others. The launch stands
    # in a helper.
    found = derived(LAYOUTS, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert {case.case.split("how=")[1].split()[0] for case in found.verdict.cases} == {"rows", "columns", "part"}


def test_odd_sizes_that_make_another_constexpr_are_derived_too(tmp_path: Path, sandbox: Sandbox) -> None:
    # SWEEP shows squares alone. The gate also asks for cubes, at which what was derived of squares raises.
    found = derived(POWERS, tmp_path, sandbox, replace(QUICK, odd_sizes=2, max_cases=20))
    assert found.verdict.green
    assert any("times=3" in result.case for result in found.verdict.cases)
    assert "times == 2" in found.draft.candidate.backward


def test_launches_in_a_loop_over_something_else_than_a_range_are_refused_with_the_line(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    text = IN_A_LOOP.replace("for row in range(x.shape[0]):", "for row in sorted(range(x.shape[0])):")
    with pytest.raises(CannotDerive, match="runs over something other than a range") as refused:
        derived(text, tmp_path, sandbox)
    assert refused.value.line == 1 + text[: text.index("for row in")].count("\n")
    assert "as an axis of the grid" in refused.value.remedy


def test_ways_that_no_condition_of_the_text_tells_apart_are_refused_with_what_to_do(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # The loop stands under a condition, and launches two or three times: the advice must not be to write another one.
    text = IN_A_LOOP.replace("SWEEP = [dict(M=3, N=50)]", "SWEEP = [dict(M=3, N=50), dict(M=2, N=9)]")
    text = text.replace(
        "    for row in range(x.shape[0]):\n", "    if x.dim():\n        for row in range(x.shape[0]):\n"
    )
    text = text.replace("        scale_kernel[(1,)](x", "            scale_kernel[(1,)](x")
    with pytest.raises(CannotDerive, match="launches `scale_kernel` 3 times or `scale_kernel` 2 times") as refused:
        derived(text, tmp_path, sandbox)
    assert "as an axis of the grid" in refused.value.remedy


def test_the_forward_is_the_stub_with_another_return(tmp_path: Path, sandbox: Sandbox) -> None:
    found = derived(TWO_LAUNCHES, tmp_path, sandbox)
    stub = TWO_LAUNCHES[TWO_LAUNCHES.index("def stub") : TWO_LAUNCHES.index("\n\n\nSWEEP")].split("\n")
    forward = (found.draft.candidate.forward or "").rstrip("\n").split("\n")
    assert forward[0] == "def forward(x, b=None):"
    assert forward[1:-1] == stub[1:-1], "comments and spacing stay"
    assert forward[-1].startswith("    return (torch.cat((out0.view(-1), x.reshape(-1))), squares), (")


def test_schedules_behind_one_that_is_enough_are_not_tried_and_known_pairs_are_not_written_again(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # A search that writes all plans, or comes back with the one that the gate found red, costs seconds a kernel.
    path = tmp_path / "two_launches.py"
    path.write_text(TWO_LAUNCHES)
    spec = describe(read_file(path), sandbox)
    every, _ = drafts(spec, sandbox)
    (first,), _ = drafts(spec, sandbox, most=1)
    behind, _ = drafts(spec, sandbox, most=1, known=[first.candidate.digest])
    assert [first.candidate, *(draft.candidate for draft in behind)] == [draft.candidate for draft in every[:2]]
    assert len(every) > 1
    assert drafts(spec, sandbox, known=[draft.candidate.digest for draft in every])[0] == []


def test_the_adjoint_is_printed_for_those_who_ask_for_it(tmp_path: Path, sandbox: Sandbox) -> None:
    # An ask shows it to a model; printed for all, it cost every derivation a second reverse that nobody read.
    path = tmp_path / "two_launches.py"
    path.write_text(TWO_LAUNCHES)
    spec = describe(read_file(path), sandbox)
    (asked,), _ = drafts(spec, sandbox, most=1, adjoint=True)
    (unasked,), _ = drafts(spec, sandbox, most=1)
    assert asked.adjoint.count("_adjoint(") == 2
    assert unasked.adjoint == ""
    assert asked.candidate == unasked.candidate


def test_memory_that_descriptors_are_asked_about_is_made_before(sandbox: Sandbox) -> None:
    # Sums of rows that one launch keeps for the next lie in a tensor of the backward: to ask for its address first
    # ended in an unbound variable, and a slower schedule took the place of this one.
    spec = describe(read_file(pairs_root() / "linear_attention" / "retention_parallel.py"), sandbox)
    text = drafts(spec, sandbox)[0][0].candidate.backward
    assert "        (saved_d_out, " in text
    assert text.index("saved_d_out = torch.empty") < text.index("        (saved_d_out, ")


def test_a_derivation_past_its_time_is_told_as_one_and_not_as_an_endless_forward(
    monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox
) -> None:
    # Said of the forward, its writer would look for a loop that never ends; refused for good, it would stay so on disk.
    spec = describe(read_file(pairs_root() / "norm_row/layernorm_row.py"), sandbox)
    monkeypatch.setattr("kernel_agent.compiler.derive.LIMITS", Limits(wall_s=0.2))
    with pytest.raises(NotThisTime, match="no backward was written within"):
        drafts(spec, sandbox)


def test_rows_of_no_sequence_have_a_gradient_of_zeros_where_it_else_is_the_cotangent(sandbox: Sandbox) -> None:
    # Said to be the cotangent if the sequences are all rows, it raised for a batch with room behind the last one.
    spec = describe(read_file(pairs_root() / "jagged_segment" / "jagged_broadcast_add.py"), sandbox)
    text = drafts(spec, sandbox)[0][0].candidate.backward
    assert "dx = torch.zeros_like(x) if STORE_DX else grad_y" in text
    (asked,) = [line for line in text.splitlines() if "STORE_DX = " in line]
    assert asked.lstrip().startswith("STORE_DX = not (x.numel() == D * segment_rows(offsets, sequences)")
    assert 'raise ValueError("dX is dY' not in text


def test_tiles_too_narrow_for_the_products_of_a_backward_are_said_to_be_what_the_forward_may_widen(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # Columns of a product may be one; the derivative sums over them, and Triton takes no sum of less than 16. Nothing
    # is wrong with the compiler then, which asked for a report.
    text = (
        HEAD
        + """
@triton.jit
def product_kernel(A, B, C, V: tl.constexpr, BV: tl.constexpr):
    rows, cols = tl.arange(0, 16), tl.program_id(0) * BV + tl.arange(0, BV)
    a = tl.load(A + rows[:, None] * 16 + rows[None, :])
    tl.store(C + rows[:, None] * V + cols[None, :], tl.dot(a, tl.load(B + rows[:, None] * V + cols[None, :])))


@autodiff
def stub(a, b):
    V = b.shape[1]
    BV = min(V, 16)
    c = torch.empty_like(b)
    product_kernel[(V // BV,)](a, b, c, V=V, BV=BV)
    return c


SWEEP = [dict(V=32), dict(V=16)]


def make_args(V, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 16, generator=g).to(device), torch.randn(16, V, generator=g).to(device)
"""
    )
    path = tmp_path / "forward.py"
    path.write_text(text)
    with pytest.raises(CannotDerive, match="K >= 16") as refused:
        derive(describe(read_file(path), sandbox), sandbox, options=replace(QUICK, odd_sizes=4, max_cases=24))
    assert "max(16, ...)" in refused.value.remedy
