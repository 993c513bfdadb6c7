"""A forward that the candidate brings: it is held to the user's stub at every point, and beside other forwards."""

from __future__ import annotations

import pytest

from kernel_agent.gate import GateOptions, Status

RETURNS = "    return y, (x, w, rstd)\n"


@pytest.fixture(scope="module")
def with_forward(judge):
    """The verdict on the RMS norm with changes in its forward, which is the candidate's own then."""

    def judged(*changes, backward=(), options=None):
        head, mark, rest = judge.source("rmsnorm", *backward).partition("# --- backward ---")
        for old, new in changes:
            assert head.count(old) == 1, old
            head = head.replace(old, new)
        return judge.check_source("rmsnorm", head + mark + rest, options)

    return judged


@pytest.mark.parametrize(
    ("where", "case"), [("N == 37", "M=5 N=37"), ("N > 64", "N=129"), ("M == 1", "M=1 N=20")], ids=lambda text: text
)
def test_a_forward_that_is_wrong_only_at_a_later_point_of_a_batch_is_seen(with_forward, where, case):
    # Every point of a process has an answer of its own. The gradients are right at all of them, and so are the outputs
    # at the point that is asked first: whoever looks at that one alone, or at gradients, accepts this.
    verdict = with_forward((RETURNS, f"    if {where}:\n        y[-1, -1] = 0\n{RETURNS}"))
    assert verdict.status is Status.WRONG_FORWARD, verdict.message
    assert case in str(verdict.case)
    assert verdict.cases[0].status is Status.GREEN


def test_a_forward_that_gives_its_output_in_the_memory_of_the_host_is_refused(with_forward):
    # Values, shape and dtype are right: on a GPU whatever the user's program does with it next fails, or is slow.
    options = GateOptions(seeds=(0,), odd_sizes=0, max_cases=2, values=())
    made = "torch.empty(x.shape, dtype=x.dtype)"
    verdict = with_forward(
        (RETURNS, f"    host = {made}\n    host.copy_(y)\n{RETURNS.replace('return y', 'return host')}"),
        options=options,
    )
    assert verdict.status is Status.WRONG_FORWARD, verdict.message
    assert "output `y` is made on the CPU, the user's stub gives one on the GPU" in verdict.message


def test_a_forward_whose_output_lies_otherwise_than_the_contiguous_one_of_the_stub_is_refused(with_forward):
    # `y.view(-1)` in the user's program works with the stub's output and raises with this one.
    options = GateOptions(seeds=(0,), odd_sizes=0, max_cases=2, values=())

    def with_output(made):
        return with_forward(
            (RETURNS, f"    other = {made}\n    other.copy_(y)\n{RETURNS.replace('return y', 'return other')}"),
            options=options,
        )

    verdict = with_output("x.new_empty((N, M)).t()")
    assert verdict.status is Status.WRONG_FORWARD, verdict.message
    assert "strides (1, 3)" in verdict.message
    assert with_output("x.new_empty((M, N))").green
    assert with_output("x.new_empty((2 * M, N))[M:]").green, "a part of a larger buffer may be viewed as well"


@pytest.mark.parametrize("kept", ["x.shape[1]", "rstd"], ids=["a-number", "a-tensor"])
def test_what_a_forward_keeps_of_its_last_call_outside_of_saved_is_that_of_another_layer(with_forward, kept):
    # Forward and backward in turn at each shape never show it: a model runs all of its forwards first.
    stash = (RETURNS, f'    LAST["kept"] = {kept}\n{RETURNS}'), ("def forward(", "LAST = {}\n\n\ndef forward(")
    if kept == "rstd":
        uses = (("x, w, rstd = saved", 'x, w, _ = saved\n    rstd = LAST["kept"]'),)
    else:
        uses = (("    M, N = x.shape\n", '    M, N = x.shape[0], LAST["kept"]\n'),)
    verdict = with_forward(*stash, backward=uses)
    assert verdict.status in (Status.WRONG_GRADIENT, Status.OUT_OF_BOUNDS, Status.NOT_FINITE), verdict.message
    right = with_forward(*stash)
    assert right.green, "to keep something and not to use it is harmless"
