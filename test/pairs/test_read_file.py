"""What a user's file says is read from its syntax; what is wrong in it is one message with line and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.userfile import read_file

Read = Callable[..., FileFacts]
IMPORT = "from kernel_agent import autodiff\n"


def refusal(read: Read, text: str, *changes: tuple[str, str]) -> InputError:
    """The error a changed file gives; it must name the file and a remedy, in one line each."""
    with pytest.raises(InputError) as caught:
        read(text, *changes)
    error = caught.value
    assert error.path is not None
    assert error.remedy
    assert "\n" not in error.message
    assert "Traceback" not in str(error)
    return error


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_facts_of_a_bare_mark(read: Read, scale_text: str) -> None:
    facts = read(scale_text)
    assert facts.stub == "scale"
    assert facts.stub_line == line_of(scale_text, "def scale(")
    assert facts.parameters == ("x", "factor")
    assert facts.inputs_require_grad is None
    assert facts.nondiff_outputs == ()
    assert facts.kernels == ("scale_kernel",)
    assert facts.has_reference
    assert not facts.has_surrogate
    assert not facts.has_backward
    assert not facts.is_pair


@pytest.mark.parametrize(
    ("imports", "mark"),
    [
        ("from kernel_agent import autodiff", "@autodiff(inputs_require_grad=(0,))"),
        ("from kernel_agent.autodiff import autodiff", "@autodiff(inputs_require_grad=[0])"),
        ("from kernel_agent.autodiff import autodiff as differentiate", "@differentiate(inputs_require_grad=(0,))"),
        ("import kernel_agent", "@kernel_agent.autodiff(inputs_require_grad=(0,))"),
        ("import kernel_agent as ka", "@ka.autodiff(inputs_require_grad=(0,))"),
        ("import kernel_agent.autodiff", "@kernel_agent.autodiff.autodiff(inputs_require_grad=(0,))"),
        ("import kernel_agent.autodiff as ad", "@ad.autodiff(inputs_require_grad=(0,))"),
        ("from kernel_agent import *", "@autodiff(inputs_require_grad=(0,))"),
        (
            "try:\n    from kernel_agent import autodiff\nexcept ImportError:\n    pass",
            "@autodiff(inputs_require_grad=(0,))",
        ),
    ],
)
def test_every_way_of_importing_the_mark_is_seen_through(read: Read, scale_text: str, imports: str, mark: str) -> None:
    facts = read(scale_text, (IMPORT, imports + "\n"), ("@autodiff\n", mark + "\n"))
    assert facts.inputs_require_grad == (0,)


def test_names_and_nondiff_outputs_are_read(read: Read, scale_text: str) -> None:
    facts = read(scale_text, ("@autodiff\n", '@autodiff(inputs_require_grad=("x",), nondiff_outputs=(1, 2))\n'))
    assert facts.inputs_require_grad == ("x",)
    assert facts.nondiff_outputs == (1, 2)


def test_the_mark_that_trains_through_a_delivered_pair_is_tolerated(read: Read, scale_text: str) -> None:
    assert read(scale_text, ("@autodiff\n", "@autodiff(backward=HERE / 'b.py')\n")).inputs_require_grad is None


def test_ctx_is_not_counted(read: Read, scale_text: str) -> None:
    changes = (
        ("factor=2.0):\n    y", "factor=2.0, ctx=None):\n    y"),
        ("@autodiff\n", "@autodiff(inputs_require_grad=(0,))\n"),
    )
    assert read(scale_text, *changes).parameters == ("x", "factor")


def test_a_computed_sweep_is_allowed(read: Read, scale_text: str) -> None:
    assert read(scale_text, ("SWEEP = [dict(N=40), dict(N=7)]", "SWEEP = [dict(N=n) for n in (40, 7)]"))


def test_a_main_block_may_do_what_it_likes(read: Read, scale_text: str) -> None:
    work = '\nif __name__ == "__main__":\n    from helpers import plot\n    scale_kernel[(1,)](1, 2, 3, 4, BLOCK=16)\n'
    assert read(scale_text + work)


def test_a_hand_written_backward_is_noticed(read: Read, scale_text: str) -> None:
    assert read(scale_text + "\n\ndef backward(g):\n    return g\n").has_backward


def test_no_decorator(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, ("@autodiff\n", ""))
    assert error.message == "no function is marked with @autodiff"


def test_an_autodiff_of_somebody_else(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, (IMPORT, "from torch import no_grad as autodiff\n"))
    assert "is not kernel-agent's autodiff" in error.message
    assert error.line == line_of(scale_text, "@autodiff")


def test_decorator_on_the_kernel(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, ("@autodiff\n", ""), ("@triton.jit\n", "@autodiff\n@triton.jit\n"))
    assert error.message == "@autodiff stands on the kernel `scale_kernel`"
    assert error.line == line_of(scale_text, "@triton.jit")


def test_two_decorated_stubs(read: Read, scale_text: str) -> None:
    text = scale_text + "\n\n@autodiff\ndef other(x):\n    return scale(x)\n"
    error = refusal(read, text)
    assert "marks 2 stubs: `scale` (line 17), `other`" in error.message
    assert error.line == line_of(text, "@autodiff\ndef other")


def test_a_method_cannot_be_the_stub(read: Read, scale_text: str) -> None:
    text = (
        scale_text.replace("@autodiff\n", "")
        + "\n\nclass Layer:\n    @autodiff\n    def call(self, x):\n        pass\n"
    )
    assert "no plain module-level function" in refusal(read, text).message


@pytest.mark.parametrize("name", ["SWEEP", "make_args"])
def test_no_sweep_or_make_args(read: Read, scale_text: str, name: str) -> None:
    error = refusal(read, scale_text, (name, "other_" + name))
    assert error.message == f"the file has no {name}"


def test_an_empty_sweep(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, ("[dict(N=40), dict(N=7)]", "[]"))
    assert error.message == "SWEEP is empty"
    assert error.line == line_of(scale_text, "SWEEP =")


@pytest.mark.parametrize("position", [2, -1])
def test_an_index_out_of_range(read: Read, scale_text: str, position: int) -> None:
    error = refusal(read, scale_text, ("@autodiff\n", f"@autodiff(inputs_require_grad=(0, {position}))\n"))
    assert f"names argument {position}, but `scale` has 2 argument(s): x, factor" in error.message
    assert error.line == line_of(scale_text, "@autodiff")


def test_an_unknown_argument_name(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, ("@autodiff\n", '@autodiff(inputs_require_grad=("weight",))\n'))
    assert "names `weight`, but `scale` has 2" in error.message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("(0,)", "keyword arguments only"),
        ("inputs=(0,)", "no argument `inputs`"),
        ("inputs_require_grad=0", "no tuple of positions or names"),
        ("inputs_require_grad=(0.5,)", "no tuple of positions or names"),
        ("inputs_require_grad=(True,)", "no tuple of positions or names"),
        ("inputs_require_grad=()", "nothing is to be differentiated"),
        ("inputs_require_grad=WANTED", "is not literal"),
        ("nondiff_outputs=('y',)", "no tuple of positions"),
        ("nondiff_outputs=(-1,)", "negative position"),
    ],
)
def test_a_mark_that_cannot_be_read(read: Read, scale_text: str, arguments: str, said: str) -> None:
    error = refusal(read, scale_text, ("@autodiff\n", f"@autodiff({arguments})\n"))
    assert said in error.message
    assert error.line == line_of(scale_text, "@autodiff")


@pytest.mark.parametrize("statement", ["from .helpers import f", "from helpers import f", "import helpers as h"])
def test_a_helper_in_another_module(read: Read, scale_text: str, tmp_path: Path, statement: str) -> None:
    (tmp_path / "helpers.py").write_text("raise RuntimeError('this file must never be imported')\n")
    error = refusal(read, scale_text, (IMPORT, IMPORT + statement + "\n"))
    assert error.message.startswith("helper in another module: ")
    assert error.line == line_of(scale_text, IMPORT) + 1


def test_a_module_that_is_not_installed(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, (IMPORT, IMPORT + "import surely_not_installed_anywhere\n"))
    assert "`surely_not_installed_anywhere` is not installed" in error.message


def test_an_optional_module_may_be_missing(read: Read, scale_text: str) -> None:
    guarded = "try:\n    import surely_not_installed_anywhere\nexcept ImportError:\n    pass\n"
    assert read(scale_text, (IMPORT, IMPORT + guarded))


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("scale_kernel[(1,)](None, None, 1.0, 0, BLOCK=16)", "the kernel `scale_kernel` is launched"),
        ("result = scale(torch.ones(4))", "`scale(...)` launches a kernel"),
        ("for step in range(9):\n    loss.backward()", "`.backward()` is called"),
        ("table = torch.randn(8192, 8192)", "67,108,864 elements"),
        ("def bench():\n    scale(1)\n\n\ndef run_all():\n    bench()\n\n\nrun_all()", "`run_all(...)` launches"),
        ("@triton.testing.perf_report([])\ndef bench():\n    pass\n\n\nbench.run()", "benchmark `bench` is run"),
        ("ms = triton.testing.do_bench(lambda: scale(1))", "`triton.testing.do_bench(...)` measures"),
        ("from triton.testing import do_bench\n\nms = do_bench(lambda: scale(1))", "`do_bench(...)` measures"),
    ],
)
def test_heavy_work_at_module_level(read: Read, scale_text: str, work: str, said: str) -> None:
    error = refusal(read, scale_text + "\n\n" + work + "\n")
    assert error.message.startswith("heavy work at module level")
    assert said in error.message
    assert error.line is not None
    assert error.line > scale_text.count("\n")


def test_a_syntax_error_has_its_line(read: Read, scale_text: str) -> None:
    error = refusal(read, scale_text, ("    return y\n", "    return y)\n"))
    assert "not valid Python" in error.message
    assert error.line == line_of(scale_text, "    return y\n")


def test_a_file_of_null_bytes(read: Read) -> None:
    assert "not valid Python" in refusal(read, "\0\0").message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        read_file(tmp_path / "missing.py")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this is a folder"):
        read_file(tmp_path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_file(tmp_path / "x.py")


def test_a_byte_order_mark_is_legal_python(scale_text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(scale_text, encoding="utf-8-sig")
    assert read_file(path).source == scale_text


def test_what_is_missing_points_at_where_it_belongs(read: Read, scale_text: str) -> None:
    """Line 1 is the file's docstring: an editor that jumps there shows nothing."""
    assert refusal(read, scale_text, ("@autodiff\n", "")).line == line_of(scale_text, "def scale(") - 1
    assert refusal(read, scale_text, ("SWEEP =", "SWEPT =")).line == scale_text.count("\n")
