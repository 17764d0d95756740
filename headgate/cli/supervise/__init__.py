"""The verb `up`: both services under one supervisor."""
