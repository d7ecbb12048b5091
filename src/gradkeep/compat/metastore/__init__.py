"""MetaStore's command line, models, trainers and experiments on gradkeep, under its names."""

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.compat.metastore._blocks import unwrap

if TYPE_CHECKING:
    from gradkeep.compat.metastore._models import Customized_Bert_Model
    from gradkeep.data._image_models import VGG16, ResNet50
else:  # the classes need torch; a type checker would take every name for one that may exist
    __getattr__ = lazy_names(
        __name__,
        {
            "Customized_Bert_Model": "gradkeep.compat.metastore._models",
            "ResNet50": "gradkeep.data._image_models",
            "VGG16": "gradkeep.data._image_models",
        },
    )

__all__ = ["VGG16", "Customized_Bert_Model", "ResNet50", "unwrap"]
