"""The residual networks of He et al., "Deep residual learning for image recognition" (2016): CIFAR's and ImageNet's."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BlockName = Literal["basic", "bottleneck"]


class CifarBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut without parameters: option A of the paper.

    If the width grows, the shortcut subsamples and pads with channels of zeros.
    """

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(d_out)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(d_out)
        self.stride, self.padding = stride, (d_out - d_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


def cifar_resnet(depth: int, channels: Sequence[int] = (16, 32, 64), classes: int = 10) -> nn.Module:
    stem = (nn.Conv2d(3, channels[0], 3, 1, 1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU())
    blocks, d_in = [], channels[0]
    for stage, d_out in enumerate(channels):
        for index in range(depth):
            blocks.append(CifarBlock(d_in, d_out, stride=2 if stage and not index else 1))
            d_in = d_out
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d_in, classes))
    initialise_convolutions(model)
    return model


class ImageNetBlock(nn.Module):
    """Convolutions with batch norm, and a projection as shortcut if the shape changes: option B of the paper."""

    expansion: int

    def __init__(self, body: nn.Sequential, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and d_in == d_out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_norm(d_in, d_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class BasicBlock(ImageNetBlock):
    expansion = 1

    def __init__(self, d_in: int, width: int, stride: int) -> None:
        body = (*_conv_norm(d_in, width, 3, stride), nn.ReLU(), *_conv_norm(width, width, 3))
        super().__init__(nn.Sequential(*body), d_in, width, stride)


class Bottleneck(ImageNetBlock):
    """A 3x3 convolution between two 1x1 convolutions. It has the stride, as in most implementations since the paper."""

    expansion = 4

    def __init__(self, d_in: int, width: int, stride: int) -> None:
        first = (*_conv_norm(d_in, width, 1), nn.ReLU(), *_conv_norm(width, width, 3, stride), nn.ReLU())
        last = _conv_norm(width, self.expansion * width, 1)
        super().__init__(nn.Sequential(*first, *last), d_in, self.expansion * width, stride)


_BLOCKS: dict[BlockName, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


def imagenet_resnet(block: BlockName, depths: Sequence[int], width: int = 64, classes: int = 1000) -> nn.Module:
    kind = _BLOCKS[block]
    stem = (*_conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    blocks, d_in = [], width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            blocks.append(kind(d_in, width * 2**stage, stride=2 if stage and not index else 1))
            d_in = kind.expansion * width * 2**stage
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d_in, classes))
    initialise_convolutions(model)
    return model


def _conv_norm(d_in: int, d_out: int, side: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(d_in, d_out, side, stride, side // 2, bias=False), nn.BatchNorm2d(d_out)


@torch.no_grad()
def initialise_convolutions(model: nn.Module) -> None:
    """Initialize the weights of convolutions, so that each with its ReLU preserves the variance of the gradient."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
