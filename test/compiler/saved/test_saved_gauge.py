"""Online softmax without tapes: any maximum gives the same result, where that is proved."""

from __future__ import annotations

from typing import Any

import pytest
import saved_forwards as forwards
import torch
from saved_checks import Forward, empty, ran, same_gradients, seeded, tensor

from kernel_agent.compiler.saved.gauge import use_gauge
from kernel_agent.compiler.saved.outputs import Saved, saved_reads
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def _both(forward: Forward) -> Saved:
    """Gauge, then saved outputs."""
    return prepared(forward.kernel, frozenset(forward.written))


def test_cross_entropy_takes_the_stored_log_sum_exp_for_its_maximum() -> None:
    forward = forwards.cross_entropy(store_lse=True)
    saved = use_gauge(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert (backward.loops, backward.tapes) == (1, 0)
    assert backward.loads("x_ptr") == tensor(forward.arguments["x_ptr"]).numel()


def test_a_log_sum_exp_that_is_differentiated_itself_keeps_its_gradient() -> None:
    forward = forwards.cross_entropy(store_lse=True, differentiated=("loss_ptr", "lse_ptr"))
    same_gradients(forward.backward(_both(forward).kernel), forward.backward(forward.kernel))


def test_without_a_stored_one_the_final_maximum_is_found_first() -> None:
    forward = forwards.cross_entropy(store_lse=False)
    saved = use_gauge(forward.kernel)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert (backward.loops, backward.tapes) == (2, 0)
    assert plain.tapes > 0


def test_a_softmax_in_two_passes_needs_no_tape() -> None:
    forward = forwards.softmax_looped()
    saved = _both(forward)
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes == 0


def test_a_maximum_that_is_guarded_behind_its_loop_needs_no_tape() -> None:
    # where(m == -inf, 0, m) is neither a shifted number nor a constant; with 13 elements some lanes have none.
    forward = forwards.softmax_by_lanes("guarded", n=13)
    saved = use_gauge(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0


def test_parts_that_are_not_there_do_not_keep_a_maximum_in_the_derivative() -> None:
    # The fourth part is minus infinity in all that is stored to y, whatever log(where(k < parts, sum, 1)) is there.
    forward = forwards.mixture()
    saved = prepared(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0


def test_parts_that_are_padded_with_zeros_keep_it() -> None:
    # A part that is not there has weight 1 then: log(1) plus the largest number is in what is stored.
    forward = forwards.mixture("padded with zeros")
    assert use_gauge(forward.kernel, frozenset(forward.written)).kernel is forward.kernel


def test_a_softmin_by_lanes_needs_no_tape_at_a_temperature_from_memory() -> None:
    # Its unit is a number that exponents are divided by and logarithms multiplied with.
    forward = forwards.softmin_by_lanes()
    saved = _both(forward)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0


def test_a_minimum_in_another_unit_than_its_sum_keeps_its_tape() -> None:
    # low - 2 t log(sum) changes with the minimum that is subtracted.
    forward = forwards.softmin_by_lanes("other unit")
    saved = use_gauge(forward.kernel, frozenset(forward.written))
    assert saved.kernel is forward.kernel
    assert any("what is stored to y_ptr changes when it shifts" in text for text in saved.remarks)


def test_two_softmaxes_of_one_loop_read_their_log_sum_exps_from_planes_of_one_tensor() -> None:
    forward = forwards.two_log_sums(planes=True)
    saved = use_gauge(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert (backward.loops, backward.tapes, backward.count(Code.REDUCE_MAX)) == (1, 0, 0)


def test_log_sum_exps_that_may_lie_in_one_place_are_not_read_back() -> None:
    # A distance of zero would leave only the second one in memory.
    forward = forwards.two_log_sums(planes=False)
    saved = use_gauge(forward.kernel, frozenset(forward.written))
    assert saved.read == frozenset()
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


def test_two_softmaxes_of_one_loop_both_get_their_final_maximum() -> None:
    # The loop that finds the first one stays, which once hid the second one: its maximum was left on a tape.
    forward = forwards.two_log_sums(planes=False)
    saved = use_gauge(forward.kernel)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0
    assert sum("is the final one in every trip" in remark for remark in saved.remarks) == 2
    assert not any("keeps its place" in remark for remark in saved.remarks)


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_reads_its_output_and_log_sum_exp(causal: bool, guard: bool) -> None:
    forward = forwards.attention(causal=causal, guard=guard)
    saved = _both(forward)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    chained = 2 if causal else 1
    # One loop each in place of two, and the products of FlashAttention-2: s, dp, dv, dq, dk.
    assert (plain.loops, backward.loops) == (2 * chained, chained)
    assert backward.count(Code.DOT) == 5 * chained
    assert (backward.tapes, backward.count(Code.REDUCE_MAX)) == (0, 0)
    assert saved_reads(backward.kernel, forward.written) == {"o_ptr", "lse_ptr"}


def test_attention_in_16_bits_reads_its_output_as_it_was_rounded() -> None:
    # A second loop over keys, for what memory has but for a rounding, would cost as much as the rest.
    forward = forwards.attention(element="fp16")
    found = forward.backward(_both(forward).kernel)
    same_gradients(found, forward.backward(forward.kernel))
    assert (found.loops, found.tapes) == (1, 0)


def _online(*, start: float | str = -torch.inf, stored: str = "sum", rate: float = 1.0, other: str = "") -> Kernel:
    """Online sum of exponentials of the rows of X, with twists."""
    arguments = [Value("*f32", (), name) for name in ("X", "S", "Y", "Z")] + [Value("i32", (), "n")]
    x_ptr, s_ptr, y_ptr, z_ptr, n = arguments
    kernel = Kernel("online", arguments)
    b = Builder(kernel)
    lanes = b.arange(0, 8)
    first = b.load(s_ptr, lanes) if start == "loaded" else b.const(float(start), "f32")
    mass = b.const(1.0 if start == "loaded" else 0.0, "f32")
    factor = b.const(rate, "f32")

    def body(index: Value, carries: list[Value]) -> list[Value]:
        nonlocal factor
        m, mass = carries
        if other == "a rate of every trip":
            factor = b.load(z_ptr, b.mul(index, b.const(8)))
        x = b.load(x_ptr, b.add(b.mul(index, b.const(8)), lanes))
        new = b.elementwise(Code.MAX, (m, x))
        p = b.unary(Code.EXP, b.mul(b.sub(x, new), factor))
        if other == "p squared":
            p = b.mul(p, p)
        if other == "p of the old maximum":
            p = b.unary(Code.EXP, b.sub(x, m))
        if other == "running sum stored":
            b.store(z_ptr, b.add(b.mul(index, b.const(8)), lanes), mass)
        alpha = b.unary(Code.EXP, b.mul(b.sub(m, new), factor))
        return [new, b.add(b.mul(mass, alpha), p)]

    tile = (8,)
    starts = [b.whole(first, tile), b.whole(mass, tile)]
    m, mass = b.loop((b.const(0), n, b.const(1)), starts, body, names=("m", "l"))
    log, number = b.unary(Code.LOG, mass), b.const(rate, "f32")
    lse, natural = b.add(m, b.div(log, number)), b.add(b.mul(m, number), log)
    largest, smallest = (b.reduce(code, m, 0) for code in (Code.REDUCE_MAX, Code.REDUCE_MIN))
    decayed = b.mul(mass, b.unary(Code.EXP, b.sub(m, largest)))
    found = {
        "sum": mass,
        "lse": lse,
        "natural lse": natural,
        "maximum": m,
        "spread of maxima": b.add(lse, b.sub(largest, smallest)),
        "maxima of other lanes": b.add(log, b.pure(Code.FLIP, (m,), "f32", m.shape, {"axis": 0})),
        "lse of all lanes": b.add(largest, b.unary(Code.LOG, b.sum(decayed, 0))),
    }
    b.store(y_ptr, lanes, found[stored])
    return kernel


def _run(kernel: Kernel, *, sink: bool, stores_within: bool = False, trips: int = 5) -> Forward:
    z = empty(trips, 8) if stores_within else seeded(trips, 8, seed=2).abs()
    given = {"X": 2 * seeded(trips, 8), "S": seeded(8, seed=1), "Y": empty(8), "Z": z}
    return ran(
        kernel, (1,), {**given, "n": trips}, ["X", *(["S"] if sink else [])], ["Y", *(["Z"] if stores_within else [])]
    )


def test_a_maximum_that_starts_with_a_sink_gives_the_sink_its_gradient() -> None:
    forward = _run(_online(start="loaded", stored="lse"), sink=True)
    saved = use_gauge(forward.kernel)
    assert saved.kernel is not forward.kernel
    forward.forward_again(saved.kernel)
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes == 0


@pytest.mark.parametrize("stored", ["lse", "natural lse"])
def test_a_scaled_softmax_takes_the_log_sum_exp_in_its_own_units(stored: str) -> None:
    forward = _run(_online(stored=stored, rate=0.5), sink=False)
    saved = use_gauge(forward.kernel)
    assert saved.read == {"Y"}
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


@pytest.mark.parametrize(
    ("twist", "reason"),
    [
        ({"stored": "sum"}, "what is stored to Y changes when it shifts"),
        ({"stored": "maximum"}, "what is stored to Y changes when it shifts"),
        ({"stored": "lse", "other": "p squared"}, "does not scale as `l` does"),
        ({"stored": "lse", "start": 0.0, "other": "p of the old maximum"}, "does not scale as `l` does"),
        ({"stored": "lse", "other": "running sum stored"}, "what is stored to Z changes when it shifts"),
        ({"stored": "spread of maxima"}, "what is stored to Y changes when it shifts"),
        ({"stored": "maxima of other lanes"}, "what is stored to Y changes when it shifts"),
        ({"stored": "lse", "other": "a rate of every trip"}, "c is another one in every trip"),
    ],
    ids=[
        "the sum is stored",
        "the maximum is stored",
        "other degree",
        "old maximum",
        "stored within",
        "lanes are compared",
        "lanes are mixed",
        "rates of trips",
    ],
)
def test_what_depends_on_the_maximum_keeps_its_tape_and_its_gradient(twist: dict[str, Any], reason: str) -> None:
    forward = _run(_online(**twist), sink=False, stores_within=twist.get("other") == "running sum stored")
    saved = use_gauge(forward.kernel)
    assert saved.kernel is forward.kernel
    assert any(reason in remark for remark in saved.remarks), saved.remarks
    # The gradient is no zero there: a gauge that was taken anyway would lose it.
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


def test_maxima_of_lanes_that_end_in_one_sum_need_no_tape() -> None:
    # The largest of them shifts as that of one lane does, by which all sums decay once more.
    forward = _run(_online(stored="lse of all lanes"), sink=False)
    saved = use_gauge(forward.kernel)
    assert saved.kernel is not forward.kernel
    forward.forward_again(saved.kernel)
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes == 0


def test_a_maximum_may_be_stored_where_nobody_differentiates_it() -> None:
    kernel = _online(stored="maximum")
    assert use_gauge(kernel, frozenset()).kernel is not kernel
