"""Runs inside the sandbox, as its first process: one child per test.

`sandbox` sends this file's text to a bare interpreter; it imports nothing of
the project, and little else: a start is paid for every program. The request
(marshal) comes on standard input, frames go to standard output: one line of
JSON, then the bytes it announces. Expected values are not in the
request: what a program could find here are its own text and the tests' inputs.

As process 1 of its namespace it cannot be killed from within, it adopts every
orphan, and `kill(-1)` reaches all that a test left behind. Without a namespace
(the unsafe mode) it is an ordinary process and ends the test's session.
"""

import errno
import gc
import io
import marshal
import os
import resource
import select
import sys
import time

import _json
import _signal as signal  # The C module: `signal` itself imports much.

_COMMON = (
  "bisect",
  "collections",
  "copy",
  "functools",
  "heapq",
  "itertools",
  "math",
  "numpy",
  "operator",
  "random",
  "re",
  "string",
  "threading",
  "typing",
)
_TICK = 0.02  # Seconds between looks at /proc.
_HZ = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ISOLATED = os.getpid() == 1


class _Unencodable(Exception):
  pass


def _make_encoder():
  """Plain data to JSON with nothing that the program can replace.

  Every builtin is bound here, before the program runs; values are read by the
  base types' own methods, so that no method of a returned object is called.
  """
  quote = _json.encode_basestring_ascii
  fail = _Unencodable
  t_int, t_float, t_str, t_list, t_tuple, t_dict = (
    int,
    float,
    str,
    list,
    tuple,
    dict,
  )
  type_of, get_mro = type, type.__dict__["__mro__"].__get__
  int_text, float_text = int.__repr__, float.__repr__
  in_list, in_tuple = list.__iter__, tuple.__iter__
  items_of, as_text = dict.items, str.__str__
  join = ",".join
  constants = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
  true, false, none = True, False, None

  def encode(value, depth=0):
    if depth > 100:
      raise fail()
    if value is none:
      return "null"
    if value is true:
      return "true"
    if value is false:
      return "false"
    bases = get_mro(type_of(value))
    if t_int in bases:
      return int_text(value)
    if t_float in bases:
      text = float_text(value)
      return constants.get(text, text)
    if t_str in bases:
      return quote(as_text(value))
    if t_list in bases:
      parts = [encode(v, depth + 1) for v in in_list(value)]
      return "[" + join(parts) + "]"
    if t_tuple in bases:
      parts = [encode(v, depth + 1) for v in in_tuple(value)]
      return "[" + join(parts) + "]"
    if t_dict in bases:
      parts = [
        "[" + encode(k, depth + 1) + "," + encode(v, depth + 1) + "]"
        for k, v in items_of(value)
      ]
      return '{"dict":[' + join(parts) + "]}"
    name = type_of(value).__module__ + "." + type_of(value).__qualname__
    if name == "collections.deque":
      return encode([*value], depth + 1)
    if name[:6] == "numpy.":
      return encode(value.tolist(), depth + 1)
    raise fail()

  return encode


_encode = _make_encoder()


def _limit(kind, value):
  hard = resource.getrlimit(kind)[1]
  if hard != resource.RLIM_INFINITY:
    value = min(value, hard)
  resource.setrlimit(kind, (value, value))


def _confine(limits):
  """Resource limits of the child, and its own user where that is possible."""
  cpu = int(limits["cpu"]) + 1
  _limit(resource.RLIMIT_CPU, cpu)
  _limit(resource.RLIMIT_AS, limits["memory"])
  _limit(resource.RLIMIT_FSIZE, limits["file_size"])
  _limit(resource.RLIMIT_NOFILE, limits["files"])
  _limit(resource.RLIMIT_CORE, 0)
  # Deep recursion in C code; the address space has room for this much.
  soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
  room = 100 << 20
  if soft != resource.RLIM_INFINITY and soft < room:
    room = room if hard == resource.RLIM_INFINITY else min(room, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (room, hard))
  if limits["count"]:
    _limit(resource.RLIMIT_NPROC, limits["processes"])
  else:
    # The driver must get its turn to count and end a flood of processes.
    os.nice(15)
  if limits["uid"]:
    os.setgroups([])
    os.setgid(limits["uid"])
    os.setuid(limits["uid"])


def _standard_streams():
  """Text streams as an interpreter has them when it starts in UTF-8."""
  sys.stdin = io.TextIOWrapper(
    io.BufferedReader(io.FileIO(0, "r")), "utf-8", newline=None
  )
  sys.stdout = io.TextIOWrapper(
    io.BufferedWriter(io.FileIO(1, "w")), "utf-8", newline="\n"
  )
  sys.stderr = io.TextIOWrapper(
    io.BufferedWriter(io.FileIO(2, "w")),
    "utf-8",
    "backslashreplace",
    newline="\n",
    line_buffering=True,
  )
  sys.__stdin__, sys.__stdout__, sys.__stderr__ = (
    sys.stdin,
    sys.stdout,
    sys.stderr,
  )


