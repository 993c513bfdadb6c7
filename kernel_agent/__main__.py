"""`python -m kernel_agent` is the same as `kernel-agent`."""

from kernel_agent.cli.main import main

if __name__ == "__main__":
    main()
