"""Hyper-connections: n residual streams mixed by a static plus a tanh-gated per-token n x n matrix.

A[t] = static + gate tanh(dynamic[t]),    y[t, i] = sum over j of A[t, i, j] x[t, j] + inject[i] h[t]

One pass over dy and the streams gives everything: dx = A^T dy and dh = inject^T dy leave tile by tile, dA[t] is
collected as products per lane and reduced once per token. A persistent grid walks the tokens, so the gradients of the
shared parameters stay in registers and cost one partial row per program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hyper_connections_mix",
    "family": "mixing_misc",
    "op": "hyper_connections",
    "schema": 1,
    "techniques": ("persistent-grid", "two-stage-partials", "one-launch", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("streams", "hidden", "static", "dynamic", "gate", "inject"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _streams_fwd(X, H, Static, Dynamic, Gate, Inject, Y, D, N: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    gate = tl.load(Gate).to(tl.float32)
    dynamic = tl.load(Dynamic + token * N * N + square).to(tl.float32)
    mix = tl.load(Static + square).to(tl.float32) + gate * _tanh(dynamic)
    inject = tl.load(Inject + i).to(tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        at = (token * N + i[:, None]) * D + d[None, :]
        inside = (i[:, None] < N) & (d[None, :] < D)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(H + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        # (to, from, feature): the sum over `from` stays inside a thread.
        y = tl.sum(mix[:, :, None] * x[None, :, :], 1) + inject[:, None] * h[None, :]
        tl.store(Y + at, y, mask=inside)


def forward(streams, hidden, static, dynamic, gate, inject):
    """Streams (T, n, D), n a power of two, hidden (T, D), static (n, n), dynamic (T, n, n), gate (1), inject (n)."""
    streams, hidden, dynamic = streams.contiguous(), hidden.contiguous(), dynamic.contiguous()
    static, inject = static.contiguous(), inject.contiguous()
    T, N, D = streams.shape
    y = torch.empty_like(streams)
    BLOCK_D = max(16, min(512, triton.next_power_of_2(D)))
    _streams_fwd[(T,)](streams, hidden, static, dynamic, gate, inject, y, D, N=N, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (streams, hidden, static, dynamic, gate, inject)


# --- backward ---
@triton.jit
def _streams_bwd(
    DY, X, H, Static, Dynamic, Gate, Inject, DX, DH, DDynamic, DStatic, DGate, DInject, T, D, dy_t, dy_n, dy_d,
    N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    gate = tl.load(Gate).to(tl.float32)
    dstatic = tl.zeros((N, N), tl.float32)
    dgate = tl.zeros((N, N), tl.float32)
    dinject = tl.zeros((N,), tl.float32)
    inject = ()
    for stream in tl.static_range(N):
        inject += (tl.load(Inject + stream).to(tl.float32),)
    for token in range(first, T, tl.num_programs(0)):
        # The matrix as N * N numbers beside lanes of features: a sum over streams never leaves a lane.
        mix = ()
        products = ()
        for place in tl.static_range(N * N):
            swing = _tanh(tl.load(Dynamic + token * N * N + place).to(tl.float32))
            mix += (tl.load(Static + place).to(tl.float32) + gate * swing,)
            products += (tl.zeros((BLOCK_D,), tl.float32),)
        injected = ()
        for _ in tl.static_range(N):
            injected += (tl.zeros((BLOCK_D,), tl.float32),)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            inside = d < D
            dys = ()
            xs = ()
            for stream in tl.static_range(N):
                dy_at = DY + token * dy_t + stream * dy_n + d.to(tl.int64) * dy_d
                dys += (tl.load(dy_at, mask=inside, other=0.0).to(tl.float32),)
                xs += (tl.load(X + (token * N + stream) * D + d, mask=inside, other=0.0).to(tl.float32),)
            h = tl.load(H + token * D + d, mask=inside, other=0.0).to(tl.float32)
            dh = tl.zeros((BLOCK_D,), tl.float32)
            sums = ()
            collected = ()
            for stream in tl.static_range(N):
                dx = tl.zeros((BLOCK_D,), tl.float32)
                for row in tl.static_range(N):
                    dx += mix[row * N + stream] * dys[row]
                    sums += (products[stream * N + row] + dys[stream] * xs[row],)
                tl.store(DX + (token * N + stream) * D + d, dx, mask=inside)
                dh += inject[stream] * dys[stream]
                collected += (injected[stream] + dys[stream] * h,)
            tl.store(DH + token * D + d, dh, mask=inside)
            products = sums
            injected = collected
        dmix = tl.zeros((N, N), tl.float32)
        for place in tl.static_range(N * N):
            dmix = tl.where(square == place, tl.sum(products[place], 0), dmix)
        for stream in tl.static_range(N):
            dinject += tl.where(i == stream, tl.sum(injected[stream], 0), 0.0)
        swing = _tanh(tl.load(Dynamic + token * N * N + square).to(tl.float32))
        tl.store(DDynamic + token * N * N + square, dmix * gate * (1.0 - swing * swing))
        dstatic += dmix
        dgate += dmix * swing
    tl.store(DStatic + first * N * N + square, dstatic)
    tl.store(DGate + first, tl.sum(dgate))
    tl.store(DInject + first * N + i, dinject)


def backward(saved, grad_y, needs=None):
    streams, hidden, static, dynamic, gate, inject = saved
    T, N, D = streams.shape
    processors = torch.cuda.get_device_properties(streams.device).multi_processor_count if streams.is_cuda else 4
    # One wave: registers take twelve programs of one warp on a processor, whose sums need no barrier.
    programs = min(T, 12 * processors)
    dx, dh, ddynamic = torch.empty_like(streams), torch.empty_like(hidden), torch.empty_like(dynamic)
    fp32 = {"device": streams.device, "dtype": torch.float32}
    dstatic = torch.empty(programs, N, N, **fp32)
    dgate = torch.empty(programs, 1, **fp32)
    dinject = torch.empty(programs, N, **fp32)
    # N * N products for each of the lane's features stay in registers: four features leave room for other programs.
    BLOCK_D = max(16, min(128, triton.next_power_of_2(D)))
    _streams_bwd[(programs,)](
        grad_y, streams, hidden, static, dynamic, gate, inject, dx, dh, ddynamic, dstatic, dgate, dinject,
        T, D, *grad_y.stride(), N=N, BLOCK_D=BLOCK_D, num_warps=1,
    )  # fmt: skip
    shared = (part.sum(0).to(like.dtype) for part, like in ((dstatic, static), (dgate, gate), (dinject, inject)))
    dstatic, dgate, dinject = shared
    return dx, dh, dstatic, ddynamic, dgate, dinject


# --- check ---
SWEEP = (
    {"T": 6, "n": 4, "D": 128},
    {"T": 11, "n": 2, "D": 75},
    {"T": 5, "n": 4, "D": 300, "dtype": "bfloat16"},
)
BENCH = ({"T": 16384, "n": 4, "D": 2048, "dtype": "bfloat16"},)


def make_args(T, n, D, dtype="float32", device="cpu", seed=0):
    if n & (n - 1):
        raise ValueError("the number of streams is a power of two")
    g = torch.Generator().manual_seed(seed)
    shapes = ((T, n, D), (T, D), (n, n), (T, n, n), (1,), (n,))
    return tuple(torch.randn(*shape, generator=g).to(device=device, dtype=getattr(torch, dtype)) for shape in shapes)


def reference(streams, hidden, static, dynamic, gate, inject):
    mix = static.float() + gate.float() * dynamic.float().tanh()
    y = mix @ streams.float() + inject.float()[:, None] * hidden.float()[:, None, :]
    return y.to(streams.dtype)
