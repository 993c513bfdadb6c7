"""`kernel-agent grad FILE.py::FUNCTION`: the adjoint of a function from tiles to tiles, proven, as source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_agent.cli.streams import err
from kernel_agent.errors import ExitCode, InputError


def grad(
    place: Annotated[str, typer.Argument(metavar="FILE.py::FUNCTION", help="A @triton.jit function without memory.")],
    shapes: Annotated[
        str, typer.Option(help="What it is called with: 'x=[M, 64] fp16, eps=fp32'. A name stands for any extent.")
    ],
    wrt: Annotated[
        str | None, typer.Option(help="Parameters whose adjoints are wanted, 'x,w'; all floats by default.")
    ] = None,
) -> None:
    """Derive the adjoint of a function from tiles to tiles, and prove it.

    The source goes to stdout, when it agrees with the derivative that the exact executor computes. No GPU is needed.

    [bold]kernel-agent grad my_kernels.py::rmsnorm --wrt x,w --shapes "x=[M, N] fp16, w=[N], eps=fp32"[/]
    """
    file, separator, function = place.rpartition("::")
    if not separator or not function.isidentifier():
        raise InputError(f"`{place}` names no function", remedy="Write FILE.py::FUNCTION.")
    from kernel_agent.compiler.tile.proof import proven_adjoint
    from kernel_agent.pairs.userfile import read_text
    from kernel_agent.sandbox import Sandbox

    path = Path(file)
    asked = None if wrt is None else [name.strip() for name in wrt.split(",") if name.strip()]
    with Sandbox() as sandbox, err().status(f"deriving {function}"):
        found = proven_adjoint(path, read_text(path), function, shapes, asked, sandbox)
    print(found.text, end="")
    err().print(found.verdict, style="dim", soft_wrap=True)
    raise typer.Exit(int(ExitCode.OK))
