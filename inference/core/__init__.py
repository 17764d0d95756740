"""Pure decisions of the inference service; time and randomness are arguments and nothing here touches the world."""
