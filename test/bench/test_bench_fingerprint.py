"""Candidates that say the same in other words have one fingerprint; any other change gives another one."""

import pytest
from bench_pairs import source

from kernel_agent.bench.fingerprint import fingerprint, source_fingerprint

RENAMED = (
    ("_ln_bwd", "_layer_norm_backward"),
    ("c1", "first"),
    ("g = grad_out.contiguous()", "cotangent = grad_out.contiguous()  # rows lie densely"),
    ("[(M,)](g, x, weight, mean", "[(M,)](cotangent, x, weight, mean"),
)


def test_names_comments_and_layout_do_not_count():
    assert source_fingerprint(source("layernorm", *RENAMED)) == source_fingerprint(source("layernorm"))


@pytest.mark.parametrize(
    "change",
    [
        ("(wg - xh * c1 - c2) * rstd", "(wg - xh * c2 - c1) * rstd"),
        ("(g, x, weight, mean, rstd, dx, dw, db, N", "(g, x, weight, mean, rstd, dx, db, dw, N"),
        ("return dx, dw.to(weight.dtype), db.to(bias.dtype)", "return dx, db.to(weight.dtype), dw.to(bias.dtype)"),
        ("tl.sum(wg, 0) / N", "tl.sum(wg, 0) / (N + 1)"),
    ],
    ids=["two sums swapped", "two buffers swapped", "two results swapped", "another constant"],
)
def test_a_change_of_meaning_counts(change):
    # Renaming by order of first use alone would call the swaps of names equal.
    assert source_fingerprint(source("layernorm", change)) != source_fingerprint(source("layernorm"))


def test_a_name_that_is_looked_up_while_running_keeps_its_name():
    # Renaming `first` would hide that globals() finds another function under that name.
    tail = "\n\ndef {}(x):\n    return x\n\n\nPICKED = globals()['first']\n"
    texts = [
        source("layernorm", ("# --- check ---", tail.format(name) + "\n\n# --- check ---"))
        for name in ("first", "other")
    ]
    assert source_fingerprint(texts[0]) != source_fingerprint(texts[1])


def test_a_local_that_hides_a_global_is_not_confused_with_it():
    tail = "\n\nSCALE = 2\nOTHER = 3\n\n\ndef pick():\n    return (lambda {0}: {0})(1) + {1}\n\n\n# --- check ---"
    texts = [
        source("layernorm", ("# --- check ---", tail.format(*names)))
        for names in (("SCALE", "SCALE"), ("OTHER", "SCALE"))
    ]
    assert source_fingerprint(texts[0]) != source_fingerprint(texts[1])


def test_what_is_no_python_has_no_fingerprint():
    assert source_fingerprint(source("layernorm", ("def backward(", "def backward(("))) is None


def test_kernels_that_compile_to_the_same_code_are_the_same(judge):
    reordered = source("layernorm", ("tl.sum(xh * wg, 0) / N", "tl.sum(xh * wg, axis=0) / N"), ("g * xh", "g * (xh)"))
    doubled = source("layernorm", ("(wg - xh * c1 - c2) * rstd", "(wg - xh * c1 - c2) * rstd * 2"))
    spec = judge.spec("layernorm")
    found = [fingerprint(spec, text, judge.sandbox) for text in (source("layernorm"), reordered, doubled)]
    assert str(found[0]).startswith("ptx:")
    assert source_fingerprint(reordered) != source_fingerprint(source("layernorm"))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_the_code_around_the_launches_counts_beside_their_ptx(judge):
    # The launches are the same in both: only torch code makes the difference.
    spec = judge.spec("layernorm")
    negated = source("layernorm", ("return dx, dw.to", "return -dx, dw.to"))
    assert fingerprint(spec, negated, judge.sandbox) != fingerprint(spec, source("layernorm"), judge.sandbox)


def test_a_backward_that_does_not_compile_is_known_by_its_text(judge):
    broken = source("layernorm", ("tl.sum(wg, 0) / N", "tl.no_such_function(wg)"))
    assert fingerprint(judge.spec("layernorm"), broken, judge.sandbox) == source_fingerprint(broken)
