# --- backward ---
@triton.jit
def _dr_prepare(
    Q, K, BETA, DO, TI, DU, T, NT, scale, KD, VD,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NEEDS_DU: tl.constexpr,
):
    # One chunk: TI = (I + diag(beta) strict_lower(K K^T))^-1 and DU = scale tril(Q K^T)^T dO.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    t = chunk * C + rows
    in_t = t < T
    keys = tl.arange(0, BK)
    at = head * T + t
    tk_mask = in_t[:, None] & (keys < KD)[None, :]
    k = tl.load(K + at[:, None] * KD + keys[None, :], mask=tk_mask, other=0.0).to(tl.float32)
    beta = tl.load(BETA + at, mask=in_t, other=0.0).to(tl.float32)
    i = rows[:, None]
    j = rows[None, :]
    gram = tl.dot(k, tl.trans(k), input_precision="ieee")
    a = tl.where(i > j, -beta[:, None] * gram, 0.0)
    for r in range(1, C):
        row = tl.sum(tl.where(i == r, a, 0.0), axis=0)
        row = row + tl.sum(row[:, None] * a, axis=0)
        a = tl.where(i == r, row[None, :], a)
    a = tl.where(i == j, 1.0, a)
    tl.store(TI + (head * NT + chunk) * C * C + i * C + j, a)
    if NEEDS_DU:
        q = tl.load(Q + at[:, None] * KD + keys[None, :], mask=tk_mask, other=0.0).to(tl.float32)
        # Rows are keys, columns are queries: a query sees its own key and those before.
        p = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        p = tl.where(i <= j, p, 0.0)
        for first in range(0, VD, BV):
            values = first + tl.arange(0, BV)
            tv_mask = in_t[:, None] & (values < VD)[None, :]
            tv = at[:, None] * VD + values[None, :]
            do = tl.load(DO + tv, mask=tv_mask, other=0.0).to(tl.float32)
            tl.store(DU + tv, tl.dot(p, do, input_precision="ieee"), mask=tv_mask)


