"""The gateway service: routes requests of OpenAI's and Anthropic's APIs along chains of tiers."""
