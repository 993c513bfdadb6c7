"""The table of devices: complete, plausible, and found by the names people use."""

from __future__ import annotations

import re

import pytest

from kernel_agent.errors import InputError
from kernel_agent.ir.cost.devices import Device, device_table
from kernel_agent.ir.cost.work import Work

DEVICES = device_table().devices
LANES = {"8.0": 64, "8.6": 128, "8.9": 128, "9.0": 128, "10.0": 128, "gfx942": 128}
"""Lanes of fp32 per multiprocessor and clock: a fused multiplication and addition each."""


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_units_are_those_of_the_table(device: Device):
    # A figure in the wrong unit is off by a factor of 1000 (or 1024, or 8); no device is.
    assert 200 <= device.bandwidth_gb_s <= 10_000
    assert 4 <= device.l2_mb <= 256
    assert 16 <= device.memory_gb <= 300
    assert 1000 <= device.clock_mhz <= 3000
    assert 40 <= device.multiprocessors <= 400
    assert device.sources
    assert all(re.fullmatch(r"20\d\d-\d\d", source.date) and source.title for source in device.sources)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_fp32_rate_follows_from_lanes_and_clock(device: Device):
    # Catches a rate with sparsity (twice as high) or of another board of the same chip.
    lanes = LANES[device.capability]
    expected = device.multiprocessors * lanes * 2 * device.clock_mhz * 1e6
    assert device.rate(Work.FP32) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_dots_double_with_half_the_width(device: Device):
    tera = device.tera_per_s
    assert tera[Work.DOT_BF16] == tera[Work.DOT_FP16]
    assert tera[Work.DOT_FP16] == pytest.approx(2 * tera[Work.DOT_TF32], rel=0.03)
    if Work.DOT_FP8 in tera:
        assert tera[Work.DOT_FP8] == pytest.approx(2 * tera[Work.DOT_FP16], rel=0.03)
    assert 10 <= tera[Work.DOT_FP16] * 1e12 / (device.bandwidth_gb_s * 1e9) <= 600, "operations per byte"


@pytest.mark.parametrize("work", [work for work in Work if work is not Work.INTEGER])
def test_every_device_has_a_rate_for_all_arithmetic(work: Work):
    missing = [device.name for device in DEVICES if device.rate(work) is None]
    assert missing == (["MI300X"] if work is Work.SPECIAL else [])


def test_names_are_unique():
    names = [name.lower() for device in DEVICES for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", device_table().date)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("rtx4090", "RTX 4090"),
        ("A100-80GB-PCIe", "A100 80GB PCIe"),
        ("mi300", "MI300X"),
    ],
)
def test_a_device_is_found_by_what_people_call_it(asked: str, found: str):
    assert device_table().find(asked).name == found


def test_an_unknown_device_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match="'GTX 970' is not in the table") as caught:
        device_table().find("GTX 970")
    assert "H100 SXM" in caught.value.remedy


def test_half_a_name_that_means_several_devices_is_refused_with_those():
    with pytest.raises(InputError) as caught:
        device_table().find("a100 80gb")
    assert caught.value.remedy == "Choose one of: A100 80GB PCIe, A100 80GB SXM."
