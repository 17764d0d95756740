"""The dashboard at `/ui`: sign-in, one live stream of the state, and actions of operators."""
