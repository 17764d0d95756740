"""The compute devices of the machine: inventory and readings."""
