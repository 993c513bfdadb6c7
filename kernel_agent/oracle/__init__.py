"""The truth for one forward: exact gradients out of its own kernels."""
