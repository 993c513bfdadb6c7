"""Pairs of `test/gate/pairs` as candidates, with changes, at sizes where differences show."""

from pathlib import Path

from kernel_agent.pairs.spec import ShapeEntry

PAIRS = Path(__file__).parents[1] / "gate" / "pairs"


def source(name: str, *changes: tuple[str, str]) -> str:
    """The text of a pair, changed; every old text must be there."""
    text = (PAIRS / f"{name}.py").read_text()
    for old, new in changes:
        assert old in text, f"{old!r} is not in {name}"
        text = text.replace(old, new)
    return text


def entry(**dims: int) -> ShapeEntry:
    """An entry of a SWEEP."""
    return ShapeEntry(dims=dims)
