"""The public APIs of the gateway. Each translates to and from OpenAI's chat format; `public_api` is their interface."""
