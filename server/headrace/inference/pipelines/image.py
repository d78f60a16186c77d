"""Image files to input tensors.

Image files are untrusted. The header is checked for size before a pixel is decoded. Only formats that Pillow decodes
itself are opened (no EPS, which would start an interpreter). Only the part that the tensor needs is resized, so an
image of 1 x 60,000 pixels needs no more memory than any other.
"""

from __future__ import annotations

import io
import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from headrace.core.errors import BadRequest, TooLarge
from headrace.core.tensor import Array
from headrace.inference.pipelines.recipe import ImageRecipe

__all__ = ["FORMATS", "MAX_PIXELS", "ImageRecipe", "decode", "prepare", "to_pixels"]

# 50 megapixels: the size of present cameras, 150 MB as RGB. Below Pillow's own warning at 89 million.
MAX_PIXELS = 50_000_000
# JPEG includes MPO, which phones and stereo cameras write: a JPEG followed by further images.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

_EXIF_ORIENTATION = 0x0112
# RIFF header (12 bytes), header of the first chunk (8), and its first 10 bytes, which hold the size.
_WEBP_HEADER_BYTES = 30
_VP8L_SIGNATURE = 0x2F
_VP8_START = b"\x9d\x01\x2a"
# EXIF 2.32, tag Orientation: transformation that brings the stored rows and columns upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_SAVE_ANEW = "open it in a viewer and save it as JPEG or PNG"


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image file as a viewer shows it: upright, transparency over white, first frame of an animation.

    Colour profiles are not applied: models are trained on pixels as they are stored.

    Args:
        data: the whole file.
        max_pixels: largest width times height; checked before the pixels are decoded.

    Returns:
        An image of mode "L" (grey) or "RGB", 8 bits for each channel.

    Raises:
        TooLarge: the header declares more than `max_pixels`.
        BadRequest: the file is empty, no image, truncated or damaged, or has no 8-bit meaning (float pixels).
    """
    if not data:
        raise BadRequest("the picture is empty (0 bytes): send the file's bytes")
    check_webp_pixels("picture", data, max_pixels)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        start = data[:8].hex(" ")
        raise BadRequest(
            f"this is no picture that can be read (it starts with {start}): send {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise bomb_error("picture", error, max_pixels) from None
    except Exception as error:  # any error that a parser raises for untrusted bytes is the client's error
        raise BadRequest(f"the picture's header is damaged ({one_line(error)}): {_SAVE_ANEW}") from error
    check_pixels("picture", image.size, max_pixels)
    try:
        image.load()
        return upright(_eight_bit(image), orientation(image))
    except BadRequest:
        raise
    except Exception as error:  # as above
        raise BadRequest(f"the picture is truncated or damaged ({one_line(error)}): {_SAVE_ANEW}") from error


def check_pixels(subject: str, size: tuple[int, int], max_pixels: int) -> None:
    """Compare the size that an image's header declares with the limit.

    Args:
        subject: word for the image in the message.
        size: width and height.
        max_pixels: largest width times height.

    Raises:
        TooLarge: the image has more pixels.
    """
    width, height = size
    if width * height > max_pixels:
        raise TooLarge(
            f"the {subject} has {width} x {height} = {width * height} pixels, at most {max_pixels} are accepted: "
            "send a smaller one"
        )


def bomb_error(subject: str, error: Exception, max_pixels: int) -> TooLarge:
    """Return the error for an image that Pillow refuses by a limit of its own, before its width and height can be read.

    Args:
        subject: word for the image in the message.
        error: of Pillow; its text has the number of pixels.
        max_pixels: largest width times height.
    """
    declared = re.search(r"\((\d+) pixels\)", str(error))
    pixels = f"{declared[1]} pixels" if declared else "too many pixels"
    allowed = min(max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or max_pixels))
    return TooLarge(f"the {subject} has {pixels}, at most {allowed} are accepted: send a smaller one")


def check_webp_pixels(subject: str, data: bytes, max_pixels: int) -> None:
    """Compare the size of a WebP file with the limit; files of other formats and damaged headers pass.

    Pillow allocates two canvases of 4 bytes a pixel when it opens a WebP file. From 134 megapixels on that exceeds the memory of
    a decoder process, and Pillow's error does not differ from that of a damaged file.

    Args:
        subject: word for the image in the message.
        data: the whole file.
        max_pixels: largest width times height.

    Raises:
        TooLarge: the header declares more pixels.
    """
    size = _webp_size(data)
    if size is not None:
        check_pixels(subject, size, max_pixels)


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file by its first chunk (RFC 9649, section 2); None for other files."""
    if len(data) < _WEBP_HEADER_BYTES or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8X":  # 24 bits each, less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L" and data[20] == _VP8L_SIGNATURE:  # 14 bits each, less one
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and data[23:26] == _VP8_START:  # 14 bits each, below 2 bits of scale
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def prepare(image: Image.Image, recipe: ImageRecipe) -> npt.NDArray[np.float32]:
    """Return the tensor of one image.

    The result equals resizing the whole image and cropping its centre; only the remaining pixels are computed.

    Args:
        image: as `decode` returns it.
        recipe: preprocessing steps.

    Returns:
        float32 of shape `recipe.shape`, [1, channels, height, width] or [1, height, width, channels], contiguous.
    """
    crop_height, crop_width = recipe.crop
    cut = cut_out(in_mode(image, "RGB" if recipe.color == "rgb" else "L"), recipe)
    pixels = np.asarray(cut, dtype=np.float32).reshape(1, crop_height, crop_width, recipe.channels)
    scaled = (pixels - np.array(recipe.mean, np.float32)) / np.array(recipe.std, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2) if recipe.layout == "nchw" else scaled, np.float32)


