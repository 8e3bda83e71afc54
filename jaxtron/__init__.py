"""jaxtron: trains large transformer language models on NVIDIA GPUs with JAX."""

__version__ = "0.1.0"
