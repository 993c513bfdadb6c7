# --- backward ---
@triton.jit
def _ss_softplus(raw):
    return tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))


@triton.jit
def _ss_after(decay1, state1, decay2, state2):
    # First step 1, then step 2, of h -> decay h + state.
    return decay1 * decay2, decay2 * state1 + state2


@triton.jit
def _ss_kept_after(decay1, kept1, state1, decay2, kept2, state2):
    # As _ss_after, with the share of the last step's state that it did not add itself.
    passed = decay2 * state1
    return decay1 * decay2, passed + kept2, passed + state2


@triton.jit
def _ss_borders(
    U, DELTA, A, B, C, Z, BIAS, DY, HS, GS, L, CHANNELS, NT,
    N: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):
    # Programs 0 of axis 2: the state before every chunk. Programs 1: the gradient that enters it from behind,
    # already multiplied by the decay of the first step behind.
    batch = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    states = tl.arange(0, BN)
    lanes = tl.arange(0, BT)
    c_ok = channels < CHANNELS
    n_ok = states < N
    nc = states[:, None] * CHANNELS + channels[None, :]
    nc_ok = n_ok[:, None] & c_ok[None, :]
    a = tl.load(A + channels[None, :] * N + states[:, None], mask=nc_ok, other=0.0).to(tl.float32)
    bias = tl.load(BIAS + channels, mask=c_ok, other=0.0).to(tl.float32)
    carry = tl.zeros((BN, BC), tl.float32)
    if tl.program_id(2) == 0:
        for chunk in range(0, NT):
            tl.store(HS + (batch * NT + chunk) * N * CHANNELS + nc, carry, mask=nc_ok)
            t = chunk * BT + lanes
            tc = (batch * L + t[:, None]) * CHANNELS + channels[None, :]
            tc_ok = (t < L)[:, None] & c_ok[None, :]
            tn = (batch * L + t[:, None]) * N + states[None, :]
            tn_ok = (t < L)[:, None] & n_ok[None, :]
            u = tl.load(U + tc, mask=tc_ok, other=0.0).to(tl.float32)
            raw = tl.load(DELTA + tc, mask=tc_ok, other=0.0).to(tl.float32) + bias[None, :]
            step = tl.where(tc_ok, _ss_softplus(raw), 0.0)
            after_ok = ((t + 1 < L) & (lanes + 1 < BT))[:, None] & c_ok[None, :]
            raw_after = tl.load(DELTA + tc + CHANNELS, mask=after_ok, other=0.0).to(tl.float32) + bias[None, :]
            step_after = tl.where(after_ok, _ss_softplus(raw_after), 0.0)
            rest = tl.cumsum(step_after, axis=0, reverse=True)
            b = tl.load(B + tn, mask=tn_ok, other=0.0).to(tl.float32)
            terms = tl.exp(rest[:, None, :] * a[None, :, :]) * ((step * u)[:, None, :] * b[:, :, None])
            total = tl.sum(step, axis=0)
            carry = tl.exp(total[None, :] * a) * carry + tl.sum(terms, axis=0)
    else:
        for back in range(0, NT):
            chunk = NT - 1 - back
            tl.store(GS + (batch * NT + chunk) * N * CHANNELS + nc, carry, mask=nc_ok)
            t = chunk * BT + lanes
            tc = (batch * L + t[:, None]) * CHANNELS + channels[None, :]
            tc_ok = (t < L)[:, None] & c_ok[None, :]
            tn = (batch * L + t[:, None]) * N + states[None, :]
            tn_ok = (t < L)[:, None] & n_ok[None, :]
            raw = tl.load(DELTA + tc, mask=tc_ok, other=0.0).to(tl.float32) + bias[None, :]
            step = tl.where(tc_ok, _ss_softplus(raw), 0.0)
            z = tl.load(Z + tc, mask=tc_ok, other=0.0).to(tl.float32)
            dy = tl.load(DY + tc, mask=tc_ok, other=0.0).to(tl.float32)
            c = tl.load(C + tn, mask=tn_ok, other=0.0).to(tl.float32)
            g = dy * z * tl.sigmoid(z)
            upto = tl.cumsum(step, axis=0)
            terms = tl.exp(upto[:, None, :] * a[None, :, :]) * (g[:, None, :] * c[:, :, None])
            total = tl.sum(step, axis=0)
            carry = tl.exp(total[None, :] * a) * carry + tl.sum(terms, axis=0)


