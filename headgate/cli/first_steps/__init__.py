"""Verbs for the first steps: add and download models, check the machine, complete words in a shell."""
