"""What goes, what stays, and that memory is the same afterwards."""

import torch

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value


class Case:
    """A kernel of X (5 doubles), Y (what it stores) and a scalar N = 5."""

    def __init__(self) -> None:
        self.x, self.y, self.n = Value("*f64", name="X"), Value("*f64", name="Y"), Value("i32", name="N")
        self.kernel = Kernel("case", [self.x, self.y, self.n])
        self.b = Builder(self.kernel, frozenset({self.y}))

    @property
    def bounds(self) -> tuple[Value, Value, Value]:
        return self.b.const(0), self.n, self.b.const(1)

    def number(self, value: float) -> Value:
        return self.b.const(value, "f64")

    def store(self, value: Value, place: int = 0) -> None:
        self.b.store(self.y, self.b.const(place), value)

    def run(self, kernel: Kernel) -> torch.Tensor:
        y = torch.zeros(5, dtype=torch.float64)
        evaluate(kernel, (1,), {"X": torch.arange(1.0, 6.0, dtype=torch.float64), "Y": y, "N": 5})
        return y

    def pruned(self) -> Kernel:
        """The kernel without what is dead, having shown that it stores the same."""
        kernel = prune(self.kernel)
        assert torch.equal(self.run(kernel), self.run(self.kernel))
        assert kernel.arguments == self.kernel.arguments
        return kernel


def codes(kernel: Kernel) -> list[Code]:
    return [op.code for op in kernel.ops if op.code is not Code.CONST]


def loop_of(kernel: Kernel) -> Op:
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    return loop


def test_what_nobody_reads_goes_and_what_is_stored_stays() -> None:
    case = Case()
    b = case.b
    loaded = b.load(case.x, b.const(0))
    b.unary(Code.EXP, b.load(case.x, b.const(1)))
    case.store(loaded)
    assert codes(case.pruned()) == [Code.LOAD, Code.STORE]


def test_a_loop_without_results_or_effects_goes_with_its_bounds() -> None:
    case = Case()
    b = case.b
    stop = b.add(case.n, b.program_id(0))
    b.loop((b.const(0), stop, b.const(1)), [case.number(0)], lambda i, c: [b.add(c[0], b.load(case.x, i))])
    case.store(case.number(1))
    assert codes(case.pruned()) == [Code.STORE]


def test_a_loop_that_only_stores_stays() -> None:
    case = Case()
    b = case.b

    def body(index: Value, _: list[Value]) -> list[Value]:
        b.store(case.y, index, b.load(case.x, index))
        return []

    b.loop(case.bounds, [], body)
    assert codes(case.pruned()) == [Code.FOR, Code.LOAD, Code.STORE]


def test_a_carry_that_only_feeds_itself_goes_and_one_that_feeds_a_live_one_stays() -> None:
    # `dead` has a reader, its own next value: counting readers would keep it.
    case = Case()
    b = case.b

    def body(index: Value, carries: list[Value]) -> list[Value]:
        total, dead, step = carries
        return [b.add(total, step), b.add(dead, b.load(case.x, index)), b.mul(step, case.number(2.0))]

    start = [case.number(0.0), case.number(0.0), case.number(1.0)]
    total, _, _ = b.loop(case.bounds, start, body, names=["total", "dead", "step"])
    case.store(total)
    loop = loop_of(case.pruned())
    assert [value.name for value in loop.results] == ["total", "step"]
    assert Code.LOAD not in [op.code for op in loop.blocks[0].ops]


def test_two_dead_carries_that_feed_each_other_go() -> None:
    case = Case()
    b = case.b

    def body(index: Value, carries: list[Value]) -> list[Value]:
        a, c, live = carries
        return [c, a, b.add(live, b.load(case.x, index))]

    found = b.loop(case.bounds, [case.number(1.0), case.number(2.0), case.number(0.0)], body)
    case.store(found[2])
    assert len(loop_of(case.pruned()).results) == 1


def test_a_carry_that_stays_what_it_was_is_replaced_by_it() -> None:
    case = Case()
    b = case.b
    scale = b.load(case.x, b.const(1))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        return [carries[0], b.add(carries[1], b.mul(b.load(case.x, index), carries[0]))]

    kept, total = b.loop(case.bounds, [scale, case.number(0.0)], body)
    case.store(b.add(kept, total))
    loop = loop_of(case.pruned())
    assert len(loop.results) == 1


def test_a_carry_that_both_sides_of_a_branch_leave_as_it_was_is_replaced_by_it() -> None:
    # The result of a branch is another value than the carry: seen as one that changes, it could not leave the loop.
    case = Case()
    b = case.b
    scale = b.load(case.x, b.const(1))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        kept, total = carries

        def then() -> list[Value]:
            return [kept, b.add(total, b.mul(b.load(case.x, index), kept))]

        return list(b.branch(b.compare("lt", index, b.const(3)), then, lambda: [kept, total]))

    kept, total = b.loop(case.bounds, [scale, case.number(0.0)], body)
    case.store(b.add(kept, total))
    loop = loop_of(case.pruned())
    assert len(loop.results) == 1
    assert [len(op.results) for op in loop.blocks[0].ops if op.code is Code.IF] == [1]


