"""The facts of a GPU that legality checks and the cost model need."""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP = 32  # threads
MOST_THREADS = 1024  # of a block
PORTABLE_CLUSTER = 8  # blocks that every GPU with clusters supports
ALLOCATION = 512  # bytes; CUDA's allocators return multiples of it
PARTS = 4  # of a multiprocessor, each with a quarter of the registers and one issue slot per cycle
REGISTER_STEP, SHARED_STEP = 8, 128  # registers per thread and bytes of shared memory per block are multiples


@dataclass(frozen=True)
class Device:
    """Facts of one GPU.

    Attributes
    ----------
    name : str
        Marketing name, as the driver prints it.
    compute_capability : tuple of int
        (major, minor), for instance (9, 0).
    multiprocessors : int
    l2_bytes : int
        Size of the level-2 cache, bytes.
    bandwidth : float
        Peak DRAM bandwidth, bytes per second (memory clock times bus width).
    shared_memory_per_block : int
        Largest dynamic shared memory of one block after opting in, bytes.
    shared_memory_per_multiprocessor : int
        Bytes. The driver reserves ``shared_memory_reserved`` of them per resident block.
    shared_memory_reserved : int
    registers_per_multiprocessor : int
        32-bit registers.
    threads_per_multiprocessor, blocks_per_multiprocessor : int
        Maximum number that are resident at a time.
    largest_cluster : int
        Blocks in the largest thread-block cluster; 1 if the GPU has no clusters. More than 8 is not portable: a GPU
        whose processing clusters have few multiprocessors may refuse the launch.
    clock : float
        Frequency of the multiprocessors under load, Hz. Only the cost model uses it.
    processing_clusters : tuple of int
        Multiprocessors of each graphics processing cluster. All blocks of a thread-block cluster run in one of them.
        Empty if unknown; then the GPU counts as one.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    bandwidth: float
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    shared_memory_reserved: int = 1024
    registers_per_multiprocessor: int = 65536
    threads_per_multiprocessor: int = 2048
    blocks_per_multiprocessor: int = 32
    largest_cluster: int = 1
    clock: float = 1.755e9
    processing_clusters: tuple[int, ...] = ()

    def resident_clusters(self, cluster: int, resident: int) -> int:
        """Thread-block clusters that are resident at a time.

        Each block of a cluster takes a multiprocessor of its own. Multiprocessors that are left over in a processing
        cluster stay empty, even if several blocks fit on one: an H100 starts a second wave of clusters then.

        Parameters
        ----------
        cluster : int
            Blocks per cluster.
        resident : int
            Blocks that are resident on one multiprocessor at a time.
        """
        return sum(count // cluster * resident for count in self.processing_clusters or (self.multiprocessors,))

    def fitting_blocks(self, threads: int, registers: int, shared_bytes: int = 0, parts: int = 1) -> int:
        """Blocks of a kernel that are resident on one multiprocessor at a time; 0 if none fits.

        Source of the steps in which registers and shared memory are allocated: NVIDIA's occupancy calculator.

        Parameters
        ----------
        threads : int
            Threads per block.
        registers : int
            Registers per thread.
        shared_bytes : int
            Shared memory per block, bytes, without the part that the driver reserves.
        parts : int
            Parts of a multiprocessor, each with an equal share of the registers; NVIDIA's occupancy calculator uses
            `PARTS`. With 1 the result may be a few blocks too large if a block has fewer warps than `PARTS`.
        """
        warps = -(-threads // WARP)
        of_warp = -(-max(registers, 1) // REGISTER_STEP) * REGISTER_STEP * WARP
        shared = -(-(shared_bytes + self.shared_memory_reserved) // SHARED_STEP) * SHARED_STEP
        return min(
            self.blocks_per_multiprocessor,
            self.threads_per_multiprocessor // (warps * WARP),
            parts * (self.registers_per_multiprocessor // parts // of_warp) // warps,
            self.shared_memory_per_multiprocessor // max(shared, 1),
        )

    @property
    def architecture(self) -> str:
        """The compiler's name of the architecture, for instance ``sm_90``."""
        return "sm_{}{}".format(*self.compute_capability)


