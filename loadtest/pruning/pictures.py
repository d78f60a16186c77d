"""Labelled pictures of a generator: one of five shapes, filled with one of four textures, on a textured ground with noise.

The class is shape and texture. Place, size, angle, colours, brightness, ground, noise and a second, smaller shape are random,
so that a linear model of the pixels learns little.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SHAPES = ("disk", "square", "triangle", "ring", "cross")
TEXTURES = ("stripes", "checks", "dots", "plain")
CLASSES = len(SHAPES) * len(TEXTURES)
SIDE = 112
_CHUNK = 128
_NOISE = 0.15


def make_pictures(count: int, seed: int, side: int = SIDE) -> tuple[Array, Array]:
    """Return pictures FP32 [count, 3, side, side] of mean 0 and their classes INT64 [count].

    Args:
        count: number of pictures.
        seed: seed of the generator; equal seeds give equal pictures.
        side: height and width in pixels.
    """
    pictures = np.empty((count, 3, side, side), np.float32)
    labels = np.random.default_rng([seed, 0]).integers(0, CLASSES, count)
    with ThreadPoolExecutor() as pool:
        starts = range(0, count, _CHUNK)
        chunks = pool.map(lambda start: _chunk(labels[start : start + _CHUNK], [seed, 1, start], side), starts)
        for start, chunk in zip(starts, chunks, strict=True):
            pictures[start : start + _CHUNK] = chunk
    return pictures, labels.astype(np.int64)


def _chunk(labels: Array, seed: list[int], side: int) -> Array:
    random = np.random.default_rng(seed)
    count = len(labels)
    axis = np.linspace(-1, 1, side, dtype=np.float32)
    ground = _texture(random.integers(0, len(TEXTURES), count), axis, random)
    picture = _coloured(0.5 * ground, random)
    for size, classes in (((0.1, 0.2), random.integers(0, CLASSES, count)), ((0.4, 0.65), labels)):
        mask = _shape(classes // len(TEXTURES), axis, random, size)[:, None]
        fill = _coloured(_texture(classes % len(TEXTURES), axis, random), random)
        picture = np.where(mask, fill, picture)
    light = random.uniform(0.5, 1.3, (count, 1, 1, 1)).astype(np.float32)
    noise = random.standard_normal(picture.shape, np.float32) * random.uniform(0, _NOISE, (count, 1, 1, 1)).astype(
        np.float32
    )
    return np.asarray((picture - 0.5) * light + noise, np.float32)


def _plane(axis: Array, random: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Return rotated coordinates [count, side, side]."""
    angle = random.uniform(0, 2 * np.pi, (count, 1, 1)).astype(np.float32)
    x, y = axis[None, None, :], axis[None, :, None]
    return x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)


def _texture(kinds: Array, axis: Array, random: np.random.Generator) -> Array:
    """Return brightness 0..1, [count, side, side]."""
    x, y = _plane(axis, random, len(kinds))
    frequency = random.uniform(18, 34, (len(kinds), 1, 1)).astype(np.float32)
    phase = random.uniform(0, 2 * np.pi, (2, len(kinds), 1, 1)).astype(np.float32)
    a, b = np.sin(frequency * x + phase[0]), np.sin(frequency * y + phase[1])
    kinds = kinds[:, None, None]
    textures = [(a > 0), (a * b > 0), (a + b > 1.0), np.zeros(a.shape, bool)]
    return np.asarray(np.select([kinds == number for number in range(len(TEXTURES))], textures), np.float32)


def _shape(kinds: Array, axis: Array, random: np.random.Generator, sizes: tuple[float, float]) -> Array:
    """Return the mask of a shape, [count, side, side]."""
    count = len(kinds)
    size = random.uniform(*sizes, (count, 1, 1)).astype(np.float32)
    centre = random.uniform(-0.5, 0.5, (2, count, 1, 1)).astype(np.float32)
    angle = random.uniform(0, 2 * np.pi, (count, 1, 1)).astype(np.float32)
    x, y = axis[None, None, :] - centre[0], axis[None, :, None] - centre[1]
    x, y = (x * np.cos(angle) - y * np.sin(angle)) / size, (x * np.sin(angle) + y * np.cos(angle)) / size
    radius = np.hypot(x, y)
    half = np.maximum(np.abs(x), np.abs(y))
    triangle = (y > -0.6) & (np.abs(x) * 1.7 + y < 1.0)
    cross = (np.minimum(np.abs(x), np.abs(y)) < 0.3) & (half < 0.95)
    kinds = kinds[:, None, None]
    masks = [radius < 0.95, half < 0.8, triangle, (radius < 0.95) & (radius > 0.5), cross]
    return np.asarray(np.select([kinds == number for number in range(len(SHAPES))], masks))


def _coloured(brightness: Array, random: np.random.Generator) -> Array:
    """Return [count, 3, side, side]: brightness between two random colours."""
    dark, light = random.uniform(0, 1, (2, len(brightness), 3, 1, 1)).astype(np.float32)
    return dark + (light - dark) * brightness[:, None]
