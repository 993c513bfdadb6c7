"""Lowering and reading of Triton's IR, and the errors that name operation and line."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.ir import LoweringError, ParseError, UnsupportedOp, execute, lower, syntax
from kernel_agent.ir.attributes import Dense, parse_attribute
from kernel_agent.ir.syntax import parse
from kernel_agent.ir.types import Kind, parse_type


def line_of(kernel, mark: str) -> int:
    lines, start = inspect.getsourcelines(kernel.fn)
    return start + next(place for place, text in enumerate(lines) if f"# {mark}" in text)


@triton.jit
def _inline_assembly(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + c)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)  # asm
    tl.store(Y + c, y)


def test_an_unknown_operation_is_named_with_its_line():
    def stub(x):
        y = torch.empty_like(x)
        _inline_assembly[(1,)](x, y, BLOCK=16)
        return y

    with pytest.raises(UnsupportedOp, match="has no known meaning") as caught:
        execute(stub, (torch.randn(16),))
    assert caught.value.op == "tt.elementwise_inline_asm"
    assert caught.value.kernel == "_inline_assembly"
    assert caught.value.line == line_of(_inline_assembly, "asm")
    assert caught.value.file == __file__


@triton.jit
def _shapes_differ(X, BLOCK: tl.constexpr):
    x = tl.load(X + tl.arange(0, BLOCK))
    y = x + tl.arange(0, 32)  # wrong
    tl.store(X + tl.arange(0, BLOCK), y)


def test_what_triton_refuses_comes_with_its_message_and_line():
    def stub(x):
        _shapes_differ[(1,)](x, BLOCK=16)

    with pytest.raises(LoweringError, match="shape") as caught:
        execute(stub, (torch.randn(16),))
    assert caught.value.line == line_of(_shapes_differ, "wrong")
    assert caught.value.kernel == "_shapes_differ"


@triton.jit
def _library_function_of_halves(X, BLOCK: tl.constexpr):
    x = tl.load(X + tl.arange(0, BLOCK))
    tl.store(X + tl.arange(0, BLOCK), libdevice.tanh(x))  # halves


def test_elements_that_a_library_function_has_no_version_for_are_named_with_what_to_do():
    # Triton raises a KeyError here, of which its message keeps the key alone: "(triton.language.float16)".
    def stub(x):
        _library_function_of_halves[(1,)](x, BLOCK=16)

    with pytest.raises(LoweringError, match="takes no fp16") as caught:
        execute(stub, (torch.randn(16).half(),))
    assert caught.value.line == line_of(_library_function_of_halves, "halves")
    assert ".to(tl.float32)" in caught.value.remedy


@triton.jit
def _pointer_is_no_tile(X, BLOCK: tl.constexpr):
    tl.atomic_or(X, tl.load(X + tl.arange(0, BLOCK)))


def test_ir_that_does_not_verify_is_a_lowering_error_and_not_a_crash(capfd):
    def stub(x):
        _pointer_is_no_tile[(1,)](x, BLOCK=16)

    with pytest.raises(LoweringError, match="kernel _pointer_is_no_tile") as caught:
        execute(stub, (torch.arange(16, dtype=torch.int32),))
    if "Triton cannot compile" not in str(caught.value):  # Triton 3.9 sees it before it makes IR
        assert "no valid IR from" in str(caught.value)
        assert "tt.atomic_rmw" in capfd.readouterr().err


@triton.jit
def _named(X, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(X + offsets), 0)  # sum
    tl.store(X, total)


def test_program_points_know_their_source_line_and_variable():
    module = lower.lower(_named, {"X": "*fp32", "BLOCK": "constexpr"}, {(1,): 16})
    reduce = next(op for op in module.all_ops if op.name == "tt.reduce")
    place = module.place(reduce)
    assert place is not None
    assert (place.file, place.line) == (__file__, line_of(_named, "sum"))
    assert module.entry.name == "_named"
    assert "offsets" in {value.variable for op in module.all_ops for value in op.results}
    # the frames inside of Triton's own library are there, but never shown first
    assert any("/triton/language/" in frame.file for frame in module.frames(reduce)) or module.frames(reduce)


def test_an_operation_read_at_once_is_what_it_is_piece_by_piece(monkeypatch):
    # Two readers of one grammar: a part that the quick one lost would change what kernels compute without a word.
    text = lower.generic_text(_named, {"X": "*fp32", "BLOCK": "constexpr"}, {(1,): 16})

    def told():
        ops = parse(text).all_ops
        results = [[(value.id, value.name, value.type) for value in op.results] for op in ops]
        return results, [(op.name, op.operand_ids, op.attributes, op.location, op.last_uses) for op in ops]

    at_once = told()
    monkeypatch.setattr(syntax, "_PLAIN", re.compile("never"))
    assert at_once == told()


def test_one_specialisation_is_lowered_once():
    first = lower.lower(_named, {"X": "*fp32", "BLOCK": "constexpr"}, {(1,): 16})
    assert lower.lower(_named, {"X": "*fp32", "BLOCK": "constexpr"}, {(1,): 16}) is first
    assert lower.lower(_named, {"X": "*fp32", "BLOCK": "constexpr"}, {(1,): 32}) is not first


def test_ir_that_another_process_has_lowered_names_the_lines_of_this_file(monkeypatch):
    # A truth's file and a candidate's hold the same forward in different folders.
    monkeypatch.setattr(lower, "_TEXTS", {})
    monkeypatch.setattr(lower, "_MODULES", {})
    signature = {"X": "*fp32", "BLOCK": "constexpr"}
    lower.lower(_named, signature, {(1,): 16})
    texts = lower.lowered(())
    assert not any(__file__ in text for text in texts.values())
    assert lower.lowered(texts) == {}, "what is known is not sent again"
    monkeypatch.setattr(lower, "_KNOWN", {})
    monkeypatch.setattr(lower, "_MODULES", {})
    monkeypatch.setattr(lower, "generic_text", None)  # whoever lowers again, calls it
    lower.know(texts)
    module = lower.lower(_named, signature, {(1,): 16})
    place = module.place(next(op for op in module.all_ops if op.name == "tt.reduce"))
    assert place is not None
    assert (place.file, place.line) == (__file__, line_of(_named, "sum"))


def test_more_ir_than_can_be_sent_is_not_sent(monkeypatch):
    monkeypatch.setattr(lower, "_TEXTS", {"one": "x" * (1 << 20), "two": "x"})
    assert lower.lowered(()) == {}


def test_a_triton_that_prints_something_else_is_refused_at_start(monkeypatch):
    monkeypatch.setattr(lower, "generic_text", lambda *_: "module { tt.func @pretty_form() }")
    lower.self_test.cache_clear()
    with pytest.raises(EnvironmentProblem, match="does not print IR as expected"):
        lower.self_test()
    lower.self_test.cache_clear()


def test_unreadable_text_is_a_parse_error_that_quotes_it():
    with pytest.raises(ParseError, match="pretty"):
        parse("pretty form")


GENERIC = """
#loc = loc("k.py":1:0)
#loc2 = loc("y"(#loc3))
#loc3 = loc(callsite("f.py":7:2 at "k.py":9:4))
"builtin.module"() ({
  "tt.func"() <{function_type = (i32) -> (), sym_name = "k", sym_visibility = "public"}> ({
  ^bb0(%n: i32 loc("n"(#loc))):
    %0:2 = "scf.if"(%n) ({
      %a = "arith.constant"() <{value = dense<[1.0, 0x7F800000]> : tensor<2xf32>}> : () -> tensor<2xf32> loc(#loc2)
      "scf.yield"(%a, %a) : (tensor<2xf32>, tensor<2xf32>) -> () loc(#loc)
    }, {
    }) {note = "a } brace", flag} : (i32) -> (tensor<2xf32>, tensor<2xf32>) loc(#loc)
    "cf.br"()[^bb1] : () -> () loc(#loc)
  ^bb1:  // pred: ^bb0
    "tt.return"() : () -> () loc(#loc)
  }) : () -> () loc(#loc)
}) : () -> () loc(#loc)
"""


def test_the_generic_form_with_regions_blocks_and_nested_locations():
    module = parse(GENERIC)
    branch = module.entry.blocks[0].ops[0]
    assert branch.name == "scf.if"
    assert len(branch.results) == 2
    assert branch.attributes == {"note": "a } brace", "flag": True}
    constant = branch.regions[0][0].ops[0]
    assert constant.attributes["value"].data == (1.0, float("inf"))
    assert [(frame.file, frame.line) for frame in module.frames(constant)] == [("f.py", 7), ("k.py", 9)]
    assert module.entry.blocks[0].ops[1].successors == ["^bb1"]


@pytest.mark.parametrize(
    ("text", "kind", "shape", "scalar"),
    [
        ("i1", Kind.INT, (), "i1"),
        ("bf16", Kind.FLOAT, (), "bf16"),
        ("tensor<16x32xf16>", Kind.TENSOR, (16, 32), "f16"),
        ("tensor<8x!tt.ptr<f32>>", Kind.TENSOR, (8,), "!tt.ptr<f32>"),
        ("!tt.ptr<tensor<4x8xf32>>", Kind.POINTER, (4, 8), "!tt.ptr<tensor<4x8xf32>>"),
        ("!tt.ptr<i32, 1>", Kind.POINTER, (), "!tt.ptr<i32, 1>"),
        ("!tt.tensordesc<tensor<16x16xf16>>", Kind.DESCRIPTOR, (16, 16), "!tt.tensordesc<tensor<16x16xf16>>"),
        ("!tt.tensordesc<16x16xf16>", Kind.DESCRIPTOR, (16, 16), "!tt.tensordesc<16x16xf16>"),
    ],
)
def test_types(text, kind, shape, scalar):
    parsed = parse_type(text)
    assert (parsed.kind, parsed.shape, parsed.scalar.name) == (kind, shape, scalar)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("-5 : i32", -5),
        ("1.500000e+00 : f32", 1.5),
        ("4.471500e-02 : f32", 0.044715),  # as its author wrote it
        ("4.65661287E-10 : f32", 2.0**-31),  # nine digits name a float32, a double logarithm tells them apart
        ("1.44269502 : f32", 12102203 * 2.0**-23),
        ("0xFF800000 : f32", float("-inf")),
        ("0x3C00 : f16", 1.0),
        ("array<i32: 1, 0, 2>", (1, 0, 2)),
        ("array<i32>", ()),
        ('"text"', "text"),
        ("#arith.overflow<none>", "#arith.overflow<none>"),
    ],
)
def test_attributes(text, value):
    assert parse_attribute(text) == value


def test_dense_attributes():
    splat = parse_attribute("dense<true> : tensor<4xi1>")
    assert isinstance(splat, Dense)
    assert splat.data is True
    assert parse_attribute('dense<"0x0000803F00000040"> : tensor<2xf32>').data == (1.0, 2.0)
