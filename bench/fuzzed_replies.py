"""Replies as no model should write them, for Hypothesis: `bench/fuzz.py` and the tests draw from the same strategies.

Text of every alphabet, pieces of real replies in any order, an honest reply that was cut and turned, nesting without
end, and lines and texts far longer than any model writes.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

BACKWARD = """\
@triton.jit
def product_bwd_kernel(DY, X, W, DX, DW, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    dy = tl.load(DY + cols, mask=mask)
    tl.store(DX + cols, dy * tl.load(W + cols, mask=mask), mask=mask)
    tl.store(DW + cols, dy * tl.load(X + cols, mask=mask), mask=mask)


def backward(saved, grad_y, needs=None):
    x, w, _ = saved
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    grad_y = grad_y.contiguous()
    product_bwd_kernel[(triton.cdiv(x.numel(), 32),)](grad_y, x, w, dx, dw, x.numel(), BLOCK=32)
    return dx, dw
"""
"""The backward of a product of two vectors, `product.py` of the tests."""
HONEST = f"The product rule gives both.\n\n```python\n# --- backward ---\n{BACKWARD}```\n\nThat is all.\n"

_FENCES = ("```", "````", "~~~", "~~~~~", "``", "   ```", "    ```", "``` ```", "`~`", "\t```")
_LANGUAGES = (
    "",
    "python",
    "py",
    "Python3",
    "json",
    "diff",
    "text",
    "triton",
    " python ",
    "c++",
    "{.python}",
    "python`",
)
_MARKERS = ("# --- forward ---", "# --- backward ---", "# --- check ---", "#--backward--", "  # ---- Check ----")
_EDITS = ("<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE", "<<<<< SEARCH", ">>>>>>>REPLACE")
_BREAKS = ("\n", "\n\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", " ", "\t", "", "\\\n", "\0", "\ufeff")
_CODE = (
    *("def backward(saved, grad_y, needs=None):", "    return saved[0], saved[1]", "async def backward(saved):"),
    *("def forward(x, w):", "    return product(x, w), (x, w)", "class backward: pass", "backward = lambda *a: a"),
    *("import torch", "from __future__ import annotations", "from kernel_agent import *", "# torch: mul, sum"),
    *('META = dict(grads=("x", "w"))', "META = {'grads': []}", '"""', "'''", 'f"{x!r:>{y}}"', "'\\d'", "x = 1 # --- "),
    *("return", "yield x", "await x", "nonlocal x", "global backward", "del backward", "*a, *b = c", "x: int = 0"),
    *("if __name__ == '__main__':", "    pass", "@triton.jit", "def k(X, BLOCK: tl.constexpr):", "    tl.store(X, 1)"),
    *("# -*- coding: utf-7 -*-", "# -*- coding: no-such -*-", "0x", "1_000_", "0o9", "\u0660", "ℌ = 1", "x = '\\N{}'"),
    *("match x:", "    case {**r}:", "type X = int", "print(exec(''))", "x := 1", "lambda: (yield)", "1 if 2 else"),
)
_JSON = ("{", "}", "[", "]", '"gradients"', '"pairs"', ":", ",", "null", "NaN", "1e999", "-0", '"\\ud800"', "1" * 5000)

_anything = st.text(alphabet=st.characters(exclude_categories=()), max_size=200)
_words = st.sampled_from((*_FENCES, *_LANGUAGES, *_MARKERS, *_EDITS, *_BREAKS, *_CODE, *_JSON, "Change: x", BACKWARD))
_bytes = st.binary(max_size=300).map(lambda data: data.decode("latin-1"))
_decoded = st.binary(max_size=300).map(lambda data: data.decode("utf-8", "surrogateescape"))
_pieces = st.one_of(_words, _words, _words, _anything, _bytes, _decoded)


def _fenced(code: str, fence: str, language: str, marker: str, closing: str) -> str:
    return f"Thus:\n\n{fence}{language}\n{marker}\n{code}\n{closing}\n"


_fencings = st.tuples(
    st.sampled_from(("```", "```", "```", *_FENCES)),
    st.sampled_from(("python", "python", *_LANGUAGES)),
    st.sampled_from(("# --- backward ---", "# --- backward ---", *_MARKERS, "")),
    st.sampled_from(("```", "```", "```", "", *_FENCES)),
)


