"""`zeusd-kubernetes`: pods ask by annotation for a power limit of their GPUs."""
