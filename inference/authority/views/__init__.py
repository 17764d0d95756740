"""Read models of the state: `/v1/models`, `/memory`, `/events` and the metrics."""
