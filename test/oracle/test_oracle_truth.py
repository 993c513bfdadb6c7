"""The truth of real kernels, computed in a child: against autograd of the references, and kept by content."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forwards import SCALED

from kernel_agent.errors import EnvironmentProblem, ExitCode, InputError
from kernel_agent.oracle import (
    CotangentKind,
    Outcome,
    Point,
    Refusal,
    RefusalKind,
    TruthError,
    Truths,
    cross_check,
    describe,
    make_cotangents,
)
from kernel_agent.oracle.records import ROUNDOFF
from kernel_agent.oracle.truth import Request, gain
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Limits, Sandbox


@pytest.fixture
def spec_of(tmp_path, sandbox):
    def write(text, *changes):
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "user.py"
        path.write_text(text)
        return describe(read_file(path), sandbox)

    return write


def test_gradients_of_layernorm_are_those_of_its_formula(judge):
    truths = judge.truths("layernorm")
    forward = truths.forward(Point(entry=ShapeEntry(dims={"M": 5, "N": 40})))
    cotangents = make_cotangents(CotangentKind.RANDOM, forward.forms, 0)
    (truth,) = truths.gradients(forward, [cotangents])
    leaves = [a.double().requires_grad_() for a in forward.args]
    y = torch.nn.functional.layer_norm(leaves[0], (40,), leaves[1], leaves[2], 1e-5)
    expected = torch.autograd.grad(y, leaves, cotangents[0].double())
    for name, grad in zip(("x", "weight", "bias"), expected, strict=True):
        # eps goes through float32 in the kernel's signature; beyond that both sides are float64.
        torch.testing.assert_close(truth.grads[name], grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_scale_of_a_gradient_whose_units_are_beyond_floats_is_told_by_its_own_size(judge):
    # A ratio of exponentials is 1e200 in float64: under cotangents of 2^40 its square overflowed and ended the verdict,
    # and an infinite scale would let any gradient pass.
    truths = judge.truths("layernorm")
    forward = truths.forward(Point(entry=ShapeEntry(dims={"M": 5, "N": 40})))
    (truth,) = truths.gradients(forward, [make_cotangents(CotangentKind.RANDOM, forward.forms, 0)])
    (unit,) = truth.units["x"]
    large = replace(truth, natural=truth.natural | {"x": (1e200,)})
    assert large.scale("x", (2.0**40,), (200,)) == pytest.approx(ROUNDOFF * 1e200 * 2.0**40)
    endless = replace(truth, natural=truth.natural | {"x": (1e300,)})
    assert endless.scale("x", (2.0**40,), (200,)) == pytest.approx(unit * 2.0**40)


def test_a_forward_that_fails_a_step_aside_is_a_truth_error(spec_of, sandbox):
    # The truth has an answer at the point itself; the refusal comes where a difference quotient is expected.
    body, made = "y = torch.empty_like(x)", "return torch.randn(n, generator=g).to(device), "
    fails = f'if x[0].item() != 0.5:\n        raise ValueError("aside")\n    {body}'
    half = "x = torch.randn(n, generator=g).to(device)\n    x[0] = 0.5\n    return x, "
    spec = spec_of(SCALED, (body, fails), (made, half))
    with pytest.raises(TruthError, match="aside"):
        cross_check(Truths(spec, sandbox))


def test_a_forward_that_never_ends_is_an_input_error_with_a_remedy(tmp_path, sandbox):
    # Nothing is wrong with this machine nor red about a candidate: the file has to change.
    path = tmp_path / "user.py"
    path.write_text(SCALED.replace("    y = torch.empty_like(x)", "    while True:\n        pass", 1))
    with pytest.raises(TruthError, match="does not finish") as caught:
        describe(read_file(path), sandbox, Limits(wall_s=2))
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    assert "never ends" in caught.value.remedy


def test_keyword_arguments_are_known_by_name_whatever_their_order_at_an_entry(spec_of, sandbox):
    # By position, the gradient of x would be that of w at every shape whose keywords come in another order.
    passed = "return torch.randn(n, generator=g).to(device), torch.randn(n, generator=g).to(device)"
    named = "x, w = torch.randn(n, generator=g), torch.randn(n, generator=g)\n"
    named += "    return (), (dict(x=x, w=w) if n == 70 else dict(w=w, x=x))"
    spec = spec_of(SCALED, (passed, named))
    truths = Truths(spec, sandbox)
    forward = truths.forward(Point(entry=ShapeEntry(dims={"n": 71})))
    assert list(forward.kwargs) == ["w", "x"], "the order that the test is about"
    cotangents = make_cotangents(CotangentKind.RANDOM, forward.forms, 0)
    (truth,) = truths.gradients(forward, [cotangents])
    assert cotangents[0] is not None
    torch.testing.assert_close(truth.grads["x"], cotangents[0].double() * forward.kwargs["w"].double())
    torch.testing.assert_close(truth.grads["w"], cotangents[0].double() * forward.kwargs["x"].double())


def test_the_scale_is_linear_in_the_cotangent_and_zero_for_a_zero_one(judge):
    truths = judge.truths("two_outputs")
    forward = truths.forward(Point(entry=ShapeEntry(dims={"n": 100})))
    (truth,) = truths.gradients(forward, [make_cotangents(CotangentKind.RANDOM, forward.forms, 0)])
    one = truth.scale("x", (1.0, 1.0), (100, 100))
    assert one == pytest.approx(2**0.5, rel=0.2), "dx = ds + dp * y, all of them normal"
    assert truth.scale("x", (3.0, 3.0), (100, 100)) == pytest.approx(3 * one)
    assert truth.scale("x", (0.0, 0.0), (100, 100)) == 0.0


def test_a_truth_on_disk_needs_no_child_again(judge, tmp_path):
    point = Point(entry=ShapeEntry(dims={"M": 4, "N": 50}))
    first = Truths(judge.spec("softmax"), judge.sandbox, tmp_path)
    forward = first.forward(point)
    cotangents = make_cotangents(CotangentKind.STRIDED, forward.forms, 0)
    (truth,) = first.gradients(forward, [cotangents])
    closed = Sandbox()
    closed.close()
    again = Truths(judge.spec("softmax"), closed, tmp_path)
    (kept,) = again.gradients(again.forward(point), [cotangents])
    assert torch.equal(kept.grads["x"], truth.grads["x"])
    assert kept.units == truth.units


class SilentTruths(Truths):
    """Truths whose child finishes and says nothing."""

    def _run(self, entry, payload, tensors=None, cancelled=None):
        return ()


def test_a_child_that_finishes_without_answers_ends_the_question(judge):
    # Asking again until an answer comes would never end.
    truths = SilentTruths(judge.spec("softmax"), judge.sandbox)
    with pytest.raises(EnvironmentProblem, match="1 questions unanswered"):
        truths.forwards([Point(entry=ShapeEntry(dims={"M": 4, "N": 50}))])


def test_a_point_that_cannot_be_differentiated_leaves_the_others_their_gradients(spec_of, sandbox):
    refuses = (
        "    if x.requires_grad and x.numel() == 71:\n        raise ValueError('odd')\n    y = torch.empty_like(x)"
    )
    spec = spec_of(SCALED, ("    y = torch.empty_like(x)", refuses))
    truths = Truths(spec, sandbox)
    bad, good = (truths.forward(Point(entry=ShapeEntry(dims={"n": n}))) for n in (71, 72))
    sets = {n: (make_cotangents(CotangentKind.RANDOM, f.forms, 0),) for n, f in ((71, bad), (72, good))}
    (unanswered,) = truths.prepare([Request(bad, sets[71]), Request(good, sets[72])])
    assert unanswered.point == bad.point
    assert "odd" in unanswered.error.message
    assert truths.gradients(good, sets[72])[0].grads["x"] is not None
    with pytest.raises(TruthError, match="odd"):
        truths.gradients(bad, sets[71])


def test_a_refused_size_is_an_answer_and_not_an_error(judge):
    truths = judge.truths("matmul_bias")
    good, bad = truths.forwards(
        [Point(entry=ShapeEntry(dims={"M": m, "N": 24, "K": 18})) for m in (20, -1)],
    )
    assert not isinstance(good, Refusal)
    assert isinstance(bad, Refusal)
    assert bad.kind is RefusalKind.ARGUMENTS


def test_a_surrogate_replaces_the_gradient_and_not_the_outputs(spec_of, sandbox):
    surrogate = "def surrogate(x, w):\n    return 2 * x + 3 * w\n\n\ndef reference(x, w):"
    spec = spec_of(SCALED, ("def reference(x, w):", surrogate))
    truths = Truths(spec, sandbox)
    forward = truths.forward(Point(entry=spec.sweep[0]))
    cotangents = make_cotangents(CotangentKind.RANDOM, forward.forms, 0)
    (truth,) = truths.gradients(forward, [cotangents])
    x, w = forward.args
    torch.testing.assert_close(forward.outputs[0], x.double() * w.double())
    torch.testing.assert_close(truth.grads["x"], 2 * cotangents[0].double())
    torch.testing.assert_close(truth.grads["w"], 3 * cotangents[0].double())


@pytest.mark.parametrize("body", ["x.sum()", "(x, w)", "x.no_such_method()"])
def test_a_surrogate_unlike_the_stub_is_an_input_error(spec_of, sandbox, body):
    surrogate = f"def surrogate(x, w):\n    return {body}\n\n\ndef reference(x, w):"
    spec = spec_of(SCALED, ("def reference(x, w):", surrogate))
    truths = Truths(spec, sandbox)
    forward = truths.forward(Point(entry=spec.sweep[0]))
    with pytest.raises(InputError, match="surrogate"):
        truths.gradients(forward, [make_cotangents(CotangentKind.RANDOM, forward.forms, 0)])


def test_an_error_of_the_child_arrives_with_path_line_and_remedy(spec_of):
    with pytest.raises(InputError, match="make_args") as caught:
        spec_of(SCALED, ("    g = torch.Generator()", "    raise ValueError('sizes')\n    g = torch.Generator()"))
    assert caught.value.path is not None
    assert caught.value.path.name == "user.py"
    assert caught.value.line == SCALED.splitlines().index("    g = torch.Generator().manual_seed(seed)") + 1
    assert caught.value.remedy


def test_a_file_that_leaves_its_process_is_an_input_error(spec_of):
    with pytest.raises(InputError, match="ends the process"):
        spec_of(SCALED, ("SWEEP = [", "import os\nos._exit(0)\nSWEEP = ["))


def test_exact_gradients_agree_with_central_differences_for_every_output(judge):
    seen = cross_check(judge.truths("two_outputs"))
    assert seen.agrees
    assert [check.outputs for check in seen.derivatives] == [("s",), ("p",), ("s", "p")]
    assert all(check.outcome is Outcome.AGREES for check in seen.derivatives)


def test_a_gradient_lost_on_the_way_is_seen_by_the_differences(spec_of, sandbox):
    # A detached copy cuts autograd but not the forward's slope: exactly what the cross-check is there for.
    spec = spec_of(SCALED, ("](x, w, y,", "](x, w.detach().clone(), y,"))
    (check,) = cross_check(Truths(spec, sandbox)).derivatives
    assert check.outcome is Outcome.DISAGREES


def test_a_reference_that_disagrees_names_output_and_element(spec_of, sandbox):
    wrong = "def reference(x, w):\n    y = x * w\n    y[7] += 1\n    return y\n\n\ndef unused(x, w):"
    spec = spec_of(SCALED, ("def reference(x, w):", wrong))
    seen = cross_check(Truths(spec, sandbox))
    check = seen.references[0]
    assert check.outcome is Outcome.DISAGREES
    assert check.output == "y"
    assert check.worst == (7,)
    assert not seen.agrees


def test_a_reference_that_raises_is_inconclusive_and_said(spec_of, sandbox):
    spec = spec_of(SCALED, ("    return x * w\n", "    raise RuntimeError('no GPU')\n"))
    seen = cross_check(Truths(spec, sandbox))
    assert seen.agrees
    assert "no GPU" in seen.references[0].reason


def test_an_output_that_is_rounding_of_zero_leaves_the_unit_gain():
    # With the noise as the unit nothing would be allowed: a right gradient of a mixture over one class was refused,
    # 1.5e5 times over an allowance of 1e-22.
    assert gain(1e-16, 2.0) == 1.0
    assert gain(0.0, 2.0) == 1.0


def test_a_small_output_keeps_its_own_unit():
    # A floor under every gain would let wrong gradients of small outputs pass.
    assert gain(2e-9, 2.0) == 1e-9
