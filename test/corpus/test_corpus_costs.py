"""Walking the addresses of a kernel counts what executing it counts, for every kernel of the corpus."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from corpus.case import Case
from corpus.test_corpus import CASES
from kernel_agent.ir.cost.cost import count_call, execute_call, report
from kernel_agent.ir.cost.counting import How
from kernel_agent.ir.cost.devices import device_table

DEPENDS_ON_DATA = {
    *(
        "total_by_last_program",
        "locked_sum",
        "running_mean_by_turns",
        "compact_positive",
        "highest_wins",
    ),  # what an atomic finds
    "viterbi_path",  # addresses out of what the kernel itself stored
    "host_reads_item",  # the stub asks for what a kernel computed
}
"""Kernels that go where data leads them: no one can tell without computing it."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_walked_costs_are_those_of_the_execution(case: Case):
    torch.set_num_threads(1)
    device = device_table().find("H100 SXM")
    walked = report(count_call(case.stub, case.args()), device)
    executed = report(execute_call(case.stub, case.args()), device)
    assert all((launch.how is How.EXECUTED) == (case.name in DEPENDS_ON_DATA) for launch in walked.launches)
    assert len(walked.launches) == len(executed.launches) > 0
    for one, other in zip(walked.launches, executed.launches, strict=True):
        assert replace(one, how=other.how) == other
    assert walked.torch == executed.torch
