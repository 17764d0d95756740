"""What requests cost: records that survive a restart, prices, budgets, and keys that are created at run time."""
