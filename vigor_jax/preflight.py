"""Compiles a configuration for a TPU slice without having one.

    python -m vigor_jax.preflight --config=configs/qwen2p5_3b_math.py \
        [--topology=v5e:4x4] [--workdir=runs/preflight]
        [--chip_hour_price=1.2] [--tune] [--flags=both]

Says per program what memory a chip needs against its limit, the FLOPs, HBM
and wire bytes, which of them binds, and about how long a step takes. Exit code
1, and the largest part by name, when it does not fit.
"""

from __future__ import annotations

import json
import os
import shlex
import sys

from absl import flags

from vigor_jax import endings
from vigor_jax.config import cli

_USAGE = """Compiles a configuration for a TPU slice that need not be there.

    python -m vigor_jax.preflight --config=FILE.py [--topology=v5e:4x4]
        [--workdir=DIR] [--chip_hour_price=1.2] [--tune] [--flags=both]
        [--config.mesh.fsdp=8 ...]
"""
_FLAG_SETS = ("default", "windowed_off", "both")


def _define(values) -> None:
  flags.DEFINE_string("topology", "", "slice, such as v5e:4x4, v5p:2x2x2, or "
                      "cpu:8 (to try preflight itself); empty: the "
                      "configuration's", flag_values=values)
  flags.DEFINE_float("chip_hour_price", 0.0, "dollars for a chip and hour",
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_float("completion_share", 0.5, "mean completion in parts of "
                     "sampling.max_new_tokens", lower_bound=0.01,
                     upper_bound=1.0, flag_values=values)
  flags.DEFINE_bool("tune", False, "find the most slots, then the most rows "
                    "of a micro-batch, that fit", flag_values=values)
  flags.DEFINE_enum("flags", "windowed_off", _FLAG_SETS, "compiler flags: "
                    "with windowed einsums (XLA's default), without, or both",
                    flag_values=values)


def main(argv) -> None:
  with endings.one_message(at_once=True):
    _main(argv)


def _main(argv) -> None:
  args = cli.parse_flags(argv, _USAGE, _define, needs_workdir=False)
  from vigor_jax.aot import chips
  name = args.flags.topology or args.config.topology
  if not name:
    raise chips.TopologyError(
        "--topology is missing, and the configuration names none; for "
        "example --topology=v5e:4x4")
  chips.prepare(name)  # Before jax is imported.
  reports = _reports(args, name)
  from vigor_jax.aot import page
  command = shlex.join(["python", "-m", "vigor_jax.preflight", *argv[1:]])
  if args.workdir:
    _write(args.workdir, reports, page.page(reports, command))
  # One set of flags that fits is enough: it can be chosen.
  sys.exit(0 if any(report.fits for report in reports) else 1)


def _reports(args, name: str) -> list:
  from vigor_jax.aot import chips
  from vigor_jax.aot import estimate
  from vigor_jax.aot import page
  from vigor_jax.aot import programs
  from vigor_jax.aot import tune
  topology = chips.topology(name)
  config = args.config
  vocab = programs.vocabulary_of(config)
  if not config.sampling.slots:
    config = programs.with_slots(config, topology, vocab)
    print(f"slots chosen: --config.sampling.slots={config.sampling.slots}",
          flush=True)
  say = lambda line: print(line, flush=True)
  share = args.flags.completion_share
  chosen = {"default": [("compiler defaults", None)],
            "windowed_off": [("no windowed einsum", estimate.WINDOWED_OFF)]}
  sets = chosen.get(args.flags.flags) or sum(chosen.values(), [])
  if name.startswith("cpu"):
    sets = [("CPU", None)]
  known, tuned_with = {}, sets[-1][1]
  if args.flags.tune:
    tuner = tune.Tuner(config, topology, vocab, share, tuned_with, say)
    tuner.run()
    config, known = tuner.config, tuner.results
  reports = []
  if config.policy.attention == "splash":
    say("policy.attention=splash: times leave its kernels out, of which the "
        "compiler has no estimate")
  for label, options in sets:
    say(f"{name}, {label}: compiling")
    plan = programs.Plan(config, topology.devices,
                         programs.workload_of(config, share), vocab)
    reports.append(estimate.report(
        plan, topology, options=options, flags=label,
        price=args.flags.chip_hour_price, say=say,
        known=known if options == tuned_with else {}))
    print(page.text(reports[-1]), flush=True)
  return reports


def _write(workdir: str, reports: list, page: str) -> None:
  from vigor_jax import metrics
  os.makedirs(workdir, exist_ok=True)
  text = json.dumps([r.to_json() for r in reports], indent=2)
  metrics.atomic_write(os.path.join(workdir, "preflight.json"), text + "\n")
  metrics.atomic_write(os.path.join(workdir, "preflight.html"), page)
  print(f"written: {os.path.join(workdir, 'preflight.html')}", flush=True)


if __name__ == "__main__":
  main(sys.argv)