def _in_fence(codes: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda code, how: _fenced(code, *how), codes, _fencings)


NESTINGS: tuple[Callable[[int], str], ...] = (
    lambda n: "x = " + "-" * n + "1",
    lambda n: "x = " + "(" * n + ")" * n,
    lambda n: "x = " + "[" * n,
    lambda n: "x = a" + ".b" * n,
    lambda n: "x = " + "f(" * n + ")" * n,
    lambda n: "x = " + "1+" * n + "1",
    lambda n: "x = " + "not " * n + "1",
    lambda n: "x = " + "lambda: " * n + "1",
    lambda n: "x = " + "1 if 2 else " * n + "3",
    lambda n: "x = " + "{1:" * n + "2" + "}" * n,
    lambda n: "x = a" + "[0]" * n,
    lambda n: "x = " + "1**" * n + "1",
    lambda n: "x = 1" + " < 1" * n,
    lambda n: "\n".join(" " * depth + "if 1:" for depth in range(min(n, 300))),
    lambda n: "\n".join(" " * depth + "def f():" for depth in range(min(n, 300))),
    lambda n: "if 1: pass\n" + "elif 1: pass\n" * n,
    lambda n: "@f\n" * n + "def g(): pass",
    lambda n: "x = " * n + "1",
    lambda n: "x = " + "9" * n,
    lambda n: "x = f'" + "{f'" * min(n, 300) + "'}" * min(n, 300) + "'",
    lambda n: '{"a":' * n + "1" + "}" * n,
    lambda n: "[" * n + "]" * n,
)
"""Texts that nest or repeat a form of Python n times: what parsers and walks over trees recurse on."""

_depths = st.one_of(st.integers(1, 300), st.sampled_from((400, 900, 990, 1000, 3000, 20_000)))
_nested = st.builds(lambda how, n: how(n), st.sampled_from(NESTINGS), _depths)
_long = st.builds(
    lambda piece, end, n: piece * (n // max(1, len(piece))) + end,
    st.sampled_from(
        (*_FENCES, *_BREAKS[:-4], *_EDITS, "a", "`", "~", "#", "-", "# --- ", "x\n", "```x\n", "**", "é", "<")
    ),
    _words,
    st.sampled_from((1000, 30_000, 300_000)),
)


@st.composite
def _turned(draw: st.DrawFn) -> str:
    """An honest reply with some slices dropped, doubled, turned, or replaced by a piece."""
    text = HONEST
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from((0, 1, 2, 10, 100))))
        new = draw(st.one_of(st.just(""), st.just(text[start:end] * 2), st.just(text[start:end][::-1]), _pieces))
        text = text[:start] + new + text[end:]
    return text


def _edit(search: str, replace: str) -> str:
    return f"<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n"


_lines = st.sampled_from(BACKWARD.split("\n"))
_edits = st.lists(st.builds(_edit, st.one_of(_lines, _pieces), st.one_of(_lines, _pieces)), max_size=4).map("".join)
_mixed = st.lists(_pieces, max_size=30).flatmap(lambda parts: st.sampled_from(_BREAKS).map(lambda gap: gap.join(parts)))
_beside = st.builds(lambda extra: f"{extra}\n{BACKWARD}", st.one_of(_nested, _mixed))
_forwards = st.builds(
    lambda extra, more: (
        f"```\n# --- forward ---\ndef forward(x, w):\n    return product(x, w), (x, w)  {extra}\n```\n{more}"
    ),
    _pieces,
    st.just(HONEST),
)

REPLIES: st.SearchStrategy[str] = st.one_of(
    _anything,
    _bytes,
    _decoded,
    _mixed,
    _in_fence(_mixed),
    _in_fence(_nested),
    _in_fence(_beside),
    _in_fence(_beside).flatmap(lambda one: _in_fence(_mixed).map(lambda two: one + two)),
    _turned(),
    _turned(),
    _edits,
    _edits.map(lambda edits: HONEST + edits),
    _nested,
    _forwards,
    _long,
    _in_fence(_long),
)
"""The text of one reply."""
