"""Files of the published tool import the mark in two ways; each must work, in any order, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = "from kernel_agent.autodiff import autodiff as a"
PACKAGE = "from kernel_agent import autodiff as b"
USE = """
from kernel_agent.autodiff import MARK, AutodiffMark
@{mark}(inputs_require_grad=(0, "w"), nondiff_outputs=(1,))
def stub(x, w): return x
assert stub(1, 2) == 1
assert getattr(stub, MARK) == AutodiffMark((0, "w"), (1,), None)
@{mark}
def bare(x): return x
assert getattr(bare, MARK) == AutodiffMark(None, (), None)
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [(MODULE, PACKAGE), (PACKAGE, MODULE)])
def test_both_imports_give_the_same_function_in_either_order(order: tuple[str, str]) -> None:
    """Importing the submodule rebinds the package's attribute of that name: the second import could get the module."""
    run("\n".join([*order, "assert a is b", "assert callable(a)", USE.format(mark="a")]))


@pytest.mark.parametrize(
    ("imports", "mark"),
    [
        ("import kernel_agent", "kernel_agent.autodiff"),
        ("import kernel_agent.autodiff", "kernel_agent.autodiff"),
        ("import kernel_agent.autodiff", "kernel_agent.autodiff.autodiff"),
        ("import kernel_agent.autodiff as ad", "ad.autodiff"),
    ],
)
def test_dotted_marks_work(imports: str, mark: str) -> None:
    run(f"{imports}\n{USE.format(mark=mark)}")


def test_importing_the_mark_loads_nothing_heavy() -> None:
    """User files import it where torch is not configured yet."""
    run(f"{MODULE}\nimport sys\nassert not {{'torch', 'triton', 'pydantic', 'typer'}} & set(sys.modules)")
