"""`headgate config import`: translates configurations of LiteLLM, llama-swap, llama-server and Ollama."""
