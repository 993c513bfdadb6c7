"""META is read, never executed."""

from __future__ import annotations

import pytest

from kernel_agent.errors import InputError
from kernel_agent.pairs.meta import Gradient, declaring, read_meta


@pytest.mark.parametrize(
    "text",
    [
        'META = dict(slug="a", grads=("x", "w"), schema=1)',
        'META = {"slug": "a", "grads": ("x", "w"), "schema": 1}',
        'META: dict = dict(slug="a", grads=["x", "w"])',
    ],
)
def test_meta_may_be_a_dict_call_or_a_display(text: str) -> None:
    meta = read_meta(text)
    assert meta.slug == "a"
    assert meta.grads == ("x", "w")
    assert meta.schema_version == 1
    assert meta.gradient is Gradient.TRUE


def test_fields_of_others_are_kept() -> None:
    """A harvested pair says where it comes from; reading it must not lose that."""
    assert read_meta('META = dict(grads=("x",), commit="abc")').model_dump()["commit"] == "abc"


@pytest.mark.parametrize(
    "text",
    [
        'META = dict(grads=("x",), slug=open("/tmp/reached", "w").name)',
        'META = dict(**other, grads=("x",))',
        "META = make()",
        'META = {1: "x"}',
        'META = {[]: "x"}',
    ],
)
def test_a_meta_that_computes_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(InputError, match="META is not literal") as caught:
        read_meta("import os\n" + text)
    assert caught.value.line == 2


def test_a_file_without_meta_is_no_pair() -> None:
    with pytest.raises(InputError, match="has no META"):
        read_meta("x = 1")


def test_meta_without_grads_is_refused() -> None:
    with pytest.raises(InputError, match="grads"):
        read_meta('META = dict(slug="a")')


def test_empty_grads_are_refused() -> None:
    with pytest.raises(InputError, match="is empty"):
        read_meta("META = dict(grads=())")


def test_a_newer_format_says_so() -> None:
    with pytest.raises(InputError, match="schema 2"):
        read_meta('META = dict(grads=("x",), schema=2)')


@pytest.mark.parametrize(
    "text",
    [
        'META = dict(slug="a", grads=("x",))\n',
        'META = dict(\n    slug="é",\n    grads=("x",), torch_ops=("mul",),\n)\n',
        'META = {"slug": "a", "grads": ("x",), "torch_ops": (\n    "mul",\n)}\n',
        'META = {"slug": "a", "grads": ("x",)}\n',
    ],
)
def test_functions_are_declared_beside_those_that_are_declared_already(text: str) -> None:
    head = f'"""One sentence."""\n\nimport torch\n\n{text}\nONE = 1\n'
    changed = declaring(head, ["neg", "mul"])
    assert read_meta(changed).torch_ops == ("mul", "neg")
    assert read_meta(changed).slug == read_meta(head).slug
    assert changed.endswith("\nONE = 1\n")
    assert declaring(changed, ["neg"]) == changed
