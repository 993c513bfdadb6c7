"""Adjoints of what moves, reduces, scans and multiplies tiles, against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

M, N = 4, 8


def tile(b: Builder, rows: int, columns: int) -> Value:
    """Offsets of a contiguous (rows, columns) tile."""
    down, along = b.expand(b.arange(0, rows), 1), b.expand(b.arange(0, columns), 0)
    return b.add(b.mul(down, b.const(columns)), along)


def of_a_tile(body: Callable[[Builder, Value], Value]) -> Kernel:
    """Y = body(X) for X of (M, N) and Y of whatever shape comes out, contiguous."""
    k = Forward(X="*f32", Y="*f32")
    b = k.b
    y = body(b, b.load(k.X, tile(b, M, N)))
    at = tile(b, *y.shape) if len(y.shape) == 2 else b.arange(0, y.shape[0]) if y.shape else b.const(0)
    b.store(k.Y, at, y)
    return k.kernel


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("body", "function", "shape"),
    [
        (lambda b, x: b.sum(x, 1), lambda x: x.sum(1), (M,)),
        (lambda b, x: b.sum(b.mul(x, x), 0), lambda x: (x * x).sum(0), (N,)),
        (lambda b, x: b.sum(b.sum(x, 1), 0), lambda x: x.sum().reshape(1), (1,)),
        (lambda b, x: b.reduce(Code.REDUCE_MAX, x, 1), lambda x: x.amax(1), (M,)),
        (lambda b, x: b.reduce(Code.REDUCE_MIN, x, 0), lambda x: x.amin(0), (N,)),
        (lambda b, x: b.trans(x, (1, 0)), lambda x: x.T, (N, M)),
        (lambda b, x: b.reshape(x, (N, M)), lambda x: x.reshape(N, M), (N, M)),
        (lambda b, x: b.sub(x, b.expand(b.sum(x, 1), 1)), lambda x: x - x.sum(1, keepdim=True), (M, N)),
        (lambda b, x: b.mul(x, b.expand(b.sum(x, 0), 0)), lambda x: x * x.sum(0, keepdim=True), (M, N)),
        (
            lambda b, x: b.sum(b.add(b.expand(b.sum(x, 1), 1), b.cast(b.expand(b.arange(0, N), 0), "f32")), 1),
            lambda x: N * x.sum(1) + N * (N - 1) / 2,
            (M,),
        ),
        (lambda b, x: b.pure(Code.FLIP, (x,), "f32", (M, N), {"axis": 1}), lambda x: x.flip(1), (M, N)),
        (
            lambda b, x: b.pure(Code.CUMSUM, (x,), "f32", (M, N), {"axis": 1, "reverse": False}),
            lambda x: x.cumsum(1),
            (M, N),
        ),
        (
            lambda b, x: b.pure(Code.CUMSUM, (x,), "f32", (M, N), {"axis": 0, "reverse": True}),
            lambda x: x.flip(0).cumsum(0).flip(0),
            (M, N),
        ),
    ],
    ids=[
        "sum of rows",
        "sum of columns",
        "sum of all",
        "maximum",
        "minimum",
        "transpose",
        "reshape",
        "broadcast along",
        "broadcast down",
        "broadcast counted",
        "flip",
        "running sum",
        "running sum backwards",
    ],
)
def test_an_operation_on_a_tile_has_torchs_derivative(
    body: Callable[[Builder, Value], Value], function: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    kernel = of_a_tile(lambda b, x: b.cast(body(b, x), "f32"))
    compare(kernel, {"X": numbers(M, N)}, {"Y": shape}, function)


def test_equal_maxima_of_a_row_share_evenly() -> None:
    x = torch.tensor([[1.0, 3, 3, 2, 0, 3, 1, 1], [2] * 8, [0, -1, -2, -3, -4, -5, -6, -7], [1] * 4 + [2] * 4])
    compare(
        of_a_tile(lambda b, x: b.reduce(Code.REDUCE_MAX, x, 1)), {"X": x.double()}, {"Y": (M,)}, lambda x: x.amax(1)
    )


def test_a_whole_tile_of_a_scalar_passes_on_the_sum_of_its_cotangents() -> None:
    k = Forward(s="f32", Y="*f32")
    k.b.store(k.Y, tile(k.b, M, N), k.b.whole(k.b.unary(Code.EXP, k.s), (M, N)))
    s = torch.tensor(0.3, dtype=torch.float64)
    compare(k.kernel, {"s": s}, {"Y": (M, N)}, lambda s: s.exp().expand(M, N))


def test_joined_tiles_get_their_halves_back() -> None:
    k = Forward(X="*f32", Y="*f32", Z="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    x, y = b.load(k.X, lanes), b.load(k.Y, lanes)
    b.store(k.Z, tile(b, N, 2), b.pure(Code.JOIN, (x, y), "f32", (N, 2)))
    compare(k.kernel, {"X": numbers(N), "Y": numbers(N)}, {"Z": (N, 2)}, lambda x, y: torch.stack([x, y], 1))


def test_a_split_tile_joins_its_halves_cotangents_and_zero_for_a_half_nobody_reads() -> None:
    for used in ((0, 1), (0,), (1,)):
        k = Forward(X="*f32", Y="*f32")
        b = k.b
        halves = b.add_op(Op(Code.SPLIT, (b.load(k.X, tile(b, N, 2)),), [Value("f32", (N,)) for _ in range(2)])).results
        total = halves[used[0]] if len(used) == 1 else b.mul(*halves)
        b.store(k.Y, b.arange(0, N), total)
        compare(
            k.kernel,
            {"X": numbers(N, 2)},
            {"Y": (N,)},
            lambda x, used=used: x[:, used[0]] if len(used) == 1 else x.prod(1),
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_recurrence_has_the_derivative_of_its_steps(reverse: bool) -> None:
    k = Forward(A="*f32", X="*f32", H="*f32")
    b, at = k.b, tile(k.b, M, N)
    attributes = {"axis": 1, "reverse": reverse}
    h = b.pure(Code.LINEAR_SCAN, (b.load(k.A, at), b.load(k.X, at)), "f32", (M, N), attributes)
    b.store(k.H, at, h)

    def steps(a: Tensor, x: Tensor) -> Tensor:
        columns, state = [torch.zeros(0)] * N, torch.zeros(M, dtype=torch.float64)
        for n in reversed(range(N)) if reverse else range(N):
            columns[n] = state = a[:, n] * state + x[:, n]
        return torch.stack(columns, 1)

    compare(k.kernel, {"A": numbers(M, N), "X": numbers(M, N, seed=1)}, {"H": (M, N)}, steps)


@pytest.mark.parametrize(("left", "right"), [("f32", "f32"), ("f16", "f16")])
def test_a_product_has_products_as_adjoints_in_the_operands_elements(left: str, right: str) -> None:
    k = Forward(A=f"*{left}", B=f"*{right}", C="*f32")
    b = k.b
    precision = "tf32" if left == "f32" else None
    c = b.dot(b.load(k.A, tile(b, 4, 8)), b.load(k.B, tile(b, 8, 2)), precision)
    b.store(k.C, tile(b, 4, 2), c)
    adjoint = compare(k.kernel, {"A": numbers(4, 8), "B": numbers(8, 2)}, {"C": (4, 2)}, torch.matmul)
    dots = [op for op in adjoint.kernel.ops if op.code is Code.DOT and op.results[0].shape != (4, 2)]
    assert len(dots) == 2
    for op in dots:
        assert [value.element for value in op.operands] == [left, left], "operands of a product have one element"
        assert op.attributes["precision"] == precision


def test_the_first_of_equal_maxima_takes_all_where_its_index_was_asked_for() -> None:
    x = torch.tensor([[1.0, 3, 3, 2, 0, 3, 1, 1], [2] * 8, [0, -1, -2, -3, -4, -5, -6, -7], [1] * 4 + [2] * 4]).double()
    kernel = of_a_tile(lambda b, x: b.reduce(Code.REDUCE_MAX, x, 1, nan=False, first=True))
    compare(kernel, {"X": x}, {"Y": (M,)}, lambda x: x.gather(1, x.argmax(1, keepdim=True))[:, 0])


@pytest.mark.parametrize("axis", [0, 1])
def test_gathered_elements_give_their_cotangents_back_where_they_came_from(axis: int) -> None:
    k = Forward(X="*f32", I="*i32", Y="*f32")
    b = k.b
    shape = (2, N) if axis == 0 else (M, 2)
    x, index = b.load(k.X, tile(b, M, N)), b.load(k.I, tile(b, *shape))
    b.store(k.Y, tile(b, *shape), b.pure(Code.GATHER, (x, index), "f32", shape, {"axis": axis}))
    picked = torch.randint(0, (M, N)[axis], shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    picked[0] = picked[1]  # some elements are read twice
    compare(
        k.kernel, {"X": numbers(M, N)}, {"Y": shape}, lambda x: x.gather(axis, picked.long()), integers={"I": picked}
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda b, x: reduced(b, x),
        lambda b, x: b.sum(b.add(b.sum(b.sum(x, 1), 0), b.cast(b.arange(0, N), "f32")), 0),
    ],
    ids=["a reduction with a combine", "a scalar spread over a tile"],
)
def test_an_extent_that_the_source_has_a_name_for_is_no_bare_number_in_the_adjoint(body: Callable[..., Value]) -> None:
    # with the number of the tile at hand the backward was wrong, or out of bounds, for every other block size
    kernel = of_a_tile(body)
    kernel.extents = {M: "BLOCK_M", N: "BLOCK_N"}
    adjoint = differentiate(kernel, read=frozenset(["X"]), written=frozenset(["Y"]))
    known = {repr(op.attributes["value"]) for op in kernel.ops if op.code is Code.CONST}
    bare = [
        op.attributes["value"] for op in adjoint.kernel.ops if op.code is Code.CONST and not op.attributes["symbol"]
    ]
    assert not [number for number in bare if number in (M - 1, M, N - 1, N) and repr(number) not in known], bare


def reduced(b: Builder, x: Value) -> Value:
    """Products along the rows, by a combine."""
    left, right = Value("f32"), Value("f32")
    block = Block([left, right])
    with b.inside(block):
        block.yields = [b.mul(left, right)]
    return b.add_op(Op(Code.REDUCE, (x,), (Value("f32", (M,)),), {"axis": 1}, [block])).result


def test_cotangents_meet_operands_of_eight_bits_in_sixteen() -> None:
    # rounded to 8 bits they were lost, and Triton refuses products of 8 bits over fewer than 32 terms
    k = Forward(X="*f8E4M3FN", W="*f8E4M3FN", Y="*f32")
    b = k.b
    product = b.dot(b.load(k.X, tile(b, M, N)), b.load(k.W, tile(b, N, M)))
    b.store(k.Y, tile(b, M, M), product)
    adjoint = differentiate(k.kernel, read=frozenset(["X", "W"]), written=frozenset(["Y"]))
    dots = [op for op in adjoint.kernel.ops if op.code is Code.DOT]
    assert [value.element for op in dots for value in op.operands] == ["bf16"] * 4


@pytest.mark.parametrize("back", [False, True], ids=["forwards", "backwards"])
def test_totals_of_a_scan_that_depend_on_each_other_have_a_matrix_for_their_slope(back: bool) -> None:
    # h[i] = a[i] h[i-1] + x[i] of complex numbers: refused before, as the real part moves the imaginary one
    k = Forward(AR="*f32", AI="*f32", XR="*f32", XI="*f32", R="*f32", S="*f32")
    b, lanes = k.b, k.b.arange(0, N)
    given = [b.load(pointer, lanes) for pointer in (k.AR, k.AI, k.XR, k.XI)]
    block = Block([Value("f32") for _ in range(8)])
    with b.inside(block):
        ar, ai, xr, xi, br, bi, yr, yi = block.arguments
        block.yields = [
            b.sub(b.mul(ar, br), b.mul(ai, bi)),
            b.add(b.mul(ar, bi), b.mul(ai, br)),
            b.add(b.sub(b.mul(br, xr), b.mul(bi, xi)), yr),
            b.add(b.add(b.mul(br, xi), b.mul(bi, xr)), yi),
        ]
    results = [Value("f32", (N,)) for _ in range(4)]
    b.add_op(Op(Code.SCAN, given, results, {"axis": 0, "reverse": back}, [block]))
    b.store(k.R, lanes, results[2])
    b.store(k.S, lanes, results[3])

    def reference(ar: Tensor, ai: Tensor, xr: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:
        a, x = torch.complex(ar, ai), torch.complex(xr, xi)
        order = range(N - 1, -1, -1) if back else range(N)
        state, states = torch.zeros((), dtype=torch.complex128), {}
        for i in order:
            state = states[i] = a[i] * state + x[i]
        found = torch.stack([states[i] for i in range(N)])
        return found.real, found.imag

    inputs = {name: numbers(N, seed=seed) for seed, name in enumerate(("AR", "AI", "XR", "XI"))}
    compare(k.kernel, inputs, {"R": (N,), "S": (N,)}, reference)
