"""The engine: schedule, decode, sample, emit."""
