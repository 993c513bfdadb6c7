"""`kernel-agent new kernel.py`: add SWEEP, make_args and @autodiff to a bare kernel file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import InputError


def new(
    file: Annotated[Path, typer.Argument(help="A file with a Triton kernel and the function that launches it.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Change the file itself.")] = False,
) -> None:
    """Add a SWEEP / make_args / @autodiff scaffold to a bare kernel file."""
    from kernel_agent.pairs.scaffold import scaffold
    from kernel_agent.pairs.userfile import read_text

    if output is not None and output.exists():
        raise InputError(
            "this file exists already and is not overwritten", path=output, remedy="choose another --output"
        )
    text = scaffold(read_text(file))
    target = file if in_place else output
    if target is None:
        out().print(text, markup=False, end="", soft_wrap=True)
        return
    target.write_text(text)
    err().print(f"wrote {target}: fill in the shapes, then run kernel-agent --file-path {target}", soft_wrap=True)
