"""Tiles that a later loop loads again are kept in the caches until then."""

from __future__ import annotations

from schedule_kernels import made

from kernel_agent.compiler.schedule.revisit import revisited
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

LANES = 8


def twice(*, shift: int = 0, written: bool = False, passes: int = 2) -> Kernel:
    """Loops over a row of X and over W, which all rows share; the last one stores."""

    def build(b: Builder, x: Value, w: Value, y: Value, n: Value) -> None:
        start = b.mul(b.program_id(0), n)
        lanes = b.arange(0, LANES, "LANES")
        target = x if written else y
        total: Value = b.const(0.0, "f32")

        def tile(index: Value, step: int) -> tuple[Value, Value, Value]:
            cols = b.add(index, lanes)
            at = b.add(start, b.add(cols, b.const(step)))
            return at, b.load(x, at, b.compare("lt", cols, n)), b.load(w, cols, b.compare("lt", cols, n))

        def summed(index: Value, carries: list[Value]) -> list[Value]:
            _, one, other = tile(index, 0)
            return [b.add(carries[0], b.sum(b.mul(b.mul(one, other), carries[0]), 0))]

        def stored(index: Value, carries: list[Value]) -> list[Value]:
            at, one, other = tile(index, shift)
            b.store(target, at, b.mul(b.mul(one, other), total), b.compare("lt", b.add(index, lanes), n))
            return []

        bounds = (b.const(0), n, b.const(LANES))
        for _ in range(passes - 1):
            (total,) = b.loop(bounds, [total], summed, names=["total"])
        b.loop(bounds, [], stored)

    return made("X:*f32 W:*f32 Y:*f32 n", build, LANES=LANES)


def policies(kernel: Kernel) -> list[tuple[str, str]]:
    """Of loads, in order."""
    loads = [op for op in kernel.ops if op.code is Code.LOAD]
    return [(op.base.name, op.attributes.get("eviction_policy", "")) for op in loads]


def test_a_tile_is_kept_until_the_loop_that_loads_it_last() -> None:
    # W is left to the caches: the next rows want it, so that to evict it would cost what to keep X spares.
    kernel = revisited(twice(passes=3))
    verify(kernel)
    assert policies(kernel) == [("X", "evict_last"), ("W", "")] * 2 + [("X", "evict_first"), ("W", "")]
    (store,) = (op for op in kernel.ops if op.code is Code.STORE)
    assert store.attributes["eviction_policy"] == "evict_first"


def test_other_tiles_of_a_later_loop_are_left_to_the_caches() -> None:
    kernel = twice(shift=1)
    assert revisited(kernel) is kernel


def test_what_the_kernel_writes_to_is_left_to_the_caches() -> None:
    kernel = twice(written=True)
    assert revisited(kernel) is kernel


def test_a_tile_that_is_loaded_once_is_left_to_the_caches() -> None:
    kernel = twice(passes=1)
    assert revisited(kernel) is kernel
