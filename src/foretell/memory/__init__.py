"""What a step holds in memory, and what changes would make of that."""
