# --- forward ---
@triton.jit
def _gns_fwd(
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
    mean = torch.empty((B * groups,), device=x.device, dtype=torch.float32)
    rstd = torch.empty((B * groups,), device=x.device, dtype=torch.float32)
    BLOCK = min(4096, triton.next_power_of_2(C // groups * H * W))
    _gns_fwd[(B * groups,)](
        x, weight, bias, scale, shift, y, mean, rstd, C, groups, H * W, eps, BLOCK=BLOCK, num_warps=8
    )
    return y, (x, weight, bias, scale, shift, mean, rstd, groups)
# --- backward ---
@triton.jit
def _gns_bwd(
    DY, X, WEIGHT, BIAS, SCALE, SHIFT, MEAN, RSTD, DX, DWP, DBP, DSCALE, DSHIFT, CHANNELS, GROUPS, SIZE,
    R: tl.constexpr, P: tl.constexpr,
    NEEDS_X: tl.constexpr, NEEDS_W: tl.constexpr, NEEDS_B: tl.constexpr,
    NEEDS_SCALE: tl.constexpr, NEEDS_SHIFT: tl.constexpr,
):
    # One group of one image, in tiles of R channels by P pixels: first the sums, then dx in reverse order.
    image = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    width = CHANNELS // GROUPS
    base = image * CHANNELS * SIZE + group * width * SIZE
    mean = tl.load(MEAN + tl.program_id(0))
    rstd = tl.load(RSTD + tl.program_id(0))
    lanes = tl.arange(0, R)
    pixels = tl.arange(0, P)
    m1 = 0.0
    m2 = 0.0
    for r0 in range(0, width, R):
        row = r0 + lanes
        in_row = row < width
        channel = group * width + row
        both = image * CHANNELS + channel
        w = tl.load(WEIGHT + channel, mask=in_row, other=0.0).to(tl.float32)
        b = tl.load(BIAS + channel, mask=in_row, other=0.0).to(tl.float32)
        gain = 1.0 + tl.load(SCALE + both, mask=in_row, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + both, mask=in_row, other=0.0).to(tl.float32)
        sum0 = tl.zeros((R, P), tl.float32)
        sum1 = tl.zeros((R, P), tl.float32)
        for p0 in range(0, SIZE, P):
            pixel = p0 + pixels
            mask = in_row[:, None] & (pixel < SIZE)[None, :]
            at = base + row[:, None] * SIZE + pixel[None, :]
            x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
            xh = (x - mean) * rstd
            n = (xh * w[:, None] + b[:, None]) * gain[:, None] + shift[:, None]
            sig = tl.sigmoid(n)
            dn = tl.where(mask, dy * (sig * (1.0 + n * (1.0 - sig))), 0.0)
            sum0 += dn
            sum1 += dn * xh
        s0 = tl.sum(sum0, axis=1)
        s1 = tl.sum(sum1, axis=1)
        if NEEDS_SHIFT:
            tl.store(DSHIFT + both, s0, mask=in_row)
        if NEEDS_SCALE:
            tl.store(DSCALE + both, w * s1 + b * s0, mask=in_row)
        if NEEDS_W:
            tl.store(DWP + both, gain * s1, mask=in_row)
        if NEEDS_B:
            tl.store(DBP + both, gain * s0, mask=in_row)
        m1 += tl.sum(tl.where(in_row, w * gain * s0, 0.0), axis=0)
        m2 += tl.sum(tl.where(in_row, w * gain * s1, 0.0), axis=0)
    if NEEDS_X:
        m1 = m1 / (width * SIZE)
        m2 = m2 / (width * SIZE)
        row_tiles = (width + R - 1) // R
        pixel_tiles = (SIZE + P - 1) // P
        for i in range(0, row_tiles):
            row = (row_tiles - 1 - i) * R + lanes
            in_row = row < width
            channel = group * width + row
            both = image * CHANNELS + channel
            w = tl.load(WEIGHT + channel, mask=in_row, other=0.0).to(tl.float32)
            b = tl.load(BIAS + channel, mask=in_row, other=0.0).to(tl.float32)
            gain = 1.0 + tl.load(SCALE + both, mask=in_row, other=0.0).to(tl.float32)
            shift = tl.load(SHIFT + both, mask=in_row, other=0.0).to(tl.float32)
            a = w * gain
            for j in range(0, pixel_tiles):
                pixel = (pixel_tiles - 1 - j) * P + pixels
                mask = in_row[:, None] & (pixel < SIZE)[None, :]
                at = base + row[:, None] * SIZE + pixel[None, :]
                x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
                xh = (x - mean) * rstd
                n = (xh * w[:, None] + b[:, None]) * gain[:, None] + shift[:, None]
                sig = tl.sigmoid(n)
                dn = dy * (sig * (1.0 + n * (1.0 - sig)))
                tl.store(DX + at, rstd * (dn * a[:, None] - m1 - xh * m2), mask=mask)


def backward(saved, grad_y, needs=None):
    x, weight, bias, scale, shift, mean, rstd, groups = saved
    needs = needs or (True,) * 5
    needs_x, needs_w, needs_b, needs_scale, needs_shift = (bool(n) for n in needs)
    B, C, H, W = x.shape
    dy = grad_y.contiguous()
    dx = torch.empty_like(x) if needs_x else None
    dscale = torch.empty_like(scale) if needs_scale else None
    dshift = torch.empty_like(shift) if needs_shift else None
    parts = torch.empty((2, B, C), device=x.device, dtype=torch.float32)
    R = min(8, triton.next_power_of_2(C // groups))
    P = min(triton.next_power_of_2(H * W), 4096 // R)
    _gns_bwd[(B * groups,)](
        dy, x, weight, bias, scale, shift, mean, rstd,
        dx if needs_x else parts, parts[0], parts[1],
        dscale if needs_scale else parts, dshift if needs_shift else parts,
        C, groups, H * W, R=R, P=P,
        NEEDS_X=needs_x, NEEDS_W=needs_w, NEEDS_B=needs_b, NEEDS_SCALE=needs_scale, NEEDS_SHIFT=needs_shift,
        num_warps=8,
    )
    dweight = parts[0].sum(0).to(weight.dtype) if needs_w else None
    dbias = parts[1].sum(0).to(bias.dtype) if needs_b else None
    return dx, dweight, dbias, dscale, dshift