def cut_out(image: Image.Image, recipe: ImageRecipe) -> Image.Image:
    """Resize the part of an image that becomes the crop of the recipe."""
    crop_height, crop_width = recipe.crop
    box = recipe.window(image.height, image.width)
    return image.resize((crop_width, crop_height), RESAMPLING[recipe.interpolation], box=box)


def to_pixels(image: Image.Image, recipe: ImageRecipe) -> npt.NDArray[np.uint8]:
    """Return the pixels that a client sends to a server that preprocesses.

    Without `source` in the recipe these are the crop, before `mean` and `std`. With it they are the centre of the
    image with the source's proportions, resized to the source's size.

    Args:
        image: as `decode` returns it.
        recipe: with `by` "server".

    Returns:
        uint8 of shape (1, *recipe.pixels), contiguous.
    """
    image = in_mode(image, "RGB" if recipe.color == "rgb" else "L")
    height, width, channels = recipe.pixels
    box = recipe.window(image.height, image.width)
    if recipe.source is not None:
        scale = min(image.width / width, image.height / height)
        left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
        box = left, top, min(left + width * scale, image.width), min(top + height * scale, image.height)
    cut = image.resize((width, height), RESAMPLING[recipe.interpolation], box=box)
    return np.array(cut, dtype=np.uint8).reshape(1, height, width, channels)


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return an image in a mode: itself if it has the mode, which Pillow would copy."""
    return image if image.mode == mode else image.convert(mode)


def one_line(error: Exception) -> str:
    """A parser's message on one line, for responses and logs."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (as stored) without one; damaged metadata does not refuse a good image."""
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except (SyntaxError, ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, struct.error):
        return 1


