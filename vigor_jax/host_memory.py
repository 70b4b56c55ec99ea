"""Keeps freed memory in the process, for JAX on CPU.

XLA's CPU backend allocates a program's temporaries anew at every call. glibc
gives such large blocks back to the kernel each time, and the next call pays
for fresh zeroed pages: a third of a small model's update, more under a
hypervisor. Telling malloc to keep them costs nothing but the peak staying
resident.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep() -> bool:
  """Sets glibc's malloc to keep freed memory; False where there is no glibc.

  Call it before the first large allocation.
  """
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return False
  limit = 2**31 - 1
  return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, limit)
              and mallopt(_M_TOP_PAD, 64 << 20))
