"""The report of one run."""

import math

import numpy as np

from vigor_jax.reporting import captions
from vigor_jax.reporting import page as page_lib
from vigor_jax.reporting import phases as phase_times
from vigor_jax.reporting import pooled
from vigor_jax.reporting import runs as run_folders
from vigor_jax.reporting import wording


def _amount(value: float) -> str:
  if not math.isfinite(value):
    return "unknown"
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
    if value >= size:
      return f"{value / min(size, 1e3 if letter == 'k' else size):.3g} {letter}"
  return f"{value:.0f}"


def _share(value: float) -> str:
  return wording.percent(value if math.isfinite(value) else None, 0)


def run_summary(run: run_folders.Run) -> list[str]:
  """What happened in a run, in plain words."""
  if not run.train and not run.evals:
    return [
      "Nothing has been recorded yet: the run ended, or was cut off, "
      "before its first step."
    ]
  said = []
  total = run.total_steps
  done = int(run.train[-1]["step"]) if run.train else 0
  if total is not None and done < total:
    said.append(
      f"The run stands at step {done} of {total}; the command it was "
      "started with continues it."
    )
  else:
    said.append(f"The run finished its {done} steps.")
  x, y = run.curve("rollouts")
  if len(y) > 1:
    peak = int(np.argmax(y))
    text = f"Accuracy on held-out prompts went from {y[0]:.1%} to {y[-1]:.1%}"
    if peak != len(y) - 1:
      text += f" (highest {y[peak]:.1%} after {_amount(x[peak])} rollouts)"
    said.append(text + ".")
  elif len(y):
    said.append(f"Accuracy on held-out prompts was {y[0]:.1%}, measured once.")
  if run.train:
    spent = run_folders.training_seconds(run.train)
    seconds = run.last("seconds") if spent is None else float(spent[-1])
    said.append(
      f"It generated {_amount(run.last('rollouts'))} rollouts with "
      f"{_amount(run.last('tokens'))} tokens in "
      + (
        f"{seconds:.3g} s of training"
        if math.isfinite(seconds)
        else "an unknown time"
      )
      + " (evaluation and compilation left out)."
    )
    groups = run.mean("groups/zero_variance_share")
    rollouts = run.mean("rollouts/zero_variance_share")
    mixed = run.mean("groups/mixed")
    if math.isfinite(groups):
      text = (
        f"In {_share(groups)} of the groups all rewards were alike, so "
        "they taught nothing"
      )
      if math.isfinite(rollouts):
        text += f"; {_share(rollouts)} of the rollouts went there"
      if math.isfinite(mixed):
        text += f". {mixed:.1f} distinct prompts a step had mixed rewards"
      said.append(text + ".")
    if mixed == 0:
      said.append(
        "No group ever carried signal: nothing could be learned. "
        "Look at the sample completions below and at the reward."
      )
    late = run.compiled_after(2)
    count = run.last("compiles")
    if math.isfinite(count):
      said.append(
        f"{count:.0f} programs were compiled, "
        + (
          "none after the first two steps."
          if not late
          else f"some of them late, at steps {', '.join(map(str, late[:8]))}."
        )
      )
  return said


def render(run, pictures) -> tuple[str, str]:
  plots = pictures.plots
  label = run.label
  colour = plots.colours([label])
  rules = {label: [run]}
  task = run.config.get("task", {}).get("name", "")
  title = f"{run.allocator}, seed {run.seed}" + (f" on {task}" if task else "")
  rates, how = pooled.pass_rate_histograms([run])
  body = [f"<h1>{page_lib.text(title)}</h1>", '<div class="lead">']
  body += [f"<p>{page_lib.text(' '.join(run_summary(run)))}</p>", "</div>"]
  body.append("<h2>What was learned</h2>")
  body.append(
    pictures.html(
      [
        (f"accuracy_{m}", plots.accuracy(rules, m, colour), caption)
        for m, caption in captions.ACCURACY_CAPTIONS
      ]
    )
  )
  body.append("<h2>Where the rollouts went</h2>")
  body.append(
    pictures.html(
      [
        (
          "rounds",
          plots.rounds_heat(rules, one_step=True),
          captions.HEAT_CAPTION,
        ),
        (
          "group_sizes",
          plots.group_sizes(rules, colour),
          captions.SIZES_CAPTION,
        ),
        (
          "pass_rates",
          plots.pass_rates(
            rates, "Pass rates of the prompts over training", how, colour[label]
          ),
          captions.RATES_CAPTION,
        ),
        ("difficulty", plots.difficulty(rules, colour), captions.LEVEL_CAPTION),
      ]
    )
  )
  body.append("<h2>What they carried</h2>")
  body.append(
    pictures.html(
      [
        ("variance", plots.variance_over_run(run), captions.VARIANCE_CAPTION),
        (
          "signal",
          plots.signal_over_run(run, colour[label]),
          captions.SIGNAL_CAPTION,
        ),
        ("mixed", plots.mixed_prompts(rules, colour), captions.MIXED_CAPTION),
        ("time", plots.time_by_phase(rules, colour), captions.TIME_CAPTION),
      ]
    )
  )
  times = phase_times.one_run(run)
  body.append(times and "<h2>Where the time went</h2>" + times)
  body.append(_samples(run))
  body.append(page_lib.colophon([run], None))
  body.append(page_lib.unreadable([run]))
  return title, "".join(body)


def _samples(run) -> str:
  """The sample completions of the last evaluation that kept some."""
  if not run.samples:
    return ""
  last = run.samples[-1].get("step")
  kept = [s for s in run.samples if s.get("step") == last][:24]

  def cell(sample, key):
    value = sample.get(key)
    if value is None:
      return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

  keys = [
    ("prompt", "prompt"),
    ("completion", "completion"),
    ("answer", "answer"),
    ("reward", "reward"),
    ("advantage", "advantage"),
  ]
  keys = [k for k in keys if any(k[1] in s for s in kept)]
  rows = [[cell(s, key) for _, key in keys] for s in kept]
  names = [name for name, _ in keys]
  numbers = [i for i, n in enumerate(names) if n in ("reward", "advantage")]
  texts = [i for i in range(len(names)) if i not in numbers]
  return (
    f"<h2>Sample completions</h2><p class=quiet>Drawn at step "
    f"{page_lib.text(last)}.</p>"
    + page_lib.table(names, rows, numbers=numbers, texts=texts)
  )
