"""Kernels with what is rarer in forwards."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def two_stages(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    """Pointers go on after a loop, and a tile of them is advanced by a tile."""
    ptrs = x_ptr + tl.arange(0, BLOCK)
    step = tl.arange(0, BLOCK) * 0 + stride
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(4, n, 3):
        total += tl.load(ptrs)
        ptrs += step
    for i in range(n):
        total += tl.load(ptrs) * i
        ptrs += 1
    tl.store(y_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def chosen_pointer(x_ptr, y_ptr, n, which, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    if which > 0:
        ptr = x_ptr + n
    else:
        ptr = x_ptr
    other = tl.where(offs < n, x_ptr + offs, ptr + 2 * offs)
    tl.store(y_ptr + offs, tl.load(ptr + offs) + tl.load(other))


@triton.jit
def two_tensors(x_ptr, y_ptr, out_ptr, which):
    ptr = x_ptr
    if which > 0:
        ptr = y_ptr
    tl.store(out_ptr, tl.load(ptr))


@triton.jit
def addresses(table_ptr, out_ptr):
    ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr, tl.load(ptr))


@triton.jit
def locked(lock_ptr, out_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(out_ptr, 1.0)


@triton.jit
def atomics(x_ptr, best_ptr, count_ptr, order_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.atomic_max(best_ptr + offs % 4, x, mask=offs < n)
    tl.atomic_min(best_ptr + 4 + offs % 4, x, mask=offs < n)
    place = tl.atomic_add(count_ptr, 1)
    tl.store(order_ptr + tl.program_id(0), place)
    tl.atomic_add(count_ptr + 1 + offs * 0, 1, mask=offs < n)


@triton.jit
def moved(x_ptr, index_ptr, y_ptr, h_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    index = tl.load(index_ptr + offs)
    pair = tl.interleave(tl.gather(x, index, 0), x)
    tl.store(y_ptr + tl.arange(0, 2 * BLOCK), pair)
    tl.store(h_ptr + tl.arange(0, 16), tl.histogram(index, 16))


@triton.jit
def functions(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = libdevice.tanh(x) + libdevice.pow(tl.abs(x) + 1, 1.5) + tl.erf(x) + libdevice.log1p(x * x) + tl.rsqrt(x * x + 1)
    y += libdevice.atan2(x, 2.0) + tl.floor(x) - tl.ceil(x) + libdevice.rint(x) + tl.fma(x, x, 1.0) + tl.cos(x)
    y += tl.clamp(x, -0.5, 0.5) + tl.log2(x * x + 1) + tl.exp2(x) + tl.div_rn(x, 3.0) + tl.sqrt_rn(x * x)
    y += tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + offs, y)


@triton.jit
def whole_numbers(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = (x // 7) * 3 + x % 5 + (x << 2) - (x >> 1) + (x & 12) + (x | 3) + (x ^ 9) + tl.minimum(x, 4) + ~x
    u = x.to(tl.uint32)
    y += (u // 7).to(tl.int32) + (u % 5).to(tl.int32) + (u >> 3).to(tl.int32) + tl.umulhi(u, u * 77).to(tl.int32)
    y += (u > 9).to(tl.int32) + tl.cdiv(x, 4) + x.to(tl.int8).to(tl.int32) + x.to(tl.float32).to(tl.int32)
    tl.store(y_ptr + offs, y)
    tl.store(z_ptr + offs, x.to(tl.int64) * 3 + u.to(tl.int64) + (x > 2).to(tl.int64))


@triton.jit
def small_product(x_ptr, w_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    square = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x, w = tl.load(x_ptr + square), tl.load(w_ptr + square)
    y = tl.dot(x, w)
    tl.store(y_ptr + square, y)
    tl.store(z_ptr + square, tl.dot(x.to(tl.float16), tl.trans(w.to(tl.float16)), acc=y.to(tl.float32)))


@triton.jit(noinline=True)
def called(x, n):
    total = x
    for i in range(n):
        total += i * x
    return total, total * 2


@triton.jit
def calls(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    first, second = called(tl.load(x_ptr), n)
    tl.store(y_ptr + offs, first - second)


@triton.jit
def nested_returns(x_ptr, y_ptr, n):
    pid = tl.program_id(0)
    if pid > 1:
        tl.store(y_ptr + pid, 3.0)
        if pid > n:
            return
        tl.store(y_ptr + pid, 4.0)
    if pid == 0:
        return
    tl.store(y_ptr + 8 + pid, tl.load(x_ptr + pid))


@triton.jit
def picked(x):
    if x > 0:
        y = x * 2
    else:
        y = -x
    return y


@triton.jit
def mapped(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.map_elementwise(picked, tl.load(x_ptr + offs)))


@triton.jit
def searched(x_ptr, y_ptr, n):
    """A loop that ends by what memory holds."""
    target = tl.program_id(0) * 1.0
    low = 0
    high = n
    while low < high:
        middle = (low + high) // 2
        if tl.load(x_ptr + middle) < target:
            low = middle + 1
        else:
            high = middle
    tl.store(y_ptr + tl.program_id(0), low)


@triton.jit
def largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_extremes(x_ptr, y_ptr, p_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.associative_scan(x, 0, largest) + tl.cumprod(x, 0) - tl.cumprod(x, 0, reverse=True))
    tl.store(p_ptr, tl.max(x, 0) + tl.xor_sum((x > 0).to(tl.int32), 0))


@triton.jit
def tupled(pair, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(pair[0] + offs) * pair[1])


@triton.jit
def fewer_rounds(y_ptr, seed, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.rand(seed, offs, n_rounds=6) + tl.randn(seed, offs))


@triton.jit
def gathered_rows(x_ptr, y_ptr, rows_ptr, M, N):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [1, 16])
    rows = tl.load(rows_ptr + tl.arange(0, 8))
    square = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(y_ptr + square, x.gather(rows, 4))
