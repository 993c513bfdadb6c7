"""The loop: phases, prompts, ledger, snapshots, budget. `kernel_agent.agent.runs` starts and resumes runs."""
