"""kernel-agent: a Triton forward goes in, a proven Triton backward comes out."""

from kernel_agent.autodiff import autodiff

__version__ = "0.1.0"
__all__ = ["__version__", "autodiff"]
