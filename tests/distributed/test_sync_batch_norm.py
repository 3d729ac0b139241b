"""Synchronised BatchNorm in one process: ranks as threads, exchanges, wrong arguments, the engines' own errors."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from cunorm import distributed
from cunorm.core.arrays import DTYPES
from cunorm.distributed import (
    LocalEngine,
    MpiEngine,
    NcclEngine,
    SavedStatistics,
    TorchEngine,
    sync_batch_norm,
    sync_batch_norm_backward,
)
from cunorm.distributed.engines import _wait_for_stream
from tests.distributed.batches import Batch, batches, check
from tests.distributed.processes import missing
from tests.distributed.threads import Threads
from tests.support.paths import environment
from tests.test_examples import failures, public


class Recording(LocalEngine):
    """An engine of one process that records its exchanges."""

    def __init__(self) -> None:
        self.exchanges: list[tuple[str, str, tuple[int, ...]]] = []

    def all_gather(self, send: Any, receive: Any) -> None:
        self.exchanges.append(("all_gather", str(send.dtype), send.shape))
        super().all_gather(send, receive)

    def all_reduce(self, buffer: Any) -> None:
        self.exchanges.append(("all_reduce", str(buffer.dtype), buffer.shape))


def sample(dtype: str = "float32", shape: tuple[int, ...] = (4, 6, 3)) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(DTYPES[dtype])


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", list(batches(1)), ids=str)
def test_one_process_has_the_results_of_its_batch(batch: Batch) -> None:
    check(batch, 0, LocalEngine())


def test_threads_have_the_results_of_the_whole_batch() -> None:
    for batch in list(batches(3))[::5]:
        threads = Threads(3)
        assert threads.run(lambda engine, rank, batch=batch: check(batch, rank, engine)) == [None] * 3


def test_counts_are_exact() -> None:
    """A float32 count of 2**24 + 1 would be 2**24."""
    _, saved = sync_batch_norm(np.zeros((1, 1, 2**24 + 1), np.float16), engine=LocalEngine())
    assert saved.counts.tolist() == [2**24 + 1]


def test_no_channels() -> None:
    x = np.empty((2, 0, 3), np.float32)
    y, saved = sync_batch_norm(x, engine=LocalEngine())
    dx, dgamma, dbeta = sync_batch_norm_backward(x, x, saved, engine=LocalEngine())
    assert y.shape == dx.shape == x.shape
    assert dgamma.shape == dbeta.shape == (0,)


def test_the_mask_selects_gradients() -> None:
    x, engine = sample(), LocalEngine()
    _, saved = sync_batch_norm(x, engine=engine)
    every = sync_batch_norm_backward(x, x, saved, engine=engine)
    for number in range(8):
        mask = tuple(bool(number >> bit & 1) for bit in range(3))
        found = sync_batch_norm_backward(x, x, saved, engine=engine, output_mask=mask)
        for wanted, came, want in zip(mask, found, every, strict=True):
            assert (came is not None) == wanted
            assert came is None or came.tobytes() == want.tobytes()


# ---- exchanges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "wide", "words"), [("bfloat16", "float32", 2 + 6), ("float64", "float64", 2 + 12)])
def test_one_exchange_forward_and_one_backward(dtype: str, wide: str, words: int) -> None:
    x, engine = sample(dtype), Recording()
    _, saved = sync_batch_norm(x, engine=engine)
    assert engine.exchanges == [("all_gather", "int64", (words,))]
    sync_batch_norm_backward(x, x, saved, engine=engine)
    assert engine.exchanges[1:] == [("all_reduce", wide, (2, 6))]
    sync_batch_norm_backward(x, x, saved, engine=engine, output_mask=(False, True, True))
    assert len(engine.exchanges) == 2


@pytest.mark.parametrize(("dtype", "channels"), [("float64", 6), ("float16", 6), ("float32", 5), ("float32", 8)])
def test_another_x_on_another_rank_is_an_error_on_all_ranks(dtype: str, channels: int) -> None:
    def work(engine: Any, rank: int) -> None:
        x = sample(dtype, (2, channels)) if rank else sample("float32", (2, 6))
        running = np.full(x.shape[1], 3, np.float32)
        try:
            sync_batch_norm(x, running_mean=running, engine=engine)
        finally:
            assert (running == 3).all()

    first, second = Threads(2).run(work)
    assert isinstance(first, ValueError) and isinstance(second, ValueError)
    mine, other = "float32 with 6 channels", f"{dtype} with {channels}"
    expected = "; expected the same dtype and number of channels on all processes"
    assert str(first) == f"x: {mine}, but process 1 has {other}{expected}"
    assert str(second) == f"x: {other} channels, but process 0 has float32 with 6{expected}"


def test_an_error_of_the_engine_changes_nothing() -> None:
    class Broken(LocalEngine):
        def all_gather(self, send: Any, receive: Any) -> None:
            raise RuntimeError("connection closed by peer")

    running = [np.full(6, 3, np.float32) for _ in range(2)]
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        sync_batch_norm(sample(), None, None, *running, engine=Broken())
    assert (np.stack(running) == 3).all()


# ---- wrong arguments ------------------------------------------------------------------------------------------------

RIGHT: dict[str, Any] = {"x": sample(), "gamma": np.ones(6, np.float32), "beta": np.ones(6, np.float32)}
RIGHT |= {"running_mean": np.full(6, 3, np.float32), "running_var": np.full(6, 3, np.float32)}
READ_ONLY = np.full(6, 3, np.float32)
READ_ONLY.flags.writeable = False


def saved_of(channels: int, world: int) -> SavedStatistics:
    return SavedStatistics(*np.ones((2, channels), np.float32), np.ones(world, np.int64))


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("x", [[1.0]], TypeError, "x: list, expected a cupy.ndarray or a numpy.ndarray"),
        ("x", np.ones((2, 6), np.int32), TypeError, "x: dtype int32, expected float16"),
        ("x", np.ones(6, np.float32), ValueError, r"x: shape \(6,\), expected 2 to 8 dimensions"),
        ("gamma", np.ones(5, np.float32), ValueError, r"gamma: shape \(5,\), expected \(6,\)"),
        ("beta", np.ones(6, np.float64), TypeError, "beta: dtype float64, expected float32"),
        ("beta", 1.0, TypeError, "beta: float, expected a"),
        ("running_mean", np.ones((6, 1), np.float32), ValueError, r"running_mean: shape \(6, 1\), expected \(6,\)"),
        ("running_var", np.ones(6, int), TypeError, "running_var: dtype int64, expected float16"),
        ("running_var", READ_ONLY, ValueError, "running_var: read-only"),
        ("eps", -1.0, ValueError, "eps: -1.0, expected a finite number of at least 0"),
        ("momentum", 2, ValueError, "momentum: 2.0, expected a number from 0 to 1"),
        ("engine", None, TypeError, "engine: None, expected an object with size, all_gather and all_reduce"),
    ],
)
def test_wrong_arguments_of_the_forward(name: str, value: Any, error: type[Exception], says: str) -> None:
    """They are errors before the exchange, and nothing is written."""
    engine = Recording()
    with pytest.raises(error, match=f"^{says}"):
        sync_batch_norm(**{**RIGHT, "engine": engine, name: value})
    assert engine.exchanges == []
    assert (RIGHT["running_mean"] == 3).all() and (RIGHT["running_var"] == 3).all()


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("dy", sample(shape=(4, 6)), ValueError, r"dy: shape \(4, 6\), expected \(4, 6, 3\)"),
        ("dy", sample("float64"), TypeError, "dy: dtype float64, expected float32"),
        ("x", 3, TypeError, "x: int, expected a cupy.ndarray"),
        ("saved", (1, 2, 3), TypeError, r"saved: \(1, 2, 3\), expected the SavedStatistics that sync_batch_norm"),
        ("saved", saved_of(6, 2), ValueError, r"saved.counts: shape \(2,\), expected \(1,\), one count per process"),
        ("saved", saved_of(5, 1), ValueError, r"mean: shape \(5,\), expected \(6,\)"),
        ("gamma", np.ones(5, np.float32), ValueError, r"gamma: shape \(5,\), expected \(6,\)"),
        ("output_mask", (1, 1, 1), TypeError, "output_mask: contains 1, expected bools"),
        ("output_mask", (True, True), ValueError, "output_mask: 2 flags, expected 3 for dx, dgamma, dbeta"),
        ("engine", 2, TypeError, "engine: 2, expected an object with size"),
    ],
)
def test_wrong_arguments_of_the_backward(name: str, value: Any, error: type[Exception], says: str) -> None:
    x = sample()
    engine = Recording()
    _, saved = sync_batch_norm(x, engine=engine)
    right = {"dy": x, "x": x, "saved": saved, "gamma": None, "engine": engine}
    with pytest.raises(error, match=f"^{says}"):
        sync_batch_norm_backward(**{**right, name: value})
    assert len(engine.exchanges) == 1


@pytest.mark.parametrize(("first", "second"), [
    ("running_mean", "beta"), ("running_var", "gamma"), ("running_mean", "x"), ("running_var", "running_mean"),
])  # fmt: skip
def test_running_statistics_that_overlap_another_array_are_refused_before_the_exchange(first: str, second: str) -> None:
    """They are written before gamma, beta and x are read for y."""
    x, engine = sample(), Recording()
    memory = x if second == "x" else np.ones(7, np.float32)
    made: dict[str, Any] = {name: np.ones(6, np.float32) for name in ("gamma", "beta", "running_mean", "running_var")}
    given = made | {"x": x, second: x if second == "x" else memory[1:], first: memory.reshape(-1)[:6]}
    before = memory.copy()
    with pytest.raises(ValueError, match=f"^{first}: overlaps {second} in memory; pass separate arrays$"):
        sync_batch_norm(**given, engine=engine)
    np.testing.assert_array_equal(memory, before)
    assert engine.exchanges == []


def test_the_class_of_an_engine_is_no_engine() -> None:
    with pytest.raises(TypeError, match=r"^engine: <class .*LocalEngine'>, expected an object with size"):
        sync_batch_norm(sample(), engine=LocalEngine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import cunorm.torch", r"cunorm\.torch needs PyTorch; type: pip install 'cunorm\[torch\]'"),
        ("cunorm.distributed.TorchEngine()", r"TorchEngine: .*; type: pip install 'cunorm\[torch\]'"),
        ("cunorm.distributed.MpiEngine()", r"MpiEngine: .*; type: pip install 'cunorm\[mpi\]'"),
    ],
)
def test_a_missing_library_is_named_with_its_command(code: str, sentence: str) -> None:
    without = "import sys, cunorm; sys.modules |= dict.fromkeys(('torch', 'mpi4py'))\n"
    done = subprocess.run([sys.executable, "-c", without + code], env=environment(), capture_output=True, text=True)
    assert re.search(f"^ModuleNotFoundError: {sentence}$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (1.5, TypeError)])
def test_the_size_of_an_engine_is_a_positive_int(size: Any, error: type[Exception]) -> None:
    engine = LocalEngine()
    engine.size = size
    with pytest.raises(error, match=r"^engine\.size: "):
        sync_batch_norm(sample(), engine=engine)


# ---- engines --------------------------------------------------------------------------------------------------------


class FakeBackend:
    """The calls of cupyx.distributed.NCCLBackend."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        self.calls.append(("all_gather", in_array, out_array, count, stream))

    def all_reduce(self, in_array: Any, out_array: Any, op: str = "sum", stream: Any = None) -> None:
        self.calls.append(("all_reduce", in_array, out_array, op, stream))


