"""Planners: they look for the plan or the schedule with the shortest step."""
