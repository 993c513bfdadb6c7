"""What one run of the stub shows, and what only a run can find wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_agent.errors import InputError
from kernel_agent.pairs import arguments, timelimit
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.spec import ArgumentKind, Candidate, FileFacts, KernelSpec
from kernel_agent.pairs.timelimit import time_limit

Observe = Callable[..., KernelSpec]
RETURN = "    return y\n"
MAKE = "    return (torch.randn(N, device=device),)\n"


def refusal(observed: Observe, text: str, *changes: tuple[str, str]) -> InputError:
    with pytest.raises(InputError) as caught:
        observed(text, *changes)
    assert caught.value.path is not None
    assert caught.value.path.name == "scale.py"
    assert "kernel_agent_" not in str(caught.value.path), "the message must name the user's file, not our copy"
    assert caught.value.remedy
    return caught.value


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_inputs_that_the_stub_writes_into_are_named(observed: Observe, scale_text: str) -> None:
    # Deliveries tell autograd of these: an unseen write gives silently wrong gradients elsewhere.
    assert observed(scale_text).mutated == ()
    assert observed(scale_text, ("y = torch.empty_like(x)", "y = x")).mutated == ("x",)


def test_the_smallest_entry_is_described(observed: Observe, scale_text: str) -> None:
    spec = observed(scale_text)
    (x,), (y,) = spec.inputs, spec.outputs
    assert (x.name, x.kind, x.dtype, x.shape, x.needs_grad) == ("x", ArgumentKind.TENSOR, "float32", (7,), True)
    assert (y.name, y.kind, y.dtype, y.shape, y.needs_grad) == ("y", ArgumentKind.TENSOR, "float32", (7,), True)
    assert spec.grads == ("x",)
    assert spec.launches == ("scale_kernel",)
    assert not spec.returns_tuple
    assert [entry.dims for entry in spec.sweep] == [{"N": 40}, {"N": 7}]


def test_a_spec_survives_json(observed: Observe, scale_text: str) -> None:
    """It travels from the child to the parent; flags, floats and tuples must not change type on the way."""
    entry = "dict(N=7, causal=True, s=1.0, sizes=[3, 4], dtype=torch.float16, required=False)"
    text = scale_text.replace("dict(N=40), dict(N=7)", entry).replace('device="cuda")', 'device="cuda", **rest)')
    spec = observed(text)
    again = KernelSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    dims = again.sweep[0].dims
    assert dims == {"N": 7, "causal": True, "s": 1.0, "sizes": (3, 4), "dtype": "torch.float16"}
    assert [type(value) for value in dims.values()] == [int, bool, float, tuple, str]
    assert not again.sweep[0].required


def test_files_written_for_a_gpu_are_observed_without_one(observed: Observe, scale_text: str) -> None:
    device = "DEVICE = triton.runtime.driver.active.get_active_torch_device()\n"
    changes = (
        ("@triton.jit\n", device + 'assert DEVICE.type == "cuda"\n\n\n@triton.jit\n'),
        ("    y = torch", "    assert x.is_cuda\n    y = torch"),
        (MAKE, "    return (torch.randn(N, device=DEVICE),)\n"),
    )
    assert observed(scale_text, *changes).grads == ("x",)


def test_all_kinds_of_outputs_are_told_apart(observed: Observe, scale_text: str) -> None:
    returned = "    return y, None, x.numel(), y.detach(), torch.ones(3, dtype=torch.int64), [1], y * 1\n"
    spec = observed(scale_text, (RETURN, returned), ("@autodiff\n", "@autodiff(nondiff_outputs=(6,))\n"))
    kinds = [output.kind.value for output in spec.outputs]
    assert kinds == ["tensor", "none", "other", "tensor", "tensor", "other", "tensor"]
    assert [output.needs_grad for output in spec.outputs] == [True, False, False, False, False, False, False]
    assert [output.name for output in spec.outputs] == ["y", "out1", "out2", "out3", "out4", "out5", "out6"]
    assert spec.returns_tuple
    assert spec.torch_ops, "the multiplication is computed by torch and a backward may use it too"


OPTIONAL = (
    ("def scale(x, factor=2.0):", "def scale(x, factor=2.0, bias=None):"),
    ("    return y\n", "    return y if bias is None else y + bias\n"),
    ("SWEEP = [dict(N=40), dict(N=7)]", "SWEEP = [dict(N=40, bias=True), dict(N=7, bias=False)]"),
    ("def make_args(N, ", "def make_args(N, bias, "),
)


@pytest.mark.parametrize(
    "made",
    [
        "(torch.randn(N, device=device), 2.0, torch.randn(N, device=device) if bias else None)",
        "(torch.randn(N, device=device), 2.0, torch.randn(N, device=device))[: 3 if bias else 1]",
    ],
)
def test_a_tensor_that_the_smallest_entry_leaves_out_has_a_gradient(
    observed: Observe, scale_text: str, made: str
) -> None:
    # Taken from the smallest entry alone, the gradients were those of x: users got none of a bias, and no word of it.
    spec = observed(scale_text, *OPTIONAL, (MAKE, f"    return {made}\n"))
    assert spec.grads == ("x", "bias")
    assert next(item.kind for item in spec.inputs if item.name == "bias") is ArgumentKind.NONE


def test_a_gradient_of_what_no_entry_gives_is_refused(observed: Observe, scale_text: str) -> None:
    made = "(torch.randn(N, device=device), 2.0, None)"
    marked = ("@autodiff\n", '@autodiff(inputs_require_grad=("x", "bias"))\n')
    error = refusal(observed, scale_text, *OPTIONAL, (MAKE, f"    return {made}\n"), marked)
    assert "`bias`, which is None at every SWEEP entry" in error.message


def test_keyword_arguments_follow_positional_ones(observed: Observe, scale_text: str) -> None:
    spec = observed(scale_text, (MAKE, "    return (torch.randn(N, device=device),), dict(factor=3.0)\n"))
    assert [(item.name, item.kind.value, item.text) for item in spec.inputs] == [
        ("x", "tensor", ""),
        ("factor", "other", "3.0"),
    ]


def test_ctx_may_stand_in_the_stub(observed: Observe, scale_text: str) -> None:
    spec = observed(scale_text, ("factor=2.0):\n    y", "factor=2.0, ctx=None):\n    y"))
    assert spec.facts.parameters == ("x", "factor")


def test_a_stub_that_trains_through_a_delivered_file_is_still_its_own_truth(observed: Observe, scale_text: str) -> None:
    """A second run must prove the stub that is written there, not the operator of the first run."""
    assert observed(scale_text, ("@autodiff\n", '@autodiff(backward="missing.py")\n')).launches == ("scale_kernel",)


def test_setup_is_never_called(observed: Observe, scale_text: str) -> None:
    assert observed(scale_text + "\n\ndef setup():\n    raise SystemExit('setup was called')\n")


def test_a_surrogate_makes_the_gradient_custom(observed: Observe, scale_text: str) -> None:
    assert observed(scale_text + "\n\ndef surrogate(x, factor=2.0):\n    return x\n").custom_gradient


def test_a_pair_is_observed_without_its_backward(
    observed: Observe, read: Callable[..., FileFacts], scale_text: str
) -> None:
    """The truth child must not run a line of the backward section."""
    pair = assemble(observed(scale_text), Candidate(backward="raise SystemExit('the backward was run')\n"))
    spec = observed(pair, name="scale_backward.py")
    assert spec.facts.is_pair
    assert spec.grads == ("x",)
    assert [output.name for output in spec.outputs] == ["y"]
    assert not spec.returns_tuple


def test_make_args_raising(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, (MAKE, "    raise ValueError('no such shape')\n"))
    assert error.message == "make_args fails for N=7: ValueError: no such shape"
    assert error.line == line_of(scale_text, MAKE)


def test_an_import_that_raises(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, ("SWEEP =", "assert 1 == 2\nSWEEP ="))
    assert error.message.startswith("the file fails while it is imported: AssertionError")
    assert error.line == line_of(scale_text, "SWEEP =")


@pytest.mark.parametrize(
    "work",
    [
        "run = lambda f: f()\nms = run(lambda: scale(torch.ones(3)))",
        "import functools\nms = functools.partial(scale, torch.ones(3))()",
    ],
)
def test_an_import_that_launches(observed: Observe, scale_text: str, work: str) -> None:
    """Whatever way the launch takes, the statement of the file is named, not the stub that it comes through."""
    error = refusal(observed, scale_text, ("SWEEP =", work + "\nSWEEP ="))
    assert error.message == "heavy work at module level: the kernel `scale_kernel` is launched"
    assert error.line == line_of(scale_text, "SWEEP =") + 1


def test_an_autotuned_kernel_launched_by_an_import_is_named(observed: Observe, scale_text: str) -> None:
    """An autotuner would measure on a device that is not there."""
    tuned = "@triton.autotune([triton.Config({})], key=[])\n@triton.jit\n"
    work = ("SWEEP =", "run = lambda f: f()\nms = run(lambda: scale(torch.ones(3)))\nSWEEP =")
    assert "kernel `scale_kernel` is launched" in refusal(observed, scale_text, ("@triton.jit\n", tuned), work).message


def test_an_import_that_exits(observed: Observe, scale_text: str) -> None:
    assert "SystemExit" in refusal(observed, scale_text, ("SWEEP =", "raise SystemExit(0)\nSWEEP =")).message


def test_an_import_that_takes_too_long(
    read: Callable[..., FileFacts], scale_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that catches the interruption and ends is told afterwards what it took."""
    for name in ("PATIENCE", "AGAIN"):
        monkeypatch.setattr(timelimit, name, 1000)  # it is interrupted once, however busy the machine is
    work = "try:\n    while True:\n        pass\nexcept BaseException:\n    sum(range(10**7))\nSWEEP ="
    with pytest.raises(InputError, match="heavy work at module level: importing the file takes"):
        load_truth(read(scale_text, ("SWEEP =", work)), tmp_path, seconds=0.2)


