"""Names that scripts for earlier versions of ml-energy/zeus import from here."""

from zeus.run.exceptions import ZeusCostThresholdExceededError
from zeus.utils.metric import zeus_cost

__all__ = ["ZeusCostThresholdExceededError", "zeus_cost"]
