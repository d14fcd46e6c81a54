"""verl's interactions: a user's turns by a class, named in a YAML file and chosen by the row."""

from hybridflow.interactions.base import BaseInteraction
from hybridflow.interactions.environment import InteractionEnvironment, load_interactions

__all__ = ["BaseInteraction", "InteractionEnvironment", "load_interactions"]
