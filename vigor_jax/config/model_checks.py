"""What the sections `model` and `mesh` of a configuration must satisfy."""

import math
import re

from vigor_jax.config.defaults import options_section
from vigor_jax.config.fields import ConfigError
from vigor_jax.config.legal import FAMILIES, check_choice, check_folder
from vigor_jax.policy import families
from vigor_jax.policy.sizes import TARGETS
from vigor_jax.policy.sizes import Adapters


def check(config):
  """Refuses sizes, adapters, a checkpoint or a mesh that cannot be."""
  sizes = config.model.sizes
  if sizes.heads % sizes.kv_heads:
    legal = [k for k in range(1, sizes.heads + 1) if sizes.heads % k == 0]
    raise ConfigError(
      f"model.sizes.kv_heads: {sizes.kv_heads} does not divide "
      f"model.sizes.heads={sizes.heads}; legal: {legal}"
    )
  if sizes.head_dim % 2:
    raise ConfigError(
      "model.sizes.head_dim: rotary positions need an even number, got "
      f"{sizes.head_dim}"
    )
  try:
    families.rope_from_text(sizes.rope_scaling)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  _check_lora(config)
  if config.mesh.data == 0:
    raise ConfigError("mesh.data: must be -1 (the rest) or at least 1, got 0")
  if config.model.checkpoint:
    _check_pretrained(config.model.checkpoint)
  else:
    _check_family(config)
  if config.topology and not re.fullmatch(
    r"[a-z][a-z0-9]*:\d+x\d+(x\d+)?", config.topology
  ):
    raise ConfigError(
      f"topology: expected a form like 'v5e:4x4' or 'v5p:2x2x2', got "
      f"{config.topology!r}"
    )


def _check_lora(config):
  lora = config.model.lora
  if not lora.rank:
    for name, default in options_section(Adapters).items():
      if lora[name] != default:
        raise ConfigError(
          f"model.lora.{name}={lora[name]!r} has no effect without "
          "model.lora.rank; legal: a rank of 1 or more (8 to 32 are usual), "
          f"or {default!r}"
        )
    return
  targets = lora.targets.split(",")
  for name in targets:
    check_choice("model.lora.targets", name, TARGETS)
  if len(set(targets)) < len(targets):
    raise ConfigError(
      f"model.lora.targets: {lora.targets!r} names a matrix twice"
    )
  if config.stage == "sft":
    raise ConfigError(
      f"model.lora.rank={lora.rank}: adapters are trained by stage=rl only; "
      "legal: 0 with stage=sft, or stage=rl with init_from"
    )


def _check_pretrained(path):
  """Refuses what is no checkpoint; whether it fits is known once it is read."""
  check_folder("model.checkpoint", path)
  if "://" not in path and not families.is_pretrained(path):
    raise ConfigError(
      f"model.checkpoint: {path!r} is neither a .gguf file nor a folder with "
      "config.json and safetensors; a run of vigor_jax goes into init_from"
    )


def _check_family(config):
  """Refuses sizes that contradict what the named family always has."""
  family, sizes = config.model.family, config.model.sizes
  for name, value in FAMILIES[family].items():
    if sizes[name] != value:
      raise ConfigError(
        f"model.sizes.{name}: the family {family!r} has {name}={value}, got "
        f"{sizes[name]}; legal: {value}, or model.family=tiny"
      )


def mesh_shape(config, num_devices: int) -> tuple[int, int, int]:
  """Returns the sizes of the axes (data, fsdp, tensor) for a device count.

  Raises:
    ConfigError: the axes do not multiply to the number of devices, or the
      configuration is meant for a topology with another number.
  """
  if config.topology:
    chips = math.prod(map(int, config.topology.split(":")[1].split("x")))
    # Generations differ: one or two devices a chip.
    if num_devices not in (chips, 2 * chips):
      raise ConfigError(
        f"topology: {config.topology} has {chips} chips, but {num_devices} "
        "devices were found; clear it with --config.topology= to run here"
      )
  data, fsdp, tensor = (config.mesh[n] for n in ("data", "fsdp", "tensor"))
  if data == -1 and num_devices % (fsdp * tensor) == 0:
    data = num_devices // (fsdp * tensor)
  if data * fsdp * tensor != num_devices:
    legal = [
      f"({num_devices // (f * tensor)}, {f}, {tensor})"
      for f in range(1, num_devices + 1)
      if num_devices % (f * tensor) == 0
    ]
    hint = f"; with mesh.tensor={tensor}: {', '.join(legal[:6])}"
    raise ConfigError(
      f"mesh: (data, fsdp, tensor) = ({data}, {fsdp}, {tensor}) does not "
      f"multiply to the {num_devices} devices found{hint if legal else ''}"
    )
  return data, fsdp, tensor
