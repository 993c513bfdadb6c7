# --- forward ---
@triton.jit
def _groupnorm_silu_stats_fwd_kernel(
    X, WEIGHT, BIAS, SCALE, SHIFT, Y, MEAN, RSTD, CHANNELS, GROUPS, SIZE, eps, BLOCK: tl.constexpr
):
    image = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    width = CHANNELS // GROUPS
    first = image * CHANNELS * SIZE + group * width * SIZE
    count = width * SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(X + first + at, mask=at < count, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / count
    spread = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + first + at, mask=at < count, other=0.0).to(tl.float32)
        spread += tl.where(at < count, (x - mean) * (x - mean), 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(spread, axis=0) / count + eps)
    tl.store(MEAN + tl.program_id(0), mean)
    tl.store(RSTD + tl.program_id(0), rstd)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        channel = group * width + at // SIZE
        x = tl.load(X + first + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(WEIGHT + channel, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(BIAS + channel, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + image * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + image * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
        n = ((x - mean) * rstd * w + b) * (1.0 + scale) + shift
        tl.store(Y + first + at, n * tl.sigmoid(n), mask=mask)


def forward(x, weight, bias, scale, shift, groups, eps=1e-5):
    x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
    B, C, H, W = x.shape
    y = torch.empty_like(x)
    mean = torch.empty((B * groups,), dtype=torch.float32, device=x.device)
    rstd = torch.empty((B * groups,), dtype=torch.float32, device=x.device)
    BLOCK = min(4096, triton.next_power_of_2(C // groups * H * W))
    _groupnorm_silu_stats_fwd_kernel[(B * groups,)](
        x, weight, bias, scale, shift, y, mean, rstd, C, groups, H * W, eps, BLOCK=BLOCK, num_warps=8
    )
    return y, (x, weight, bias, scale, shift, mean, rstd, groups)
# --- backward ---
@triton.jit
def _groupnorm_silu_sums_kernel(
    X, WEIGHT, BIAS, SCALE, SHIFT, MEAN, RSTD, DY, S1, S2, DSCALE,
    CHANNELS, GROUPS, SIZE, WIDTH_PX, dy_b, dy_c, dy_h, dy_w,
    FLAT: tl.constexpr, NEED_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    plane = tl.program_id(0).to(tl.int64)
    image = plane // CHANNELS
    channel = plane % CHANNELS
    stat = image * GROUPS + channel // (CHANNELS // GROUPS)
    mean = tl.load(MEAN + stat)
    rstd = tl.load(RSTD + stat)
    w = tl.load(WEIGHT + channel).to(tl.float32)
    b = tl.load(BIAS + channel).to(tl.float32)
    scale = tl.load(SCALE + plane).to(tl.float32)
    shift = tl.load(SHIFT + plane).to(tl.float32)
    dy_base = DY + image * dy_b + channel * dy_c
    sum1 = tl.zeros((BLOCK,), tl.float32)
    sum2 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < SIZE
        x = tl.load(X + plane * SIZE + at, mask=mask, other=0.0).to(tl.float32)
        if FLAT:
            off = at.to(tl.int64) * dy_w
        else:
            off = (at // WIDTH_PX).to(tl.int64) * dy_h + (at % WIDTH_PX).to(tl.int64) * dy_w
        dy = tl.load(dy_base + off, mask=mask, other=0.0).to(tl.float32)
        xh = (x - mean) * rstd
        n = (xh * w + b) * (1.0 + scale) + shift
        sig = tl.sigmoid(n)
        dn = tl.where(mask, dy * (sig * (1.0 + n * (1.0 - sig))), 0.0)
        sum1 += dn
        sum2 += dn * xh
    s1 = tl.sum(sum1, axis=0)
    s2 = tl.sum(sum2, axis=0)
    tl.store(S1 + plane, s1)
    tl.store(S2 + plane, s2)
    if NEED_SCALE:
        tl.store(DSCALE + plane, s2 * w + s1 * b)


@triton.jit
def _groupnorm_silu_dx_kernel(
    X, WEIGHT, BIAS, SCALE, SHIFT, MEAN, RSTD, DY, S1, S2, DX,
    PLANES, CHANNELS, GROUPS, SIZE, WIDTH_PX, dy_b, dy_c, dy_h, dy_w,
    FLAT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr
):
    plane = (PLANES - 1 - tl.program_id(0)).to(tl.int64)
    image = plane // CHANNELS
    channel = plane % CHANNELS
    width = CHANNELS // GROUPS
    group = channel // width
    stat = image * GROUPS + group
    mean = tl.load(MEAN + stat)
    rstd = tl.load(RSTD + stat)
    lanes = tl.arange(0, BLOCK_W)
    l_mask = lanes < width
    chans = group * width + lanes
    gw = tl.load(WEIGHT + chans, mask=l_mask, other=0.0).to(tl.float32)
    gs = tl.load(SCALE + image * CHANNELS + chans, mask=l_mask, other=0.0).to(tl.float32)
    g1 = tl.load(S1 + image * CHANNELS + chans, mask=l_mask, other=0.0)
    g2 = tl.load(S2 + image * CHANNELS + chans, mask=l_mask, other=0.0)
    factor = gw * (1.0 + gs)
    count = width * SIZE
    m1 = tl.sum(gw * g1, axis=0) / count
    m2 = tl.sum(factor * g2, axis=0) / count

    w = tl.load(WEIGHT + channel).to(tl.float32)
    b = tl.load(BIAS + channel).to(tl.float32)
    scale = tl.load(SCALE + plane).to(tl.float32)
    shift = tl.load(SHIFT + plane).to(tl.float32)
    dy_base = DY + image * dy_b + channel * dy_c
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < SIZE
        x = tl.load(X + plane * SIZE + at, mask=mask, other=0.0).to(tl.float32)
        if FLAT:
            off = at.to(tl.int64) * dy_w
        else:
            off = (at // WIDTH_PX).to(tl.int64) * dy_h + (at % WIDTH_PX).to(tl.int64) * dy_w
        dy = tl.load(dy_base + off, mask=mask, other=0.0).to(tl.float32)
        xh = (x - mean) * rstd
        n = (xh * w + b) * (1.0 + scale) + shift
        sig = tl.sigmoid(n)
        dn = dy * (sig * (1.0 + n * (1.0 - sig)))
        dx = rstd * (dn * ((1.0 + scale) * w) - m1 - xh * m2)
        tl.store(DX + plane * SIZE + at, dx, mask=mask)


@triton.jit
def _groupnorm_silu_affine_kernel(
    S1, S2, SCALE, DW, DB, BATCH, CHANNELS, NEED_W: tl.constexpr, NEED_B: tl.constexpr, BLOCK: tl.constexpr
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, BATCH):
        factor = 1.0 + tl.load(SCALE + i * CHANNELS + channel, mask=mask, other=0.0).to(tl.float32)
        if NEED_W:
            dw += factor * tl.load(S2 + i * CHANNELS + channel, mask=mask, other=0.0)
        if NEED_B:
            db += factor * tl.load(S1 + i * CHANNELS + channel, mask=mask, other=0.0)
    if NEED_W:
        tl.store(DW + channel, dw, mask=mask)
    if NEED_B:
        tl.store(DB + channel, db, mask=mask)


def backward(saved, grad_y, needs=None):
    x, weight, bias, scale, shift, mean, rstd, groups = saved
    needs = needs or (True,) * 5
    need_x, need_w, need_b, need_scale, need_shift = needs
    if not any(needs):
        return (None,) * 5
    B, C, H, W = x.shape
    SIZE = H * W
    dev = x.device
    s1 = torch.empty((B, C), dtype=torch.float32, device=dev)
    s2 = torch.empty((B, C), dtype=torch.float32, device=dev)
    dx = torch.empty_like(x) if need_x else None
    dweight = torch.empty_like(weight) if need_w else None
    dbias = torch.empty_like(bias) if need_b else None
    dscale = torch.empty_like(scale) if need_scale else None
    dy_b, dy_c, dy_h, dy_w = grad_y.stride()
    flat = dy_h == W * dy_w
    BLOCK = min(triton.next_power_of_2(SIZE), 2048)
    _groupnorm_silu_sums_kernel[(B * C,)](
        x, weight, bias, scale, shift, mean, rstd, grad_y, s1, s2, dscale if need_scale else s1,
        C, groups, SIZE, W, dy_b, dy_c, dy_h, dy_w,
        FLAT=flat,
        NEED_SCALE=need_scale,
        BLOCK=BLOCK,
        num_warps=4,
    )
    if need_x:
        _groupnorm_silu_dx_kernel[(B * C,)](
            x, weight, bias, scale, shift, mean, rstd, grad_y, s1, s2, dx,
            B * C, C, groups, SIZE, W, dy_b, dy_c, dy_h, dy_w,
            FLAT=flat,
            BLOCK_W=triton.next_power_of_2(C // groups),
            BLOCK=BLOCK,
            num_warps=4,
        )
    if need_w or need_b:
        _groupnorm_silu_affine_kernel[(triton.cdiv(C, 64),)](
            s1, s2, scale, dweight if need_w else s1, dbias if need_b else s1, B, C,
            NEED_W=need_w,
            NEED_B=need_b,
            BLOCK=64,
            num_warps=2,
        )
    dshift = s1.to(shift.dtype) if need_shift else None
    return dx, dweight, dbias, dscale, dshift
