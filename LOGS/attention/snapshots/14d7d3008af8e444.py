# --- backward ---
@triton.jit
def attention_bwd_delta_kernel(
    O, DO, DELTA, stride_ob, stride_oh, stride_ot, stride_od, stride_gb, stride_gh, stride_gt, stride_gd, H, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (dims < D)[None, :]
    o_at = O + batch * stride_ob + head * stride_oh + rows[:, None] * stride_ot + dims[None, :] * stride_od
    g_at = DO + batch * stride_gb + head * stride_gh + rows[:, None] * stride_gt + dims[None, :] * stride_gd
    b_o = tl.load(o_at, mask=mask, other=0.0).to(tl.float32)
    b_do = tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * T + rows, tl.sum(b_o * b_do, axis=1), mask=rows < T)


@triton.jit
def attention_bwd_dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    sm_scale, H, T, S,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // H, pair % H
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    DO += batch * stride_gb + head * stride_gh
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    kv_mask = (keys < S)[:, None] & (dims < D)[None, :]
    b_k = tl.load(K + keys[:, None] * stride_ks + dims[None, :] * stride_kd, mask=kv_mask, other=0.0)
    b_v = tl.load(V + keys[:, None] * stride_vs + dims[None, :] * stride_vd, mask=kv_mask, other=0.0)
    b_dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(tl.program_id(0) * BLOCK_N - (S - T), 0) // BLOCK_M * BLOCK_M
    for start in range(begin, T, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q_mask = (rows < T)[:, None] & (dims < D)[None, :]
        b_q = tl.load(Q + rows[:, None] * stride_qt + dims[None, :] * stride_qd, mask=q_mask, other=0.0)
        b_do = tl.load(DO + rows[:, None] * stride_gt + dims[None, :] * stride_gd, mask=q_mask, other=0.0)
        b_lse = tl.load(LSE + pair * T + rows, mask=rows < T, other=0.0) * LOG2E
        b_delta = tl.load(DELTA + pair * T + rows, mask=rows < T, other=0.0)
        # Transposed scores [BLOCK_N, BLOCK_M]: p and ds feed the next dots as they are.
        b_st = tl.dot(b_k, tl.trans(b_q)) * (sm_scale * LOG2E)
        seen = (keys < S)[:, None] & (rows < T)[None, :]
        if CAUSAL:
            seen = seen & ((rows + S - T)[None, :] >= keys[:, None])
        b_pt = tl.where(seen, tl.exp2(b_st - b_lse[None, :]), 0.0)
        b_dv += tl.dot(b_pt.to(b_do.dtype), b_do)
        b_dpt = tl.dot(b_v, tl.trans(b_do))
        b_dst = b_pt * (b_dpt - b_delta[None, :])
        b_dk += tl.dot(b_dst.to(b_q.dtype), b_q)
    at = pair * S * D + keys[:, None] * D + dims[None, :]
    tl.store(DK + at, b_dk * sm_scale, mask=kv_mask)
    tl.store(DV + at, b_dv, mask=kv_mask)


@triton.jit
def attention_bwd_dq_kernel(
    Q, K, V, DO, LSE, DELTA, DQ,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    sm_scale, H, T, S,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // H, pair % H
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    DO += batch * stride_gb + head * stride_gh
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows < T)[:, None] & (dims < D)[None, :]
    b_q = tl.load(Q + rows[:, None] * stride_qt + dims[None, :] * stride_qd, mask=q_mask, other=0.0)
    b_do = tl.load(DO + rows[:, None] * stride_gt + dims[None, :] * stride_gd, mask=q_mask, other=0.0)
    b_lse = tl.load(LSE + pair * T + rows, mask=rows < T, other=0.0) * LOG2E
    b_delta = tl.load(DELTA + pair * T + rows, mask=rows < T, other=0.0)
    b_dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M + S - T)
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        kv_mask = (keys < S)[:, None] & (dims < D)[None, :]
        b_k = tl.load(K + keys[:, None] * stride_ks + dims[None, :] * stride_kd, mask=kv_mask, other=0.0)
        b_v = tl.load(V + keys[:, None] * stride_vs + dims[None, :] * stride_vd, mask=kv_mask, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (sm_scale * LOG2E)
        seen = (keys < S)[None, :] & (rows < T)[:, None]
        if CAUSAL:
            seen = seen & ((rows + S - T)[:, None] >= keys[None, :])
        b_p = tl.where(seen, tl.exp2(b_s - b_lse[:, None]), 0.0)
        b_dp = tl.dot(b_do, tl.trans(b_v))
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq += tl.dot(b_ds.to(b_k.dtype), b_k)
    at = pair * T * D + rows[:, None] * D + dims[None, :]
    tl.store(DQ + at, b_dq * sm_scale, mask=q_mask)


def backward(saved, grad_o, grad_lse, needs=None):
    q, k, v, o, lse, causal, sm_scale = saved
    B, H, T, D = q.shape
    S = k.shape[2]
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    BLOCK_D = max(16, triton.next_power_of_2(D))
    BLOCK_M, BLOCK_N = 64, 64
    delta = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    dq = torch.empty((B, H, T, D), dtype=q.dtype, device=q.device)
    dk = torch.empty((B, H, S, D), dtype=k.dtype, device=k.device)
    dv = torch.empty((B, H, S, D), dtype=v.dtype, device=v.device)
    attention_bwd_delta_kernel[(triton.cdiv(T, BLOCK_M), B * H)](
        o, grad_o, delta, *o.stride(), *grad_o.stride(), H, T, D=D, BLOCK_D=BLOCK_D, BLOCK_M=BLOCK_M
    )
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad_o.stride())
    tiles = dict(D=D, CAUSAL=causal, BLOCK_D=BLOCK_D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4, num_stages=2)
    attention_bwd_dkdv_kernel[(triton.cdiv(S, BLOCK_N), B * H)](
        q, k, v, grad_o, lse, delta, dk, dv, *strides, sm_scale, H, T, S, **tiles
    )
    attention_bwd_dq_kernel[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, grad_o, lse, delta, dq, *strides, sm_scale, H, T, S, **tiles
    )
    return dq, dk, dv
