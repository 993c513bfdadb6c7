# --- forward ---
@triton.jit
def _windowed_attention_lse_fwd_kernel(
    Q, K, V, SINK, O, LSE, sm_scale, cap, T, H, GROUP, WINDOW,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
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
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    BLOCK_M = 64
    _windowed_attention_lse_fwd_kernel[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, sink, o, lse, sm_scale, cap, T, H, H // k.shape[1], window,
        D=D,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_M=BLOCK_M,
        BLOCK_N=32,
    )
    return o, (q, k, v, sink, o, lse, window, cap, sm_scale)
# --- backward ---
@triton.jit
def _windowed_attention_dq_kernel(
    Q, K, V, SINK, O, LSE, DO, DQ, DELTA, PSINK, sm_scale, cap, T, H, GROUP, WINDOW, do_b, do_h, do_t, do_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEED_Q: tl.constexpr
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    row_head = batch * H + head
    kv_head = batch * (H // GROUP) + head // GROUP
    K += kv_head * T * D
    V += kv_head * T * D
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    r_mask = rows < T
    q_mask = r_mask[:, None] & (dims < D)[None, :]
    q_off = row_head * T * D + rows[:, None] * D + dims[None, :]
    do_off = batch * do_b + head * do_h + rows[:, None].to(tl.int64) * do_t + dims[None, :].to(tl.int64) * do_d
    b_do = tl.load(DO + do_off, mask=q_mask, other=0.0)
    b_o = tl.load(O + q_off, mask=q_mask, other=0.0)
    b_lse = tl.load(LSE + row_head * T + rows, mask=r_mask, other=0.0)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), axis=1)
    tl.store(DELTA + row_head * T + rows, b_delta, mask=r_mask)
    b_sink = tl.where(r_mask, tl.exp(tl.load(SINK + head) - b_lse) * b_delta, 0.0)
    tl.store(PSINK + (batch * tl.num_programs(0) + tl.program_id(0)) * H + head, -tl.sum(b_sink, axis=0))
    if NEED_Q:
        b_q = tl.load(Q + q_off, mask=q_mask, other=0.0)
        b_dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        start = tl.maximum(0, (first - WINDOW + 1) // BLOCK_N * BLOCK_N)
        for at in range(start, tl.minimum(T, first + BLOCK_M), BLOCK_N):
            keys = at + tl.arange(0, BLOCK_N)
            kv_mask = (keys < T)[:, None] & (dims < D)[None, :]
            b_k = tl.load(K + keys[:, None] * D + dims[None, :], mask=kv_mask, other=0.0)
            b_v = tl.load(V + keys[:, None] * D + dims[None, :], mask=kv_mask, other=0.0)
            b_x = tl.dot(b_q, tl.trans(b_k)) * (sm_scale / cap)
            b_w = tl.exp(-2.0 * tl.abs(b_x))
            b_r = 1.0 / (1.0 + b_w)
            b_th = (1.0 - b_w) * b_r
            b_s = cap * tl.where(b_x < 0.0, -b_th, b_th)
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] > rows[:, None] - WINDOW)
            seen = seen & (keys < T)[None, :] & r_mask[:, None]
            b_p = tl.where(seen, tl.exp(b_s - b_lse[:, None]), 0.0)
            b_dp = tl.dot(b_do, tl.trans(b_v))
            b_ds = b_p * (b_dp - b_delta[:, None]) * (4.0 * b_w * b_r * b_r)
            b_dq += tl.dot(b_ds.to(b_k.dtype), b_k)
        tl.store(DQ + q_off, b_dq * sm_scale, mask=q_mask)


