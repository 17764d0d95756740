"""What the gateway, the inference service and the command line all need: units, files, keys, state, logs."""
