"""Model families by the name that ``model.architecture`` gives them."""

from collections.abc import Callable, Mapping

from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.models.model import Model

ARCHITECTURES: Mapping[str, Callable[[ModelConfig], Model]] = {"decoder": Decoder}
