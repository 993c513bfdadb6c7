"""What prompts are made of beside spec and verdict: facts, a plan, prices, pairs by technique, a diagnosis, times."""

from __future__ import annotations

from scripted import PAIR

from kernel_agent.agent.derived import Derived
from kernel_agent.agent.events import TechniqueHit
from kernel_agent.agent.plan import Difference, GradientPlan, GradientPrice, PairReading, Plan, Reduction
from kernel_agent.bench.records import Basis, KernelTime, Measurement, ShapeTime
from kernel_agent.gate.diagnosis.records import Diagnosis, Fault, Hypothesis, MatrixRow, Region, Suspect
from kernel_agent.gate.verdict import Status, Verdict
from kernel_agent.pairs.forward_facts import (
    AccessFacts,
    AccessMode,
    Derivative,
    DerivativeSource,
    ForwardFacts,
    LaunchFacts,
    ReductionFacts,
)

_FLAT = "element = 32 * program 0 + 0..31, contiguous"

FACTS = ForwardFacts(
    launches=(
        LaunchFacts(
            kernel="product_kernel",
            grid="(2,): one program per 32 elements",
            accesses=(
                AccessFacts(argument="X", mode=AccessMode.LOAD, line=18, axes=_FLAT, masked=True),
                AccessFacts(argument="W", mode=AccessMode.LOAD, line=18, axes=_FLAT, masked=True),
                AccessFacts(argument="Y", mode=AccessMode.STORE, line=19, axes=_FLAT, masked=True),
            ),
            reductions=(ReductionFacts(line=18, operation="sum", axis="the elements of a program"),),
            loops=("over k from 0 to K, 32 at a time",),
        ),
    ),
    crossing=("dx: every element by one program",),
    derivative=Derivative(source=DerivativeSource.REFERENCE, lines=("dx = grad_y * w", "dw = grad_y * x")),
    notes=("the stub itself calls torch.softmax",),
)

DERIVED = Derived(
    digest="0" * 64,
    schedules=("split", "owned"),
    remarks=("`rstd` is read from RSTD",),
    refused=("rows: no gradient adds up along an axis",),
    verdict=Verdict(status=Status.GREEN),
)

PLAN = Plan(
    pairs=(PairReading(slug="scaled_copy", match="one pass over elements", mismatch="one factor is a scalar there"),),
    anchor="scaled_copy",
    differences=(Difference(difference="both factors are tensors", implies="two gradients are stored"),),
    gradients=tuple(
        GradientPlan(
            grad=grad,
            owner="a block of elements",
            reduction=Reduction.PLAIN_STORE,
            techniques=("elementwise",),
            saved=(other,),
        )
        for grad, other in (("x", "w"), ("w", "x"))
    ),
)

PRICES = (
    GradientPrice(grad="x", line="dx moves 768 bytes, its floor", planned_bytes=768, floor_bytes=768),
    GradientPrice(grad="w", line="dw moves 1,280 bytes, 1.7 times its floor", planned_bytes=1280, floor_bytes=768),
)

HITS = (
    TechniqueHit(grad="x", technique="elementwise", pair=PAIR),
    TechniqueHit(
        grad="w",
        technique="two-stage-partials",
        pair=PAIR.model_copy(
            update={
                "slug": "column_sum",
                "family": "reduction_stat",
                "backward": "def backward(saved, grad_out, needs=None):\n    return partials(grad_out).sum(0)\n",
                "speed": "71 % of the bound on an H100",
            }
        ),
    ),
)

_PLACE = "N=64 seed=0"

DIAGNOSED = Diagnosis(
    matrix=(
        MatrixRow(case=f"{_PLACE} needs=(True, False)", passed=("x",), failed=()),
        MatrixRow(case=f"{_PLACE} cotangent=random", passed=("x",), failed=("w",)),
        MatrixRow(case=f"{_PLACE} cotangent=strided", passed=("x",), failed=("w",)),
    ),
    where=(Region(grad="w", statement="only in elements 32 to 63 (the last 32 of 64)", wrong_tiles=1, tiles=2),),
    what=(
        Hypothesis(
            grad="w",
            fault=Fault.MISSING_TERM,
            statement="residual equals -grad_y * x to 1e-12: this term is missing",
            left_over=1e-12,
            line=18,
        ),
    ),
    suspect=Suspect(line=51, statement="what it stores is no intermediate of the exact adjoint"),
)

MEASURED = Measurement(
    basis=Basis.MEASURED,
    device="NVIDIA H100 80GB HBM3",
    shapes=(
        ShapeTime(label="N=64", median_us=4.0, spread=0.02, bound_us=2.0, eager_us=12.0, compiled_us=6.0),
        ShapeTime(label="N=100", median_us=1250.0, spread=0.01, bound_us=1000.0, eager_us=2500.0, compiled_us=1300.0),
    ),
    kernels=(
        KernelTime(
            name="product_bwd_kernel",
            microseconds=1240.0,
            bound_by="memory",
            bound_us=1000.0,
            atomics=64,
            registers=32,
            spills=16,
            shared_bytes=1024,
        ),
    ),
    facts=("reads 3 N elements, the least is 3 N",),
)

MODELLED = Measurement(
    basis=Basis.MODELLED,
    device="H100 SXM",
    shapes=(ShapeTime(label="N=64", median_us=2.5, bound_us=2.0),),
    kernels=(KernelTime(name="product_bwd_kernel", microseconds=2.5, registers=32),),
)
