"""Stand-ins that tests and benchmarks start: real processes, fake providers, simulated devices."""
