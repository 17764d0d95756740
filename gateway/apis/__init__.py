"""The public APIs of the gateway. Each translates to and from OpenAI's chat format; the seam is `public_api`."""
