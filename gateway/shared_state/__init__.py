"""State that several gateways share in Redis or Valkey. Without `state:` in gateway.yaml nothing here is used."""
