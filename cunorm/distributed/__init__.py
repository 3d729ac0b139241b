"""BatchNorm over several processes: the public names. ``docs/guide/distributed.md`` describes what is exchanged."""

from .engines import Engine, LocalEngine, MpiEngine, NcclEngine, TorchEngine
from .sync_batch_norm import SavedStatistics, sync_batch_norm, sync_batch_norm_backward

__all__ = [
    "Engine",
    "LocalEngine",
    "MpiEngine",
    "NcclEngine",
    "SavedStatistics",
    "TorchEngine",
    "sync_batch_norm",
    "sync_batch_norm_backward",
]
