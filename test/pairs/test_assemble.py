"""A user's file and a candidate's sections become one pair file that runs, reads well and can be read again."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernel_agent.errors import InputError
from kernel_agent.ir import Execution, execute, import_module, standin
from kernel_agent.pairs.assemble import assemble, candidate_from_pair, generated_forward, saved_layout
from kernel_agent.pairs.meta import Gradient, read_meta
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.userfile import read_source

Observe = Callable[..., KernelSpec]
BACKWARD = "def backward(saved, grad_y, needs=None):\n    x, y, factor = saved\n    return grad_y * factor\n"
CANDIDATE = Candidate(backward=BACKWARD)
RETURN = "    return y\n"
STUB = "def scale(x, factor=2.0):"
MAKE = "    return (torch.randn(N, device=device),)\n"


@pytest.fixture
def run_forward(tmp_path: Path) -> Callable[..., Execution]:
    """Import a pair file and run its forward in the executor."""
    count = iter(range(99))

    def runner(pair: str, *args: Any, **kwargs: Any) -> Execution:
        path = tmp_path / f"pair{next(count)}.py"
        path.write_text(pair)
        with standin():
            return execute(import_module(path, path.stem).forward, args, kwargs)

    return runner


def values(outputs: Any) -> list[float]:
    return [round(value, 6) for value in outputs.as_subclass(torch.Tensor).tolist()]


def test_the_whole_file_of_a_small_stub(observed: Observe, scale_text: str) -> None:
    """Golden text: this is what users, models and reviewers read."""
    kernel = scale_text[scale_text.index("@triton.jit") : scale_text.index("@autodiff")].rstrip()
    stub = scale_text[scale_text.index("def scale(") : scale_text.index("SWEEP")].rstrip()
    check = scale_text[scale_text.index("SWEEP") :].rstrip()
    assert assemble(observed(scale_text), CANDIDATE) == (
        f'''"""Multiply by a number."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="scale",
    family="user",
    op="scale",
    schema=1,
    techniques=(),
    saves=("y: float32 (N,)",),
    grads=("x",),
    dtypes=("float32",),
    origin="kernel-agent",
)


# --- forward ---
{kernel}


{stub}


def forward(x, factor=2.0):
    y = scale(x, factor)
    return y, (x, y, factor)


# --- backward ---
{BACKWARD}

