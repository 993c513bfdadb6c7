"""Each operation means in Triton what the compiler takes it for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emit_kernels import kernel
from emit_round_trip import run, seeded
from torch import Tensor

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value

N = 16
Make = Callable[[Builder, Value, Value], Value]


def elementwise(folder: Path, element: str, out: str, x: Tensor, y: Tensor, make: Make) -> Tensor:
    """What a kernel that computes one tile of two stores."""
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64,
              "i32": torch.int32, "i64": torch.int64, "i8": torch.int8, "i1": torch.bool}  # fmt: skip
    made, b, (x_pointer, y_pointer, out_pointer) = kernel(
        "operation", f"*{element} x_ptr, *{element} y_ptr, *{out} out_ptr", {"BLOCK": N}
    )
    cols = b.arange(0, N, "BLOCK")
    b.store(out_pointer, cols, make(b, b.load(x_pointer, cols), b.load(y_pointer, cols)))
    given = {"x_ptr": x.to(dtypes[element]), "y_ptr": y.to(dtypes[element])}
    given["out_ptr"] = torch.zeros(N, dtype=dtypes[out])
    return run(made, folder, (1,), given)["out_ptr"]


def two(code: Code, element: str | None = None, **attributes: object) -> Make:
    return lambda b, x, y: b.elementwise(code, (x, y), element, attributes)


INTEGERS = torch.tensor([7, -7, 13, -13, 100, -100, 5, -5] * 2), torch.tensor([3, 3, -3, -3, 7, 7, -2, 2] * 2)
BITS = 2**32


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (two(Code.FLOORDIV), lambda x, y: torch.div(x, y, rounding_mode="trunc")),
        (two(Code.REM), lambda x, y: torch.fmod(x, y)),
        (two(Code.FLOORDIV, unsigned=True), lambda x, y: (x % BITS) // (y % BITS)),
        (two(Code.REM, unsigned=True), lambda x, y: (x % BITS) % (y % BITS)),
        (two(Code.MAX), torch.maximum),
        (two(Code.MIN, unsigned=True), lambda x, y: torch.minimum(x % BITS, y % BITS)),
        (two(Code.AND), torch.bitwise_and),
        (two(Code.OR), torch.bitwise_or),
        (two(Code.XOR), torch.bitwise_xor),
        (lambda b, x, y: b.elementwise(Code.XOR, (x, b.const(-1))), lambda x, y: ~x),
        (lambda b, x, y: b.elementwise(Code.SHL, (x, b.const(3))), lambda x, y: x << 3),
        (lambda b, x, y: b.elementwise(Code.SHR, (x, b.const(1)), "i32"), lambda x, y: x >> 1),
        (
            lambda b, x, y: b.elementwise(Code.SHR, (x, b.const(1)), "i32", {"unsigned": True}),
            lambda x, y: (x % BITS) >> 1,
        ),
        (two(Code.MULHI), lambda x, y: ((x % BITS).double() * (y % BITS).double() / BITS).floor().long()),
        (lambda b, x, y: b.sub(x, b.sub(y, x)), lambda x, y: x - (y - x)),
        (lambda b, x, y: b.mul(x, b.elementwise(Code.FLOORDIV, (y, b.const(2)))), lambda x, y: x * (y / 2).trunc()),
        (lambda b, x, y: b.cast(b.compare("lt", x, y, unsigned=True), "i32"), lambda x, y: x % BITS < y % BITS),
        (lambda b, x, y: b.select(b.compare("ge", x, y), x, b.const(-4)), lambda x, y: torch.where(x >= y, x, -4)),
        (lambda b, x, y: b.neg(b.add(x, y)), lambda x, y: -(x + y)),
        (
            lambda b, x, y: b.elementwise(Code.FLOORDIV, (b.add(x, b.const(15)), b.const(16))),
            lambda x, y: torch.div(x + 15, 16, rounding_mode="trunc"),
        ),
    ],
)
def test_integers(tmp_path: Path, make: Make, expected: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = INTEGERS
    found = elementwise(tmp_path, "i32", "i32", x, y, make)
    wanted = expected(x, y).long()
    torch.testing.assert_close(found.long(), (wanted + BITS // 2) % BITS - BITS // 2)  # as int32 holds it


def test_a_narrow_unsigned_number_is_widened_without_its_sign(tmp_path: Path) -> None:
    x = torch.tensor([-1, -128, 127, 3] * 4)
    found = elementwise(tmp_path, "i8", "i32", x, x, lambda b, x, y: b.cast(x, "i32", unsigned=True))
    torch.testing.assert_close(found.long(), x % 256)
    found = elementwise(tmp_path, "i8", "f32", x, x, lambda b, x, y: b.cast(x, "f32", unsigned=True))
    torch.testing.assert_close(found, (x % 256).double())
    torch.testing.assert_close(elementwise(tmp_path, "i8", "f32", x, x, lambda b, x, y: b.cast(x, "f32")), x.double())


@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda b, x, y: b.add(x, b.number(-0.5, x)), lambda x, y: x - 0.5),
        (lambda b, x, y: b.mul(b.sub(x, b.sub(y, x)), b.number(2.0, x)), lambda x, y: (x - (y - x)) * 2),
        (two(Code.DIV), torch.div),
        (two(Code.REM), torch.fmod),
        (two(Code.MAX), torch.fmax),
        (two(Code.MIN, nan=True), torch.minimum),
        (lambda b, x, y: b.elementwise(Code.MAX, (x, b.number(0.0, x))), lambda x, y: x.clamp(min=0)),
        (lambda b, x, y: b.elementwise(Code.FMA, (x, y, b.number(1.0, x))), lambda x, y: x * y + 1),
        (lambda b, x, y: b.unary(Code.TANH, x), lambda x, y: x.tanh()),
        (lambda b, x, y: b.unary(Code.SIGMOID, x), lambda x, y: x.sigmoid()),
        (lambda b, x, y: b.unary(Code.ERF, x), lambda x, y: x.erf()),
        (lambda b, x, y: b.unary(Code.RSQRT, b.unary(Code.ABS, x)), lambda x, y: x.abs().rsqrt()),
        (lambda b, x, y: b.unary(Code.FLOOR, x), lambda x, y: x.floor()),
        (lambda b, x, y: b.select(b.compare("ne", x, y), x, b.zero(x)), lambda x, y: torch.where(x != y, x, 0.0)),
        (
            lambda b, x, y: b.elementwise(Code.CALL, (x, y), x.element, {"function": "libdevice.atan2"}),
            lambda x, y: torch.atan2(x, y),
        ),
    ],
)
def test_floats(tmp_path: Path, element: str, make: Make, expected: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = seeded(N, dtype=torch.bfloat16).float(), seeded(N, dtype=torch.bfloat16, seed=1).float()
    found = elementwise(tmp_path, element, element, x, y, make)
    torch.testing.assert_close(found, expected(x.double(), y.double()), rtol=1e-12, atol=0)


def test_the_derivative_of_log_gamma_is_exact_to_float32_on_both_sides_of_zero(tmp_path: Path) -> None:
    # one step of the recurrence fewer, or a term of the series, is an error of 1e-6 at 1/2; unreflected it is another
    # number below zero
    x = torch.tensor([0.5, 0.25, 1e-3, 1.0, 2.5, 7.0, 100.0, 1e6, -0.5, -0.3, -1.75, -7.2, -20.4, 0.49, 3.0, 40.0])
    call = elementwise(
        tmp_path,
        "f32",
        "f32",
        x,
        x,
        lambda b, x, y: b.elementwise(Code.CALL, (x,), "f32", {"function": "lgamma_slope"}),
    )
    torch.testing.assert_close(call, torch.digamma(x.double()), rtol=2e-7, atol=2e-7)


def test_nan_wins_only_where_it_should(tmp_path: Path) -> None:
    x, y = torch.full((N,), float("nan")), torch.ones(N)
    assert elementwise(tmp_path, "f32", "f32", x, y, two(Code.MAX, nan=True)).isnan().all()
    assert (elementwise(tmp_path, "f32", "f32", x, y, two(Code.MAX, nan=False)) == 1).all()


def test_bits_are_reinterpreted_not_converted(tmp_path: Path) -> None:
    x = seeded(N)
    found = elementwise(tmp_path, "f32", "i32", x, x, lambda b, x, y: b.elementwise(Code.BITCAST, (x,), "i32"))
    torch.testing.assert_close(found.long(), x.view(torch.int32).long())


def test_what_is_stored_is_converted_by_the_store_alone() -> None:
    made, b, (x, out) = kernel("narrow", "*f32 X, *f16 Out", {"BLOCK": N})
    cols = b.arange(0, N, "BLOCK")
    b.store(out, cols, b.cast(b.load(x, cols), "f16"))
    assert "tl.store(Out + offs, x)" in triton_source(made).text


def test_a_rounding_that_the_language_lacks_is_refused() -> None:
    made, b, (x, out) = kernel("narrow", "*f32 X, *f16 Out", {"BLOCK": N})
    cols = b.arange(0, N, "BLOCK")
    b.store(out, cols, b.cast(b.load(x, cols), "f16", toward="infinity"))
    with pytest.raises(CannotDerive, match="rounds infinity"):
        triton_source(made)


# --- tiles


def tiles(folder: Path, shape: tuple[int, int], out: tuple[int, ...], make: Make, element: str = "f32") -> Tensor:
    """What a kernel makes of one 2-D tile of seeded normal numbers; `make` gets it twice, the second one is exp(it)."""
    made, b, (x_pointer, out_pointer) = kernel("tile", f"*{element} X, *{element} Out", {})
    rows, cols = b.expand(b.arange(0, shape[0]), 1), b.expand(b.arange(0, shape[1]), 0)
    x = b.load(x_pointer, b.add(b.mul(rows, b.const(shape[1])), cols))
    result = make(b, x, b.unary(Code.SIGMOID, x))
    offsets = b.const(0)
    for axis, extent in enumerate(out):
        place = b.arange(0, extent)
        for other in range(len(out)):
            if other != axis:
                place = b.expand(place, other)
        offsets = b.add(b.mul(offsets, b.const(extent)), place)
    b.store(out_pointer, offsets, result)
    x_given = seeded(*shape)
    return run(made, folder, (1,), {"X": x_given, "Out": torch.zeros(out)})["Out"]


def scanned(a: Tensor, x: Tensor, *, before: bool, reverse: bool) -> Tensor:
    """The recurrence h = a h + x along the last axis, step by step."""
    steps = range(x.shape[-1])
    h, found = torch.zeros(x.shape[0], dtype=x.dtype), {}
    for i in reversed(steps) if reverse else steps:
        held = h
        h = a[:, i] * h + x[:, i]
        found[i] = held if before else h
    return torch.stack([found[i] for i in steps], 1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("code", [Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE])
def test_linear_recurrences(tmp_path: Path, code: Code, reverse: bool) -> None:
    found = tiles(
        tmp_path, (4, 16), (4, 16),
        lambda b, x, a: b.pure(code, (a, x), "f32", x.shape, {"axis": 1, "reverse": reverse}),
    )  # fmt: skip
    x = seeded(4, 16).double()
    torch.testing.assert_close(found, scanned(x.sigmoid(), x, before=code is not Code.LINEAR_SCAN, reverse=reverse))


SHAPES: list[tuple[tuple[int, ...], Make, Callable[[Tensor], Tensor]]] = [
    ((8,), lambda b, x, y: b.sum(x, 1), lambda x: x.sum(1)),
    ((4,), lambda b, x, y: b.reduce(Code.REDUCE_MAX, b.trans(x, (1, 0)), 1),
     lambda x: x.amax(0)),
    ((8,), lambda b, x, y: b.reduce(Code.REDUCE_MIN, x, 1, nan=True), lambda x: x.amin(1)),
    ((8, 4), lambda b, x, y: b.sub(x, b.expand(b.sum(x, 1), 1)), lambda x: x - x.sum(1, keepdim=True)),
    ((8, 4), lambda b, x, y: b.pure(Code.CUMSUM, (x,), "f32", x.shape, {"axis": 1, "reverse": True}),
     lambda x: x.flip(1).cumsum(1).flip(1)),
    ((8, 4), lambda b, x, y: b.pure(Code.FLIP, (x,), "f32", x.shape, {"axis": 1}), lambda x: x.flip(1)),
    ((4, 8), lambda b, x, y: b.trans(x, (1, 0)), lambda x: x.T),
    ((2, 16), lambda b, x, y: b.reshape(x, (2, 16)), lambda x: x.reshape(2, 16)),
    ((8, 4, 2), lambda b, x, y: b.pure(Code.JOIN, (x, y), "f32", (8, 4, 2)),
     lambda x: torch.stack([x, x.sigmoid()], -1)),
    ((8,), lambda b, x, y: b.cast(b.reduce(Code.ARG_MAX, x, 1, "i32"), "f32"), lambda x: x.argmax(1).double()),
    ((8, 4), lambda b, x, y: b.whole(b.expand(b.sum(x, 0), 0), (8, 4)), lambda x: x.sum(0).expand(8, 4)),
    ((8, 4), lambda b, x, y: b.whole(b.sum(b.sum(x, 1), 0), (8, 4)), lambda x: x.sum().expand(8, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("out", "make", "expected"), SHAPES)
def test_shapes_and_reductions(
    tmp_path: Path, out: tuple[int, ...], make: Make, expected: Callable[[Tensor], Tensor]
) -> None:
    torch.testing.assert_close(tiles(tmp_path, (8, 4), out, make), expected(seeded(8, 4).double()))


def test_the_halves_of_a_split_are_two_variables(tmp_path: Path) -> None:
    def make(b: Builder, x: Value, y: Value) -> Value:
        halves = [Value("f32", (8, 4)), Value("f32", (8, 4))]
        b.add_op(Op(Code.SPLIT, [b.reshape(x, (8, 4, 2))], halves))
        return b.sub(halves[0], halves[1])

    x = seeded(8, 8).double().reshape(8, 4, 2)
    torch.testing.assert_close(tiles(tmp_path, (8, 8), (8, 4), make), x[..., 0] - x[..., 1])


def test_a_reduction_of_pairs_has_a_function_beside_the_kernel(tmp_path: Path) -> None:
    def combine(b: Builder) -> Block:
        block = Block([Value("f32") for _ in range(4)])
        with b.inside(block):
            mean_a, weight_a, mean_b, weight_b = block.arguments
            weight = b.add(weight_a, weight_b)
            mean = b.div(b.add(b.mul(mean_a, weight_a), b.mul(mean_b, weight_b)), weight)
            # the builder moves constants out of the block
            mean = b.select(b.compare("gt", weight, b.const(0.0, "f32")), mean, b.const(0.0, "f32"))
            block.yields = [mean, weight]
        return block

    def make(b: Builder, x: Value, y: Value) -> Value:
        results = [Value("f32", (8,)), Value("f32", (8,))]
        b.add_op(Op(Code.REDUCE, [x, y], results, {"axis": 1}, [combine(b)]))
        return results[0]

    x = seeded(8, 4).double()
    wanted = (x * x.sigmoid()).sum(1) / x.sigmoid().sum(1)
    torch.testing.assert_close(tiles(tmp_path, (8, 4), (8,), make), wanted)


def test_a_scan_of_its_own_runs_from_the_other_end(tmp_path: Path) -> None:
    def make(b: Builder, x: Value, y: Value) -> Value:
        block = Block([Value("f32"), Value("f32")])
        with b.inside(block):
            block.yields = [b.elementwise(Code.MAX, block.arguments)]
        result = Value("f32", x.shape)
        b.add_op(Op(Code.SCAN, [x], [result], {"axis": 1, "reverse": True}, [block]))
        return result

    wanted = seeded(8, 4).double().flip(1).cummax(1).values.flip(1)
    torch.testing.assert_close(tiles(tmp_path, (8, 4), (8, 4), make), wanted)


def test_products_of_float32_say_their_precision() -> None:
    def printed(element: str, precision: str | None) -> str:
        made, b, (x, out) = kernel("product", f"*{element} X, *f32 Out", {})
        offsets = b.add(b.mul(b.expand(b.arange(0, 16), 1), b.const(16)), b.expand(b.arange(0, 16), 0))
        tile = b.load(x, offsets)
        b.store(out, offsets, b.dot(tile, b.trans(tile, (1, 0)), precision))
        return triton_source(made).text

    assert 'tl.dot(x, tl.trans(x), input_precision="ieee")' in printed("f32", "ieee")
    assert 'input_precision="tf32x3"' in printed("f32", "tf32x3")
    assert "tl.dot(x, tl.trans(x))" in printed("f32", "tf32")
    assert "tl.dot(x, tl.trans(x))" in printed("f16", None)


def test_products_begin_with_what_is_spread_over_their_rows(tmp_path: Path) -> None:
    # As the third operand: a sum of its own would be one instruction for every element.
    def make(b: Builder, x: Value, _: Value) -> Value:
        rows = b.neg(b.expand(b.sum(x, 1), 1))
        return b.add(b.whole(rows, x.shape), b.dot(x, b.trans(x, (1, 0)), "ieee"))

    made, b, (x, out) = kernel("product", "*f32 X, *f32 Out", {})
    offsets = b.add(b.mul(b.expand(b.arange(0, 16), 1), b.const(16)), b.expand(b.arange(0, 16), 0))
    tile = b.load(x, offsets)
    b.store(out, offsets, make(b, tile, tile))
    text = triton_source(made).text
    assert "tl.dot(x, tl.trans(x), " in text
    assert " + tl.dot(" not in text
    given = seeded(16, 16)
    found = tiles(tmp_path, (16, 16), (16, 16), make)
    torch.testing.assert_close(found, given.double() @ given.double().mT - given.double().sum(1, keepdim=True))


def test_an_access_to_all_lanes_has_no_mask() -> None:
    # atomics take no Python number for a mask: `mask=True` did not compile
    made, b, (pointer,) = kernel("additions", "*f32 x_ptr", {"BLOCK": N})
    cols = b.arange(0, N, "BLOCK")
    b.store(pointer, cols, b.load(pointer, cols), b.const(True, "i1"), Code.ATOMIC_ADD)
    assert 'tl.atomic_add(x_ptr + offs, x, sem="relaxed")' in triton_source(made).text


def test_parts_of_which_the_last_may_be_broken_are_counted_as_a_person_does() -> None:
    made, b, (out, n) = kernel("parts", "*i32 Out, i32 n", {"BLOCK": 16})
    block = b.const(16, "i32", "BLOCK")
    parts = b.elementwise(Code.FLOORDIV, (b.add(n, b.const(15, "i32", "BLOCK - 1")), block))
    others = b.elementwise(Code.FLOORDIV, (b.add(n, b.const(14, "i32", "BLOCK - 2")), block))
    b.store(out, b.const(0), parts)
    b.store(out, b.const(1), others)
    text = triton_source(made).text
    assert "tl.store(Out, tl.cdiv(n, BLOCK))" in text
    assert "(n + (BLOCK - 2)) // BLOCK" in text
