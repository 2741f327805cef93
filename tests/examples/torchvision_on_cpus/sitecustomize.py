"""Lets torchvision be imported beside a torch without CUDA, whose libraries its own needs.

It registers what these two operators return, so something must have declared them. Its networks,
data sets and transforms are plain Python and do not use them.
"""

import torch

if torch.version.cuda is None:
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
