"""One answer from token to token: text, reasoning, tool calls, stop strings."""
