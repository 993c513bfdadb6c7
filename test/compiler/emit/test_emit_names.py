"""Names say what a value is for, and never stand for two values at once."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from emit_kernels import kernel
from emit_round_trip import run

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def summed(b: Builder, x: Value, cols: Value, n: Value) -> Value:
    """Rows of x, one after another."""
    start = b.whole(b.const(0.0, "f32"), (16,))

    def step(index: Value, carries: list[Value]) -> list[Value]:
        row = b.load(x, b.add(b.mul(index, b.const(16, "i32", "BLOCK")), cols))
        return [b.add(carries[0], row)]

    (total,) = b.loop((b.const(0), n, b.const(1)), [start], step, index_name="row")
    return total


def kept_beside_what_is_made_of_it() -> Kernel:
    """A branch results in a scaled sum, and stores the sum itself after that."""
    made, b, (x, out, n, scale) = kernel("kept", "*f32 X, *f32 dX, i32 n, f32 scale", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")

    def then() -> list[Value]:
        total = summed(b, x, cols, n)
        scaled = b.mul(total, scale)
        b.store(out, b.add(cols, b.const(16)), scaled)
        b.store(out, b.add(cols, b.const(32)), total)
        return [scaled]

    (chosen,) = b.branch(b.compare("gt", n, b.const(1)), then, lambda: [b.whole(b.const(0.0, "f32"), (16,))])
    b.store(out, cols, chosen)
    return made


def test_a_sum_that_is_still_read_does_not_lend_its_name_to_what_is_made_of_it(tmp_path: Path) -> None:
    # All three are stored to dX, and are best called dx: the second store would write the scaled sum twice.
    x = torch.arange(48.0)
    found = run(kept_beside_what_is_made_of_it(), tmp_path, (1,), {"X": x, "dX": torch.zeros(48), "n": 3, "scale": 2.0})
    sums = x.reshape(3, 16).sum(0)
    assert torch.equal(found["dX"], torch.cat([sums * 2, sums * 2, sums]))


def test_a_sum_is_called_after_the_gradient_it_is_stored_to() -> None:
    made, b, (x, out, n, scale) = kernel("scaled", "*f32 X, *f32 dX, i32 n, f32 scale", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")
    b.store(out, cols, b.mul(summed(b, x, cols, n), scale))
    assert "dx += x\n" in triton_source(made).text


def test_an_index_that_the_user_had_no_name_for_has_one_where_it_is_read() -> None:
    # `_` is a soft keyword: with an underscore more, as other such names get, it is one that the gate refuses.
    made, b, (x, out, n) = kernel("unnamed", "*f32 X, *f32 Out, i32 n", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")

    def step(index: Value, carries: list[Value]) -> list[Value]:
        return [b.add(carries[0], b.load(x, b.add(b.mul(index, n), cols)))]

    (total,) = b.loop((b.const(0), n, b.const(1)), [b.whole(b.const(0.0, "f32"), (16,))], step, index_name="_")
    b.store(out, cols, total)
    text = triton_source(made).text
    assert "for trip in range(" in text
    assert "__" not in text


def test_factors_that_undo_each_other_are_not_printed(tmp_path: Path) -> None:
    # Scores in bits, and the derivative of 2 ** x: what is left of both is the scale.
    made, b, (x, out, scale) = kernel("undone", "*f32 X, *f32 Out, f32 scale", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")
    bits = b.mul(scale, b.const(1.4426950216293335, "f32"))
    b.store(out, cols, b.mul(b.mul(b.load(x, cols), bits), b.const(0.6931471824645996, "f32")))
    text = triton_source(made).text
    assert "1.44" not in text
    assert "0.69" not in text
    given = {"X": torch.arange(16.0), "Out": torch.zeros(16), "scale": 3.0}
    assert torch.equal(run(made, tmp_path, (1,), given)["Out"], torch.arange(16.0) * 3)


def test_loops_one_after_another_have_the_same_index() -> None:
    made, b, (x, out, n) = kernel("twice", "*f32 X, *f32 Out, i32 n", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")
    first = summed(b, x, cols, n)
    b.store(out, cols, first)
    b.store(out, cols, b.elementwise(Code.MUL, (summed(b, x, cols, b.add(n, n)), first)))
    assert triton_source(made).text.count("for row in range(") == 2


def test_a_condition_is_not_called_after_an_adjoint() -> None:
    # What a pass computes while it works on an adjoint has that one's name: `d_q = start < whole` read like a gradient.
    made, b, (x, out, n) = kernel("asked", "*f32 X, *f32 OUT, i32 n", {"BLOCK": 16})
    asked = b.compare("lt", b.program_id(0), n)
    asked.name = "d_q"

    def copy() -> list[Value]:
        b.store(out, cols, b.load(x, cols))
        return []

    for place in (0, 16):
        cols = b.add(b.arange(0, 16, "BLOCK"), b.const(place))
        b.branch(asked, copy, list)
    text = triton_source(made).text
    assert "d_q" not in text
    assert text.count("if active:") == 2


def test_a_number_with_a_sign_is_added_without_it_where_a_variable_goes_on() -> None:
    # `at -= -1` is right, and nobody would sign it.
    made, b, (x, out, _, _) = kernel("shifted", "*f32 X, *f32 dX, i32 n, f32 scale", {"BLOCK": 16})
    at = b.elementwise(Code.ADD, (b.arange(0, 16, "BLOCK"), b.const(4)), name="at")
    b.store(out, at, b.load(x, at))
    at = b.elementwise(Code.SUB, (at, b.const(-1)), name="at")
    b.store(out, at, b.load(x, at))
    text = triton_source(made).text
    assert "at += 1\n" in text, text


def test_what_has_no_name_leaves_the_user_those_of_loops() -> None:
    # A product of sizes took `start` first, and the user's loop over `start` was one over `start_1`.
    made, b, (x, out, n, width) = kernel("rows", "*f32 X, *f32 Out, i32 n, i32 width", {"BLOCK": 16})
    cols, stride = b.arange(0, 16, "BLOCK"), b.mul(n, width)

    def step(index: Value, carries: list[Value]) -> list[Value]:
        offsets = b.add(b.add(b.mul(index, stride), stride), cols)
        b.store(out, offsets, b.load(x, offsets))
        return []

    b.loop((b.const(0), n, b.const(1)), [], step, index_name="start")
    text = triton_source(made).text
    assert "stride = n * width" in text
    assert "for start in range" in text


def test_no_name_says_a_thing_twice() -> None:
    # A product of a product was `d_y_weighted_weighted`, what is scaled again `scaled_scaled`.
    made, b, (x, dy, out) = kernel("twice", "*f32 X, *f32 dY, *f32 Out", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK", "cols")
    d_y, value = b.load(dy, cols), b.load(x, cols)
    weighted = b.mul(d_y, value)
    again = b.mul(weighted, value)
    scaled = b.mul(again, b.const(3.0, "f32"))
    twice = b.mul(scaled, b.const(5.0, "f32"))
    for place, one in enumerate((weighted, again, scaled, twice, b.add(scaled, twice), b.add(weighted, again))):
        b.store(out, b.add(cols, b.const(16 * place)), one)
    text = triton_source(made).text
    assert "d_y_weighted = d_y * x" in text
    names = set(re.findall(r"[A-Za-z]\w*", text))
    assert not {name for name in names if re.search(r"_(weighted|scaled)(_\d+)?_(weighted|scaled)|scaled_scaled", name)}


def test_what_is_turned_back_has_the_name_it_had_before() -> None:
    # `k_t`, a tile that the user loads turned, was `k_t_t` where the derivative takes its rows again.
    made, b, (k, out) = kernel("turned", "*f32 K, *f32 Out", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK", "cols")
    offsets = b.add(b.mul(b.expand(cols, 1), b.const(16, "i32", "BLOCK")), b.expand(cols, 0))
    back = b.trans(b.load(k, offsets, name="k_t"), (1, 0))
    back.name = "k_t"
    b.store(out, offsets, b.add(back, b.mul(back, back)))
    assert "k = tl.trans(k_t)" in triton_source(made).text


def test_masks_of_an_index_with_a_number_have_one_number() -> None:
    # Both ends of `offs_1` were `mask_1` and `mask_1_1`, a test of the second index `mask_2_1`.
    made, b, (x, out, n) = kernel("masked", "*f32 X, *f32 Out, i32 n", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK", "cols")
    for step in (1, 2):
        offs = b.sub(b.mul(cols, b.const(3)), b.mul(n, b.const(step)))
        offs.name = f"offs_{step}"
        low, high = b.compare("ge", offs, b.const(0)), b.compare("lt", offs, n)
        both = b.logical_and(low, high)
        b.store(out, b.add(offs, cols), b.load(x, offs, both, b.const(0.0, "f32")), low)
        b.store(out, b.mul(offs, b.const(2)), b.load(x, offs, both, b.const(0.0, "f32")), high)
    names = set(re.findall(r"\bmask\w*", triton_source(made).text))
    assert names
    assert not {name for name in names if re.search(r"_\d+_\d+$", name)}
