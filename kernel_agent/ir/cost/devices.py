"""Peak rates of GPUs, as their vendors state them: a dated table, read from `devices.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.ir.cost.work import Work

TABLE = Path(__file__).with_name("devices.json")

_INSTEAD = {
    Work.DOT_FP4: Work.DOT_FP8,
    Work.DOT_FP8: Work.DOT_FP16,
    Work.DOT_INT8: Work.DOT_FP16,
    Work.DOT_FP16_ACC16: Work.DOT_FP16,
    Work.DOT_BF16: Work.DOT_FP16,
    Work.DOT_TF32: Work.FP32,
    Work.DOT_FP32: Work.FP32,
    Work.DOT_FP64: Work.FP64,
    Work.FP16: Work.FP32,
    Work.BF16: Work.FP32,
}
"""What a device without a unit for some arithmetic does it with."""

_TWICE = frozenset({Work.FP16, Work.BF16})
"""Arithmetic that may be packed in pairs: where no rate is stated, twice that of fp32 bounds it."""


@dataclass(frozen=True)
class Source:
    """Where figures come from."""

    title: str
    date: str
    """Year and month."""


@dataclass(frozen=True)
class Device:
    """One GPU."""

    name: str
    aliases: tuple[str, ...]
    """Other names, such as what the driver reports."""
    vendor: str
    capability: str
    """Compute capability, or the architecture of other vendors."""
    memory_gb: float
    """10**9 bytes."""
    bandwidth_gb_s: float
    """Of device memory, 10**9 bytes per second."""
    l2_mb: float
    """2**20 bytes."""
    multiprocessors: int
    clock_mhz: float
    """Boost clock."""
    special_per_clock: float | None
    """Special functions (exp2, reciprocal, ...) per clock and multiprocessor; None where nothing is stated."""
    tera_per_s: dict[Work, float]
    """Dense peak rate, 10**12 operations per second; a multiplication and an addition are two."""
    sources: tuple[Source, ...]

    def rate(self, work: Work) -> float | None:
        """Operations per second at most; None where nothing bounds them."""
        if work is Work.INTEGER:  # counted before the compiler simplifies addresses: no bound
            return None
        if work is Work.SPECIAL:
            if self.special_per_clock is None:
                return None
            return self.special_per_clock * self.multiprocessors * self.clock_mhz * 1e6
        unit: Work | None = work
        scale = 2.0 if work in _TWICE and work not in self.tera_per_s else 1.0
        while unit is not None and unit not in self.tera_per_s:
            unit = _INSTEAD.get(unit)
        return None if unit is None else self.tera_per_s[unit] * scale * 1e12


@dataclass(frozen=True)
class DeviceTable:
    """All devices we know figures of."""

    date: str
    """When the table was last looked over."""
    devices: tuple[Device, ...]

    def find(self, name: str) -> Device:
        """A device by its name or alias, whatever its case. Raises `InputError`."""
        wanted = _plain(name)
        for device in self.devices:
            if wanted in [_plain(known) for known in (device.name, *device.aliases)]:
                return device
        close = [device.name for device in self.devices if wanted and wanted in _plain(device.name)]
        if len(close) == 1:
            return self.find(close[0])
        known = ", ".join(close or [device.name for device in self.devices])
        raise InputError(f"device {name!r} is not in the table of devices", remedy=f"Choose one of: {known}.")


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


@lru_cache(maxsize=1)
def device_table() -> DeviceTable:
    """The table that comes with the package."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    devices = [
        Device(
            **{
                **row,
                "aliases": tuple(row["aliases"]),
                "tera_per_s": {Work(kind): rate for kind, rate in row["tera_per_s"].items()},
                "sources": tuple(Source(**source) for source in row["sources"]),
            }
        )
        for row in data["devices"]
    ]
    return DeviceTable(data["date"], tuple(devices))
