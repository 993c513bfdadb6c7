"""A delivered file stands by itself: it trains, checks itself, and is a pair file again."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_agent.certificate.integrity import disagreements
from kernel_agent.certificate.reading import read_certificate
from kernel_agent.deliver import Provenance, deliver
from kernel_agent.deliver.package import NotGreen
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, Candidate, KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_file

FORWARD = '''"""Row-wise scaling."""
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

SWEEP = [{"N": 8}, {"N": 100}, {"N": 1 << 20, "required": False}]


def make_args(N, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=generator).to(device), 3.0


@triton.jit
def scale_kernel(X, Y, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < N) * factor, mask=at < N)


@autodiff(inputs_require_grad=("x",))
def scale(x, factor):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, y, factor, x.numel(), BLOCK=64)
    return y


def reference(x, factor):
    return x * factor
'''

OWN_FORWARD = """
def forward(x, factor):
    return scale(x, factor), (factor,)
"""

BACKWARD = """
@triton.jit
def scale_bwd(G, DX, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(DX + at, tl.load(G + at, mask=at < N) * factor, mask=at < N)


def backward(saved, grad_y, needs=None):
    (factor,) = saved
    g = grad_y.contiguous()
    dx = torch.empty_like(g)
    scale_bwd[(triton.cdiv(g.numel(), 64),)](g, dx, factor, g.numel(), BLOCK=64)
    return dx
"""
GREEN = Verdict(
    status=Status.GREEN, cases=(CaseResult(case="N=8", required=True, status=Status.GREEN),), cases_planned=1
)
SOURCE = Provenance(backend="manual", model="by hand", asks=1)


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "scale.py"
    file.write_text(FORWARD)
    x = ArgumentFacts(name="x", kind=ArgumentKind.TENSOR, dtype="float32", shape=(8,), needs_grad=True)
    return KernelSpec(
        facts=read_file(file),
        sweep=(ShapeEntry(dims={"N": 8}), ShapeEntry(dims={"N": 100}), ShapeEntry(dims={"N": 1 << 20}, required=False)),
        inputs=(x, ArgumentFacts(name="factor", kind=ArgumentKind.OTHER, text="3.0")),
        outputs=(x.model_copy(update={"name": "y"}),),
        returns_tuple=False,
        grads=("x",),
        launches=("scale_kernel",),
    )


@pytest.fixture
def delivery(spec, tmp_path):
    return deliver(spec, Candidate(backward=BACKWARD), GREEN, SOURCE, tmp_path / "out")


def run_interpreted(*command, cwd):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )


def test_a_red_candidate_is_never_delivered(spec, tmp_path):
    red = GREEN.model_copy(update={"status": Status.WRONG_GRADIENT})
    with pytest.raises(NotGreen):
        deliver(spec, Candidate(backward=BACKWARD), red, SOURCE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_delivered_file_checks_itself(spec, tmp_path):
    # `saved` of the generated forward is (x, y): the candidate below brings its own forward, which saves the factor.
    candidate = Candidate(backward=BACKWARD, forward=OWN_FORWARD)
    delivery = deliver(spec, candidate, GREEN, SOURCE, tmp_path / "out")
    done = run_interpreted(str(delivery.operator), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout


def test_self_check_rejects_a_wrong_backward(spec, tmp_path):
    # The self-check must have power: the same file with a wrong factor has to fail.
    wrong = BACKWARD.replace("mask=at < N) * factor", "mask=at < N) * (factor + 0.01)")
    delivery = deliver(spec, Candidate(backward=wrong, forward=OWN_FORWARD), GREEN, SOURCE, tmp_path / "out")
    done = run_interpreted(str(delivery.operator), cwd=tmp_path)
    assert done.returncode == 1
    assert "BAD" in done.stdout


def test_delivered_file_imports_only_what_it_may(delivery):
    tree = ast.parse(delivery.operator.read_text())
    roots = {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    roots |= {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert roots <= {"torch", "triton", "inspect", "os", "subprocess", "sys"}


def test_delivered_file_reads_as_a_pair_again(delivery):
    assert read_file(delivery.operator).is_pair


def test_the_operator_section_reads_well(delivery):
    # Users commit delivered files into linted repositories.
    text = delivery.operator.read_text()
    section = text[text.index("# --- operator ---") :]
    assert [line for line in section.splitlines() if len(line) > 120] == []
    assert "\n\n\n\n" not in text


def test_certificate_names_verdict_hashes_and_the_command_that_verifies(delivery):
    certificate = json.loads(delivery.certificate.read_text())
    assert certificate["verdict"]["status"] == "GREEN"
    assert certificate["verify"] == "kernel-agent recheck certificate.json"
    assert set(certificate["hashes"]) == {"forward", "backward", "truth", "delivered"}


def test_a_certificate_carries_the_sources_that_it_speaks_of(delivery):
    # One file is enough to judge again: the user's own file may have moved on.
    certificate = read_certificate(delivery.certificate)
    assert certificate.sources.forward == FORWARD
    assert BACKWARD.strip() in certificate.sources.pair
    assert disagreements(certificate, delivery.certificate.parent) == ()


def test_all_delivered_files_compile(delivery):
    for path in (delivery.operator, delivery.test, delivery.bench):
        compile(path.read_text(), path.name, "exec")


def test_future_imports_of_the_forward_stay_first(spec, tmp_path):
    # What the operator imports was once put above them, and the delivered file was no Python.
    (tmp_path / "scale.py").write_text(
        FORWARD.replace("import torch\n", "from __future__ import annotations\nimport torch\n", 1)
    )
    modern = spec.model_copy(update={"facts": read_file(tmp_path / "scale.py")})
    delivered = deliver(modern, Candidate(backward=BACKWARD), GREEN, SOURCE, tmp_path / "out").operator.read_text()
    compile(delivered, "scale_backward.py", "exec")
    assert "from __future__ import annotations" in delivered


def test_decorated_stub_trains_through_the_delivered_file(spec, tmp_path):
    deliver(spec, Candidate(backward=BACKWARD, forward=OWN_FORWARD), GREEN, SOURCE, tmp_path)
    named = FORWARD.replace('("x",))', '("x",), backward="scale_backward.py")')
    (tmp_path / "scale.py").write_text(named)
    training = (
        "import torch, scale; x = torch.ones(10, requires_grad=True); "
        "scale.scale(x, 3.0).sum().backward(); print(x.grad)"
    )
    done = run_interpreted("-W", "error", "-c", training, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "tensor([3., 3., 3., 3., 3., 3., 3., 3., 3., 3.])"


def test_editing_the_forward_after_delivery_warns(spec, tmp_path):
    # The delivered copy of the forward runs, so an edit of the user's kernel would silently have no effect.
    deliver(spec, Candidate(backward=BACKWARD, forward=OWN_FORWARD), GREEN, SOURCE, tmp_path)
    edited = FORWARD.replace('("x",))', '("x",), backward="scale_backward.py")').replace(
        "* factor, mask", "* factor + 1, mask"
    )
    (tmp_path / "scale.py").write_text(edited)
    training = "import torch, scale; scale.scale(torch.ones(10), 3.0)"
    done = run_interpreted("-c", training, cwd=tmp_path)
    assert "ForwardChanged" in done.stderr


IN_PLACE = FORWARD.replace("y = torch.empty_like(x)\n", "y = x\n")
"""The same stub writing over its input, which it returns."""


@pytest.fixture
def in_place(spec, tmp_path):
    file = tmp_path / "scale.py"
    file.write_text(IN_PLACE)
    spec = spec.model_copy(update={"facts": read_file(file), "mutated": ("x",)})
    deliver(spec, Candidate(backward=BACKWARD, forward=OWN_FORWARD), GREEN, SOURCE, tmp_path)
    file.write_text(IN_PLACE.replace('("x",))', '("x",), backward="scale_backward.py")'))
    return tmp_path


def test_overwriting_what_autograd_saved_is_an_error_not_a_wrong_gradient(in_place):
    # Triton writes evade the version counter: the square would be differentiated at the overwritten value.
    training = (
        "import torch, scale; x = torch.ones(8, requires_grad=True); y = x * 3; z = (y * y).sum(); "
        "scale.scale(y, 3.0); z.backward()"
    )
    done = run_interpreted("-c", training, cwd=in_place)
    assert "modified by an inplace operation" in done.stderr


def test_an_in_place_stub_trains(in_place):
    training = (
        "import torch, scale; x = torch.ones(4, requires_grad=True); y = scale.scale(x * 2, 3.0); "
        "y.sum().backward(); print(x.grad)"
    )
    done = run_interpreted("-W", "error", "-c", training, cwd=in_place)
    assert done.stdout.strip() == "tensor([6., 6., 6., 6.])", done.stderr


def test_overwriting_a_leaf_that_requires_grad_is_refused(in_place):
    done = run_interpreted(
        "-c", "import torch, scale; scale.scale(torch.ones(4, requires_grad=True), 3.0)", cwd=in_place
    )
    assert "pass a clone" in done.stderr


def test_missing_delivered_file_is_named(tmp_path):
    (tmp_path / "scale.py").write_text(FORWARD.replace('("x",))', '("x",), backward="gone.py")'))
    done = run_interpreted("-c", "import torch, scale; scale.scale(torch.ones(10), 3.0)", cwd=tmp_path)
    assert "gone.py" in done.stderr
    assert "names a file that is not there" in done.stderr


@pytest.mark.parametrize(
    ("parameters", "call"),
    [
        ("N, M, device", "**entry, device=device"),
        ("entry, seed=0", "entry=dict(entry), seed=0"),
        ("N, M", "**entry"),
        ("N, M, dtype", "**entry, dtype=torch.float32"),
        ("dims, *, device", "dims=dict(entry), device=device"),
    ],
)
def test_make_args_is_called_by_the_contract(parameters, call):
    from kernel_agent.deliver.package import _argument_call

    assert _argument_call(f"def make_args({parameters}): ...", {"N", "M"}) == call


def test_paths_in_delivered_files_are_relative(delivery):
    for path in delivery.files():
        assert str(Path.home()) not in path.read_text()
        assert str(path.parent) not in path.read_text()
