"""The model process: one llama.cpp model, one engine thread, one small HTTP app on a Unix socket."""
