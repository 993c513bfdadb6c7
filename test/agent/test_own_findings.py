"""What the user's own kernels do wrong is said before the first ask."""

from __future__ import annotations

from pathlib import Path

import scripted

from kernel_agent.agent.workshop import open_tools
from kernel_agent.pairs.userfile import read_file


def test_a_forward_that_reads_out_of_bounds_at_a_swept_shape_is_named_in_the_cross_check(tmp_path: Path) -> None:
    # The smallest entry fills its blocks and is sound; the larger one is not, and only a paid ask would have shown it.
    path = tmp_path / "product.py"
    masked, bare = "y = tl.load(X + cols, mask=mask)", "y = tl.load(X + cols)"
    text = scripted.FORWARD.read_text()
    assert masked in text
    path.write_text(text.replace(masked, bare))
    with open_tools(scripted.config(tmp_path / "out", rag=False)) as tools:
        found = tools.cross_check(tools.describe(read_file(path)))
    assert found.passed
    assert "; the forward itself at N=100: " in found.line
    assert "outside" in found.line
