"""Lists the programs: `python -m vigor_jax`."""

import ast
import pathlib

from vigor_jax import endings

PROGRAMS = (
  "train", "compare", "report", "evaluate", "serve", "serve_client", "export",
  "config", "preflight", "lab", "tasks.fetch", "rewards.check",
)  # fmt: skip


def about(program: str) -> str:
  """The first line of a program's docstring, read without importing it."""
  path = pathlib.Path(__file__).parent / program.replace(".", "/")
  path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
  text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
  return text.splitlines()[0]


if __name__ == "__main__":
  with endings.one_message():
    print("Programs of vigor_jax; each takes --help:\n")
    for name in PROGRAMS:
      print(f"  python -m vigor_jax.{name:<14} {about(name)}")
