"""The gateway service: OpenAI dialect in, one chain of tiers, honest answers out."""
