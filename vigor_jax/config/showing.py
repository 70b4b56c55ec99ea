"""A configuration as people read it: what was chosen, or every field."""

from vigor_jax.config import fields
from vigor_jax.config.defaults import default_config

# Shown whatever their values: what a run is about.
_ALWAYS = (
  "seed", "total_steps", "prompts_per_step", "rollout_budget", "task.name",
  "allocation.name",
)  # fmt: skip
_WIDTH = 80


def pretty(config) -> str:
  """Returns every field as an aligned line, unused allocators left out."""
  lines = _used(config)
  width = max(map(len, lines))
  return "\n".join(f"{path:<{width}}  {v!r}" for path, v in lines.items())


def brief(config, kept: str) -> str:
  """Returns what differs from the defaults, a few lines, by section.

  The chosen rule's options are shown in full, and so are the few fields that
  say what a run is about.

      configuration (runs/a/config.json has all; 84 more are at their defaults)
        seed=0 total_steps=100 prompts_per_step=32 rollout_budget=256
        task        name=arithmetic difficulty=sparse_signal
        allocation  name=vigor vigor.rounds=4 vigor.keep=0.5

  Args:
    config: the resolved configuration.
    kept: the file that holds every field.
  """
  defaults = fields.flatten(default_config(config.task.name))
  own = f"allocation.{config.allocation.name}."
  values = _used(config)
  sections: dict[str, list[str]] = {"": []}
  for path in dict.fromkeys((*_ALWAYS, *values)):
    value = values[path]
    chosen = path in _ALWAYS or path.startswith(own)
    if chosen or value != defaults.get(path):
      section, dot, name = path.partition(".")
      if not dot:
        section, name = "", path
      sections.setdefault(section, []).append(f"{name}={_text(value)}")
  shown = sum(map(len, sections.values()))
  lines = [
    f"configuration ({kept} has all; {len(values) - shown} more are at their"
    " defaults)"
  ]
  indent = max(map(len, sections)) + 4
  for section, entries in sections.items():
    start = f"  {section:<{indent - 2}}" if section else "  "
    lines += _packed(start, entries)
  return "\n".join(lines)


def _used(config) -> dict:
  """{path: value} without the options of the rules that are not named."""
  chosen = ("name", "train_on", config.allocation.name)
  used = {}
  for path, value in fields.flatten(config).items():
    parts = path.split(".")
    if parts[0] != "allocation" or parts[1] in chosen:
      used[path] = value
  return used


def _text(value) -> str:
  """A value as the command line takes it; an empty one is seen as ''."""
  if isinstance(value, (tuple, list)):
    value = ",".join(map(str, value))
  return "''" if value == "" else str(value)


def _packed(start: str, entries: list[str]) -> list[str]:
  """Entries on as few lines as they fit, below one another."""
  lines, line = [], start + entries[0]
  for entry in entries[1:]:
    if len(line) + 1 + len(entry) > _WIDTH:
      lines.append(line)
      line = " " * len(start) + entry
    else:
      line += f" {entry}"
  return [*lines, line]
