"""From kernels to Triton source: names, expressions, statements as a person would write them."""

from kernel_agent.compiler.emit.comments import comments_above
from kernel_agent.compiler.emit.device_functions import Helper
from kernel_agent.compiler.emit.source import KernelSource, triton_source

__all__ = ["Helper", "KernelSource", "comments_above", "triton_source"]