def test_a_loop_that_carries_nothing_any_more_but_was_read_goes() -> None:
    case = Case()
    b = case.b
    (kept,) = b.loop(case.bounds, [case.number(3.0)], lambda _, carries: carries)
    case.store(kept)
    assert codes(case.pruned()) == [Code.STORE]


def test_results_of_a_branch_that_nobody_reads_go_and_with_the_last_the_branch() -> None:
    case = Case()
    b = case.b
    condition = b.compare("gt", case.n, b.const(3))

    def side(number: float):
        return lambda: [
            b.unary(Code.EXP, b.load(case.x, b.const(0))),
            b.add(b.load(case.x, b.const(1)), b.const(number, "f64")),
        ]

    first = b.branch(condition, side(1.0), side(2.0))
    b.branch(condition, side(3.0), side(4.0))
    case.store(first[1])
    kernel = case.pruned()
    (branch,) = [op for op in kernel.ops if op.code is Code.IF]
    assert len(branch.results) == 1
    assert Code.EXP not in codes(kernel)


def test_the_condition_of_a_branch_that_only_stores_lives() -> None:
    case = Case()
    b = case.b

    def stored() -> list[Value]:
        case.store(case.number(2.0))
        return []

    b.branch(b.compare("gt", b.load(case.x, b.const(2)), case.number(0.0)), stored, list)
    assert codes(case.pruned()) == [Code.LOAD, Code.CMP, Code.IF, Code.STORE]


def taped(*, loaded: bool) -> Case:
    case = Case()
    b = case.b

    def forth(index: Value, _: list[Value]) -> list[Value]:
        for tape, number in (("used", 1.0), ("unused", 2.0)):
            value = b.mul(b.load(case.x, index), case.number(number + 1))
            b.add_op(Op(Code.TAPE_STORE, (value,), (), {"tape": tape}))
        return []

    def back(index: Value, carries: list[Value]) -> list[Value]:
        (found,) = b.add_op(Op(Code.TAPE_LOAD, (), (Value("f64"),), {"tape": "used"})).results
        return [b.add(b.mul(carries[0], case.number(0.5)), found)]

    b.loop(case.bounds, [], forth)
    (total,) = b.loop(case.bounds, [case.number(0.0)], back, reverse=True)
    case.store(total if loaded else case.number(1.0))
    return case


def test_a_tape_that_nobody_loads_goes_and_one_that_is_loaded_stays() -> None:
    tapes = [op.attributes["tape"] for op in taped(loaded=True).pruned().ops if op.code is Code.TAPE_STORE]
    assert tapes == ["used"]


def test_a_tape_whose_loads_are_dead_goes_and_its_loop() -> None:
    assert codes(taped(loaded=False).pruned()) == [Code.STORE]


def test_a_barrier_keeps_its_place_but_no_loop_alive() -> None:
    case = Case()
    b = case.b

    def waits(*_: object) -> list[Value]:
        b.add_op(Op(Code.BARRIER, (), ()))
        return []

    b.loop(case.bounds, [], waits)
    waits()
    case.store(case.number(1.0))
    assert codes(case.pruned()) == [Code.BARRIER, Code.STORE]


def test_all_of_a_while_that_is_read_stays() -> None:
    case = Case()
    b = case.b
    results = b.repeat(
        [b.const(0), case.number(1.0)],
        lambda inner: [b.compare("lt", inner[0], case.n), *inner],
        lambda passed: [b.add(passed[0], b.const(1)), b.mul(passed[1], case.number(2.0))],
    )
    case.store(results[1])
    kernel = case.pruned()
    assert Code.WHILE in codes(kernel)
    assert case.run(kernel)[0] == 32.0


def test_a_combine_of_a_reduction_stays_whole_and_reads_its_constants() -> None:
    case = Case()
    b = case.b
    block = Block([Value("f64"), Value("f64")])
    with b.inside(block):
        block.yields = [b.add(b.mul(block.arguments[0], case.number(0.5)), block.arguments[1])]
    result = Value("f64")
    b.add_op(Op(Code.REDUCE, (b.load(case.x, b.arange(0, 4)),), (result,), {"axis": 0}, [block]))
    case.store(result)
    assert Code.REDUCE in codes(case.pruned())


def test_a_kernel_in_which_all_is_read_stays_itself() -> None:
    # Most kernels are pruned by one pass after the other: with a copy each time, derivation took much longer.
    case = Case()
    b = case.b
    (total,) = b.loop(case.bounds, [case.number(0)], lambda i, c: [b.add(c[0], b.load(case.x, i))])
    case.store(total)
    assert prune(case.kernel) is case.kernel


def test_what_only_a_dropped_value_read_goes_as_well() -> None:
    # A carry that stays what it was becomes that number, and with it goes the loop that nobody reads any more.
    case = Case()
    b = case.b
    kept, _ = b.loop(case.bounds, [case.number(2), case.number(0)], lambda i, c: [c[0], b.add(c[1], c[0])])
    case.store(kept)
    pruned = case.pruned()
    assert codes(pruned) == [Code.STORE]
    assert prune(pruned) is pruned