@triton.jit
def _ss_gradients(
    U, DELTA, A, B, C, D, Z, BIAS, DY, HS, GS, DU, DDELTA, DAP, DBP, DCP, DDP, DZ, DBIASP, L, CHANNELS, NT,
    N: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, SHARE: tl.constexpr,
    NEEDS_U: tl.constexpr, NEEDS_DELTA: tl.constexpr, NEEDS_A: tl.constexpr, NEEDS_B: tl.constexpr,
    NEEDS_C: tl.constexpr, NEEDS_D: tl.constexpr, NEEDS_Z: tl.constexpr, NEEDS_BIAS: tl.constexpr,
):
    # One chunk of one batch and SHARE channels, BC at a time. Tiles (time, state, channel).
    chunk = tl.program_id(0)
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    states = tl.arange(0, BN)
    lanes = tl.arange(0, BT)
    n_ok = states < N
    t = chunk * BT + lanes
    t_ok = t < L
    tn = (batch * L + t[:, None]) * N + states[None, :]
    tn_ok = t_ok[:, None] & n_ok[None, :]
    b = tl.load(B + tn, mask=tn_ok, other=0.0).to(tl.float32)
    c = tl.load(C + tn, mask=tn_ok, other=0.0).to(tl.float32)
    sum_b = tl.zeros((BT, BN, BC), tl.float32)
    sum_c = tl.zeros((BT, BN, BC), tl.float32)
    part = batch * NT + chunk
    for first in range(group * SHARE, tl.minimum(group * SHARE + SHARE, CHANNELS), BC):
        channels = first + tl.arange(0, BC)
        c_ok = channels < CHANNELS
        nc = states[:, None] * CHANNELS + channels[None, :]
        nc_ok = n_ok[:, None] & c_ok[None, :]
        tc = (batch * L + t[:, None]) * CHANNELS + channels[None, :]
        tc_ok = t_ok[:, None] & c_ok[None, :]
        a = tl.load(A + channels[None, :] * N + states[:, None], mask=nc_ok, other=0.0).to(tl.float32)
        d = tl.load(D + channels, mask=c_ok, other=0.0).to(tl.float32)
        bias = tl.load(BIAS + channels, mask=c_ok, other=0.0).to(tl.float32)
        h_in = tl.load(HS + part * N * CHANNELS + nc, mask=nc_ok, other=0.0)
        g_in = tl.load(GS + part * N * CHANNELS + nc, mask=nc_ok, other=0.0)
        u = tl.load(U + tc, mask=tc_ok, other=0.0).to(tl.float32)
        z = tl.load(Z + tc, mask=tc_ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + tc, mask=tc_ok, other=0.0).to(tl.float32)
        raw = tl.load(DELTA + tc, mask=tc_ok, other=0.0).to(tl.float32) + bias[None, :]
        # Steps past L are 0: they keep the state.
        step = tl.where(tc_ok, _ss_softplus(raw), 0.0)
        after_ok = ((t + 1 < L) & (lanes + 1 < BT))[:, None] & c_ok[None, :]
        raw_after = tl.load(DELTA + tc + CHANNELS, mask=after_ok, other=0.0).to(tl.float32) + bias[None, :]
        step_after = tl.where(after_ok, _ss_softplus(raw_after), 0.0)
        sig = tl.sigmoid(z)
        g = dy * z * sig
        su = step * u

        decay = tl.exp(step[:, None, :] * a[None, :, :])
        inflow = su[:, None, :] * b[:, :, None]
        total, local, _ = tl.associative_scan((decay, tl.zeros_like(decay), inflow), 0, _ss_kept_after)
        kept = local + total * h_in[None, :, :]
        h = kept + inflow
        if NEEDS_Z:
            y0 = tl.sum(h * c[:, :, None], axis=1) + d[None, :] * u
            tl.store(DZ + tc, dy * y0 * (sig * (1.0 + z * (1.0 - sig))), mask=tc_ok)
        if NEEDS_C:
            sum_c += h * g[:, None, :]
        if NEEDS_D:
            tl.store(DDP + part * CHANNELS + channels, tl.sum(g * u, axis=0), mask=c_ok)

        # The border holds the decay of the next chunk's first step already: its step_after is 0.
        decay_after = tl.exp(step_after[:, None, :] * a[None, :, :])
        total_g, local_g = tl.associative_scan((decay_after, g[:, None, :] * c[:, :, None]), 0, _ss_after, reverse=True)
        dh = local_g + total_g * g_in[None, :, :]
        if NEEDS_B:
            sum_b += dh * su[:, None, :]
        into = tl.sum(dh * b[:, :, None], axis=1)
        if NEEDS_U:
            tl.store(DU + tc, g * d[None, :] + step * into, mask=tc_ok)
        dkept = dh * kept
        if NEEDS_A:
            tl.store(DAP + part * N * CHANNELS + nc, tl.sum(dkept * step[:, None, :], axis=0), mask=nc_ok)
        if NEEDS_DELTA or NEEDS_BIAS:
            dstep = u * into + tl.sum(dkept * a[None, :, :], axis=1)
            ddelta = tl.where(tc_ok, dstep * tl.where(raw > 20.0, 1.0, tl.sigmoid(raw)), 0.0)
            if NEEDS_DELTA:
                tl.store(DDELTA + tc, ddelta, mask=tc_ok)
            if NEEDS_BIAS:
                tl.store(DBIASP + part * CHANNELS + channels, tl.sum(ddelta, axis=0), mask=c_ok)
    at = group.to(tl.int64) * tl.num_programs(2) * L * N + tn
    if NEEDS_B:
        tl.store(DBP + at, tl.sum(sum_b, axis=2), mask=tn_ok)
    if NEEDS_C:
        tl.store(DCP + at, tl.sum(sum_c, axis=2), mask=tn_ok)


