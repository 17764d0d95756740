"""How the state is shown: `/v1/models`, `/memory`, `/events` and the metrics."""
