"""`kernel-agent pack` and `unpack`: a run as one file, to go on with it on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_agent.cli.runs import RunArgument, find_run
from kernel_agent.cli.streams import err


def pack(
    run: RunArgument,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder that holds deliveries and runs.")] = Path(
        "generated"
    ),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The tar file to write. Default: named after the run.")
    ] = None,
) -> None:
    """Pack a run, and what it delivered, into one tar file that another machine can go on with."""
    from kernel_agent.agent.parcel import pack as pack_run

    target = pack_run(find_run(run, out_folder).path, output)
    err().print(f"elsewhere: kernel-agent unpack {target.name}", soft_wrap=True)
    print(target)


def unpack(
    archive: Annotated[Path, typer.Argument(help="What kernel-agent pack wrote.")],
    folder: Annotated[Path, typer.Argument(help="Folder that holds deliveries and runs.")] = Path("generated"),
) -> None:
    """Unpack a run that was packed elsewhere. Nothing is overwritten, and nothing outside of the folder is written."""
    from kernel_agent.agent.parcel import unpack as unpack_run

    found = unpack_run(archive, folder)
    err().print(f"go on with it: {found.resume_command}", soft_wrap=True)
    print(found.path)
