"""Memory and threads of a mount: budgets, pools, the block cache in memory, private paths."""
