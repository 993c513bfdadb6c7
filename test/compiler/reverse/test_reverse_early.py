"""Gradients that need a carry of the forward alone are added while it is in registers, not from a tape."""

from __future__ import annotations

import torch
from reverse_checks import Forward, gradients_of
from torch import Tensor

from kernel_agent.compiler.planning import Wanted, planned
from kernel_agent.compiler.reverse import Adjoint, differentiate
from kernel_agent.compiler.reverse.early import early
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

N, PROGRAMS, TRIPS = 8, 3, 5
INPUTS = {"Q": (TRIPS, N), "K": (TRIPS, N), "V": (TRIPS, PROGRAMS), "G": (TRIPS,)}


def linear_attention(*, gated: bool = False) -> Kernel:
    """Programs of one column of V each: s = s + k_t v_t, Y[t, pid] = q_t s. `gated`: s = s g_t + k_t v_t."""
    k = Forward(Q="*f32", K="*f32", V="*f32", G="*f32", Y="*f32", n="i32")
    b, pid, lanes = k.b, k.b.program_id(0), k.b.arange(0, N)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        row = b.add(b.mul(index, b.const(N)), lanes)
        column = b.add(b.mul(index, b.num_programs(0)), pid)
        state = b.mul(carries[0], b.load(k.G, index)) if gated else carries[0]
        state = b.add(state, b.mul(b.load(k.K, row), b.load(k.V, column)))
        b.store(k.Y, column, b.sum(b.mul(b.load(k.Q, row), state), 0))
        return [state]

    b.loop((b.const(0), k.n, b.const(1)), [b.whole(b.const(0.0, "f32"), (N,))], body, names=["state"])
    return k.kernel


def adjoint_of(kernel: Kernel) -> Adjoint:
    return differentiate(kernel, read=frozenset(INPUTS), written=frozenset({"Y"}))


def same_gradients(kernel: Kernel, one: Adjoint, other: Adjoint) -> None:
    """Assert that two adjoints of one forward agree."""
    seeded = torch.Generator().manual_seed(0)
    given: dict[str, Tensor | int] = {
        name: torch.randn(shape, dtype=torch.float64, generator=seeded) for name, shape in INPUTS.items()
    }
    out = torch.full((TRIPS, PROGRAMS), torch.nan, dtype=torch.float64)
    given |= {"Y": out, "n": TRIPS}
    evaluate(kernel, (PROGRAMS,), given)
    cotangent = {"Y": torch.randn(out.shape, dtype=torch.float64, generator=seeded)}
    found, expected = (gradients_of(adjoint, (PROGRAMS,), given, cotangent) for adjoint in (one, other))
    for name in ("Q", "K", "V"):
        assert expected[name].abs().max() > 1e-3
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_linear_attention_needs_no_tape_of_its_states() -> None:
    # dq needs the state, dk and dv its cotangent: with all three in the loop that goes back, the state is on a tape.
    kernel = linear_attention()
    taped = adjoint_of(kernel)
    found = early(taped)
    verify(found.kernel)
    assert len(taped.tapes) == 1
    assert found.tapes == ()
    assert Code.TAPE_STORE not in {op.code for op in found.kernel.ops}
    same_gradients(kernel, found, taped)


def test_a_gate_needs_state_and_cotangent_in_one_trip_and_keeps_the_tape() -> None:
    # dg is the sum of both: dq alone in the first loop would be work for nothing, since the tape stays.
    taped = adjoint_of(linear_attention(gated=True))
    assert len(taped.tapes) == 1
    assert early(taped) is taped


def test_columns_of_programs_leave_rows_where_they_left_tapes() -> None:
    # Rows of dq and dk, one for each program, are allowed beside a tape as large; spared, it still pays for them.
    calls = Calls(({"n": TRIPS, "grid0": PROGRAMS},))
    plan = planned("owned", Wanted(linear_attention(), 1, calls, frozenset({"Q", "K", "V"}), frozenset({"Y"})))
    assert {total.name for total in plan.totals} == {"dQ", "dK"}
    assert not [one.name for one in plan.buffers if one.name.startswith("tape")]
    assert Code.ATOMIC_ADD not in {op.code for step in plan.steps for op in step.kernel.ops}
