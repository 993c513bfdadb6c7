"""A stub out of its surroundings: everything it needs stands in the text, and the text runs by itself."""

from __future__ import annotations

import functools
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
import trainable
import trainable_parts

from kernel_agent.ir import import_module
from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.names import free_names
from kernel_agent.jit.slices import slice_of

HEAD = """
import functools
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff, differentiable

"""


@pytest.fixture
def module(tmp_path: Path):
    def write(text: str) -> ModuleType:
        path = tmp_path / "user.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return import_module(path, "user_of_slices")

    return write


def names_of(text: str) -> set[str]:
    scope: dict[str, object] = {}
    exec(compile(text.replace("@triton.jit", "@staticmethod"), "<slice>", "exec"), scope)
    return set(scope)


def test_kernels_helpers_and_values_of_other_modules_come_along():
    text = slice_of(trainable.scaled).text("@mark")
    assert {"scaled_kernel", "halved", "tile_of", "HALF", "FACTOR"} <= names_of(text.replace("@mark", ""))
    assert "trainable_parts" not in text


def test_what_is_not_needed_stays_behind():
    text = slice_of(trainable.scaled).text("@mark")
    assert "square_kernel" not in text
    assert "SMALL" not in text


def test_a_value_that_was_bound_again_is_written_as_it_is_now(monkeypatch):
    monkeypatch.setattr(trainable, "SMALL", 7)
    assert "SMALL = 7" in slice_of(trainable.by_size).text("@mark")


def test_a_value_that_changes_later_makes_a_slice_stale(monkeypatch):
    found = slice_of(trainable.by_size)
    assert not found.stale()
    monkeypatch.setattr(trainable, "SMALL", 7)
    assert found.stale()


def test_a_constexpr_stays_one():
    assert "HALF = tl.constexpr(0.5)" in slice_of(trainable.scaled).text("@mark")
    assert trainable_parts.HALF.value == 0.5


def test_lines_lead_back_to_the_users_file():
    found = slice_of(trainable.scaled)
    text = found.text("@mark").split("\n")
    for wanted in ("    y = x * x * x if CUBE else halved(x)", "    M, N = x.shape", "def tile_of(n):"):
        file, line = found.place(text.index(wanted) + 1, "@mark") or ("", 0)
        assert Path(file).read_text().split("\n")[line - 1] == wanted


def test_a_mark_of_ours_is_left_out_and_others_stay(module):
    user = module(
        """
        @autodiff(inputs_require_grad=("x",))
        @functools.lru_cache(maxsize=None)
        def stub(x):
            return torch.empty_like(x)
        """
    )
    text = slice_of(user.stub).text("@mark")
    assert "autodiff(" not in text
    assert "@mark\n@functools.lru_cache(maxsize=None)\ndef stub(x):" in text
    assert "import functools" in text


def test_a_stub_inside_of_a_function_takes_its_closure_along(module):
    user = module(
        """
        def make(factor):
            def stub(x):
                return torch.empty_like(x) * factor
            return stub
        """
    )
    assert "factor = 3" in slice_of(user.make(3)).text("@mark")


def test_tuned_kernels_keep_their_configurations(module):
    user = module(
        """
        CONFIGS = [triton.Config({"BLOCK": block}) for block in (32, 64)]

        @triton.autotune(configs=CONFIGS, key=["n"])
        @triton.jit
        def kernel(X, n, BLOCK: tl.constexpr):
            pass

        def stub(x):
            kernel[(1,)](x, x.numel())
            return x
        """
    )
    text = slice_of(user.stub).text("@mark")
    assert text.index("CONFIGS = [triton.Config") < text.index("@triton.autotune(configs=CONFIGS")


def test_a_kernel_that_was_tuned_by_a_call_is_tuned_in_the_slice(module):
    user = module(
        """
        @triton.jit
        def plain(X, n, BLOCK: tl.constexpr):
            pass

        tuned = triton.autotune(configs=[triton.Config({"BLOCK": 32})], key=["n"])(plain)

        def stub(x):
            tuned[(1,)](x, x.numel())
            return x
        """
    )
    text = slice_of(user.stub).text("@mark")
    assert text.index("def plain") < text.index("tuned = triton.autotune(")


def test_what_cannot_be_written_down_is_refused_by_its_name(module):
    user = module(
        """
        def loaded():
            return torch.ones(3)

        for table in [loaded()]:
            pass

        def stub(x):
            return x + table
        """
    )
    with pytest.raises(CannotTrain, match="the stub needs `table`, a Tensor"):
        slice_of(user.stub)


def test_methods_are_refused(module):
    user = module(
        """
        class Layer:
            def stub(self, x):
                return x
        """
    )
    with pytest.raises(CannotTrain, match=r"`Layer\.stub` is a member of a class"):
        slice_of(user.Layer.stub)


def test_partials_are_refused():
    with pytest.raises(CannotTrain, match="a stub is a plain function"):
        slice_of(functools.partial(trainable.scaled, cube=True))


def test_free_names_are_those_of_bodies_decorators_and_defaults_but_not_locals():
    source = "@deco(a)\ndef f(x: T, y=b):\n    z = c\n    return [z for z in d] + (lambda q: q + e)(x)\n"
    assert set(free_names(source)) == {"deco", "a", "T", "b", "c", "d", "e"}


def test_torch_is_imported_and_not_copied():
    assert slice_of(trainable.windows).imports[:3] == ("import torch", "import triton", "import triton.language as tl")
    assert torch.__name__ == "torch"
