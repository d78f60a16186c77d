"""The demo models by name: the recipe that builds each, and the files and samples that lie beside it.

Nothing heavy is imported here: a recipe is named by module and function, and loaded when it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Artefact:
    """One built model.

    Attributes:
        model: the graph with its weights.
        weights: where the weights come from: "seeded", "trained", "none" or "sha256:<hex>" of the file they were read from.
        accuracy: share of held-out samples answered right, 0..1, or None where nothing was measured.
        extra_files: files to lay beside the model, by name.
    """

    model: onnx.ModelProto
    weights: str
    accuracy: float | None = None
    extra_files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """One entry of the catalogue.

    Attributes:
        name: the model's name, and that of its folder.
        recipe: "module:function" within `headrace_engines.demo`; the function takes a `Report` and returns an `Artefact`.
        sources: the modules whose text makes the model what it is; a change in one of them rebuilds it.
        files: file in the model's folder -> the file of this package's `files/` folder that it is a copy of.
        fetched_recipe: the recipe for fetched weights, "" if there is none; it takes a `Report` and a `WeightsFile`.
        samples: what makes the data to calibrate with and to measure on, as `recipe`, "" if there is none; it takes nothing and
            returns files by name, with "/" for those in folders.
        sample_places: the files and folders of the model's folder that `samples` makes.
        equal_recipes: digests of earlier texts of `sources` that make the same model: it is not built again.
    """

    name: str
    recipe: str
    sources: tuple[str, ...]
    files: dict[str, str]
    fetched_recipe: str = ""
    samples: str = ""
    sample_places: tuple[str, ...] = ()
    equal_recipes: tuple[str, ...] = ()

    def recipe_digest(self) -> str:
        """SHA-256, in hex, over the text of `sources`."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(files("headrace_engines.demo").joinpath(f"{source}.py").read_bytes())
        return digest.hexdigest()

    def is_recipe(self, digest: object) -> bool:
        """Return whether a model with this digest in its stamp is the one that the recipe makes."""
        return digest == self.recipe_digest() or digest in self.equal_recipes

    def file_text(self, name: str) -> str:
        """The text of one of `files`."""
        return files("headrace_engines.demo").joinpath("files", self.files[name]).read_text(encoding="utf-8")


def load_recipe(recipe: str) -> Callable[..., Artefact]:
    """Import "module:function" of `headrace_engines.demo`."""
    return cast(Callable[..., Artefact], _load(recipe))


def make_samples(model: DemoModel) -> dict[str, bytes]:
    """The files of a model's samples, by name.

    Raises:
        BuildError: what they are made from is not installed.
    """
    return cast(Callable[[], dict[str, bytes]], _load(model.samples))()


def _load(recipe: str) -> object:
    module_name, function_name = recipe.split(":")
    module: Any = import_module(f"headrace_engines.demo.{module_name}")
    return getattr(module, function_name)


_PICTURES = ("calibration", "accuracy")


_SMALL_RECIPES = ("c191741c8401daaeec6e1515465711b350135d1dc9a77fdbdcc32026eab697c5",)


# The slow ones last, so that a first look at the repository already finds something.
CATALOGUE: dict[str, DemoModel] = {
    model.name: model
    for model in (
        DemoModel(
            "tiny",
            "small:build_tiny",
            ("small", "graph"),
            {"config.pbtxt": "tiny/config.pbtxt"},
            equal_recipes=_SMALL_RECIPES,
        ),
        DemoModel(
            "add_sub",
            "small:build_add_sub_int32",
            ("small", "graph"),
            {"config.pbtxt": "add_sub/config.pbtxt"},
            equal_recipes=_SMALL_RECIPES,
        ),
        DemoModel(
            "add_sub_fp32",
            "small:build_add_sub_fp32",
            ("small", "graph"),
            {"config.pbtxt": "add_sub_fp32/config.pbtxt"},
            equal_recipes=_SMALL_RECIPES,
        ),
        DemoModel(
            "efficientnet_lite0",
            "efficientnet:build",
            ("efficientnet", "graph", "torch_weights"),
            {"config.yaml": "efficientnet_lite0/config.yaml", "labels.txt": "imagenet_labels.txt"},
            samples="samples:build_photographs",
            sample_places=_PICTURES,
            equal_recipes=("2b84593b110e677c9a0e14e8a214fdaa7774f8507463233c23ed647d4fc8c3aa",),
        ),
        DemoModel(
            "resnet50",
            "resnet:build_seeded",
            ("resnet", "graph"),
            {"config.pbtxt": "resnet50/config.pbtxt", "labels.txt": "imagenet_labels.txt"},
            fetched_recipe="resnet:build_fetched",
            samples="samples:build_photographs",
            sample_places=_PICTURES,
            equal_recipes=("17d041e0c759c221cea05ce708332c032624e981471afdc8d9ad6c350060b9e1",),
        ),
        DemoModel(
            "digits",
            "digits:build",
            ("digits", "graph"),
            {"config.yaml": "digits/config.yaml", "labels.txt": "digits/labels.txt"},
            samples="samples:build_digits",
            sample_places=("calibration.npz", "accuracy.npz"),
            equal_recipes=("bde47ad5472016f3c8eaaa4607a6b97e55293710591ec8f8d9b4f0cf6b31cf2e",),
        ),
    )
}
