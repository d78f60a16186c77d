"""Units of channels in small networks: a cut network equals one whose removed channels are zero, value by value."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch, which the test environment does not install")

from headrace_engines.optimize.pruning_program import surgery  # noqa: E402
from headrace_engines.optimize.pruning_program.channels import ChannelMap, NotUnderstood, map_channels  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

CLASSES = 5


def conv(entering: int, leaving: int, size: int = 3, **options: Any) -> Any:
    return nn.Conv2d(entering, leaving, size, padding=size // 2, **options)


class Residual(nn.Module):  # type: ignore[misc]
    """Stem, two blocks with shortcuts, one of them with a convolution, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = conv(3, 16), nn.BatchNorm2d(16)
        self.first, self.first_norm, self.second, self.second_norm = (
            conv(16, 24),
            nn.BatchNorm2d(24),
            conv(24, 16),
            nn.BatchNorm2d(16),
        )
        self.wide, self.short = conv(16, 32, stride=2), conv(16, 32, 1, stride=2, bias=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(x + self.second_norm(self.second(functional.relu(self.first_norm(self.first(x))))))
        x = functional.relu(self.wide(x) + self.short(x))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class Depthwise(nn.Module):  # type: ignore[misc]
    """Depthwise, grouped and gated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.deep, self.norm = conv(3, 24, 1), conv(24, 48, groups=24), nn.BatchNorm2d(48)
        self.gate, self.grouped, self.project = conv(48, 48, 1), conv(48, 24, groups=4), conv(24, 16, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Any) -> Any:
        x = functional.silu(self.norm(self.deep(self.expand(x))))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        x = functional.relu(self.project(functional.relu(self.grouped(x))))
        return self.head(x.mean([2, 3]))


class Dense(nn.Module):  # type: ignore[misc]
    """Concatenations, a shared convolution, and a head on flattened positions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = conv(3, 16), conv(16, 16), nn.BatchNorm2d(32)
        self.shared, self.three = conv(32, 32), conv(64, 16)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, CLASSES))

    def forward(self, x: Any) -> Any:
        a = functional.relu(self.one(x))
        b = functional.relu(self.norm(torch.cat([a, functional.relu(self.two(a))], 1)))
        c = torch.cat([self.shared(b), self.shared(functional.relu(self.shared(b)))], dim=1)
        return self.head(functional.max_pool2d(functional.relu(self.three(c)), 2))


NETWORKS = (Residual, Depthwise, Dense)


