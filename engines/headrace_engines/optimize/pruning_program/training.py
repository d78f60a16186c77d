"""Distillation: trains a pruned network on the outputs of the unpruned one.

Loss: temperature^2 times the Kullback-Leibler divergence of the softened classes (Hinton et al., "Distilling the Knowledge in a
Neural Network", 2015), plus the cross entropy with the labels where the samples have them. AdamW, one cosine of the learning
rate after a linear start. On a GPU in mixed precision by `torch.amp`: bfloat16 where the GPU computes in it, else float16 with
scaled gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional

Report = Callable[[float, str], None]
_WARM_UP_SHARE = 0.05
_WEIGHT_DECAY = 1e-4
_MAX_NORM = 5.0
_RESIDENT_SHARE = 0.25
_PICTURE_RANK = 4


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of the training.

    Attributes:
        epochs: passes over the samples.
        batch: samples of a step, over all devices.
        learning_rate: largest learning rate of AdamW.
        temperature: softens the classes of teacher and student.
        distillation: weight of the teacher's classes against the labels, 0..1; 1 without labels.
        seed: seed of the order of the samples.
        amp: mixed precision; only on a GPU.
    """

    epochs: int = 30
    batch: int = 64
    learning_rate: float = 1e-3
    temperature: float = 4.0
    distillation: float = 0.7
    seed: int = 0
    amp: bool = True


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Samples of the training.

    Attributes:
        inputs: FP32 [N, ...]; a memory map, or a tensor on the device.
        labels: INT64 [N]; None without labels.
    """

    inputs: np.ndarray[Any, Any] | torch.Tensor
    labels: torch.Tensor | None

    def on(self, device: torch.device) -> TrainingData:
        """Return the samples in the memory of a GPU if they take at most a quarter of its free memory, else unchanged."""
        if device.type != "cuda" or isinstance(self.inputs, torch.Tensor):
            return self
        if self.inputs.nbytes > _RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
            return self
        labels = None if self.labels is None else self.labels.to(device)
        return TrainingData(torch.from_numpy(np.array(self.inputs)).to(device), labels)

    def rows(self, index: np.ndarray[Any, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the samples of these indices on a device, and their labels."""
        chosen = torch.from_numpy(index)
        labels = None if self.labels is None else self.labels[chosen.to(self.labels.device)].to(device)
        if isinstance(self.inputs, torch.Tensor):
            return self.inputs[chosen.to(self.inputs.device)].to(device), labels
        return torch.from_numpy(np.ascontiguousarray(self.inputs[index])).to(device), labels


@dataclass(frozen=True, slots=True)
class Workers:
    """Data-parallel processes of a training.

    Attributes:
        rank: number of this process.
        count: number of processes.
    """

    rank: int = 0
    count: int = 1


