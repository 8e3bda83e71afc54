"""The whole configuration of a run: one section per part of jaxtron."""

from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.config.fields import key, section
from jaxtron.config.run import EvalConfig, LossConfig, TrainConfig
from jaxtron.data.config import DataConfig
from jaxtron.launch.config import RuntimeConfig
from jaxtron.models.config import ModelConfig
from jaxtron.observe.config import ObserveConfig
from jaxtron.optim.config import OptimizerConfig
from jaxtron.parallel.config import ParallelConfig
from jaxtron.precision.config import PrecisionConfig


@section
class Config:
    """Everything a run is made of; each section belongs to the part that reads it."""

    model: ModelConfig = key(help="Shape and architecture of the model.")
    parallel: ParallelConfig = key(help="Device mesh and how work is split over it.")
    data: DataConfig = key(help="Where tokens come from.")
    train: TrainConfig = key(help="Length of the run and size of the batch.")
    optimizer: OptimizerConfig = key(help="Optimizer and learning rate.")
    precision: PrecisionConfig = key(help="Number formats.")
    loss: LossConfig = key(help="The training objective.")
    checkpoint: CheckpointConfig = key(help="Saving and resuming.")
    eval: EvalConfig = key(help="Evaluation during training.")
    observe: ObserveConfig = key(help="Metrics and what a run leaves behind.")
    runtime: RuntimeConfig = key(help="Devices, processes and compiler flags.")
