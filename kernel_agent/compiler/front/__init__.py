"""The front: from the IR of a launch to a kernel that passes rewrite."""

from kernel_agent.compiler.front.launch import accepted, read_launch
from kernel_agent.compiler.front.read import kernel_of

__all__ = ["accepted", "kernel_of", "read_launch"]
