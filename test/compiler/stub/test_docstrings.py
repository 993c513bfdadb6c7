"""Docstrings of derived kernels say what is so: of the plan, of its kernels, and of the text that was printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.plan import BackwardPlan, written_by
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.docstrings import backward_docstring, computed, kernel_docstring

LANES = 16


def rows_of(compute: Callable[[Builder, Value, Value, Value], Value], other: str = "*f32") -> Kernel:
    """A forward that stores to a row of Y, per program, what it makes of the row's offsets, of X and of W."""
    x, w, y, n = (Value("*f32", (), "X"), Value(other, (), "W"), Value("*f32", (), "Y"), Value("i32", (), "n"))
    kernel = Kernel("forward", [x, w, y, n], extents={LANES: "BLOCK"}, constants={"BLOCK": LANES})
    b = Builder(kernel, frozenset((y,)))
    cols = b.arange(0, LANES, "BLOCK", "cols")
    rows = b.add(b.mul(b.program_id(0, "row"), n), cols)
    rows.name = "offsets"
    b.store(y, rows, compute(b, rows, x, w), b.compare("lt", cols, n))
    return kernel


def best(kernel: Kernel, wanted: str) -> BackwardPlan:
    adjoint = differentiate(kernel, read=frozenset(wanted.split()), written=frozenset(["Y"]))
    return plans(kernel, adjoint, 1)[0]


def docstring(kernel: Kernel, plan: BackwardPlan) -> str:
    step = plan.steps[0]
    return " ".join(kernel_docstring(kernel, plan, step, triton_source(step.kernel).text).split())


def scaled(b: Builder, rows: Value, x: Value, w: Value) -> Value:
    grown = b.mul(b.load(x, rows), b.load(x, rows))
    grown.name = "grown"
    return b.mul(grown, b.load(w, b.arange(0, LANES, "BLOCK")))


def test_gradients_of_own_rows_are_said_to_be_stored_once() -> None:
    kernel = rows_of(scaled)
    found = docstring(kernel, best(kernel, "X"))
    assert found.startswith("dX from dY. dX = 2 * dY * W * X Derivatives of Y by X in `forward`, applied to dY.")
    assert "Every element is written by one program, with plain stores." in found
    assert "atomically" not in found


def test_additions_at_loaded_places_are_said_to_be_atomic() -> None:
    # a template for stores would tell a reader that no order of additions is left open
    def gather(b: Builder, rows: Value, x: Value, w: Value) -> Value:
        return b.load(x, b.load(w, rows))

    kernel = rows_of(gather, other="*i32")
    found = docstring(kernel, best(kernel, "X"))
    assert "dX is added to atomically: other programs may add to the same elements." in found
    assert "Every element" not in found


def test_partial_sums_of_programs_that_take_turns_are_said_to_be_partial() -> None:
    kernel = rows_of(scaled)
    plan = best(kernel, "X W")
    assert plan.totals
    found = docstring(kernel, plan)
    assert "dX and partial sums of dW from dY." in found
    assert "Programs take turns at `" in found
    assert "It sums dW over `" in found
    assert "Computed again of the forward: `grown`." in found


def test_a_state_that_a_loop_hands_on_is_no_sum() -> None:
    # dh is carried from trip to trip and multiplied there: what comes out is the gradient of the first state
    def recurrence(b: Builder, rows: Value, x: Value, w: Value) -> Value:
        factor = b.load(w, b.arange(0, LANES, "BLOCK"))
        bounds = b.const(0), b.const(5), b.const(1)

        def body(_: Value, h: list[Value]) -> list[Value]:
            return [b.mul(b.add(h[0], factor), factor)]

        (found,) = b.loop(bounds, [b.load(x, rows)], body, index_name="t")
        return found

    kernel = rows_of(recurrence)
    found = docstring(kernel, best(kernel, "X"))
    assert "dX" in found
    assert "sums" not in found


