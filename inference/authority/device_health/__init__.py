"""States of a device and the evidence they follow from."""
