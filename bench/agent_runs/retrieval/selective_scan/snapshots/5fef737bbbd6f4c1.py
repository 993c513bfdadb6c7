# --- backward ---
@triton.jit
def _ss_after(decay1, state1, decay2, state2):
    return decay1 * decay2, decay2 * state1 + state2


@triton.jit
def _ss_kept(decay1, kept1, state1, decay2, kept2, state2):
    passed = decay2 * state1
    return decay1 * decay2, passed + kept2, passed + state2


@triton.jit
def _ss_back(decay1, but1, dh1, r1, decay2, but2, dh2, r2):
    # Element 1 is later in time. r: gradient of the state before a step; but: the decays without the last step's.
    return decay1 * decay2, decay1 * but2, but2 * r1 + dh2, decay2 * r1 + r2


@triton.jit
def _ss_step(raw):
    return tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))


@triton.jit
def _ss_local_kernel(
    DY, U, DELTA, A, B, C, Z, BIAS, H, R, STEPS, L, NT, CHANNELS, dy_b, dy_t, dy_c, N,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = channels < CHANNELS
    i = tl.arange(0, BLOCK_T)
    t = chunk * BLOCK_T + i
    t_mask = t < L
    mask = t_mask[:, None] & c_mask[None, :]
    row = batch * L + t
    at = row[:, None] * CHANNELS + channels[None, :]
    bias = tl.load(BIAS + channels, mask=c_mask, other=0.0).to(tl.float32)
    u = tl.load(U + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(Z + at, mask=mask, other=0.0).to(tl.float32)
    dy_at = batch * dy_b + t.to(tl.int64)[:, None] * dy_t + channels.to(tl.int64)[None, :] * dy_c
    dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(DELTA + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    step = tl.where(mask, _ss_step(raw), 0.0)
    next_mask = ((t + 1 < L) & (i + 1 < BLOCK_T))[:, None] & c_mask[None, :]
    raw_next = tl.load(DELTA + at + CHANNELS, mask=next_mask, other=0.0).to(tl.float32) + bias[None, :]
    step_next = tl.where(next_mask, _ss_step(raw_next), 0.0)
    before = tl.cumsum(step, axis=0)
    behind = tl.cumsum(step_next, axis=0, reverse=True)
    g = dy * (z * tl.sigmoid(z))
    su = step * u
    tl.store(STEPS + (batch * NT + chunk) * CHANNELS + channels, tl.sum(step, axis=0), mask=c_mask)
    for n in range(0, N):
        a = tl.load(A + channels * N + n, mask=c_mask, other=0.0).to(tl.float32)
        b = tl.load(B + row * N + n, mask=t_mask, other=0.0).to(tl.float32)
        c = tl.load(C + row * N + n, mask=t_mask, other=0.0).to(tl.float32)
        h = tl.sum(su * b[:, None] * tl.exp(behind * a[None, :]), axis=0)
        r = tl.sum(g * c[:, None] * tl.exp(before * a[None, :]), axis=0)
        to = ((batch * NT + chunk) * N + n) * CHANNELS + channels
        tl.store(H + to, h, mask=c_mask)
        tl.store(R + to, r, mask=c_mask)


@triton.jit
def _ss_chain_kernel(A, H, R, STEPS, NT, CHANNELS, N, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    batch = (tl.program_id(2) // 2).to(tl.int64)
    n = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = channels < CHANNELS
    i = tl.arange(0, BLOCK_T)
    a = tl.load(A + channels * N + n, mask=c_mask, other=0.0).to(tl.float32)
    tiles = tl.cdiv(NT, BLOCK_T)
    if tl.program_id(2) % 2 == 0:
        h_carry = tl.zeros((BLOCK_C,), tl.float32)
        for tile in range(0, tiles):
            chunk = tile * BLOCK_T + i
            mask = (chunk < NT)[:, None] & c_mask[None, :]
            row = batch * NT + chunk
            steps = tl.load(STEPS + row[:, None] * CHANNELS + channels[None, :], mask=mask, other=0.0)
            at = (row[:, None] * N + n) * CHANNELS + channels[None, :]
            decay = tl.exp(steps * a[None, :])
            h = tl.load(H + at, mask=mask, other=0.0)
            h = h + tl.where((i == 0)[:, None], decay * h_carry[None, :], 0.0)
            _d, h = tl.associative_scan((decay, h), 0, _ss_after)
            tl.store(H + at, h, mask=mask)
            h_carry = tl.sum(tl.where((i == BLOCK_T - 1)[:, None], h, 0.0), axis=0)
    else:
        r_carry = tl.zeros((BLOCK_C,), tl.float32)
        for back in range(0, tiles):
            chunk_r = (tiles - 1 - back) * BLOCK_T + i
            mask_r = (chunk_r < NT)[:, None] & c_mask[None, :]
            row_r = batch * NT + chunk_r
            steps_r = tl.load(STEPS + row_r[:, None] * CHANNELS + channels[None, :], mask=mask_r, other=0.0)
            at_r = (row_r[:, None] * N + n) * CHANNELS + channels[None, :]
            decay_r = tl.exp(steps_r * a[None, :])
            r = tl.load(R + at_r, mask=mask_r, other=0.0)
            r = r + tl.where((i == BLOCK_T - 1)[:, None], decay_r * r_carry[None, :], 0.0)
            _e, r = tl.associative_scan((decay_r, r), 0, _ss_after, reverse=True)
            tl.store(R + at_r, r, mask=mask_r)
            r_carry = tl.sum(tl.where((i == 0)[:, None], r, 0.0), axis=0)


@triton.jit
def _ss_grad_kernel(
    DY, U, DELTA, A, B, C, D, Z, BIAS, H, R, DU, DDELTA, DZ, PA, PB, PC, PD, PBIAS,
    L, NT, CHANNELS, BATCHES, dy_b, dy_t, dy_c, N,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_C: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = channels < CHANNELS
    i = tl.arange(0, BLOCK_T)
    t = chunk * BLOCK_T + i
    t_mask = t < L
    mask = t_mask[:, None] & c_mask[None, :]
    first = (i == 0)[:, None]
    last = (i == BLOCK_T - 1)[:, None]
    row = batch * L + t
    at = row[:, None] * CHANNELS + channels[None, :]
    bias = tl.load(BIAS + channels, mask=c_mask, other=0.0).to(tl.float32)
    d = tl.load(D + channels, mask=c_mask, other=0.0).to(tl.float32)
    u = tl.load(U + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(Z + at, mask=mask, other=0.0).to(tl.float32)
    dy_at = batch * dy_b + t.to(tl.int64)[:, None] * dy_t + channels.to(tl.int64)[None, :] * dy_c
    dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(DELTA + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    step = tl.where(mask, _ss_step(raw), 0.0)
    g = dy * (z * tl.sigmoid(z))
    su = step * u
    ones = tl.full((BLOCK_T, BLOCK_C), 1.0, tl.float32)
    y = d[None, :] * u
    into = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    dstep = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    here = batch * NT + chunk
    part = (tl.program_id(0) * BATCHES + batch) * N
    for n in range(0, N):
        a = tl.load(A + channels * N + n, mask=c_mask, other=0.0).to(tl.float32)
        b = tl.load(B + row * N + n, mask=t_mask, other=0.0).to(tl.float32)
        c = tl.load(C + row * N + n, mask=t_mask, other=0.0).to(tl.float32)
        # The state behind the chunk before, and the gradient that the chunk behind hands back.
        h_in = tl.load(H + ((here - 1) * N + n) * CHANNELS + channels, mask=c_mask & (chunk > 0), other=0.0)
        r_in = tl.load(R + ((here + 1) * N + n) * CHANNELS + channels, mask=c_mask & (chunk + 1 < NT), other=0.0)
        decay = tl.exp(step * a[None, :])
        kept = tl.where(first, decay * h_in[None, :], 0.0)
        _t1, kept, h = tl.associative_scan((decay, kept, kept + su * b[:, None]), 0, _ss_kept)
        dh = g * c[:, None] + tl.where(last, r_in[None, :], 0.0)
        _t2, _t3, dh, _t4 = tl.associative_scan((decay, ones, dh, decay * dh), 0, _ss_back, reverse=True)
        ddecay = dh * kept
        y += h * c[:, None]
        into += dh * b[:, None]
        dstep += ddecay * a[None, :]
        if NEED_A:
            tl.store(PA + (here * N + n) * CHANNELS + channels, tl.sum(ddecay * step, axis=0), mask=c_mask)
        if NEED_B:
            tl.store(PB + (part + n) * L + t, tl.sum(dh * su, axis=1), mask=t_mask)
        if NEED_C:
            tl.store(PC + (part + n) * L + t, tl.sum(h * g, axis=1), mask=t_mask)
    sig = tl.sigmoid(z)
    tl.store(DZ + at, dy * y * (sig * (1.0 + z * (1.0 - sig))), mask=mask)
    tl.store(DU + at, g * d[None, :] + into * step, mask=mask)
    dstep += into * u
    draw = tl.where(mask, dstep * tl.where(raw > 20.0, 1.0, tl.sigmoid(raw)), 0.0)
    tl.store(DDELTA + at, draw, mask=mask)
    tl.store(PD + here * CHANNELS + channels, tl.sum(g * u, axis=0), mask=c_mask)
    tl.store(PBIAS + here * CHANNELS + channels, tl.sum(draw, axis=0), mask=c_mask)


def backward(saved, grad_y, needs=None):
    u, delta, A, B, C, D, z, bias, y = saved
    needs = needs or (True,) * 8
    if not (needs[0] or needs[1] or needs[2] or needs[3] or needs[4] or needs[5] or needs[6] or needs[7]):
        return None, None, None, None, None, None, None, None
    batch, L, channels = u.shape
    N = A.shape[1]
    need_a, need_b, need_c = bool(needs[2]), bool(needs[3]), bool(needs[4])
    u, delta, z, B, C = (x.contiguous() for x in (u, delta, z, B, C))
    dev = u.device
    BLOCK_T, BLOCK_C = 16, 32
    NT = triton.cdiv(L, BLOCK_T)
    NC = triton.cdiv(channels, BLOCK_C)
    h = torch.empty((batch, NT, N, channels), device=dev, dtype=torch.float32)
    r = torch.empty((batch, NT, N, channels), device=dev, dtype=torch.float32)
    dy_b, dy_t, dy_c = grad_y.stride()
    if NT > 1:
        steps = torch.empty((batch, NT, channels), device=dev, dtype=torch.float32)
        _ss_local_kernel[(NC, NT, batch)](
            grad_y, u, delta, A, B, C, z, bias, h, r, steps, L, NT, channels, dy_b, dy_t, dy_c, N,
            BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=1,
        )
        _ss_chain_kernel[(triton.cdiv(channels, 128), N, batch * 2)](
            A, h, r, steps, NT, channels, N, BLOCK_T=16, BLOCK_C=128, num_warps=4
        )
    du = torch.empty((batch, L, channels), device=dev, dtype=u.dtype)
    ddelta = torch.empty((batch, L, channels), device=dev, dtype=delta.dtype)
    dz = torch.empty((batch, L, channels), device=dev, dtype=z.dtype)
    pd = torch.empty((batch * NT, channels), device=dev, dtype=torch.float32)
    pbias = torch.empty((batch * NT, channels), device=dev, dtype=torch.float32)
    pa = torch.empty((batch * NT, N, channels), device=dev, dtype=torch.float32) if need_a else pd
    pb = torch.empty((NC, batch, N, L), device=dev, dtype=torch.float32) if need_b else pd
    pc = torch.empty((NC, batch, N, L), device=dev, dtype=torch.float32) if need_c else pd
    _ss_grad_kernel[(NC, NT, batch)](
        grad_y, u, delta, A, B, C, D, z, bias, h, r, du, ddelta, dz, pa, pb, pc, pd, pbias,
        L, NT, channels, batch, dy_b, dy_t, dy_c, N,
        NEED_A=need_a, NEED_B=need_b, NEED_C=need_c, BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=1,
    )
    dA = pa.sum(0).transpose(0, 1).contiguous().to(A.dtype) if need_a else None
    dB = pb.sum(0).transpose(1, 2).contiguous().to(B.dtype) if need_b else None
    dC = pc.sum(0).transpose(1, 2).contiguous().to(C.dtype) if need_c else None
    dD = pd.sum(0).to(D.dtype) if needs[5] else None
    dbias = pbias.sum(0).to(bias.dtype) if needs[7] else None
    return (
        du if needs[0] else None, ddelta if needs[1] else None, dA, dB, dC, dD,
        dz if needs[6] else None, dbias,
    )
