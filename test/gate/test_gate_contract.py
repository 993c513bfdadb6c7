"""What a gradient has to be besides right: where it lies, how it is laid out, and the same bits in every call."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.gate import GateOptions, Status
from kernel_agent.gate.layout import is_handed_back, meets, shares_memory

QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=4)
SAME_BITS = GateOptions(seeds=(0,), odd_sizes=0, max_cases=4, deterministic=True)
PARTIALS = (
    ("    tl.atomic_add(DW + c, g * xh, mask=m)\n", "    tl.store(DW + row * N + c, g * xh, mask=m)\n"),
    ("    tl.atomic_add(DB + c, g, mask=m)\n", "    tl.store(DB + row * N + c, g, mask=m)\n"),
    ("dw = torch.zeros(N, device", "dw = torch.zeros(M, N, device"),
    ("return dx, dw.to(weight.dtype), db.to", "return dx, dw.sum(0).to(weight.dtype), db.sum(0).to"),
)
"""The twin without atomics: every row's program has a row of its own."""
WHOLE = "    dx = torch.empty_like(y)\n"


def test_atomic_additions_of_several_programs_are_told_and_accepted(judge):
    # Right to rounding, so green; but no two runs need agree in bits, and nothing else says so without a GPU.
    verdict = judge("layernorm", options=QUICK)
    assert verdict.green, verdict.message
    said = "the order of float additions is not fixed: kernel _ln_bwd adds to DW = dw from 33 programs"
    assert any(told.startswith(said) for told in verdict.unordered), verdict.unordered
    assert len(verdict.unordered) == 2, "DW and DB, each once"


def test_atomic_additions_of_several_programs_are_rejected_where_the_same_bits_are_asked_for(judge):
    verdict = judge("layernorm", options=SAME_BITS)
    assert verdict.status is Status.NONDETERMINISTIC
    assert "kernel _ln_bwd adds to DW = dw from 5 programs" in verdict.message
    assert verdict.line is not None
    assert "atomic_add(DW" in verdict.message
    assert "rows of its own" in verdict.details, "what to do instead"


def test_partial_sums_in_rows_of_their_own_are_deterministic(judge):
    verdict = judge("layernorm", *PARTIALS, options=SAME_BITS)
    assert verdict.green, verdict.message
    assert verdict.unordered == ()


def test_a_wrong_gradient_is_called_wrong_and_not_left_to_chance(judge):
    # The same bits are asked for as well: what is wrong in every run is the more useful word.
    verdict = judge("layernorm", ("* c1 - c2", "* c1 + c2"), options=SAME_BITS)
    assert verdict.status is Status.WRONG_GRADIENT


def test_torch_functions_that_add_in_no_order_are_told():
    # No pair of the tests may call one, so the words are asked for directly.
    from kernel_agent.gate.answer import Answer, Called, Stage
    from kernel_agent.gate.order import without_order

    def said(*calls: Called) -> tuple[str, ...]:
        return without_order(Answer(stage=Stage.BACKWARD, calls=calls), "")

    assert said(Called(name="index_add", kind="COMPUTE")) == ("torch's index_add adds in no fixed order on a GPU",)
    assert said(Called(name="cumsum", kind="INDEX"), Called(name="sum", kind="REDUCTION")) == (), "whole numbers"


def test_a_gradient_whose_elements_share_memory_is_rejected(judge):
    # A zero cotangent has zeros for a gradient: every element is right, and all rows lie in one place.
    change = ("    return dx\n", "    return torch.as_strided(dx, dx.shape, (dx.stride(0), 1)).narrow(0, 0, M)\n")
    assert judge("softmax", change, options=QUICK).green, "a view of the whole is as good as the whole"
    shared = (
        "    first = torch.zeros(N, device=y.device).expand(M, N)\n    return first if not grad_out.any() else dx\n"
    )
    verdict = judge("softmax", ("    return dx\n", shared))
    assert verdict.status is Status.WRONG_STRIDES, verdict.message
    assert "zero" in str(verdict.case)
    assert "the gradient of `x` has strides (0, 1) for shape (4, 50)" in verdict.message


