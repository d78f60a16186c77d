"""Pictures to tensors: real photographs, every mode, hostile bytes."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import skimage
from headrace.core.errors import BadRequest, TooLarge
from headrace.inference.pipelines.image import MAX_PIXELS, ImageRecipe, decode, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, ImageSequence

from tests.support.examples import examples

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
# Of scikit-learn, whose import takes seconds.
SKLEARN = PHOTOGRAPHS.parents[1] / "sklearn" / "datasets" / "images"
CHELSEA = PHOTOGRAPHS / "chelsea.png"
WEBP_KINDS = ["VP8 ", "VP8L", "VP8X"]


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_claiming(width: int, height: int) -> bytes:
    """An RGB PNG of the given size with the pixels of one row of it at most."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(4)))


def jpeg_claiming(width: int, height: int) -> bytes:
    """A small real JPEG whose frame header (SOF0: FF C0, length, precision, height, width) claims another size."""
    data = bytearray(saved(Image.new("RGB", (16, 16), "red"), "JPEG"))
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_claiming(kind: str, width: int, height: int) -> bytes:
    """A small real WebP file whose header claims another size; `kind` is the first chunk: "VP8 ", "VP8L" or "VP8X"."""
    data = bytearray(saved(Image.new("RGB", (16, 16), "red"), "WEBP", lossless=kind == "VP8L"))
    if kind == "VP8X":
        canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        data[12:12] = b"VP8X" + struct.pack("<II", 10, 0) + canvas
        data[4:8] = struct.pack("<I", len(data) - 8)
    elif kind == "VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        struct.pack_into("<I", data, 21, bits & ~0xFFFFFFF | (width - 1) | (height - 1) << 14)
    else:
        struct.pack_into("<HH", data, 26, width, height)
    return bytes(data)


@pytest.mark.parametrize("name", ["chelsea.png", "coffee.png", "camera.png", "rocket.jpg", "motorcycle_left.png"])
def test_photographs_decode_as_pillow_shows_them(name: str) -> None:
    data = (PHOTOGRAPHS / name).read_bytes()
    image = decode(data)
    expected = Image.open(io.BytesIO(data))
    assert image.size == expected.size
    assert image.mode == ("L" if name == "camera.png" else "RGB")
    assert np.array_equal(np.asarray(image), np.asarray(expected.convert(image.mode)))