@pytest.mark.parametrize("loop", ["while True:\n    LATE = 1", "import time\nwhile True:\n    time.sleep(9)"])
def test_an_import_that_does_not_end(
    read: Callable[..., FileFacts], scale_text: str, tmp_path: Path, loop: str
) -> None:
    """It held the whole run for minutes and was then called a slow forward."""
    with pytest.raises(InputError, match="heavy work at module level: importing the file does not end") as caught:
        load_truth(read(scale_text, ("SWEEP =", loop + "\nSWEEP =")), tmp_path, seconds=0.5)
    assert caught.value.line is not None
    assert line_of(scale_text, "SWEEP =") <= caught.value.line <= line_of(scale_text, "SWEEP =") + 2


def test_a_make_args_that_does_not_end(observed: Observe, scale_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when it catches everything that is raised in it once."""
    monkeypatch.setattr(arguments, "MAKE_ARGS_SECONDS", 0.5)
    forever = "        while True:\n            N += 1\n"
    loop = "    try:\n" + forever + "    except BaseException:\n" + forever
    error = refusal(observed, scale_text, (MAKE, loop))
    assert error.message == "make_args takes longer than 0.5 s for N=7"
    assert error.line in (line_of(scale_text, MAKE) + 4, line_of(scale_text, MAKE) + 5)


def test_a_limit_leaves_the_timers_of_others_as_they_were() -> None:
    """The signals are the process's: a test's own timeout must still fire after the block."""
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_PROF)
    with time_limit(5.0):
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_PROF)) == before


def test_a_stub_that_raises(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, (RETURN, "    raise RuntimeError('broken')\n"))
    assert error.message == "the stub `scale` fails: RuntimeError: broken"
    assert error.line == line_of(scale_text, RETURN)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("undefined", "undefined is not defined"),
        ("tl.nope(factor)", "module 'triton.language' has no attribute 'nope'"),
        ("at.reshape(3, 5)", "Shape element 0 must be a power of 2"),
    ],
)
def test_a_kernel_that_triton_refuses(observed: Observe, scale_text: str, written: str, said: str) -> None:
    """One line of the user's file: Triton counts from the kernel and quotes it, and that went out as the tool's own."""
    error = refusal(observed, scale_text, ("* factor, mask", f"* {written}, mask"))
    assert error.message == f"Triton cannot compile kernel scale_kernel: {said}"
    assert error.line == line_of(scale_text, "tl.store(Y + at")


def test_a_launch_that_does_not_fit_its_kernel(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, ("x.numel(), BLOCK=16", "x.numel(), BLOK=16"))
    assert error.message == "kernel scale_kernel has no parameter BLOK"
    assert error.line == line_of(scale_text, "scale_kernel[")


def test_a_stub_that_launches_nothing(observed: Observe, scale_text: str) -> None:
    error = refusal(
        observed, scale_text, (RETURN, "    return x * factor\n"), ("    scale_kernel[", "    lambda: scale_kernel[")
    )
    assert "launches no Triton kernel" in error.message
    assert error.line == line_of(scale_text, "def scale(")


def test_no_floating_argument(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, (MAKE, "    return (torch.ones(N, dtype=torch.int32),)\n"))
    assert error.message.startswith("nothing is differentiable: `scale` gets no floating tensor")


@pytest.mark.parametrize("returned", ["y.detach()", "y.to(torch.int32)", "torch.ones(3)"])
def test_no_differentiable_output(observed: Observe, scale_text: str, returned: str) -> None:
    error = refusal(observed, scale_text, (RETURN, f"    return {returned}\n"))
    assert error.message.startswith("nothing is differentiable: no output of `scale` depends on")


@pytest.mark.parametrize("early", ["", "    if not x.numel():\n        return y\n"])
def test_an_entry_without_elements(observed: Observe, scale_text: str, early: str) -> None:
    """It was said to return nothing that depends on an input, or to launch nothing; both are true of it elsewhere."""
    entries = ("[dict(N=40), dict(N=7)]", "[dict(N=40), dict(N=0)]")
    stub = ("    scale_kernel[", f"{early}    scale_kernel[")
    error = refusal(observed, scale_text, entries, stub)
    assert error.message.startswith("`x` has no elements (shape (0,)) at N=0, the smallest entry")
    assert "at least one element" in error.remedy
    assert error.line == line_of(scale_text, "SWEEP =") + early.count("\n")


def test_a_stub_that_returns_nothing(observed: Observe, scale_text: str) -> None:
    # That no output depends on an input is true of it, and no help to who forgot the return.
    assert refusal(observed, scale_text, (RETURN, "    return None\n")).message == "`scale` returns nothing"


@pytest.mark.parametrize(
    ("returned", "kind"), [('{"y": y}', "dict"), ("y, [y, y]", "list"), ("y, (y, 1)", "tuple"), ('y, {"s": y}', "dict")]
)
def test_tensors_inside_of_an_output(observed: Observe, scale_text: str, returned: str, kind: str) -> None:
    """A dict was called not differentiable; what lies inside of a further output was never compared."""
    error = refusal(observed, scale_text, (RETURN, f"    return {returned}\n"))
    assert error.message == f"`scale` returns a {kind} that holds tensors, which is not supported"
    assert "flat tuple" in error.remedy


@pytest.mark.parametrize("mark", ["@autodiff\n", "@autodiff(inputs_require_grad=(0,))\n"])
def test_a_list_of_tensors_as_an_argument(observed: Observe, scale_text: str, mark: str) -> None:
    """Nothing in it was differentiated, and the message said that there was no tensor."""
    stub = ("    y = torch", "    x = x[0]\n    y = torch")
    made = (MAKE, "    return [torch.randn(N, device=device)], 2.0\n")
    error = refusal(observed, scale_text, stub, ("@autodiff\n", mark), made)
    assert "`x` is a list of tensors" in error.message
    assert "def scale(*x)" in error.remedy


def test_a_stub_that_wants_a_ctx(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, ("def scale(x, factor=2.0)", "def scale(ctx, x, factor=2.0)"))
    assert "`ctx=None`" in error.remedy


def test_make_args_wants_what_no_entry_gives(observed: Observe, scale_text: str) -> None:
    """Two required parameters are names; a dict for the one that is missing helps nobody."""
    error = refusal(observed, scale_text, ("make_args(N, device", "make_args(N, K, device"))
    assert error.message == "make_args wants `K`, not in the SWEEP entry N=7"
    assert error.line == line_of(scale_text, "def make_args")


def test_a_wrong_entry_of_sweep_has_its_line(observed: Observe, scale_text: str) -> None:
    sweep = "[\n    dict(N=40),\n    dict(N=7, foo=object()),\n]"
    error = refusal(observed, scale_text, ("[dict(N=40), dict(N=7)]", sweep))
    assert error.message == "SWEEP[1]['foo'] is an object"
    assert error.line == line_of(scale_text, "SWEEP =") + 2
    assert refusal(observed, scale_text, ("[dict(N=40), dict(N=7)]", "dict(N=7)")).line == line_of(
        scale_text, "SWEEP ="
    )


def test_a_gradient_of_what_has_none(observed: Observe, scale_text: str) -> None:
    wanted = ("@autodiff\n", "@autodiff(inputs_require_grad=(1,))\n")
    passed = "    return torch.randn(N, device=device), {}\n"
    assert "`factor`, which make_args does not pass" in refusal(observed, scale_text, wanted).message
    assert "which is no tensor but 3" in refusal(observed, scale_text, wanted, (MAKE, passed.format("3"))).message
    assert "which is None" in refusal(observed, scale_text, wanted, (MAKE, passed.format("None"))).message
    integer = passed.format("torch.ones(1, dtype=torch.int32)")
    assert "a tensor of int32" in refusal(observed, scale_text, wanted, (MAKE, integer)).message


def test_arguments_that_do_not_fit_the_stub(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, (MAKE, "    return torch.ones(N), 1.0, 2.0\n"))
    assert error.message.startswith("make_args does not fit the stub")


def test_a_nondiff_output_out_of_range(observed: Observe, scale_text: str) -> None:
    error = refusal(observed, scale_text, ("@autodiff\n", "@autodiff(nondiff_outputs=(1,))\n"))
    assert error.message == "nondiff_outputs names output 1, but `scale` returns 1 output(s)"


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("[] + []", "SWEEP is empty"),
        ("dict(N=7)", "SWEEP is a dict"),
        ("[(7,)]", r"SWEEP[0] is no dict"),
        ("[dict(N=torch.ones(2))]", "SWEEP[0]['N'] is a Tensor"),
        ('[dict(N=7, required="yes")]', "required"),
    ],
)
def test_a_sweep_that_is_none(observed: Observe, scale_text: str, sweep: str, said: str) -> None:
    assert said in refusal(observed, scale_text, ("[dict(N=40), dict(N=7)]", sweep)).message


def test_a_stub_is_run_at_no_sizes_of_ours_that_make_many_elements(
    observed: Observe, scale_text: str, tmp_path: Path
) -> None:
    # A window of 11 x 11, since all sizes must differ, had ten million offsets: observing a deformable convolution took
    # a minute.
    log = tmp_path / "sizes"
    noted = f"    with open({str(log)!r}, 'a') as log:\n        log.write(f'{{x.numel()}} ')\n"
    noted += "    assert x.numel() < 1 << 20\n"
    made = "    y = torch.empty_like(x)\n"
    many = (MAKE, "    return (torch.zeros(1).expand(1 << 23 if N > 40 else N),)\n")
    observed(scale_text, ("dict(N=7)", "dict(N=37)"), (made, noted + made), many)
    assert log.read_text().split() == ["37"]


def test_the_file_shown_in_the_documentation_is_one(observed: Observe) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "pair-format.md").read_text()
    spec = observed(text.split("```python\n")[1].split("```")[0])
    assert spec.grads == ("x",)


def test_what_is_kept_from_torchs_compiler_does_not_import_it(tmp_path):
    # In a process of its own: the import takes more than a second, and children that describe and derive never compile.
    path = tmp_path / "kept_out.py"
    path.write_text(
        "import sys\nimport torch\n\n@torch.compiler.disable\ndef first():\n    return 1\n\n"
        "@torch.compiler.disable(recursive=False)\ndef second():\n    return 2\n\n"
        "with torch.compiler.disable():\n    third = 3\n\n"
        "assert (first(), second(), third) == (1, 2, 3)\n"
        "COMPILER = [name for name in sys.modules if name == 'torch._dynamo']\n"
    )
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from kernel_agent.ir import import_module\n"
        "from kernel_agent.pairs.load import disabling_nothing\n"
        "before = torch.compiler.disable\n"
        "with disabling_nothing():\n"
        f"    assert import_module(Path({str(path)!r}), 'kept_out').COMPILER == []\n"
        "assert torch.compiler.disable is before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
