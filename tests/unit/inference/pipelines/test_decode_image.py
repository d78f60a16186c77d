"""The built-in step decode_image: the decoders agree, limits hold before decoding, hostile files are refused."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import skimage
from headrace.core.errors import BadRequest, TooLarge
from headrace.inference.pipelines import image as pictures
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.inference.pipelines.steps.decode_image import ImageDecoder, read_header, scale_factor
from headrace.inference.pipelines.steps.options import DecodeOptions
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.unit.inference.pipelines.test_image import WEBP_KINDS, jpeg_claiming, png_claiming, saved, webp_claiming

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
ROCKET = (PHOTOGRAPHS / "rocket.jpg").read_bytes()
RECIPE = ImageRecipe(mean=(127.0,), std=(128.0,))

turbo = pytest.mark.parametrize("turbo", [True, False])


def decoder(turbo: bool = True, recipe: ImageRecipe | None = None, **options: object) -> ImageDecoder:
    return ImageDecoder(DecodeOptions(**options), recipe, turbo)  # type: ignore[arg-type]


@turbo
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_each_format_decodes_as_pillow_does(kind: str, mode: str, turbo: bool) -> None:
    data = saved(Image.open(PHOTOGRAPHS / "chelsea.png").convert(mode), kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoder(turbo).decode(data), expected)


@turbo
def test_gray_has_one_channel(turbo: bool) -> None:
    pixels = decoder(turbo, color="gray").decode(ROCKET)
    expected = np.asarray(Image.open(io.BytesIO(ROCKET)).convert("RGB").convert("L"))
    assert np.array_equal(pixels[..., 0], expected)


@turbo
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_upright(orientation: int, turbo: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.open(io.BytesIO(ROCKET)).resize((60, 40)), "JPEG", exif=exif.tobytes())
    expected = np.asarray(pictures.decode(data))
    assert np.array_equal(decoder(turbo).decode(data), expected)
    assert expected.shape[:2] == ((60, 40) if orientation > 4 else (40, 60))


@turbo
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(500, 375), (1300, 1000)])
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        ImageRecipe(color="gray", mean=(100.0,), std=(3.0,)),
        ImageRecipe(layout="nhwc", interpolation="bicubic", mean=(1.0, 2.0, 3.0), std=(50.0, 60.0, 70.0)),
    ],
    ids=["planes", "gray", "nhwc"],
)
def test_the_tensor_is_the_one_that_clients_make(
    recipe: ImageRecipe, size: tuple[int, int], mode: str, turbo: bool
) -> None:
    data = saved(Image.open(io.BytesIO(ROCKET)).convert(mode).resize(size), "JPEG")
    tensor = decoder(turbo, recipe, color=recipe.color).decode(data)
    assert tensor.dtype == np.float32
    assert np.array_equal(tensor, pictures.prepare(pictures.decode(data), recipe)[0])


def test_jpeg_in_other_colours_is_left_to_pillow() -> None:
    data = saved(Image.open(io.BytesIO(ROCKET)).convert("CMYK"), "JPEG")
    assert np.array_equal(decoder().decode(data), np.asarray(pictures.decode(data)))


def test_a_scaled_decode_differs_by_little() -> None:
    large = saved(Image.open(io.BytesIO(ROCKET)).resize((2400, 1600)), "JPEG", quality=95)
    exact, scaled = (decoder(True, RECIPE, scaled=flag).decode(large) for flag in (False, True))
    assert not np.array_equal(exact, scaled)  # it was decoded at another size
    assert np.abs(exact - scaled).mean() < 0.02


@pytest.mark.parametrize(
    ("size", "expected"), [((256, 256), 1), ((1023, 1023), 1), ((1200, 1600), 2), ((2048, 2048), 4), ((5000, 4096), 8)]
)
def test_a_decode_is_scaled_if_twice_the_pixels_remain(size: tuple[int, int], expected: int) -> None:
    header = read_header(jpeg_claiming(*size), 50_000_000)
    assert scale_factor(header, RECIPE) == expected


@turbo
@pytest.mark.parametrize(
    "claiming", [png_claiming, jpeg_claiming, *(partial(webp_claiming, kind) for kind in WEBP_KINDS)]
)
def test_the_header_bounds_the_pixels(claiming: object, turbo: bool) -> None:
    if claiming in (png_claiming, jpeg_claiming):  # WebP has at most 16383 x 16383 pixels
        with pytest.raises(TooLarge, match=r"^the image has 4096000000 pixels, at most 50000000 are accepted: send a"):
            decoder(turbo).decode(claiming(64000, 64000))  # type: ignore[operator]
    with pytest.raises(TooLarge, match=r"12000 x 12000 = 144000000 pixels, at most 50000000"):
        decoder(turbo).decode(claiming(12000, 12000))  # type: ignore[operator]
    with pytest.raises(TooLarge, match="at most 1000 are accepted"):
        decoder(turbo, max_pixels=1000).decode(claiming(40, 30))  # type: ignore[operator]


def test_the_bytes_are_bounded() -> None:
    with pytest.raises(TooLarge, match="at most 1000 are accepted"):
        decoder(max_bytes=1000).decode(ROCKET)


@turbo
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"GIF89a" + bytes(40), "send JPEG, PNG, WEBP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "send JPEG, PNG, WEBP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "send JPEG, PNG, WEBP"),
        (b"\xff\xd8\xff\xe0" + bytes(20), "no image that can be read|damaged"),
        (ROCKET[: len(ROCKET) // 2], "truncated or damaged"),
    ],
)
def test_other_files_are_the_clients_error(data: bytes, reason: str, turbo: bool) -> None:
    with pytest.raises(BadRequest, match=reason):
        decoder(turbo).decode(data)


@turbo
@pytest.mark.parametrize("size", [(1, 20000), (20000, 1)])
def test_a_line_of_pixels_needs_little_memory(size: tuple[int, int], turbo: bool) -> None:
    data = saved(Image.new("RGB", size, "red"), "JPEG")
    assert decoder(turbo, RECIPE).decode(data).shape == (3, 224, 224)


@given(st.integers(0, len(ROCKET) - 1), st.binary(min_size=1, max_size=40))
def test_damaged_bytes_decode_or_are_refused(position: int, replacement: bytes) -> None:
    data = bytearray(ROCKET[:4000] + ROCKET[-4000:])
    start = position % len(data)
    data[start : start + len(replacement)] = replacement
    try:
        assert decoder(True, RECIPE).decode(bytes(data)).shape == (3, 224, 224)
    except BadRequest:
        return


def test_the_header_of_a_png_is_read_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.open(io.BytesIO(ROCKET)), "PNG")
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda _image: pytest.fail("the pixels were decoded"))
    header = read_header(data, 50_000_000)
    assert (header.format, header.width, header.height) == ("PNG", 640, 427)


def test_a_checkerboard_is_resized_with_antialiasing() -> None:
    board = (np.indices((512, 512)).sum(axis=0) % 2 * 255).astype(np.uint8)
    recipe = ImageRecipe(resize_short_side=64, crop=(64, 64), color="gray")
    tensor = decoder(recipe=recipe, color="gray").decode(saved(Image.fromarray(board), "PNG"))
    assert np.abs(tensor - 127.5).max() < 2


@turbo
@pytest.mark.parametrize("size", [(61, 37), (1301, 999)])
@pytest.mark.parametrize(
    "encoding",
    [{"keep_rgb": True}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}],
    ids=lambda encoding: "-".join(map(str, encoding.items())),
)
def test_each_encoding_of_jpeg_decodes_as_pillow_does(
    encoding: dict[str, object], size: tuple[int, int], turbo: bool
) -> None:
    data = saved(Image.open(io.BytesIO(ROCKET)).resize(size), "JPEG", **encoding)
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoder(turbo).decode(data), pixels)
    assert np.array_equal(decoder(turbo, RECIPE).decode(data), pictures.prepare(pictures.decode(data), RECIPE)[0])


@turbo
@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_large_photographs_become_upright_tensors(orientation: int, turbo: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.open(io.BytesIO(ROCKET)).resize((1300, 1000)), "JPEG", exif=exif.tobytes())
    expected = pictures.prepare(pictures.decode(data), RECIPE)[0]
    assert np.array_equal(decoder(turbo, RECIPE).decode(data), expected)
    scaled = decoder(turbo, RECIPE, scaled=True).decode(data)
    assert np.abs(scaled - expected).mean() < 0.02
