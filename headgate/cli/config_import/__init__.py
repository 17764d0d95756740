"""`headgate config import`: the configuration of LiteLLM, llama-swap, llama-server and Ollama in Headgate's form."""
