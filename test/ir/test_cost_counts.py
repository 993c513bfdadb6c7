"""Costs of small kernels, counted by hand."""

from __future__ import annotations

import pytest
import torch
from cost_kernels import (
    add,
    append_positive,
    argmax_rows,
    bucket_then_gather,
    causal_sums,
    column_sums,
    gather_rows,
    halving,
    matmul,
    normalised_add,
    softmax_row,
    strided_copy,
    triangle,
)

from kernel_agent.ir.cost.cost import count_call, execute_call, report
from kernel_agent.ir.cost.cost_report import BufferCost, CostReport, LaunchCost, Resource, Traffic
from kernel_agent.ir.cost.counting import How
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.ir.cost.work import Work


def cost_of(stub, *args, **kwargs) -> CostReport:
    """The walked costs, once it is certain that executing the kernels counts the same."""
    device = device_table().find("H100 SXM")
    walked = report(count_call(stub, args, kwargs), device)
    executed = report(execute_call(stub, args, kwargs), device)
    for one, other in zip(walked.launches, executed.launches, strict=True):
        assert one.buffers == other.buffers
        assert one.work == other.work
        assert one.loops == other.loops
        assert one.atomics == other.atomics
    assert walked.torch == executed.torch
    return walked


def only(cost: CostReport) -> LaunchCost:
    assert len(cost.launches) == 1
    return cost.launches[0]


def buffer(launch: LaunchCost, name: str) -> BufferCost:
    return next(buffer for buffer in launch.buffers if buffer.name == name)


def test_vector_add_moves_every_element_once_and_masked_lanes_not_at_all():
    launch = only(cost_of(add, torch.randn(1000), torch.randn(1000)))
    once = Traffic(unique_bytes=4000, issued_bytes=4000, sector_bytes=4000)
    assert buffer(launch, "x").read == once
    assert buffer(launch, "y").read == once
    assert buffer(launch, "Z").write == once
    assert buffer(launch, "x").write is None
    assert launch.operations(Work.FP32) == 4 * 256  # the arithmetic of masked lanes is done all the same
    assert (launch.programs, launch.largest_tile, launch.atomics) == (4, 256, 0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float64, 8)])
def test_bytes_are_those_of_the_declared_dtype(dtype: torch.dtype, size: int):
    # The executor holds every float in 8 bytes: counting those would show here.
    launch = only(cost_of(add, torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)))
    assert launch.unique_bytes == 3 * 1000 * size
    kind = {torch.float16: Work.FP16, torch.bfloat16: Work.BF16, torch.float64: Work.FP64}[dtype]
    assert launch.operations(kind) == 1024


def test_softmax_row_reads_and_writes_once_and_counts_its_reductions():
    launch = only(cost_of(softmax_row, torch.randn(7, 100)))
    assert buffer(launch, "x").read.unique_bytes == 7 * 100 * 4
    assert buffer(launch, "Y").write.issued_bytes == 7 * 100 * 4
    assert launch.operations(Work.SPECIAL) == 7 * (128 + 128)  # exp and division
    assert launch.operations(Work.FP32) == 7 * (127 + 127 + 128)  # maximum, sum, subtraction


def test_sectors_of_rows_that_are_not_aligned_count_whole():
    # Rows of 100 floats begin at 400 bytes, half a sector off every other time: 13 sectors each.
    launch = only(cost_of(softmax_row, torch.randn(7, 100)))
    assert buffer(launch, "x").read.sector_bytes == 7 * 13 * 32


def test_matmul_tiles_are_issued_once_per_program_and_cross_memory_once():
    M, N, K = 70, 130, 40
    launch = only(cost_of(matmul, torch.randn(M, K).half(), torch.randn(K, N).half()))
    blocks_m, blocks_n = 3, 3
    assert launch.grid == (blocks_m, blocks_n, 1)
    a, b, c = buffer(launch, "a").read, buffer(launch, "b").read, buffer(launch, "C").write
    assert (a.unique_bytes, a.issued_bytes) == (M * K * 2, M * K * 2 * blocks_n)
    assert (b.unique_bytes, b.issued_bytes) == (K * N * 2, K * N * 2 * blocks_m)
    assert (c.unique_bytes, c.issued_bytes) == (M * N * 4, M * N * 4)
    assert launch.operations(Work.DOT_FP16) == 9 * 3 * 2 * 32 * 64 * 16  # programs, iterations, one dot
    (loop,) = launch.loops
    assert (loop.minimum, loop.mean, loop.maximum, loop.entries, loop.variable) == (3, 3.0, 3, 1.0, "start")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, Work.DOT_BF16), (torch.float32, Work.DOT_TF32), (torch.float8_e5m2, Work.DOT_FP8)],
)
def test_dots_are_told_apart_by_their_operands(dtype: torch.dtype, kind: Work):
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 64).to(dtype)
    launch = only(cost_of(matmul, a, b, BK=32))
    assert launch.operations(kind) == 2 * 32 * 64 * 32
    assert [work.kind for work in launch.work if "dot" in work.kind.value] == [kind]


def test_atomic_updates_are_told_apart_from_stores():
    launch = only(cost_of(column_sums, torch.randn(40, 20)))
    s = buffer(launch, "S")
    assert (s.read, s.write) == (None, None)
    assert s.atomic == Traffic(unique_bytes=80, issued_bytes=3 * 80, sector_bytes=3 * 96)
    assert launch.atomics == 3 * 20


