# --- backward ---
@triton.jit
def _scan_softplus(raw):
    return tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))


@triton.jit
def _scan_combine(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _scan_local_kernel(
    U, DELTA, A, B, C, Z, BIAS, DY, HS, RS, PS, L, CHANNELS, NCH, dy_b, dy_l, dy_c,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr
):
    batch = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    states = tl.arange(0, BLOCK_N)
    c_mask, n_mask = channels < CHANNELS, states < N
    cn_mask = c_mask[:, None] & n_mask[None, :]
    cn_off = channels[:, None] * N + states[None, :]
    a = tl.load(A + cn_off, mask=cn_mask, other=0.0)
    bias = tl.load(BIAS + channels, mask=c_mask, other=0.0)
    h = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
    r = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
    p = tl.full((BLOCK_C, BLOCK_N), 1.0, tl.float32)
    dy_base = DY + batch * dy_b + channels.to(tl.int64) * dy_c
    for t in range(chunk * BLOCK_T, tl.minimum(L, chunk * BLOCK_T + BLOCK_T)):
        at = batch * L + t
        u = tl.load(U + at * CHANNELS + channels, mask=c_mask, other=0.0).to(tl.float32)
        z = tl.load(Z + at * CHANNELS + channels, mask=c_mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_base + (at - batch * L) * dy_l, mask=c_mask, other=0.0).to(tl.float32)
        raw = tl.load(DELTA + at * CHANNELS + channels, mask=c_mask, other=0.0).to(tl.float32) + bias
        step = _scan_softplus(raw)
        b = tl.load(B + at * N + states, mask=n_mask, other=0.0).to(tl.float32)
        c = tl.load(C + at * N + states, mask=n_mask, other=0.0).to(tl.float32)
        e = tl.exp(step[:, None] * a)
        h = e * h + (step * u)[:, None] * b[None, :]
        p = p * e
        r += p * ((dy * z * tl.sigmoid(z))[:, None] * c[None, :])
    out = (batch * NCH + chunk) * CHANNELS * N + cn_off
    tl.store(HS + out, h, mask=cn_mask)
    tl.store(RS + out, r, mask=cn_mask)
    tl.store(PS + out, p, mask=cn_mask)


@triton.jit
def _scan_chunks_kernel(HS, RS, PS, NCH, SIZE, BLOCK: tl.constexpr):
    # Turns the local values into the state that enters a chunk and the gradient that enters it from behind.
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    carry = tl.zeros((BLOCK,), tl.float32)
    back = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, NCH):
        f = (batch * NCH + i) * SIZE + at
        g = (batch * NCH + (NCH - 1 - i)) * SIZE + at
        h = tl.load(HS + f, mask=mask, other=0.0)
        pf = tl.load(PS + f, mask=mask, other=0.0)
        r = tl.load(RS + g, mask=mask, other=0.0)
        pg = tl.load(PS + g, mask=mask, other=0.0)
        tl.store(HS + f, carry, mask=mask)
        tl.store(RS + g, back, mask=mask)
        carry = pf * carry + h
        back = pg * back + r


