"""One kernel for two configurations: each is what it was, and what both do stands once."""

from __future__ import annotations

import ast
import re

from kernel_agent.compiler.emit.source import KernelSource
from kernel_agent.compiler.stub.united import united

CAUSAL = '''@triton.jit
def kernel(
    X,
    DELTA,
    Y,
    S,
    T,
    BLOCK: tl.constexpr,
):
    """dX from dY.

    Rows see what is before them.
    """
    pid = tl.program_id(0)
    # What is behind a row is not seen.
    end = tl.minimum(S, (pid + 1) * BLOCK)
    lanes = tl.arange(0, BLOCK)
    delta = tl.load(DELTA + lanes)
    clear = end // BLOCK
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(clear, end, BLOCK):
        cols = start + lanes
        seen = cols <= pid
        x = tl.load(X + cols, mask=cols < S, other=0.0)
        total += tl.where(seen, x, 0.0) * delta
    tl.store(Y + pid * BLOCK + lanes, total)
'''
FULL = '''@triton.jit
def kernel_2(
    X,
    DELTA,
    Y,
    S,
    BLOCK: tl.constexpr,
):
    """dX from dY.

    Rows see all.
    """
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    delta = tl.load(DELTA + lanes)
    clear = S // BLOCK
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(clear, S, BLOCK):
        cols = start + lanes
        x = tl.load(X + cols, mask=cols < S, other=0.0)
        total += x * delta
    tl.store(Y + pid * BLOCK + lanes, total)
'''


def source(text: str) -> KernelSource:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    names = node.args.args
    constants = tuple(one.arg for one in names if one.annotation)
    return KernelSource(node.name, text, tuple(one.arg for one in names), constants)


class Taken(ast.NodeTransformer):
    """What Triton compiles of a kernel: the branches that a flag takes."""

    def __init__(self, flag: str, holds: bool) -> None:
        self.texts = {flag: holds, f"not {flag}": not holds}

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        holds = self.texts.get(ast.unparse(node.test))
        return node if holds is None else node.body if holds else node.orelse


def statements(text: str, flag: str = "", holds: bool = False) -> list[str]:
    """The lines of a kernel, sorted."""
    (function,) = Taken(flag, holds).visit(ast.parse(text)).body
    return sorted(line for node in function.body[1:] for line in ast.unparse(node).split("\n"))


def test_each_configuration_compiles_what_it_did() -> None:
    # a statement under the wrong flag, or lost, or one more, would be another kernel
    both = united(source(CAUSAL), source(FULL), "IS_CAUSAL")
    assert both is not None
    assert statements(both.text, "IS_CAUSAL", True) == statements(CAUSAL)
    full = [text.replace("clear, end,", "clear, S,") for text in statements(both.text, "IS_CAUSAL", False)]
    assert "end = S" in full, "the loop of both ends at what this one calls S"
    assert sorted(text for text in full if text != "end = S") == statements(FULL)
    assert both.parameters == ("X", "DELTA", "Y", "S", "T", "BLOCK", "IS_CAUSAL")
    assert both.constexprs == ("BLOCK", "IS_CAUSAL")


def test_what_both_do_stands_once_and_the_rest_under_few_branches() -> None:
    both = united(source(CAUSAL), source(FULL), "IS_CAUSAL")
    assert both is not None
    assert both.text.count("for start in range(") == both.text.count("tl.load(X") == 1
    # `end` waits for `clear`, which differs too, and `seen` for the sum: there is one branch for each two
    assert len(re.findall(r"if (?:not )?IS_CAUSAL:", both.text)) == 2
    assert "With IS_CAUSAL: Rows see what is before them." in both.text
    assert "Without IS_CAUSAL: Rows see all." in both.text
    assert "        # What is behind a row is not seen.\n        end = " in both.text


def test_a_load_is_not_put_off_behind_a_store() -> None:
    # what is stored may be what is loaded
    lines = ["    a = tl.load(X)", "    tl.store(X, b)", "    tl.store(Y, b)"]
    head, tail = (
        '@triton.jit\ndef kernel(X, Y, b, N: tl.constexpr):\n    """d."""\n',
        [f"    b{n} = {n}" for n in range(9)],
    )
    one = source(head + "\n".join([*lines, "    tl.store(Y, a)", *tail]) + "\n")
    other = source(head + "\n".join([*lines[1:], "    tl.store(Y, N)", *tail]) + "\n")
    both = united(one, other, "FLAG")
    assert both is not None
    assert both.text.index("tl.load(X)") < both.text.index("tl.store(X, b)")


def test_kernels_with_little_in_common_stay_two() -> None:
    rows = "\n".join(f"    a{n} = {n}" for n in range(20))
    other = FULL[: FULL.index("    pid =")] + rows + "\n    tl.store(Y, a1)\n"
    assert united(source(CAUSAL), source(other), "IS_CAUSAL") is None


def test_a_flag_that_a_kernel_has_already_is_refused() -> None:
    # `S` as a flag would take the place of the number of columns
    assert united(source(CAUSAL), source(FULL), "S") is None


def document(first: str, formulas: str, rest: str) -> str:
    rows = "\n".join(f"    a{n} = {n}" for n in range(9))
    said = f"{first}\n\n        {formulas}\n\n    {rest}\n    "
    return f'@triton.jit\ndef kernel(X, N: tl.constexpr):\n    """{said}"""\n{rows}\n'


def test_a_docstring_says_once_what_is_so_of_both() -> None:
    # Each formula and sentence has the condition under which it holds; those of both have none, and none is lost.
    one = source(
        document("dX and dB from dY.", "dX = dY * W\n        dB = sum(dY)", "Programs own rows. Stores are plain.")
    )
    other = source(document("dX from dY.", "dX = dY * W", "Programs own rows. dX is added to."))
    both = united(one, other, "HAS_BIAS")
    assert both is not None
    assert ast.get_docstring(ast.parse(both.text).body[0]) == (  # type: ignore[arg-type]
        "With HAS_BIAS: dX and dB from dY.\n\nWithout HAS_BIAS: dX from dY.\n\n"
        "    dX = dY * W\n\nWith HAS_BIAS:\n\n    dB = sum(dY)\n\n"
        "Programs own rows.\n\nWith HAS_BIAS: Stores are plain.\n\nWithout HAS_BIAS: dX is added to."
    )


def test_what_a_kernel_of_two_flags_says_stands_under_both() -> None:
    # Read as sentences of one kernel, those of the first flag would lose it.
    one, other = (source(document(f"{name} from dY.", f"{name} = dY", "Stores are plain.")) for name in ("dX", "dB"))
    first = united(one, other, "FIRST")
    assert first is not None
    both = united(first, one, "SECOND")
    assert both is not None
    said = ast.get_docstring(ast.parse(both.text).body[0])  # type: ignore[arg-type]
    assert said is not None
    assert said.startswith("With SECOND:\n\n    With FIRST: dX from dY.\n\n    Without FIRST: dB from dY.")
    assert "Without SECOND:\n\n    dX from dY." in said
