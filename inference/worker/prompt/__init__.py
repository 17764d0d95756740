"""Prompts: templates, messages, images."""
