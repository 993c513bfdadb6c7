"""Every rule of a well-formed kernel, by a kernel that breaks it alone."""

from collections.abc import Callable

import pytest

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value
from kernel_agent.compiler.ssa.verify import verify
from kernel_agent.errors import InternalError


class Case:
    """A builder with a pointer X to f32, one H to f16, a scalar N, and a tile of 4 lanes."""

    def __init__(self) -> None:
        self.x, self.h, self.n = Value("*f32", name="X"), Value("*f16", name="H"), Value("i32", name="N")
        self.kernel = Kernel("case", [self.x, self.h, self.n], constants={"SIDE": 5})
        self.b = Builder(self.kernel, frozenset({self.x, self.h}))
        self.lanes = self.b.arange(0, 4)
        self.tile = self.b.load(self.x, self.lanes)

    def op(self, code: Code, operands, *results: Value, blocks=(), **attributes) -> Op:
        return self.b.add_op(Op(code, operands, results, attributes, blocks))

    def loop(self, *, start: Value, inside: Value, yielded: Value, result: Value) -> None:
        block = Block([Value("i32"), inside])
        with self.b.inside(block):
            block.yields = [yielded]
        bounds = (self.b.const(0), self.n, self.b.const(1))
        self.op(Code.FOR, (*bounds, start), result, blocks=[block], reverse=False, tape=None)


def read_before_it_is_made(c: Case) -> None:
    late = Value("f32", (4,))
    c.op(Code.EXP, (late,), Value("f32", (4,)))
    c.op(Code.LOG, (c.tile,), late)


def read_after_its_block(c: Case) -> None:
    block = Block([Value("i32")])
    with c.b.inside(block):
        inner = c.b.add_op(Op(Code.TAPE_LOAD, (), [Value("f32", (4,))], {"tape": "t"})).result
    c.op(Code.FOR, (c.b.const(0), c.n, c.b.const(1)), blocks=[block], reverse=False, tape=None)
    c.op(Code.EXP, (inner,), Value("f32", (4,)))


def yield_out_of_sight(c: Case) -> None:
    block = Block([Value("i32"), Value("f32")], yields=[Value("f32")])
    block.arguments[0].depth = block.arguments[1].depth = 1
    bounds = (c.b.const(0), c.n, c.b.const(1), c.b.const(0.0, "f32"))
    c.op(Code.FOR, bounds, Value("f32"), blocks=[block], reverse=False, tape=None)


def made_twice(c: Case) -> None:
    c.kernel.body.ops.append(c.kernel.body.ops[-1])


def wrong_depth(c: Case) -> None:
    c.tile.depth = 1


def wrong_producer(c: Case) -> None:
    op = c.op(Code.EXP, (c.tile,), Value("f32", (4,)))
    Op(Code.LOG, (c.tile,), op.results)


def pointer_as_number(c: Case) -> None:
    c.op(Code.ADD, (c.x, c.n), Value("i32"))


def wrong_shape(c: Case) -> None:
    c.op(Code.EXP, (c.tile,), Value("f32", (8,)))


def shapes_that_do_not_broadcast(c: Case) -> None:
    c.op(Code.ADD, (c.tile, c.b.load(c.x, c.b.arange(0, 8))), Value("f32", (8,)))


def sum_of_a_scalar(c: Case) -> None:
    c.op(Code.SUM, (c.n,), Value("i32"), axis=0)


def comparison_of_another_type(c: Case) -> None:
    c.op(Code.CMP, (c.n, c.n), Value("i32"), predicate="lt")


def comparison_without_predicate(c: Case) -> None:
    c.op(Code.CMP, (c.n, c.n), Value("i1"), predicate="less")


def comparison_of_two_elements(c: Case) -> None:
    c.op(Code.CMP, (c.n, c.b.const(1, "i64")), Value("i1"), predicate="lt")


def choice_by_a_number(c: Case) -> None:
    c.op(Code.SELECT, (c.n, c.n, c.n), Value("i32"))


def sum_of_two_widths(c: Case) -> None:
    c.op(Code.ADD, (c.n, c.b.const(1, "i64")), Value("i64"))


def sum_of_float_and_integer(c: Case) -> None:
    c.op(Code.ADD, (c.tile, c.lanes), Value("f32", (4,)))


def exponential_of_an_integer(c: Case) -> None:
    c.op(Code.EXP, (c.n,), Value("i32"))


def conjunction_of_floats(c: Case) -> None:
    c.op(Code.AND, (c.tile, c.tile), Value("f32", (4,)))


def reshape_to_another_size(c: Case) -> None:
    c.op(Code.RESHAPE, (c.tile,), Value("f32", (2, 3)))


