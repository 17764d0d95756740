"""Suspends processes with their device memory for the warm pool, and resumes them."""
