"""Trains torchvision's ResNet-18 on generated pictures, as the teacher of the figures in docs/optimize.md.

    python -m loadtest.pruning.resnet18 FOLDER        needs PyTorch and torchvision; a GPU makes it a minute

FOLDER gets network.py (its function `teacher` returns the trained network), teacher.pt, train.npz and held_out.npz.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torchvision

from loadtest.pruning.pictures import CLASSES, make_pictures

FACTORY = f'''"""Trained ResNet-18 of {CLASSES} classes."""

from pathlib import Path

import torch
import torchvision


def teacher():
    network = torchvision.models.resnet18(num_classes={CLASSES})
    network.load_state_dict(torch.load(Path(__file__).with_name("teacher.pt"), map_location="cpu", weights_only=True))
    return network
'''
SEED = 7


def train(
    pictures: torch.Tensor, labels: torch.Tensor, epochs: int, batch: int, device: torch.device
) -> torch.nn.Module:
    """Return a ResNet-18 that is trained from random weights with AdamW, on a GPU in bfloat16."""
    torch.manual_seed(SEED)
    network = torchvision.models.resnet18(num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    steps = epochs * (len(pictures) // batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    pictures, labels = pictures.to(device), labels.to(device)
    random = torch.Generator().manual_seed(SEED)
    for _ in range(epochs):
        order = torch.randperm(len(pictures), generator=random).to(device)
        for start in range(0, len(order) - batch + 1, batch):
            index = order[start : start + batch]
            x = pictures[index].contiguous(memory_format=torch.channels_last)
            # All symmetries of the square keep the class.
            if torch.rand((), generator=random) < 0.5:
                x = x.flip(3)
            x = torch.rot90(x, int(torch.randint(4, (), generator=random)), (2, 3))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = torch.nn.functional.cross_entropy(network(x), labels[index], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval().float().cpu().to(memory_format=torch.contiguous_format)


def accuracy(network: torch.nn.Module, pictures: torch.Tensor, labels: torch.Tensor, device: torch.device) -> float:
    """Return the share of pictures whose top class is the label."""
    network = network.to(device)
    with torch.no_grad():
        classes = torch.cat([network(part.to(device)).argmax(1).cpu() for part in pictures.split(256)])
    network.cpu()
    return float((classes == labels).float().mean())


def linear_accuracy(
    train_set: tuple[torch.Tensor, torch.Tensor], held_out: tuple[torch.Tensor, torch.Tensor], device: torch.device
) -> float:
    """Return the accuracy of a linear model of the pixels on held-out pictures."""
    model = torch.nn.Linear(train_set[0][0].numel(), CLASSES).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    for _ in range(10):
        for x, y in zip(train_set[0].split(256), train_set[1].split(256), strict=True):
            loss = torch.nn.functional.cross_entropy(model(x.to(device).flatten(1)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(held_out[0].to(device).flatten(1)).argmax(1).cpu() == held_out[1]).float().mean())


def main() -> None:
    """Generate the pictures, train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=16384)
    parser.add_argument("--held-out", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=28)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    images, labels = make_pictures(options.pictures, SEED)
    held_images, held_labels = make_pictures(options.held_out, SEED + 1)
    made_s = time.monotonic()
    np.savez(options.folder / "train.npz", input=images, labels=labels)
    np.savez(options.folder / "held_out.npz", input=held_images, labels=held_labels)
    train_set = torch.from_numpy(images), torch.from_numpy(labels)
    held_out = torch.from_numpy(held_images), torch.from_numpy(held_labels)
    trained_s = time.monotonic()
    network = train(*train_set, options.epochs, options.batch, device)
    report = {
        "pictures": options.pictures,
        "generated_s": round(made_s - started_s, 1),
        "trained_s": round(time.monotonic() - trained_s, 1),
        "train_accuracy": accuracy(network, train_set[0][:2048], train_set[1][:2048], device),
        "held_out_accuracy": accuracy(network, *held_out, device),
        "linear_held_out_accuracy": linear_accuracy(train_set, held_out, device),
    }
    torch.save(network.state_dict(), options.folder / "teacher.pt")
    (options.folder / "network.py").write_text(FACTORY, encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
