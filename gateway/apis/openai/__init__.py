"""OpenAI's chat, completions and embeddings API, which is also the gateway's internal format."""
