"""Trains a policy with reinforcement learning from verifiable rewards.

    python -m vigor_jax.train --config=configs/arithmetic.py \
        --workdir=runs/arithmetic [--config.allocation.name=uniform ...]

The step, top to bottom: the allocator opens prompts and asks for rollouts
round by round, the sampler draws them, the reward judges them, and one policy
update is made on groups of whatever sizes came out. The same command
continues a run that was killed.
"""

from __future__ import annotations

import shlex
import sys
import time
from typing import Any

from absl import flags

from vigor_jax import endings
from vigor_jax.config import cli

_USAGE = """Trains a policy; the same command again continues the run.

    python -m vigor_jax.train --config=FILE.py --workdir=DIR
        [--config.allocation.name=uniform --config.seed=1 ...]
        [--print_config]
"""
SUMMARY_FILE = "summary.json"
# Steps in which a process may compile: the first pays for every program, the
# second for what donation changes.
WARM_UP_STEPS = 2


def train(config, workdir: str, *, quiet: bool = False, progress=None,
          command: str = "") -> dict[str, Any]:
  """Runs, or continues, the run of `config` in `workdir`.

  Args:
    config: validated configuration.
    workdir: the run's folder.
    quiet: nothing on the console.
    progress: a progress.Progress to use instead of the console's.
    command: what was typed, kept in command.txt for the report.

  Returns:
    The summary: cumulative rollouts, tokens, seconds, and the evaluation
    curve. A complete run returns its stored summary at once.

  Raises:
    ConfigError: the workdir belongs to a run with other settings, or to one
      that is further than total_steps.
    ValueError: another process is at work there.
    record.Interrupted: SIGTERM or Ctrl-C; the state is saved.
    ValueError: something wrong with the task, reward or data.
  """
  from vigor_jax import workdirs
  with workdirs.Lock(workdirs.local(workdir)) as lock:
    return _train(config, workdir, lock, quiet, progress, command)


def _train(config, workdir, lock, quiet, progress, command) -> dict[str, Any]:
  """`train`, which takes the workdir's lock and gives it back."""
  from vigor_jax import distributed
  from vigor_jax import record as record_lib
  from vigor_jax import workdirs
  team, folder = distributed.cluster(), workdirs.local(workdir)

  def look():
    lock.acquire()
    workdirs.Mirror(workdir).fetch()
    begun = record_lib.as_begun(config, folder).sampling
    return (record_lib.check_config(config, folder),
            record_lib.read_summary(folder), begun.slots, begun.memory)

  changes, summary, slots, memory = team.from_first(
      "what the workdir holds", look)
  config = config.copy_and_resolve_references()
  config.sampling.slots, config.sampling.memory = slots, memory
  config.lock()
  quiet = quiet or not team.primary
  for line in changes:
    if not quiet:
      print(line, flush=True)
  total = config.sft.steps if config.stage == "sft" else config.total_steps
  if summary is not None and summary["total_steps"] == total:
    if not quiet:
      print(f"{workdir} is complete ({total} steps); raise total_steps to go "
            "on", flush=True)
    return summary

  from vigor_jax import host_memory
  host_memory.keep()
  from vigor_jax import compilation
  from vigor_jax import experiment
  from vigor_jax.sampling import layout as layout_lib
  from vigor_jax.sampling import settings as settings_lib
  compilation.keep_programs(workdirs.beside(folder, ".programs"))
  with experiment.build(config) as parts:
    record = record_lib.Record(parts.config, workdir, quiet=quiet,
                               progress=progress, total_steps=total,
                               command=command)
    record.say(settings_lib.memory_line(parts.sampler.settings, parts.sizes,
                                        parts.placement))
    fallback = layout_lib.fallback_line(parts.placement, parts.sizes,
                                        parts.sampler.settings)
    if fallback:
      record.say(fallback)
    for line in parts.task.counts_text():
      record.say(f"data {line}")
    loop = _supervised if config.stage == "sft" else _reinforce
    try:
      with record_lib.Signals() as signals:
        return loop(parts, record, signals)
    finally:
      record.close()


