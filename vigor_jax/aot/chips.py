"""Accelerator topologies that are compiled for without being there.

Memory limits are what the compiler reports as available; peaks are the
vendor's published figures per chip (cloud.google.com/tpu/docs).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

GIB = 2**30


class TopologyError(ValueError):
  """No such topology, or nothing to compile for it with."""


@dataclasses.dataclass(frozen=True)
class Chip:
  """One generation; rates are per device as the compiler sees it.

  Attributes:
    hbm: bytes available to a program.
    flops: bfloat16 multiply-adds, two operations each, per second.
    bandwidth: HBM bytes per second.
    wire: bytes per second in and out over all links between chips.
    clock: cycles per second of the compiler's estimates.
    accelerator: name for TPU_ACCELERATOR_TYPE.
  """

  hbm: float
  flops: float
  bandwidth: float
  wire: float
  clock: float
  accelerator: str


CHIPS = {
    "v4": Chip(15.25 * GIB, 137.5e12, 614e9, 150e9, 1.05e9, "v4-8"),
    "v5e": Chip(15.75 * GIB, 197e12, 819e9, 200e9, 1.5e9, "v5litepod-16"),
    "v5p": Chip(95.73 * GIB, 459e12, 2765e9, 600e9, 1.75e9, "v5p-8"),
    "v6e": Chip(31.24 * GIB, 918e12, 1640e9, 400e9, 1.75e9, "v6e-16"),
    # For tests of the walker on a machine without libtpu; no TPU figures.
    "cpu": Chip(16 * GIB, 1e11, 2e10, 1e10, 1e9, ""),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices to compile for.

  Attributes:
    name: "v5e:4x4".
    chip: figures of one device.
    devices: as jax names them.
  """

  name: str
  chip: Chip
  devices: Sequence[Any]


def parse(name: str) -> tuple[str, tuple[int, ...]]:
  """("v5e", (4, 4)) of "v5e:4x4".

  Raises:
    TopologyError: another form or an unknown generation.
  """
  generation, _, shape = name.partition(":")
  if generation not in CHIPS:
    raise TopologyError(f"topology {name!r}: unknown generation; known: "
                        + ", ".join(CHIPS))
  sides = shape.split("x")
  if not all(side.isdigit() and int(side) > 0 for side in sides):
    raise TopologyError(f"topology {name!r}: expected a form like 'v5e:4x4', "
                        "'v5p:2x2x2' or 'cpu:8'")
  return generation, tuple(map(int, sides))


def prepare(name: str) -> None:
  """Sets the environment in which `topology(name)` works.

  Call it before jax is imported: libtpu looks for a real TPU otherwise, and
  the number of CPU devices is fixed at the start.

  Raises:
    TopologyError: libtpu is not installed.
  """
  generation, shape = parse(name)
  os.environ["JAX_PLATFORMS"] = "cpu"
  if generation == "cpu":
    flag = f"--xla_force_host_platform_device_count={math.prod(shape)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    return
  if importlib.util.find_spec("libtpu") is None:
    raise TopologyError(
        f"compiling for {name} needs the TPU compiler, libtpu, which is not "
        "installed (no TPU is needed): pip install 'vigor-jax[tpu]', on "
        "Linux with Python 3.12 for jax 0.12; or try --topology=cpu:8")
  os.environ.update(
      TPU_SKIP_MDS_QUERY="1",
      TPU_ACCELERATOR_TYPE=CHIPS[generation].accelerator,
      TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0",
      ALLOW_MULTIPLE_LIBTPU_LOAD="1")


def topology(name: str) -> Topology:
  """The devices of a topology, after `prepare`.

  Raises:
    TopologyError: the generation has no such shape.
  """
  import jax
  from jax.experimental import topologies
  generation, shape = parse(name)
  chip = CHIPS[generation]
  if generation == "cpu":
    devices = jax.devices("cpu")
    if len(devices) != math.prod(shape):
      raise TopologyError(f"topology {name!r}: jax has {len(devices)} CPU "
                          "devices; call chips.prepare before it is imported")
    return Topology(name, chip, devices)
  try:
    described = topologies.get_topology_desc(platform="tpu",
                                             topology_name=name)
  except Exception as error:  # The plugin's errors have no class of their own.
    raise TopologyError(f"topology {name!r}: {str(error).splitlines()[0]}"
                        ) from error
  return Topology(name, chip, list(described.devices))


@contextlib.contextmanager
def uncached() -> Iterator[None]:
  """Without the persistent cache: programs for other machines do not load."""
  import jax
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
