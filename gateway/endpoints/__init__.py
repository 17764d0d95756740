"""One module per group of paths; they read requests and write responses, and decide nothing else."""
