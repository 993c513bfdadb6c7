"""The user's `reference` against the truth: outputs, gradients by autograd, and the precision it computes in."""

from __future__ import annotations

import pytest
from forwards import SCALED

from kernel_agent.agent.workshop import cross_checked
from kernel_agent.oracle import Outcome, Truths, cross_check, describe
from kernel_agent.pairs.userfile import read_file

BODY = "def reference(x, w):\n    return x * w\n"


@pytest.fixture
def seen_with(tmp_path, sandbox):
    """The cross-check of y = x * w under a reference of one's own, and maybe other parts of the file."""

    def run(reference, *changes):
        text = SCALED
        for old, new in ((BODY, reference), *changes):
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "user.py"
        path.write_text(text)
        return cross_check(Truths(describe(read_file(path), sandbox), sandbox))

    return run


def gradients(seen):
    return {check.output: check for check in seen.references if check.gradient}


def test_the_gradients_of_a_right_reference_agree_far_below_the_tolerance(seen_with):
    seen = seen_with(BODY)
    assert seen.agrees
    for name in ("x", "w"):
        assert gradients(seen)[name].outcome is Outcome.AGREES, name
        assert gradients(seen)[name].relative_error < 1e-12, name
    assert seen.precision == "", "float64 all the way"
    assert "the outputs and the gradients agree with `reference`" in cross_checked(seen, 0.0).line


def test_a_reference_whose_gradient_differs_names_it_with_the_worst_element_and_both_values(seen_with):
    # The outputs are equal: only a look at the gradients can tell that part of one is detached.
    seen = seen_with("def reference(x, w):\n    v = w.clone()\n    v[5] = v[5].detach()\n    return x * v\n")
    assert not seen.agrees
    outputs = [check for check in seen.references if not check.gradient]
    assert all(check.outcome is Outcome.AGREES for check in outputs)
    wrong = gradients(seen)["w"]
    assert wrong.outcome is Outcome.DISAGREES
    assert wrong.worst == (5,)
    assert wrong.reference == 0.0
    assert wrong.exact != 0.0
    assert f"the gradient of `w` at [5] is {wrong.exact:.6g}, autograd through the reference gives 0" in wrong.reason
    assert gradients(seen)["x"].outcome is Outcome.AGREES, "the other gradient is right"


def test_an_output_that_disagrees_has_both_values(seen_with):
    seen = seen_with("def reference(x, w):\n    y = x * w\n    y[7] = y[7] + 1\n    return y\n")
    (output,) = [check for check in seen.references if not check.gradient]
    assert output.outcome is Outcome.DISAGREES
    assert output.reference == pytest.approx(output.exact + 1)
    assert "`y` at [7]" in output.reason


@pytest.mark.parametrize(("cast", "dtype"), [("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16")])
def test_a_reference_in_low_precision_is_compared_as_finely_as_that_allows_and_this_is_said(seen_with, cast, dtype):
    seen = seen_with(f"def reference(x, w):\n    return (x.{cast}() * w.{cast}()).to(x.dtype)\n")
    assert seen.agrees, seen
    assert seen.precision == dtype
    assert f"agree with `reference`, which computes in {dtype}" in cross_checked(seen, 0.0).line


def test_low_precision_does_not_excuse_what_it_cannot_explain(seen_with):
    seen = seen_with("def reference(x, w):\n    return (x.half() * w.half() * 1.1).to(x.dtype)\n")
    assert not seen.agrees
    reasons = [check.reason for check in seen.references if check.outcome is Outcome.DISAGREES]
    assert all("it computes in float16: 3e-02 of the RMS is allowed" in reason for reason in reasons), reasons


def test_a_float64_reference_is_compared_finely_though_the_kernel_stores_float16(seen_with):
    # The tolerance once followed the dtypes of the arguments: an error of one percent passed in float16.
    half = ("torch.randn(n, generator=g).to(device), torch", "torch.randn(n, generator=g).half().to(device), torch")
    both = (".to(device)\n\n\n", ".half().to(device)\n\n\n")
    assert seen_with(BODY, half, both).agrees
    assert not seen_with("def reference(x, w):\n    return 1.01 * x * w\n", half, both).agrees


def test_a_reference_that_takes_no_float64_is_asked_in_the_arguments_own_dtypes(seen_with):
    seen = seen_with("def reference(x, w):\n    assert x.dtype == torch.float32, 'float32 only'\n    return x * w\n")
    assert seen.agrees
    assert seen.precision == "float32"
    assert all(check.outcome is Outcome.AGREES for check in gradients(seen).values())


def test_a_reference_that_is_not_differentiable_still_judges_the_outputs(seen_with):
    seen = seen_with("def reference(x, w):\n    with torch.no_grad():\n        return x * w\n")
    assert seen.agrees
    assert [check.outcome for check in seen.references if not check.gradient] == [Outcome.AGREES]
    for name, check in gradients(seen).items():
        assert check.outcome is Outcome.INCONCLUSIVE, name
        assert "not differentiable" in check.reason, name


def test_a_reference_may_change_its_arguments_in_place(seen_with):
    seen = seen_with("def reference(x, w):\n    x.mul_(w)\n    return x\n")
    assert all(check.outcome is Outcome.AGREES for check in gradients(seen).values())


def test_a_declared_surrogate_is_the_gradient_and_the_references_own_is_not_asked(seen_with):
    # Straight-through estimators differ from their reference's autograd on purpose.
    surrogate = "def surrogate(x, w):\n    return x + w\n\n\n" + BODY
    seen = seen_with(surrogate)
    assert seen.agrees
    assert gradients(seen) == {}
    assert [check.outcome for check in seen.references] == [Outcome.AGREES], "the output is compared all the same"
    assert "surrogate" in seen.skipped
