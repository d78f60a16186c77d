"""Built-in step `decode_image`: image files to pixels, in processes of their own.

Image files are untrusted: size and format are checked in the header before a pixel is decoded, and decoding never runs in the
server's process. JPEG is decoded by simplejpeg (libjpeg-turbo) where it is installed and takes half of Pillow's time: for pixels,
and for tensors of images from a megapixel on. Everything else is decoded by Pillow. See
docs/decisions/0018-images-on-the-server.md.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from headrace.core.errors import BadRequest, TooLarge
from headrace.core.tensor import Array
from headrace.inference.pipelines import image as pictures
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.inference.pipelines.steps.options import DecodeOptions

Pixels = npt.NDArray[np.uint8]
Allocate = Callable[[tuple[int, ...], npt.DTypeLike], Array]
"""Returns an uninitialized array of a shape and a dtype."""

# JPEG includes MPO, which phones write: a JPEG file followed by further images.
FORMATS = ("JPEG", "PNG", "WEBP")
# libjpeg-turbo decodes at these shares of the size, at a fraction of the cost.
_SCALES = (8, 4, 2)
# Below, Pillow decodes, cuts and resizes as fast: simplejpeg saves 30 % of the decode, and a copy or a fourth byte a pixel costs
# as much. At 12 megapixels simplejpeg takes half of the time.
_IN_PLACE_PIXELS = 1_000_000
# EXIF orientations that swap width and height.
_SIDEWAYS = (5, 6, 7, 8)


def _jpeg_decoder() -> Callable[..., Any] | None:
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    return decode_jpeg  # type: ignore[no-any-return]


class ImageDecoder:
    """Decodes image files, and resizes them if a recipe is given.

    Args:
        options: options of the step.
        recipe: of the `resize` step that is joined with it; None returns the pixels.
        turbo: decode JPEG with simplejpeg if it is installed; False for Pillow alone.
    """

    def __init__(
        self,
        options: DecodeOptions,
        recipe: ImageRecipe | None = None,
        turbo: bool = True,
    ) -> None:
        self._options, self._recipe = options, recipe
        self._decode_jpeg = _jpeg_decoder() if turbo else None
        self._normalize = None if recipe is None else pictures.PixelSteps(recipe)

    def decode(self, data: bytes, allocate: Allocate = np.empty) -> Array:
        """Return the pixels of an image as a viewer shows it, or the tensor of the recipe.

        Args:
            data: the whole file.
            allocate: returns memory for the tensor of the recipe.

        Returns:
            uint8 (height, width, channels); with a recipe float32 of the recipe's shape without its leading 1.

        Raises:
            TooLarge: the file has too many bytes, or its header declares too many pixels.
            BadRequest: the file is empty, of another format, truncated or damaged.
        """
        options, recipe, normalize = self._options, self._recipe, self._normalize
        if len(data) > options.max_bytes:
            raise TooLarge(
                f"the image has {len(data)} bytes, at most {options.max_bytes} are accepted: send a smaller one"
            )
        header = read_header(data, options.max_pixels)
        is_jpeg = self._decode_jpeg is not None and header.format in ("JPEG", "MPO")
        if recipe is None or normalize is None:
            if is_jpeg and header.orientation == 1 and (header.mode, options.color) == ("RGB", "rgb"):
                return self._decode_turbo(data, "RGB")
            image = _in_color(pictures.decode(data, options.max_pixels), options.color)
            return np.array(image, dtype=np.uint8).reshape(image.height, image.width, options.channels)
        if is_jpeg and header.mode == "RGB" and header.width * header.height >= _IN_PLACE_PIXELS:
            image = pictures.upright(self._decode_in_place(data, header, recipe), header.orientation)
        else:
            image = pictures.decode(data, options.max_pixels)
        if recipe.color == "gray":  # before the resize, as in `pictures.prepare`
            image = _in_color(image, recipe.color)
        # Normalizes with half of the passes over memory that `pictures.prepare` takes, to the same numbers.
        cut = _in_color(pictures.cut_out(image, recipe), recipe.color)
        pixels = np.asarray(cut).reshape(1, *recipe.crop, recipe.channels)
        tensor: Array = normalize.apply(pixels, allocate(recipe.shape, np.float32))[0]
        return tensor

    def _decode_in_place(self, data: bytes, header: ImageHeader, recipe: ImageRecipe) -> Image.Image:
        """Return an image of mode "RGBX", whose memory Pillow reads in place: it copies pixels of three bytes."""
        factor = scale_factor(header, recipe) if self._options.scaled else 1
        least = {"min_height": header.height // factor, "min_width": header.width // factor} if factor > 1 else {}
        pixels = self._decode_turbo(data, "RGBX", **least)
        height, width, _ = pixels.shape
        return Image.frombuffer("RGBX", (width, height), pixels, "raw", "RGBX", 0, 1)

    def _decode_turbo(self, data: bytes, space: str, **least: int) -> Pixels:
        assert self._decode_jpeg is not None
        try:
            pixels: Pixels = self._decode_jpeg(data, colorspace=space, strict=True, **least)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise BadRequest(
                f"the image is truncated or damaged ({pictures.one_line(error)}): open it in a viewer and save it anew"
            ) from error
        return pixels


def _in_color(image: Image.Image, color: str) -> Image.Image:
    mode = "RGB" if color == "rgb" else "L"
    # Pillow makes grey of three channels only.
    return pictures.in_mode(pictures.in_mode(image, "RGB") if image.mode == "RGBX" else image, mode)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Facts in the header of an image file.

    Attributes:
        format: "JPEG", "MPO", "PNG" or "WEBP".
        mode: Pillow's mode, e.g. "RGB" or "CMYK".
        width, height: as stored, before the orientation is applied.
        orientation: EXIF orientation of a JPEG file; 1 as stored, and for other formats.
    """

    format: str
    mode: str
    width: int
    height: int
    orientation: int


def read_header(data: bytes, max_pixels: int) -> ImageHeader:
    """Read the header of an image file without decoding a pixel.

    Raises:
        TooLarge: it declares more than `max_pixels`.
        BadRequest: the file is empty, of another format, or its header is damaged.
    """
    if not data:
        raise BadRequest("the image is empty (0 bytes): send the file's bytes")
    pictures.check_webp_pixels("image", data, max_pixels)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadRequest(
            f"this is no image that can be read (it starts with {data[:8].hex(' ')}): send {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise pictures.bomb_error("image", error, max_pixels) from None
    except Exception as error:  # any error that a parser raises for untrusted bytes is the client's error
        raise BadRequest(f"the image's header is damaged ({pictures.one_line(error)})") from error
    pictures.check_pixels("image", image.size, max_pixels)
    width, height = image.size
    # Pillow decodes a whole PNG to look for its EXIF data. Only JPEG is decoded from the header alone.
    stored = pictures.orientation(image) if image.format in ("JPEG", "MPO") else 1
    return ImageHeader(image.format or "", image.mode, width, height, stored)


def scale_factor(header: ImageHeader, recipe: ImageRecipe) -> int:
    """Return the divisor 8, 4, 2 or 1 at which a decoded image still has twice the pixels that the recipe's window needs.

    Twice, because the antialiasing of the following resize then has enough samples.
    """
    width, height = header.width, header.height
    if header.orientation in _SIDEWAYS:
        width, height = height, width
    left, top, right, bottom = recipe.window(height, width)
    shrinks = min((right - left) / recipe.crop[1], (bottom - top) / recipe.crop[0])
    return next((scale for scale in _SCALES if math.floor(shrinks) >= 2 * scale), 1)