KIB, MIB = 1024, 1024 * 1024

# Sources: CUDA C++ programming guide, table "technical specifications per compute capability"; the vendor's data
# sheets for multiprocessors, bandwidth, L2 and clock (A100: the 80 GB SXM module; H100: the SXM module). The L2 of a
# B200 is what its driver reports. The clocks are boost clocks; that of H100 and H200 is the one under load that
# published microbenchmarks report.
#
# The sizes of the processing clusters differ between GPUs of one model, because other multiprocessors are disabled. The
# tuples are cautious. H100 and H200: 15 clusters of 8 blocks that fill a multiprocessor each are certain, and some GPUs
# run no more (accel-sim, gpu-app-collection, pull request 87). B200 and RTX 5090: estimates from the complete chips
# (8 of 20 and 11 of 16 multiprocessors). On a GPU, the driver is asked (`cunorm.executors.gpu`).
_HOPPER_CLUSTERS = (14, 16, 16, 16, 16, 18, 18, 18)

KNOWN: dict[str, Device] = {
    "A100": Device(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        multiprocessors=108,
        l2_bytes=40 * MIB,
        bandwidth=2.039e12,
        clock=1.41e9,
        shared_memory_per_block=163 * KIB,
        shared_memory_per_multiprocessor=164 * KIB,
    ),
    "RTX 4090": Device(
        name="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        multiprocessors=128,
        l2_bytes=72 * MIB,
        bandwidth=1.008e12,
        clock=2.52e9,
        shared_memory_per_block=99 * KIB,
        shared_memory_per_multiprocessor=100 * KIB,
        threads_per_multiprocessor=1536,
        blocks_per_multiprocessor=24,
    ),
    "H100": Device(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        multiprocessors=132,
        l2_bytes=50 * MIB,
        bandwidth=3.352e12,
        shared_memory_per_block=227 * KIB,
        shared_memory_per_multiprocessor=228 * KIB,
        largest_cluster=16,
        processing_clusters=_HOPPER_CLUSTERS,
    ),
    "H200": Device(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        multiprocessors=132,
        l2_bytes=60 * MIB,
        bandwidth=4.8e12,
        shared_memory_per_block=227 * KIB,
        shared_memory_per_multiprocessor=228 * KIB,
        largest_cluster=16,
        processing_clusters=_HOPPER_CLUSTERS,
    ),
    "B200": Device(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        multiprocessors=148,
        l2_bytes=132_644_864,
        bandwidth=8.0e12,
        clock=1.85e9,
        shared_memory_per_block=227 * KIB,
        shared_memory_per_multiprocessor=228 * KIB,
        largest_cluster=16,
        processing_clusters=(14, 18, 18, 18, 20, 20, 20, 20),
    ),
    "RTX 5090": Device(
        name="NVIDIA GeForce RTX 5090",
        compute_capability=(12, 0),
        multiprocessors=170,
        l2_bytes=96 * MIB,
        bandwidth=1.792e12,
        clock=2.407e9,
        shared_memory_per_block=99 * KIB,
        shared_memory_per_multiprocessor=100 * KIB,
        threads_per_multiprocessor=1536,
        blocks_per_multiprocessor=24,
        largest_cluster=8,
        processing_clusters=(14, 14, 14, 16, 16, 16, 16, 16, 16, 16, 16),
    ),
}


def known(name: str, asked_by: str = "device", others: str = "") -> Device:
    """The device with that short name.

    Parameters
    ----------
    name : str
        Case, spaces, hyphens and underscores do not matter: ``"rtx4090"``.
    asked_by : str
        The argument or environment variable that contains the name, for the error message.
    others : str
        Other values that the argument may have, for the error message.

    Raises
    ------
    ValueError
        If no such device is known; the text lists the known devices.
    """
    plain = re.sub(r"[-_ ]", "", name).upper()
    for short, device in KNOWN.items():
        if plain == short.replace(" ", ""):
            return device
    raise ValueError(f"{asked_by}: {name!r}, expected {others}one of {', '.join(KNOWN)}")
