"""Published times of kernels that can be simulated, with their sources.

The numbers are copied from the sources; nothing here was measured by this project. Rows that the calibration does not
use are ``held_out``. No row is left out because it disagrees.

`BANDWIDTHS` are the usable bandwidths of the DRAM, from the same sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulator.peers.calls import Call
from cunorm.ops.registry import OPS

LIGER = (
    "https://github.com/linkedin/Liger-Kernel/blob/ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c/"
    "benchmark/data/all_benchmark_data.csv"
)
CUDNN = (
    "https://github.com/NVIDIA/cudnn-frontend/blob/df73764adb98b7445b77662ce07b1ea434c8f3ee/"
    "benchmark/norms/results/h200/all_models_20260227_035147.csv"
)
GROUP = "https://github.com/sgl-project/sglang/pull/23938"
SUM = "https://github.com/pytorch/pytorch/issues/132964"
#: Bytes per second that `clock.GPUS` takes as the usable bandwidth of the DRAM. H100: the bytes that Liger's forward
#: LayerNorm of 8192 columns moves more than that of 4096, over the difference of their times. H200: the fastest forward
#: in the file of cudnn-frontend, torch.compile's RMSNorm of 8192 x 8192.
BANDWIDTHS = {"H100": 4096 * 4096 * 2 * 4 / (94.752e-6 - 51.040e-6), "H200": 4176.3e9}
#: What the published numbers include.
PROTOCOLS = {
    "do_bench": "CUDA events around one call, after 256 MB were written (triton.testing.do_bench); median",
    "profiler": "sum of the kernels' durations in PyTorch's profiler, after 256 MB were written; median",
}


@dataclass(frozen=True)
class Published:
    """A published time.

    Attributes
    ----------
    gpu : str
        ``"H100"`` (SXM, 80 GB HBM3) or ``"H200"``.
    call : Call
        What is simulated.
    seconds : float
    protocol : str
        A key of `PROTOCOLS`.
    source : str
        Address of the page or file that has the number.
    held_out : bool
        Whether the calibration leaves the row out.
    remark : str
        What differs between the published and the simulated call, if something does.
    elements : int
        Elements of the published call, to which `call` and one of half its size are extrapolated; 0: those of `call`.
    """

    gpu: str
    call: Call
    seconds: float
    protocol: str
    source: str
    held_out: bool = False
    remark: str = ""
    elements: int = 0


def _bytes(op: str, rows: int, columns: int) -> int:
    """The bytes by which the cudnn-frontend benchmark divides a time, for bfloat16 (its compute_bandwidth_bytes)."""
    size = rows * columns
    return {
        "layer_norm": 2 * (2 * size + 2 * columns) + 8 * rows,
        "layer_norm_backward": 2 * (3 * size + 3 * columns) + 8 * rows,
        "rms_norm": 2 * (2 * size + columns) + 4 * rows,
        "rms_norm_backward": 2 * (3 * size + 2 * columns) + 4 * rows,
    }[op]


def _liger(
    library: str, op: str, columns: int, milliseconds: float, held_out: bool = False, remark: str = ""
) -> Published:
    call = Call(library, op, (4096, columns), "float32")
    return Published("H100", call, milliseconds / 1e3, "do_bench", LIGER, held_out, remark)


def _cudnn(op: str, rows: int, columns: int, gigabytes: float, held_out: bool = False) -> Published:
    """A row of the benchmark of cudnn-frontend, from its bandwidth, which has more digits than its time."""
    remark = "the published call had just written dy, of which a part may have been in the L2 cache"
    call = Call("ATen", op, (rows, columns), "bfloat16")
    seconds = _bytes(op, rows, columns) / (gigabytes * 1e9)
    return Published("H200", call, seconds, "profiler", CUDNN, held_out, remark if OPS[op].is_backward else "")


_PYTHON = "several launches from Python: the host may be slower than the GPU at this size"
_UNEXPLAINED = (
    "not explained. The host's launches take about 120 us at smaller sizes, of which the GPU may have waited for a part"
)
_OLDER = "published with PyTorch of July 2025, whose kernel for the gradients of the parameters is another one"

ROWS: tuple[Published, ...] = (
    _liger("Liger", "layer_norm", 1024, 0.018848),
    _liger("Liger", "layer_norm", 2048, 0.029152, held_out=True),
    _liger("Liger", "layer_norm", 4096, 0.051040),
    _liger("Liger", "layer_norm", 8192, 0.094752, held_out=True),
    _liger("ATen", "layer_norm", 1024, 0.023584),
    _liger("ATen", "layer_norm", 2048, 0.037344, held_out=True),
    _liger("ATen", "layer_norm", 4096, 0.066176, held_out=True),
    _liger("ATen", "layer_norm", 8192, 0.152672, held_out=True),
    _liger("Liger", "layer_norm_backward", 1024, 0.120064, held_out=True, remark=_PYTHON),
    _liger("Liger", "layer_norm_backward", 2048, 0.120736, held_out=True, remark=_PYTHON),
    _liger("Liger", "layer_norm_backward", 4096, 0.166304, held_out=True, remark=_UNEXPLAINED),
    _liger("Liger", "layer_norm_backward", 8192, 0.312800, held_out=True, remark=_UNEXPLAINED),
    _liger("ATen", "layer_norm_backward", 1024, 0.060512, held_out=True, remark=_OLDER),
    _liger("ATen", "layer_norm_backward", 4096, 0.178816, held_out=True, remark=_OLDER),
    Published(
        "H100", Call("ATen", "sum", (4096, 8192), "float32"), 4 * 2**30 / 3136e9, "do_bench", SUM, True,
        "2^30 elements, published as 3136 GB/s; simulated with 2^25 and 2^24, extrapolated linearly", 2**30,
    ),
    Published(
        "H200", Call("ATen", "group_norm", (1, 128, 64, 256), "bfloat16", 32), 4714e-6, "do_bench", GROUP, True,
        "1 x 128 x 20 x 256 x 256 with a SiLU after it, which is not simulated; extrapolated linearly in the last axes",
        128 * 20 * 256 * 256,
    ),
    _cudnn("rms_norm", 8192, 128, 567.0),
    _cudnn("rms_norm", 16384, 128, 667.2, held_out=True),
    _cudnn("rms_norm", 4096, 2048, 2669.8),
    _cudnn("rms_norm", 2048, 4096, 2724.9, held_out=True),
    _cudnn("rms_norm", 4096, 6144, 2794.6, held_out=True),
    _cudnn("rms_norm", 8192, 4096, 3114.8, held_out=True),
    _cudnn("rms_norm", 4096, 8192, 2522.7, held_out=True),
    _cudnn("layer_norm", 1024, 12288, 1643.7),
    _cudnn("rms_norm_backward", 8192, 128, 231.5),
    _cudnn("rms_norm_backward", 16384, 128, 249.2, held_out=True),
    _cudnn("rms_norm_backward", 4096, 2048, 1446.4),
    _cudnn("rms_norm_backward", 2048, 4096, 1704.9, held_out=True),
    _cudnn("rms_norm_backward", 4096, 6144, 1448.3, held_out=True),
    _cudnn("rms_norm_backward", 8192, 4096, 1761.7, held_out=True),
    _cudnn("layer_norm_backward", 1024, 12288, 1245.0, held_out=True),
)  # fmt: skip
