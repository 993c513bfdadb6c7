"""Loops over ranges that launch kernels: their backward is a loop again, and is right where trips differ or meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive
from kernel_agent.compiler.derived import Derived
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

SMALL = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)

KERNELS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def logits_kernel(X, W, L, V, H, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0)
    v, h = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_H)
    w = tl.load(W + v[:, None] * H + h[None, :], mask=(v[:, None] < V) & (h[None, :] < H), other=0.0)
    x = tl.load(X + row * H + h, mask=h < H, other=0.0)
    tl.store(L + row * V + v, tl.sum(w * x[None, :], 1), mask=v < V)


@triton.jit
def loss_kernel(L, Target, Loss, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(L + row * V + cols, mask=cols < V, other=-float("inf"))
    top = tl.max(x, 0)
    lse = top + tl.log(tl.sum(tl.exp(x - top), 0))
    tl.store(Loss + row, lse - tl.load(L + row * V + tl.load(Target + row)))


@triton.jit
def lse_kernel(X, Loss, Lse, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=-float("inf"))
    lse = tl.log(tl.sum(tl.exp(x), 0))
    tl.store(Lse + row, lse)
    tl.store(Loss + row, lse * lse)


@triton.jit
def soft_kernel(X, Lse, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=-float("inf"))
    tl.store(Y + row * N + cols, tl.exp(x - tl.load(Lse + row)), mask=cols < N)


@triton.jit
def gate_kernel(X, W, Y, N, x_row, y_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_row + cols, mask=cols < N, other=0.0)
    w = tl.load(W + cols, mask=cols < N, other=0.0)
    tl.store(Y + row * y_row + cols, tl.sigmoid(x * w) * x, mask=cols < N)


@triton.jit
def adding_kernel(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=0.0)
    tl.atomic_add(Y + cols, tl.sin(x), mask=cols < N)


@triton.jit
def state_kernel(X, Before, After, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + cols, mask=cols < N, other=0.0)
    h = tl.load(Before + cols, mask=cols < N, other=0.0)
    tl.store(After + cols, tl.sin(h) + x, mask=cols < N)


@triton.jit
def first_kernel(X, Y, N, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + cols, mask=cols < N, other=0.0)
    tl.store(Y + cols, tl.sin(x) if FIRST else x * x, mask=cols < N)


@triton.jit
def count_kernel(Y, N, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(Y + cols, (cols * 2 if FIRST else cols * 3).to(tl.float32), mask=cols < N)


"""
ROWS = """
SWEEP = [dict(M=5, N=20)]


def make_args(M, N, device="cuda"):
    return (torch.randn(M, N, device=device),)
"""
WEIGHTED = """
SWEEP = [dict(M=5, N=20)]


def make_args(M, N, device="cuda"):
    return torch.randn(M, N, device=device), torch.randn(N, device=device)
"""

CROSS_ENTROPY = """
@autodiff
def linear_cross_entropy(x, w, target, chunk: int):
    T, H = x.shape
    V = w.shape[0]
    loss = torch.empty(T, device=x.device, dtype=torch.float32)
    logits = torch.empty((chunk, V), device=x.device, dtype=torch.float32)
    for first in range(0, T, chunk):
        part = x[first : first + chunk]
        rows = part.shape[0]
        logits_kernel[(rows,)](part, w, logits, V, H, BLOCK_V=32, BLOCK_H=16)
        loss_kernel[(rows,)](logits, target[first : first + chunk], loss[first : first + chunk], V, BLOCK=32)
    return loss


SWEEP = [dict(T=10, V=20, H=12, chunk=4)]


def make_args(T, V, H, chunk, device="cuda"):
    x, w = torch.randn(T, H, device=device), torch.randn(V, H, device=device)
    return x, w, torch.randint(0, V, (T,), device=device), chunk
"""


def derived(text: str, tmp_path: Path, sandbox: Sandbox) -> Derived:
    path = tmp_path / "forward.py"
    path.write_text(KERNELS + text)
    found = derive(describe(read_file(path), sandbox), sandbox, options=SMALL)
    # a wrong draft would be hidden by a right one of another schedule, which adds where the wrong one stores
    assert not [why for why in found.refused if "the gate says" in why]
    return found


