"""Adapters that let the chain talk to any provider in one dialect (OpenAI's); the seam is `base`."""
