"""How full devices are, what follows from it, and what an operator is advised to do."""