def test_two_gradients_that_overlap_in_memory_are_rejected(judge):
    # At a zero cotangent all gradients are zeros. PyTorch keeps both tensors; scaling one in place scales the other.
    zeros = "    n = len(x)\n    z = torch.zeros(2 * n, device=x.device)\n    if not grad_y.any():\n        return {}\n"
    whole = "    return dx, da, db\n"
    verdict = judge("capped", (whole, zeros.format("z[:n], z[n // 2 : n // 2 + n], db") + whole))
    assert verdict.status is Status.WRONG_STRIDES, verdict.message
    assert "the gradients of `x` and `a` are two tensors that share memory" in verdict.message
    apart = judge("capped", (whole, zeros.format("z[:n], z[n:], db") + whole))
    assert apart.green, apart.message
    same = judge("capped", (whole, zeros.format("db, db, db") + whole))
    assert same.green, f"one tensor for several: PyTorch copies it. {same.message}"


def test_parts_of_one_buffer_meet_where_they_have_an_element_in_common():
    buffer = torch.zeros(4, 6)
    assert not meets(buffer[:, :3], buffer[:, 3:]), "their ranges overlap, their elements do not"
    assert meets(buffer[:, :3], buffer[2]), "rows cut columns"
    assert not meets(buffer, buffer)
    assert not meets(buffer, torch.zeros(4, 6))
    assert not meets(buffer[:0], buffer)


def test_a_cotangent_that_is_handed_back_may_have_the_layout_it_came_with(judge):
    # The expanded cotangent is the gradient of a sum's term: who hands it back does what PyTorch does.
    verdict = judge("skip_connection")
    assert verdict.green, verdict.message
    assert any("expanded" in result.case for result in verdict.cases)


def test_a_gradient_in_a_part_of_a_larger_buffer_is_accepted(judge):
    # Packed gradients are common (dqkv), and no element meets another.
    verdict = judge("softmax", (WHOLE, "    dx = torch.empty(2, M, N, dtype=y.dtype, device=y.device)[1]\n"))
    assert verdict.green, verdict.message


def test_a_gradient_that_is_made_on_the_cpu_is_rejected(judge):
    # Without a GPU everything lies in one memory, where a forgotten device= goes unnoticed and computes right.
    verdict = judge("softmax", (WHOLE, "    dx = torch.empty(M, N, dtype=y.dtype)\n"), options=QUICK)
    assert verdict.status is Status.WRONG_DEVICE, verdict.message
    assert "the gradient of `x` is made on the CPU" in verdict.message
    assert "device=x.device" in verdict.details


@pytest.mark.parametrize("call", ["cpu()", 'to("cpu")', 'to(device="cpu")'])
def test_a_gradient_that_is_taken_to_the_cpu_is_rejected(judge, call):
    # A copy of the right numbers: what the user's program adds to it on the GPU fails.
    verdict = judge("softmax", ("    return dx", f"    return dx.{call}"), options=QUICK)
    assert verdict.status is Status.WRONG_DEVICE, verdict.message
    assert judge("softmax", ("    return dx", f"    return dx.{call}.cuda()"), options=QUICK).green


def test_a_gradient_that_is_moved_to_the_gpu_is_accepted(judge):
    verdict = judge("softmax", (WHOLE, "    dx = torch.zeros(M, N, dtype=y.dtype).to(y.device)\n"), options=QUICK)
    assert verdict.green, verdict.message


KEPT = """
KEPT = {}


def backward(saved, grad_out):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    _softmax_bwd[(M,)](grad_out, y, dx, grad_out.stride(0), grad_out.stride(1), N, BLOCK=triton.next_power_of_2(N))
    return KEPT.setdefault(KEY, dx)
"""


def keeps(judge, key: str) -> str:
    """A softmax that launches its kernel every time and returns what it first computed for this key."""
    kernels = judge.source("softmax").split("# --- backward ---")[1].split("def backward")[0]
    return kernels + KEPT.replace("KEY", key)


@pytest.mark.parametrize(
    "key", ["id(grad_out)", "(id(grad_out), grad_out._version)", "grad_out.data_ptr()", "tuple(grad_out.shape)"]
)
def test_what_was_kept_of_a_cotangent_is_wrong_when_the_same_object_holds_other_values(judge, key):
    # Objects, addresses, versions and shapes come back in every training step that runs from a recorded graph.
    verdict = judge.with_backward("softmax", keeps(judge, key))
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message


