"""The fingerprint tells an edited kernel from an edited comment."""

from kernel_agent.deliver.fingerprint import forward_fingerprint

FORWARD = """
import triton
from kernel_agent import autodiff

@triton.jit
def scale_kernel(X, Y, factor):
    pass

@autodiff(inputs_require_grad=("x",))
def scale(x, factor):
    return x * factor
"""


def test_naming_the_delivered_file_keeps_the_fingerprint():
    # Users add backward=... to the decorator after delivery: that must not look like an edited forward.
    named = FORWARD.replace('("x",))', '("x",), backward="generated/scale_backward.py")')
    assert forward_fingerprint(named) == forward_fingerprint(FORWARD)


def test_comments_and_layout_keep_the_fingerprint():
    commented = FORWARD.replace("    pass", "    # nothing yet\n\n    pass")
    assert forward_fingerprint(commented) == forward_fingerprint(FORWARD)


def test_an_edited_kernel_changes_the_fingerprint():
    # A backward of the old kernel would give silently wrong gradients.
    edited = FORWARD.replace("return x * factor", "return x * factor + 1")
    assert forward_fingerprint(edited) != forward_fingerprint(FORWARD)


def test_a_reference_beside_the_forward_does_not_count():
    with_reference = FORWARD + "\ndef reference(x, factor):\n    return x * factor\n"
    assert forward_fingerprint(with_reference) == forward_fingerprint(FORWARD)
