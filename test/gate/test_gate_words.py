"""Every red status speaks of the candidate's own lines, names and values, so that a repair needs no guess."""

from __future__ import annotations

from kernel_agent.gate import Status


def test_an_access_out_of_bounds_names_the_tensor_of_backward_and_the_index(judge):
    verdict = judge("layernorm", ("X + row * N + c, mask=m, other=0.0)", "X + row * N + c)"))
    assert verdict.status is Status.OUT_OF_BOUNDS
    assert "load outside of X = x (saved[0]), index `row * N + c`" in verdict.message
    assert "(N=40, row=4, c[40]=40); program (4, 0, 0), lane [40]" in verdict.message


def test_a_buffer_that_backward_made_has_both_of_its_names(judge):
    assert "store outside of DX = dx, index" in judge("layernorm", ("- c2) * rstd, mask=m)", "- c2) * rstd)")).message
    race = judge("layernorm", ("tl.atomic_add(DB + c, g, mask=m)", "tl.store(DB + c, g, mask=m)"))
    assert "of DB = db, which has 40" in race.message


def test_a_compile_error_says_tritons_complaint_and_marks_the_place(judge):
    verdict = judge("softmax", ("y * (g", "probs * (g"))
    assert "Triton cannot compile kernel _softmax_bwd: probs is not defined" in verdict.message
    line, mark = verdict.details.splitlines()[-2:]
    assert line[mark.index("^") :].startswith("probs * (g"), verdict.details


def test_an_error_inside_of_tritons_library_marks_the_candidates_call(judge):
    # The innermost place is a line of tl.sum, which no candidate can repair.
    verdict = judge("softmax", ("tl.sum(g * y, 0)", "tl.sum(g * y, 3)"))
    assert "invalid axis 3" in verdict.message
    line, mark = verdict.details.splitlines()[-2:]
    assert line[mark.index("^") :].startswith("tl.sum(g * y, 3)"), verdict.details
    assert "_sum_combine" not in verdict.details


def test_a_syntax_error_marks_the_place(judge):
    line, mark = judge("softmax", ("    return dx", "    return dx)")).details.splitlines()[-2:]
    assert line[mark.index("^")] == ")"


def test_a_missing_gradient_is_shown_position_by_position(judge):
    verdict = judge("layernorm", (", db.to(bias.dtype)", ""))
    assert verdict.details.splitlines() == [
        "returned[0]: float32 (5, 40); wanted here: the gradient of `x`",
        "returned[1]: float32 (40,); wanted here: the gradient of `weight`",
        "returned[2]: missing; wanted here: the gradient of `bias`",
    ]


def test_a_wrong_shape_says_whose_shape_it_should_have_and_what_the_given_one_looks_like(judge):
    verdict = judge("layernorm", ("db.to(bias.dtype)", "db[None]"))
    assert (
        "has shape (1, 40) instead of (40,), the shape of `bias` (saved[2]); they differ in dimensions"
        in verdict.message
    )
    unsummed = judge("layernorm", ("db.to(bias.dtype)", "g"))
    assert "the first 1 dimensions are still to be summed over" in unsummed.message


def test_a_crash_in_a_kernels_launch_has_no_frame_of_ours(judge):
    verdict = judge("softmax", ("(grad_out, y, dx, grad_out", "(grad_out, y, grad_out"))
    assert verdict.status is Status.CRASHED
    assert verdict.details.splitlines()[0].startswith("line 54 in backward: _softmax_bwd[(M,)](")
    assert "kernel_agent" not in verdict.details
