"""The GPUs that this process may use, as its framework numbers them."""

from zeus.compat import old_names
from zeus.device.gpu import GPU, EmptyGPUs, GPUs, get_gpus

__all__ = ["GPU", "EmptyGPUs", "GPUs", "get_gpus"]

__getattr__ = old_names(__name__)