@triton.jit
def _dr_states(
    K, V, BETA, TI, U, HS, T, NT, KD, VD,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    # A tile of V of one head: the state before every chunk and u = beta * error.
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    keys = tl.arange(0, BK)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    kv = keys[:, None] * VD + values[None, :]
    kv_mask = (keys < KD)[:, None] & (values < VD)[None, :]
    square = rows[:, None] * C + rows[None, :]
    state = tl.zeros((BK, BV), tl.float32)
    for chunk in range(0, NT):
        t = chunk * C + rows
        in_t = t < T
        at = head * T + t
        tk_mask = in_t[:, None] & (keys < KD)[None, :]
        tv_mask = in_t[:, None] & (values < VD)[None, :]
        tv = at[:, None] * VD + values[None, :]
        k = tl.load(K + at[:, None] * KD + keys[None, :], mask=tk_mask, other=0.0).to(tl.float32)
        v = tl.load(V + tv, mask=tv_mask, other=0.0).to(tl.float32)
        beta = tl.load(BETA + at, mask=in_t, other=0.0).to(tl.float32)
        ti = tl.load(TI + (head * NT + chunk) * C * C + square)
        tl.store(HS + (head * NT + chunk) * KD * VD + kv, state, mask=kv_mask)
        x = beta[:, None] * (v - tl.dot(k, state, input_precision="ieee"))
        u = tl.dot(ti, x, input_precision="ieee")
        tl.store(U + tv, u, mask=tv_mask)
        state += tl.dot(tl.trans(k), u, input_precision="ieee")


@triton.jit
def _dr_reverse(
    Q, K, BETA, DO, TI, DU, DX, DVV, DHS, T, NT, scale, KD, VD,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NEEDS_V: tl.constexpr, NEEDS_REST: tl.constexpr,
):
    # A tile of V of one head, backwards: dstate after every chunk, dx and dv.
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    keys = tl.arange(0, BK)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    kv = keys[:, None] * VD + values[None, :]
    kv_mask = (keys < KD)[:, None] & (values < VD)[None, :]
    square = rows[:, None] * C + rows[None, :]
    dstate = tl.zeros((BK, BV), tl.float32)
    for back in range(0, NT):
        chunk = NT - 1 - back
        t = chunk * C + rows
        in_t = t < T
        at = head * T + t
        tk_mask = in_t[:, None] & (keys < KD)[None, :]
        tv_mask = in_t[:, None] & (values < VD)[None, :]
        tk = at[:, None] * KD + keys[None, :]
        tv = at[:, None] * VD + values[None, :]
        q = tl.load(Q + tk, mask=tk_mask, other=0.0).to(tl.float32)
        k = tl.load(K + tk, mask=tk_mask, other=0.0).to(tl.float32)
        do = tl.load(DO + tv, mask=tv_mask, other=0.0).to(tl.float32)
        du = tl.load(DU + tv, mask=tv_mask, other=0.0)
        beta = tl.load(BETA + at, mask=in_t, other=0.0).to(tl.float32)
        ti = tl.load(TI + (head * NT + chunk) * C * C + square)
        if NEEDS_REST:
            tl.store(DHS + (head * NT + chunk) * KD * VD + kv, dstate, mask=kv_mask)
        du += tl.dot(k, dstate, input_precision="ieee")
        dx = tl.dot(tl.trans(ti), du, input_precision="ieee")
        dy = beta[:, None] * dx
        if NEEDS_REST:
            tl.store(DX + tv, dx, mask=tv_mask)
        if NEEDS_V:
            tl.store(DVV + tv, dy, mask=tv_mask)
        dstate += tl.dot(tl.trans(q), do, input_precision="ieee") * scale
        dstate -= tl.dot(tl.trans(k), dy, input_precision="ieee")


@triton.jit
def _dr_gradients(
    Q, K, V, BETA, DO, U, DX, HS, DHS, DQQ, DKK, DBETA, T, NT, scale, KD, VD,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_B: tl.constexpr,
):
    # One chunk of one head: dq, dk, dbeta.
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    i = rows[:, None]
    j = rows[None, :]
    t = chunk * C + rows
    in_t = t < T
    at = head * T + t
    keys = tl.arange(0, BK)
    tk_mask = in_t[:, None] & (keys < KD)[None, :]
    tk = at[:, None] * KD + keys[None, :]
    dq = tl.zeros((C, BK), tl.float32)
    dk = tl.zeros((C, BK), tl.float32)
    z = tl.zeros((C, BK), tl.float32)
    p = tl.zeros((C, C), tl.float32)
    r = tl.zeros((C, C), tl.float32)
    dbeta = tl.zeros((C,), tl.float32)
    states = (head * NT + chunk) * KD * VD
    for first in range(0, VD, BV):
        values = first + tl.arange(0, BV)
        tv_mask = in_t[:, None] & (values < VD)[None, :]
        tv = at[:, None] * VD + values[None, :]
        kv = keys[:, None] * VD + values[None, :]
        kv_mask = (keys < KD)[:, None] & (values < VD)[None, :]
        u = tl.load(U + tv, mask=tv_mask, other=0.0)
        state = tl.load(HS + states + kv, mask=kv_mask, other=0.0)
        if NEEDS_Q or NEEDS_K:
            do = tl.load(DO + tv, mask=tv_mask, other=0.0).to(tl.float32)
            p += tl.dot(do, tl.trans(u), input_precision="ieee")
            if NEEDS_Q:
                dq += tl.dot(do, tl.trans(state), input_precision="ieee")
        if NEEDS_K or NEEDS_B:
            dx = tl.load(DX + tv, mask=tv_mask, other=0.0)
            r += tl.dot(dx, tl.trans(u), input_precision="ieee")
            z += tl.dot(dx, tl.trans(state), input_precision="ieee")
            if NEEDS_B:
                v = tl.load(V + tv, mask=tv_mask, other=0.0).to(tl.float32)
                dbeta += tl.sum(dx * v, axis=1)
            if NEEDS_K:
                dstate = tl.load(DHS + states + kv, mask=kv_mask, other=0.0)
                dk += tl.dot(u, tl.trans(dstate), input_precision="ieee")
    k = tl.load(K + tk, mask=tk_mask, other=0.0).to(tl.float32)
    p = tl.where(i >= j, p, 0.0) * scale
    if NEEDS_Q:
        dq = dq * scale + tl.dot(p, k, input_precision="ieee")
        tl.store(DQQ + tk, dq, mask=tk_mask)
    if NEEDS_K or NEEDS_B:
        r = tl.where(i > j, r, 0.0)
        z += tl.dot(r, k, input_precision="ieee")
        if NEEDS_B:
            tl.store(DBETA + at, dbeta - tl.sum(k * z, axis=1), mask=in_t)
        if NEEDS_K:
            q = tl.load(Q + tk, mask=tk_mask, other=0.0).to(tl.float32)
            beta = tl.load(BETA + at, mask=in_t, other=0.0).to(tl.float32)
            dk -= beta[:, None] * z
            dk += tl.dot(tl.trans(p), q, input_precision="ieee")
            dk -= tl.dot(tl.trans(r * beta[:, None]), k, input_precision="ieee")
            tl.store(DKK + tk, dk, mask=tk_mask)


def backward(saved, grad_o, needs=None):
    q, k, v, beta, o, scale = saved
    needs = needs or (True,) * 4
    needs_q, needs_k, needs_v, needs_b = (bool(n) for n in needs)
    if not (needs_q or needs_k or needs_v or needs_b):
        return None, None, None, None
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    do = grad_o.contiguous()
    B, H, T, KD = k.shape
    VD = v.shape[-1]
    scale = KD**-0.5 if scale is None else scale
    C = 32
    BK = max(16, triton.next_power_of_2(KD))
    NT = triton.cdiv(T, C)
    heads = B * H
    rest = needs_q or needs_k or needs_b
    walk = needs_k or needs_v or needs_b
    inverse = torch.empty((heads, NT, C, C), device=q.device, dtype=torch.float32)
    du = torch.empty((heads, T, VD), device=q.device, dtype=torch.float32) if walk else inverse
    _dr_prepare[(NT, heads)](
        q, k, beta, do, inverse, du, T, NT, scale, KD, VD,
        C=C, BK=BK, BV=32, NEEDS_DU=walk, num_warps=4,
    )
    u = states = inverse
    if rest:
        u = torch.empty((heads, T, VD), device=q.device, dtype=torch.float32)
        states = torch.empty((heads, NT, KD, VD), device=q.device, dtype=torch.float32)
        _dr_states[(triton.cdiv(VD, 16), heads)](
            k, v, beta, inverse, u, states, T, NT, KD, VD, C=C, BK=BK, BV=16, num_warps=4
        )
    dv = torch.empty_like(v) if needs_v else None
    dx = dstates = inverse
    if walk:
        others = needs_k or needs_b
        if others:
            dx = torch.empty((heads, T, VD), device=q.device, dtype=torch.float32)
            dstates = torch.empty((heads, NT, KD, VD), device=q.device, dtype=torch.float32)
        _dr_reverse[(triton.cdiv(VD, 16), heads)](
            q, k, beta, do, inverse, du, dx, dv if needs_v else inverse, dstates, T, NT, scale, KD, VD,
            C=C, BK=BK, BV=16, NEEDS_V=needs_v, NEEDS_REST=others, num_warps=4,
        )
    dq = torch.empty_like(q) if needs_q else None
    dk = torch.empty_like(k) if needs_k else None
    dbeta = torch.empty_like(beta) if needs_b else None
    if rest:
        _dr_gradients[(NT, heads)](
            q, k, v, beta, do, u, dx, states, dstates,
            dq if needs_q else inverse, dk if needs_k else inverse, dbeta if needs_b else inverse,
            T, NT, scale, KD, VD,
            C=C, BK=BK, BV=32, NEEDS_Q=needs_q, NEEDS_K=needs_k, NEEDS_B=needs_b, num_warps=4,
        )
    return dq, dk, dv, dbeta
