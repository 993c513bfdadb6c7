"""What is left of a candidate's file in the process that is believed: kernels and constants, nothing that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.gate.kernels_alone import kernels_alone

SOURCE = (Path(__file__).parent / "pairs" / "softmax.py").read_text()


def with_backward(text: str) -> str:
    head, rest = SOURCE.split("# --- backward ---\n")
    return f"{head}# --- backward ---\n{text}\n# --- check ---{rest.split('# --- check ---')[1]}"


def test_kernels_stay_on_their_lines_and_backward_goes() -> None:
    alone = kernels_alone(SOURCE, SOURCE)
    lines = alone.text.split("\n")
    assert "def backward" not in alone.text
    assert "def forward" in alone.text, "it is the user's own"
    for number, line in enumerate(SOURCE.split("\n")):
        if "def _softmax_bwd" in line:
            assert lines[number] == line


def test_a_forward_that_the_candidate_changed_is_not_taken_over() -> None:
    changed = SOURCE.replace("    M, N = x.shape\n", "    M, N = x.shape\n    print(1)\n", 1)
    alone = kernels_alone(changed, SOURCE)
    assert alone.trusted_lines == 0
    assert "print" not in alone.text
    assert "def _softmax_fwd" in alone.text


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "from os import *",
        "X = open('/etc/passwd').read()",
        "X = 1; import os",
        "X = [i for i in (os.system('true'),)]",
        "float = torch.load\nX = float('evil')",
        "import torch as math\nX = math.load('evil')",
        "constexpr = torch.load\nX = constexpr('evil')",
        "def k(a=open('x')):\n    pass",
        "@triton.jit\ndef k(a=open('x')):\n    pass",
        "@triton.jit\ndef k(a: open('x')):\n    pass",
        "@evil\n@triton.jit\ndef k(a):\n    pass",
        "@triton.jit(repr=open('x'))\ndef k(a):\n    pass",
        "@triton.jit(do_not_specialize=[open('x')])\ndef k(a):\n    pass",
        "@triton.jit\ndef k(a) -> open('x'):\n    pass",
        "from torch import compile as jit\n@jit\ndef k(a):\n    evil = 1",
        "class A:\n    open('x')",
        "if True:\n    open('x')",
        "# a lone return: \ropen('x')\nX = 1",
        "X = torch.__class__",
        "from triton import __builtins__ as X",
        "try:\n    import torch as math\nexcept ImportError:\n    X = math.load('evil')",
        "import torch as m\nif hasattr(m, 'a'):\n    import math as m\nelse:\n    X = m.load('evil')",
        "if hasattr(open('x'), 'y'):\n    X = 1",
        "try:\n    import os\nexcept ImportError:\n    pass",
        "try:\n    import math\nexcept open('x'):\n    pass",
        "ImportError = torch.load\ntry:\n    import math\nexcept ImportError('evil'):\n    pass",
        "@triton.constexpr_function\ndef f(a):\n    return open('x')",
        "@triton.constexpr_function\ndef f(math):\n    return math.load('evil')",
        "@triton.constexpr_function\ndef f(a):\n    math = torch\n    return math.load('evil')",
        "@triton.constexpr_function\ndef f(a=open('x')):\n    return a",
        "@triton.constexpr_function\ndef f(a):\n    for evil in a:\n        pass\n    return a",
        "constexpr_function = torch.load\n@constexpr_function\ndef f(a):\n    return 'evil'",
        "@triton.jit(launch_metadata=open('x'), repr=open)\ndef k(a):\n    return a",
    ],
)
def test_nothing_that_runs_is_left(text: str) -> None:
    """Every line that would do something is gone; what is left is imported without harm."""
    left = kernels_alone(with_backward(text), SOURCE).text.partition("# --- backward ---")[2]
    for word in ("open", "import os", "system", "'evil'", "evil", "__class__", "__builtins__"):
        assert word not in left


def test_a_backward_section_that_rebinds_what_the_forward_uses_takes_no_forward_over() -> None:
    # Otherwise the user's forward would run with the candidate's meaning of a name.
    assert kernels_alone(with_backward("triton = 1"), SOURCE).trusted_lines == 0
    assert kernels_alone(with_backward("BLOCK_OF_MINE = 1"), SOURCE).trusted_lines > 0


@pytest.mark.parametrize(
    "text",
    [
        "@triton.jit\ndef k(a, B: tl.constexpr = 4) -> tl.tensor:\n    return a",
        "@triton.jit(do_not_specialize=['n'])\ndef k(a, n):\n    return a",
        "@triton.autotune([triton.Config({})], key=[])\n@triton.jit\ndef k(a):\n    return a",
        "LOG2E: tl.constexpr = tl.constexpr(1 / math.log(2))\n\n\n@triton.jit\ndef k(a):\n    return a * LOG2E",
        "def said(*a): return {}\n\n\n@triton.jit(\n    launch_metadata=said, repr=said\n)\ndef k(a):\n    return a",
    ],
    ids=["annotated", "options", "autotuned", "constant", "told to profilers"],
)
def test_what_honest_kernels_look_like_is_left(text: str) -> None:
    left = kernels_alone(with_backward(f"import math\n\n{text}"), SOURCE)
    assert "def k(" in left.text
    assert "autotune" not in left.text, "launches are recorded with the configuration that was chosen"
    assert left.text.count("LOG2E") == text.count("LOG2E")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from triton.language.extra.libdevice import f\nexcept (ImportError, ModuleNotFoundError):\n"
        "    from triton.language.math import f",
        "if hasattr(tl, 'exp2') and triton.__version__ > '3':\n    f = tl.constexpr(1)\nelse:\n    f = tl.constexpr(2)",
        "@triton.constexpr_function\ndef f(a, b: int = 2):\n    'Larger.'\n    c = a + b\n    if c > 3:\n"
        "        return max(a, b)\n    return c",
        "f, F = tl.constexpr(torch.finfo(torch.float16).max), 2",
    ],
    ids=["by version", "chosen", "at compile time", "two at once"],
)
def test_what_kernels_use_is_left(text: str) -> None:
    # Without it a kernel cannot be compiled where no code of the candidate runs, and an honest file is refused.
    left = kernels_alone(with_backward(f"{text}\n\n\n@triton.jit\ndef k(a):\n    return f"), SOURCE)
    assert text in left.text


def test_what_a_function_of_constants_uses_gets_no_other_meaning_later() -> None:
    # It runs when a kernel is compiled, with what its names mean by then.
    text = "import math\n@triton.constexpr_function\ndef f(a):\n    return math.load(a)\n\n\nimport torch as math"
    left = kernels_alone(with_backward(text), SOURCE).text
    assert "return math.load(a)" in left
    assert "torch as math" not in left


NESTED = """
LIMIT: tl.constexpr = tl.constexpr(4)

