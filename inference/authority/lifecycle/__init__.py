"""States of a model, its wait queue, its backoff and the Retry-After of its clients."""
