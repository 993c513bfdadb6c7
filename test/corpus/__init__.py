"""Kernels as training code writes them, each beside a torch reference: what the executor is measured against."""
