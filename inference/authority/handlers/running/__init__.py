"""Workers of models: their start, their end, their memory, and the warm pool."""
