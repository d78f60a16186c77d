"""Optimisation profiles: the ranges of shapes that a plan serves, checked before TensorRT sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engines.errors import BuildError
from engines.targets.base import ShapeRange

_CURE = "correct optimization.profiles"


def check_profiles(
    inputs: Mapping[str, tuple[tuple[int, ...], int]], profiles: Sequence[ShapeRange], memory_bytes: int
) -> None:
    """Hold profiles against a network's inputs.

    Args:
        inputs: by name the shape, -1 where free, and the bytes of an element.
        profiles: what is asked for.
        memory_bytes: all of the GPU's memory.

    Raises:
        BuildError: a profile is inconsistent, leaves an input out, or is larger than the GPU.
    """
    free = [name for name, (shape, _) in inputs.items() if -1 in shape]
    if free and not profiles:
        raise BuildError(f"the inputs {', '.join(free)} have free dimensions: write optimization.profiles")
    for number, profile in enumerate(profiles):
        where = f"profile {number + 1}" if len(profiles) > 1 else "the profile"
        unknown = sorted(set(profile.shapes) - set(inputs))
        if unknown:
            raise BuildError(f"{where} names {', '.join(unknown)}, the model's inputs are {', '.join(inputs)}: {_CURE}")
        missing = [name for name in free if name not in profile.shapes]
        if missing:
            raise BuildError(f"{where} has no shapes for the inputs {', '.join(missing)}, which are free: {_CURE}")
        for name, shapes in profile.shapes.items():
            _check_shapes(f"{where}, input {name}", inputs[name][0], shapes)
        total = sum(
            math.prod(profile.shapes[name][2] if name in profile.shapes else shape) * size
            for name, (shape, size) in inputs.items()
        )
        if total > memory_bytes:
            raise BuildError(
                f"{where} is too large: its largest inputs alone take {_gib(total)}, the GPU has {_gib(memory_bytes)}: "
                "lower the largest shapes in optimization.profiles, or max_batch_size"
            )


def _check_shapes(where: str, shape: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    least, tuned, most = shapes
    if not len(least) == len(tuned) == len(most) == len(shape):
        raise BuildError(
            f"{where}: the model's shape {_text(shape)} has {len(shape)} dimensions, not those told: {_CURE}"
        )
    for own, a, b, c in zip(shape, least, tuned, most, strict=True):
        if not 0 < a <= b <= c:
            told = f"{_text(least)}, {_text(tuned)}, {_text(most)}"
            raise BuildError(f"{where}: {told} do not ascend from the smallest to the largest: {_CURE}")
        if own != -1 and (a != own or c != own):
            told = f"{_text(least)} to {_text(most)}"
            raise BuildError(f"{where}: {told} do not fit the model's shape {_text(shape)}: {_CURE}")


def add_profiles(builder: Any, config: Any, inputs: Mapping[str, Any], profiles: Sequence[ShapeRange]) -> None:
    """Hand checked profiles to TensorRT; `inputs` are those with free dimensions.

    Raises:
        BuildError: TensorRT finds an inconsistency of its own.
    """
    for number, profile in enumerate(profiles if inputs else ()):
        made = builder.create_optimization_profile()
        for name in inputs:
            set_shape(made, name, profile.shapes[name])
        if config.add_optimization_profile(made) < 0:
            raise BuildError(f"TensorRT does not take profile {number + 1}: {_CURE}")


def set_shape(profile: Any, name: str, shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    """One input's shapes in an IOptimizationProfile."""
    try:
        profile.set_shape(name, *shapes)
    except ValueError as error:
        raise BuildError(f"TensorRT does not take the shapes of input {name} ({error}): {_CURE}") from error


def choose_profile(
    ranges: Sequence[Mapping[str, tuple[tuple[int, ...], ...]]], shapes: Mapping[str, tuple[int, ...]]
) -> int | None:
    """Number of the profile that serves these shapes best: tuned for them, else the one with the least room.

    Args:
        ranges: by profile and input the smallest, tuned and largest shape.
        shapes: of the inputs.
    """
    fitting = []
    for number, profile in enumerate(ranges):
        if all(_within(shapes[name], least, most) for name, (least, _, most) in profile.items()):
            tuned = all(shapes[name] == tuple(opt) for name, (_, opt, _) in profile.items())
            room = sum(math.prod(most) for _, _, most in profile.values())
            fitting.append((not tuned, room, number))
    return min(fitting)[2] if fitting else None


def _within(shape: Sequence[int], least: Sequence[int], most: Sequence[int]) -> bool:
    return len(shape) == len(least) and all(a <= s <= c for a, s, c in zip(least, shape, most, strict=True))


def _text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
