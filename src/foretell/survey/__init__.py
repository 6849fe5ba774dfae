"""All that can be known of a step and of what changes make of it: what report and studio show."""

from foretell.survey.inputs import Inputs, Loaded, load
from foretell.survey.survey import Survey, survey

__all__ = ["Inputs", "Loaded", "Survey", "load", "survey"]
