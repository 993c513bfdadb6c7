# --- backward ---
@triton.jit
def _dr_prep_kernel(
    Q, K, V, BETA, DO, MK, KR, E, DR, T, DK, DV, scale,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NEED_F: tl.constexpr, NEED_R: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    t = tl.program_id(0) * BLOCK_T + i
    t_mask = t < T
    keys = tl.arange(0, BLOCK_K)
    row = head * T + t
    at_k = row[:, None] * DK + keys[None, :]
    k_mask = t_mask[:, None] & (keys < DK)[None, :]
    k = tl.load(K + at_k, mask=k_mask, other=0.0).to(tl.float32)
    beta = tl.load(BETA + row, mask=t_mask, other=0.0).to(tl.float32)
    a = tl.dot(k, tl.trans(k), input_precision="ieee")
    m = tl.where(i[:, None] > i[None, :], -a * beta[None, :], 0.0)
    for r in range(1, BLOCK_T):
        line = tl.sum(tl.where(i[:, None] == r, m, 0.0), axis=0)
        line = line + tl.sum(line[:, None] * m, axis=0)
        m = tl.where(i[:, None] == r, line[None, :], m)
    m = tl.where(i[:, None] == i[None, :], 1.0, m)
    if NEED_F:
        tl.store(MK + at_k, tl.dot(m, k, input_precision="ieee"), mask=k_mask)
        for start in range(0, DV, BLOCK_V):
            values = start + tl.arange(0, BLOCK_V)
            v_mask = t_mask[:, None] & (values < DV)[None, :]
            at_v = row[:, None] * DV + values[None, :]
            v = tl.load(V + at_v, mask=v_mask, other=0.0).to(tl.float32)
            tl.store(E + at_v, tl.dot(m, v, input_precision="ieee"), mask=v_mask)
    if NEED_R:
        mt = tl.trans(m)
        tl.store(KR + at_k, tl.dot(mt, k * beta[:, None], input_precision="ieee"), mask=k_mask)
        q = tl.load(Q + at_k, mask=k_mask, other=0.0).to(tl.float32) * scale
        pt = tl.dot(k, tl.trans(q), input_precision="ieee")
        pt = tl.where(i[:, None] <= i[None, :], pt, 0.0) * beta[:, None]
        n = tl.dot(mt, pt, input_precision="ieee")
        for start in range(0, DV, BLOCK_V):
            values = start + tl.arange(0, BLOCK_V)
            v_mask = t_mask[:, None] & (values < DV)[None, :]
            at_v = row[:, None] * DV + values[None, :]
            do = tl.load(DO + at_v, mask=v_mask, other=0.0).to(tl.float32)
            tl.store(DR + at_v, tl.dot(n, do, input_precision="ieee"), mask=v_mask)


@triton.jit
def _dr_state_kernel(
    Q, K, BETA, DO, MK, KR, E, DR, S_ALL, G_ALL, T, NT, DK, DV, scale,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NEED_F: tl.constexpr, NEED_R: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    at_s = keys[:, None] * DV + values[None, :]
    s_mask = (keys < DK)[:, None] & (values < DV)[None, :]
    if tl.program_id(2) == 0:
        if NEED_F:
            s = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            for c in range(0, NT):
                t = c * BLOCK_T + i
                t_mask = t < T
                row = head * T + t
                at_k = row[:, None] * DK + keys[None, :]
                k_mask = t_mask[:, None] & (keys < DK)[None, :]
                at_v = row[:, None] * DV + values[None, :]
                v_mask = t_mask[:, None] & (values < DV)[None, :]
                mk = tl.load(MK + at_k, mask=k_mask, other=0.0)
                k = tl.load(K + at_k, mask=k_mask, other=0.0).to(tl.float32)
                beta = tl.load(BETA + row, mask=t_mask, other=0.0).to(tl.float32)
                e = tl.load(E + at_v, mask=v_mask, other=0.0)
                tl.store(S_ALL + (head * NT + c) * DK * DV + at_s, s, mask=s_mask)
                e = e - tl.dot(mk, s, input_precision="ieee")
                tl.store(E + at_v, e, mask=v_mask)
                s += tl.dot(tl.trans(k), e * beta[:, None], input_precision="ieee")
    else:
        if NEED_R:
            g = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            for back in range(0, NT):
                cr = NT - 1 - back
                tr = cr * BLOCK_T + i
                tr_mask = tr < T
                row_r = head * T + tr
                atr_k = row_r[:, None] * DK + keys[None, :]
                kr_mask = tr_mask[:, None] & (keys < DK)[None, :]
                atr_v = row_r[:, None] * DV + values[None, :]
                vr_mask = tr_mask[:, None] & (values < DV)[None, :]
                kr = tl.load(KR + atr_k, mask=kr_mask, other=0.0)
                kk = tl.load(K + atr_k, mask=kr_mask, other=0.0).to(tl.float32)
                q = tl.load(Q + atr_k, mask=kr_mask, other=0.0).to(tl.float32) * scale
                do = tl.load(DO + atr_v, mask=vr_mask, other=0.0).to(tl.float32)
                dr = tl.load(DR + atr_v, mask=vr_mask, other=0.0)
                tl.store(G_ALL + (head * NT + cr) * DK * DV + at_s, g, mask=s_mask)
                dr = dr + tl.dot(kr, g, input_precision="ieee")
                tl.store(DR + atr_v, dr, mask=vr_mask)
                g += tl.dot(tl.trans(q), do, input_precision="ieee")
                g -= tl.dot(tl.trans(kk), dr, input_precision="ieee")


@triton.jit
def _dr_grad_kernel(
    Q, K, BETA, DO, E, DR, S_ALL, G_ALL, DQ, DKEY, DBETA, T, NT, DK, DV, scale,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NEED_DQ: tl.constexpr, NEED_DK: tl.constexpr, NEED_DB: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    i = tl.arange(0, BLOCK_T)
    t = chunk * BLOCK_T + i
    t_mask = t < T
    row = head * T + t
    keys = tl.arange(0, BLOCK_K)
    at_k = row[:, None] * DK + keys[None, :]
    k_mask = t_mask[:, None] & (keys < DK)[None, :]
    base = (head * NT + chunk) * DK * DV
    w1 = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    w2 = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    acc_q = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    acc_y = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    acc_s = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for start in range(0, DV, BLOCK_V):
        values = start + tl.arange(0, BLOCK_V)
        at_v = row[:, None] * DV + values[None, :]
        v_mask = t_mask[:, None] & (values < DV)[None, :]
        # the states transposed: (V, K)
        at_s = base + keys[None, :] * DV + values[:, None]
        s_mask = (keys < DK)[None, :] & (values < DV)[:, None]
        e_t = tl.trans(tl.load(E + at_v, mask=v_mask, other=0.0))
        do = tl.load(DO + at_v, mask=v_mask, other=0.0).to(tl.float32)
        w1 += tl.dot(do, e_t, input_precision="ieee")
        if NEED_DQ or NEED_DK:
            s = tl.load(S_ALL + at_s, mask=s_mask, other=0.0)
            if NEED_DQ:
                acc_q += tl.dot(do, s, input_precision="ieee")
        if NEED_DK or NEED_DB:
            g = tl.load(G_ALL + at_s, mask=s_mask, other=0.0)
            acc_y += tl.dot(tl.trans(e_t), g, input_precision="ieee")
            dr = tl.load(DR + at_v, mask=v_mask, other=0.0)
            w2 += tl.dot(dr, e_t, input_precision="ieee")
            if NEED_DK:
                acc_s += tl.dot(dr, s, input_precision="ieee")
    w1 = tl.where(i[:, None] >= i[None, :], w1, 0.0)
    k = tl.load(K + at_k, mask=k_mask, other=0.0).to(tl.float32)
    beta = tl.load(BETA + row, mask=t_mask, other=0.0).to(tl.float32)
    if NEED_DQ:
        dq = (acc_q + tl.dot(w1 * beta[None, :], k, input_precision="ieee")) * scale
        tl.store(DQ + at_k, dq, mask=k_mask)
    if NEED_DK or NEED_DB:
        w2 = tl.where(i[:, None] > i[None, :], w2, 0.0)
        q = tl.load(Q + at_k, mask=k_mask, other=0.0).to(tl.float32) * scale
        y = acc_y + tl.dot(tl.trans(w1), q, input_precision="ieee")
        y = y - tl.dot(tl.trans(w2), k, input_precision="ieee")
        if NEED_DB:
            tl.store(DBETA + row, tl.sum(k * y, axis=1), mask=t_mask)
        if NEED_DK:
            dk = y * beta[:, None] - acc_s - tl.dot(w2 * beta[None, :], k, input_precision="ieee")
            tl.store(DKEY + at_k, dk, mask=k_mask)


def backward(saved, grad_o, needs=None):
    q, k, v, beta, o, scale = saved
    needs = needs or (True,) * 4
    need_dq, need_dk, need_dv, need_db = (bool(n) for n in needs)
    need_f = need_dq or need_dk or need_db
    need_r = need_dk or need_dv or need_db
    if not (need_f or need_r):
        return None, None, None, None
    B, H, T, K = k.shape
    V = v.shape[-1]
    q, k, v, beta, do = (x.contiguous() for x in (q, k, v, beta, grad_o))
    if scale is None:
        scale = K**-0.5
    heads = B * H
    BLOCK_T = 32
    BLOCK_K = max(16, triton.next_power_of_2(K))
    NT = triton.cdiv(T, BLOCK_T)
    dev = q.device
    mk = torch.empty((heads, T, K), device=dev, dtype=torch.float32)
    kr = torch.empty((heads, T, K), device=dev, dtype=torch.float32)
    e = torch.empty((heads, T, V), device=dev, dtype=torch.float32)
    dr = torch.empty((heads, T, V), device=dev, dtype=torch.float32)
    s_all = torch.empty((heads, NT, K, V), device=dev, dtype=torch.float32)
    g_all = torch.empty((heads, NT, K, V), device=dev, dtype=torch.float32)
    BLOCK_W = max(16, min(32, triton.next_power_of_2(V)))
    _dr_prep_kernel[(NT, heads)](
        q, k, v, beta, do, mk, kr, e, dr, T, K, V, scale,
        BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_W, NEED_F=need_f, NEED_R=need_r, num_warps=4,
    )
    _dr_state_kernel[(triton.cdiv(V, 16), heads, 2)](
        q, k, beta, do, mk, kr, e, dr, s_all, g_all, T, NT, K, V, scale,
        BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K, BLOCK_V=16, NEED_F=need_f, NEED_R=need_r, num_warps=4,
    )
    dq = torch.empty((B, H, T, K), device=dev, dtype=q.dtype) if need_dq else None
    dk = torch.empty((B, H, T, K), device=dev, dtype=k.dtype) if need_dk else None
    dbeta = torch.empty((B, H, T), device=dev, dtype=beta.dtype) if need_db else None
    if need_f:
        _dr_grad_kernel[(NT, heads)](
            q, k, beta, do, e, dr, s_all, g_all,
            dq if need_dq else e, dk if need_dk else e, dbeta if need_db else e,
            T, NT, K, V, scale,
            BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_W,
            NEED_DQ=need_dq, NEED_DK=need_dk, NEED_DB=need_db, num_warps=4,
        )
    dv = dr.view(B, H, T, V).to(v.dtype) if need_dv else None
    return dq, dk, dv, dbeta