def line_of(text: str, part: str) -> int:
    return 1 + (KERNELS + text)[: (KERNELS + text).index(part)].count("\n")


def test_chunked_linear_cross_entropy_has_a_backward_in_chunks(tmp_path: Path, sandbox: Sandbox) -> None:
    # Logits of the last chunk, of two rows, are all that the forward leaves: a backward that read them for every chunk,
    # or stored dw per chunk instead of adding it up, is right for one trip alone.
    found = derived(CROSS_ENTROPY, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    text = found.draft.candidate.backward.partition("def backward(")[2]
    (loop,) = [row for row in text.split("\n") if row.startswith("    for ")]
    assert loop == "    for first in range(0, T, chunk):"
    ahead, trips = text.split(loop)
    assert "dw = gradient_room(w, dtype=torch.float32)" in ahead
    assert trips.count("        logits_kernel[(rows,)](") == 1


def test_two_loops_that_use_the_same_names_each_have_their_backward(tmp_path: Path, sandbox: Sandbox) -> None:
    # The parts of both loops have one name: what is asked of the first loop's would be answered of the second one's.
    text = """
@autodiff
def stub(x, chunk: int):
    M, N = x.shape
    y, lse = torch.empty_like(x), torch.empty(M, device=x.device, dtype=torch.float32)
    unused = torch.empty(M, device=x.device, dtype=torch.float32)
    for first in range(0, M, chunk):
        part = x[first : first + chunk]
        lse_kernel[(part.shape[0],)](part, unused[first : first + chunk], lse[first : first + chunk], N, BLOCK=32)
    for first in range(0, M, chunk):
        part = x[first : first + chunk]
        rows = part.shape[0]
        soft_kernel[(rows,)](part, lse[first : first + chunk], y[first : first + chunk], N, BLOCK=32)
    return y


SWEEP = [dict(M=5, N=20, chunk=2)]


def make_args(M, N, chunk, device="cuda"):
    return torch.randn(M, N, device=device), chunk
"""
    found = derived(text, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    text = found.draft.candidate.backward.partition("def backward(")[2]
    loops = [row for row in text.split("\n") if row.startswith("    for ")]
    assert loops == ["    for first_2 in range(0, M, chunk):", "    for first in range(0, M, chunk):"]


def test_trips_that_write_to_the_open_end_of_an_output_clear_what_they_took(tmp_path: Path, sandbox: Sandbox) -> None:
    # Slices with one end meet: each trip overwrites the rows behind its own, and only its last writer has a gradient.
    text = """
@autodiff
def stub(x, w):
    M, N = x.shape
    y = torch.empty_like(x)
    for first in range(0, M, 2):
        part = x[first:]
        gate_kernel[(part.shape[0],)](part, w, y[first:], N, x.stride(0), y.stride(0), BLOCK=32)
    return y

"""
    found = derived(text + WEIGHTED, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert "for first in reversed(range(0, M, 2)):" in found.draft.candidate.backward
    # the remark names the slice that does not show it, and what would
    (remark,) = [remark for remark in found.draft.remarks if "each clears what it took" in remark]
    assert "the elements of `y[first:]`, too" in remark
    assert "`y[i : i + step]`" in remark


def test_what_all_trips_add_to_one_output_has_its_cotangent_whole(tmp_path: Path, sandbox: Sandbox) -> None:
    # Additions take nothing of what was there: a trip that cleared the cotangent left none to the trips before it, and
    # a copy to clear would be made for nothing.
    text = """
@autodiff
def stub(x):
    M, N = x.shape
    y = torch.zeros(N, device=x.device, dtype=torch.float32)
    for first in range(0, M, 2):
        part = x[first : first + 2]
        adding_kernel[(part.shape[0],)](part, y, N, BLOCK=32)
    return y

"""
    found = derived(text + ROWS, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    backward = found.draft.candidate.backward
    assert "for first in range(0, M, 2):" in backward
    assert ".clone()" not in backward


def test_rows_that_several_trips_read_have_the_sum_of_their_gradients(tmp_path: Path, sandbox: Sandbox) -> None:
    # Stored instead of added, a row would have the gradient of the last window alone that it is in.
    text = """
@autodiff
def stub(x, w):
    M, N = x.shape
    y = torch.zeros((M, 3, N), device=x.device)
    for first in range(M):
        part = x[first : first + 3]
        gate_kernel[(part.shape[0],)](part, w, y[first], N, x.stride(0), N, BLOCK=32)
    return y

"""
    assert derived(text + WEIGHTED, tmp_path, sandbox).verdict.green


def test_a_weight_of_all_heads_has_the_sum_of_their_gradients(tmp_path: Path, sandbox: Sandbox) -> None:
    # The heads' rows lie apart by the heads between them, in x as in its gradient; the weight's gradient is of no trip.
    text = """
@autodiff
def stub(x, w):
    M, H, N = x.shape
    y = torch.empty_like(x)
    for head in range(H):
        gate_kernel[(M,)](x[:, head], w, y[:, head], N, x.stride(0), y.stride(0), BLOCK=32)
    return y


SWEEP = [dict(M=3, H=3, N=20)]


def make_args(M, H, N, device="cuda"):
    return torch.randn(M, H, N, device=device), torch.randn(N, device=device)
"""
    found = derived(text, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert "    for head in range(H):" in found.draft.candidate.backward


def test_a_product_of_torchs_in_each_trip_has_its_derivative_there(tmp_path: Path, sandbox: Sandbox) -> None:
    # The product is made in the trip, so that nothing but the product made again can be given to the launch's backward.
    text = """
@autodiff
def stub(x, w):
    M, K = x.shape
    V = w.shape[1]
    y = torch.empty(M, V, device=x.device, dtype=x.dtype)
    for i in range(triton.cdiv(M, 2)):
        part = x[i * 2 : (i + 1) * 2]
        logits = part @ w
        rows = part.shape[0]
        lse = torch.logsumexp(logits, 1)
        soft_kernel[(rows,)](logits, lse, y[i * 2 : (i + 1) * 2], V, BLOCK=32)
    return y


SWEEP = [dict(M=5, K=4, V=20)]


def make_args(M, K, V, device="cuda"):
    return torch.randn(M, K, device=device), torch.randn(K, V, device=device)
"""
    found = derived(text, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert "\n        logits = part @ w\n" in found.draft.candidate.backward


def test_a_launch_that_is_done_again_leaves_the_outputs_of_the_forward_alone(tmp_path: Path, sandbox: Sandbox) -> None:
    # Each trip's lse is gone behind it, and the launch that makes it stores an output too: done again in place it would
    # write to what the forward returned.
    text = """
@autodiff
def stub(x):
    M, N = x.shape
    y, loss = torch.empty_like(x), torch.empty(M, device=x.device, dtype=torch.float32)
    for first in range(0, M, 2):
        part = x[first : first + 2]
        rows = part.shape[0]
        lse = torch.empty(rows, device=x.device, dtype=torch.float32)
        lse_kernel[(rows,)](part, loss[first : first + 2], lse, N, BLOCK=32)
        soft_kernel[(rows,)](part, lse, y[first : first + 2], N, BLOCK=32)
    return y, loss

"""
    found = derived(text + ROWS, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    backward = found.draft.candidate.backward
    assert "loss_again = torch.empty_like(loss)" in backward
    assert "lse_kernel[(rows,)](part, loss_again[first : first + 2], lse, N, BLOCK=32)" in backward


RECURRENCE = """
@autodiff
def stub(x, start):
    M, N = x.shape
    h = torch.empty((M + 1, N), device=x.device, dtype=torch.float32)
    h[0] = start
    y = torch.empty_like(x)
    for t in range(M):
        state_kernel[(1,)](x[t], h[t], h[t + 1], N, BLOCK=32)
        first_kernel[(1,)](h[t + 1], y[t], N, FIRST=True, BLOCK=32)
    return y


SWEEP = [dict(M=4, N=20)]


def make_args(M, N, device="cuda"):
    return torch.randn(M, N, device=device), torch.randn(N, device=device)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("return y", "return y, h"),
        ("return y", "return h"),
        ("        first_kernel", "        h_next = h[t + 1]\n        first_kernel"),
    ],
)
def test_states_in_rows_of_a_tensor_are_read_there_and_their_cotangents_go_from_the_last_trip_to_the_first(
    old: str, new: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    # The first trip shows no reader of the row that it stores, and has no gradient of the row that it reads: from the
    # first trip to the last, each would miss what all behind it have to do with its state, and `start` would have none.
    found = derived(RECURRENCE.replace(old, new, 1) if old else RECURRENCE, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    backward = found.draft.candidate.backward.partition("def backward(")[2]
    assert "    for t in reversed(range(M)):" in backward
    assert "state_kernel[" not in backward  # its states are there


def test_states_may_be_counted_from_the_second_row(tmp_path: Path, sandbox: Sandbox) -> None:
    # A trip's place is one above what it reads also where it begins at 1; and what was zero before has no gradient.
    text = """
@autodiff
def stub(x):
    M, N = x.shape
    h = torch.zeros((M + 1, N), device=x.device, dtype=torch.float32)
    for t in range(1, M + 1):
        state_kernel[(1,)](x[t - 1], h[t - 1], h[t], N, BLOCK=32)
    return h

"""
    found = derived(text + ROWS, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert "state_kernel_left" not in found.draft.candidate.backward


@pytest.mark.parametrize(
    "again", ["h, h", "h[t], h[t + 1]", "h[t], h[t // 1 + 1]", "h[t + 1], h[t]", "h[M - t], h[M - t - 1]"]
)
def test_state_that_is_not_shown_to_be_left_as_it_was_is_refused_with_the_launch(
    again: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    # One trip is followed: it shows no reader of what it stores, and its gradient would lack all later trips. What
    # later trips overwrite, or may, is not there behind them: with steps below zero `h[-1]` comes behind `h[0]`.
    rows, step = "M + 2, N" if "t" in again else "N", "step" if again == "h[t], h[t + 1]" else "1"
    text = f"""
@autodiff
def stub(x):
    M, N = x.shape
    h = torch.zeros({rows}, device=x.device, dtype=torch.float32)
    step = 1
    for t in range(0, M, {step}):
        state_kernel[(1,)](x[t], {again}, N, BLOCK=32)
    return h

{ROWS}"""
    with pytest.raises(CannotDerive, match=r"which earlier trips of the loop .* stored to") as refused:
        derived(text, tmp_path, sandbox)
    assert refused.value.line == line_of(text, "        state_kernel[")
    assert "`h[t + 1]` from `h[t]`" in refused.value.remedy


def test_a_trips_own_part_that_is_updated_in_place_is_refused_with_the_true_reason(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # No earlier trip stored there: who is told so looks for a state that trips hand on, and there is none.
    text = f"""
@triton.jit
def bend_kernel(Y, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(Y + cols, tl.sin(tl.load(Y + cols, mask=cols < N)), mask=cols < N)


@autodiff
def stub(x):
    M, N = x.shape
    y = x * 2.0
    for t in range(M):
        row = y[t]
        bend_kernel[(1,)](row, N, BLOCK=32)
    return y

{ROWS}"""
    with pytest.raises(CannotDerive, match="overwrites `row`, which it reads") as refused:
        derived(text, tmp_path, sandbox)
    assert refused.value.line == line_of(text, "    for t in")
    assert "another tensor" in refused.value.remedy


FIRST = """
@autodiff
def stub(x):
    M, N = x.shape
    y = torch.empty_like(x)
    for t in range(M):
        first_kernel[(1,)](x[t], y[t], N, FIRST=t == 0, BLOCK=32)
    return y

"""


def test_a_program_that_is_another_one_in_later_trips_is_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    # The first trip is followed, and its program would be differentiated for all: sines where there are squares.
    with pytest.raises(CannotDerive, match="FIRST") as refused:
        derived(FIRST + ROWS, tmp_path, sandbox)
    assert refused.value.line == line_of(FIRST, "        first_kernel[")


def test_a_program_without_a_derivative_may_differ_from_trip_to_trip(tmp_path: Path, sandbox: Sandbox) -> None:
    # Nothing of it is differentiated: a refusal of every number that depends on the trip would be one for nothing.
    text = """
@autodiff
def stub(x):
    M, N = x.shape
    y, counts = torch.empty_like(x), torch.empty_like(x)
    for t in range(M):
        count_kernel[(1,)](counts[t], N, FIRST=t == 0, BLOCK=32)
        gate_kernel[(1,)](x[t], counts[t], y[t], N, N, N, BLOCK=32)
    return y

"""
    found = derived(text + ROWS, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert "count_kernel" not in found.draft.candidate.backward


@pytest.mark.parametrize(
    ("used", "why"),
    [
        ("torch.cat(parts)", r"`y` in `y.shape` \(line 8[0-9]\) belongs to the trips of a loop"),
        ("parts[-1]", "are collected and used behind it"),
    ],
)
def test_tensors_that_trips_collect_are_refused_with_what_to_do(
    used: str, why: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    # One trip is followed, whose list has one tensor: the others' gradients would be lost.
    text = f"""
@autodiff
def stub(x, w):
    M, N = x.shape
    parts = []
    for first in range(0, M, 2):
        part = x[first : first + 2]
        y = torch.empty_like(part)
        gate_kernel[(part.shape[0],)](part, w, y, N, x.stride(0), N, BLOCK=32)
        parts.append(y)
    return {used}

"""
    with pytest.raises(CannotDerive, match=why) as refused:
        derived(text + WEIGHTED, tmp_path, sandbox)
    assert refused.value.line == line_of(text, "    for first in")
    assert "have each trip write to its part" in refused.value.remedy


def test_a_loop_of_one_trip_at_all_entries_is_refused_with_what_to_do(tmp_path: Path, sandbox: Sandbox) -> None:
    # Nothing that the gate asks for would show what trips have to do with each other.
    text = CROSS_ENTROPY.replace("chunk=4)", "chunk=16)")
    with pytest.raises(CannotDerive, match="which launches kernels, has one trip") as refused:
        derived(text, tmp_path, sandbox)
    assert refused.value.line == line_of(text, "    for first in")
    assert "two or three" in refused.value.remedy


def test_an_entry_at_which_nothing_is_launched_is_refused_with_what_to_do(tmp_path: Path, sandbox: Sandbox) -> None:
    # The gate would find a backward there that launches nothing, and the user be asked to report the forward.
    text = CROSS_ENTROPY.replace("range(0, T, chunk)", "range(0, T - chunk + 1, chunk)").replace("empty(T,", "zeros(T,")
    text = text.replace("chunk=4)]", "chunk=4), dict(T=11, V=20, H=12, chunk=16)]")
    with pytest.raises(CannotDerive, match=r"at T=11 V=20 H=12 chunk=16 the loop .* has no trip") as refused:
        derived(text, tmp_path, sandbox)
    assert refused.value.line == line_of(text, "    for first in")
    assert "Leave that entry out" in refused.value.remedy


def test_a_loop_without_trips_beside_another_launch_is_passed_by(tmp_path: Path, sandbox: Sandbox) -> None:
    # There the backward launches, so that an entry without trips can be judged as any other one.
    text = """
@autodiff
def stub(x, w, few: int):
    M, N = x.shape
    y, z = torch.empty_like(x), torch.zeros_like(x)
    gate_kernel[(M,)](x, w, y, N, N, N, BLOCK=32)
    for i in range(few):
        gate_kernel[(1,)](x[i], w, z[i], N, N, N, BLOCK=32)
    return y, z


SWEEP = [dict(M=4, N=20, few=3), dict(M=4, N=21, few=0)]


def make_args(M, N, few, device="cuda"):
    return torch.randn(M, N, device=device), torch.randn(N, device=device), few
"""
    found = derived(text, tmp_path, sandbox)
    assert found.verdict.green, found.verdict.message
    assert any("which launches kernels, has no trip there" in remark for remark in found.draft.remarks)
