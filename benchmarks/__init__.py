"""Measures Headgate beside its peers on one machine in one run; nothing of the product is tuned to it or needs it."""
