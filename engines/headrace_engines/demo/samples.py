"""Samples of the demo models: pictures for calibration, and others for accuracy.

Models of ImageNet get variations of two photographs: cropped, mirrored and with other brightness, contrast and colour.

The photographs are part of scikit-learn: "china.jpg" by danielbuechele and "flower.jpg" by vultilion (CC BY 2.0). Two motifs are
few, but crop, size and light change the activations of a network too, and no package has a larger set.
"""

from __future__ import annotations

import io
from importlib.resources import files

import numpy as np
from PIL import Image, ImageEnhance

from headrace_engines.errors import BuildError

PHOTOGRAPHS = ("china", "flower")
# Number of pictures of each photograph.
CALIBRATION_PICTURES = 32
ACCURACY_PICTURES = 24
# Shorter side of a picture after the resize of models with 224 x 224 pixels.
SIDE = 256
SEED = 224
_QUALITY = 88


def build_photographs() -> dict[str, bytes]:
    """Return JPEG files by path: 64 in `calibration/`, 48 others in `accuracy/`, the unchanged photographs among them.

    Raises:
        BuildError: scikit-learn, which has the photographs, is not installed or no longer has them.
    """
    files_by_name = {}
    for index, name in enumerate(PHOTOGRAPHS):
        photograph = _read(f"{name}.jpg")
        for number in range(CALIBRATION_PICTURES):
            varied = _varied(photograph, np.random.default_rng([SEED, 0, index, number]))
            files_by_name[f"calibration/{name}_{number:02}.jpg"] = _jpeg(varied)
        files_by_name[f"accuracy/{name}_00.jpg"] = _jpeg(_resized(photograph))
        for number in range(1, ACCURACY_PICTURES):
            varied = _varied(photograph, np.random.default_rng([SEED, 1, index, number]))
            files_by_name[f"accuracy/{name}_{number:02}.jpg"] = _jpeg(varied)
    return files_by_name


def _read(name: str) -> Image.Image:
    try:
        content = files("sklearn.datasets.images").joinpath(name).read_bytes()
    except (ImportError, OSError):
        raise BuildError(
            "the package scikit-learn, which has the photographs, is not installed: "
            "pip install '.[demo]' in a checkout of Headrace"
        ) from None
    return Image.open(io.BytesIO(content)).convert("RGB")


def _varied(photograph: Image.Image, random: np.random.Generator) -> Image.Image:
    """Return a crop of at least half of each side, mirrored or not, slightly rotated, with other brightness and contrast."""
    width, height = photograph.size
    share = random.uniform(0.5, 1.0)
    cut_width, cut_height = round(width * share), round(height * share)
    left, top = random.integers(0, width - cut_width + 1), random.integers(0, height - cut_height + 1)
    picture = photograph.rotate(random.uniform(-8, 8), Image.Resampling.BICUBIC, fillcolor=(127, 127, 127))
    picture = _resized(picture.crop((int(left), int(top), int(left) + cut_width, int(top) + cut_height)))
    if random.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        picture = enhance(picture).enhance(random.uniform(0.7, 1.3))
    return picture


def _resized(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    scale = SIDE / min(width, height)
    return picture.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)


def _jpeg(picture: Image.Image) -> bytes:
    stored = io.BytesIO()
    picture.save(stored, "JPEG", quality=_QUALITY)
    return stored.getvalue()


def build_digits() -> dict[str, bytes]:
    """Return two .npz files by path, each with "image" FP32 [N, 1, 8, 8] and "labels" INT64 [N].

    Raises:
        BuildError: scikit-learn, which has the pictures, is not installed.
    """
    # Imported here: the recipe, which has the split, imports ONNX Runtime.
    from headrace_engines.demo import digits

    images, labels = digits.load()
    # The split is the first use of the random generator in the recipe.
    train, held_out = digits.split_stratified(labels, digits.HELD_OUT_SHARE, np.random.default_rng(digits.SEED))
    archives = {}
    for name, chosen in (("calibration.npz", train), ("accuracy.npz", held_out)):
        stored = io.BytesIO()
        np.savez_compressed(stored, image=images[chosen], labels=labels[chosen])
        archives[name] = stored.getvalue()
    return archives
