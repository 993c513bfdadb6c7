# --- forward ---
@triton.jit
def _win_fwd(
    Q, K, V, SINK, O, LSE, sm_scale, cap, T, H, GROUP, WINDOW,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    Q += (batch * H + head) * T * D
    O += (batch * H + head) * T * D
    LSE += (batch * H + head) * T
    kv_head = batch * (H // GROUP) + head // GROUP
    K += kv_head * T * D
    V += kv_head * T * D

    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows < T)[:, None] & (dims < D)[None, :]
    b_q = tl.load(Q + rows[:, None] * D + dims[None, :], mask=q_mask, other=0.0)

    b_max = tl.zeros((BLOCK_M,), tl.float32) + tl.load(SINK + head)
    b_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start = tl.maximum(0, (first - WINDOW + 1) // BLOCK_N * BLOCK_N)
    for at in range(start, tl.minimum(T, first + BLOCK_M), BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        kv_mask = (keys < T)[:, None] & (dims < D)[None, :]
        b_k = tl.load(K + keys[:, None] * D + dims[None, :], mask=kv_mask, other=0.0)
        b_v = tl.load(V + keys[:, None] * D + dims[None, :], mask=kv_mask, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (sm_scale / cap)
        b_s = cap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)
        seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] > rows[:, None] - WINDOW) & (keys < T)[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp(b_s - b_new[:, None])
        b_alpha = tl.exp(b_max - b_new)
        b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new
    tl.store(O + rows[:, None] * D + dims[None, :], b_acc / b_sum[:, None], mask=q_mask)
    tl.store(LSE + rows, b_max + tl.log(b_sum), mask=rows < T)


def forward(q, k, v, sink, window, cap=30.0, sm_scale=None):
    B, H, T, D = q.shape
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    lse = torch.empty((B * H, T), device=q.device, dtype=torch.float32)
    BLOCK_M = 64
    _win_fwd[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, sink, o, lse, sm_scale, cap, T, H, H // k.shape[1], window,
        D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_M=BLOCK_M, BLOCK_N=32,
    )
    return o, (q, k, v, sink, o, lse, window, cap, sm_scale)
# --- backward ---
@triton.jit
def _win_delta(
    O, DO, SINK, LSE, DELTA, PARTS, T, H, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    # delta = sum(o * do) of every row, and this tile's share of dsink.
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_m = m < T
    ok = in_m[:, None] & (d < D)[None, :]
    at = head * T * D + m[:, None] * D + d[None, :]
    o = tl.load(O + at, mask=ok, other=0.0).to(tl.float32)
    do = tl.load(DO + at, mask=ok, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    tl.store(DELTA + head * T + m, delta, mask=in_m)
    lse = tl.load(LSE + head * T + m, mask=in_m, other=0.0)
    sink = tl.load(SINK + head % H).to(tl.float32)
    share = tl.where(in_m, tl.exp(sink - lse) * delta, 0.0)
    tl.store(PARTS + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head, -tl.sum(share, axis=0))


@triton.jit
def _win_dkdv(
    Q, K, V, DO, LSE, DELTA, DK, DV, T, HK, GROUP, WINDOW, sm_scale, factor, cap_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
):
    # A tile of keys of one kv head: all query heads of its group and all rows that see it. Keys are rows of the products.
    kv_head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kv_ok = (n < T)[:, None] & (d < D)[None, :]
    kv_at = kv_head * T * D + n[:, None] * D + d[None, :]
    k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
    v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    end = tl.minimum(T, first + BLOCK_N - 1 + WINDOW)
    for member in range(0, GROUP):
        # kv_head counts batch * HK + head, so this is batch * H + query head.
        head = kv_head * GROUP + member
        for start in range(first, end, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            in_m = m < T
            ok = in_m[:, None] & (d < D)[None, :]
            at = head * T * D + m[:, None] * D + d[None, :]
            q = tl.load(Q + at, mask=ok, other=0.0)
            do = tl.load(DO + at, mask=ok, other=0.0)
            # Infinity makes the probabilities of rows outside exact zeros.
            lse = tl.load(LSE + head * T + m, mask=in_m, other=float("inf")) * 1.4426950408889634
            x = tl.dot(k, tl.trans(q)) * factor
            e = tl.exp2(tl.abs(x) * -2.8853900817779268)
            r = 1.0 / (1.0 + e)
            th = (1.0 - e) * r
            th = tl.where(x < 0.0, -th, th)
            seen = (n[:, None] <= m[None, :]) & (n[:, None] > m[None, :] - WINDOW)
            p = tl.where(seen, tl.exp2(th * cap_log2 - lse[None, :]), 0.0)
            if NEEDS_V:
                dv = tl.dot(p.to(do.dtype), do, dv)
            if NEEDS_K:
                delta = tl.load(DELTA + head * T + m, mask=in_m, other=0.0)
                ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :]) * (4.0 * e * r * r)
                dk = tl.dot(ds.to(q.dtype), q, dk)
    if NEEDS_K:
        tl.store(DK + kv_at, dk * sm_scale, mask=kv_ok)
    if NEEDS_V:
        tl.store(DV + kv_at, dv, mask=kv_ok)


@triton.jit
def _win_dq(
    Q, K, V, DO, LSE, DELTA, DQ, T, GROUP, WINDOW, sm_scale, factor, cap_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    first = tl.program_id(0) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_m = m < T
    ok = in_m[:, None] & (d < D)[None, :]
    at = head * T * D + m[:, None] * D + d[None, :]
    q = tl.load(Q + at, mask=ok, other=0.0)
    do = tl.load(DO + at, mask=ok, other=0.0)
    lse = tl.load(LSE + head * T + m, mask=in_m, other=float("inf")) * 1.4426950408889634
    delta = tl.load(DELTA + head * T + m, mask=in_m, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(tl.maximum(0, first - WINDOW + 1), tl.minimum(T, first + BLOCK_M), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        kv_ok = (n < T)[:, None] & (d < D)[None, :]
        kv_at = kv_head * T * D + n[:, None] * D + d[None, :]
        k = tl.load(K + kv_at, mask=kv_ok, other=0.0)
        v = tl.load(V + kv_at, mask=kv_ok, other=0.0)
        x = tl.dot(q, tl.trans(k)) * factor
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)
        r = 1.0 / (1.0 + e)
        th = (1.0 - e) * r
        th = tl.where(x < 0.0, -th, th)
        seen = (n[None, :] <= m[:, None]) & (n[None, :] > m[:, None] - WINDOW)
        p = tl.where(seen, tl.exp2(th * cap_log2 - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None]) * (4.0 * e * r * r)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + at, dq * sm_scale, mask=ok)


def backward(saved, grad_o, needs=None):
    q, k, v, sink, o, lse, window, cap, sm_scale = saved
    needs = needs or (True,) * 4
    needs_q, needs_k, needs_v, needs_sink = (bool(n) for n in needs)
    B, H, T, D = q.shape
    HK = k.shape[1]
    group = H // HK
    # No row is T or more behind: a wider window is the same window.
    window = min(window, T)
    do = grad_o.contiguous()
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other = (128, 64) if q.element_size() == 2 else (64, 32)
    if BLOCK_D > 128:
        own, other = (64, 32) if q.element_size() == 2 else (32, 16)
    warps = 4 if BLOCK_D <= 64 else 8
    factor = sm_scale / cap
    cap_log2 = cap * 1.4426950408889634
    tiles = triton.cdiv(T, 64)
    delta = torch.empty((B * H, T), device=q.device, dtype=torch.float32)
    parts = torch.empty((tiles, B, H), device=q.device, dtype=torch.float32)
    if needs_q or needs_k or needs_sink:
        _win_delta[(tiles, B * H)](
            o, do, sink, lse, delta, parts, T, H, D=D, BLOCK_D=BLOCK_D, BLOCK_M=64, num_warps=4
        )
    dq = torch.empty_like(q) if needs_q else None
    dk = torch.empty_like(k) if needs_k else None
    dv = torch.empty_like(v) if needs_v else None
    if needs_k or needs_v:
        _win_dkdv[(triton.cdiv(T, own), B * HK)](
            q, k, v, do, lse, delta, dk if needs_k else delta, dv if needs_v else delta,
            T, HK, group, window, sm_scale, factor, cap_log2,
            D=D, BLOCK_D=BLOCK_D, BLOCK_M=other, BLOCK_N=own, NEEDS_K=needs_k, NEEDS_V=needs_v,
            num_warps=warps, num_stages=2,
        )
    if needs_q:
        _win_dq[(triton.cdiv(T, own), B * H)](
            q, k, v, do, lse, delta, dq, T, group, window, sm_scale, factor, cap_log2,
            D=D, BLOCK_D=BLOCK_D, BLOCK_M=own, BLOCK_N=other, num_warps=warps, num_stages=2,
        )
    dsink = parts.sum((0, 1)).to(sink.dtype) if needs_sink else None
    return dq, dk, dv, dsink