def test_tiles_of_a_program_are_told_in_the_order_of_the_text() -> None:
    # In the order of a set of values, which is that of their addresses, one forward had another text in each run.
    names = ["first", "second", "third", "fourth", "fifth", "sixth"]
    x, y, n = (Value(kind, (), name) for kind, name in (("*f32", "X"), ("*f32", "Y"), ("i32", "n")))
    kernel = Kernel("forward", [x, y, n], extents={LANES: "BLOCK"}, constants={"BLOCK": LANES})
    b = Builder(kernel, frozenset((y,)))
    cols, row = b.arange(0, LANES, "BLOCK", "cols"), b.program_id(0, "row")
    total = b.whole(b.const(0.0, "f32"), (LANES,))
    for place, name in enumerate(names, 1):
        at = b.add(b.mul(row, b.const(place * LANES)), cols)
        at.name = name
        total = b.add(total, b.load(x, at, b.compare("lt", at, n)))
    b.store(y, b.add(b.mul(row, n), cols), total)
    found = re.findall(r"BLOCK `(\w+)`", docstring(kernel, best(kernel, "X")).partition("(axis 0)")[0])
    assert [name for name in found if name in names] == names


def test_the_backward_names_its_kernels_and_what_they_make() -> None:
    kernel = rows_of(scaled)
    plan = best(kernel, "X W")
    made = {"forward_bwd": computed(plan, plan.steps[0].kernel)}
    found = " ".join(backward_docstring(["x", "w"], ["grad_y"], made).split())
    assert found == "Gradients of x and w from grad_y. `forward_bwd` computes dX and partial sums of dW."


def test_a_gradient_with_several_partial_sums_is_named_once() -> None:
    kernel = rows_of(scaled)
    plan = best(kernel, "X W")
    (step, *_) = plan.steps
    (total,) = plan.totals
    writes = written_by(step.kernel)
    several = replace(plan, gradients={}, totals=tuple(replace(total, partials=name) for name in writes))
    assert len(writes) > 1
    assert computed(several, step.kernel) == f"partial sums of {total.name}"


def formula(kernel: Kernel, wanted: str, name: str) -> str:
    """What is said of a gradient, with the names in it written out."""
    plan = best(kernel, wanted)
    lines = kernel_docstring(kernel, plan, plan.steps[0], triton_source(plan.steps[0].kernel).text).split("\n")
    said = dict(line.strip().split(" = ") for line in lines if line.startswith("        ") and " = " in line)
    text = said.pop(name)
    for _ in said:
        for other, meaning in said.items():
            text = re.sub(rf"\b{other}\b", f"({meaning})", text)
    return text


def test_the_formula_of_a_gradient_is_its_derivative() -> None:
    # Y = X * X * W: a factor lost, or numbers put together wrongly, would be another value
    found = formula(rows_of(scaled), "X", "dX")
    assert eval(found, {"X": 3.0, "W": 5.0, "dY": 7.0}) == 2 * 3.0 * 5.0 * 7.0


def test_a_choice_by_values_stands_in_the_formula_and_a_mask_does_not() -> None:
    # without the choice the derivative of relu would read dY everywhere; the mask of columns is everywhere
    def relu(b: Builder, rows: Value, x: Value, w: Value) -> Value:
        loaded = b.load(x, rows)
        return b.select(b.compare("gt", loaded, b.zero(loaded)), b.mul(loaded, loaded), b.zero(loaded))

    found = formula(rows_of(relu), "X", "dX")

    def where(condition: bool, then: float, other: float) -> float:
        return then if condition else other

    values = [eval(found, {"X": x, "dY": 7.0, "where": where}) for x in (3.0, -3.0)]
    assert values == [2 * 3.0 * 7.0, 0.0]
    assert "n" not in re.findall(r"\w+", found)


def test_sums_of_loops_are_sums_over_what_they_walk() -> None:
    kernel = rows_of(scaled)
    lines = kernel_docstring(kernel, plan := best(kernel, "X W"), plan.steps[0], text_of(plan)).split("\n")
    assert any(re.fullmatch(r" +dW = sum over \w+ of .*dY.*", line) for line in lines), lines


def text_of(plan: BackwardPlan) -> str:
    return triton_source(plan.steps[0].kernel).text
