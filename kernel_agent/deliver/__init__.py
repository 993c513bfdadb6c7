"""What a run leaves behind: the finished operator, its test, its benchmark and its certificate."""

from kernel_agent.deliver.certificate import Certificate, Provenance
from kernel_agent.deliver.package import Delivery, deliver

__all__ = ["Certificate", "Delivery", "Provenance", "deliver"]
