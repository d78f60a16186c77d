"""Samples for `digits`: the pictures it was trained on to calibrate with, those held out from training to measure on."""

from __future__ import annotations

import io

import numpy as np

from engines.demo.digits import HELD_OUT_SHARE, SEED, split_stratified
from engines.errors import BuildError


def build() -> dict[str, bytes]:
    """Two .npz files by name, each with "image" FP32 [N, 1, 8, 8] and "labels" INT64 [N].

    Raises:
        BuildError: if scikit-learn, which has the pictures, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BuildError(
            "the package scikit-learn, which has the digits, is not installed: install headrace[demo]"
        ) from None
    data = load_digits()
    images, labels = data.images.astype(np.float32)[:, None], data.target.astype(np.int64)
    # The split is the first thing that the recipe draws.
    train, held_out = split_stratified(labels, HELD_OUT_SHARE, np.random.default_rng(SEED))
    files = {}
    for name, chosen in (("calibration.npz", train), ("accuracy.npz", held_out)):
        stored = io.BytesIO()
        np.savez_compressed(stored, image=images[chosen], labels=labels[chosen])
        files[name] = stored.getvalue()
    return files
