"""Builds report.html from run folders: `python -m vigor_jax.report DIR...`.

One file that opens anywhere: images are inlined, and lie as PNGs in plots/
beside it. DIR is a run's folder or a comparison's. One run gets its own report;
several are compared. A run may be unfinished, cut off in the middle of a line,
or lack keys: what cannot be shown is named at the end, not passed over.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import sys

from vigor_jax import endings
from vigor_jax import metrics
from vigor_jax.reporting import page as page_lib
from vigor_jax.reporting import pooled
from vigor_jax.reporting import runs as run_folders
from vigor_jax.reporting import several
from vigor_jax.reporting import single

COMPARE_FILE = "compare.json"


def build(run_dirs: Sequence, out=None) -> pathlib.Path:
  """Writes report.html and plots/*.png for run folders.

  Args:
    run_dirs: folders of runs, of comparisons (with compare.json), or both.
    out: folder to write to; by default the only folder given, or the deepest
      one that contains all of them.

  Returns:
    The path of report.html. It is replaced in one move, so a reader never
    sees half of it.

  Raises:
    ValueError: no folder, or one that holds neither a run nor a comparison.
  """
  if not run_dirs:
    raise ValueError("a report needs at least one run folder")
  folders = [pathlib.Path(d) for d in run_dirs]
  if out is None:
    out = (
      folders[0]
      if len(folders) == 1
      else os.path.commonpath([f.resolve() for f in folders])
    )
  out = pathlib.Path(out)
  runs, record = _collect(folders)
  pictures = page_lib.Pictures(out)
  if len(runs) == 1 and not record:
    title, body = single.render(runs[0], pictures)
  else:
    title, body = several.render(runs, record, pictures)
  path = out / "report.html"
  metrics.atomic_write(str(path), page_lib.document(title, body))
  return path


def _collect(folders) -> tuple[list[run_folders.Run], dict]:
  """All runs, those of comparisons labelled, and the first comparison."""
  runs, record = [], {}
  for folder in folders:
    if not folder.is_dir():
      raise ValueError(f"{folder} is not a folder")
    if not (folder / COMPARE_FILE).exists():
      runs.append(run_folders.read(folder))
      continue
    found = _read_comparison(folder / COMPARE_FILE)
    record = record or found
    for cell in found["cells"]:
      place = folder / cell["folder"]
      if cell["state"] == "done" and place.is_dir():
        run = run_folders.read(place)
        run.label, run.variant = cell["label"], cell["variant"]
        runs.append(run)
  pooled.label_runs(runs)
  return runs, record


def _read_comparison(path: pathlib.Path) -> dict:
  """A comparison's record.

  Raises:
    ValueError: the file is damaged; names it.
  """
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
    for cell in found["cells"]:
      for name in ("folder", "state", "label", "variant"):
        if not isinstance(cell[name], str):
          raise ValueError(f"{name} is {cell[name]!r}")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{path}: cannot be read ({type(error).__name__}: {error}); the same "
      "vigor_jax.compare command writes it again"
    ) from error
  return found


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m vigor_jax.report",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "folders", nargs="+", metavar="DIR", help="a run's or a comparison's folder"
  )
  parser.add_argument(
    "--output", "--out", help="folder for report.html and plots/"
  )
  args = parser.parse_args(argv)
  with endings.one_message():
    print(build(args.folders, args.output))
  return 0


if __name__ == "__main__":
  sys.exit(main())
