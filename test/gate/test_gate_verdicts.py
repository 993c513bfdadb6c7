"""What a verdict tells a model, and the contract of candidates for a user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.gate import GateOptions, Status, check
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate
from kernel_agent.pairs.userfile import read_file

USER_FILE = Path(__file__).parent / "users" / "scaled_norm.py"
BACKWARD = (USER_FILE.parent / "scaled_norm_backward.txt").read_text()
OWN_FORWARD = """
def forward(x, w, eps=1e-6):
    y, r = scaled_norm(x, w, {eps})
    return (y, r), (x, w, y, {saved}, eps)
"""


def test_a_green_verdict_of_fewer_cases_does_not_read_as_one_of_the_whole_suite(judge):
    # Two cases agree where forty are asked: "all 2 cases agree" was all that the message said.
    few = judge("softmax", options=GateOptions(max_cases=2, odd_sizes=0))
    assert few.green, few.message
    assert "more were left out; fewer than the standard suite asks (`max_cases` and `odd_sizes`)" in few.message
    whole = judge("softmax")
    assert whole.message == f"all {len(whole.cases)} cases agree with the exact gradients"


def test_a_red_verdict_says_case_gradient_tile_ratio_and_what_is_right(judge):
    verdict = judge("layernorm", ("* c1 - c2", "* c1 + c2"))
    assert verdict.case == "M=5 N=40 seed=0 cotangent=random"
    assert verdict.grad == "x"
    assert verdict.tile == (0, 0)
    assert verdict.ratio is not None
    assert verdict.ratio > 1
    assert "x[" in verdict.details, "some elements with their truth"
    assert "right in every case at this shape: `weight` and `bias`" in verdict.details


def test_no_launch_is_asked_for_where_all_that_is_needed_is_the_cotangent(judge):
    # needs=(True, False) is answered with the cotangent: right, and no kernel has anything to do.
    verdict = judge("skip_connection")
    assert verdict.green, verdict.message


def test_a_launch_is_asked_for_where_every_gradient_is_needed(judge):
    # The leave given above must not open a way to answer without any kernel at all.
    verdict = judge("skip_connection", ("    if need_a:", "    da = grad_y\n    if False:"))
    assert verdict.status is Status.NO_TRITON_LAUNCH, verdict.message


def test_a_strided_failure_is_set_against_the_layouts_that_pass(judge):
    # The pattern over cases is the diagnosis: random green and strided red means ignored strides.
    verdict = judge("softmax", ("grad_out.stride(1), N", "1, N"))
    assert verdict.case is not None
    assert "strided" in verdict.case
    assert "green at this shape: M=4 N=50 seed=0 cotangent=random" in verdict.details


def test_exchanged_gradients_are_recognised(judge):
    verdict = judge("layernorm", ("dw.to(weight.dtype), db.to(bias.dtype)", "db, dw"))
    assert "it is the gradient of `bias`" in verdict.message


def test_a_common_factor_is_named(judge):
    verdict = judge("layernorm", ("tl.atomic_add(DB + c, g,", "tl.atomic_add(DB + c, 2 * g,"))
    assert "twice the truth" in verdict.message


def test_a_finding_points_at_the_candidates_line(judge):
    change = ("X + row * N + c, mask=m, other=0.0)", "X + row * N + c)")
    source = judge.source("layernorm", change)
    verdict = judge.check_source("layernorm", source)
    assert verdict.line is not None
    assert "tl.load(X + row * N + c)" in source.splitlines()[verdict.line - 1]
    assert "tl.load(X + row * N + c)" in verdict.message


def test_an_exception_shows_the_candidates_own_frames_alone(judge):
    verdict = judge("layernorm", ("M, N = x.shape", "M, N, K = x.shape"))
    assert verdict.status is Status.CRASHED
    assert "ValueError" in verdict.message
    assert "M, N, K = x.shape" in verdict.message
    assert "site-packages" not in verdict.details


def test_a_compile_error_has_the_line_of_the_kernel(judge):
    source = judge.source("softmax", ("y * (g", "probs * (g"))
    verdict = judge.check_source("softmax", source)
    assert verdict.line is not None
    assert "probs" in source.splitlines()[verdict.line - 1], verdict.message


def test_checking_stops_after_the_first_red_shape_unless_told_otherwise(judge):
    change = ("m = c < N", "m = (c < N) & (c < 50)")  # right up to N=50, wrong beyond
    stopped = judge("softmax", change)
    whole = judge("softmax", change, options=GateOptions(stop_at_red=False))
    assert not stopped.green
    assert len(stopped.cases) < len(whole.cases) == whole.cases_planned


def test_progress_is_reported_for_every_case(judge):
    seen = []
    source = judge.source("softmax")
    spec, truths = judge.spec("softmax"), judge.truths("softmax")
    verdict = check(spec, source, judge.sandbox, on_case=lambda *a: seen.append(a), truths=truths)
    assert [done for _, done, _ in seen] == list(range(1, verdict.cases_planned + 1))


def test_a_one_tuple_is_as_good_as_a_bare_gradient(judge):
    assert judge("softmax", ("return dx", "return (dx,)")).green


def test_an_unneeded_gradient_may_be_none(judge):
    change = ("return dx, dw", "dx = dx if needs is None or needs[0] else None\n    return dx, dw")
    assert judge("layernorm", change).green


def test_an_empty_backward_section_is_no_code(judge):
    assert judge.with_backward("softmax", "").status is Status.NO_CODE


def test_a_backward_section_without_backward_is_bad_format(judge):
    assert judge.with_backward("softmax", "def backwards(saved, g):\n    return g").status is Status.BAD_FORMAT


def test_a_missing_marker_is_bad_format(judge):
    verdict = judge.check_source("softmax", judge.source("softmax").replace("# --- backward ---", ""))
    assert verdict.status is Status.BAD_FORMAT
    assert "marker" in verdict.message


@pytest.fixture(scope="module")
def user(sandbox):
    spec = describe(read_file(USER_FILE), sandbox)
    truths = Truths(spec, sandbox)

    def judge_candidate(candidate):
        return check(spec, assemble(spec, candidate), sandbox, truths=truths)

    return judge_candidate


def test_a_candidate_for_a_users_stub_is_green_without_a_forward_of_its_own(user):
    verdict = user(Candidate(backward=BACKWARD))
    assert verdict.green, f"{verdict.message}\n{verdict.details}"
    assert verdict.forward is not None
    assert verdict.forward.lines_changed == 0


def test_a_forward_of_its_own_is_measured(user):
    own = OWN_FORWARD.format(eps="eps", saved="r.clone()")
    verdict = user(Candidate(backward=BACKWARD, forward=own))
    assert verdict.green, verdict.message
    assert verdict.forward is not None
    assert verdict.forward.lines_changed > 0
    assert verdict.forward.extra_saved_bytes > 0


def test_a_forward_that_computes_something_else_is_rejected(user):
    own = OWN_FORWARD.format(eps="0.1", saved="r")
    verdict = user(Candidate(backward=BACKWARD, forward=own))
    assert verdict.status is Status.WRONG_FORWARD
    assert "output `y`" in verdict.message


def test_a_forward_that_computes_with_torch_is_a_fallback(user):
    own = OWN_FORWARD.format(eps="eps", saved="(r * 2) / 2")
    assert user(Candidate(backward=BACKWARD, forward=own)).status is Status.TORCH_FALLBACK


def test_outputs_that_are_no_tensors_are_compared_by_what_they_say(sandbox, tmp_path):
    # A torch.Size travels as a tuple and an object prints its address: neither was ever equal to itself.
    returned = "return y, r, y.shape, object(), dict(n=(1, 2.5)), torch.float16"
    path = tmp_path / "scaled_norm.py"
    path.write_text(USER_FILE.read_text().replace("return y, r", returned))
    spec = describe(read_file(path), sandbox)
    backward = BACKWARD.replace("grad_y, grad_r)", "grad_y, grad_r, *others)")
    source = assemble(spec, Candidate(backward=backward))
    verdict = check(spec, source, sandbox)
    assert verdict.green, verdict.message
    lied = check(spec, source.replace("n=(1, 2.5)", "n=(1, 2.0)"), sandbox)
    assert lied.status is Status.WRONG_FORWARD
    assert "output `out4` is {'n': (1, 2.0)}, the user's stub gives {'n': (1, 2.5)}" in lied.message


def _with_torch(stub_line):
    """The user's file with torch work in its stub."""
    text = USER_FILE.read_text()
    assert "    return y, r\n" in text
    return text.replace("    return y, r\n", stub_line + "    return y, r\n")


