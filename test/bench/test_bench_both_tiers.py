"""What becomes of two verdicts, one exact and one of real kernels."""

from __future__ import annotations

from kernel_agent.bench.tiers import joined
from kernel_agent.gate import CaseResult, GradientScore, Status, Verdict

GREEN_CASE = CaseResult(
    case="n=7 cotangent=random",
    required=True,
    status=Status.GREEN,
    grads=(GradientScore(grad="x", passed=True, ratio=0.1),),
)
EXACT = Verdict(status=Status.GREEN, message="all agree", cases=(GREEN_CASE,), cases_planned=1, notes=("shrunk",))
NATIVE_CASE = GREEN_CASE.model_copy(update={"case": "n=4096 native"})


def test_two_green_verdicts_are_one_with_all_cases():
    native = Verdict(status=Status.GREEN, message="real kernels agree", cases=(NATIVE_CASE,), tier="native")
    both = joined(EXACT, native)
    assert both.green
    assert both.cases == (GREEN_CASE, NATIVE_CASE)
    assert both.tier == "exact and native"
    assert "real kernels agree" in both.message


def test_a_red_native_verdict_is_red_and_ranks_above_candidates_with_fewer_right_cases():
    red_case = NATIVE_CASE.model_copy(update={"status": Status.PRECISION_DOWNGRADE, "grads": ()})
    native = Verdict(
        status=Status.PRECISION_DOWNGRADE, case="n=4096 native", grad="x", cases=(red_case,), tier="native"
    )
    both = joined(EXACT, native)
    assert not both.green
    assert both.status is Status.PRECISION_DOWNGRADE
    assert both.tier == "native"
    assert both.rank > native.rank, "what the exact tier proved still counts"
    assert both.notes == ("shrunk",)


def test_nothing_checked_on_the_gpu_leaves_the_exact_verdict_and_says_so():
    native = Verdict(status=Status.NO_CASE, message="nothing fits", notes=("n=4096: no memory",), tier="native")
    both = joined(EXACT, native)
    assert both.green
    assert both.tier == "exact"
    assert both.notes == ("shrunk", "nothing fits", "n=4096: no memory")


def test_what_is_wrong_with_the_forward_is_told_of_a_verdict_of_both_tiers_too():
    # `kernel-agent derive` asks for it when real kernels have judged the backward, which look for no such fault.
    fault = "the forward itself at n=7: reads what nothing wrote"
    exact = EXACT.model_copy(update={"notes": (fault,), "faults": (fault,)})
    for status in (Status.GREEN, Status.WRONG_GRADIENT, Status.NO_CASE):
        native = Verdict(status=status, cases=(NATIVE_CASE,), tier="native")
        assert joined(exact, native).faults == (fault,)
