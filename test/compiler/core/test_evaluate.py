"""What values mean in the evaluation of kernels: against torch, Python's integers, and numbers that Triton gives."""

import pytest
import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

NAN, INF = float("nan"), float("inf")
ELEMENTS = {torch.float64: "f64", torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.bool: "i1"}


class Bench:
    """A kernel of one program that loads its inputs whole and stores results whole."""

    def __init__(self, *inputs: Tensor) -> None:
        self.arguments = {f"in{n}": tensor.contiguous() for n, tensor in enumerate(inputs)}
        self.kernel = Kernel("bench", [Value("*" + ELEMENTS[t.dtype], name=k) for k, t in self.arguments.items()])
        self.b = Builder(self.kernel)
        self.inputs = [
            self.b.load(value, self.places(tensor.shape))
            for value, tensor in zip(self.kernel.arguments, self.arguments.values(), strict=True)
        ]

    def places(self, shape) -> Value:
        size = torch.Size(shape).numel()
        return self.b.reshape(self.b.arange(0, size), tuple(shape)) if shape else self.b.const(0)

    def run(self, *results: Value) -> Tensor | list[Tensor]:
        found = []
        for number, value in enumerate(results):
            dtype = {text: dtype for dtype, text in ELEMENTS.items()} | {"f32": torch.float64}
            out = Value("*" + value.element, name=f"out{number}")
            self.kernel.arguments.append(out)
            self.b.store(out, self.places(value.shape), value)
            found.append(torch.empty(value.shape, dtype=dtype[value.element]))
            self.arguments[out.name] = found[-1]
        evaluate(self.kernel, (1,), self.arguments)
        return found[0] if len(found) == 1 else found


def elementwise(code: Code, *inputs: Tensor, element: str | None = None, **attributes) -> Tensor:
    bench = Bench(*inputs)
    return bench.run(bench.b.elementwise(code, bench.inputs, element, attributes))


def integers(*values: int, dtype=torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("code", "function"),
    [
        (Code.EXP, torch.exp),
        (Code.EXP2, torch.exp2),
        (Code.LOG, torch.log),
        (Code.LOG2, torch.log2),
        (Code.SQRT, torch.sqrt),
        (Code.RSQRT, torch.rsqrt),
        (Code.SIN, torch.sin),
        (Code.COS, torch.cos),
        (Code.TANH, torch.tanh),
        (Code.ERF, torch.erf),
        (Code.SIGMOID, torch.sigmoid),
        (Code.FLOOR, torch.floor),
        (Code.CEIL, torch.ceil),
        (Code.ABS, torch.abs),
        (Code.NEG, torch.neg),
    ],
)
def test_functions_of_one_float_are_those_of_torch_in_float64(code: Code, function) -> None:
    x = floats(0.3, 1.7, 2.0, 1e-3)
    assert torch.equal(elementwise(code, x), function(x))


def test_integers_wrap_at_their_width() -> None:
    assert elementwise(Code.ADD, integers(2**31 - 1), integers(1)).tolist() == [-(2**31)]
    assert elementwise(Code.MUL, integers(1 << 20, 3), integers(1 << 20, 5)).tolist() == [0, 15]
    assert elementwise(Code.SUB, integers(-128, dtype=torch.int8), integers(1, dtype=torch.int8)).tolist() == [127]
    assert elementwise(Code.ADD, integers(2**62, dtype=torch.int64), integers(2**62, dtype=torch.int64)).tolist() == [
        -(2**63)
    ]


def test_division_cuts_towards_zero_and_the_remainder_has_the_sign_of_the_dividend() -> None:
    # Python and torch's floor division both differ from C for exactly one negative operand.
    a, b = integers(7, -7, 7, -7), integers(2, 2, -2, -2)
    assert elementwise(Code.FLOORDIV, a, b).tolist() == [3, -3, -3, 3]
    assert elementwise(Code.REM, a, b).tolist() == [1, -1, 1, -1]
    assert elementwise(Code.REM, floats(7.5, -7.5), floats(2.0, 2.0)).tolist() == [1.5, -1.5]


def test_unsigned_operations_read_the_bits_without_a_sign() -> None:
    minus, two = integers(-1), integers(2)
    assert elementwise(Code.FLOORDIV, minus, two, unsigned=True).tolist() == [2**31 - 1]
    assert elementwise(Code.REM, minus, integers(10), unsigned=True).tolist() == [(2**32 - 1) % 10]
    assert elementwise(Code.SHR, minus, integers(28), unsigned=True).tolist() == [15]
    assert elementwise(Code.SHR, minus, integers(28)).tolist() == [-1]
    assert elementwise(Code.MAX, minus, two, unsigned=True).tolist() == [-1]
    assert elementwise(Code.MAX, minus, two).tolist() == [2]
    assert elementwise(Code.CMP, minus, two, element="i1", predicate="lt", unsigned=True).tolist() == [False]
    assert elementwise(Code.CMP, minus, two, element="i1", predicate="lt").tolist() == [True]
    assert elementwise(Code.CAST, minus, element="i64", unsigned=True).tolist() == [2**32 - 1]
    assert elementwise(Code.CAST, minus, element="f64", unsigned=True).tolist() == [2.0**32 - 1]
    assert elementwise(Code.MULHI, integers(-1, 1 << 20), integers(-1, 1 << 20)).tolist() == [-2, 1 << 8]


