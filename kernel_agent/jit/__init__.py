"""Stubs that train: a backward is derived, proven and kept when a configuration is first called (`docs/library.md`)."""
