"""Workers of models: leases, start, end, memory, lost devices, and the warm pool."""
