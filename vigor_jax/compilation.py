"""Counts compilations, and keeps compiled programs between processes.

A steady-state compilation is a bug in a codebase of static shapes, so the
trainer logs the count every step and stops if it grows after warm-up.
"""

from __future__ import annotations

import os

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration: float, **kwargs) -> None:
  del duration, kwargs
  global _count
  if event == _EVENT:
    _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def count() -> int:
  """Programs this process compiled (or fetched from the cache) so far."""
  return _count


def keep_programs(folder: str) -> None:
  """Uses `folder` as JAX's persistent compilation cache.

  A user's own setting (jax_compilation_cache_dir) is left alone; without
  permission to write there, programs are compiled anew.
  """
  if jax.config.jax_compilation_cache_dir:
    return
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError:
    return
  jax.config.update("jax_compilation_cache_dir", os.path.abspath(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