def test_extremes_keep_or_drop_nan_as_they_say() -> None:
    a, b = floats(NAN, 1.0), floats(2.0, NAN)
    assert elementwise(Code.MAX, a, b, nan=False).tolist() == [2.0, 1.0]
    assert elementwise(Code.MAX, a, b, nan=True).isnan().all()
    assert elementwise(Code.MIN, a, b, nan=False).tolist() == [2.0, 1.0]
    assert elementwise(Code.MIN, a, b, nan=True).isnan().all()


def test_only_unequal_holds_of_nan() -> None:
    held = {
        predicate: elementwise(Code.CMP, floats(NAN), floats(NAN), element="i1", predicate=predicate).item()
        for predicate in ("eq", "ne", "lt", "le", "gt", "ge")
    }
    assert [predicate for predicate, holds in held.items() if holds] == ["ne"]


def test_casts_cut_floats_and_make_conditions_one_or_zero() -> None:
    assert elementwise(Code.CAST, floats(2.9, -2.9, NAN), element="i32").tolist() == [2, -2, 0]
    assert elementwise(Code.CAST, torch.tensor([True, False]), element="i32").tolist() == [1, 0]
    assert elementwise(Code.CAST, torch.tensor([True, False]), element="f64").tolist() == [1.0, 0.0]
    assert elementwise(Code.CAST, integers(0, 2), element="i1").tolist() == [False, True]
    assert elementwise(Code.CAST, integers(300), element="i8").tolist() == [44]


def test_a_cast_to_a_narrow_float_does_not_round() -> None:
    # Evaluation shows what a kernel computes but for rounding: two kernels agree far below the precision of float32.
    bench = Bench(floats(1.0 + 2.0**-40))
    narrow = bench.b.cast(bench.inputs[0], "f32")
    assert bench.run(narrow).item() == 1.0 + 2.0**-40


def test_a_bitcast_shows_the_bits_that_the_element_has() -> None:
    bench = Bench(floats(1.0, -2.0))
    bits = bench.b.elementwise(Code.BITCAST, (bench.b.cast(bench.inputs[0], "f32"),), "i32")
    back = bench.b.elementwise(Code.BITCAST, (bits,), "f32")
    found = bench.run(bits, back)
    assert [value.tolist() for value in found] == [[0x3F800000, -(2**30)], [1.0, -2.0]]


def test_a_choice_takes_no_part_of_what_it_leaves() -> None:
    bench = Bench(torch.tensor([True, False]), floats(1.0, INF), floats(NAN, 2.0))
    assert bench.run(bench.b.select(*bench.inputs)).tolist() == [1.0, 2.0]