def mapped(network: type[Any]) -> ChannelMap:
    torch.manual_seed(0)
    module = network()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.5, 0.5)
            nn.init.uniform_(part.running_mean, -0.2, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    return map_channels(module.eval(), torch.randn(2, 3, 8, 8))


def silenced(channels: ChannelMap, kept: set[int]) -> Any:
    """Return the network with the removed channels constantly zero behind each layer."""
    graph = copy.deepcopy(channels.graph)
    for layer in channels.layers:
        removed = torch.tensor([int(unit) not in kept for unit in layer.outputs])
        module = graph.get_submodule(layer.name)
        with torch.no_grad():
            module.weight[removed] = 0
            if module.bias is not None:
                module.bias[removed] = 0
    return graph


@pytest.mark.parametrize("share", [0.8, 0.4, 0.15])
@pytest.mark.parametrize("network", NETWORKS)
def test_cut_network_equals_silenced_one(network: type[Any], share: float) -> None:
    channels = mapped(network)
    kept = surgery.select_units(channels, surgery.magnitude_scores(channels), share, 1)
    expected, macs = silenced(channels, kept), channels.macs(kept)
    x = torch.randn(3, 3, 8, 8)
    # Gates and activations of zero: a silenced channel must reach the next layer as zero.
    surgery.remove_units(channels, kept)
    with torch.no_grad():
        np.testing.assert_allclose(channels.graph(x), expected(x), atol=2e-5)
    again = map_channels(channels.graph, x)
    assert again.macs() == macs
    assert macs <= share * mapped(network).macs() or share < 0.2


def test_one_unit_at_a_time_can_be_removed() -> None:
    channels = mapped(Residual)
    every = set(channels.fixed) | {int(unit) for group in channels.groups for unit in group}
    x = torch.randn(2, 3, 8, 8)
    for group in channels.groups:
        cut = copy.deepcopy(channels)
        kept = every - {int(group[0])}
        expected = silenced(channels, kept)
        surgery.remove_units(cut, kept)
        with torch.no_grad():
            np.testing.assert_allclose(cut.graph(x), expected(x), atol=1e-5)


def outputs(channels: ChannelMap, name: str) -> list[int]:
    return next(layer.outputs.tolist() for layer in channels.layers if layer.name == name)


def inputs(channels: ChannelMap, name: str) -> list[int]:
    return next(layer.inputs.tolist() for layer in channels.layers if layer.name == name)


def test_additions_join_channels() -> None:
    channels = mapped(Residual)
    assert outputs(channels, "stem") == outputs(channels, "second") == inputs(channels, "wide")
    assert outputs(channels, "wide") == outputs(channels, "short") == inputs(channels, "head")
    assert not set(outputs(channels, "first")) & set(outputs(channels, "stem"))
    assert set(outputs(channels, "head")) <= channels.fixed
    assert set(inputs(channels, "stem")) <= channels.fixed
    assert sorted(len(group) for group in channels.groups) == [16, 24, 32]


def test_depthwise_filters_belong_to_their_input_channel() -> None:
    channels = mapped(Depthwise)
    assert outputs(channels, "deep") == np.repeat(outputs(channels, "expand"), 2).tolist()
    assert outputs(channels, "gate") == outputs(channels, "deep")


def test_groups_of_a_convolution_stay_equal() -> None:
    channels = mapped(Depthwise)
    by_group = np.array(outputs(channels, "grouped")).reshape(4, 6)
    assert (by_group == by_group[0]).all()
    entering = np.array(inputs(channels, "grouped")).reshape(4, 12)
    assert (entering == entering[0]).all()


def test_concatenation_keeps_the_order_of_its_parts() -> None:
    channels = mapped(Dense)
    assert inputs(channels, "shared") == [*outputs(channels, "one"), *outputs(channels, "two")]
    # The shared convolution reads its own output: channels of both are the same units.
    assert outputs(channels, "shared") == inputs(channels, "shared")
    assert inputs(channels, "head.1") == np.repeat(outputs(channels, "three"), 16).tolist()


def test_macs_are_counted_by_hand() -> None:
    channels = mapped(Residual)
    by_hand = 64 * 9 * (3 * 16 + 16 * 24 + 24 * 16) + 16 * 32 * (9 * 16 + 16) + 32 * CLASSES
    assert channels.macs() == by_hand


class View(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = conv(3, 16), nn.Linear(16 * 64, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.conv(x).view(-1, 16 * 64))


class Sizes(View):
    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        return self.head(x.view(x.size(0), -1))


class Shuffle(View):
    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        return self.head(x.transpose(1, 2).flatten(1))


class Norms(View):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.GroupNorm(4, 16)

    def forward(self, x: Any) -> Any:
        return self.head(self.odd(self.conv(x)).flatten(1))


class Constant(View):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 16, 1, 1))

    def forward(self, x: Any) -> Any:
        return self.head((self.conv(x) * self.scale).flatten(1))


class Branches(View):
    def forward(self, x: Any) -> Any:
        return self.head(self.conv(x).flatten(1)) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (View, "node view .*flatten"),
        (Shuffle, "node transpose"),
        (Norms, "node odd .*GroupNorm"),
        (Constant, "node mul .*constant"),
        (Branches, "torch.fx cannot trace Branches"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_node(network: type[Any], words: str) -> None:
    with pytest.raises(NotUnderstood, match=words):
        map_channels(network(), torch.randn(2, 3, 8, 8))


def test_sizes_from_the_tensor_are_understood() -> None:
    channels = map_channels(Sizes(), torch.randn(2, 3, 8, 8))
    assert [len(group) for group in channels.groups] == [16]


def test_channels_are_rounded_up_and_a_share_always_remains() -> None:
    channels = mapped(Residual)
    kept = surgery.select_units(channels, surgery.magnitude_scores(channels), 0.5, 8)
    assert all(sum(int(unit) in kept for unit in group) % 8 == 0 for group in channels.groups)
    least = surgery.select_units(channels, surgery.magnitude_scores(channels), 1e-9, 1)
    assert all(sum(int(unit) in least for unit in group) >= 0.1 * len(group) for group in channels.groups)
    everything = surgery.select_units(channels, surgery.magnitude_scores(channels), 1.0, 8)
    assert channels.macs(everything) == channels.macs()


def test_taylor_scores_find_the_channel_that_nothing_reads() -> None:
    channels = mapped(Residual)
    with torch.no_grad():
        channels.graph.get_submodule("second").weight[:, 5] = 0
    x, labels = torch.randn(16, 3, 8, 8), torch.randint(CLASSES, (16,))
    losses = [lambda: functional.cross_entropy(channels.graph(x), labels)]
    scores = surgery.taylor_scores(channels, losses)
    first = outputs(channels, "first")
    assert scores[first[5]] == 0
    assert sum(scores[unit] > 0 for unit in first) > len(first) // 2
