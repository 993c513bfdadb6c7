"""Copies of kernels: whole, changed by hooks, and slices of them."""

import pytest

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value
from kernel_agent.errors import InternalError


def row_sums() -> Kernel:
    """Y[pid] = sum over a loop of blocks of X's row, and Z gets every square on the way."""
    x, y, z, n = Value("*f32", name="X"), Value("*f32", name="Y"), Value("*f32", name="Z"), Value("i32", name="N")
    kernel = Kernel("row_sums", [x, y, z, n])
    b = Builder(kernel, frozenset({y, z}))
    row = b.mul(b.program_id(0, "row"), n)

    def body(index: Value, carries: list[Value]) -> list[Value]:
        b.line = 7
        cols = b.add(index, b.arange(0, 4, "BLOCK", "cols"))
        mask = b.compare("lt", cols, n)
        value = b.load(x, b.add(row, cols), mask, b.const(0.0, "f32"), "x")
        square = b.mul(value, value)
        b.store(z, b.add(row, cols), square, mask)
        return [b.add(carries[0], value)]

    start = b.whole(b.const(0.0, "f32"), (4,))
    (total,) = b.loop((b.const(0), n, b.const(4)), [start], body, index_name="off", names=["acc"], num_stages=3)
    b.store(y, b.program_id(0), b.sum(total, 0))
    return kernel


def codes(kernel: Kernel) -> list[Code]:
    return [op.code for op in kernel.ops]


def only(kernel: Kernel, code: Code) -> Value:
    (op,) = [op for op in kernel.ops if op.code is code]
    return op.result


def test_a_copy_has_the_same_operations_in_the_same_order_and_blocks() -> None:
    kernel = row_sums()
    assert codes(Copier(kernel).copy()) == codes(kernel)


def test_a_copy_shares_no_operation_and_no_value_but_the_arguments_with_its_source() -> None:
    kernel = row_sums()
    before = set(kernel.ops)
    made = {value for op in kernel.ops for value in op.results}
    copy = Copier(kernel).copy()
    assert not before & set(copy.ops)
    assert not made & {value for op in copy.ops for value in (*op.results, *op.operands)}
    assert copy.arguments == kernel.arguments


def test_a_copy_keeps_names_lines_and_hints() -> None:
    copy = Copier(row_sums()).copy()
    (loop,) = [op for op in copy.ops if op.code is Code.FOR]
    assert [value.name for value in loop.blocks[0].arguments] == ["off", "acc"]
    assert loop.attributes == {"reverse": False, "tape": None, "num_stages": 3}
    load = only(copy, Code.LOAD)
    assert (load.name, load.source_line) == ("x", 7)
    assert only(copy, Code.ARANGE).name == "cols"


def test_a_hook_replaces_what_an_operation_is() -> None:
    class Doubled(Copier):
        def load(self, op) -> None:
            super().load(op)
            loaded = self[op.result]
            self[op.result] = self.b.add(loaded, loaded)

    copy = Doubled(row_sums()).copy()
    load = only(copy, Code.LOAD)
    (double,) = [op for op in copy.ops if load in op.operands]
    assert (double.code, double.operands) == (Code.ADD, (load, load))


def test_a_value_that_was_set_before_is_read_in_place_of_the_old_one() -> None:
    kernel = row_sums()
    copier = Copier(kernel)
    copier[kernel.argument("N")] = copier.b.const(4)
    (loop,) = [op for op in copier.copy().ops if op.code is Code.FOR]
    assert loop.operands[1].producer.attributes["value"] == 4


def test_a_dropped_effect_is_gone_and_a_dropped_value_that_is_read_is_a_defect() -> None:
    class WithoutZ(Copier):
        def effect(self, op) -> None:
            if op.base.name != "Z":
                super().effect(op)

    class WithoutLoads(Copier):
        def load(self, op) -> None:
            pass

    assert [op.base.name for op in WithoutZ(row_sums()).copy().ops if op.code is Code.STORE] == ["Y"]
    with pytest.raises(InternalError, match=r"x.*dropped"):
        WithoutLoads(row_sums()).copy()


def test_a_pass_that_writes_to_what_it_loads_must_say_so_beforehand() -> None:
    class InPlace(Copier):
        def load(self, op) -> None:
            super().load(op)
            self.b.store(op.base, self[op.offset], self[op.result], self[op.mask])

    with pytest.raises(InternalError, match="writes to X"):
        InPlace(row_sums()).copy()


def test_a_slice_has_only_what_a_value_depends_on_and_no_effects() -> None:
    kernel = row_sums()
    copier = Copier(kernel)
    (total,) = [op.stored for op in kernel.ops if op.code is Code.STORE and op.base.name == "Y"]
    wanted = copier[total]
    assert wanted.producer.code is Code.SUM
    assert Code.FOR in codes(copier.b.kernel)
    assert Code.STORE not in codes(copier.b.kernel)