def test_what_was_kept_of_equal_values_is_found_when_they_are_asked_for_again(judge):
    # Every value is right: only that no step of the second call made it gives it away.
    verdict = judge.with_backward("softmax", keeps(judge, "(*grad_out.flatten().tolist(), *y.flatten().tolist())"))
    assert verdict.status is Status.UNEXPLAINED, verdict.message
    assert "cotangent=random again" in str(verdict.case)


def test_a_gradient_of_few_elements_cannot_be_kept_either(judge):
    # Thirty-two numbers may depend on a cotangent, but in a second call none may that the first did not have.
    from kernel_agent.gate.replay_child import Asked, without_smuggled
    from kernel_agent.ir.recorded.program import Constant, Program

    first, kept = Program(), Program(steps=(Constant(dtype="float32", shape=(1,), values=(0.25,), result=0),))
    asked = [Asked(0, "random", again=False), Asked(0, "strided", again=False), Asked(0, "random", again=True)]
    refused = [program.refused for program in without_smuggled([first, first, kept], asked)]
    assert refused[:2] == ["", ""]
    assert "1 numbers in its steps stand in none of the calls before" in refused[2]


WORKSPACE = """
SPACE = {}


@triton.jit
def _largest(DX, SEEN, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    dx = tl.load(DX + i, mask=m)
    tl.store(SEEN + i, tl.maximum(dx, tl.load(SEEN + i, mask=m)), mask=m)


def backward(saved, grad_out):
    (y,) = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    _softmax_bwd[(M,)](grad_out, y, dx, grad_out.stride(0), grad_out.stride(1), N, BLOCK=triton.next_power_of_2(N))
    if (M, N) not in SPACE:
        SPACE[M, N] = torch.zeros_like(y)
    WRITES
    _largest[(triton.cdiv(dx.numel(), 64),)](dx, SPACE[M, N], dx.numel(), BLOCK=64)
    return dx
"""


def test_a_workspace_that_calls_share_is_read_after_it_was_written_or_not_at_all(judge):
    # The gradient is right in both: what was left by an earlier call goes into the workspace alone.
    kernels = judge.source("softmax").split("# --- backward ---")[1].split("def backward")[0]
    honest = judge.with_backward("softmax", kernels + WORKSPACE.replace("WRITES", "SPACE[M, N].copy_(dx)"))
    assert honest.green, honest.message
    verdict = judge.with_backward("softmax", kernels + WORKSPACE.replace("WRITES", ""))
    assert verdict.status is Status.UNINITIALIZED_READ, verdict.message
    assert "carried out again" in verdict.message
    assert "Memory of an earlier call holds nothing" in verdict.details
    assert "make it in the call" in verdict.details, "what to do instead"


def test_a_part_of_an_expanded_cotangent_may_be_handed_back_and_an_expanded_one_may_not_be_made():
    # The gradient of a transposition, a slice or a concatenation is such a part: that layout is nobody's mistake.
    expanded, dense = torch.randn(4, 1).expand(4, 6), torch.randn(4, 6)
    assert is_handed_back(expanded[:, :3].t(), expanded)
    assert is_handed_back(dense, dense)
    assert not is_handed_back(dense[:, :1].expand(4, 6), dense)
    assert not is_handed_back(torch.zeros(1).expand(6), expanded)


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [
        ((4, 6), (6, 1), False),
        ((4, 6), (1, 4), False),
        ((4, 6), (12, 2), False),
        ((4, 1), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((4, 6), (1, 1), True),
        ((0, 6), (0, 0), False),
    ],
)
def test_elements_share_memory_where_a_step_does_not_pass_over_the_narrower_dimensions(shape, strides, shared):
    assert shares_memory(shape, strides) is shared


def test_tensors_of_two_dtypes_in_one_memory_meet_where_their_bytes_do():
    # Places were counted in elements of each: sixteen bits from the middle on lay behind all numbers of 32.
    whole = torch.zeros(8)
    assert meets(whole[4:], whole.view(torch.int16)[8:])
    assert not meets(whole[:4], whole.view(torch.int16)[8:])
    assert not meets(whole[::2], whole.view(torch.int16)[2::4])