def make({given}):
    {before}
    @triton.autotune([triton.Config({{}})], key=[])
    @triton.jit
    def inner(a, {parameter}):
        b = tl.minimum(a, LIMIT)
        return b
    {after}
    return inner
"""


def nested(given: str = "", before: str = "pass", parameter: str = "C: tl.constexpr = 3", after: str = "pass") -> str:
    text = NESTED.format(given=given, before=before, parameter=parameter, after=after)
    return kernels_alone(with_backward(text), SOURCE).text.partition("# --- backward ---")[2]


def test_a_kernel_that_a_function_or_a_class_defines_is_left_where_it_stands() -> None:
    # Builders of kernels define them so; each is named by its line, which must stay.
    for head in ("def make():", "class Operator:", "def make(n):", "if open('x'):", "def outer():\n  def make(b):"):
        text = NESTED.format(given="", before="pass", parameter="C", after="b = 1").replace("def make():", head)
        if "  def make" in head:
            text = text.replace("\n    ", "\n      ")
        left = kernels_alone(with_backward(text), SOURCE).text
        assert "\ndef inner(" in left, head
        assert "open" not in left
        at = with_backward(text).splitlines().index(next(row for row in text.splitlines() if "def inner" in row))
        assert left.splitlines()[at].startswith("def inner("), head


@pytest.mark.parametrize(
    "changes",
    [
        {"given": "LIMIT"},
        {"before": "LIMIT = 2"},
        {"after": "import math as LIMIT"},
        {"after": "for LIMIT in range(3): pass"},
        {"after": "def inside(LIMIT): pass"},
        {"before": "C = 4", "parameter": "D: tl.constexpr = C"},
        {"after": "global inner"},
        {"after": "return 1\n\ndef inner(): pass\ndef other():"},
    ],
    ids=["argument", "assigned", "imported", "loop", "inside", "default", "global", "its name"],
)
def test_a_nested_kernel_that_would_mean_something_else_at_the_top_level_is_not_left(changes: dict[str, str]) -> None:
    # What is carried out again would not be what runs in the user's program.
    assert "def inner(" in nested()
    assert "inner" not in nested(**changes)


def test_of_two_nested_kernels_of_one_name_none_is_left() -> None:
    text = nested() + nested().replace("make", "remake")
    assert "inner" in text
    both = NESTED.format(given="", before="pass", parameter="C", after="pass")
    left = kernels_alone(with_backward(both + both.replace("make", "remake")), SOURCE).text
    assert "inner" not in left
