"""Small models of well-known shapes: a layer or two of each, since layers repeat.

A maker takes a source of chance and a precision and gives a model, its inputs and a loss. Sizes are
those of published models, at batches that people train with. `HELD_OUT` names whole models that no
fit may see.
"""

from foretell.cost.fused_data import HELD_OUT
from foretell.pytorch.fused.models.image import IMAGE
from foretell.pytorch.fused.models.more_image import MORE_IMAGE
from foretell.pytorch.fused.models.more_text import MORE_TEXT
from foretell.pytorch.fused.models.other import OTHER
from foretell.pytorch.fused.models.text import TEXT
from foretell.pytorch.fused.models.wide_image import WIDE_IMAGE
from foretell.pytorch.fused.models.wide_mixed import WIDE_MIXED

MODELS = {**IMAGE, **TEXT, **OTHER, **MORE_IMAGE, **MORE_TEXT, **WIDE_IMAGE, **WIDE_MIXED}

__all__ = ["HELD_OUT", "MODELS"]
