"""CPU threads of a worker: how many compute a step."""
