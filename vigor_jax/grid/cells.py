"""The cells of a comparison: a rule on a stream with a seed, one run each.

Everything that a cell needs to know about itself is in its folder, so a grid
is continued by the command that started it: finished cells are recognised by
their run's summary.json, begun ones are resumed by the run's own checkpoints,
and a folder that holds a run with another configuration is refused before any
work.
"""

import dataclasses
import difflib
import json
import pathlib
import re
from collections.abc import Sequence

from vigor_jax import allocation
from vigor_jax import config as configuration
from vigor_jax import train
from vigor_jax import workdirs

CELLS_FOLDER = workdirs.CELLS
_MOST_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of the grid.

  name: of its folder below the comparison's cells/.
  label: the rule as the user wrote it, such as "uniform:prompts_per_step=64".
  variant: the stream's name; "" when the comparison has one stream only.
  config: the resolved configuration as JSON.
  """

  name: str
  label: str
  variant: str
  seed: int
  config: str

  @property
  def text(self) -> str:
    """How progress lines and errors call it."""
    variant = f"{self.variant} " if self.variant else ""
    return f"{variant}{self.label} seed {self.seed}"


# --------------------------------------------------------------- what was asked


def split_entries(text: str) -> list[str]:
  """Splits at commas outside brackets: "a,b:c=(1,2)" has two entries."""
  entries = re.split(r",(?![^(\[]*[)\]])", text)
  return [entry.strip() for entry in entries if entry.strip()]


def parse_entry(entry: str) -> tuple[str, dict[str, str]]:
  """Parses "name:field=value:field=value".

  Fields are separated by ":" or ";". A piece without "=" belongs to the value
  before it, so that values such as module:function need no quoting.

  Returns:
    (name or "", {field: text}).
  """
  pieces = re.split("[:;]", entry)
  name = "" if "=" in pieces[0] else pieces.pop(0).strip()
  overrides: dict[str, str] = {}
  last = None
  for piece in pieces:
    field, equals, value = piece.partition("=")
    if equals:
      last = field.strip()
      if last in overrides:
        raise configuration.ConfigError(f"{entry!r} sets {last} twice")
      overrides[last] = value.strip()
    elif last is None:
      raise configuration.ConfigError(
        f"{entry!r}: expected name:field=value, got {piece!r} after the name"
      )
    else:
      overrides[last] += f":{piece.strip()}"
  return name, overrides


def _slug(text: str) -> str:
  return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")


def _check_rule(entry: str, name: str) -> None:
  if name in allocation.REGISTRY:
    return
  if not name or re.fullmatch(r"[\w.]+=.*", entry):
    raise configuration.ConfigError(
      f"--allocators: {entry!r} names no allocator; overrides of one "
      "allocator are joined to it by ':' as in vigor:rounds=2:keep=0.25"
    )
  near = difflib.get_close_matches(name, allocation.REGISTRY, n=1)
  hint = f"; did you mean {near[0]!r}?" if near else ""
  raise configuration.ConfigError(
    f"--allocators: there is no allocator {name!r}{hint}; there are "
    f"{', '.join(allocation.REGISTRY)}"
  )


def _check_own(flag: str, entry: str, overrides: dict[str, str]) -> None:
  """Refuses fields that the grid sets itself, since they would be lost."""
  for field, place in (
    ("seed", "--seeds"),
    ("allocation.name", "the name in --allocators"),
  ):
    if field in overrides:
      raise configuration.ConfigError(
        f"{flag}: {entry!r} sets {field}, which is for {place} to say"
      )


def parse_seeds(text: str) -> list[int]:
  """Parses "0,1,2" or "0-4"."""
  seeds: list[int] = []
  for entry in split_entries(text):
    span = re.fullmatch(r"(\d+)(?:-(\d+))?", entry)
    if not span:
      raise configuration.ConfigError(
        f"--seeds: expected whole numbers such as 0,1,2 or 0-4, got {entry!r}"
      )
    if len(entry) > 21:
      raise configuration.ConfigError(
        f"--seeds: a seed has ten digits at most, got {entry[:30]!r}"
      )
    first, last = int(span[1]), int(span[2] or span[1])
    if last - first >= _MOST_SEEDS:
      raise configuration.ConfigError(
        f"--seeds: {entry!r} are more than {_MOST_SEEDS} seeds"
      )
    seeds += range(first, last + 1)
  if not seeds or len(set(seeds)) != len(seeds):
    raise configuration.ConfigError(
      f"--seeds: expected different seeds, got {text!r}"
    )
  return seeds


def make(
  config, allocators: str, seeds: str, variants: Sequence[str]
) -> list[Cell]:
  """The grid, in the order it is run: stream by stream, seed by seed.

  Args:
    config: the validated base configuration.
    allocators: comma-separated entries "name:field=value".
    seeds: comma-separated seeds or ranges.
    variants: entries "[name:]field=value:..." that each describe a stream.

  Raises:
    ConfigError: an entry that cannot be run, named as it was written.
  """
  rules = []
  for entry in split_entries(allocators):
    name, overrides = parse_entry(entry)
    _check_rule(entry, name)
    _check_own("--allocators", entry, overrides)
    rules.append((entry, {"allocation.name": name, **overrides}))
  if not rules:
    raise configuration.ConfigError("--allocators is empty")
  streams = [("", {})]
  entries = [e for text in variants for e in split_entries(text)]
  if entries:
    streams = []
    for entry in entries:
      name, overrides = parse_entry(entry)
      if not overrides:
        raise configuration.ConfigError(
          f"--variants: {entry!r} changes nothing; expected field=value"
        )
      _check_own("--variants", entry, overrides)
      streams.append((name or "-".join(overrides.values()), overrides))
  for what, names in (
    ("--allocators", [label for label, _ in rules]),
    ("--variants", [name for name, _ in streams]),
  ):
    twice = [n for n in names if names.count(n) > 1]
    if twice:
      raise configuration.ConfigError(f"{what}: {twice[0]!r} is there twice")
  cells = []
  for variant, stream in streams:
    for seed in parse_seeds(seeds):
      for label, overrides in rules:
        try:
          resolved = configuration.validate(
            configuration.with_overrides(
              config, {**stream, **overrides, "seed": seed}
            )
          )
        except configuration.ConfigError as error:
          where = f"{variant} {label}".strip()
          raise configuration.ConfigError(f"{where}: {error}") from error
        name = f"{_slug(label)}-seed{seed}"
        if variant:
          name = f"{_slug(variant)}-{name}"
        cells.append(
          Cell(name, label, variant, seed, configuration.to_json(resolved))
        )
  names = [cell.name for cell in cells]
  clash = [cell for cell in cells if names.count(cell.name) > 1]
  if clash:
    raise configuration.ConfigError(
      f"{clash[0].text} and {clash[1].text} would share the folder "
      f"{clash[0].name}"
    )
  return cells


# ------------------------------------------------------------- what is on disk


def folder(workdir, cell: Cell) -> pathlib.Path:
  return pathlib.Path(workdir) / CELLS_FOLDER / cell.name


def config_of(cell: Cell):
  """The cell's configuration."""
  return configuration.from_json(cell.config, cell.name)


def is_finished(workdir, cell: Cell) -> bool:
  """Whether the cell's run is complete.

  Raises:
    ConfigError: its folder holds a run with another configuration.
  """
  place = folder(workdir, cell)
  path = place / "config.json"
  if not path.exists():
    return False
  config = config_of(cell)
  configuration.check_resume(
    configuration.read_json(path), config, str(place)
  )
  path = place / train.SUMMARY_FILE
  if not path.exists():
    return False
  try:
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary["total_steps"] == config.total_steps
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise configuration.ConfigError(
      f"{path}: cannot be read ({error!r}); delete it, and the same command "
      "writes it again"
    ) from error
