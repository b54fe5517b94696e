"""The parts of shoal for TensorFlow and Keras, under the names that users of Horovod know."""

from shoal.frontend.tensorflow import (
    DistributedGradientTape,
    DistributedOptimizer,
    all_reduce,
    broadcast_variables,
)

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "all_reduce", "broadcast_variables"]