def test_the_limit_is_checked_before_decoding() -> None:
    for data, pixels in (
        (png_claiming(65_535, 65_535), "4294836225 pixels"),
        (jpeg_claiming(65_500, 65_500), "4290250000 pixels"),
        (jpeg_claiming(9_000, 9_000), "9000 x 9000 = 81000000 pixels"),
    ):
        with pytest.raises(
            TooLarge, match=rf"^the picture has {pixels}, at most 50000000 are accepted: send a smaller one$"
        ):
            decode(data)
    with pytest.raises(TooLarge, match=r"has 400000000 pixels, at most 178956970 are accepted"):  # Pillow's own limit
        decode(png_claiming(20_000, 20_000), max_pixels=500_000_000)
    for kind in WEBP_KINDS:
        with pytest.raises(TooLarge, match=r"12000 x 11999 = 143988000 pixels, at most 50000000 .*send a smaller one"):
            decode(webp_claiming(kind, 12_000, 11_999))
    with pytest.raises(TooLarge, match=r"451 x 300 = 135300 pixels, at most 1000"):
        decode(CHELSEA.read_bytes(), max_pixels=1000)
    assert decode(CHELSEA.read_bytes(), max_pixels=451 * 300).size == (451, 300)
    assert (Image.MAX_IMAGE_PIXELS or 0) > MAX_PIXELS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GIF89a", "damaged|no picture"),
        (b"not a picture at all", "it starts with 6e 6f 74"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "no picture that can be read"),
        (png_claiming(4, 4), "truncated or damaged"),
    ],
)
def test_invalid_images_are_client_errors(data: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        decode(data)


@pytest.mark.parametrize("size", [(1, 1), (451, 300), (4097, 3), (3, 4097)])
@pytest.mark.parametrize("kind", WEBP_KINDS)
def test_webp_files_of_the_largest_allowed_size_are_decoded(kind: str, size: tuple[int, int]) -> None:
    # The form with features is written for an alpha channel beside lossy pixels.
    image = Image.new("RGBA", size, (255, 0, 0, 128)) if kind == "VP8X" else Image.new("RGB", size, "red")
    data = saved(image, "WEBP", lossless=kind == "VP8L")
    assert data[12:16] == kind.encode()
    pixels = size[0] * size[1]
    assert decode(data, max_pixels=pixels).size == size
    with pytest.raises(TooLarge, match=f"{size[0]} x {size[1]} = {pixels} pixels"):
        decode(data, max_pixels=pixels - 1)


@pytest.mark.parametrize("length", range(0, 34, 3))
def test_a_webp_header_that_is_cut_is_a_client_error(length: int) -> None:
    for kind in WEBP_KINDS:
        with pytest.raises(BadRequest) as refusal:
            decode(webp_claiming(kind, 16, 16)[:length])
        assert not isinstance(refusal.value, TooLarge)


@pytest.mark.parametrize("file", [SKLEARN / "china.jpg", CHELSEA, PHOTOGRAPHS / "no_time_for_that_tiny.gif"])
def test_truncated_files_are_refused(file: Path) -> None:
    data = file.read_bytes()
    with pytest.raises(BadRequest):
        decode(data[: len(data) // 50])


def test_palette_transparency_and_alpha_are_shown_over_white() -> None:
    clear_blue = Image.new("RGBA", (4, 2), (0, 0, 255, 0))
    clear_blue.paste((255, 0, 0, 255), (0, 0, 2, 2))
    clear_blue.putpixel((3, 0), (0, 0, 0, 128))
    pixels = np.asarray(decode(saved(clear_blue, "PNG")))
    assert pixels[0].tolist()[:3] == [[255, 0, 0], [255, 0, 0], [255, 255, 255]]
    assert np.allclose(pixels[0, 3], 127, atol=1)

    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putdata([0, 1])
    assert np.asarray(decode(saved(palette, "PNG"))).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert np.asarray(decode(saved(palette, "PNG", transparency=0))).tolist() == [[[255, 255, 255], [200, 100, 50]]]

    grey_alpha = Image.new("LA", (1, 1), (40, 0))
    assert np.asarray(decode(saved(grey_alpha, "PNG"))).tolist() == [[[255, 255, 255]]]
    assert np.asarray(decode(saved(Image.new("1", (1, 1), 1), "PNG"))).tolist() == [[255]]


def test_cmyk_has_correct_colours() -> None:
    photograph = Image.open(SKLEARN / "flower.jpg").convert("RGB").resize((64, 64))
    image = decode(saved(photograph.convert("CMYK"), "JPEG", quality=95))
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image).astype(int) - np.asarray(photograph)).mean() < 4


def test_sixteen_bits_are_scaled_not_cut() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    image = decode(saved(Image.fromarray(values), "PNG"))
    assert image.mode == "L"
    assert np.asarray(image).tolist() == [[0, 1, 1, 128, 255]]
    with pytest.raises(BadRequest, match="from -5 to 70000"):
        decode(saved(Image.fromarray(np.array([[-5, 70000]], dtype=np.int32)), "TIFF"))
    with pytest.raises(BadRequest, match="floats"):
        decode(saved(Image.fromarray(np.array([[0.5]], dtype=np.float32)), "TIFF"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int) -> None:
    stored = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(stored, "PNG", exif=exif)
    pixels = np.asarray(decode(data))
    assert np.array_equal(pixels, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
    if orientation == 6:  # by the standard: row 0 is the right-hand side, column 0 the top
        assert (pixels // 40).tolist() == [[3, 0], [4, 1], [5, 2]]


def test_an_invalid_orientation_is_read_as_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 99
    assert decode(saved(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).size == (8, 4)
    data = saved(Image.new("RGB", (8, 4)), "JPEG", exif=b"Exif\0\0" + bytes(range(200, 240)))
    assert decode(data).size == (8, 4)


def test_of_an_animation_the_first_frame_counts() -> None:
    file = PHOTOGRAPHS / "no_time_for_that_tiny.gif"
    with Image.open(file) as animation:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(animation)]
    assert len(frames) > 1
    assert not np.array_equal(frames[0], frames[-1])
    assert np.array_equal(np.asarray(decode(file.read_bytes())), frames[0])


def test_a_multi_picture_file_returns_the_first_image() -> None:
    first, second = Image.new("RGB", (16, 8), "red"), Image.new("RGB", (16, 8), "blue")
    data = saved(first, "MPO", save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert decode(data).getpixel((3, 3))[0] > 250  # type: ignore[index]


SMALL = {
    kind: saved(Image.open(SKLEARN / "flower.jpg").convert("RGB").resize((24, 20)), kind)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
}


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(SMALL)), seed=st.integers(0, 2**32 - 1), cut=st.floats(0, 1))
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_decode_or_are_refused(kind: str, seed: int, cut: float) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(SMALL[kind])
    for _ in range(random.integers(1, 12)):
        data[int(random.integers(0, min(len(data), 400)))] = int(random.integers(0, 256))
    if cut < 0.3:
        del data[int(len(data) * (0.3 + cut)) :]
    try:
        image = decode(bytes(data), max_pixels=1_000_000)
    except BadRequest:
        return
    assert image.mode in ("L", "RGB")
    assert prepare(image, ImageRecipe()).shape == (1, 3, 224, 224)


# --- prepare -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", ["chelsea.png", "coffee.png", "rocket.jpg"])
def test_prepare_equals_resizing_the_whole_and_cropping(name: str, interpolation: str) -> None:
    image = decode((PHOTOGRAPHS / name).read_bytes())
    recipe = ImageRecipe.from_mapping({"interpolation": interpolation, "crop": [224, 200]})
    width, height = image.size
    size = (256, 256 * height // width) if width <= height else (256 * width // height, 256)
    whole = image.resize(size, Image.Resampling[interpolation.upper()])
    left, top = (size[0] - 200) // 2, (size[1] - 224) // 2
    expected = np.asarray(whole.crop((left, top, left + 200, top + 224))).astype(np.float32)
    tensor = prepare(image, recipe)
    assert tensor.dtype == np.float32
    assert tensor.flags.c_contiguous
    assert tensor.shape == recipe.shape == (1, 3, 224, 200)
    # One level: the two ways round a source coordinate differently in the last bit.
    assert np.abs(tensor[0].transpose(1, 2, 0) - expected).max() <= 1


def test_prepare_scales_and_orders() -> None:
    image = Image.new("RGB", (8, 8), (10, 20, 30))
    recipe = ImageRecipe(resize_short_side=4, crop=(2, 4), mean=(10.0, 0.0, 10.0), std=(1.0, 2.0, 4.0))
    assert prepare(image, recipe)[0, :, 0, 0].tolist() == [0.0, 10.0, 5.0]
    last = ImageRecipe(resize_short_side=4, crop=(2, 4), mean=(10.0,), std=(10.0,), layout="nhwc")
    assert prepare(image, last).shape == last.shape == (1, 2, 4, 3)
    assert prepare(image, last)[0, 0, 0].tolist() == [0.0, 1.0, 2.0]
    grey = ImageRecipe(color="gray", resize_short_side=8, crop=(8, 8), std=(15.9375,))
    digit = prepare(Image.new("L", (8, 8), 255), grey)
    assert digit.shape == (1, 1, 8, 8)
    assert (digit == 16.0).all()


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (1, 1), (3, 7), (223, 5_000)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_prepare_accepts_any_ratio(size: tuple[int, int], interpolation: str) -> None:
    recipe = ImageRecipe.from_mapping({"interpolation": interpolation, "crop": [256, 255]})
    tensor = prepare(Image.new("RGB", size, "white"), recipe)
    assert tensor.shape == (1, 3, 256, 255)
    assert (tensor == 255).all()
