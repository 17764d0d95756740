"""Where a model goes, what it needs there and which models leave for it."""
