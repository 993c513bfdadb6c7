"""What a run leaves behind: the finished operator, its test, its benchmark and its certificate."""

from typing import TYPE_CHECKING, Any

from kernel_agent.certificate.record import Certificate, Provenance

if TYPE_CHECKING:
    from kernel_agent.deliver.package import Delivery, deliver

__all__ = ["Certificate", "Delivery", "Provenance", "deliver"]


def __getattr__(name: str) -> Any:
    """What writes a delivery, loaded when it is wanted: certificates are read by commands that need no torch."""
    if name not in {"Delivery", "deliver"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kernel_agent.deliver import package

    return getattr(package, name)
