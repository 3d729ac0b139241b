"""The small convolutional network of ``train_digits.py``: plain array code for NumPy and CuPy.

The caller passes the norms. The `forward` of a layer stores the arrays that `backward` reads. `backward` stores the
gradients of the layer's parameters in the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


def without_blas(a: Array, b: Array) -> Array:
    """Multiply two matrices with elementwise products and sums: needs much memory, but no cuBLAS."""
    return (a[:, :, None] * b[None, :, :]).sum(axis=1)


def matrix_product(xp: Any) -> Callable[[Array, Array], Array]:
    """Return ``xp.matmul`` if it works. CuPy's needs the cuBLAS library, which its wheel does not contain."""
    try:
        xp.matmul(xp.ones((2, 2), np.float32), xp.ones((2, 2), np.float32))
    except (ImportError, RuntimeError):
        return without_blas
    return xp.matmul


@dataclass
class Parameter:
    """One trained array, its gradient and the two moments of Adam."""

    value: Array
    grad: Array = None
    moments: tuple[Array, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.moments = (self.value * 0, self.value * 0)

    def step(self, xp: Any, rate: float, count: int) -> None:
        """Do step number `count` of Adam, from 1."""
        first, second = self.moments
        first += 0.1 * (self.grad - first)
        second += 0.01 * (self.grad * self.grad - second)
        self.value -= rate / (1 - 0.9**count) * first / (xp.sqrt(second / (1 - 0.99**count)) + 1e-8)


class Layer:
    """One stage of the network."""

    parameters: tuple[Parameter, ...] = ()

    def forward(self, x: Array) -> Array:
        raise NotImplementedError

    def evaluate(self, x: Array) -> Array:
        """Compute the output in evaluation. It is `forward`, except for layers that use stored statistics."""
        return self.forward(x)

    def backward(self, dy: Array) -> Array:
        raise NotImplementedError


#: Makes norm number N (from 1) of the network, for samples of shape (C, H, W).
MakeNorm = Callable[[int, tuple[int, int, int]], Layer]


class Conv3x3(Layer):
    """3x3 convolution, stride 1, zero padding, no bias, as one matrix product over patches."""

    def __init__(self, xp: Any, weight: Array) -> None:
        """`weight` has shape (C_in * 9, C_out). In the first axis, the nine offsets vary fastest."""
        self.xp, self.matmul = xp, matrix_product(xp)
        self.weight = Parameter(weight)
        self.parameters = (self.weight,)

    def forward(self, x: Array) -> Array:
        self.shape = n, c, h, w = x.shape
        padded = self.xp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        patches = self.xp.stack([padded[:, :, i : i + h, j : j + w] for i, j in offsets()], axis=2)
        self.rows = patches.transpose(0, 3, 4, 1, 2).reshape(n * h * w, c * 9)
        y = self.matmul(self.rows, self.weight.value).reshape(n, h, w, -1)
        return self.xp.ascontiguousarray(y.transpose(0, 3, 1, 2))

    def backward(self, dy: Array) -> Array:
        n, c, h, w = self.shape
        drows = dy.transpose(0, 2, 3, 1).reshape(n * h * w, -1)
        self.weight.grad = self.matmul(self.rows.T, drows)
        dpatches = self.matmul(drows, self.weight.value.T).reshape(n, h, w, c, 9).transpose(0, 3, 4, 1, 2)
        dpadded = self.xp.zeros((n, c, h + 2, w + 2), dy.dtype)
        for k, (i, j) in enumerate(offsets()):
            dpadded[:, :, i : i + h, j : j + w] += dpatches[:, :, k]
        return dpadded[:, :, 1:-1, 1:-1]


def offsets() -> Iterator[tuple[int, int]]:
    """Yield the nine positions of a 3x3 window, row by row."""
    return ((i, j) for i in range(3) for j in range(3))


class Relu(Layer):
    def forward(self, x: Array) -> Array:
        self.positive = x > 0
        return x * self.positive

    def backward(self, dy: Array) -> Array:
        return dy * self.positive


class MeanPool2x2(Layer):
    def forward(self, x: Array) -> Array:
        n, c, h, w = x.shape
        return x.reshape(n, c, h // 2, 2, w // 2, 2).mean(axis=(3, 5))

    def backward(self, dy: Array) -> Array:
        return (dy * 0.25).repeat(2, axis=2).repeat(2, axis=3)


class Dense(Layer):
    """Flatten each sample, multiply by a matrix and add a bias."""

    def __init__(self, xp: Any, weight: Array) -> None:
        self.matmul = matrix_product(xp)
        self.weight, self.bias = Parameter(weight), Parameter(xp.zeros(weight.shape[1], weight.dtype))
        self.parameters = (self.weight, self.bias)

    def forward(self, x: Array) -> Array:
        self.shape, self.rows = x.shape, x.reshape(x.shape[0], -1)
        return self.matmul(self.rows, self.weight.value) + self.bias.value

    def backward(self, dy: Array) -> Array:
        self.weight.grad, self.bias.grad = self.matmul(self.rows.T, dy), dy.sum(axis=0)
        return self.matmul(dy, self.weight.value.T).reshape(self.shape)


class Network:
    """Three convolutions, each with a norm and ReLU, a mean pool after the second, and a dense layer."""

    def __init__(self, xp: Any, norm: MakeNorm, dtype: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def weight(inputs: int, outputs: int) -> Array:
            return xp.asarray(rng.normal(size=(inputs, outputs)) * math.sqrt(2 / inputs), dtype)

        def block(number: int, inputs: int, outputs: int, side: int) -> list[Layer]:
            return [Conv3x3(xp, weight(inputs * 9, outputs)), norm(number, (outputs, side, side)), Relu()]

        self.xp = xp
        self.layers = [
            *block(1, 1, 16, 8),
            *block(2, 16, 32, 8),
            MeanPool2x2(),
            *block(3, 32, 32, 4),
            Dense(xp, weight(32 * 16, 10)),
        ]
        self.parameters = [parameter for layer in self.layers for parameter in layer.parameters]

    def scores(self, images: Array) -> Array:
        """Return the ten scores of each image, in evaluation."""
        for layer in self.layers:
            images = layer.evaluate(images)
        return images

    def loss_and_gradients(self, images: Array, labels: Array, total: int | None = None) -> float:
        """Return the mean cross-entropy of a batch, and store the gradients in the parameters.

        With `total`, the images are a part of a batch of that many, and the results are this part's share.
        """
        total = total or len(labels)
        scores = images
        for layer in self.layers:
            scores = layer.forward(scores)
        scores = scores - scores.max(axis=1, keepdims=True)
        log_odds = scores - self.xp.log(self.xp.exp(scores).sum(axis=1, keepdims=True))
        wanted = (labels[:, None] == self.xp.arange(10)[None, :]).astype(scores.dtype)
        gradient = (self.xp.exp(log_odds) - wanted) / total
        for layer in reversed(self.layers):
            gradient = layer.backward(gradient)
        return float(-(wanted * log_odds).sum() / total)

    def accuracy(self, images: Array, labels: Array, batch: int = 64) -> float:
        """Return the share of correctly classified images. Images are processed in batches to limit memory."""
        right = 0
        for i in range(0, len(labels), batch):
            right += int((self.scores(images[i : i + batch]).argmax(axis=1) == labels[i : i + batch]).sum())
        return right / len(labels)
