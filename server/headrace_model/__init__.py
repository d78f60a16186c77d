"""The program of Python models: runs in the process of a model instance, on Python 3.8 and later with NumPy.

Models in Headrace's own form import from here:

    from headrace_model import Tensor, model

    @model(max_batch_size=64)
    def add(a: Tensor["fp32", 4], b: Tensor["fp32", 4]) -> {"sum": Tensor["fp32", 4]}:
        return {"sum": a + b}
"""

from __future__ import annotations

from headrace_model.predict_form import TensorType as Tensor
from headrace_model.predict_form import model

__all__ = ["Tensor", "model"]
