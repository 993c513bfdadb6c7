"""Work that lacks the GPU's memory beside others is done once more with all of it, and what is counted is counted once.

None of this needs a GPU: a process without one has no memory to free, and the locks are files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel_agent.bench.native_truth_child import limits
from kernel_agent.collection.in_process import InProcess, LocalCall, MemoryTaken, lacks_memory
from kernel_agent.collection.measuring import OPTIONS, at_bench
from kernel_agent.collection.turns import Turns
from kernel_agent.data import pairs_root
from kernel_agent.oracle import describe
from kernel_agent.oracle.costs import costs
from kernel_agent.pairs.userfile import read_file, read_source
from kernel_agent.sandbox import Job

CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
TORCH = "OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB."


@pytest.fixture
def turns(tmp_path: Path) -> Turns:
    return Turns(tmp_path)


@pytest.fixture
def here(turns: Turns) -> Iterator[InProcess]:
    with InProcess(turns) as sandbox:
        yield sandbox


def call_of(turns: Turns, folder: Path, *, has_all: bool) -> LocalCall:
    """What an entry is called with."""
    return LocalCall(Job("kernel_agent.bench.baseline_child:baselines"), folder, turns, None, has_all)


@pytest.mark.parametrize("said", [CUBLAS, TORCH, "Triton Error [CUDA]: out of memory"])
def test_every_library_is_understood_when_memory_is_short(said: str):
    # Read as a failure of the pair, it would be recorded, and skipped for good.
    assert lacks_memory(said)
    assert not lacks_memory("RuntimeError: CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    "record",
    [
        {"truth": 0, "refusal": CUBLAS},
        {"entry": 0, "way": "eager", "failed": TORCH},
        {"entry": 0, "where": "backward", "failure": {"type": "OutOfMemoryError", "message": "CUDA out of memory."}},
        {"truth": 0, "notes": [f"`reference` does not serve as honest arithmetic: {TORCH}"]},
    ],
    ids=["truth", "baseline", "candidate", "honest arithmetic"],
)
def test_a_job_that_lacks_memory_beside_others_ends_at_once(turns: Turns, tmp_path: Path, record: dict[str, object]):
    # What would come after it, such as a compilation of half a minute, is done once more anyway.
    with pytest.raises(MemoryTaken):
        call_of(turns, tmp_path, has_all=False).send(record)
    alone = call_of(turns, tmp_path, has_all=True)
    alone.send(record)
    assert [message.record for message in alone.messages] == [record], "with all memory it is the answer"


def test_other_failures_are_answers(turns: Turns, tmp_path: Path):
    call = call_of(turns, tmp_path, has_all=False)
    call.send({"entry": 0, "way": "compiled", "failed": "more than 30 s to compile and to time"})
    assert len(call.messages) == 1


@pytest.mark.parametrize(
    "lacking", [MemoryTaken(TORCH), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CUBLAS)], ids=repr
)
def test_work_that_lacks_memory_is_done_once_more_with_all_of_it(here: InProcess, lacking: Exception):
    tried = []

    def work() -> str:
        tried.append(here._has_all)
        if not here._has_all:
            raise lacking
        return "done"

    assert here.with_memory(work) == "done"
    assert tried == [False, True]
    assert here.with_memory(lambda: here._has_all) is False, "the next pair shares again"


def test_what_lacks_memory_although_it_has_all_is_told(here: InProcess):
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        here.with_memory(work)
    assert here.with_memory(lambda: 1) == 1, "nothing is held afterwards"


def test_what_is_wrong_otherwise_is_not_tried_again(here: InProcess):
    tried = []

    def work() -> None:
        tried.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        here.with_memory(work)
    assert len(tried) == 1


def test_the_cost_of_a_backward_is_counted_once(here: InProcess):
    # `measure` asks for it by the text of the pair, the record by the spec: two questions would take twice as long.
    spec = at_bench(describe(read_file(pairs_root() / "softmax" / "softmax_row.py"), here))
    first = costs(spec.facts, here, "H200", range(len(spec.sweep)), OPTIONS.count_limits)
    (counted,) = here._known.values()
    again = costs(read_source(spec.facts.source, spec.facts.path), here, "H200", [0], OPTIONS.count_limits)
    assert list(here._known.values()) == [counted]
    assert again[0].label == first[0].label
    assert next(iter(here._known.values())) is counted


def test_a_proof_begins_at_the_size_that_is_asked_for_and_goes_down_from_there():
    assert limits(None)[0] is None, "a run proves the entry itself"
    assert limits(1 << 24) == (1 << 24, 1 << 23, 1 << 20)