def upright(image: Image.Image, stored: int) -> Image.Image:
    """Turn an image upright from its EXIF orientation `stored`."""
    turn = _UPRIGHT.get(stored)
    return image if turn is None else image.transpose(turn)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Convert any mode to "L" or "RGB"."""
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.mode == "F":
        raise BadRequest(f"the picture's pixels are floats, which have no agreed range: {_SAVE_ANEW}")
    if image.has_transparency_data:
        # Pixels below transparency are arbitrary; viewers show them over white.
        layer = image.convert("RGBA")
        ground = Image.new("RGB", layer.size, "white")
        ground.paste(layer, mask=layer.getchannel("A"))
        return ground
    return in_mode(image, "L" if image.mode in ("1", "L") else "RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Scale grey with 16 bits for each pixel to 8 bits: Pillow's own conversion clips every value over 255 to white."""
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise BadRequest(
            f"the picture's pixels go from {low} to {high}, allowed are 16 bits (0 to 65535): {_SAVE_ANEW}"
        )
    return Image.fromarray(((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))


class PixelSteps:
    """Resizes, crops, normalizes and lays out batches of images, in a buffer that is allocated once.

    It works on one image at a time and in place, so that the image stays in the caches of the processor.

    Ownership: one thread. The result of `apply` is valid until the next call.

    Args:
        recipe: preprocessing steps, with `by` "server".
        dtype: element type of the tensor, float32 or float16.
    """

    def __init__(self, recipe: ImageRecipe, dtype: npt.DTypeLike = np.float32) -> None:
        self._recipe = recipe
        self._dtype = np.dtype(dtype)
        height, width = recipe.crop
        channels = recipe.channels
        planar = recipe.layout == "nchw"
        self._order = (2, 0, 1) if planar else (0, 1, 2)
        self._shape = (channels, height, width) if planar else (height, width, channels)
        spread = (-1, 1, 1) if planar else (-1,)
        self._mean = np.array(recipe.mean, np.float32).reshape(spread)
        self._std = np.array(recipe.std, np.float32).reshape(spread)
        self._buffer: npt.NDArray[Any] = np.empty((0, *self._shape), self._dtype)
        # Result of each of the 256 pixel values, by channel: a lookup is faster than NumPy's conversion to float16.
        values = np.arange(256, dtype=np.float32)
        mean, std = (np.broadcast_to(np.array(numbers, np.float32), channels) for numbers in (recipe.mean, recipe.std))
        self._halves = ((values - mean[:, None]) / std[:, None]).astype(self._dtype)

    def apply(self, pixels: Array, out: Array | None = None) -> Array:
        """Return the tensor of a batch.

        Args:
            pixels: uint8 (rows, *recipe.pixels).
            out: destination, (rows, *shape of one tensor); None uses the buffer.

        Returns:
            (rows, *shape of one tensor), contiguous.
        """
        tensor = self._buffer_of(pixels.shape[0]) if out is None else out
        scale = self._scale if self._dtype == np.float32 else self._look_up
        for picture, target in zip(pixels, tensor, strict=True):
            scale(self._cropped(picture), target)
        return tensor

    def _buffer_of(self, rows: int) -> Array:
        if rows > self._buffer.shape[0]:
            self._buffer = np.empty((rows, *self._shape), self._dtype)
        return self._buffer[:rows]

    def _scale(self, picture: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        np.copyto(target, picture.transpose(self._order))
        target -= self._mean
        target /= self._std

    def _look_up(self, picture: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        for channel, halves in enumerate(self._halves):
            plane = target[channel] if self._recipe.layout == "nchw" else target[..., channel]
            np.take(halves, picture[..., channel], out=plane, mode="clip")

    def _cropped(self, picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
        recipe = self._recipe
        if recipe.source is None:
            return picture
        height, width = recipe.source
        crop_height, crop_width = recipe.crop
        left, top, right, bottom = recipe.window(height, width)
        if (left, top, right, bottom) == (int(left), int(top), int(left) + crop_width, int(top) + crop_height):
            return picture[int(top) : int(bottom), int(left) : int(right)]
        # Pillow's loops: NumPy takes two and a half times as long for the same pixels.
        image = Image.fromarray(picture[..., 0] if recipe.channels == 1 else picture)
        box = (left, top, right, bottom)
        cut = image.resize((crop_width, crop_height), RESAMPLING[recipe.interpolation], box=box)
        return np.asarray(cut).reshape(crop_height, crop_width, recipe.channels)
