"""`headgate doctor`: checks of this machine, of the configuration and of the services, each with what to do."""
