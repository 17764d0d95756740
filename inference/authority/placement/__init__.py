"""Where a model is placed, what it needs there and which models are evicted for it."""