def _stop_if_asked(record, signals, step: int, save) -> None:
  """On a signal to any process: saves `step` and raises Interrupted."""
  from vigor_jax import distributed
  from vigor_jax import record as record_lib
  team = distributed.cluster()
  team.watch()  # A first step is over: nothing slow is left to compile.
  signum = team.largest("signals", signals.signum)
  if signum:
    save(step)
    record.checkpoints.wait()
    raise record_lib.Interrupted(signum, step, record.name)


# ------------------------------------------------------------ reinforcement


def _reinforce(parts, record, signals) -> dict[str, Any]:
  from vigor_jax import compilation
  from vigor_jax import evaluate
  from vigor_jax import measure
  from vigor_jax import profiling
  from vigor_jax import starting
  from vigor_jax import step as step_lib

  config, sampler, stream = parts.config, parts.sampler, parts.stream
  allocator, updater, counters = (parts.allocator, parts.updater,
                                  record.counters)
  every = config.evaluation.every_steps
  state, host, init_step = starting.state(parts, record, updater)
  if host is not None:
    allocator.load_state_dict(host["allocator"])
    stream.load_state_dict(host["stream"])
  reference = None
  if config.policy.kl.coef and updater.adapted is None:
    reference = starting.reference(parts, record, init_step)
  evaluator = evaluate.Evaluator(parts)
  run_step = step_lib.TrainingStep(parts)
  traces = profiling.StepTraces(
      record.workdir, config.profile_steps if record.primary else ())
  if host is not None:
    run_step.meter.load_state_dict(host["meter"])

  def save(step: int) -> None:
    record.save(step, *updater.saved(state), dict(
        stage="rl", task=parts.task.name, init_step=init_step,
        allocator=allocator.state_dict(),
        stream=stream.state_dict(), meter=run_step.meter.state_dict()))

  def assess(step: int, trained: list = ()) -> None:
    with counters.paused():
      metrics, samples = evaluator(policy, step)
      record.evaluation(step, metrics, [*trained, *samples])

  policy = updater.policy(state)
  sampler.warm_up(policy)
  if record.step == 0 and every and not record.curve:
    assess(0)
  first, total = record.step, config.total_steps
  counters.start()
  record.progress.start(counters.tokens)
  compiled = None
  for step in range(first, total):
    begun = time.perf_counter()
    timer = measure.PhaseTimer()
    evaluating = every and (step + 1) % every == 0
    extra = {}
    with traces.step(step + 1):
      # Rounds of requests, prefills, decoding, verdicts.
      rollouts = run_step.collect(policy, step, timer)
      if evaluating and config.evaluation.fresh_rollouts:
        with counters.paused(), timer.excluded():
          extra = run_step.meter.measure(policy, step, rollouts)
      # Advantages by prompt id, and the update.
      state, done = run_step.learn(state, rollouts, step, timer, reference)
      policy = updater.policy(state)

    # The record.
    counters.add(rollouts.buffer.size, rollouts.tokens)
    line = {
        **counters.values(), **done.metrics(), **extra,
        "compiles": compilation.count(),
        **timer.metrics(time.perf_counter() - begun),
    }
    record.train_line(step + 1, line)
    record.group_line(step + 1, done.group_record)
    for message in rollouts.groups.messages:
      record.say(f"warning: {message}")
    if step - first == WARM_UP_STEPS - 1:
      compiled = compilation.count()
    elif compiled is not None and compilation.count() > compiled:
      raise RuntimeError(
          f"step {step + 1} compiled {compilation.count() - compiled} "
          "program(s) after warm-up: some shape is not static. This is a bug "
          "in vigor_jax or in an extension of it; the last checkpoint is "
          "kept")

    if evaluating or (step + 1 == total and every):
      assess(step + 1, rollouts.samples(
          parts.task, done.batch, config.evaluation.num_samples_logged))
      if compiled is not None:
        compiled = compilation.count()
    if (step + 1) % config.checkpoint.every_steps == 0 or step + 1 == total:
      save(step + 1)
      if compiled is not None:
        compiled = compilation.count()
    _stop_if_asked(record, signals, step + 1, save)
  return record.finish({"allocation": allocator.name,
                        "reward": parts.scorer.name})


# -------------------------------------------------------------- supervision