@triton.jit
def _scan_bwd_kernel(
    U, DELTA, A, B, C, D, Z, BIAS, DY, HS, RS, DU, DDELTA, DZ, PA, PB, PC, PD, PBIAS,
    L, CHANNELS, NCH, BATCH, dy_b, dy_l, dy_c,
    N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    NEED_U: tl.constexpr, NEED_DELTA: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr,
    NEED_C: tl.constexpr, NEED_D: tl.constexpr, NEED_Z: tl.constexpr, NEED_BIAS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.arange(0, BLOCK_T)
    ts = chunk * BLOCK_T + rows
    c_mask, t_mask = channels < CHANNELS, ts < L
    mask = t_mask[:, None] & c_mask[None, :]
    p_mask = ((ts > 0) & (ts - 1 < L))[:, None] & c_mask[None, :]
    n_mask = (ts + 1 < L)[:, None] & c_mask[None, :]
    off = (batch * L + ts)[:, None] * CHANNELS + channels[None, :]
    bias = tl.load(BIAS + channels, mask=c_mask, other=0.0)
    u = tl.load(U + off, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(U + off - CHANNELS, mask=p_mask, other=0.0).to(tl.float32)
    raw = tl.load(DELTA + off, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    rawp = tl.load(DELTA + off - CHANNELS, mask=p_mask, other=0.0).to(tl.float32) + bias[None, :]
    rawn = tl.load(DELTA + off + CHANNELS, mask=n_mask, other=0.0).to(tl.float32) + bias[None, :]
    step = tl.where(mask, _scan_softplus(raw), 0.0)
    stepp = tl.where(p_mask, _scan_softplus(rawp), 0.0)
    stepn = tl.where(n_mask, _scan_softplus(rawn), 0.0)
    z = tl.load(Z + off, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(
        DY + batch * dy_b + ts[:, None] * dy_l + channels[None, :].to(tl.int64) * dy_c, mask=mask, other=0.0
    ).to(tl.float32)
    sig = tl.sigmoid(z)
    g = dy * z * sig
    xu = step * u
    xup = stepp * up
    first = (rows == 0)[:, None]
    last = (rows == BLOCK_T - 1)[:, None]

    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    dx = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    ds = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    cn_base = (batch * NCH + chunk) * CHANNELS * N + channels * N
    tn_base = (batch * L + ts) * N
    part = (block * BATCH * L + batch * L + ts) * N
    for n in range(0, N):
        a = tl.load(A + channels * N + n, mask=c_mask, other=0.0)
        h0 = tl.load(HS + cn_base + n, mask=c_mask, other=0.0)
        r0 = tl.load(RS + cn_base + n, mask=c_mask, other=0.0)
        b = tl.load(B + tn_base + n, mask=t_mask, other=0.0).to(tl.float32)
        bp = tl.load(B + tn_base - N + n, mask=(ts > 0) & (ts - 1 < L), other=0.0).to(tl.float32)
        c = tl.load(C + tn_base + n, mask=t_mask, other=0.0).to(tl.float32)
        e = tl.exp(step * a[None, :])
        ep = tl.where(first, 1.0, tl.exp(stepp * a[None, :]))
        en = tl.where(last, 1.0, tl.exp(step * a[None, :]))
        xp = tl.where(first, h0[None, :], xup * bp[:, None])
        _, hp = tl.associative_scan((ep, xp), 0, _scan_combine)
        eh = e * hp
        h = eh + xu * b[:, None]
        y += h * c[:, None]
        gc = g * c[:, None] + tl.where(last, r0[None, :], 0.0)
        _, dh = tl.associative_scan((en, gc), 0, _scan_combine, reverse=True)
        dx += dh * b[:, None]
        w = dh * eh
        ds += w * a[None, :]
        if NEED_C:
            tl.store(PC + part + n, tl.sum(g * h, axis=1), mask=t_mask)
        if NEED_B:
            tl.store(PB + part + n, tl.sum(dh * xu, axis=1), mask=t_mask)
        if NEED_A:
            tl.store(PA + cn_base + n, tl.sum(w * step, axis=0), mask=c_mask)

    d = tl.load(D + channels, mask=c_mask, other=0.0)
    out = (batch * NCH + chunk) * CHANNELS + channels
    if NEED_U:
        tl.store(DU + off, g * d[None, :] + step * dx, mask=mask)
    if NEED_Z:
        tl.store(DZ + off, dy * (y + d[None, :] * u) * sig * (1.0 + z * (1.0 - sig)), mask=mask)
    if NEED_D:
        tl.store(PD + out, tl.sum(g * u, axis=0), mask=c_mask)
    if NEED_DELTA or NEED_BIAS:
        ex = tl.exp(tl.minimum(raw, 20.0))
        dd = tl.where(mask, (ds + u * dx) * tl.where(raw > 20.0, 1.0, ex / (1.0 + ex)), 0.0)
        if NEED_DELTA:
            tl.store(DDELTA + off, dd, mask=mask)
        if NEED_BIAS:
            tl.store(PBIAS + out, tl.sum(dd, axis=0), mask=c_mask)


def backward(saved, grad_y, needs=None):
    u, delta, A, B, C, D, z, bias, y = saved
    needs = needs or (True,) * 8
    if not any(needs):
        return (None,) * 8
    nu, ndelta, nA, nB, nC, nD, nz, nbias = needs
    u, delta, z, B, C = (x.contiguous() for x in (u, delta, z, B, C))
    A, D, bias = A.contiguous(), D.contiguous(), bias.contiguous()
    batch, L, channels = u.shape
    N = A.shape[1]
    dev, f32 = u.device, torch.float32
    BLOCK_T, BLOCK_C = 32, 64
    NCH = triton.cdiv(L, BLOCK_T)
    NB = triton.cdiv(channels, BLOCK_C)
    hs = torch.empty((batch * NCH, channels, N), dtype=f32, device=dev)
    rs = torch.empty((batch * NCH, channels, N), dtype=f32, device=dev)
    ps = torch.empty((batch * NCH, channels, N), dtype=f32, device=dev)
    du = torch.empty(u.shape, dtype=u.dtype, device=dev) if nu else None
    ddelta = torch.empty(delta.shape, dtype=delta.dtype, device=dev) if ndelta else None
    dz = torch.empty(z.shape, dtype=z.dtype, device=dev) if nz else None
    pa = torch.empty((batch * NCH, channels, N), dtype=f32, device=dev) if nA else None
    pb = torch.empty((NB, batch, L, N), dtype=f32, device=dev) if nB else None
    pc = torch.empty((NB, batch, L, N), dtype=f32, device=dev) if nC else None
    pd = torch.empty((batch * NCH, channels), dtype=f32, device=dev) if nD else None
    pbias = torch.empty((batch * NCH, channels), dtype=f32, device=dev) if nbias else None
    dy_b, dy_l, dy_c = grad_y.stride()
    LOCAL_C = 32
    _scan_local_kernel[(triton.cdiv(channels, LOCAL_C), NCH, batch)](
        u, delta, A, B, C, z, bias, grad_y, hs, rs, ps, L, channels, NCH, dy_b, dy_l, dy_c,
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        BLOCK_C=LOCAL_C,
        BLOCK_T=BLOCK_T,
        num_warps=2,
    )
    _scan_chunks_kernel[(triton.cdiv(channels * N, 256), batch)](
        hs, rs, ps, NCH, channels * N, BLOCK=256, num_warps=4
    )
    _scan_bwd_kernel[(NB, NCH, batch)](
        u, delta, A, B, C, D, z, bias, grad_y, hs, rs,
        du if nu else hs,
        ddelta if ndelta else hs,
        dz if nz else hs,
        pa if nA else hs,
        pb if nB else hs,
        pc if nC else hs,
        pd if nD else hs,
        pbias if nbias else hs,
        L, channels, NCH, batch, dy_b, dy_l, dy_c,
        N=N,
        BLOCK_C=BLOCK_C,
        BLOCK_T=BLOCK_T,
        NEED_U=nu,
        NEED_DELTA=ndelta,
        NEED_A=nA,
        NEED_B=nB,
        NEED_C=nC,
        NEED_D=nD,
        NEED_Z=nz,
        NEED_BIAS=nbias,
        num_warps=4,
    )
    dA = pa.sum(0) if nA else None
    dB = pb.sum(0).to(B.dtype) if nB else None
    dC = pc.sum(0).to(C.dtype) if nC else None
    dD = pd.sum(0) if nD else None
    dbias = pbias.sum(0) if nbias else None
    return du, ddelta, dA, dB, dC, dD, dz, dbias
