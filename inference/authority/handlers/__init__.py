"""Event handlers, one module per subject: pure functions that change a draft of the state."""
