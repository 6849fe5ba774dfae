"""Small models of well-known shapes: a layer or two of each, since layers repeat.

A maker takes a source of chance and a precision and gives a model, its inputs and a loss. Sizes are
those of published models, at batches that people train with. `HELD_OUT` names whole models that no
fit may see.
"""

from foretell_lab.fused.data import HELD_OUT
from foretell_lab.fused.models.far_attend import FAR_ATTEND
from foretell_lab.fused.models.far_image import FAR_IMAGE
from foretell_lab.fused.models.far_mixed import FAR_MIXED
from foretell_lab.fused.models.far_other import FAR_OTHER
from foretell_lab.fused.models.far_places import FAR_PLACES
from foretell_lab.fused.models.far_text import FAR_TEXT
from foretell_lab.fused.models.far_update import FAR_UPDATE
from foretell_lab.fused.models.image import IMAGE
from foretell_lab.fused.models.more_image import MORE_IMAGE
from foretell_lab.fused.models.more_text import MORE_TEXT
from foretell_lab.fused.models.near_image import NEAR_IMAGE
from foretell_lab.fused.models.near_layers import NEAR_LAYERS
from foretell_lab.fused.models.near_mixed import NEAR_MIXED
from foretell_lab.fused.models.near_other import NEAR_OTHER
from foretell_lab.fused.models.near_series import NEAR_SERIES
from foretell_lab.fused.models.near_text import NEAR_TEXT
from foretell_lab.fused.models.other import OTHER
from foretell_lab.fused.models.text import TEXT
from foretell_lab.fused.models.wide_image import WIDE_IMAGE
from foretell_lab.fused.models.wide_mixed import WIDE_MIXED

MODELS = {
    **IMAGE, **TEXT, **OTHER, **MORE_IMAGE, **MORE_TEXT, **WIDE_IMAGE, **WIDE_MIXED,
    **FAR_IMAGE, **FAR_MIXED, **FAR_PLACES, **FAR_TEXT, **FAR_ATTEND, **FAR_OTHER, **FAR_UPDATE,
    **NEAR_IMAGE, **NEAR_MIXED, **NEAR_TEXT, **NEAR_LAYERS, **NEAR_SERIES, **NEAR_OTHER,
}  # fmt: skip

__all__ = ["HELD_OUT", "MODELS"]
