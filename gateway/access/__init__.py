"""Access to the gateway: keys, rate limits, admission, memory for bodies."""