@triton.jit
def _windowed_attention_dkv_kernel(
    Q, K, V, LSE, DO, DELTA, DK, DV, sm_scale, cap, T, H, GROUP, WINDOW, do_b, do_h, do_t, do_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NEED_K: tl.constexpr, NEED_V: tl.constexpr
):
    heads = H // GROUP
    batch = (tl.program_id(1) // heads).to(tl.int64)
    kv = tl.program_id(1) % heads
    first = tl.program_id(0) * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    d_mask = (dims < D)[None, :]
    kv_mask = (keys < T)[:, None] & d_mask
    kv_off = (batch * heads + kv) * T * D + keys[:, None] * D + dims[None, :]
    b_k = tl.load(K + kv_off, mask=kv_mask, other=0.0)
    b_v = tl.load(V + kv_off, mask=kv_mask, other=0.0)
    b_dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    end = tl.minimum(T, first + WINDOW)
    for g in range(0, GROUP):
        head = kv * GROUP + g
        row_head = batch * H + head
        q_base = Q + row_head * T * D
        do_base = DO + batch * do_b + head * do_h
        for at in range(first, end, BLOCK_M):
            rows = at + tl.arange(0, BLOCK_M)
            r_mask = rows < T
            q_mask = r_mask[:, None] & d_mask
            b_q = tl.load(q_base + rows[:, None] * D + dims[None, :], mask=q_mask, other=0.0)
            b_do = tl.load(
                do_base + rows[:, None].to(tl.int64) * do_t + dims[None, :].to(tl.int64) * do_d, mask=q_mask, other=0.0
            )
            b_lse = tl.load(LSE + row_head * T + rows, mask=r_mask, other=0.0)
            b_x = tl.dot(b_k, tl.trans(b_q)) * (sm_scale / cap)
            b_w = tl.exp(-2.0 * tl.abs(b_x))
            b_r = 1.0 / (1.0 + b_w)
            b_th = (1.0 - b_w) * b_r
            b_s = cap * tl.where(b_x < 0.0, -b_th, b_th)
            seen = (keys[:, None] <= rows[None, :]) & (keys[:, None] > rows[None, :] - WINDOW)
            seen = seen & (keys < T)[:, None] & r_mask[None, :]
            b_p = tl.where(seen, tl.exp(b_s - b_lse[None, :]), 0.0)
            if NEED_V:
                b_dv += tl.dot(b_p.to(b_do.dtype), b_do)
            if NEED_K:
                b_delta = tl.load(DELTA + row_head * T + rows, mask=r_mask, other=0.0)
                b_dp = tl.dot(b_v, tl.trans(b_do))
                b_ds = b_p * (b_dp - b_delta[None, :]) * (4.0 * b_w * b_r * b_r)
                b_dk += tl.dot(b_ds.to(b_q.dtype), b_q)
    if NEED_K:
        tl.store(DK + kv_off, b_dk * sm_scale, mask=kv_mask)
    if NEED_V:
        tl.store(DV + kv_off, b_dv, mask=kv_mask)


def backward(saved, grad_o, needs=None):
    q, k, v, sink, o, lse, window, cap, sm_scale = saved
    needs = needs or (True,) * 4
    need_q, need_k, need_v, need_sink = needs
    if not any(needs):
        return (None,) * 4
    B, H, T, D = q.shape
    HK = k.shape[1]
    window = min(window, T)
    do_b, do_h, do_t, do_d = grad_o.stride()
    BLOCK_D = max(16, triton.next_power_of_2(D))
    STREAM = 64 if q.element_size() == 2 else 32
    BLOCK = 64
    NM = triton.cdiv(T, BLOCK)
    dq = torch.empty_like(q) if need_q else None
    dk = torch.empty_like(k) if need_k else None
    dv = torch.empty_like(v) if need_v else None
    dsink = None
    delta = lse
    if need_q or need_k or need_sink:
        delta = torch.empty_like(lse)
        psink = torch.empty((B * NM, H), dtype=torch.float32, device=q.device)
        _windowed_attention_dq_kernel[(NM, B * H)](
            q, k, v, sink, o, lse, grad_o, dq if need_q else delta, delta, psink,
            sm_scale, cap, T, H, H // HK, window, do_b, do_h, do_t, do_d,
            D=D,
            BLOCK_D=BLOCK_D,
            BLOCK_M=BLOCK,
            BLOCK_N=STREAM,
            NEED_Q=need_q,
            num_warps=4,
            num_stages=2,
        )
        if need_sink:
            dsink = psink.sum(0)
    if need_k or need_v:
        _windowed_attention_dkv_kernel[(NM, B * HK)](
            q, k, v, lse, grad_o, delta, dk if need_k else delta, dv if need_v else delta,
            sm_scale, cap, T, H, H // HK, window, do_b, do_h, do_t, do_d,
            D=D,
            BLOCK_D=BLOCK_D,
            BLOCK_M=STREAM,
            BLOCK_N=BLOCK,
            NEED_K=need_k,
            NEED_V=need_v,
            num_warps=8 if BLOCK_D >= 128 else 4,
            num_stages=2,
        )
    return dq, dk, dv, dsink
