"""The memory of a step, and how changes to the step alter it."""
