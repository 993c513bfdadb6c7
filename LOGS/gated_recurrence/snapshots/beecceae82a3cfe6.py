# --- backward ---
@triton.jit
def _gated_borders(
    A, X, W, INIT, OUT, LAST, H, T, i_b, i_h, i_k, i_v, x_b, x_h, x_t, x_v,
    HAS_INIT: tl.constexpr, HAS_X: tl.constexpr, REVERSE: tl.constexpr, STORE_OUT: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Forward: the state at the start of every chunk. Reverse: the state's cotangent at the end of every chunk.
    head = tl.program_id(1).to(tl.int64)
    kk = tl.arange(0, BLOCK_K)
    vv = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = kk < DK, vv < DV
    in_kv = in_k[:, None] & in_v[None, :]
    wide_v = vv.to(tl.int64)
    kv = kk[:, None] * DV + vv[None, :]
    row = tl.arange(0, CHUNK)
    chunks = tl.cdiv(T, CHUNK)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_INIT:
        at = (head // H) * i_b + (head % H) * i_h + kk.to(tl.int64)[:, None] * i_k + wide_v[None, :] * i_v
        state = tl.load(INIT + at, mask=in_kv, other=0.0).to(tl.float32)
    X += (head // H) * x_b + (head % H) * x_h
    for step in range(0, chunks):
        c = step
        if REVERSE:
            c = chunks - 1 - step
        if STORE_OUT:
            tl.store(OUT + (head * chunks + c) * DK * DV + kv, state, mask=in_kv)
        t = c * CHUNK + row
        near = t + 1
        near_ok = (row + 1 < CHUNK) & (near < T)
        if REVERSE:
            near = t - 1
            near_ok = (row > 0) & (near < T)
        here = (t < T)[:, None] & in_k[None, :]
        a = tl.load(A + (head * T + t)[:, None] * DK + kk[None, :], mask=here, other=0.0).to(tl.float32)
        w = tl.load(W + (head * T + t)[:, None] * DK + kk[None, :], mask=here, other=0.0).to(tl.float32)
        w_near = tl.load(
            W + (head * T + near)[:, None] * DK + kk[None, :], mask=near_ok[:, None] & in_k[None, :], other=0.0
        ).to(tl.float32)
        # The decay between a step and the border that the chunk leads to.
        if REVERSE:
            far = tl.exp(tl.cumsum(w_near, 0))
        else:
            far = tl.exp(tl.cumsum(w_near, 0, reverse=True))
        state = tl.exp(tl.sum(w, 0))[:, None] * state
        if HAS_X:
            x_ok = (t < T)[:, None] & in_v[None, :]
            x = tl.load(X + t.to(tl.int64)[:, None] * x_t + wide_v[None, :] * x_v, mask=x_ok, other=0.0)
            state += tl.dot(tl.trans(a * far), x.to(tl.float32), input_precision="ieee")
    if REVERSE:
        tl.store(LAST + head * DK * DV + kv, state, mask=in_kv)


@triton.jit
def _gated_chunk_grads(
    R, K, V, W, U, DO, STATES, COTS, DR, DKEY, DVAL, DW, DUP, H, T, g_b, g_h, g_t, g_v,
    HAS_DO: tl.constexpr, NEEDS_R: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
    NEEDS_W: tl.constexpr, NEEDS_U: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    border = head * tl.num_programs(0) + tl.program_id(0)
    first = tl.program_id(0) * CHUNK
    kk = tl.arange(0, BLOCK_K)
    in_k = kk < DK
    row = tl.arange(0, CHUNK)
    t = first + row
    in_t = t < T
    here = in_t[:, None] & in_k[None, :]
    at_k = (head * T + t)[:, None] * DK + kk[None, :]
    DO += (head // H) * g_b + (head % H) * g_h

    r = tl.load(R + at_k, mask=here, other=0.0).to(tl.float32)
    k = tl.load(K + at_k, mask=here, other=0.0).to(tl.float32)
    u = tl.load(U + (head % H) * DK + kk, mask=in_k, other=0.0).to(tl.float32)
    before = (row > 0) & in_t
    w_before = tl.load(W + (at_k - DK), mask=before[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    after = (row + 1 < CHUNK) & (t + 1 < T)
    w_after = tl.load(W + (at_k + DK), mask=after[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    suffix = tl.exp(tl.cumsum(w_after, 0, reverse=True))

    p = tl.zeros((CHUNK, CHUNK), tl.float32)
    h = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    gv = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    cross = tl.zeros((BLOCK_K,), tl.float32)
    v_do = tl.zeros((CHUNK,), tl.float32)
    for v0 in range(0, DV, BLOCK_V):
        vv = v0 + tl.arange(0, BLOCK_V)
        in_v = vv < DV
        tv_ok = in_t[:, None] & in_v[None, :]
        in_kv = in_k[:, None] & in_v[None, :]
        kv = border * DK * DV + kk[:, None] * DV + vv[None, :]
        v = tl.load(V + (head * T + t)[:, None] * DV + vv[None, :], mask=tv_ok, other=0.0).to(tl.float32)
        if HAS_DO:
            g_at = t.to(tl.int64)[:, None] * g_t + vv.to(tl.int64)[None, :] * g_v
            do = tl.load(DO + g_at, mask=tv_ok, other=0.0).to(tl.float32)
            v_do += tl.sum(v * do, 1)
            p += tl.dot(do, tl.trans(v), input_precision="ieee")
            if NEEDS_R or NEEDS_W:
                s0 = tl.load(STATES + kv, mask=in_kv, other=0.0)
                h += tl.dot(do, tl.trans(s0), input_precision="ieee")
        if NEEDS_K or NEEDS_W:
            g1 = tl.load(COTS + kv, mask=in_kv, other=0.0)
            gv += tl.dot(v, tl.trans(g1), input_precision="ieee")
            if NEEDS_W:
                cross += tl.sum(tl.load(STATES + kv, mask=in_kv, other=0.0) * g1, 1)

    dr = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    a = tl.zeros((CHUNK, CHUNK), tl.float32)
    for i in range(0, tl.minimum(CHUNK, T - first)):
        at = (head * T + first + i) * DK + kk
        k_i = tl.load(K + at, mask=in_k, other=0.0).to(tl.float32)
        e_i = tl.exp(tl.load(W + at, mask=in_k, other=0.0).to(tl.float32))
        is_i = row == i
        p_i = tl.sum(tl.where(is_i[None, :], p, 0.0), 1)
        # r of the later steps, decayed back to just after step i.
        decay = tl.exp(tl.cumsum(tl.where((row > i + 1)[:, None], w_before, 0.0), 0))
        rd = tl.where((row > i)[:, None], r * decay, 0.0)
        if NEEDS_R:
            dr = tl.where(is_i[:, None], h, dr)
        if NEEDS_K:
            dk = tl.where(is_i[:, None], tl.sum(rd * p_i[:, None], 0)[None, :], dk)
        if NEEDS_V:
            a = tl.where(is_i[None, :], tl.sum(rd * k_i[None, :], 1)[:, None], a)
        if NEEDS_W:
            suffix_i = tl.sum(tl.where(is_i[:, None], suffix, 0.0), 0)
            gv_i = tl.sum(tl.where(is_i[:, None], gv, 0.0), 0)
            dw_i = e_i * (tl.sum(rd * h, 0) + suffix_i * cross)
            tl.store(DW + at, dw_i, mask=in_k)
            cross = e_i * cross + k_i * gv_i
        if NEEDS_R or NEEDS_W:
            h = e_i[None, :] * h + k_i[None, :] * p_i[:, None]

    if NEEDS_R:
        tl.store(DR + at_k, dr + u[None, :] * k * v_do[:, None], mask=here)
    if NEEDS_K:
        tl.store(DKEY + at_k, dk + suffix * gv + u[None, :] * r * v_do[:, None], mask=here)
    if NEEDS_U:
        tl.store(DUP + border * DK + kk, tl.sum(r * k * v_do[:, None], 0), mask=in_k)
    if NEEDS_V:
        own = tl.sum(u[None, :] * r * k, 1)
        faded = k * suffix
        for v0 in range(0, DV, BLOCK_V):
            vv = v0 + tl.arange(0, BLOCK_V)
            in_v = vv < DV
            tv_ok = in_t[:, None] & in_v[None, :]
            kv = border * DK * DV + kk[:, None] * DV + vv[None, :]
            g1 = tl.load(COTS + kv, mask=in_k[:, None] & in_v[None, :], other=0.0)
            dv = tl.dot(faded, g1, input_precision="ieee")
            if HAS_DO:
                g_at = t.to(tl.int64)[:, None] * g_t + vv.to(tl.int64)[None, :] * g_v
                do = tl.load(DO + g_at, mask=tv_ok, other=0.0).to(tl.float32)
                dv += tl.dot(tl.trans(a), do, input_precision="ieee") + own[:, None] * do
            tl.store(DVAL + (head * T + t)[:, None] * DV + vv[None, :], dv, mask=tv_ok)


def backward(saved, grad_o, grad_final_state, needs=None):
    r, k, v, w, u, initial_state, o, final_state = saved
    need_r, need_k, need_v, need_w, need_u, need_i = needs or (True,) * 6
    r, k, v, w, u, initial_state = (x.contiguous() for x in (r, k, v, w, u, initial_state))
    B, H, T, K = k.shape
    V = v.shape[-1]
    CHUNK = 16
    chunks = triton.cdiv(T, CHUNK)
    BLOCK_K = max(16, triton.next_power_of_2(K))
    BLOCK_V = max(16, min(64, triton.next_power_of_2(V)))
    SLAB = min(32, BLOCK_V)
    has_do, has_df = grad_o is not None, grad_final_state is not None
    do = grad_o if has_do else v
    df = grad_final_state if has_df else initial_state
    dr, dk, dv, dw = torch.empty_like(r), torch.empty_like(k), torch.empty_like(v), torch.empty_like(w)
    dinitial = torch.empty_like(initial_state)
    with_states = bool((need_r and has_do) or need_w)
    with_cots = bool(need_k or need_v or need_w)
    states = cots = dinitial
    if with_states:
        states = torch.empty((B, H, chunks, K, V), dtype=torch.float32, device=k.device)
        _gated_borders[(triton.cdiv(V, SLAB), B * H)](
            k, v, w, initial_state, states, dinitial, H, T, *initial_state.stride(), *v.stride(),
            HAS_INIT=True, HAS_X=True, REVERSE=False, STORE_OUT=True,
            DK=K, DV=V, CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=SLAB, num_warps=4,
        )  # fmt: skip
    if with_cots or need_i:
        if with_cots:
            cots = torch.empty((B, H, chunks, K, V), dtype=torch.float32, device=k.device)
        _gated_borders[(triton.cdiv(V, SLAB), B * H)](
            r, do, w, df, cots, dinitial, H, T, *df.stride(), *do.stride(),
            HAS_INIT=has_df, HAS_X=has_do, REVERSE=True, STORE_OUT=with_cots,
            DK=K, DV=V, CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=SLAB, num_warps=4,
        )  # fmt: skip
    du = None
    if need_r or need_k or need_v or need_w or need_u:
        du_parts = torch.empty((B, H, chunks, K), dtype=torch.float32, device=k.device)
        _gated_chunk_grads[(chunks, B * H)](
            r, k, v, w, u, do, states, cots, dr, dk, dv, dw, du_parts, H, T, *do.stride(),
            HAS_DO=has_do, NEEDS_R=bool(need_r), NEEDS_K=bool(need_k), NEEDS_V=bool(need_v),
            NEEDS_W=bool(need_w), NEEDS_U=bool(need_u),
            DK=K, DV=V, CHUNK=CHUNK, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4,
        )  # fmt: skip
        if need_u:
            du = du_parts.sum((0, 2)).to(u.dtype)
    return (
        dr if need_r else None,
        dk if need_k else None,
        dv if need_v else None,
        dw if need_w else None,
        du,
        dinitial if need_i else None,
    )
