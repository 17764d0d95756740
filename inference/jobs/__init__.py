"""What a helper process can do; each job runs in a child that may die, never in the authority."""
