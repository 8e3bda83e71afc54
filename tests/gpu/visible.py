"""Which GPUs the processes that a test starts may see."""

import os


def visible(count: int) -> str:
    """CUDA_VISIBLE_DEVICES of the first ``count`` of the GPUs that this process sees."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    return ",".join(mine[:count])
