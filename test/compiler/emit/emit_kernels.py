"""Kernels built by hand, as the passes hand them to the printer."""

from __future__ import annotations

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def kernel(name: str, arguments: str, constants: dict[str, int]) -> tuple[Kernel, Builder, list[Value]]:
    """`arguments`: `*f32 X, i32 n`."""
    pairs = [part.split() for part in arguments.split(",")]
    made = Kernel(
        name,
        [Value(element, (), argument) for element, argument in pairs],
        extents={extent: symbol for symbol, extent in constants.items()},
        constants=dict(constants),
    )
    return made, Builder(made), made.arguments


def softmax_backward() -> Kernel:
    """One program a row, float16."""
    made, b, (y_pointer, stride, n, dy_pointer, dx_pointer) = kernel(
        "softmax_backward", "*f16 Y, i32 stride, i32 n, *f16 dY, *f32 dX", {"BLOCK": 16}
    )
    cols = b.arange(0, 16, "BLOCK", "cols")
    offsets = b.add(b.mul(b.program_id(0, "row"), stride), cols)
    mask = b.compare("lt", cols, n)
    mask.name = "mask"
    y = b.cast(b.load(y_pointer, offsets, mask, b.const(0.0, "f16"), "y"), "f32")
    d_y = b.cast(b.load(dy_pointer, offsets, mask, b.const(0.0, "f16")), "f32")
    d_x = b.mul(y, b.sub(d_y, b.sum(b.mul(y, d_y), 0)))
    d_x.name = "d_x"
    b.store(dx_pointer, offsets, d_x, mask)
    return made


def matmul() -> Kernel:
    """Blocks of a product, with masks."""
    made, b, (a_pointer, w_pointer, out, m, n, k) = kernel(
        "matmul", "*f16 A, *f16 W, *f32 Out, i32 M, i32 N, i32 K", {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64}
    )
    rows = b.add(b.mul(b.program_id(0, "pid_m"), b.const(16, "i32", "BLOCK_M")), b.arange(0, 16, "BLOCK_M"))
    cols = b.add(b.mul(b.program_id(1, "pid_n"), b.const(32, "i32", "BLOCK_N")), b.arange(0, 32, "BLOCK_N"))
    zero = b.const(0.0, "f16")

    def step(index: Value, carries: list[Value]) -> list[Value]:
        inner = b.add(index, b.arange(0, 64, "BLOCK_K"))
        a_mask = b.logical_and(b.compare("lt", b.expand(rows, 1), m), b.compare("lt", b.expand(inner, 0), k))
        a = b.load(a_pointer, b.add(b.mul(b.expand(rows, 1), k), b.expand(inner, 0)), a_mask, zero)
        w_mask = b.logical_and(b.compare("lt", b.expand(inner, 1), k), b.compare("lt", b.expand(cols, 0), n))
        w = b.load(w_pointer, b.add(b.mul(b.expand(inner, 1), n), b.expand(cols, 0)), w_mask, zero)
        return [b.add(carries[0], b.dot(a, w))]

    start = b.whole(b.const(0.0, "f32"), (16, 32))
    (acc,) = b.loop((b.const(0), k, b.const(64, "i32", "BLOCK_K")), [start], step, index_name="k")
    mask = b.logical_and(b.compare("lt", b.expand(rows, 1), m), b.compare("lt", b.expand(cols, 0), n))
    b.store(out, b.add(b.mul(b.expand(rows, 1), n), b.expand(cols, 0)), acc, mask)
    return made


def recurrence() -> Kernel:
    """Two carries that change places, a branch, the last trip first."""
    made, b, (x, out, n) = kernel("recurrence", "*f32 x_ptr, *f32 out_ptr, i32 n", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")

    def step(index: Value, carries: list[Value]) -> list[Value]:
        h, g = carries
        offsets = b.add(b.mul(index, b.const(16, "i32", "BLOCK")), cols)
        following = b.add(b.mul(h, b.load(x, offsets)), g)
        b.store(out, offsets, following)
        (kept,) = b.branch(b.compare("gt", index, b.const(2)), lambda: [b.unary(Code.SIGMOID, h)], lambda: [g])
        return [kept, following]

    start = b.whole(b.const(0.0, "f32"), (16,))
    b.loop((b.const(0), n, b.const(1)), [start, start], step, index_name="i", names=["h", "g"], reverse=True)
    return made


def keys_backward() -> Kernel:
    """Attention's gradient of a block of keys, in a loop over queries; keys stand for values, too."""
    made, b, (q_pointer, k_pointer, lse_pointer, delta_pointer, do_pointer, dk_pointer, n, scale) = kernel(
        "keys_backward",
        "*f32 Q, *f32 K, *f32 Lse, *f32 Delta, *f32 dO, *f32 dK, i32 n, f32 scale",
        {"BLOCK_M": 32, "BLOCK": 16},
    )
    cols = b.arange(0, 16, "BLOCK", "offs_d")
    keys = b.add(b.mul(b.program_id(0, "pid_n"), b.const(16, "i32", "BLOCK")), cols)

    def places(rows: Value) -> Value:
        return b.add(b.mul(b.expand(rows, 1), b.const(16, "i32", "BLOCK")), b.expand(cols, 0))

    k = b.load(k_pointer, places(keys), name="k")

    def step(start: Value, carries: list[Value]) -> list[Value]:
        rows = b.add(start, b.arange(0, 32, "BLOCK_M"))
        q = b.load(q_pointer, places(rows), name="q")
        lse = b.load(lse_pointer, rows, name="lse")
        score = b.mul(b.dot(k, b.trans(q, (1, 0)), "ieee"), scale)
        p = b.unary(Code.EXP, b.sub(score, b.expand(lse, 0)))
        p.name = "p"
        d_p = b.dot(k, b.trans(b.load(do_pointer, places(rows)), (1, 0)), "ieee")
        d_p.name = "d_p"
        d_s = b.mul(b.mul(p, b.sub(d_p, b.expand(b.load(delta_pointer, rows, name="delta"), 0))), scale)
        d_s.name = "d_s"
        return [b.add(b.dot(d_s, q, "ieee"), carries[0])]

    zero = b.whole(b.const(0.0, "f32"), (16, 16))
    bounds = (b.const(0), n, b.const(32, "i32", "BLOCK_M"))
    (d_k,) = b.loop(bounds, [zero], step, index_name="start_m", names=["d_k"])
    b.store(dk_pointer, places(keys), d_k)
    return made
