"""What the cases of the red shape say together, and the mistakes that show in their pattern."""

from __future__ import annotations

from kernel_agent.gate import Status
from kernel_agent.gate.diagnosis.records import Fault


def test_the_matrix_has_a_row_per_case_and_says_which_gradients_pass(judge):
    found = judge("layernorm", ("* c1 - c2", "* c1 + c2"), diagnose=True).diagnosis
    first = found.matrix[0]
    assert first.case == "M=5 N=40 seed=0 cotangent=random"
    assert first.failed == ("x",)
    assert first.passed == ("weight", "bias")


def test_a_gradient_that_is_only_right_without_a_cotangent_is_wrong_everywhere(judge):
    found = judge("layernorm", ("* c1 - c2", "* c1 + c2"), diagnose=True).diagnosis
    reading = "the gradient of x is wrong in every case but under a zero cotangent, where there is nothing to get wrong"
    assert found.readings == (reading,)


def test_something_that_does_not_scale_with_the_cotangent_is_read_off_the_tiny_and_the_zero_one(judge):
    found = judge("layernorm", ("DB + c, g, mask", "DB + c, g + 1e-9, mask"), diagnose=True).diagnosis
    (reading,) = [text for text in found.readings if text.startswith("the gradient of bias")]
    assert "something is added that does not scale with it" in reading


def test_a_clip_is_read_off_the_huge_cotangent(judge):
    change = ("g * xh, mask", "tl.minimum(tl.maximum(g * xh, -1000.0), 1000.0), mask")
    found = judge("layernorm", change, diagnose=True).diagnosis
    assert any(
        text.startswith("the gradient of weight fails only when the cotangent is huge") for text in found.readings
    )


def test_ignored_strides_are_shown_by_asking_again_with_a_contiguous_cotangent(judge):
    verdict = judge("softmax", ("grad_out.stride(1), N", "1, N"), diagnose=True)
    assert verdict.status is Status.OUT_OF_BOUNDS
    (named,) = verdict.diagnosis.what
    assert named.fault is Fault.STRIDES_IGNORED
    assert named.left_over <= 1e-6
    assert "with the same values in a contiguous cotangent it is exact" in named.statement


def test_a_mistake_under_every_layout_is_not_blamed_on_strides(judge):
    # Strided fails here as well: only that contiguous fails too tells the two apart.
    found = judge("softmax", ("(g - tl.sum(g * y, 0))", "g"), diagnose=True).diagnosis
    assert Fault.STRIDES_IGNORED not in {named.fault for named in found.what}


def test_the_place_is_part_of_the_diagnosis(judge):
    found = judge("matmul_bias", ("range(0, N, BN)", "range(0, N - BN + 1, BN)"), diagnose=True).diagnosis
    assert [region.grad for region in found.where] == ["x"]
    assert found.where[0].statement == "everywhere"
