"""CPU threads of a worker: how many compute, where they run, how they wait."""
