# --- backward ---
@triton.jit
def _delta_sweep_kernel(
    Q, K, V, BETA, DO, E, DVF, DVN, S0, R0, T, H, NC, scale, do_b, do_h, do_t, do_v,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, NARROW: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)[:, None]
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = keys < DK, values < DV
    s_mask = k_mask & v_mask[None, :]
    s_off = keys * DV + values[None, :]
    first = head * T
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if tl.program_id(2) + FIRST == 0:
        b_k = tl.load(K + first * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_v = tl.load(V + first * DV + values, mask=v_mask, other=0.0).to(tl.float32)
        b_beta = tl.load(BETA + first).to(tl.float32)
        for t in range(0, T):
            at = first + t
            nxt = first + tl.minimum(t + 1, T - 1)
            n_k = tl.load(K + nxt * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
            n_v = tl.load(V + nxt * DV + values, mask=v_mask, other=0.0).to(tl.float32)
            n_beta = tl.load(BETA + nxt).to(tl.float32)
            if t % CHUNK == 0:
                tl.store(S0 + (head * NC + t // CHUNK) * (DK * DV) + s_off, state, mask=s_mask)
            b_e = b_v - tl.sum(b_k * state, axis=0)
            state += (b_beta * b_k) * b_e[None, :]
            tl.store(E + at * DV + values, b_e, mask=v_mask)
            b_k = n_k
            b_v = n_v
            b_beta = n_beta
    else:
        do_base = DO + (head // H) * do_b + (head % H) * do_h + values.to(tl.int64) * do_v
        last = first + (T - 1)
        b_q = tl.load(Q + last * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_k = tl.load(K + last * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
        b_do = tl.load(do_base + (last - first) * do_t, mask=v_mask, other=0.0).to(tl.float32)
        b_beta = tl.load(BETA + last).to(tl.float32)
        for i in range(0, T):
            t = T - 1 - i
            at = first + t
            prev = tl.maximum(t - 1, 0)
            nxt = first + prev
            n_q = tl.load(Q + nxt * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
            n_k = tl.load(K + nxt * DK + keys, mask=k_mask, other=0.0).to(tl.float32)
            n_do = tl.load(do_base + (nxt - first) * do_t, mask=v_mask, other=0.0).to(tl.float32)
            n_beta = tl.load(BETA + nxt).to(tl.float32)
            if ((t + 1) % CHUNK == 0) | (i == 0):
                tl.store(R0 + (head * NC + t // CHUNK) * (DK * DV) + s_off, state, mask=s_mask)
            state += (b_q * scale) * b_do[None, :]
            b_dv = b_beta * tl.sum(b_k * state, axis=0)
            state -= b_k * b_dv[None, :]
            tl.store(DVF + at * DV + values, b_dv, mask=v_mask)
            if NARROW:
                tl.store(DVN + at * DV + values, b_dv, mask=v_mask)
            b_q = n_q
            b_k = n_k
            b_do = n_do
            b_beta = n_beta


@triton.jit
def _delta_chunk_kernel(
    Q, K, BETA, DO, E, DVF, S0, R0, DQ, DKEY, DBETA, T, H, NC, scale, do_b, do_h, do_t, do_v,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_K: tl.constexpr, NEED_BETA: tl.constexpr
):
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    ts = chunk * CHUNK + rows
    t_mask = ts < T
    at = head * T + ts
    keys = tl.arange(0, BLOCK_K)
    k_mask = keys < DK
    tk_mask = t_mask[:, None] & k_mask[None, :]
    tk_off = at[:, None] * DK + keys[None, :]
    do_row = DO + (head // H) * do_b + (head % H) * do_h + ts[:, None] * do_t
    st = (head * NC + chunk) * (DK * DV)

    p = tl.zeros((CHUNK, CHUNK), tl.float32)
    m = tl.zeros((CHUNK, CHUNK), tl.float32)
    acc_q = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    acc_g = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    acc_s = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for start in range(0, DV, BLOCK_V):
        values = start + tl.arange(0, BLOCK_V)
        v_mask = values < DV
        tv_mask = t_mask[:, None] & v_mask[None, :]
        tv_off = at[:, None] * DV + values[None, :]
        vk_off = st + keys[None, :] * DV + values[:, None]
        vk_mask = v_mask[:, None] & k_mask[None, :]
        b_do = tl.load(do_row + values[None, :].to(tl.int64) * do_v, mask=tv_mask, other=0.0).to(tl.float32)
        b_e = tl.load(E + tv_off, mask=tv_mask, other=0.0)
        b_s = tl.load(S0 + vk_off, mask=vk_mask, other=0.0)
        b_et = tl.trans(b_e)
        p += tl.dot(b_do, b_et, input_precision="ieee")
        if NEED_Q:
            acc_q += tl.dot(b_do, b_s, input_precision="ieee")
        if NEED_K or NEED_BETA:
            b_r = tl.load(R0 + vk_off, mask=vk_mask, other=0.0)
            b_dv = tl.load(DVF + tv_off, mask=tv_mask, other=0.0)
            m += tl.dot(b_dv, b_et, input_precision="ieee")
            acc_g += tl.dot(b_e, b_r, input_precision="ieee")
            if NEED_K:
                acc_s += tl.dot(b_dv, b_s, input_precision="ieee")
    p = tl.where(rows[:, None] >= rows[None, :], p, 0.0)
    m = tl.where(rows[:, None] >= rows[None, :], m, 0.0)
    b_k = tl.load(K + tk_off, mask=tk_mask, other=0.0).to(tl.float32)
    b_beta = tl.load(BETA + at, mask=t_mask, other=0.0).to(tl.float32)
    b_kb = b_k * b_beta[:, None]
    if NEED_Q:
        acc_q += tl.dot(p, b_kb, input_precision="ieee")
        tl.store(DQ + tk_off, acc_q * scale, mask=tk_mask)
    if NEED_K or NEED_BETA:
        b_q = tl.load(Q + tk_off, mask=tk_mask, other=0.0).to(tl.float32) * scale
        acc_g += tl.dot(tl.trans(p), b_q, input_precision="ieee")
        acc_g -= tl.dot(tl.trans(m), b_k, input_precision="ieee")
        if NEED_K:
            acc_s += tl.dot(m, b_kb, input_precision="ieee")
            tl.store(DKEY + tk_off, acc_g * b_beta[:, None] - acc_s, mask=tk_mask)
        if NEED_BETA:
            tl.store(DBETA + at, tl.sum(acc_g * b_k, axis=1), mask=t_mask)


def backward(saved, grad_o, needs=None):
    q, k, v, beta, o, scale = saved
    needs = needs or (True,) * 4
    need_q, need_k, need_v, need_beta = needs
    if not (need_q or need_k or need_v or need_beta):
        return None, None, None, None
    B, H, T, K = k.shape
    V = v.shape[-1]
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    scale = K**-0.5 if scale is None else scale
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if need_q else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if need_k else None
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device) if need_beta else None
    CHUNK = 32
    NC = triton.cdiv(T, CHUNK)
    need_fwd = need_q or need_k or need_beta
    need_rev = need_k or need_v or need_beta
    dvf = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    narrow = need_v and v.dtype != torch.float32
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if narrow else dvf
    if need_fwd:
        e = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        s0 = torch.empty((B * H, NC, K, V), dtype=torch.float32, device=v.device)
    else:
        e, s0 = dvf, dvf
    r0 = torch.empty((B * H, NC, K, V), dtype=torch.float32, device=v.device) if need_rev else dvf
    do_b, do_h, do_t, do_v = grad_o.stride()
    BLOCK_V = min(triton.next_power_of_2(V), 16)
    _delta_sweep_kernel[(triton.cdiv(V, BLOCK_V), B * H, 2 if need_fwd and need_rev else 1)](
        q, k, v, beta, grad_o, e, dvf, dv, s0, r0, T, H, NC, scale, do_b, do_h, do_t, do_v,
        DK=K,
        DV=V,
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=BLOCK_V,
        CHUNK=CHUNK,
        FIRST=0 if need_fwd else 1,
        NARROW=narrow,
        num_warps=1,
    )
    if need_fwd:
        _delta_chunk_kernel[(NC, B * H)](
            q, k, beta, grad_o, e, dvf, s0, r0,
            dq if need_q else dvf,
            dk if need_k else dvf,
            dbeta if need_beta else dvf,
            T, H, NC, scale, do_b, do_h, do_t, do_v,
            DK=K,
            DV=V,
            BLOCK_K=max(triton.next_power_of_2(K), 16),
            BLOCK_V=max(min(triton.next_power_of_2(V), 64), 16),
            CHUNK=CHUNK,
            NEED_Q=need_q,
            NEED_K=need_k,
            NEED_BETA=need_beta,
            num_warps=4,
        )
    return dq, dk, (dv if need_v else None), dbeta
