"""`zeusd-kubernetes`: power limits for pods that request one in an annotation."""
