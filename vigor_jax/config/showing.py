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
  chosen, others = _chosen(config)
  return "\n".join([
    f"configuration ({kept} has all; {len(others)} more are at their defaults)",
    *_sections(chosen),
  ])


def rest(config) -> str:
  """Returns what `brief` leaves out, the same way: fields at their defaults."""
  return "\n".join(["at their defaults:", *_sections(_chosen(config)[1])])


def _chosen(config) -> tuple[dict, dict]:
  """({path: value} of what `brief` shows, the same of the others)."""
  defaults = fields.flatten(default_config(config.task.name))
  own = f"allocation.{config.allocation.name}."
  values = _used(config)
  values = {path: values[path] for path in dict.fromkeys((*_ALWAYS, *values))}
  chosen = {
    path: value
    for path, value in values.items()
    if path in _ALWAYS or path.startswith(own) or value != defaults.get(path)
  }
  return chosen, {p: v for p, v in values.items() if p not in chosen}


def _sections(values: dict) -> list[str]:
  """The lines of fields, packed by section."""
  sections: dict[str, list[str]] = {"": []}
  for path, value in values.items():
    section, dot, name = path.partition(".")
    if not dot:
      section, name = "", path
    sections.setdefault(section, []).append(f"{name}={_text(value)}")
  indent = max(map(len, sections)) + 4
  lines = []
  for section, entries in sections.items():
    if entries:
      start = f"  {section:<{indent - 2}}" if section else "  "
      lines += _packed(start, entries)
  return lines


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