def test_shapes_move_elements_as_torch_does() -> None:
    x = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4)
    bench = Bench(x)
    b, (value,) = bench.b, bench.inputs
    found = bench.run(
        b.trans(value, (2, 0, 1)),
        b.reshape(value, (6, 4)),
        b.expand(value, 1),
        b.pure(Code.FLIP, (value,), "f64", value.shape, {"axis": 1}),
        b.pure(Code.JOIN, (value, value), "f64", (2, 3, 4, 2)),
    )
    expected = [x.permute(2, 0, 1), x.view(6, 4), x[:, None], x.flip(1), torch.stack([x, x], -1)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_the_two_halves_of_a_split_are_what_was_joined() -> None:
    x, y = floats(1.0, 2.0), floats(3.0, 4.0)
    bench = Bench(x, y)
    joined = bench.b.pure(Code.JOIN, bench.inputs, "f64", (2, 2))
    halves = bench.b.add_op(Op(Code.SPLIT, (joined,), [Value("f64", (2,)), Value("f64", (2,))])).results
    assert [value.tolist() for value in bench.run(*halves)] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_gather_picks_along_its_axis() -> None:
    x, places = torch.randn(3, 4, dtype=torch.float64), integers(2, 0, 1, 1).view(1, 4)
    bench = Bench(x, places)
    picked = bench.b.pure(Code.GATHER, bench.inputs, "f64", (1, 4), {"axis": 0})
    assert torch.equal(bench.run(picked), x.gather(0, places.long()))


def test_reductions_take_an_axis_away_and_the_first_of_equal_extremes_is_found() -> None:
    x = torch.tensor([[1.0, 5.0, 5.0], [NAN, -1.0, -3.0]], dtype=torch.float64)
    bench = Bench(x)
    b, (value,) = bench.b, bench.inputs
    total, largest, least, where, nan = bench.run(
        b.sum(value, 0),
        b.reduce(Code.REDUCE_MAX, value, 1, nan=False),
        b.reduce(Code.REDUCE_MIN, value, 1, nan=False),
        b.reduce(Code.ARG_MAX, value, 1, "i32"),
        b.reduce(Code.REDUCE_MAX, value, 1, nan=True),
    )
    assert total[1:].tolist() == [4.0, 2.0]
    assert (largest.tolist(), least.tolist(), where.tolist()) == ([5.0, -1.0], [1.0, -3.0], [1, 1])
    assert nan.isnan().tolist() == [False, True]


def test_a_sum_of_integers_wraps() -> None:
    bench = Bench(integers(2**31 - 1, 1))
    assert bench.run(bench.b.sum(bench.inputs[0], 0)).item() == -(2**31)


def combined(code: Code, reverse: bool) -> Tensor:
    """Of pairs (a, x): the composition of x -> a x + b, which is not commutative, over 4 elements."""
    bench = Bench(floats(2.0, 3.0, 5.0, 7.0), floats(1.0, 10.0, 100.0, 1000.0))
    block = Block([Value("f64") for _ in range(4)])
    with bench.b.inside(block):
        a, x, c, y = block.arguments
        block.yields = [bench.b.mul(a, c), bench.b.add(bench.b.mul(c, x), y)]
    shape = () if code is Code.REDUCE else (4,)
    results = [Value("f64", shape), Value("f64", shape)]
    bench.b.add_op(Op(code, bench.inputs, results, {"axis": 0, "reverse": reverse}, [block]))
    return bench.run(results[1])


def test_a_reduction_combines_from_the_first_to_the_last() -> None:
    assert combined(Code.REDUCE, False).item() == ((1.0 * 3 + 10) * 5 + 100) * 7 + 1000


def test_a_scan_shows_every_step_and_backwards_the_steps_from_the_end() -> None:
    assert combined(Code.SCAN, False).tolist() == [1.0, 13.0, 165.0, 2155.0]
    assert combined(Code.SCAN, True).tolist() == [30621.0, 15310.0, 5100.0, 1000.0]


@pytest.mark.parametrize("reverse", [False, True])
def test_linear_scans_are_recurrences_and_the_states_before_them(reverse: bool) -> None:
    a, x = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    bench = Bench(a, x)
    found = bench.run(
        *(
            bench.b.pure(code, bench.inputs, "f64", (5,), {"axis": 0, "reverse": reverse})
            for code in (Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE)
        )
    )
    state, after, before = 0.0, [0.0] * 5, [0.0] * 5
    for place in reversed(range(5)) if reverse else range(5):
        before[place] = state
        state = a[place].item() * state + x[place].item()
        after[place] = state
    assert torch.allclose(found[0], floats(*after))
    assert torch.allclose(found[1], floats(*before))


def test_a_running_sum_goes_either_way() -> None:
    bench = Bench(floats(1.0, 2.0, 4.0))
    there, back = (
        bench.b.pure(Code.CUMSUM, bench.inputs, "f64", (3,), {"axis": 0, "reverse": reverse})
        for reverse in (False, True)
    )
    assert [value.tolist() for value in bench.run(there, back)] == [[1.0, 3.0, 7.0], [7.0, 6.0, 4.0]]


def test_a_product_of_batches_is_that_of_each() -> None:
    a, b = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    bench = Bench(a, b)
    assert torch.equal(bench.run(bench.b.dot(*bench.inputs, element="f64")), a @ b)


def test_random_numbers_are_those_of_triton() -> None:
    # Of seed 1234 and arange(4), as Triton 3.6 gives it in its interpreter.
    bench = Bench(integers(1234), torch.arange(4, dtype=torch.int32))
    uniform, normal = bench.run(
        *(bench.b.elementwise(Code.CALL, bench.inputs, "f64", {"function": name}) for name in ("tl.rand", "tl.randn"))
    )
    assert torch.allclose(normal, floats(-0.44222745, 0.11843181, 1.15785122, -0.19024241), atol=1e-6)
    assert torch.allclose(uniform, floats(0.25441587, 0.75833529, 0.49834543, 0.57694691), atol=1e-7)


def test_functions_of_the_library_are_known_by_name_and_others_are_refused_by_it() -> None:
    x = floats(0.5, 2.0)
    assert torch.equal(elementwise(Code.CALL, x, x, function="libdevice.atan2"), torch.atan2(x, x))
    assert torch.allclose(elementwise(Code.CALL, x, function="libdevice.softplus"), torch.nn.functional.softplus(x))
    with pytest.raises(CannotDerive, match=r"libdevice\.warp_dance"):
        elementwise(Code.CALL, x, function="libdevice.warp_dance")
