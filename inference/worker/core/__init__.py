"""Pure decisions of the worker: which tokens go into the next step, where text may be cut."""
