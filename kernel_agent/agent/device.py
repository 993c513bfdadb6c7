"""`require_device`: a GPU that was asked for and is not there is told before anything runs."""

from __future__ import annotations

from kernel_agent.errors import EnvironmentProblem


def require_device(device: str) -> None:
    """Accept a `--device` that this machine has: `auto` and `cpu` always. Raises `EnvironmentProblem`."""
    if not device.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if index < count:
        return
    what = "there is no GPU here" if count == 0 else f"the GPUs here are cuda:0 to cuda:{count - 1}"
    raise EnvironmentProblem(f"--device {device}: {what}", remedy="leave --device out, or use --device cpu")