def full_of_a_tile(c: Case) -> None:
    c.op(Code.FULL, (c.tile,), Value("f32", (4,)))


def broadcast_to_fewer(c: Case) -> None:
    c.op(Code.BROADCAST, (c.tile,), Value("f32", (1,)))


def product_of_two_elements(c: Case) -> None:
    rows = c.b.reshape(c.b.arange(0, 16), (4, 4))
    c.op(Code.DOT, (c.b.load(c.x, rows), c.b.load(c.h, rows)), Value("f32", (4, 4)), precision=None)


def product_of_what_does_not_fit(c: Case) -> None:
    rows = c.b.load(c.x, c.b.reshape(c.b.arange(0, 8), (2, 4)))
    c.op(Code.DOT, (rows, rows), Value("f32", (2, 4)), precision="ieee")


def index_that_is_a_float(c: Case) -> None:
    c.op(Code.ARG_MAX, (c.tile,), Value("f32"), axis=0)


def gather_at_floats(c: Case) -> None:
    c.op(Code.GATHER, (c.tile, c.tile), Value("f32", (4,)), axis=0)


def combine_with_too_few_arguments(c: Case) -> None:
    block = Block([Value("f32")])
    with c.b.inside(block):
        block.yields = list(block.arguments)
    c.op(Code.REDUCE, (c.tile,), Value("f32"), blocks=[block], axis=0)


def combine_of_tiles(c: Case) -> None:
    block = Block([Value("f32"), Value("f32")])
    with c.b.inside(block):
        block.yields = [c.b.add_op(Op(Code.ADD, (block.arguments[0], c.tile), [Value("f32", (4,))])).result]
    c.op(Code.REDUCE, (c.tile,), Value("f32"), blocks=[block], axis=0)


def access_to_another_kernels_argument(c: Case) -> None:
    c.op(Code.LOAD, (c.lanes,), Value("f32", (4,)), base=Value("*f32", name="X"), masked=False, padded=False)


def access_to_a_scalar(c: Case) -> None:
    c.op(Code.STORE, (c.lanes, c.tile), base=c.n, masked=False)


def offsets_of_floats(c: Case) -> None:
    c.op(Code.STORE, (c.tile, c.tile), base=c.x, masked=False)


def mask_of_integers(c: Case) -> None:
    c.op(Code.STORE, (c.lanes, c.tile, c.lanes), base=c.x, masked=True)


def mask_of_another_shape(c: Case) -> None:
    mask = c.b.compare("lt", c.b.arange(0, 8), c.n)
    c.op(Code.STORE, (c.lanes, c.tile, mask), base=c.x, masked=True)


def mask_that_is_missing(c: Case) -> None:
    c.op(Code.STORE, (c.lanes, c.tile), base=c.x, masked=True)


def other_without_a_mask(c: Case) -> None:
    c.op(Code.LOAD, (c.lanes, c.b.const(0.0, "f32")), Value("f32", (4,)), base=c.x, masked=False, padded=True)


def load_of_another_element(c: Case) -> None:
    c.op(Code.LOAD, (c.lanes,), Value("f32", (4,)), base=c.h, masked=False, padded=False)


def load_of_another_shape(c: Case) -> None:
    c.op(Code.LOAD, (c.b.const(0),), Value("f32", (4,)), base=c.x, masked=False, padded=False)


def store_of_more_than_its_offsets(c: Case) -> None:
    c.op(Code.STORE, (c.b.const(0), c.tile), base=c.x, masked=False)


def tape_without_a_name(c: Case) -> None:
    c.op(Code.TAPE_STORE, (c.tile,))


def carry_that_starts_smaller(c: Case) -> None:
    inside = Value("f32", (4,))
    c.loop(start=c.b.const(0.0, "f32"), inside=inside, yielded=inside, result=Value("f32", (4,)))


def carry_that_changes_its_element(c: Case) -> None:
    c.loop(start=c.tile, inside=Value("f32", (4,)), yielded=c.lanes, result=Value("f32", (4,)))


def result_unlike_its_carry(c: Case) -> None:
    inside = Value("f32", (4,))
    c.loop(start=c.tile, inside=inside, yielded=inside, result=Value("f32"))


def bounds_of_two_widths(c: Case) -> None:
    block = Block([Value("i32")])
    with c.b.inside(block):
        pass
    bounds = (c.b.const(0), c.b.const(4, "i64"), c.b.const(1))
    c.op(Code.FOR, bounds, blocks=[block], reverse=False, tape=None)


def branch_by_a_tile(c: Case) -> None:
    c.op(Code.IF, (c.b.compare("lt", c.lanes, c.n),), blocks=[Block(), Block()])


def branch_that_yields_too_little(c: Case) -> None:
    c.op(Code.IF, (c.b.compare("lt", c.n, c.n),), Value("i32"), blocks=[Block(yields=[c.n]), Block()])


