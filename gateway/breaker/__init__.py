"""Circuit breakers: state, permits, probes, storage."""
