"""Kernels as small structured programs that passes rewrite: tiles broadcast by themselves, pointers are offsets."""
