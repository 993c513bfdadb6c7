"""A store under a mask that memory has reaches every element, with zeros for the others, where that is proved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 8


class Elements:
    """A tensor of which a plan asks how many elements it has."""

    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count


def own(kernel: Kernel, call: Mapping[str, Any] | None = None) -> Ownership:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(1, Calls((call,) if call else ())))


def kept_tokens(*, guarded: bool = True, first: int = 0) -> Kernel:
    """Adds to the elements of a vector that `Keep` names. `guarded`: no mask but that of loading `Keep` says which
    there are. `first`: of the element that the first lane adds to."""

    def build(b: Builder, x: Value, keep: Value, dx: Value, n: Value) -> None:
        at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        there = b.compare("lt", at, n)
        held = b.load(keep, at, there, b.const(False, "i1")) if guarded else b.load(keep, at)
        add_to(b, dx, b.add(at, b.const(first)), b.load(x, at, there, b.const(0.0, "f32")), held)

    return made("X:*f32 Keep:*i1 dX:*f32 n", build, BLOCK=BLOCK)


def call(count: int) -> dict[str, Any]:
    return {"X": Elements(count), "n": 20, "BLOCK": BLOCK, "grid0": 3}


def stores_of(found: Ownership) -> list[Code]:
    return [op.code for op in found.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)]


def test_what_a_mask_in_memory_leaves_out_gets_zeros_of_the_same_store() -> None:
    found = own(kept_tokens(), call(20))
    assert stores_of(found) == [Code.STORE]
    assert found.empty_if["dX"] == "X.numel() == n and BLOCK * grid0 >= n"
    assert [fact.expression for fact in found.facts] == ["X.numel() == n and BLOCK * grid0 >= n"]


def masked_rows(b: Builder, x: Value, keep: Value, dx: Value, rows: Value, cols: Value) -> None:
    """Each program adds to a tile of rows, of which `Keep` leaves some out."""
    at, lanes = block_of(b, b.program_id(0), BLOCK, "BLOCK"), b.arange(0, 4, "COLS")
    held = b.load(keep, at, b.compare("lt", at, rows), b.const(False, "i1"))
    there = b.logical_and(b.expand(held, 1), b.expand(b.compare("lt", lanes, cols), 0))
    add_to(b, dx, matrix(b, at, cols, lanes, b.const(1)), b.expand(b.load(x, at), 1), there)


def test_rows_that_memory_names_are_known_from_the_mask_of_what_names_them() -> None:
    # `Keep` is loaded for rows that there are: where it holds, the row is one of them.
    kernel = made("X:*f32 Keep:*i1 dX:*f32 rows cols", masked_rows, BLOCK=BLOCK, COLS=4)
    found = own(kernel, {"X": Elements(60), "rows": 20, "cols": 3, "BLOCK": BLOCK, "COLS": 4, "grid0": 3})
    assert stores_of(found) == [Code.STORE]
    assert "X.numel() == cols * rows" in found.empty_if["dX"]


def test_a_tensor_that_is_larger_than_what_is_added_to_keeps_its_mask() -> None:
    # Its other elements are not the kernel's to write.
    found = own(kept_tokens(), call(21))
    assert found.facts == ()
    assert not found.empty_if["dX"]


def test_nothing_is_written_beyond_what_masks_of_indices_allow() -> None:
    # Elements are as many as the tensor has, but they begin with the second: a store to the last lies outside.
    found = own(kept_tokens(first=1), call(20))
    assert found.facts == ()
    assert not found.empty_if["dX"]


def test_a_mask_in_memory_alone_says_of_no_index_that_it_is_there() -> None:
    # 24 lanes for 20 elements: without the load's own mask, what `Keep` has behind its end kept them in.
    found = own(kept_tokens(guarded=False), call(20))
    assert found.facts == ()
    assert not found.empty_if["dX"]


def test_before_a_launch_was_seen_masks_stay() -> None:
    found = own(kept_tokens())
    assert found.facts == ()
    assert not found.empty_if["dX"]


def summed_taps(b: Builder, x: Value, keep: Value, dx: Value, n: Value) -> None:
    """Adds to its elements in every trip, under a mask that memory has for each."""
    at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
    there = b.compare("lt", at, n)

    def tap(trip: Value, _: list[Value]) -> list[Value]:
        held = b.load(keep, b.add(at, trip), there, b.const(False, "i1"))
        add_to(b, dx, at, b.load(x, at, there, b.const(0.0, "f32")), b.logical_and(held, there))
        return []

    b.loop((b.const(0), b.const(3), b.const(1)), [], tap)


def test_a_sum_over_trips_of_what_their_masks_let_pass_needs_no_choice_behind_the_loop() -> None:
    found = own(accumulated(made("X:*f32 Keep:*i1 dX:*f32 n", summed_taps, BLOCK=BLOCK)), call(20))
    (store,) = [op for op in found.kernel.ops if op.code is Code.STORE]
    made_by = store.stored.producer
    assert made_by is not None
    assert made_by.code is Code.FOR
    assert len(made_by.results) == 1  # whether a mask ever held is asked no more


def alternatives(b: Builder, x: Value, keep: Value, dx: Value, n: Value) -> None:
    """Adds what no mask has chosen from where either of two masks holds."""
    at = block_of(b, b.program_id(0), BLOCK, "BLOCK")
    there = b.compare("lt", at, n)
    one, other = (b.load(keep, b.add(at, b.const(far)), there, b.const(False, "i1")) for far in (0, 1))
    either = b.elementwise(Code.OR, (b.logical_and(one, there), b.logical_and(other, there)))
    add_to(b, dx, at, b.load(x, at, there, b.const(0.0, "f32")), either)


def test_of_what_alternatives_kept_out_nothing_is_stored_but_zero() -> None:
    # Their common part is the store's mask; without the choice, lanes of neither would get what was loaded.
    found = own(made("X:*f32 Keep:*i1 dX:*f32 n", alternatives, BLOCK=BLOCK), call(20))
    (store,) = [op for op in found.kernel.ops if op.code is Code.STORE]
    made_by = store.stored.producer
    assert made_by is not None
    assert made_by.code is Code.SELECT
    assert found.empty_if["dX"] == "X.numel() == n and BLOCK * grid0 >= n"
