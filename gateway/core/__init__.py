"""Pure decisions of the gateway; time and randomness are arguments and nothing here touches the world."""