def backward(saved, grad_y, needs=None):
    u, delta, A, B, C, D, z, bias, y = saved
    needs = needs or (True,) * 8
    needs_u, needs_delta, needs_a, needs_b, needs_c, needs_d, needs_z, needs_bias = (bool(n) for n in needs)
    u, delta, z, B, C = u.contiguous(), delta.contiguous(), z.contiguous(), B.contiguous(), C.contiguous()
    dy = grad_y.contiguous()
    batch, L, channels = u.shape
    N = A.shape[1]
    BT, BC, SHARE = 16, 32, 256
    BN = triton.next_power_of_2(N)
    NT = triton.cdiv(L, BT)
    groups = triton.cdiv(channels, SHARE)
    device = u.device
    h_states = torch.empty((batch, NT, N, channels), device=device, dtype=torch.float32)
    g_states = torch.empty((batch, NT, N, channels), device=device, dtype=torch.float32)
    _ss_borders[(triton.cdiv(channels, BC), batch, 2)](
        u, delta, A, B, C, z, bias, dy, h_states, g_states, L, channels, NT,
        N=N, BN=BN, BC=BC, BT=BT, num_warps=min(16, max(4, BN)),
    )
    du = torch.empty_like(u) if needs_u else None
    ddelta = torch.empty_like(delta) if needs_delta else None
    dz = torch.empty_like(z) if needs_z else None
    da_parts = torch.empty((batch * NT, N, channels), device=device, dtype=torch.float32) if needs_a else h_states
    db_parts = torch.empty((groups, batch, L, N), device=device, dtype=torch.float32) if needs_b else h_states
    dc_parts = torch.empty((groups, batch, L, N), device=device, dtype=torch.float32) if needs_c else h_states
    dd_parts = torch.empty((batch * NT, channels), device=device, dtype=torch.float32) if needs_d else h_states
    dbias_parts = torch.empty((batch * NT, channels), device=device, dtype=torch.float32) if needs_bias else h_states
    _ss_gradients[(NT, groups, batch)](
        u, delta, A, B, C, D, z, bias, dy, h_states, g_states,
        du if needs_u else h_states, ddelta if needs_delta else h_states, da_parts, db_parts, dc_parts, dd_parts,
        dz if needs_z else h_states, dbias_parts, L, channels, NT,
        N=N, BN=BN, BC=BC, BT=BT, SHARE=SHARE,
        NEEDS_U=needs_u, NEEDS_DELTA=needs_delta, NEEDS_A=needs_a, NEEDS_B=needs_b,
        NEEDS_C=needs_c, NEEDS_D=needs_d, NEEDS_Z=needs_z, NEEDS_BIAS=needs_bias,
        num_warps=min(16, max(4, BN)),
    )
    dA = da_parts.sum(0).transpose(0, 1).contiguous().to(A.dtype) if needs_a else None
    dB = db_parts.sum(0).to(B.dtype) if needs_b else None
    dC = dc_parts.sum(0).to(C.dtype) if needs_c else None
    dD = dd_parts.sum(0).to(D.dtype) if needs_d else None
    dbias = dbias_parts.sum(0).to(bias.dtype) if needs_bias else None
    return du, ddelta, dA, dB, dC, dD, dz, dbias