def test_a_slice_through_an_index_is_computed_for_the_index_it_is_given() -> None:
    kernel = row_sums()
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    copier = Copier(kernel)
    copier[loop.blocks[0].arguments[0]] = copier.b.program_id(1)
    loaded = copier[only(kernel, Code.LOAD)]
    assert loaded.producer.code is Code.LOAD
    assert Code.FOR not in codes(copier.b.kernel)


def test_a_slice_through_a_carry_is_refused_by_its_name() -> None:
    kernel = row_sums()
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    copier = Copier(kernel)
    copier[loop.blocks[0].arguments[0]] = copier.b.program_id(1)
    with pytest.raises(CannotDerive, match="`acc`"):
        copier[loop.blocks[0].yields[0]]


def test_a_slice_through_memory_that_the_kernel_writes_is_refused() -> None:
    x = Value("*f32", name="X")
    kernel = Kernel("in_place", [x])
    b = Builder(kernel, frozenset({x}))
    loaded = b.load(x, b.program_id(0))
    b.store(x, b.program_id(0), b.unary(Code.EXP, loaded))
    with pytest.raises(CannotDerive, match="X is read and written"):
        Copier(kernel)[loaded]


def test_a_slice_through_a_tape_is_refused() -> None:
    # The slice has no effects, so that nothing would be on the tape.
    kernel = Kernel("k", [Value("*f32", name="X")])
    b = Builder(kernel)
    b.add_op(Op(Code.TAPE_STORE, (b.load(kernel.argument("X"), b.const(0)),), (), {"tape": "t"}))
    (found,) = b.add_op(Op(Code.TAPE_LOAD, (), [Value("f32")], {"tape": "t"})).results
    with pytest.raises(CannotDerive, match="kept from an earlier loop of k"):
        Copier(kernel)[found]


def test_what_was_copied_in_one_branch_is_copied_again_in_the_other() -> None:
    # A copy that outlived its branch would be read where it was never computed.
    kernel = row_sums()
    load = only(kernel, Code.LOAD)
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    copier = Copier(kernel)
    b = copier.b
    copier[loop.blocks[0].arguments[0]] = b.const(0)
    b.branch(b.compare("eq", b.program_id(0), b.const(0)), lambda: [copier[load]], lambda: [copier[load]])
    (branch,) = [op for op in b.kernel.ops if op.code is Code.IF]
    assert [[op.code for op in block.ops].count(Code.LOAD) for block in branch.blocks] == [1, 1]


def test_a_branch_whose_condition_becomes_known_is_the_side_that_runs() -> None:
    x, flag = Value("*f32", name="X"), Value("i1", name="flag")
    kernel = Kernel("k", [x, flag])
    b = Builder(kernel)
    (chosen,) = b.branch(flag, lambda: [b.const(1.0, "f32")], lambda: [b.const(2.0, "f32")])
    b.store(x, b.program_id(0), chosen)
    copier = Copier(kernel)
    copier[flag] = copier.b.const(False, "i1")
    copy = copier.copy()
    assert Code.IF not in codes(copy)
    (store,) = [op for op in copy.ops if op.code is Code.STORE]
    assert store.stored.producer.attributes["value"] == 2.0


def test_extents_that_folding_takes_are_given_back_where_they_count() -> None:
    # The sum of four ones is four; summing the scalar one, which the tile folds to, would make it one.
    x, y, flag = Value("*f32", name="X"), Value("*f32", name="Y"), Value("i1", name="flag")
    kernel = Kernel("k", [x, y, flag])
    b = Builder(kernel)
    tile = b.select(flag, b.const(1.0, "f32"), b.load(x, b.arange(0, 4)))
    b.store(y, b.program_id(0), b.sum(tile, 0))
    copier = Copier(kernel)
    copier[flag] = copier.b.const(True, "i1")
    copy = copier.copy()
    assert only(copy, Code.SUM).producer.operands[0].shape == (4,)


def test_a_slice_can_go_into_another_kernel() -> None:
    kernel = row_sums()
    target = emptied(kernel, name="other", arguments=[*kernel.arguments, Value("*f32", name="dX")])
    copier = Copier(kernel, Builder(target))
    (total,) = [op.stored for op in kernel.ops if op.code is Code.STORE and op.base.name == "Y"]
    copier.b.store(target.argument("dX"), copier.b.program_id(0), copier[total])
    assert [op.base.name for op in target.ops if op.code is Code.STORE] == ["dX"]


def test_a_very_long_chain_is_copied_without_recursion() -> None:
    x = Value("*f32", name="X")
    kernel = Kernel("k", [x])
    b = Builder(kernel)
    value = b.load(x, b.program_id(0))
    for _ in range(3000):
        value = b.unary(Code.EXP, value)
    assert Copier(kernel)[value].producer.code is Code.EXP
