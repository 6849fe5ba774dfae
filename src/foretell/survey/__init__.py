"""All that can be told of a step and of what changes make of it: what report and studio show."""

from foretell.survey.asked import Asked, Loaded, load
from foretell.survey.survey import Survey, survey

__all__ = ["Asked", "Loaded", "Survey", "load", "survey"]
