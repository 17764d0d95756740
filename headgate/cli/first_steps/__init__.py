"""Verbs for the first steps: add and download models, complete words in a shell."""
