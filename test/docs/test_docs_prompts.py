"""docs/prompts.md is what the command prints that it names, and its asks keep to their size."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "prompts.md"
MOST_TOKENS = 12_000
LEAST_PREFIX = 0.8


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prompts_example", ROOT / "bench" / "prompts_example.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script: ModuleType) -> object:
    """The asks, made with the real forward, the real search and the real gate."""
    return script.example()


def test_every_ask_for_layernorm_fits_into_12k_tokens_and_is_mostly_prefix(made: object) -> None:
    # Four pairs whole, the candidate whole and its verdict: a template that grows, or a search that shows longer
    # pairs, breaks this.
    asks = made.asks  # type: ignore[attr-defined]
    assert list(asks) == ["1, a plan", "2, a draft", "3, a repair", "4, optimise"]
    for name, prompt in asks.items():
        assert prompt.tokens <= MOST_TOKENS, f"ask {name} has about {prompt.tokens} tokens"
    prefixes = {(prompt.conversation.system, prompt.conversation.turns[0].text) for prompt in asks.values()}
    assert len(prefixes) == 1, "what differs by one letter is cached for nobody"
    for name, prompt in list(asks.items())[1:]:
        share = prompt.prefix_tokens / prompt.tokens
        assert share >= LEAST_PREFIX, f"{share:.0%} of ask {name} is prefix"


def test_the_page_is_fresh(script: ModuleType, made: object) -> None:
    page = PAGE.read_text(encoding="utf-8")
    printed = re.search(r"^Printed with torch (\S+) and triton (\S+)\.$", page, re.MULTILINE)
    assert printed is not None
    if printed.groups() != (torch.__version__.partition("+")[0], triton.__version__):
        pytest.skip(f"it was printed with torch {printed[1]} and triton {printed[2]}, whose kernels differ")
    assert script.page(made) == page, "print it again: python bench/prompts_example.py > docs/prompts.md"
