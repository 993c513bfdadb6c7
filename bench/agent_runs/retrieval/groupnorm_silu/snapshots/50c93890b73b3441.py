# --- forward ---
@triton.jit
def _gns_fwd_kernel(
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
    mean = torch.empty((B, groups), device=x.device, dtype=torch.float32)
    rstd = torch.empty((B, groups), device=x.device, dtype=torch.float32)
    BLOCK = min(4096, triton.next_power_of_2(C // groups * H * W))
    _gns_fwd_kernel[(B * groups,)](
        x, weight, bias, scale, shift, y, mean, rstd, C, groups, H * W, eps, BLOCK=BLOCK, num_warps=8
    )
    return y, (x, weight, bias, scale, shift, mean, rstd)
# --- backward ---
@triton.jit
def _gns_bwd_sums_kernel(
    DY, X, WEIGHT, BIAS, SCALE, SHIFT, MEAN, RSTD, PW, PB, DSCALE, DSHIFT,
    PLANES, CHANNELS, WIDTH, SIZE,
    NEEDS_PARTS: tl.constexpr, NEEDS_DSCALE: tl.constexpr, NEEDS_DSHIFT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < PLANES
    group = rows // WIDTH
    channel = rows % CHANNELS
    mean = tl.load(MEAN + group, mask=row_mask, other=0.0)
    rstd = tl.load(RSTD + group, mask=row_mask, other=0.0)
    w = tl.load(WEIGHT + channel, mask=row_mask, other=0.0).to(tl.float32)
    b = tl.load(BIAS + channel, mask=row_mask, other=0.0).to(tl.float32)
    t3 = 1.0 + tl.load(SCALE + rows, mask=row_mask, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + rows, mask=row_mask, other=0.0).to(tl.float32)
    s_one = tl.zeros((ROWS,), tl.float32)
    s_hat = tl.zeros((ROWS,), tl.float32)
    s_t2 = tl.zeros((ROWS,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (cols < SIZE)[None, :]
        at = rows[:, None] * SIZE + cols[None, :]
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        xhat = (x - mean[:, None]) * rstd[:, None]
        t2 = xhat * w[:, None] + b[:, None]
        n = t2 * t3[:, None] + shift[:, None]
        sig = tl.sigmoid(n)
        dn = tl.where(mask, dy * (sig * (1.0 + n * (1.0 - sig))), 0.0)
        s_one += tl.sum(dn, axis=1)
        s_hat += tl.sum(dn * xhat, axis=1)
        s_t2 += tl.sum(dn * t2, axis=1)
    if NEEDS_PARTS:
        tl.store(PW + rows, s_hat * t3, mask=row_mask)
        tl.store(PB + rows, s_one * t3, mask=row_mask)
    if NEEDS_DSCALE:
        tl.store(DSCALE + rows, s_t2, mask=row_mask)
    if NEEDS_DSHIFT:
        tl.store(DSHIFT + rows, s_one, mask=row_mask)


@triton.jit
def _gns_bwd_dx_kernel(
    DY, X, WEIGHT, BIAS, SCALE, SHIFT, MEAN, RSTD, PW, PB, DX,
    PLANES, CHANNELS, WIDTH, SIZE,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = pid.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < PLANES
    group = rows // WIDTH
    channel = rows % CHANNELS
    mean = tl.load(MEAN + group, mask=row_mask, other=0.0)
    rstd = tl.load(RSTD + group, mask=row_mask, other=0.0)
    w = tl.load(WEIGHT + channel, mask=row_mask, other=0.0).to(tl.float32)
    b = tl.load(BIAS + channel, mask=row_mask, other=0.0).to(tl.float32)
    t3 = 1.0 + tl.load(SCALE + rows, mask=row_mask, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + rows, mask=row_mask, other=0.0).to(tl.float32)
    # The sums over the group of each row, from the sums of its planes.
    first = group * WIDTH
    first_channel = first % CHANNELS
    a_one = tl.zeros((ROWS,), tl.float32)
    a_hat = tl.zeros((ROWS,), tl.float32)
    for start in range(0, WIDTH, BLOCK_W):
        j = start + tl.arange(0, BLOCK_W)
        j_mask = row_mask[:, None] & (j < WIDTH)[None, :]
        gw = tl.load(WEIGHT + first_channel[:, None] + j[None, :], mask=j_mask, other=0.0).to(tl.float32)
        pw = tl.load(PW + first[:, None] + j[None, :], mask=j_mask, other=0.0)
        pb = tl.load(PB + first[:, None] + j[None, :], mask=j_mask, other=0.0)
        a_hat += tl.sum(gw * pw, axis=1)
        a_one += tl.sum(gw * pb, axis=1)
    count = WIDTH * SIZE
    a_one = a_one / count
    a_hat = a_hat / count
    for start in range(0, SIZE, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (cols < SIZE)[None, :]
        at = rows[:, None] * SIZE + cols[None, :]
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        xhat = (x - mean[:, None]) * rstd[:, None]
        n = (xhat * w[:, None] + b[:, None]) * t3[:, None] + shift[:, None]
        sig = tl.sigmoid(n)
        dn = dy * (sig * (1.0 + n * (1.0 - sig)))
        dx = rstd[:, None] * (dn * (t3 * w)[:, None] - a_one[:, None] - xhat * a_hat[:, None])
        tl.store(DX + at, dx, mask=mask)


def backward(saved, grad_y, needs=None):
    x, weight, bias, scale, shift, mean, rstd = saved
    needs = needs or (True,) * 5
    if not (needs[0] or needs[1] or needs[2] or needs[3] or needs[4]):
        return None, None, None, None, None
    B, C, H, W = x.shape
    groups = mean.shape[1]
    width = C // groups
    size = H * W
    planes = B * C
    grad_y = grad_y.contiguous()
    needs_parts = bool(needs[0] or needs[1] or needs[2])
    parts = torch.empty((2, B, C), device=x.device, dtype=torch.float32)
    dscale = torch.empty((B, C), device=x.device, dtype=scale.dtype)
    dshift = torch.empty((B, C), device=x.device, dtype=shift.dtype)
    BLOCK = min(2048, triton.next_power_of_2(size))
    ROWS = max(1, 2048 // BLOCK)
    grid = (triton.cdiv(planes, ROWS),)
    _gns_bwd_sums_kernel[grid](
        grad_y, x, weight, bias, scale, shift, mean, rstd, parts[0], parts[1], dscale, dshift,
        planes, C, width, size,
        NEEDS_PARTS=needs_parts, NEEDS_DSCALE=bool(needs[3]), NEEDS_DSHIFT=bool(needs[4]),
        ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
    )
    dx = None
    if needs[0]:
        dx = torch.empty((B, C, H, W), device=x.device, dtype=x.dtype)
        _gns_bwd_dx_kernel[grid](
            grad_y, x, weight, bias, scale, shift, mean, rstd, parts[0], parts[1], dx,
            planes, C, width, size,
            ROWS=ROWS, BLOCK=BLOCK, BLOCK_W=min(64, triton.next_power_of_2(width)), num_warps=4,
        )
    dweight, dbias = None, None
    if needs[1] or needs[2]:
        totals = parts.sum(1)
        dweight = totals[0].to(weight.dtype) if needs[1] else None
        dbias = totals[1].to(bias.dtype) if needs[2] else None
    return dx, dweight, dbias, dscale if needs[3] else None, dshift if needs[4] else None
