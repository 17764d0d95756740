"""Code that the gateway, the inference service and the command line share: units, files, keys, state, logs."""
