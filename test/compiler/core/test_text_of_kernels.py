"""Kernels as lines."""

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.text import text
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

EXPECTED = """\
kernel rows(X: *f16, N: i32, BLOCK=4)
  row: i32 = program_id axis=0
  v: 4xf32 = full 0.0
  cols: 4xi32 = arange start=0 end=4 symbol=BLOCK
  acc: 4xf32 = for 0, N, BLOCK, v reverse=True
  do (off: i32, acc_1: 4xf32)
    v_1: 4xi32 = add off, cols
    v_2: 4xi1 = cmp v_1, N predicate=lt
    x: 4xf16 = load X[v_1], mask=v_2, other=0.0
    x_1: 4xf32 = cast x
    v_3: 4xf32 = add acc_1, x_1
    yield v_3
  v_4: f32 = sum acc axis=0
  v_5: i1 = cmp row, 0 predicate=eq
  v_6: f32 = if v_5
  then
    yield v_4
  else
    barrier
    yield 1.0
  atomic_add X[row], v_6
"""


def rows() -> Kernel:
    x, n = Value("*f16", name="X"), Value("i32", name="N")
    kernel = Kernel("rows", [x, n], constants={"BLOCK": 4})
    b = Builder(kernel, frozenset({x}))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        cols = b.add(index, b.arange(0, 4, "BLOCK", "cols"))
        value = b.load(x, cols, b.compare("lt", cols, n), b.const(0.0, "f16"), "x")
        return [b.add(carries[0], b.cast(value, "f32"))]

    def other() -> list[Value]:
        b.add_op(Op(Code.BARRIER, (), ()))
        return [b.const(1.0, "f32")]

    row = b.program_id(0, "row")
    bounds = (b.const(0), n, b.const(4, symbol="BLOCK"))
    start = [b.whole(b.const(0.0, "f32"), (4,))]
    (acc,) = b.loop(bounds, start, body, index_name="off", names=["acc"], reverse=True)
    total = b.sum(acc, 0)
    (chosen,) = b.branch(b.compare("eq", row, b.const(0)), lambda: [total], other)
    b.store(x, row, chosen, code=Code.ATOMIC_ADD)
    return kernel


def test_every_operation_is_a_line_and_constants_stand_where_they_are_read() -> None:
    assert text(rows()) == EXPECTED


def test_equal_kernels_have_equal_text_though_their_values_have_other_numbers() -> None:
    kernel = rows()
    assert text(Copier(kernel).copy()) == text(kernel)
