"""The GPUs that this process may use, as its framework numbers them."""

from zeus.device.gpu import GPU, EmptyGPUs, GPUs, get_gpus

__all__ = ["GPU", "EmptyGPUs", "GPUs", "get_gpus"]
