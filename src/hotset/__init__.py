"""hotset runs Mixture-of-Experts language models larger than the GPU's memory."""

__version__ = "0.1.0"
