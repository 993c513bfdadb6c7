"""The executor on a device that is not the CPU: no tensor is made on the wrong one, and no access waits for it.

The device is simulated, strictly (see `elsewhere`); `test/gpu` does the same on a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl
from corpus.case import Case, error, run
from corpus.test_corpus import CASES
from elsewhere import DEVICE, Elsewhere
from torch import Tensor

from kernel_agent.ir import ExecOptions, Execution, FindingKind, execute, execution
from kernel_agent.ir.capture.capture import Capture
from kernel_agent.ir.launch import launch
from kernel_agent.ir.transfer import launch_on

FAMILIES = [
    "attention_causal",
    "attention_ragged_packed",
    "column_sum_atomic",
    "column_extremes",
    "cummax_with_places",
    "dropout_replayed",
    "layernorm_welford",
    "linear_persistent_silu",
    "matmul_device_descriptors",
    "selective_scan",
    "stencil_with_halo",
    "total_by_last_program",
]


@dataclass
class Visit:
    """What happened elsewhere."""

    mode: Elsewhere
    waits: list[int] = field(default_factory=list)
    """Per launch: how often the host waited for the device."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Visit]:
    """Every launch runs elsewhere; buffers travel there and back."""
    with Elsewhere() as mode:
        visit = Visit(mode)

        def counted(*args):
            before = len(mode.waits)
            launch(*args)
            if args[5].device == DEVICE:  # not the second half of one that goes on to the host
                visit.waits.append(len(mode.waits) - before)

        def runner(*args):
            launch_on(DEVICE, counted, *args)

        monkeypatch.setattr(execution, "Capture", lambda **given: Capture(**{**given, "runner": runner}))
        yield visit


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FAMILIES], ids=lambda case: case.name)
def test_outputs_gradients_and_silence_are_those_of_the_cpu(case: Case, elsewhere: Visit):
    # A tensor made on the CPU by mistake meets one elsewhere sooner or later, and that raises.
    outcome = run(case)
    for got, want in zip(outcome.outputs, outcome.expected_outputs, strict=True):
        assert error(got, want) <= case.tolerance
    for place, want in outcome.expected_gradients.items():
        assert error(outcome.gradients[place], want) <= case.tolerance, f"gradient of argument {place}"
    assert outcome.findings == ()


@triton.jit
def _row_sums(X, Y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(X + row * columns + c, mask=c < columns, other=0.0))
    tl.store(Y + row, tl.sum(total, 0))


def row_sums(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _row_sums[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y


@pytest.mark.parametrize("columns", [20, 500])
def test_a_launch_asks_the_device_one_question_however_long_its_loops_are(columns: int, elsewhere: Visit):
    # 2 and 32 iterations with a masked load each: anything asked per access or per iteration would show.
    done = execute(row_sums, (torch.randn(5, columns),), leaves=[0], options=ExecOptions())
    assert elsewhere.waits == [1]
    before = len(elsewhere.mode.waits)
    done.result.sum().backward()
    transfers = [wait for wait in elsewhere.mode.waits[before:] if "_to_copy" not in str(wait)]
    assert transfers == []


@triton.jit
def _shift(X, Y, n, by, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c + by, mask=c < n), mask=c < n)


def shifted_past_the_end(x: Tensor) -> Tensor:
    y = torch.empty(40, device=x.device)
    _shift[(3,)](x, y, 40, 3, BLOCK=16)
    return y


def shifted_onto_itself(x: Tensor) -> Tensor:
    _shift[(3,)](x, x, 36, 4, BLOCK=16)
    return x


def reads_what_nothing_wrote(x: Tensor) -> Tensor:
    empty, y = torch.empty(40, device=x.device), torch.empty(40, device=x.device)
    _shift[(3,)](empty, y, 40, 0, BLOCK=16)
    return y


@triton.jit
def _all_to_one(X, Y):
    tl.store(Y, tl.load(X + tl.program_id(0)))


def all_to_one(x: Tensor) -> Tensor:
    y = torch.empty(1, device=x.device)
    _all_to_one[(40,)](x, y)
    return y


@triton.jit
def _lanes_to_one(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c // 2, tl.load(X + c))


def lanes_to_one(x: Tensor) -> Tensor:
    y = torch.empty(16, device=x.device)
    _lanes_to_one[(1,)](x, y, BLOCK=32)
    return y


BROKEN = {
    shifted_past_the_end: FindingKind.OUT_OF_BOUNDS,
    shifted_onto_itself: FindingKind.RACE,
    reads_what_nothing_wrote: FindingKind.UNINITIALIZED_READ,
    all_to_one: FindingKind.RACE,
    lanes_to_one: FindingKind.DUPLICATE_LANES,
}


@pytest.mark.parametrize("stub", BROKEN, ids=lambda stub: stub.__name__)
def test_findings_are_those_of_the_cpu_with_every_detail(stub, request: pytest.FixtureRequest):
    # The flag of the sentry has no words: without the second run there would be no line, lane and program.
    x = torch.randn(40)
    here = execute(stub, (x,))
    visit = request.getfixturevalue("elsewhere")
    there = execute(stub, (x,))
    assert BROKEN[stub] in [finding.kind for finding in here.findings]
    assert there.findings == here.findings
    assert same_bits(there, here)
    assert visit.waits


def same_bits(a: Execution, b: Execution) -> bool:
    return torch.equal(a.result.nan_to_num(nan=7.0), b.result.nan_to_num(nan=7.0))


@triton.jit
def _add_up(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0))
    tl.atomic_add(Y + c % 8, x * x * c)


def add_up(x: Tensor) -> Tensor:
    y = torch.zeros(8, device=x.device)
    _add_up[(x.numel(),)](x, y, BLOCK=64)
    return y


@pytest.mark.parametrize("limit", [20_000, 5000, 300])
def test_a_device_without_memory_gets_smaller_chunks_and_nothing_is_added_twice(limit: int, elsewhere: Visit):
    # 200 programs of 64 lanes: a chunk that was cut short and simply continued would count some lanes twice.
    x = torch.randn(200)
    weights = torch.arange(64, dtype=torch.float64).view(8, 8).sum(0)
    slopes = torch.arange(8, dtype=torch.float64)
    elsewhere.mode.limit = limit
    done = execute(add_up, (x,), leaves=[0])
    done.result.backward(slopes)
    assert error(done.result, x.double().square().sum() * weights) < 1e-14
    assert error(done.leaves[0].grad, 2 * x.double() * (weights * slopes).sum()) < 1e-14
    assert (elsewhere.mode.largest > 6400) == (limit == 20_000), "the small limits forced no smaller chunk"
