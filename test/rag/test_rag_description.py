"""A description holds what the forward computes and nothing of the check, of a backward or of a file's layout."""

import pytest

from kernel_agent.errors import InputError
from rag.describe import DESCRIPTOR_TERMS, describe


def test_names_count_three_times():
    # `gelu` stands in the stub's and in the kernel's name, nowhere else.
    words = describe("@triton.jit\ndef gelu_kernel(a):\n    pass\n\ndef gelu(b):\n    pass").words
    assert words["gelu"] == 6
    assert words["a"] == 1


def test_two_spellings_of_an_operator_share_a_term():
    # Splitting alone gives {layer, norm} against {layernorm}: no common word.
    underscored, joined = describe("def layer_norm(): pass").terms, describe("def layernorm(): pass").terms
    assert "layernorm" in underscored
    assert "layernorm" in joined


def test_check_of_a_user_file_is_left_out(layernorm):
    words = describe(layernorm).words
    assert words["norm"]
    assert not {"attention", "entropy", "vocab", "sweep"} & words.keys()


def test_hand_written_backward_and_its_kernels_are_left_out(layernorm):
    # The baseline's kernel is used by `backward` alone, the forward's kernel also by the stub.
    baseline = (
        "\n@triton.jit\ndef moebius_kernel(p):\n    tl.dot(p, p)\n\ndef backward(g):\n    moebius_kernel[(1,)](g)\n"
    )
    description = describe(layernorm + baseline)
    assert "moebius" not in description.words
    assert "tl.dot" not in description.ops
    assert "tl.rsqrt" in description.ops


def test_backward_of_a_pair_is_left_out(pair_source):
    description = describe(pair_source("attention_one_tile"))
    assert "ds" not in description.words
    assert description.ops["tl.dot"] == 2


@pytest.mark.parametrize("wrapper", ["class Op:", "if True:", "try:"])
def test_kernels_inside_a_block_are_described(wrapper):
    kernel = "    @triton.jit\n    def kernel(x):\n        tl.cumsum(x)\n" + (
        "finally:\n    pass\n" if wrapper == "try:" else ""
    )
    assert describe(f"{wrapper}\n{kernel}").ops == {"tl.cumsum": 1}


def test_path_gives_a_name_only_without_titles(tmp_path):
    source = "def run(): pass"
    assert "swiglu" in describe(source, tmp_path / "swiglu.py").names
    assert describe(source, tmp_path / "swiglu.py", titles=("rotary",)).names == ("rotary", "run")


def test_descriptor_is_docstring_names_terms_and_operations(pair_source):
    descriptor = describe(pair_source("softmax_one_row")).descriptor
    assert descriptor.startswith("Softmax of the last dimension")
    assert descriptor.endswith("arange exp load max program_id store sum")


def test_descriptor_keeps_the_commonest_words_of_a_long_file():
    body = "".join(f"    common{chr(97 + i // 26)}{chr(97 + i % 26)} = 1\n" for i in range(300))
    descriptor = describe(f"def run():\n{body}    hadamard = hadamard + 1\n").descriptor
    assert "hadamard" in descriptor
    assert len(descriptor.split()) < DESCRIPTOR_TERMS + 10


def test_renaming_changes_words_but_not_structure(layernorm):
    other = layernorm
    for old, new in (("layer_norm", "foo"), ("centred", "bar"), ("rstd", "baz"), ("mean", "qux")):
        other = other.replace(old, new)
    assert describe(other).grams == describe(layernorm).grams
    assert describe(other).words != describe(layernorm).words


def test_syntax_error_names_file_and_line(tmp_path):
    with pytest.raises(InputError, match=r"broken\.py:2: this is not valid Python"):
        describe("x = 1\ndef (:\n", tmp_path / "broken.py")
