"""What helper processes measure: sizes of models, rates of memory; and the memory that helpers use meanwhile."""
