"""Features of structure follow values, not statements or names."""

import ast

import pytest

from rag.dataflow import flow_features

SPLIT = """
def kernel(a, b, n):
    i = tl.program_id(0) * n + tl.arange(0, 64)
    x = tl.load(a + i, mask=i < n, other=0.0)
    m = tl.max(x, axis=0)
    d = x - m
    e = tl.exp(d)
    tl.store(b + i, e, mask=i < n)
"""
JOINED = """
def zq(u, v, w):
    k = tl.program_id(0) * w + tl.arange(0, 64)
    y = tl.load(u + k, mask=k < w, other=0.0)
    tl.store(v + k, tl.exp(y - tl.max(y, axis=0)), mask=k < w)
"""
HELPED = """
def shifted(z):
    return z - tl.max(z, axis=0)

def zq(u, v, w):
    k = tl.program_id(0) * w + tl.arange(0, 64)
    y = tl.load(u + k, mask=k < w, other=0.0).to(tl.float32)
    tl.store(v + k, tl.exp(shifted(y)), mask=k < w)
"""


def features(source):
    return flow_features([node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)])


@pytest.mark.parametrize("other", [JOINED, HELPED], ids=["one expression", "a helper and a cast"])
def test_how_statements_are_split_changes_no_feature(other):
    assert features(SPLIT) == features(other)


def test_what_feeds_what_is_told():
    assert {"tl.exp < Sub", "Sub < tl.max", "tl.exp < Sub < tl.load"} <= features(SPLIT).keys()


def test_an_address_that_is_loaded_is_a_gather():
    gather = SPLIT.replace("tl.load(a + i,", "tl.load(a + tl.load(n + i),")
    assert "load 0d gathered" in features(gather)
    assert not any("gathered" in feature for feature in features(SPLIT))


def test_arithmetic_of_addresses_is_no_arithmetic_of_values():
    assert not any(feature.startswith(("Mult", "Add", "has Mult", "has Add")) for feature in features(SPLIT))


def test_a_telling_number_is_a_feature():
    assert "#0.04471" in features("def k(o, x):\n    y = tl.load(x)\n    tl.store(o, y + 0.044715 * y * y * y)")
    assert not any(f.startswith("#") for f in features("def k(o, x):\n    tl.store(o, 0.5 * tl.load(x))"))


@pytest.mark.parametrize(("bound", "kind"), [("tl.load(p)", "ragged"), ("tl.program_id(0)", "cut"), ("n", "loop")])
def test_bounds_of_loops_are_told(bound, kind):
    source = (
        f"def k(o, p, n):\n    s = 0.0\n    for j in range({bound}):\n        s += tl.load(p + j)\n    tl.store(o, s)"
    )
    assert features(source)[f"loop {kind} depth0"] == 1


def test_a_helper_that_calls_itself_ends():
    assert features("def k(o, x):\n    tl.store(o, h(x))\ndef h(x):\n    return h(x) + tl.load(x)")
