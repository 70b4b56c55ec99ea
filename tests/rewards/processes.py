"""Which processes descend from this one, read from /proc."""

import os


def _stat(pid):
  try:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
      name, _, rest = stat.read().partition("(")[2].rpartition(")")
  except OSError:
    return None
  fields = rest.split()
  return int(fields[1]), name, fields[0]


def descendants(root=None):
  """{pid: name} of the living descendants of `root` (this process)."""
  table = {}
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      found = _stat(entry)
      if found is not None and found[2] != "Z":
        table[int(entry)] = found
  out = {}
  parents = {os.getpid() if root is None else root}
  while parents:
    level = {p: t[1] for p, t in table.items() if t[0] in parents}
    out.update(level)
    parents = set(level)
  return out


def resident_bytes():
  """Memory this process holds."""
  with open("/proc/self/statm", encoding="ascii") as statm:
    return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