def logits_network(graph: fx.GraphModule) -> nn.Module:
    """Return the network without a softmax at its end, with the same parameters."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    last = output.args[0]
    if isinstance(last, (tuple, list)) and len(last) == 1:
        last = last[0]
    if not isinstance(last, fx.Node) or not _is_softmax(graph, last):
        return graph
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph.graph, copies)
    copied.output(copies[last.all_input_nodes[0]])
    copied.erase_node(copies[last])
    return fx.GraphModule(graph, copied)


def _is_softmax(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), nn.Softmax)
    return node.target in ("softmax", torch.softmax, functional.softmax)


def class_logits(outputs: Any) -> torch.Tensor:
    """Return FP32 logits [N, classes] of a network's output; probabilities become their logarithm.

    Raises:
        ValueError: the output is not [N, classes].
    """
    tensor: torch.Tensor = outputs[0] if isinstance(outputs, (tuple, list)) and len(outputs) == 1 else outputs
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.shape[1] < 2:
        shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"the network's output is {shape}: distillation needs one output [samples, classes]")
    return tensor.float()


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None, options: TrainingOptions
) -> torch.Tensor:
    """Return the loss of a batch.

    Args:
        student: logits [N, classes] of the pruned network.
        teacher: logits [N, classes] of the unpruned one.
        labels: INT64 [N]; None without labels.
        options: temperature and weight.
    """
    warm = options.temperature
    soft = functional.kl_div(
        functional.log_softmax(student / warm, 1),
        functional.log_softmax(teacher / warm, 1),
        log_target=True,
        reduction="batchmean",
    )
    loss = soft * warm * warm
    if labels is None:
        return loss
    return options.distillation * loss + (1 - options.distillation) * functional.cross_entropy(student, labels)


def distil(
    student: fx.GraphModule,
    teacher: nn.Module,
    data: TrainingData,
    options: TrainingOptions,
    device: torch.device,
    workers: Workers,
    report: Report,
) -> float:
    """Train a pruned network in place.

    Args:
        student: pruned network, on `device`.
        teacher: unpruned network that returns logits, on `device`.
        data: samples.
        options: options of the training.
        device: CPU or GPU of this process.
        workers: data-parallel processes; the default process group is initialised if there are several.
        report: called after each step with the finished share and a text.

    Returns:
        Mean loss of the last epoch, of this process.
    """
    teacher.eval()
    network: Any = logits_network(student)
    network.train()
    if device.type == "cuda" and data.inputs.ndim == _PICTURE_RANK:
        # Tensor Cores compute convolutions channels-last.
        network.to(memory_format=torch.channels_last)
        teacher.to(memory_format=torch.channels_last)
    data = data.on(device)
    steps = options.epochs * max(len(data.inputs) // options.batch, 1)
    step = _step(network, teacher, options, device, workers, steps)
    mean, done = float("nan"), 0
    for epoch in range(options.epochs):
        losses = []
        for index in _batches(len(data.inputs), options, epoch, workers):
            losses.append(step(*data.rows(index, device)))
            done += 1
            loss_text = f", loss {mean:.4f}" if epoch else ""
            report(done / steps, f"epoch {epoch + 1} of {options.epochs}{loss_text}")
        mean = float(torch.stack(losses).mean())
    if workers.count > 1:
        # Batch norms keep the statistics of their own process; the first one's are exported.
        dist.barrier()
    student.to(memory_format=torch.contiguous_format).eval()
    return mean


def _step(
    network: Any, teacher: nn.Module, options: TrainingOptions, device: torch.device, workers: Workers, steps: int
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return a function that trains on one batch and returns its loss."""
    trained = network
    if workers.count > 1:
        trained = nn.parallel.DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: _rate(number, steps))
    dtype = amp_type(device, options)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def step(inputs: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        with torch.amp.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            with torch.no_grad():
                target = class_logits(teacher(inputs))
            answer = class_logits(trained(inputs))
        loss = distillation_loss(answer, target, labels, options)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), _MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss.detach()

    return step


def amp_type(device: torch.device, options: TrainingOptions) -> torch.dtype | None:
    """Return the type of the mixed precision on a device; None for FP32."""
    if device.type != "cuda" or not options.amp:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    return torch.bfloat16 if major >= 8 else torch.float16


def _rate(step: int, steps: int) -> float:
    warm_up = max(round(_WARM_UP_SHARE * steps), 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + float(np.cos(np.pi * min((step - warm_up) / max(steps - warm_up, 1), 1.0))))


def _batches(count: int, options: TrainingOptions, epoch: int, workers: Workers) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the indices of this process's part of each batch; a last smaller batch is left out, except a single one."""
    order = np.random.default_rng([options.seed, epoch]).permutation(count)
    size = min(options.batch, count)
    for start in range(0, count - size + 1, size):
        yield np.sort(order[start : start + size][workers.rank :: workers.count])


def answers(network: nn.Module, inputs: np.ndarray[Any, Any], device: torch.device, batch: int) -> np.ndarray[Any, Any]:
    """Return the outputs [N, ...] of a network in FP32 for [N, ...] inputs, `batch` at a time."""
    network.eval()
    results = []
    with torch.no_grad():
        for start in range(0, len(inputs), batch):
            part = torch.from_numpy(np.ascontiguousarray(inputs[start : start + batch])).to(device)
            output = network(part)
            output = output[0] if isinstance(output, (tuple, list)) else output
            results.append(output.float().cpu().numpy())
    return np.concatenate(results)
