"""numpy, which the core is faster with and can do without.

A call costs half of what it costs in torch, and with some thousand tokens the calls are most of
what there is. Where numpy is missing the formulae are used as they stand.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]
else:
    try:
        import numpy as np
    except ImportError:
        np = None
    Array = Any

HAS_NUMPY = bool(np)
VECTOR_EXPM1 = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether numpy has expm1 in vector instructions, so that it is as fast as exp."""
