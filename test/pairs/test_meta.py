"""META is read, never executed."""

from __future__ import annotations

import pytest

from kernel_agent.errors import InputError
from kernel_agent.pairs.meta import Gradient, read_meta


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
