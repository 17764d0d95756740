"""Simulated GPUs for llama.cpp: ggml RPC servers with limited memory and faults on demand."""