def test_trip_counts_of_a_causal_loop_run_from_the_first_to_the_last_program():
    launch = only(cost_of(causal_sums, torch.randn(8 * 32)))
    (loop,) = launch.loops
    assert (loop.minimum, loop.mean, loop.maximum) == (1, 4.5, 8)
    assert buffer(launch, "x").read.issued_bytes == 36 * 128
    assert buffer(launch, "x").read.unique_bytes == 8 * 128


def test_rows_that_are_gathered_twice_cross_memory_once():
    index = torch.tensor([5, 1, 5, 5, 2])
    launch = only(cost_of(gather_rows, torch.randn(6, 16), index))
    assert buffer(launch, "x").read == Traffic(unique_bytes=3 * 64, issued_bytes=5 * 64, sector_bytes=5 * 64)
    assert buffer(launch, "index").read.issued_bytes == 5 * 8


def test_addresses_that_a_kernel_computes_are_followed_into_the_next_kernel():
    x = torch.randn(6, 16)
    cost = cost_of(bucket_then_gather, x)
    rows = int((x.flatten()[:6] > 0).to(torch.int64).unique().numel())
    assert buffer(cost.launches[1], "x").read.unique_bytes == rows * 64
    assert all(launch.how is How.WALKED for launch in cost.launches)


def test_a_kernel_that_goes_where_its_atomics_lead_is_executed_in_full_and_it_says_so():
    cost = cost_of(append_positive, torch.tensor([1.0, -1.0, 2.0, 3.0]))
    launch = only(cost)
    assert launch.how is How.EXECUTED
    assert buffer(launch, "Y").write.issued_bytes == 3 * 4
    assert "what an atomic operation finds decides where programs go" in cost.notes[0]


def test_a_tensor_without_values_cannot_lead_the_way():
    with pytest.raises(NeedsValues) as caught:
        count_call(append_positive, (torch.empty(4, device="meta"),))
    assert caught.value.remedy == "Give tensors with values instead of meta tensors."


def test_a_while_loop_counts_its_trips():
    launch = only(cost_of(halving, torch.randn(16)))
    (loop,) = launch.loops
    assert (loop.minimum, loop.maximum) == (1, 4)  # 1 -> 0, and 8 -> 4 -> 2 -> 1 -> 0
    assert loop.mean == (1 + 2 + 2 + 3 + 3 + 3 + 3 + 4) / 8
    assert buffer(launch, "x").read.issued_bytes == 21 * 4


def test_a_number_that_trips_choose_by_data_does_not_keep_a_loop_from_being_counted():
    # The column starts as a known number and is unknown after one trip; the first trip must not be counted twice.
    launch = only(cost_of(argmax_rows, torch.zeros(3, 200)))
    assert buffer(launch, "x").read.issued_bytes == 3 * 200 * 4
    assert buffer(launch, "Index").write.issued_bytes == 3 * 4


def test_torch_functions_are_part_of_the_whole_time():
    found = cost_of(column_sums, torch.zeros(64, 64))
    moved = sum(call.read_bytes + call.written_bytes for call in found.torch)
    assert moved == 64 * 4
    assert found.whole_seconds == pytest.approx(
        found.seconds + moved / (device_table().find("H100 SXM").bandwidth_gb_s * 1e9)
    )


def test_a_loop_whose_step_grows_is_walked_as_it_is():
    # 0, 1, 3, 6, ...: assuming that the first step goes on would read 0, 0, 0, ... or 0, 1, 2, 3, ...
    launch = only(cost_of(triangle, torch.randn(100), 10))
    assert buffer(launch, "x").read.unique_bytes == 10 * 4
    assert launch.loops[0].maximum == 10


def test_accesses_with_a_stride_need_a_sector_each():
    launch = only(cost_of(strided_copy, torch.randn(100, 32)[:, 0]))
    read = buffer(launch, "x").read
    assert (read.issued_bytes, read.sector_bytes) == (400, 3200)


def test_torch_functions_between_launches_are_counted_apart():
    x = torch.randn(20, 50).T
    cost = cost_of(normalised_add, x, torch.randn(50, 20))
    moved = {call.name: (call.calls, call.read_bytes, call.written_bytes) for call in cost.torch}
    assert moved["contiguous"] == (1, 4000, 4000)
    assert moved["sum"] == (1, 4000, 4)
    assert moved["__truediv__" if "__truediv__" in moved else "div"] == (1, 4004, 4000)
    assert only(cost).unique_bytes == 12000


def narrowed_twice(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def test_a_conversion_reads_its_argument_at_the_size_that_it_has():
    # The bytes of the result, counted for both, made a gradient that is summed in float32 cheaper than it is.
    cost = cost_of(narrowed_twice, torch.randn(1000))
    moved = {call.name: (call.read_bytes, call.written_bytes) for call in cost.torch}
    assert moved == {"half": (4000, 2000), "float": (2000, 4000)}


def test_the_bound_is_the_longest_time_of_any_unit():
    n = 1 << 20
    launch = only(
        report(
            count_call(add, (torch.empty(n, device="meta"), torch.empty(n, device="meta"))), device_table().find("L4")
        )
    )
    assert launch.bound.by is Resource.MEMORY
    assert launch.bound.seconds == pytest.approx(3 * 4 * n / 300e9)
    compute = {term.resource: term.seconds for term in launch.bound.terms}[Resource.FLOAT]
    assert compute == pytest.approx(n / 30.3e12)
