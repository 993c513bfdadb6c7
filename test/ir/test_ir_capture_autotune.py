"""Autotuned kernels run with the first configuration that fits, or with all of them to see whether they agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor

from kernel_agent.ir import Configs, ExecOptions, FindingKind, LaunchError, LoweringError, execute

ALL = ExecOptions(configs=Configs.ALL)


def tuned(blocks: list[int], body: Any, **options: Any) -> Any:
    return triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], key=["n"], **options)(body)


@triton.jit
def _double(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) * 2, mask=c < n)


@triton.jit
def _picky(X, Y, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 32, "too large")
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) * BLOCK, mask=c < n)


@triton.jit
def _unmasked(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c) * 2)


@triton.jit
def _add_in_place(X, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + c, tl.load(X + c, mask=c < n) + 1, mask=c < n)


def launcher(kernel: Any) -> Any:
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    return stub


def test_the_first_configuration_is_run():
    execution = check_gradients(launcher(tuned([16, 32], _double)), (torch.randn(40),), lambda x: 2 * x)
    assert execution.launches[0].grid == (3, 1, 1)
    assert [text.split(",")[0] for text in execution.tuned["_double"]] == ["BLOCK: 16", "BLOCK: 32"]


def test_a_configuration_that_triton_refuses_is_passed_over_as_its_benchmark_does():
    assert execute(launcher(tuned([64, 128, 32], _picky)), (torch.ones(4),)).result.tolist() == [32.0] * 4


def test_when_triton_refuses_all_configurations_its_message_is_shown():
    with pytest.raises(LoweringError, match="too large"):
        execute(launcher(tuned([64, 128], _picky)), (torch.ones(4),))


def test_pruning_by_the_file_comes_first():
    def prune(configs: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
        assert arguments["n"] == 4
        return configs[1:]

    kernel = tuned([64, 16], _picky, prune_configs_by={"early_config_prune": prune})
    assert execute(launcher(kernel), (torch.ones(4),)).result[0] == 16


def test_pruning_that_leaves_nothing_is_an_error():
    kernel = tuned([16, 32], _double, prune_configs_by={"early_config_prune": lambda *_args, **_kwargs: []})
    with pytest.raises(LaunchError, match="pruning leaves no autotune configuration"):
        execute(launcher(kernel), (torch.ones(4),))


def test_a_configuration_runs_its_own_hook_before_the_kernel():
    def zero(arguments: dict[str, Any]) -> None:
        arguments["Y"].zero_()

    @triton.autotune([triton.Config({"BLOCK": 16}, pre_hook=zero)], key=[])
    @triton.jit
    def accumulate(X, Y, n, BLOCK: tl.constexpr):
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(Y, tl.sum(tl.load(X + c, mask=c < n, other=0.0), 0))

    def stub(x: Tensor) -> Tensor:
        y = torch.empty(1, device=x.device)
        accumulate[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    check_gradients(stub, (torch.randn(40),), lambda x: x.sum().view(1))


def test_what_only_the_benchmark_resets_is_not_reset():
    # Triton calls the hooks of reset_to_zero while it measures; a launch whose choice is known runs without them, so
    # a stub that relies on them reads whatever torch.empty left
    @triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"], reset_to_zero=["Y"])
    @triton.jit
    def accumulate(X, Y, n, BLOCK: tl.constexpr):
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(Y, tl.sum(tl.load(X + c, mask=c < n, other=0.0), 0))

    def stub(x: Tensor, allocate: Any) -> Tensor:
        y = allocate(1, device=x.device)
        accumulate[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    assert execute(stub, (torch.ones(40), torch.zeros)).result.tolist() == [40.0]
    kinds = {finding.kind for finding in execute(stub, (torch.ones(40), torch.empty)).findings}
    assert kinds == {FindingKind.UNINITIALIZED_READ}


def test_a_kernel_that_changes_its_input_runs_once():
    kernel = tuned([16, 32], _add_in_place, restore_value=["X"])

    def stub(x: Tensor) -> Tensor:
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())
        return x

    assert execute(stub, (torch.zeros(4),), options=ALL).result.tolist() == [1.0] * 4


def test_heuristics_see_what_the_configuration_chose():
    @triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 8})], key=["n"])
    @triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
    @triton.jit
    def kernel(X, Y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if EVEN:
            tl.store(Y + c, tl.load(X + c) * 2)
        else:
            tl.store(Y + c, tl.load(X + c, mask=c < n) * 2, mask=c < n)

    for n in (32, 24):
        check_gradients(launcher(kernel), (torch.randn(n),), lambda x: 2 * x, options=ALL)


def test_the_chosen_configuration_is_known_to_the_stub_and_forgotten_afterwards():
    kernel = tuned([16, 32], _double)

    def stub(x: Tensor) -> int:
        launcher(kernel)(x)
        return int(kernel.best_config.kwargs["BLOCK"])

    assert execute(stub, (torch.ones(4),)).result == 16
    assert not hasattr(kernel, "best_config")
    assert getattr(kernel, "nargs", None) is None


def test_an_argument_from_autotune_and_from_the_launch_is_an_error():
    kernel = tuned([16, 32], _double)
    with pytest.raises(LaunchError, match="BLOCK comes from autotune and from the launch"):
        execute(lambda x: kernel[(1,)](x, x, 4, BLOCK=16), (torch.ones(4),))


def test_configurations_that_agree_leave_no_finding():
    execution = execute(launcher(tuned([16, 32, 64], _double)), (torch.randn(40),), options=ALL)
    assert execution.findings == ()


def test_a_configuration_that_computes_something_else_is_a_finding():
    execution = execute(launcher(tuned([16, 32, 64], _picky)), (torch.ones(4),), options=ALL)
    (finding,) = execution.findings
    assert finding.kind is FindingKind.CONFIG_DISAGREEMENT
    assert finding.kernel == "_picky"
    assert "output 0 differs" in finding.message
    assert "BLOCK: 32" in finding.message
    assert execution.result.tolist() == [16.0] * 4


def test_a_configuration_that_leaves_its_memory_is_a_finding():
    # 32 elements fit blocks of 16 and 32, not one of 64
    stub = launcher(tuned([16, 32, 64], _unmasked))
    assert execute(stub, (torch.ones(32),)).findings == ()
    findings = execute(stub, (torch.ones(32),), options=ALL).findings
    assert {finding.kind for finding in findings} == {FindingKind.OUT_OF_BOUNDS}
    assert all("BLOCK: 64" in finding.message for finding in findings)


def test_a_stub_that_draws_numbers_draws_the_same_for_every_configuration():
    kernel = tuned([16, 32], _double)

    def stub(x: Tensor) -> Tensor:
        return launcher(kernel)(x * torch.rand_like(x))

    assert execute(stub, (torch.randn(40),), options=ALL).findings == ()