def _supervised(parts, record, signals) -> dict[str, Any]:
  from vigor_jax import compilation
  from vigor_jax import distributed
  from vigor_jax import evaluate
  from vigor_jax import measure
  from vigor_jax import starting
  from vigor_jax import warm_start
  from vigor_jax.policy import optimizer as optimizer_lib
  from vigor_jax.policy import update as update_lib

  team = distributed.cluster()
  config, counters = parts.config, record.counters
  updater = warm_start.make_updater(config, parts.graph, parts.placement)
  state, _, _ = starting.state(parts, record, updater)
  evaluator = evaluate.Evaluator(parts)
  every, total = config.evaluation.every_steps, config.sft.steps

  def save(step: int) -> None:
    record.save(step, *updater.saved(state),
                dict(stage="sft", task=parts.task.name))

  counters.start()
  record.progress.start(counters.tokens)
  for step in range(record.step, total):
    begun = time.perf_counter()
    timer = measure.PhaseTimer()
    with timer("allocate"):
      packed, num_micro, tokens = warm_start.packed_batch(
          config, parts.task, step)
    rate = optimizer_lib.learning_rate(
        step, peak=config.sft.learning_rate,
        warmup_steps=config.sft.warmup_steps, total_steps=total,
        schedule=config.optimizer.schedule)
    team.agree(f"supervised step {step + 1}", {"tokens": packed.tokens})
    with timer("update"):
      state, updated = updater.update(state, packed, num_micro, tokens, rate)
    if step % 20 == 0 or step + 1 == total:
      with timer("update"):
        updated = update_lib.to_host(updated)
      record.train_line(step + 1, {
          **counters.values(), "sft/loss": updated["loss"],
          "policy/grad_norm": updated["grad_norm"],
          "policy/entropy": updated["entropy"],
          "compiles": compilation.count(),
          **timer.metrics(time.perf_counter() - begun)})
    if every and ((step + 1) % every == 0 or step + 1 == total):
      with counters.paused():
        metrics, samples = evaluator(state.params, step + 1)
        record.evaluation(step + 1, metrics, samples)
    if (step + 1) % config.checkpoint.every_steps == 0 or step + 1 == total:
      save(step + 1)
    _stop_if_asked(record, signals, step + 1, save)
  return record.finish({})


# --------------------------------------------------------------------- main


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_boolean(
      "print_config", False, "print the configuration a field a line, by its "
      "full name", flag_values=values)


def main(argv) -> None:
  args = cli.parse_flags(argv, _USAGE, _define)
  command = shlex.join(["python", "-m", "vigor_jax.train", *argv[1:]])
  stopped = f"stopped at once\nto go on:\n  {command}"
  with endings.one_message(stopped, at_once=True):
    _main(args, command)


def _main(args, command: str) -> None:
  from vigor_jax import distributed
  from vigor_jax import record as record_lib
  from vigor_jax.config import showing
  try:
    team = distributed.initialize(args.config.mesh.host_timeout)
    if team.primary:
      if args.flags.print_config:
        print(showing.pretty(args.config), flush=True)
      else:
        print(showing.brief(args.config, f"{args.workdir.rstrip('/')}/"
                            f"{record_lib.CONFIG_FILE}"))
        print(showing.rest(args.config), flush=True)
    with distributed.guarded(passing=record_lib.Interrupted):
      summary = train(args.config, args.workdir, command=command)
      if team.primary:
        _report(args.workdir, summary)
      team.exchange("the end of the run", b"")
  except record_lib.Interrupted as stop:
    if team.primary:
      print(f"{stop}\nto go on:\n  {command}", flush=True)
    sys.exit(128 + stop.signum)


def _report(workdir: str, summary: dict[str, Any]) -> None:
  """Writes report.html and the last line on the console."""
  from vigor_jax import report
  from vigor_jax import workdirs
  folder = workdirs.local(workdir)
  path = report.build([folder], folder)
  workdirs.Mirror(workdir).push()
  last = summary["curve"][-1]["eval/accuracy"] if summary["curve"] else None
  shown = "" if last is None else f", accuracy {last:.3f}"
  print(f"done: {summary['rollouts']} rollouts, {summary['seconds']:.0f} s"
        f"{shown}; report: {path}", flush=True)


if __name__ == "__main__":
  main(sys.argv)