# --- check ---
{check}
'''
    )


def test_the_generated_forward_returns_the_stubs_outputs_and_what_it_saves(
    observed: Observe, run_forward: Callable[..., Execution], scale_text: str
) -> None:
    pair = assemble(observed(scale_text), CANDIDATE)
    outputs, saved = run_forward(pair, torch.arange(3.0), 5.0).result
    assert values(outputs) == [0.0, 5.0, 10.0]
    assert values(saved[0]) == [0.0, 1.0, 2.0]
    assert saved[1] is outputs
    assert saved[2] == 5.0


def test_saved_names_tensors_first_then_outputs_then_the_rest(observed: Observe, scale_text: str) -> None:
    """`causal` and the like are saved too: else a backward would have to guess them."""
    spec = observed(
        scale_text,
        (STUB, "def scale(causal, x, factor=2.0, *, w=None):"),
        (MAKE, "    return (True, torch.randn(N)), dict(w=torch.randn(N))\n"),
        (RETURN, "    mean = x.mean()\n    return y, None, mean\n"),
    )
    assert saved_layout(spec) == ("x", "w", "y", "mean", "causal", "factor")
    assert generated_forward(spec) == (
        "def forward(causal, x, factor=2.0, w=None):\n"
        "    y, out1, mean = scale(causal, x, factor, w=w)\n"
        "    return (y, out1, mean), (x, w, y, mean, causal, factor)\n"
    )


def test_a_tuple_of_one_output_stays_a_tuple(observed: Observe, scale_text: str) -> None:
    spec = observed(scale_text, (RETURN, "    return (y,)\n"))
    assert "    (y,) = scale(x, factor)\n    return (y,), (x, y, factor)\n" in generated_forward(spec)


def test_ctx_is_left_out_of_the_generated_forward(observed: Observe, scale_text: str) -> None:
    spec = observed(scale_text, (STUB, "def scale(x, ctx=None, factor=2.0):"))
    text = generated_forward(spec)
    assert "def forward(x, factor=2.0):\n    y = scale(x, factor=factor)\n" in text
    assert "ctx" not in text


def test_star_arguments_are_passed_on(
    observed: Observe, run_forward: Callable[..., Execution], scale_text: str
) -> None:
    spec = observed(
        scale_text,
        (STUB, "def scale(x, *rest, factor=2.0, **options):"),
        (MAKE, "    return (torch.randn(N), torch.randn(N)), dict(bias=torch.randn(N))\n"),
    )
    assert [item.name for item in spec.inputs] == ["x", "rest[0]", "bias"]
    assert saved_layout(spec) == ("x", "*rest", 'options["bias"]', "y", "factor")
    x, r, bias = torch.ones(2), torch.zeros(2), torch.ones(2) * 3
    _, saved = run_forward(assemble(spec, CANDIDATE), x, r, bias=bias).result
    assert [values(t) for t in saved[:4]] == [[1.0, 1.0], [0.0, 0.0], [3.0, 3.0], [2.0, 2.0]]


@pytest.mark.parametrize("name", ["forward", "x", "y"])
def test_a_stub_may_have_a_name_that_the_pair_needs(
    observed: Observe, run_forward: Callable[..., Execution], scale_text: str, name: str
) -> None:
    """A stub called `forward` would be replaced by the pair's; one called like a parameter would be hidden by it."""
    spec = observed(scale_text, (STUB, f"def {name}(x, factor=2.0):"))
    assert values(run_forward(assemble(spec, CANDIDATE), torch.ones(2)).result[0]) == [2.0, 2.0]


def test_a_long_call_is_wrapped(observed: Observe, scale_text: str) -> None:
    names = [f"a_rather_long_parameter_name_{i}" for i in range(6)]
    spec = observed(scale_text, (STUB, f"def scale(x, factor=2.0, {', '.join(f'{n}=0' for n in names)}):"))
    text = generated_forward(spec)
    assert max(len(line) for line in text.splitlines()) <= 110
    ast.parse(text)


def test_the_users_own_backward_main_block_and_unused_functions_are_left_out(
    observed: Observe, scale_text: str
) -> None:
    extra = """

def only_for_backward(g):
    return g


def backward(g):
    return only_for_backward(g)


VARIANTS = {"mine": backward}


def benchmark():
    return scale


if __name__ == "__main__":
    benchmark()
"""
    pair = assemble(observed(scale_text + extra), CANDIDATE)
    for gone in ("only_for_backward", "VARIANTS", "benchmark", "__main__", "autodiff", "import kernel_agent"):
        assert gone not in pair
    assert pair.count("def backward(") == 1


def test_helpers_go_where_they_are_needed_and_keep_their_comments(observed: Observe, scale_text: str) -> None:
    before = """# Rounds up.
def blocks(n):  # of sixteen
    return -(-n // 16)


def wide(x):
    return x.double()


SIZES = (40, 7)  # odd ones too
"""
    pair = assemble(
        observed(
            scale_text,
            ("@triton.jit\n", before + "\n\n# Elementwise.\n@triton.jit\n"),
            ("(triton.cdiv(x.numel(), 16),)", "(blocks(x.numel()),)"),
            ("[dict(N=40), dict(N=7)]", "[dict(N=n) for n in SIZES]"),
            ("    return x * factor", "    return wide(x) * factor"),
        ),
        CANDIDATE,
    )
    sections = split_sections(pair)
    assert "# Rounds up.\ndef blocks(n):  # of sixteen\n" in sections.forward
    assert "# Elementwise.\n@triton.jit\n" in sections.forward
    assert "SIZES = (40, 7)  # odd ones too" in sections.forward
    assert "def wide(x):" in sections.check


def test_a_sweep_that_grows_stays_whole(observed: Observe, scale_text: str) -> None:
    text = scale_text + "\n\nSWEEP += [dict(N=5)]\nSWEEP.append(dict(N=6))\n"
    check = split_sections(assemble(observed(text), CANDIDATE)).check
    assert check.index("SWEEP =") < check.index("SWEEP +=") < check.index("SWEEP.append")


def test_future_imports_come_first_and_missing_standard_imports_are_added(observed: Observe, scale_text: str) -> None:
    """A candidate's sections may count on torch, triton and tl whatever the user calls them."""
    text = scale_text.replace("import triton.language as tl", "from triton import language as tl, jit")
    text = text.replace("import torch\n", "from __future__ import annotations\n\nimport torch\n").replace(
        "@triton.jit", "@jit"
    )
    head = split_sections(assemble(observed(text), CANDIDATE)).head
    assert head.index("from __future__") < head.index("import torch")
    ast.parse(head)
    bare = text.replace("import triton\n", "from triton import cdiv\n").replace("triton.cdiv", "cdiv")
    assert "\nimport triton\n" in split_sections(assemble(observed(bare), CANDIDATE)).head


def test_an_import_shared_with_ours_is_cut_down(observed: Observe, scale_text: str) -> None:
    pair = assemble(
        observed(
            scale_text,
            ("from kernel_agent import autodiff\n", "import math, kernel_agent\n"),
            ("@autodiff\n", "@kernel_agent.autodiff\n"),
        ),
        CANDIDATE,
    )
    assert "\nimport math\n" in pair
    assert "import math, " not in pair
    assert "autodiff" not in pair


def test_other_decorators_of_the_stub_stay(observed: Observe, scale_text: str) -> None:
    pair = assemble(
        observed(scale_text, ("@autodiff\n", "@autodiff(\n    inputs_require_grad=(0,),\n)\n@torch.no_grad()\n")),
        CANDIDATE,
    )
    assert "\n@torch.no_grad()\ndef scale(" in pair
    assert "inputs_require_grad" not in pair


def test_a_candidates_own_forward_takes_the_generated_ones_place(
    observed: Observe, run_forward: Callable[..., Execution], scale_text: str
) -> None:
    own = "def forward(x, factor=2.0):\n    y = scale(x, factor)\n    double = y + y\n    return y, (x, double)\n"
    pair = assemble(observed(scale_text), Candidate(backward=BACKWARD, forward=own))
    assert pair.count("def forward(") == 1
    assert read_meta(pair).saves == ("double",)
    _, saved = run_forward(pair, torch.ones(1)).result
    assert values(saved[1]) == [4.0]


def test_a_forward_that_no_parser_takes_is_assembled_all_the_same(observed: Observe, scale_text: str) -> None:
    # Nested too deeply for Python's parser, which then raises no SyntaxError; the gate says what is wrong.
    own = f"x = {'-' * 20_000}1\n"
    assert own in assemble(observed(scale_text), Candidate(backward=BACKWARD, forward=own))


def test_meta_says_what_the_spec_knows(observed: Observe, scale_text: str) -> None:
    text = scale_text.replace("@autodiff\n", "@autodiff(nondiff_outputs=(1,))\n").replace(
        RETURN, "    return y, y * 2\n"
    )
    text += "\n\ndef surrogate(x, factor=2.0):\n    return x, x\n"
    meta = read_meta(assemble(observed(text), CANDIDATE))
    assert meta.grads == ("x",)
    assert meta.nondiff_outputs == (1,)
    assert meta.gradient is Gradient.CUSTOM
    assert meta.torch_ops
    assert meta.saves == ("y: float32 (N,)", "out1: float32 (N,)")


def test_the_assembled_file_reads_as_a_pair_and_takes_itself_apart_again(observed: Observe, scale_text: str) -> None:
    spec = observed(scale_text)
    pair = assemble(spec, CANDIDATE)
    facts = read_source(pair, Path("scale_backward.py"))
    assert facts.is_pair
    assert facts.inputs_require_grad == ("x",)
    assert facts.parameters == ("x", "factor")
    again = assemble(spec.model_copy(update={"facts": facts}), candidate_from_pair(pair))
    assert again == pair


def test_a_candidates_sections_replace_those_of_a_pair(observed: Observe, scale_text: str) -> None:
    pair = assemble(observed(scale_text), CANDIDATE)
    spec = observed(pair, name="pair.py")
    other = assemble(spec, Candidate(backward="def backward(saved, g):\n    return g\n"))
    before, after = split_sections(pair), split_sections(other)
    assert (after.head, after.forward, after.check) == (before.head, before.forward, before.check)
    assert after.backward == "def backward(saved, g):\n    return g\n\n\n"


@pytest.mark.parametrize("field", ["backward", "forward"])
def test_a_candidate_cannot_bring_a_section_border(observed: Observe, scale_text: str, field: str) -> None:
    """Else it could close its own section and open a check section with another truth."""
    smuggled = {"backward": BACKWARD, field: BACKWARD + "# --- check ---  \ndef reference(x):\n    return x\n"}
    with pytest.raises(InputError, match="section marker"):
        assemble(observed(scale_text), Candidate(**smuggled))


def test_markers_in_a_users_comments_do_no_harm(observed: Observe, scale_text: str) -> None:
    text = scale_text.replace("@triton.jit\n", "# --- forward ---\n@triton.jit\n").replace(
        "SWEEP =", "# --- check ---\nSWEEP ="
    )
    assert split_sections(assemble(observed(text), CANDIDATE))


def module_of(pair: str, folder: Path) -> ModuleType:
    path = folder / "whole.py"
    path.write_text(pair)
    return import_module(path, "whole")


def test_the_assembled_file_imports_as_a_module(observed: Observe, scale_text: str, tmp_path: Path) -> None:
    module = module_of(assemble(observed(scale_text), CANDIDATE), tmp_path)
    assert all(callable(getattr(module, name)) for name in ("forward", "backward", "make_args", "reference"))
