"""`FinalKernels`: the kernels of a plan as they are printed: under their names, with their own settings, and in blocks.

What a launch chooses for itself is among the parameters of its kernel, which are known from the printed text. That is
the longest part of a derivation, so the kernel that is asked then is the one that is launched, and printed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kernel_agent.compiler.plan import BackwardPlan, Step
from kernel_agent.compiler.schedule.blocks import in_blocks
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.keywords import own_keywords, with_keywords
from kernel_agent.compiler.stub.lines import backward_name
from kernel_agent.compiler.stub.wording import Wording


@dataclass(frozen=True)
class FinalKernel:
    """The kernel of one launch."""

    kernel: Kernel
    keywords: Mapping[str, str]
    """Settings of the plan -> what the kernel calls them."""
    descriptors: bool
    """It makes some that take memory."""


class FinalKernels:
    """Of one plan."""

    def __init__(self, wording: Wording) -> None:
        self._found = {id(step): _final(step, wording) for step in _in_order(wording.plan)}

    def of(self, step: Step) -> FinalKernel:
        """The kernel of a step of the plan."""
        return self._found[id(step)]


def _in_order(plan: BackwardPlan) -> Iterator[Step]:
    """All steps as they are launched, which is how kernels of one name are numbered."""
    yield from (census.step for census in plan.censuses)
    for listing in plan.listings:
        if listing.counting is not None:
            yield listing.counting.step
        yield listing.step
    yield from plan.steps


def _final(step: Step, wording: Wording) -> FinalKernel:
    keywords = own_keywords(step.kernel)
    name = wording.names.fresh(backward_name(step.kernel.name))
    named = replace(with_keywords(step.kernel, keywords), name=name)
    blocks = in_blocks(named, wording.launched.kernel, wording.plan)
    return FinalKernel(blocks.kernel, keywords, blocks.descriptors)
