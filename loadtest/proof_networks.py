"""Public networks with random weights as ONNX files, for `python -m loadtest.proofs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Tokens of a text, and steps of a sequence.
_LENGTH = 64
IMAGE = (3, 224, 224)


def _torchvision(name: str) -> Callable[[], Any]:
    def build() -> Any:
        from torchvision.models import get_model

        return get_model(name, weights=None)

    return build


def _timm(name: str) -> Callable[[], Any]:
    def build() -> Any:
        import timm

        return timm.create_model(name, pretrained=False)

    return build


def _transformers(kind: str, config: str, field: str, **options: Any) -> Callable[[], Any]:
    """Return a builder of a model of transformers whose `field` is the output."""

    def build() -> Any:
        import torch
        import transformers

        inner = getattr(transformers, kind)(getattr(transformers, config)(**options))

        class Field(torch.nn.Module):
            """The model with one tensor as its output."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Any) -> Any:
                """Return the output."""
                return getattr(self.inner(x), field)

        return Field()

    return build


def _own(name: str) -> Callable[[], Any]:
    """Return a builder of a small network: an LSTM, a U-Net, or a detector with a transformer."""

    def build() -> Any:
        import torch
        from torch import nn

        class Lstm(nn.Module):
            """Two layers over 64 steps of 32 values."""

            def __init__(self) -> None:
                super().__init__()
                self.lstm, self.out = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 10)

            def forward(self, x: Any) -> Any:
                """Return scores of the last step."""
                return self.out(self.lstm(x)[0][:, -1])

        class UNet(nn.Module):
            """Two levels with a shortcut."""

            def __init__(self) -> None:
                super().__init__()
                self.down, self.inner = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
                self.up, self.out = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(32, 4, 2, 2)

            def forward(self, x: Any) -> Any:
                """Return four channels of the input's size."""
                first = torch.relu(self.down(x))
                second = torch.relu(self.up(torch.relu(self.inner(first))))
                return self.out(torch.cat([first, second], 1))

        class Detector(nn.Module):
            """Features of an image, and queries that attend to them."""

            def __init__(self) -> None:
                super().__init__()
                self.features = nn.Conv2d(3, 64, 16, 16)
                self.queries = nn.Parameter(torch.randn(1, 20, 64))
                self.attend, self.out = nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 6)

            def forward(self, x: Any) -> Any:
                """Return class and box of each query."""
                places = self.features(x).flatten(2).transpose(1, 2)
                queries = self.queries + places.mean(1, keepdim=True)
                return self.out(self.attend(queries, places, places)[0])

        return {"lstm": Lstm, "unet": UNet, "detr_like": Detector}[name]()

    return build


# Name -> builder, shape of a row, True for tokens; those that no GPU has measured yet first.
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], bool]] = {
    "segformer_b0": (_transformers("SegformerForSemanticSegmentation", "SegformerConfig", "logits"), IMAGE, False),
    **{
        name: (_torchvision(name), IMAGE, False)
        for name in (
            "swin_t", "vit_b_16", "efficientnet_b0", "convnext_tiny", "mobilenet_v3_small", "regnet_y_400mf",
            "shufflenet_v2_x1_0", "densenet121", "mobilenet_v2", "squeezenet1_1", "resnet18", "resnet50",
        )
    },
    "bert_base": (_transformers("BertModel", "BertConfig", "last_hidden_state"), (_LENGTH,), True),
    "deit_tiny": (_timm("deit_tiny_patch16_224"), IMAGE, False),
    "mixer_s32": (_timm("mixer_s32_224"), IMAGE, False),
    "lstm": (_own("lstm"), (_LENGTH, 32), False),
    "unet": (_own("unet"), IMAGE, False),
    "detr_like": (_own("detr_like"), IMAGE, False),
    "t5_encoder": (
        _transformers("T5EncoderModel", "T5Config", "last_hidden_state", num_layers=2, d_model=128, vocab_size=1000),
        (_LENGTH,), True,
    ),
}  # fmt: skip


def export(name: str, path: Path) -> None:
    """Write a network as an ONNX file with input x, output y and a free batch."""
    import torch

    build, shape, has_tokens = NETWORKS[name]
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    module = build().eval()
    for parameter in module.parameters():
        # Initial weights of some networks are zero in the last layer, or lose the signal of random inputs on the way.
        if parameter.dim() == 4 or (parameter.dim() > 1 and not parameter.any()):
            torch.nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    x = torch.randint(0, 2, (2, *shape)) if has_tokens else torch.randn(2, *shape)
    names = {"input_names": ["x"], "output_names": ["y"], "opset_version": 17}
    part = path.with_suffix(".part")  # a process that is ended while it exports leaves no half file
    with torch.no_grad():
        try:
            torch.onnx.export(
                module, (x,), str(part), dynamic_axes={"x": {0: "N"}, "y": {0: "N"}}, dynamo=False, **names
            )
        except Exception as error:  # the older exporter lacks an operator
            print(f"{name}: exported by dynamo, since {type(error).__name__}", flush=True)
            rows = torch.export.Dim("N", min=1, max=4096)
            torch.onnx.export(module, (x,), str(part), dynamic_shapes=({0: rows},), dynamo=True, **names)
    part.rename(path)
