import triton

WARPS = (2, 4)


def configs():
    return [triton.Config({"BLOCK": 128 * w}, num_warps=w) for w in WARPS]


def drop_large(found, arguments, **_):
    return [c for c in found if c.kwargs["BLOCK"] <= arguments["n"]] or found[:1]
