"""`differentiable` from the first call to the gradient, without a GPU: kernels run in the executor, exactly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
import trainable

import kernel_agent
from kernel_agent import autodiff, differentiable
from kernel_agent.autodiff import MARK
from kernel_agent.compiler.kept import KeptPairs
from kernel_agent.gate.options import GateOptions
from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.operator import Differentiable, ExactOnCPU, GradientLeftOut
from kernel_agent.jit.variant import real

pytestmark = pytest.mark.filterwarnings("ignore::kernel_agent.jit.operator.ExactOnCPU")


@pytest.fixture(autouse=True, scope="module")
def quick_proofs() -> Iterator[None]:
    """Fewer cases than a user's first call gets: what is asked here is not what the gate finds."""
    quick = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernel_agent.jit.deriving.PROOF", quick)
        patch.setattr("kernel_agent.jit.operator.PROOF", quick)
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> KeptPairs:
    return KeptPairs(tmp_path_factory.mktemp("derived"))


@pytest.fixture(scope="module")
def scaled(kept: KeptPairs) -> Differentiable:
    return Differentiable(trainable.scaled, kept=kept)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive and prove nothing from here on."""
    monkeypatch.setattr("kernel_agent.sandbox.Sandbox.run", None)


def gradients(op, *arguments: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    y = op(*arguments, **options)
    leaves = [argument for argument in arguments if argument.requires_grad]
    return torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y))


def formula(x: torch.Tensor, w: torch.Tensor, *, cube: bool = False) -> torch.Tensor:
    return (x * x * x if cube else x * x * 0.5) * w


def test_a_stub_trains_with_nothing_written_beside_it(scaled):
    # A gradient of another formula, or one that belongs to another argument, would differ.
    x, w = leaf(5, 24), leaf(24)
    torch.testing.assert_close(scaled(x, w), formula(x, w))
    torch.testing.assert_close(gradients(scaled, x, w), gradients(formula, x, w))
    assert scaled.verdict.green
    assert "def backward(saved" in scaled.source()
    assert "schedule: " in scaled.explain()


def test_an_explanation_says_what_the_proof_did_not_ask(scaled, monkeypatch):
    # A verdict's notes, of shapes that were shrunk or left out, were to be had from `op.verdict` alone.
    gradients(scaled, leaf(5, 24), leaf(24))
    (derived,) = (one for one in scaled.derived if one.verdict is scaled.verdict)
    assert "fewer than the standard suite asks" in scaled.explain()
    shrunk = derived.verdict.model_copy(update={"notes": ("M=4096 shrunk to M=64",)})
    monkeypatch.setattr(scaled._last, "derived", replace(derived, verdict=shrunk))
    assert "note: M=4096 shrunk to M=64" in scaled.explain()


def test_other_sizes_of_a_configuration_are_not_derived_again(scaled, monkeypatch):
    gradients(scaled, leaf(5, 24), leaf(24))
    no_children(monkeypatch)
    x, w = leaf(70, 33), leaf(33)
    torch.testing.assert_close(gradients(scaled, x, w), gradients(formula, x, w))


def test_a_number_that_the_kernel_asks_for_is_a_configuration_of_its_own(kept):
    # The pair for 5 is one for 3 as well, and was taken for one of 2, where the kernel computes something else.
    op = Differentiable(trainable.penalty, kept=kept)
    x = leaf(5, 24)
    for order, formula in ((5, lambda x: torch.exp(5 * x)), (3, lambda x: torch.exp(3 * x)), (2, torch.square)):
        (found,) = torch.autograd.grad(op(x, order).sum(), x)
        torch.testing.assert_close((found,), torch.autograd.grad(formula(x).sum(), x))
    assert len(op.derived) == 2


def test_a_number_on_the_other_side_of_a_bound_is_a_configuration_of_its_own(kept):
    # The pair for 7 steps is one for 5 as well, and was taken for one of 2, where the kernel has no exponential.
    op = Differentiable(trainable.leak, kept=kept)
    x = leaf(5, 24)
    for steps, formula in ((7, lambda x: torch.exp(7 * x)), (5, lambda x: torch.exp(5 * x)), (2, lambda x: 2 * x)):
        (found,) = torch.autograd.grad(op(x, steps).sum(), x)
        torch.testing.assert_close((found,), torch.autograd.grad(formula(x).sum(), x))
    assert len(op.derived) == 2


def test_halves_of_a_packed_tensor_keep_their_strides(kept):
    # What the forward saves lost the gaps between its rows on the way to its dtype, and the backward stepped by rows of
    # the half through the gradient of the whole.
    xz = leaf(5, 24)
    op = Differentiable(trainable.packed_gate, kept=kept)
    torch.testing.assert_close(gradients(op, xz), gradients(lambda xz: xz[:, :12] * torch.sigmoid(xz[:, 12:]), xz))


@pytest.mark.parametrize(
    "image",
    [
        torch.arange(24.0, dtype=torch.float64).view(4, 6)[:, 1:4],
        torch.ones(3, 8)[:, None, :2].expand(3, 4, 2).double(),
    ],
)
def test_tensors_of_an_execution_keep_their_layout(image, monkeypatch):
    monkeypatch.setattr("kernel_agent.jit.variant.declared_dtype", lambda _: torch.float32)
    made = real(image)
    assert made.dtype == torch.float32
    assert made.stride() == image.stride()
    torch.testing.assert_close(made, image, check_dtype=False)


def test_another_process_finds_the_pair_on_disk(scaled, kept, monkeypatch):
    x, w = leaf(5, 24), leaf(24)
    gradients(scaled, x, w)
    no_children(monkeypatch)
    fresh = Differentiable(trainable.scaled, kept=kept)
    torch.testing.assert_close(gradients(fresh, x, w), gradients(formula, x, w))


def test_a_flag_is_a_configuration_of_its_own(scaled):
    # The pair for squares must not serve cubes: it would be silently wrong.
    x, w = leaf(5, 24), leaf(24)
    torch.testing.assert_close(gradients(scaled, x, w, cube=True), gradients(lambda *a: formula(*a, cube=True), x, w))


def test_only_the_gradients_that_are_asked_for_are_derived(scaled):
    x, w = leaf(5, 24).detach(), leaf(24)
    torch.testing.assert_close(gradients(scaled, x, w), gradients(lambda w: formula(x, w), w))
    assert 'grads=("w",)' in scaled.source()


def test_a_layout_that_the_schedule_cannot_take_is_made_contiguous(scaled, monkeypatch):
    # All rows share memory: storing their gradients would keep the last one alone, where their sum is wanted.
    gradients(scaled, leaf(5, 24), leaf(24))
    no_children(monkeypatch)
    row, w = leaf(24), leaf(24)
    mine = gradients(lambda row, w: scaled(row.expand(5, 24), w), row, w)
    torch.testing.assert_close(mine, gradients(lambda row, w: formula(row.expand(5, 24), w), row, w))


def test_without_gradients_the_stub_runs_as_it_is(scaled, monkeypatch):
    no_children(monkeypatch)
    x, w = leaf(5, 24), leaf(24)
    with torch.no_grad():
        torch.testing.assert_close(scaled(x, w), formula(x, w))
    assert not scaled(x.detach(), w.detach()).requires_grad


def test_a_second_derivative_is_refused(scaled):
    x, w = leaf(5, 24), leaf(24)
    (dx,) = torch.autograd.grad(scaled(x, w).sum(), x, create_graph=True)
    # Without a refusal the penalty would count as a constant, and the sum would train on half of itself.
    with pytest.raises(CannotTrain, match="gradients of gradients are not derived"):
        (x.sum() + dx.square().sum()).backward()


def test_checkpointing_runs_the_forward_again(scaled):
    x, w = leaf(5, 24), leaf(24)
    mine = gradients(lambda x, w: torch.utils.checkpoint.checkpoint(scaled, x, w, use_reentrant=False), x, w)
    torch.testing.assert_close(mine, gradients(formula, x, w))


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's tracer asks for it
def test_code_around_it_compiles(scaled):
    # On the CPU the operator itself cannot be traced: the graph breaks around it, and nothing else changes.
    x, w = leaf(5, 24), leaf(24)
    compiled = torch.compile(lambda x, w: scaled(2 * x, w) + 1, backend="eager")
    torch.testing.assert_close(gradients(compiled, x, w), gradients(lambda x, w: formula(2 * x, w), x, w))


def test_a_call_that_takes_another_branch_gets_a_pair_of_its_own(kept):
    # The first pair is of the squares' kernel; cubes with it would be silently wrong.
    op = Differentiable(trainable.by_size, kept=kept)
    few, many = leaf(50), leaf(200)
    torch.testing.assert_close(gradients(op, few), (2 * few * torch.linspace(-1, 1, 50),))
    torch.testing.assert_close(gradients(op, many), (3 * many * many * torch.linspace(-1, 1, 200),))
    assert len(op.derived) == 2


def test_where_no_layout_helps_the_plain_schedule_is_derived(kept):
    # Windows that overlap add to the same elements: stores, which are right for windows apart, would lose sums.
    op = Differentiable(trainable.windows, kept=kept)
    x = leaf(40)
    apart = gradients(op, x, step=8)
    torch.testing.assert_close(apart, gradients(lambda x: x.unfold(0, 8, 8).square().sum(1), x))
    over = gradients(op, x, step=4)
    torch.testing.assert_close(over, gradients(lambda x: x.unfold(0, 8, 4).square().sum(1), x))
    assert "schedule: plain" in op.explain()


def test_an_index_that_repeats_rows_trains_though_the_first_call_had_each_row_once(kept):
    # Stores for rows that no index repeats raise where one does: training would stop at such a batch.
    op, x = Differentiable(trainable.picked, kept=kept), leaf(24, 20)
    for index in (torch.randperm(24), torch.randint(0, 24, (24,))):
        (found,) = gradients(op, x, index)
        (true,) = gradients(lambda x, index: x[index] ** 2, x, index)
        torch.testing.assert_close(found, true)


def test_what_cannot_be_derived_is_refused_with_the_line_of_the_users_file(kept, monkeypatch):
    op = Differentiable(trainable.cut, kept=kept)
    with pytest.raises(CannotTrain, match=r"trainable\.py:\d+: no backward of `cut` can be derived") as caught:
        op(leaf(40))
    line = Path(trainable.__file__).read_text().splitlines()[caught.value.line - 1]
    assert "bitcast=True" in line
    no_children(monkeypatch)  # the refusal took seconds, and would in every process
    with pytest.raises(CannotTrain) as again:
        Differentiable(trainable.cut, kept=kept)(leaf(40))
    assert str(again.value) == str(caught.value)


def test_results_keep_the_names_of_their_tuple(kept):
    # The class is the user's own, and autograd hands out a plain tuple.
    x = leaf(40)
    found = Differentiable(trainable.powers, kept=kept)(x)
    assert found._fields == ("square", "cube")
    (grad,) = torch.autograd.grad(found.square.sum() + found.cube.sum(), x)
    torch.testing.assert_close(grad, 2 * x + 3 * x * x)


@pytest.mark.parametrize(
    ("stub", "message", "remedy"),
    [
        (trainable.forgetful, "`forgetful` returns nothing", "return y"),
        (trainable.detached, r"given `x.detach\(\)`, which is detached", "Leave .detach() out"),
    ],
)
def test_what_is_wrong_at_every_size_is_told_with_its_own_remedy(kept, stub, message, remedy):
    # No smaller call would help, which is what calls that cannot be made small are told.
    with pytest.raises(CannotTrain, match=message) as caught:
        Differentiable(stub, kept=kept)(leaf(40))
    assert remedy in caught.value.remedy
    assert caught.value.path == Path(trainable.__file__)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (torch.ones(4, dtype=torch.complex64, requires_grad=True), "is a complex tensor"),
        (torch.eye(4).to_sparse().requires_grad_(), "is a tensor of layout torch.sparse_coo"),
    ],
)
def test_tensors_that_no_kernel_takes_are_refused_before_anything_is_derived(monkeypatch, argument, message):
    no_children(monkeypatch)
    with pytest.raises(CannotTrain, match=f"`x` of `scaled` {message}"):
        differentiable(trainable.scaled)(argument)


def test_transforms_of_torch_func_are_refused(monkeypatch):
    no_children(monkeypatch)
    with pytest.raises(CannotTrain, match=r"torch\.func or torch\.vmap"):
        torch.func.grad(lambda x: differentiable(trainable.scaled)(x).sum())(torch.ones(3, 4))


def test_arguments_that_do_not_fit_are_told_with_the_name_of_the_stub():
    with pytest.raises(TypeError, match=r"scaled\(\) missing a required argument: 'x'"):
        differentiable(trainable.scaled)()


def test_the_decorator_trains_as_the_function_does(kept, scaled, monkeypatch):
    gradients(scaled, leaf(5, 24), leaf(24))
    no_children(monkeypatch)
    monkeypatch.setattr("kernel_agent.jit.operator.user_pairs", lambda: kept)
    x, w = leaf(5, 24), leaf(24)
    decorated = autodiff(jit=True)(trainable.scaled)
    torch.testing.assert_close(gradients(decorated, x, w), gradients(formula, x, w))


def test_exact_gradients_of_an_operator_are_those_of_its_stub(monkeypatch):
    no_children(monkeypatch)
    x, w = leaf(5, 24), leaf(24)
    found = kernel_agent.gradients(differentiable(trainable.scaled), x, w, cotangents=torch.ones(5, 24))
    torch.testing.assert_close(found["x"], (x * w).double().detach())


def test_tensors_on_the_cpu_are_told_once(monkeypatch):
    no_children(monkeypatch)
    op = differentiable(trainable.scaled)
    x = leaf(5, 24).detach()
    with pytest.warns(ExactOnCPU, match="Move the tensors to a GPU"):
        op(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(x)


def test_a_tensor_that_inputs_require_grad_leaves_out_is_told_once(monkeypatch):
    # A weight that was forgotten there kept its values through a training, and nothing said so.
    no_children(monkeypatch)
    monkeypatch.setattr(trainable.scaled, MARK, None, raising=False)  # what the decorator leaves on it goes afterwards
    op = Differentiable(autodiff(inputs_require_grad=("x",))(trainable.scaled))
    x = leaf(5, 24).detach()
    with pytest.warns(GradientLeftOut, match=r"`w` requires a gradient and gets none.*or pass `w.detach\(\)`") as told:
        op(x, leaf(24))
    assert [one.filename for one in told if one.category is GradientLeftOut] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientLeftOut)
        op(x, leaf(24))
        with torch.no_grad():
            Differentiable(autodiff(inputs_require_grad=("x",))(trainable.scaled))(x, leaf(24))


def test_of_two_tensors_only_the_one_without_its_gradient_is_told(monkeypatch):
    # Told of both, whoever trains would look for a gradient that is there.
    monkeypatch.setattr(trainable.scaled, MARK, None, raising=False)
    monkeypatch.setattr(Differentiable, "_trained", lambda *_given, **_options: None)
    op = Differentiable(autodiff(inputs_require_grad=("x",))(trainable.scaled))
    with pytest.warns(GradientLeftOut) as told:
        op(leaf(5, 24), leaf(24))
    assert [str(one.message)[:3] for one in told if one.category is GradientLeftOut] == ["`w`"]


def test_what_is_written_in_place_on_the_cpu_is_refused(monkeypatch):
    # The executor computes on images: the argument would silently keep its old content.
    no_children(monkeypatch)
    with pytest.raises(CannotTrain, match="writes into `x`, which is on the CPU"):
        differentiable(trainable.squared_in_place)(leaf(40).detach())


def test_a_kernel_is_told_from_a_stub():
    with pytest.raises(TypeError, match=r"not the @triton\.jit kernel"):
        differentiable(trainable.scaled_kernel)


def test_a_stub_with_starred_arguments_is_refused_at_once():
    with pytest.raises(CannotTrain, match="Name every argument"):
        differentiable(lambda *tensors: tensors)


@pytest.mark.parametrize("folder", ["a file", "nowhere"])
def test_a_cache_that_cannot_be_used_costs_a_line_and_no_call(scaled, tmp_path, caplog, monkeypatch, folder):
    gradients(scaled, leaf(5, 24), leaf(24))
    known = scaled.derived[0]
    (tmp_path / "file").write_text("no folder")
    op = Differentiable(
        trainable.scaled, kept=KeptPairs(tmp_path / "file" if folder == "a file" else Path("/proc/none"))
    )
    monkeypatch.setattr("kernel_agent.jit.operator.derived_for", lambda *_: known)
    with caplog.at_level(logging.WARNING):
        gradients(op, leaf(5, 24), leaf(24))
    assert "the derived pairs kept in" in caplog.text