def test_nccl_engine_passes_the_arrays_to_its_backend() -> None:
    backend = FakeBackend()
    engine = NcclEngine(backend, 2)
    send, receive, buffer = np.ones(3), np.ones((2, 3)), np.ones(4)
    engine.all_gather(send, receive)
    engine.all_reduce(buffer)
    assert engine.size == 2
    assert [tuple(map(id, call)) for call in backend.calls] == [
        tuple(map(id, call))
        for call in (("all_gather", send, receive, 3, None), ("all_reduce", buffer, buffer, "sum", None))
    ]


def test_the_backend_of_cupyx_has_the_calls_of_the_fake() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # CuPy warns that it finds no NCCL
            from cupyx.distributed import NCCLBackend
    except ImportError as error:  # cupy.cuda.nccl without the library
        pytest.skip(f"cupyx.distributed cannot be imported: {error}")
    for name in ("all_gather", "all_reduce"):
        real, fake = (inspect.signature(getattr(one, name)) for one in (NCCLBackend, FakeBackend))
        assert list(real.parameters) == list(fake.parameters)


def test_wrong_arguments_of_nccl_engine() -> None:
    with pytest.raises(TypeError, match=r"^backend: 3, expected the result of cupyx\.distributed\.init_process_group"):
        NcclEngine(3, 2)
    with pytest.raises(ValueError, match=r"^size: 0, expected at least 1"):
        NcclEngine(FakeBackend(), 0)