def while_without_condition(c: Case) -> None:
    c.op(Code.WHILE, (), blocks=[Block(), Block()])


def while_that_hands_on_something_else(c: Case) -> None:
    condition = c.b.compare("lt", c.n, c.n)
    test, body = Block(yields=[condition, c.n]), Block([Value("f32")])
    body.arguments[0].depth = 1
    c.op(Code.WHILE, (), Value("i32"), blocks=[test, body])


def leave_by_a_tile(c: Case) -> None:
    c.op(Code.LEAVE_IF, (c.b.compare("lt", c.lanes, c.n),))


def leave_after_a_store(c: Case) -> None:
    c.b.store(c.x, c.lanes, c.tile)
    c.op(Code.LEAVE_IF, (c.b.compare("lt", c.n, c.b.const(3)),))


def number_known_of_another_kind(c: Case) -> None:
    c.op(Code.KNOWN, (c.tile, c.lanes), Value("f32", (4,)))


def two_arguments_of_one_name(c: Case) -> None:
    c.kernel.arguments.append(Value("i32", name="N"))


def name_that_comes_apart(c: Case) -> None:
    c.b.const(2, symbol="SIDE // 2")


def name_of_another_number(c: Case) -> None:
    c.b.const(3, symbol="(SIDE // 2)")


BROKEN: list[tuple[Callable[[Case], None], str]] = [
    (read_before_it_is_made, "not in sight"),
    (read_after_its_block, "not in sight"),
    (yield_out_of_sight, "yielded but not in sight"),
    (made_twice, "made twice"),
    (wrong_depth, "at depth 0, but says 1"),
    (wrong_producer, "says that"),
    (pointer_as_number, "is a pointer"),
    (wrong_shape, "should have shape"),
    (shapes_that_do_not_broadcast, "do not go together"),
    (sum_of_a_scalar, "do not go together"),
    (comparison_of_another_type, "gives i1"),
    (comparison_without_predicate, "predicate"),
    (comparison_of_two_elements, "elements differ"),
    (choice_by_a_number, "selects by i1"),
    (sum_of_two_widths, "elements differ"),
    (sum_of_float_and_integer, "are mixed"),
    (exponential_of_an_integer, "takes floats"),
    (conjunction_of_floats, "takes integers"),
    (reshape_to_another_size, "another number of elements"),
    (full_of_a_tile, "fills with a scalar"),
    (broadcast_to_fewer, "does not broadcast to that shape"),
    (product_of_two_elements, "elements differ"),
    (product_of_what_does_not_fit, "no factors"),
    (index_that_is_a_float, "an index is an integer"),
    (gather_at_floats, "indices are integers"),
    (combine_with_too_few_arguments, "2n -> n"),
    (combine_of_tiles, "a combine is of scalars"),
    (access_to_another_kernels_argument, "not an argument"),
    (access_to_a_scalar, "no pointer"),
    (offsets_of_floats, "offsets are"),
    (mask_of_integers, "a mask is i1"),
    (mask_of_another_shape, "does not broadcast to the offsets"),
    (mask_that_is_missing, "another number of operands"),
    (other_without_a_mask, "without a mask nothing"),
    (load_of_another_element, "H holds f16"),
    (load_of_another_shape, "shape of its offsets"),
    (store_of_more_than_its_offsets, "does not broadcast to the offsets"),
    (tape_without_a_name, "name of a tape"),
    (carry_that_starts_smaller, "carries and arguments do not match"),
    (carry_that_changes_its_element, "carries and yields do not match"),
    (result_unlike_its_carry, "carries and results do not match"),
    (bounds_of_two_widths, "elements differ"),
    (branch_by_a_tile, "a condition is a scalar"),
    (branch_that_yields_too_little, "results and yields do not match"),
    (while_without_condition, "yields a condition"),
    (while_that_hands_on_something_else, "what goes on and arguments do not match"),
    (leave_by_a_tile, "a condition is a scalar"),
    (leave_after_a_store, "may not leave"),
    (number_known_of_another_kind, "are mixed"),
    (two_arguments_of_one_name, "names of their own"),
    (name_that_comes_apart, "needs parentheses"),
    (name_of_another_number, "is 2, not 3"),
]


def test_an_unbroken_case_is_well_formed() -> None:
    verify(Case().kernel)


@pytest.mark.parametrize(("break_it", "complaint"), BROKEN, ids=[function.__name__ for function, _ in BROKEN])
def test_a_broken_rule_is_named(break_it: Callable[[Case], None], complaint: str) -> None:
    case = Case()
    break_it(case)
    with pytest.raises(InternalError, match=complaint):
        verify(case.kernel)
