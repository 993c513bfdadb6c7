import triton

TILE = 1024


def programs(n):
    return triton.cdiv(n, TILE)


def block_for(n):
    return triton.next_power_of_2(n)
