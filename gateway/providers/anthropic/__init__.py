"""Anthropic as a provider."""
