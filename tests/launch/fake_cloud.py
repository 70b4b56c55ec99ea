"""A stand-in for Google Cloud and its gcloud command, for tests of launch/.

`gcloud` on the PATH is a few lines of bash that hand their arguments to a
FakeCloud in the test's process. It keeps queued resources and nodes, maps gs://
to a folder, runs what `ssh` is given in one home folder per worker, records
each call, and does the harm asked for in its public attributes.

Error texts follow the ones Google Cloud gives. What it does was taken from the
gcloud reference and from public issue reports, not from an account.
"""

import os
import pathlib
import shutil
import socketserver
import subprocess
import threading

CLIENT = r"""#!/bin/bash
exec 3<>"/dev/tcp/127.0.0.1/$(< "$FAKE_CLOUD/port")" || exit 1
{ printf '%s\0' "$#"; printf '%s\0' "$@"; } >&3
read -r status stream <&3
if [ "$stream" = err ]; then exec 1>&2; fi
cat <&3
exit "$status"
"""


class Refused(Exception):
  """What gcloud prints before it exits with a status other than 0."""

  def __init__(self, message, status=1):
    super().__init__(f"ERROR: (gcloud) {message}\n")
    self.status = status


class FakeCloud:
  """One project in one zone.

  Harm, each list consumed from its front, None meaning no harm:
    create_errors: messages of create calls.
    failed: per create, the reason with which the request becomes FAILED.
    preempt: per create, "waiting", "setup" (half way through the ssh call), a
      checkpoint step, or (step, "hidden"): only the node's state shows it.
    describe_errors: messages of describe calls of a queued resource.
    ssh_failures: {"node/worker": number of calls that fail}.
    without_address: number of looks at a node that list no worker.
  """

  def __init__(self, root, workers=2):
    self.root = root
    self.workers = workers
    self.calls = []
    self.requests = {}
    self.orphans = set()
    self.create_errors, self.failed, self.preempt = [], [], []
    self.describe_errors, self.ssh_failures = [], {}
    self.without_address = 0
    self.lock = threading.RLock()
    cloud = self

    class Handler(socketserver.StreamRequestHandler):
      """Answers one call of the gcloud command."""

      def handle(self):
        arguments = [self.argument()]
        arguments = [self.argument() for _ in range(int(arguments[0]))]
        try:
          status, stream, body = 0, "out", cloud.call(arguments)
        except Refused as refused:
          status, stream, body = refused.status, "err", str(refused).encode()
        try:
          self.wfile.write(f"{status} {stream}\n".encode() + body)
        except BrokenPipeError:
          return  # the caller was killed, which tests do

      def argument(self):
        text = bytearray()
        while (byte := self.rfile.read(1)) not in (b"\0", b""):
          text += byte
        return text.decode()

    socketserver.ThreadingTCPServer.daemon_threads = True
    self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    (root / "port").write_text(str(self.server.server_address[1]))
    threading.Thread(
      target=self.server.serve_forever, args=(0.02,), daemon=True
    ).start()

  def close(self):
    self.server.shutdown()
    self.server.server_close()
    self.kill(f"FAKE_CLOUD={self.root}\0")

  def call(self, arguments):
    """Does what one gcloud command line says; returns its standard output."""
    words = [a for a in arguments if not a.startswith("--")]
    flags = dict(
      a[2:].partition("=")[::2] for a in arguments if a.startswith("--")
    )
    with self.lock:
      self.calls.append(" ".join(arguments))
      match words:
        case ["config", "get-value", "project"]:
          return b"default-project\n"
        case ["storage", "cp", source, target]:
          return self.copy(source, target)
        case ["storage", "cat", url]:
          return self.existing(url).read_bytes()
        case ["storage", "rsync", url, folder]:
          shutil.copytree(self.existing(url), folder, dirs_exist_ok=True)
          return b""
        case ["storage", "ls", url]:
          return f"{self.existing(url)}\n".encode()
        case ["compute", "tpus", "queued-resources", "create", name]:
          return self.create(name, flags)
        case ["compute", "tpus", "queued-resources", "describe", name]:
          return self.describe(name, flags)
        case ["compute", "tpus", "queued-resources", "delete", name]:
          return self.delete(name, flags)
        case ["compute", "tpus", "tpu-vm", "describe", name]:
          state, workers = self.node(name)[name], self.workers
          if self.without_address > 0:
            self.without_address -= 1
            workers = 0
          return f"{state}\t{workers}\n".encode()
        case ["compute", "tpus", "tpu-vm", "delete", name]:
          self.node(name)
          self.orphans.remove(name)
          return b""
        case ["compute", "tpus", "accelerator-types", "list"]:
          return b"v5litepod-4\nv5litepod-16\nv5litepod-64\nv6e-32\n"
        case ["compute", "tpus", "tpu-vm", "ssh", name]:
          begin = self.begin_ssh(name, flags)
        case _:
          raise Refused(f"Invalid choice: {words}", 2)
    return self.end_ssh(*begin)  # unlocked: what it runs calls gcloud itself

  # -------------------------------------------------------------- storage

  def existing(self, url):
    path = self.root / "gs" / url.removeprefix("gs://")
    if not path.exists():
      raise Refused("One or more URLs matched no objects.")
    return path

  def copy(self, source, target):
    bucket = self.root / "gs" / target.removeprefix("gs://").split("/")[0]
    if not bucket.is_dir():
      raise Refused(
        f"HTTPError 404: The bucket gs://{bucket.name} does not exist."
      )
    path = self.root / "gs" / target.removeprefix("gs://")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    return b""

  # ---------------------------------------------------------- queued resource

  def create(self, name, flags):
    if name in self.requests:
      raise Refused(f"ALREADY_EXISTS: Resource '{name}' already exists")
    error = self.create_errors.pop(0) if self.create_errors else None
    if error:
      raise Refused(error)
    planned = [flags.get("node-id")]
    if "node-count" in flags:
      planned = [
        f"{flags['node-prefix']}-{index}"
        for index in range(int(flags["node-count"]))
      ]
    reason = self.failed.pop(0) if self.failed else None
    self.requests[name] = {
      "state": "FAILED" if reason else "WAITING_FOR_RESOURCES",
      "reason": reason,
      "planned": planned,
      "nodes": {},
      "preempt": self.preempt.pop(0) if self.preempt else None,
    }
    return b""

  def request(self, name):
    if name not in self.requests:
      raise Refused(
        f"NOT_FOUND: Resource 'queuedResources/{name}' was not found"
      )
    return self.requests[name]

  def describe(self, name, flags):
    if self.describe_errors:
      raise Refused(self.describe_errors.pop(0))
    request = self.request(name)
    if "failedData" in flags["format"]:
      return f"{request['reason']}\n".encode()
    answer, harm = request["state"], request["preempt"]
    if answer == "WAITING_FOR_RESOURCES" and harm == "waiting":
      request["state"] = "SUSPENDED"
    elif answer == "WAITING_FOR_RESOURCES":
      self.provision(request)
    elif answer == "ACTIVE" and harm not in (None, "setup"):
      hidden = isinstance(harm, tuple)
      if self.step() >= (harm[0] if hidden else harm) and self.training(request):
        self.take_away(request, hidden)
    return f"{answer}\n".encode()

  def provision(self, request):
    request["state"] = "ACTIVE"
    request["nodes"] = dict.fromkeys(request["planned"], "READY")
    for node in request["planned"]:
      for worker in range(self.workers):
        (self.root / "vms" / node / str(worker)).mkdir(parents=True)
    harm = request["preempt"]
    if harm not in (None, "setup"):
      # The trainer waits at this step, which makes the moment exact.
      self.hold(harm[0] if isinstance(harm, tuple) else harm)

  def take_away(self, request, hidden=False):
    """Preempts: every process ends at once, every disk is lost."""
    for node in request["nodes"]:
      self.kill(f"FAKE_VM={self.root}/vms/{node}/")
      shutil.rmtree(self.root / "vms" / node)
    request["preempt"] = None
    self.hold(None)
    if hidden:
      request["nodes"][request["planned"][0]] = "PREEMPTED"
    else:
      request["state"], request["nodes"] = "SUSPENDED", {}

  def delete(self, name, flags):
    request = self.request(name)
    if request["nodes"] and "force" not in flags:
      raise Refused("FAILED_PRECONDITION: the queued resource has nodes")
    for node in request["nodes"]:
      self.kill(f"FAKE_VM={self.root}/vms/{node}/")
      shutil.rmtree(self.root / "vms" / node, ignore_errors=True)
    del self.requests[name]
    return b""

  # --------------------------------------------------------------- workers

  def node(self, name):
    """The {node: state} in which this node is."""
    for request in self.requests.values():
      if name in request["nodes"]:
        return request["nodes"]
    if name in self.orphans:
      return {name: "READY"}
    raise Refused(f"NOT_FOUND: Resource 'nodes/{name}' was not found")

  def begin_ssh(self, name, flags):
    if self.node(name)[name] != "READY":
      raise Refused(f"The TPU is in state {self.node(name)[name]}.")
    for request in self.requests.values():
      if (
        name in request["nodes"]
        and request["preempt"] == "setup"
        and flags["command"].endswith("worker.sh setup")
      ):
        self.take_away(request)
        raise Refused("[/usr/bin/ssh] exited with return code [255].", 255)
    workers = range(self.workers)
    if flags["worker"] != "all":
      workers = [int(flags["worker"])]
    running, silent = [], False
    for worker in workers:
      out = subprocess.PIPE
      if "output-directory" in flags:
        out = open(f"{flags['output-directory']}/{worker}.log", "w")
      place = f"{name}/{worker}"
      if self.ssh_failures.get(place, 0) > 0:
        self.ssh_failures[place] -= 1
        silent = True
        if out != subprocess.PIPE:
          out.write("ssh: connect to host 10.0.0.2: Connection timed out\n")
          out.close()
        continue
      home = f"{self.root}/vms/{place}"
      running.append(
        subprocess.Popen(
          ["bash", "-c", flags["command"]],
          cwd=home,
          stdin=subprocess.DEVNULL,
          stdout=out,
          stderr=subprocess.STDOUT,
          env={
            "HOME": home,
            "FAKE_VM": f"{home}/",
            "TMUX_TMPDIR": home,
            "FAKE_CLOUD": str(self.root),
            "FAKE_HOST": f"{name}-w-{worker}",
            "PATH": f"{self.root}/vm_bin:{self.root}/bin:/usr/bin:/bin",
          },
        )
      )
    return running, silent

  def end_ssh(self, running, silent):
    output = b"".join(p.communicate()[0] or b"" for p in running)
    failed = [p.returncode for p in running if p.returncode]
    if failed or silent:
      raise Refused(output.decode(), failed[0] if failed else 255)
    return output

  def kill(self, mark):
    """Ends the processes whose environment holds the mark."""
    # Twice none: one that is just being born shows no environment yet.
    quiet = 0
    while quiet < 2:
      quiet = 0 if self.kill_once(mark.encode()) else quiet + 1

  def kill_once(self, mark):
    found = False
    for entry in pathlib.Path("/proc").iterdir():
      if entry.name.isdigit():
        try:
          if mark in (entry / "environ").read_bytes():
            found = True
            os.kill(int(entry.name), 9)
        except OSError:
          continue  # it ended by itself, or is not ours to see
    return found

  # --------------------------------------------------------------- trainer

  def step(self):
    path = self.root / "gs/bucket/run/checkpoint"
    return int(path.read_text()) if path.exists() else 0

  def training(self, request):
    """Whether the trainer has begun on every worker of a request."""
    return all(
      (self.root / "vms" / node / str(worker) / "training").exists()
      for node in request["planned"]
      for worker in range(self.workers)
    )

  def hold(self, step):
    """Makes the trainer wait once it has made this step; None: no longer."""
    if step is None:
      (self.root / "hold").unlink(missing_ok=True)
    else:
      (self.root / "hold").write_text(str(step))