def _run_program(program, call, result_fd, encode):
  """Runs the program as `__main__`; returns the exit status."""
  module = type(sys)("__main__")
  module.__dict__["__builtins__"] = __builtins__
  sys.modules["__main__"] = module
  sys.argv = ["program.py"]
  write, leave = os.write, os._exit
  status = 0
  try:
    code = compile(program, "program.py", "exec", dont_inherit=True)
    exec(code, module.__dict__)
    if call is not None:
      value = eval(
        compile(call, "call", "eval", dont_inherit=True), module.__dict__
      )
      data = encode(value).encode("ascii")
      while data:
        data = data[write(result_fd, data) :]
  except SystemExit as stop:
    if stop.code is None:
      status = 0
    elif isinstance(stop.code, int):
      status = stop.code & 0xFF
    else:
      status = 1
      sys.stderr.write(f"{stop.code}\n")
  except BaseException:
    status = 1
    import traceback

    traceback.print_exc()
  # What an interpreter does at its end.
  try:
    if "threading" in sys.modules:
      sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
      sys.modules["atexit"]._run_exitfuncs()
    sys.stdout.flush()
  except BaseException:
    status = status or 1
  leave(status)


def _child(request, test, limits, stdin_fd, ends, folder):
  """Never returns."""
  try:
    if not _ISOLATED:
      os.setsid()
    out, err, result = ends
    os.dup2(stdin_fd, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.dup2(result, 3)
    os.closerange(4, 1024)
    os.chdir(folder)
    _confine(limits)
    _standard_streams()
    program, call = request["program"], test.get("call")
    if call is None:
      os.close(3)
    else:
      # What a called function prints is not its answer.
      os.dup2(2, 1)
    encode = _encode
  except BaseException as error:
    os.write(2, f"judge: {error!r}".encode())
    os._exit(254)
  _run_program(program, call, 3, encode)


class _Usage:
  """What all processes of the sandbox but this one use together."""

  __slots__ = ("cpu", "memory", "processes")

  def __init__(self, session):
    self.cpu = self.memory = self.processes = 0
    for name in os.listdir("/proc"):
      if not name.isdigit() or name == "1":
        continue
      try:
        with open(f"/proc/{name}/stat", "rb") as stat:
          fields = stat.read().rpartition(b")")[2].split()
        if not _ISOLATED and int(fields[3]) != session:
          continue
        with open(f"/proc/{name}/statm", "rb") as statm:
          pages = statm.read().split()
      except (FileNotFoundError, ProcessLookupError, PermissionError):
        continue  # It has just ended.
      self.processes += 1
      self.cpu += sum(map(int, fields[11:15])) / _HZ
      # Shared pages are mostly the interpreter's own.
      self.memory += (int(pages[1]) - int(pages[2])) * _PAGE


def _waited(pid):
  """Seconds a process was ready to run and had no core; None if not known."""
  try:
    with open(f"/proc/{pid}/schedstat", "rb") as sched:
      return int(sched.read().split()[1]) / 1e9
  except (OSError, IndexError):
    return None


def _kill_all(session):
  """Ends and reaps every process of the test."""
  while True:
    try:
      if _ISOLATED:
        os.kill(-1, signal.SIGKILL)  # All of the namespace but process 1.
      else:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
      pass
    try:
      while os.waitpid(-1, 0):
        pass
    except ChildProcessError:
      return
    except InterruptedError:
      continue


def _judge_fault(message):
  text = _json.encode_basestring_ascii(message)
  os.write(1, f'{{"fault": {text}}}\n'.encode())
  os._exit(3)


class _Streams:
  """Bounded readers of the child's output, errors and result."""

  def __init__(self, limit):
    self.pipes = [os.pipe() for _ in range(3)]
    self.data = [bytearray(), bytearray(), bytearray()]
    self.caps = (limit, 1 << 14, limit)
    self.over = False
    self.fds = {read: i for i, (read, _) in enumerate(self.pipes)}
    for read in self.fds:
      os.set_blocking(read, False)

  def close_writers(self):
    for _, write in self.pipes:
      os.close(write)

  def read(self, fd):
    """Takes what is there; False at the end of the stream."""
    i = self.fds[fd]
    while True:
      try:
        chunk = os.read(fd, 1 << 16)
      except BlockingIOError:
        return True
      if not chunk:
        return False
      buffer = self.data[i]
      room = self.caps[i] - len(buffer)
      buffer += chunk[: max(0, room)]
      if len(chunk) > room and i != 1:
        self.over = True
        return True

  def drain(self):
    for fd in self.fds:
      if not self.over:
        self.read(fd)
      os.close(fd)


def _watch(pid, streams, limits, start):
  """Waits for a test; returns (limit hit or None, wait status, CPU seconds)."""
  poll = select.poll()
  for fd in streams.fds:
    poll.register(fd, select.POLLIN)
  try:
    ended = os.pidfd_open(pid)
    poll.register(ended, select.POLLIN)
  except OSError:
    ended = -1
  next_look = start + _TICK
  reason = None
  status = None
  cpu = 0.0
  while reason is None:
    now = time.monotonic()
    for fd, _ in poll.poll(max(1, (next_look - now) * 1000)):
      if fd != ended and not streams.read(fd):
        poll.unregister(fd)
    if streams.over:
      reason = "output"
    done, raw, usage = os.wait4(pid, os.WNOHANG)
    if done:
      status = raw
      cpu = usage.ru_utime + usage.ru_stime
      break
    now = time.monotonic()
    if now >= next_look:
      next_look = now + _TICK
      seen = _Usage(pid)
      wall = now - start
      cpu = seen.cpu
      if seen.cpu > limits["cpu"]:
        reason = "cpu"
      elif seen.processes > limits["processes"]:
        reason = "processes"
      elif seen.memory > limits["memory"]:
        reason = "memory"
      else:
        waited = _waited(pid)
        if waited is None:
          late = wall > limits["wall"]
        else:
          late = wall - waited > limits["idle_wall"] or wall > limits["longest"]
        if late:
          reason = "wall"
  if ended >= 0:
    os.close(ended)
  if status is not None and cpu > limits["cpu"]:
    reason = "cpu"
  return reason, status, cpu


def _remove(folder):
  """Deletes a folder of the program's making, whatever is in it."""
  for root, folders, files in os.walk(folder, topdown=False):
    for name in files:
      os.unlink(os.path.join(root, name))
    for name in folders:
      path = os.path.join(root, name)
      if os.path.islink(path):
        os.unlink(path)
      else:
        os.rmdir(path)
  os.rmdir(folder)


def _run_test(index, request, test, limits):
  folder = f"{request['scratch']}/{index}"
  os.mkdir(folder)
  os.chmod(folder, 0o777)
  stdin_fd = os.memfd_create("stdin")
  data = memoryview(test.get("stdin", "").encode("utf-8", "surrogatepass"))
  while data:
    data = data[os.write(stdin_fd, data) :]
  os.lseek(stdin_fd, 0, os.SEEK_SET)
  streams = _Streams(limits["output"])
  start = time.monotonic()
  try:
    pid = os.fork()
  except OSError as error:
    _judge_fault(f"fork: {error}")
  if pid == 0:
    _child(
      request, test, limits, stdin_fd, [w for _, w in streams.pipes], folder
    )
  streams.close_writers()
  os.close(stdin_fd)
  reason, status, cpu = _watch(pid, streams, limits, start)
  _kill_all(pid)
  streams.drain()
  if streams.over:
    reason = "output"
  code = None
  if reason is None:
    if os.WIFSIGNALED(status):
      number = os.WTERMSIG(status)
      reason = "cpu" if number == signal.SIGXCPU else "signal"
      code = number
    else:
      code = os.WEXITSTATUS(status)
      reason = "exit"
  out, err, result = streams.data
  if code == 254 and bytes(err).startswith(b"judge: "):
    _judge_fault(bytes(err).decode("utf-8", "replace"))
  if reason != "exit":  # What was cut off can never match.
    out, result = b"", b""
  sizes = f"[{len(out)}, {len(result)}, {len(err)}]"
  header = (
    f'{{"test": {index}, "reason": "{reason}",'
    f' "code": {"null" if code is None else code}, "cpu": {cpu:.3f},'
    f' "wall": {time.monotonic() - start:.3f}, "sizes": {sizes}}}\n'
  )
  _remove(folder)
  frame = header.encode() + out + result + err
  view = memoryview(frame)
  while view:
    view = view[os.write(1, view) :]


def _import_ahead(program):
  """Imports here, once, what the program will import in each of its tests."""
  for name in _COMMON:
    if name in program:
      try:
        __import__(name)
      except ImportError:
        continue  # The program will see it.


def main():
  with os.fdopen(0, "rb", closefd=False) as stream:
    request = marshal.loads(stream.read())
  null = os.open("/dev/null", os.O_RDONLY)
  os.dup2(null, 0)
  limits = request["limits"]
  sys.path[:] = [p for p in sys.path if p] + request["packages"]
  sys.set_int_max_str_digits(0)
  # `exit` and `quit` come with `site`, which is not loaded.
  import _sitebuiltins
  import builtins

  builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
  builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
  gc.collect()
  gc.freeze()  # The child's collector leaves the judge's pages shared.
  _import_ahead(request["program"])
  os.write(1, b'{"ready": true}\n')
  for index, test in enumerate(request["tests"]):
    _run_test(index, request, test, limits)
  os.write(1, b'{"done": true}\n')


try:
  main()
except OSError as fault:
  # The judge went away (it had its verdict): not worth a traceback.
  if fault.errno != errno.EPIPE:
    raise
