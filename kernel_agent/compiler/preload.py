"""`PRELOAD`: what the server of a sandbox imports in which forwards are derived; in a child that took half a second."""

from __future__ import annotations

from kernel_agent.sandbox.supervisor import PRELOAD as STANDARD_PRELOAD

PRELOAD = ("kernel_agent.compiler.child", *STANDARD_PRELOAD)
