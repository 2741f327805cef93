"""Runs a script that uses torchvision beside a torch without CUDA, whose libraries its own needs.

    python torchvision_on_cpus.py SCRIPT.py ...

torchvision registers what these two operators return, so something must have declared them. Its
networks, data sets and transforms are plain Python and do not use them.
"""

import os
import runpy
import sys

import torch

if __name__ == "__main__":
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
