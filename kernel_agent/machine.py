"""`Machine`: where something was found out. Verdicts and times name it, since both may move to another one."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field

from kernel_agent import __version__
from kernel_agent.record import Record

NO_GPU = "no GPU"
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""What a driver of a GPU puts there, under Linux and WSL."""


class Versions(Record):
    """The software that something was found out with."""

    kernel_agent: str
    python: str
    torch: str
    triton: str


class Machine(Record):
    """A GPU and the software that runs on it."""

    gpu: str = Field(default="", description="name of the GPU that is used; empty for none")
    versions: Versions

    def unlike(self, before: Machine) -> tuple[str, ...]:
        """What is different from before, in words: `torch 2.11.0 instead of 2.13.0`."""
        words = [] if self.gpu == before.gpu else [f"{self.gpu or NO_GPU} instead of {before.gpu or NO_GPU}"]
        old = before.versions.model_dump()
        for name, number in self.versions.model_dump().items():
            if number != old[name]:
                words.append(f"{name.replace('_', '-')} {number} instead of {old[name] or 'none'}")
        return tuple(words)

    def times_as(self, before: Machine) -> bool:
        """Whether times taken there can be compared with times taken here."""
        here, there = self.versions, before.versions
        return (self.gpu, here.torch, here.triton) == (before.gpu, there.torch, there.triton)


@lru_cache(maxsize=1)
def installed_versions() -> Versions:
    """Versions without importing torch or triton."""

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return Versions(kernel_agent=__version__, python=platform.python_version(), torch=of("torch"), triton=of("triton"))


def this_machine(device: str) -> Machine:
    """The machine that this process runs on, for a `--device`."""
    return Machine(gpu="" if device == "cpu" else gpu_name(device), versions=installed_versions())


def gpu_name(device: str) -> str:
    """Name of the GPU that a `--device` means; empty where torch sees none."""
    if not any(path.exists() for path in _DRIVERS):
        return ""  # torch need not be loaded to learn that
    import torch

    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name(int(device.partition(":")[2] or 0)))
