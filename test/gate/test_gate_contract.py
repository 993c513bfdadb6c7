"""What a gradient has to be besides right: where it lies, how it is laid out, and the same bits in every call."""

from __future__ import annotations

from kernel_agent.gate import GateOptions, Status

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
    assert verdict.line is not None and "atomic_add(DW" in verdict.message
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
    shared = "    first = torch.zeros(N, device=y.device).expand(M, N)\n    return first if not grad_out.any() else dx\n"
    verdict = judge("softmax", ("    return dx\n", shared))
    assert verdict.status is Status.WRONG_STRIDES, verdict.message
    assert verdict.case is not None and "zero" in verdict.case
    assert "the gradient of `x` has strides (0, 1) for shape (4, 50)" in verdict.message


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


def test_a_gradient_that_is_moved_to_the_gpu_is_accepted(judge):
    verdict = judge("softmax", (WHOLE, "    dx = torch.zeros(M, N, dtype=y.dtype).to(y.device)\n"), options=QUICK)
    assert verdict.green, verdict.message
