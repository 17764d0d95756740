"""The authority over device memory: one state machine, the pure policies that it calls, and the shell around it."""