@pytest.mark.skipif(missing("gloo") is not None, reason=missing("gloo") or "")
def test_torch_engine_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        TorchEngine()


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_wrong_arguments_of_mpi_engine() -> None:
    with pytest.raises(TypeError, match=r"^comm: 3, expected an mpi4py\.MPI\.Intracomm"):
        MpiEngine(3)


# ---- examples -------------------------------------------------------------------------------------------------------

NEEDS = {"TorchEngine": "gloo", "MpiEngine": "mpi"}


@pytest.mark.parametrize("found", list(public(distributed)), ids=lambda found: found.__name__)
def test_every_public_docstring_has_an_example_that_runs(found: Any) -> None:
    if (reason := missing(NEEDS[found.__name__]) if found.__name__ in NEEDS else None) is not None:
        pytest.skip(reason)
    docstring = inspect.getdoc(found)
    assert docstring is not None
    assert "\nExamples\n--------\n" in docstring
    assert not failures(docstring, found.__name__)


# ---- GPU ------------------------------------------------------------------------------------------------------------


def test_the_host_does_not_wait_for_a_gpu(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    filled: list[Any] = []
    monkeypatch.setattr(cupy, "copyto", lambda array, value: filled.append((array.shape, value)))

    class Engine(Recording):
        size = 2

        def all_gather(self, send: Any, receive: Any) -> None:
            assert driver.current == 1
            self.exchanges.append(("all_gather", str(send.dtype), receive.shape))

    engine = Engine()
    x, gamma = driver.array((4, 6, 3), device=1), driver.array((6,), device=1)
    y, saved = sync_batch_norm(x, gamma, None, driver.array((6,), device=1), engine=engine)
    dx, dgamma, _ = sync_batch_norm_backward(y, x, saved, gamma, engine=engine)
    assert driver.synchronised == [] and driver.sent == []
    assert engine.exchanges == [("all_gather", "int64", (2, 7)), ("all_reduce", "float32", (2, 6))]
    assert filled == [((1,), 12)]
    assert {array.data.device_id for array in (y, dx, dgamma, *saved)} == {1}
    assert saved.counts.shape == (2,)
    _wait_for_stream(x)
    assert len(driver.synchronised) == 1


@pytest.mark.gpu
def test_cupy_arrays_of_one_process() -> None:
    import cupy

    x = sample()
    expected = sync_batch_norm(x, engine=LocalEngine())
    y, saved = sync_batch_norm(cupy.asarray(x), engine=LocalEngine())
    dx, _, _ = sync_batch_norm_backward(y, cupy.asarray(x), saved, engine=LocalEngine())
    want, _, _ = sync_batch_norm_backward(expected[0], x, expected[1], engine=LocalEngine())
    np.testing.assert_allclose(y.get(), expected[0], atol=1e-5)
    np.testing.assert_allclose(dx.get(), want, atol=1e-5)
    assert saved.counts.get().tolist() == [12]
