"""Inline assembly means what a torch function says it means, and is refused where nobody says it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from triton.language.extra.cuda import gdc_wait

from kernel_agent.ir import UnsupportedOp, execute, register_asm


@triton.jit
def _one(X, Y, n: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    c = tl.arange(0, n)
    y = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [tl.load(X + c)], dtype=tl.float32, is_pure=True, pack=PACK)
    tl.store(Y + c, y)


def _stub(asm, constraints="=f,f", pack=1):
    def stub(x):
        y = torch.empty_like(x)
        _one[(1,)](x, y, x.numel(), asm, constraints, pack)
        return y

    return stub


@pytest.mark.parametrize(
    ("asm", "reference"),
    [
        ("ex2.approx.ftz.f32 $0, $1;", torch.exp2),
        ("lg2.approx.f32 $0, $1;", torch.log2),
        ("rcp.approx.ftz.f32 $0, $1;", torch.reciprocal),
        ("rsqrt.approx.f32 $0, $1;", torch.rsqrt),
        ("sqrt.approx.f32 $0, $1;", torch.sqrt),
        ("sin.approx.f32 $0, $1;", torch.sin),
        ("cos.approx.f32 $0, $1;", torch.cos),
        ("{ tanh.approx.f32 $0, $1; }", torch.tanh),
    ],
)
def test_one_instruction_is_its_function(asm, reference):
    check_gradients(_stub(asm), (torch.rand(8) + 0.5,), reference)


def test_the_same_instruction_for_each_element_of_a_pack():
    asm = """
    tanh.approx.f32 $0, $2;   // first
    tanh.approx.f32 $1, $3;
    """
    check_gradients(_stub(asm, "=f,=f,f,f", 2), (torch.randn(8),), torch.tanh)


def test_softplus_as_attention_libraries_write_it():
    asm = """{ .reg .pred p;
        setp.gt.f32  p, $1, 15.;
        @p  mov.f32  $0, $1;
        @!p ex2.approx.ftz.f32 $0, $1;
        @!p add.f32            $0, $0, 1.0;
        @!p lg2.approx.ftz.f32 $0, $0; }"""
    x = torch.tensor([-30.0, -1.0, 0.0, 1.0, 14.0, 15.5, 40.0, 2000.0])
    check_gradients(
        _stub(asm, "=r,r"), (x,), lambda x: torch.where(x > 15, x, torch.logaddexp2(x, torch.zeros_like(x)))
    )


def test_registers_in_another_order_are_not_taken_for_a_function_of_each_lane():
    swapped = "tanh.approx.f32 $0, $3; tanh.approx.f32 $1, $2;"
    with pytest.raises(UnsupportedOp, match="no known meaning"):
        execute(_stub(swapped, "=f,=f,f,f", 2), (torch.randn(8),))


def test_an_unknown_snippet_is_refused_with_its_line_and_what_to_do():
    with pytest.raises(UnsupportedOp, match="no known meaning") as refusal:
        execute(_stub("mul.f32 $0, $1, $1; add.f32 $0, $0, $1;"), (torch.randn(8),))
    assert refusal.value.line == _one.fn.__code__.co_firstlineno + 3
    assert "register_asm" in refusal.value.remedy


def test_a_registered_meaning_is_used_whatever_the_white_space():
    register_asm("mul.f32 $0, $1, $1;   neg.f32 $0, $0;", lambda x: -x * x)
    check_gradients(_stub("mul.f32 $0, $1, $1;\n\t neg.f32 $0, $0; // square"), (torch.randn(8),), lambda x: -x * x)


def test_a_predicate_can_recognise_a_family_of_snippets():
    register_asm(lambda call: "my_shift" in call.text and call.pack == 1, lambda x: x + 4)
    check_gradients(
        _stub("{ /* my_shift */ .reg .f32 t; my_shift.f32 t, $1; mov.f32 $0, t; }"), (torch.randn(8),), lambda x: x + 4
    )


@triton.jit
def _through_fp8e4b15(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    gdc_wait()
    tl.store(Y + c, tl.load(X + c).to(tl.float8e4b15).to(tl.float16))


def test_a_cast_to_fp8e4b15_and_back_keeps_value_and_gradient():
    # Triton writes this cast in assembly; casts do not round here
    def stub(x):
        y = torch.empty_like(x)
        _through_fp8e4b15[(1,)](x, y, x.numel())
        return y

    check_gradients(stub, (torch.randn(16).clamp(-1.5, 1.5).half(),), lambda x: x.clone())


@triton.jit
def _decode_fp8e4b15(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + c)
    tl.store(Y + c, x.to(tl.float8e4b15, bitcast=True).to(tl.float16))


def test_every_byte_of_fp8e4b15():
    # sign, four bits of exponent with bias 15, three of mantissa; no infinities, no NaN
    def stub(x):
        y = torch.empty(256, dtype=torch.float16, device=x.device)
        _decode_fp8e4b15[(1,)](x, y, 256)
        return y

    wanted = []
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        size = 2.0**-14 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 15) * (1 + mantissa / 8)
        wanted.append(-size if byte & 128 else size)
    assert execute(stub, (torch.arange(256).to(torch.int8),)).result.tolist() == wanted
