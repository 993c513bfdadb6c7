"""The front: from the IR of a launch to a kernel that passes rewrite."""

from kernel_agent.compiler.front.launch import read_launch
from kernel_agent.compiler.front.read import kernel_of

__all__ = ["kernel_of", "read_launch"]
