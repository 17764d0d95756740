"""Providers with OpenAI's API."""
