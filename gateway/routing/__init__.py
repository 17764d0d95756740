"""One request along its chain: candidates, filter, budget, attempts, stream, resume."""
