"""The parts of shoal for JAX: averages, sums and broadcasts of its arrays, also under jit."""

from shoal.frontend.jax import all_reduce, average, broadcast

__all__ = ["all_reduce", "average", "broadcast"]
