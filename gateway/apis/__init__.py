"""The public APIs the gateway speaks; each is told and asked in one inner dialect (OpenAI's); the seam is `base`."""
