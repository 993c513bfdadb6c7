"""Tile functions: `@triton.jit` functions from tiles to tiles, without loads and stores, and their adjoints."""
