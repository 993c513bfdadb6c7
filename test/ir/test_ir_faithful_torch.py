"""Faithful arithmetic of the torch code in a stub: images hold what the GPU's tensors would hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_agent.ir import ExecOptions, Numerics, as_image, execute

FAITHFUL = ExecOptions(numerics=Numerics.FAITHFUL)


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def copied(x):
    out = torch.empty_like(x)
    copy_kernel[(1,)](x, out, x.numel(), BLOCK=1024)
    return out


def run(stub, *args):
    return execute(stub, args, options=FAITHFUL).result.detach()


def test_torch_code_before_a_launch_rounds_after_every_call():
    x = torch.randn(1000).half()
    got = run(lambda x: copied((x * x).sin() + x), x)
    assert torch.equal(got, ((x * x).sin() + x).double())


def test_a_cast_between_launches_rounds():
    x = torch.randn(1000)
    assert torch.equal(run(lambda x: copied(x.to(torch.bfloat16)), x), x.bfloat16().double())
    assert torch.equal(run(lambda x: copied(x.half()), x), x.half().double())


def test_changes_in_place_and_assignments_to_parts_round_to_the_tensor_they_change():
    def stub(x, y):
        half = x.half()
        half.mul_(half)
        half[:10] = y[:10]
        half[10:20].add_(y[10:20])
        return copied(half)

    x, y = torch.randn(100), torch.randn(100)
    expected = x.half()
    expected.mul_(expected)
    expected[:10] = y[:10]
    expected[10:20].add_(y[10:20])
    assert torch.equal(run(stub, x, y), expected.double())


def test_a_product_in_float16_accumulates_in_float32_and_rounds_once():
    a, b = torch.randn(20, 300).half(), torch.randn(300, 30).half()
    got = run(lambda a, b: copied(a @ b), a, b)
    assert torch.equal(got.half(), (a.float() @ b.float()).half())


def test_a_value_beyond_the_range_of_a_tensor_becomes_infinite():
    assert bool(run(lambda x: copied(x.half()), torch.full((8,), 1e5)).isinf().all())


def test_an_argument_that_its_dtype_cannot_hold_is_rounded_on_the_way_in():
    # A backward gets what the exact forward saved, as images: on the device the forward had rounded it.
    image = as_image(torch.tensor([1 + 2.0**-30], dtype=torch.float64), torch.float32)
    assert run(copied, image).item() == 1.0
    assert execute(copied, (image,)).result.item() == 1 + 2.0**-30


def test_expanded_tensors_and_views_stay_views():
    def stub(x):
        half = x.half()
        view = half.view(2, 50)[1]
        view += 1
        wide = half[:1].expand(100)
        return copied((half + wide).contiguous())

    x = torch.randn(100)
    expected = x.half()
    expected.view(2, 50)[1] += 1
    assert torch.equal(run(stub, x), (expected + expected[:1]).double())
