"""Lets SGLang import beside a CPU build of torch.

torchvision's wheel is built for CUDA: its operators do not load here, and declaring their meta kernels fails. So the two
operators it declares meta kernels for are defined before torchvision is imported.
"""

import importlib.abc
import sys


class _OperatorsBeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; only sees torchvision being looked for, once."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self.library is None:
            sys.meta_path.remove(self)
            import torch

            type(self).library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _OperatorsBeforeTorchvision())
