"""The gateway service: OpenAI's and Anthropic's APIs in, one chain of tiers, honest answers out."""
