"""What a simulated device decides: requests, memory, commands; pure."""
