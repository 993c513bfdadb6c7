# --- backward ---
@triton.jit
def _attention_delta(
    O, DO, DELTA, H, T, o_b, o_h, o_t, o_d, g_b, g_h, g_t, g_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    rows = m.to(tl.int64)
    ok = (m < T)[:, None] & (d < D)[None, :]
    o = tl.load(O + batch * o_b + head * o_h + rows[:, None] * o_t + d[None, :] * o_d, mask=ok, other=0.0)
    do = tl.load(DO + batch * g_b + head * g_h + rows[:, None] * g_t + d[None, :] * g_d, mask=ok, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * T + m, delta, mask=m < T)


@triton.jit
def _attention_dq(
    Q, K, V, O, DO, LSE, DELTA, DQ, H, T, S, scale,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    o_b, o_h, o_t, o_d, g_b, g_h, g_t, g_d, dq_b, dq_h, dq_t, dq_d,
    STORE_DELTA: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    # The longest rows start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    rows = m.to(tl.int64)
    in_d = (d < D)[None, :]
    ok = (m < T)[:, None] & in_d
    stat = tl.program_id(1).to(tl.int64) * T + m

    do = tl.load(DO + batch * g_b + head * g_h + rows[:, None] * g_t + d[None, :] * g_d, mask=ok, other=0.0)
    o = tl.load(O + batch * o_b + head * o_h + rows[:, None] * o_t + d[None, :] * o_d, mask=ok, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if STORE_DELTA:
        tl.store(DELTA + stat, delta, mask=m < T)
    q = tl.load(Q + batch * q_b + head * q_h + rows[:, None] * q_t + d[None, :] * q_d, mask=ok, other=0.0)
    # Infinity for rows outside makes their probabilities exact zeros.
    lse = tl.load(LSE + stat, mask=m < T, other=float("inf")) * LOG2E

    scale_log2 = scale * LOG2E
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, (tile + 1) * BLOCK_M + S - T)
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = n.to(tl.int64)
        kv_ok = (n < S)[:, None] & in_d
        k = tl.load(K + keys[:, None] * k_s + d[None, :] * k_d, mask=kv_ok, other=0.0)
        v = tl.load(V + keys[:, None] * v_s + d[None, :] * v_d, mask=kv_ok, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        # The last key that row m sees is m + S - T; keys past S are zero rows, whose p may be infinite.
        seen = (n < S)[None, :]
        if CAUSAL:
            seen = seen & (m[:, None] + (S - T) >= n[None, :])
        p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + batch * dq_b + head * dq_h + rows[:, None] * dq_t + d[None, :] * dq_d, dq * scale, mask=ok)


@triton.jit
def _attention_dkdv(
    Q, K, V, DO, LSE, DELTA, DK, DV, H, T, S, scale,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_t, g_d,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    first_key = tl.program_id(0) * BLOCK_N
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    Q += batch * q_b + head * q_h
    DO += batch * g_b + head * g_h
    LSE += tl.program_id(1).to(tl.int64) * T
    DELTA += tl.program_id(1).to(tl.int64) * T
    n = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    keys = n.to(tl.int64)
    in_d = (d < D)[None, :]
    kv_ok = (n < S)[:, None] & in_d
    k = tl.load(K + batch * k_b + head * k_h + keys[:, None] * k_s + d[None, :] * k_d, mask=kv_ok, other=0.0)
    v = tl.load(V + batch * v_b + head * v_h + keys[:, None] * v_s + d[None, :] * v_d, mask=kv_ok, other=0.0)

    scale_log2 = scale * LOG2E
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Queries before first_key + T - S see none of this tile. Products are kept transposed: keys are rows.
    begin = 0
    if CAUSAL:
        begin = tl.maximum(first_key + T - S, 0) // BLOCK_M * BLOCK_M
    for start in range(begin, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        rows = m.to(tl.int64)
        ok = (m < T)[:, None] & in_d
        q = tl.load(Q + rows[:, None] * q_t + d[None, :] * q_d, mask=ok, other=0.0)
        do = tl.load(DO + rows[:, None] * g_t + d[None, :] * g_d, mask=ok, other=0.0)
        lse = tl.load(LSE + m, mask=m < T, other=float("inf")) * LOG2E
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        if CAUSAL:
            p = tl.where(m[None, :] + (S - T) >= n[:, None], p, 0.0)
        if NEEDS_V:
            dv = tl.dot(p.to(do.dtype), do, dv)
        if NEEDS_K:
            delta = tl.load(DELTA + m, mask=m < T, other=0.0)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    if NEEDS_K:
        tl.store(DK + batch * dk_b + head * dk_h + keys[:, None] * dk_s + d[None, :] * dk_d, dk * scale, mask=kv_ok)
    if NEEDS_V:
        tl.store(DV + batch * dv_b + head * dv_h + keys[:, None] * dv_s + d[None, :] * dv_d, dv, mask=kv_ok)


def backward(saved, grad_o, grad_lse, needs=None):
    q, k, v, o, lse, causal, sm_scale = saved
    need_q, need_k, need_v = needs or (True,) * 3
    B, H, T, D = q.shape
    S = k.shape[2]
    scale = D**-0.5 if sm_scale is None else sm_scale
    causal = bool(causal)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    # Every tile of the cotangent is read many times: one copy is cheaper than scattered reads in all of them.
    if grad_o.stride(3) != 1:
        grad_o = grad_o.contiguous()
    # The owned tile stays in shared memory, so fp32 and very wide heads take fewer rows.
    own, other = (128, 64) if q.element_size() == 2 else (64, 32)
    if BLOCK_D > 128:
        own, other = own // 2, other // 2
    delta = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _attention_dq[(triton.cdiv(T, own), B * H)](
            q, k, v, o, grad_o, lse, delta, dq, H, T, S, scale,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(), *grad_o.stride(), *dq.stride(),
            STORE_DELTA=bool(need_k), CAUSAL=causal, D=D, BLOCK_D=BLOCK_D,
            BLOCK_M=own, BLOCK_N=other, num_warps=4 if BLOCK_D <= 64 else 8, num_stages=2,
        )  # fmt: skip
    elif need_k:
        _attention_delta[(triton.cdiv(T, 64), B * H)](
            o, grad_o, delta, H, T, *o.stride(), *grad_o.stride(), D=D, BLOCK_D=BLOCK_D, BLOCK_M=64, num_warps=4
        )
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _attention_dkdv[(triton.cdiv(S, own), B * H)](
            q, k, v, grad_o, lse, delta, dk, dv, H, T, S, scale,
            *q.stride(), *k.stride(), *v.stride(), *grad_o.stride(), *dk.stride(), *dv.stride(),
            NEEDS_K=bool(need_k), NEEDS_V=bool(need_v), CAUSAL=causal, D=D, BLOCK_D=BLOCK_D,
            BLOCK_M=other, BLOCK_N=own, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dq, dk if need_k else None, dv if need_v else None
