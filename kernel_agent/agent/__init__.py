"""The loop: phases, prompts, ledger, snapshots, budget."""
