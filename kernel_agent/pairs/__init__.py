"""The pair format: read, validate, assemble and write forward/backward pairs without executing them."""
