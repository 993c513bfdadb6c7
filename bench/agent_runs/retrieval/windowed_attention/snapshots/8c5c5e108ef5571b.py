# --- forward ---
@triton.jit
def _wa_fwd_kernel(
    Q, K, V, SINK, O, LSE, sm_scale, cap, T, H, GROUP, WINDOW,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    Q += (batch * H + head) * T * D
    O += (batch * H + head) * T * D
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
    tl.store(LSE + (batch * H + head) * T + rows, b_max + tl.log(b_sum), mask=rows < T)


def forward(q, k, v, sink, window, cap=30.0, sm_scale=None):
    B, H, T, D = q.shape
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    lse = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    BLOCK_M = 64
    _wa_fwd_kernel[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, sink, o, lse, sm_scale, cap, T, H, H // k.shape[1], window,
        D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_M=BLOCK_M, BLOCK_N=32,
    )
    return o, (q, k, v, sink, o, lse, window, cap, sm_scale)
# --- backward ---
@triton.jit
def _wa_delta_kernel(
    O, DO, LSE, SINK, DELTA, PARTS, T, H, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    pair = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m < T)[:, None] & (d < D)[None, :]
    at = pair * T * D + m[:, None] * D + d[None, :]
    o = tl.load(O + at, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(DO + at, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    tl.store(DELTA + pair * T + m, delta, mask=m < T)
    lse = tl.load(LSE + pair * T + m, mask=m < T, other=float("inf"))
    sink = tl.load(SINK + pair % H).to(tl.float32)
    part = -tl.sum(tl.where(m < T, tl.exp(sink - lse) * delta, 0.0), axis=0)
    tl.store(PARTS + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + pair, part)


@triton.jit
def _wa_dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, sm_scale, cap, T, HK, GROUP, WINDOW,
    NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    first_key = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1).to(tl.int64)
    n = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kv_at = kv_head * T * D + n[:, None] * D + d[None, :]
    kv_mask = (n < T)[:, None] & (d < D)[None, :]
    k = tl.load(K + kv_at, mask=kv_mask, other=0.0)
    v = tl.load(V + kv_at, mask=kv_mask, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = first_key // BLOCK_M * BLOCK_M
    end = tl.minimum(T, first_key + BLOCK_N - 1 + WINDOW)
    x_scale = sm_scale / cap
    # kv heads are numbered batch * HK + head, so query heads of all batches are numbered kv_head * GROUP + g.
    for g in range(0, GROUP):
        head = kv_head * GROUP + g
        for start in range(begin, end, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            q_at = head * T * D + m[:, None] * D + d[None, :]
            q_mask = (m < T)[:, None] & (d < D)[None, :]
            q = tl.load(Q + q_at, mask=q_mask, other=0.0)
            do = tl.load(DO + q_at, mask=q_mask, other=0.0)
            lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
            x = tl.dot(k, tl.trans(q)) * x_scale
            e = tl.exp(-2.0 * tl.abs(x))
            inv = 1.0 / (1.0 + e)
            th = (1.0 - e) * inv
            th = tl.where(x < 0.0, -th, th)
            seen = (n[:, None] <= m[None, :]) & (n[:, None] > m[None, :] - WINDOW) & (m < T)[None, :]
            p = tl.where(seen, tl.exp(cap * th - lse[None, :]), 0.0)
            if NEED_V:
                dv += tl.dot(p.to(do.dtype), do)
            if NEED_K:
                delta = tl.load(DELTA + head * T + m, mask=m < T, other=0.0)
                dp = tl.dot(v, tl.trans(do))
                ds = p * (dp - delta[None, :]) * (4.0 * e * inv * inv)
                dk += tl.dot(ds.to(q.dtype), q)
    if NEED_K:
        tl.store(DK + kv_at, dk * sm_scale, mask=kv_mask)
    if NEED_V:
        tl.store(DV + kv_at, dv, mask=kv_mask)


@triton.jit
def _wa_dq_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, sm_scale, cap, T, GROUP, WINDOW,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = head * T * D + m[:, None] * D + d[None, :]
    q_mask = (m < T)[:, None] & (d < D)[None, :]
    q = tl.load(Q + q_at, mask=q_mask, other=0.0)
    do = tl.load(DO + q_at, mask=q_mask, other=0.0)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    delta = tl.load(DELTA + head * T + m, mask=m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    x_scale = sm_scale / cap
    begin = tl.maximum(0, first - WINDOW + 1) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.minimum(T, first + BLOCK_M), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        kv_at = kv_head * T * D + n[:, None] * D + d[None, :]
        kv_mask = (n < T)[:, None] & (d < D)[None, :]
        k = tl.load(K + kv_at, mask=kv_mask, other=0.0)
        v = tl.load(V + kv_at, mask=kv_mask, other=0.0)
        x = tl.dot(q, tl.trans(k)) * x_scale
        e = tl.exp(-2.0 * tl.abs(x))
        inv = 1.0 / (1.0 + e)
        th = (1.0 - e) * inv
        th = tl.where(x < 0.0, -th, th)
        seen = (n[None, :] <= m[:, None]) & (n[None, :] > m[:, None] - WINDOW) & (m < T)[:, None]
        p = tl.where(seen, tl.exp(cap * th - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v))
        ds = p * (dp - delta[:, None]) * (4.0 * e * inv * inv)
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(DQ + q_at, dq * sm_scale, mask=q_mask)


def backward(saved, grad_o, needs=None):
    q, k, v, sink, o, lse, window, cap, sm_scale = saved
    needs = needs or (True,) * 4
    need_q, need_k, need_v, need_sink = (bool(n) for n in needs)
    B, H, T, D = q.shape
    HK = k.shape[1]
    group = H // HK
    # Every tile of the cotangent is read many times: one copy, if any, is cheaper than strided reads.
    do = grad_o.contiguous()
    BLOCK_D = max(16, triton.next_power_of_2(D))
    half = q.element_size() == 2
    own = 128 if half else 64
    other = 64 if half else 32
    warps = 4 if BLOCK_D <= 64 else 8
    dq = dk = dv = dsink = None
    delta = lse
    if need_q or need_k or need_sink:
        delta = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
        parts = torch.empty((triton.cdiv(T, 64), B, H), device=q.device, dtype=torch.float32)
        _wa_delta_kernel[(triton.cdiv(T, 64), B * H)](
            o, do, lse, sink, delta, parts, T, H, D=D, BLOCK_D=BLOCK_D, BLOCK_M=64, num_warps=4
        )
        if need_sink:
            dsink = parts.sum((0, 1)).to(sink.dtype)
    if need_k or need_v:
        dk = torch.empty(k.shape, device=k.device, dtype=k.dtype)
        dv = torch.empty(v.shape, device=v.device, dtype=v.dtype)
        _wa_dkdv_kernel[(triton.cdiv(T, own), B * HK)](
            q, k, v, do, lse, delta, dk, dv, sm_scale, cap, T, HK, group, window, NEED_K=need_k, NEED_V=need_v,
            D=D, BLOCK_D=BLOCK_D, BLOCK_M=other, BLOCK_N=own, num_warps=warps, num_stages=2,
        )
    if need_q:
        dq = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        _wa_dq_kernel[(triton.cdiv(T, own), B * H)](
            q, k, v, do, lse, delta, dq, sm_scale, cap, T, group, window,
            D=D, BLOCK_D=BLOCK_D, BLOCK_M=own, BLOCK_N=other, num_warps=warps, num_stages=2,
        )
    return dq, dk if need_k else None, dv if need_v else None, dsink