def _tanh_backward(call):
    return BACKWARD.replace("x, w, y, r, eps = saved\n", f"x, w, y, r, eps = saved\n    grad_y = {call}\n")


def test_what_the_adjoint_of_the_stubs_tanh_needs_is_permitted_and_more_is_not(sandbox, tmp_path):
    # The prompt says "and their adjoints"; META of a run is written by the tool, so it has to declare them.
    path = tmp_path / "scaled_norm.py"
    path.write_text(_with_torch("    y = torch.tanh(y)\n"))
    spec = describe(read_file(path), sandbox)
    assert spec.torch_ops == ("tanh",)
    truths = Truths(spec, sandbox)
    good = assemble(spec, Candidate(backward=_tanh_backward("grad_y * (1 - y * y)")))
    verdict = check(spec, good, sandbox, truths=truths)
    assert verdict.green, verdict.message
    product = assemble(spec, Candidate(backward=_tanh_backward("grad_y @ torch.ones(40, 40)")))
    verdict = check(spec, product, sandbox, truths=truths)
    assert verdict.status is Status.TORCH_FALLBACK
    assert "`mul`" not in verdict.message


def test_what_the_stub_calls_at_another_required_shape_is_permitted_here_too(sandbox, tmp_path):
    # A backward is one text for all shapes: it cannot know at which of them the stub goes through torch.
    path = tmp_path / "scaled_norm.py"
    text = _with_torch("    y = torch.mul(y, 1.0) if N > 50 else y\n")
    sweep = 'SWEEP = [{"M": 6, "N": 40}, {"M": 6, "N": 64, "required": %s}]'
    verdicts = []
    for required in (True, False):
        path.write_text(text.replace('SWEEP = [{"M": 6, "N": 40}]', sweep % required))
        spec = describe(read_file(path), sandbox)
        assert spec.torch_ops == (), "the smallest entry does not show it"
        source = assemble(spec, Candidate(backward=_tanh_backward("grad_y * 1.0")))
        declared = source.replace("    origin=", '    torch_ops=("mul",),\n    origin=')
        assert declared != source
        verdicts.append(check(spec, declared, sandbox))
    assert verdicts[0].green, verdicts[0].message
    assert verdicts[1].status is Status.TORCH_FALLBACK, "an entry that may be skipped permits nothing elsewhere"
