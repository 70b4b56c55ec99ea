"""The report of a comparison, or of several runs side by side."""

from vigor_jax.reporting import captions
from vigor_jax.reporting import page as page_lib
from vigor_jax.reporting import phases as phase_times
from vigor_jax.reporting import pooled
from vigor_jax.reporting import verdict
from vigor_jax.reporting import wording


def render(runs, record, pictures) -> tuple[str, str]:
  variants: dict[str, list] = {}
  for run in runs:
    variants.setdefault(run.variant, []).append(run)
  sections, results = [], {}
  for name, members in variants.items():
    rules = pooled.by_label(members)
    baseline = record.get("baseline") or _baseline(rules)
    if baseline not in rules:
      sections.append(
        f"<h2>{page_lib.text(name)}</h2><p>The baseline "
        f"{page_lib.text(baseline)} has no finished run here yet, so nothing "
        "can be compared.</p>"
      )
      continue
    result = verdict.analyse(rules, baseline)
    results[name or "the stream"] = result
    prefix = f"{_slug(name)}-" if len(variants) > 1 else ""
    heading = name if len(variants) > 1 else "What was found"
    sections.append(
      f"<h2>{page_lib.text(heading)}</h2>"
      + _variant(rules, result, pictures, prefix)
    )
  labels = list(dict.fromkeys(run.label for run in runs))
  title = "Comparison: " + ", ".join(labels[:6]) if labels else "Comparison"
  cells = record.get("cells", [])
  body = [
    f"<h1>{page_lib.text('Comparison of allocation rules')}</h1>",
    f"<p class=quiet>{page_lib.text(', '.join(labels))}</p>",
  ]
  unfinished = [c for c in cells if c["state"] != "done"]
  if unfinished:
    body.append(
      f"<p><b>{len(unfinished)} of {len(cells)} cells are missing</b>"
      " and the command below continues with them:</p>"
      + page_lib.bullets(
        [
          f"{c['name']}: {c['state']}"
          + (f" ({c['error']})" if c.get("error") else "")
          for c in unfinished[:20]
        ]
      )
    )
  if len(results) > 1:
    body.append(
      '<div class="lead">'
      + page_lib.bullets(wording.overall(results))
      + "</div>"
    )
  body += sections
  body.append(page_lib.colophon(runs, record))
  body.append(page_lib.unreadable(runs))
  return title, "".join(body)


def _baseline(rules) -> str:
  """The first uniform rule, or the first of all."""
  for label, runs in rules.items():
    if runs and runs[0].allocator == "uniform":
      return label
  return next(iter(rules))


def _slug(name: str) -> str:
  return "".join(c if c.isalnum() or c in "_-." else "-" for c in name)


def _variant(rules, result, pictures, prefix) -> str:
  """The section of one stream: verdict, table, figures."""
  plots = pictures.plots
  colour = plots.colours(list(rules))
  targets = [(t["fraction"], t["accuracy"]) for t in result["targets"]]
  baseline = result["baseline"]
  rates, how = pooled.pass_rate_histograms(rules[baseline])
  under = ", ".join(plots.short(baseline).split("\n"))
  parts = [page_lib.bullets(result["sentences"])]
  for title, header, rows in wording.tables(result):
    parts.append(f"<h3>{page_lib.text(title)}</h3>")
    parts.append(
      page_lib.table(
        header,
        rows,
        numbers=range(1, len(header)),
        caption=captions.TARGET_CAPTION if result["targets"] else "",
      )
    )
  parts.append(
    pictures.html(
      [
        (
          f"accuracy_{m}",
          plots.accuracy(rules, m, colour, targets if m == "rollouts" else ()),
          caption,
        )
        for m, caption in captions.ACCURACY_CAPTIONS
      ]
      + [
        (
          "ratios",
          plots.ratios(ratio_rows(result), colour),
          "Paired by seed, geometric means; lines are bootstrap intervals over "
          "seeds. Hollow marks are bounds (< at most, > at least), because "
          "some runs never got there.",
        )
      ],
      prefix,
    )
  )
  parts.append("<h3>Where the rollouts went</h3>")
  parts.append(
    pictures.html(
      [
        ("rounds", plots.rounds_heat(rules), captions.HEAT_CAPTION),
        (
          "group_sizes",
          plots.group_sizes(rules, colour),
          captions.SIZES_CAPTION,
        ),
        (
          "pass_rates",
          plots.pass_rates(
            rates, f"Pass rates under {under}", how, colour[baseline]
          ),
          captions.RATES_CAPTION,
        ),
        ("difficulty", plots.difficulty(rules, colour), captions.LEVEL_CAPTION),
      ],
      prefix,
    )
  )
  parts.append("<h3>What they carried, and what it cost</h3>")
  parts.append(
    pictures.html(
      [
        ("mixed", plots.mixed_prompts(rules, colour), captions.MIXED_CAPTION),
        (
          "signal",
          plots.signal_by_rule(rules, colour),
          captions.SIGNAL_CAPTION,
        ),
        (
          "variance",
          plots.variance_by_rule(rules, colour),
          captions.VARIANCE_CAPTION,
        ),
        ("time", plots.time_by_phase(rules, colour), captions.TIME_CAPTION),
      ],
      prefix,
    )
  )
  parts.append(_cost_table(result))
  parts.append(phase_times.several_rules(rules))
  return "".join(parts)


def ratio_rows(result: dict) -> list[dict]:
  """The ratios to the baseline as `plots.ratios` takes them."""
  panels = []
  for position, target in enumerate(result["targets"]):
    rows = []
    for label, rule in result["rules"].items():
      if label == result["baseline"]:
        continue
      for measure in wording.MEASURES:
        ratio = rule["ratio"][position][measure] or {
          "value": None,
          "low": None,
          "high": None,
          "bound": "",
        }
        rows.append(
          {
            "label": label,
            "measure": measure,
            **{k: ratio[k] for k in ("value", "low", "high", "bound")},
          }
        )
    panels.append(
      {
        "target": f"to {target['accuracy']:.1%} ({target['fraction']:.0%} of "
        "the baseline's rise)",
        "rows": rows,
      }
    )
  return panels


def _cost_table(result) -> str:
  def cell(value, form):
    return "–" if value is None else format(value, form)

  rows = [
    [
      label,
      cell(rule["tokens_per_rollout"], ".1f"),
      cell(rule["mixed_prompts_per_step"], ".1f"),
      cell(rule["zero_variance_groups"], ".0%"),
      cell(rule["zero_variance_rollouts"], ".0%"),
      cell(rule["slot_utilisation"], ".0%"),
      "none"
      if not rule["compiled_late"]
      else f"steps {', '.join(map(str, rule['compiled_late'][:5]))}",
    ]
    for label, rule in result["rules"].items()
  ]
  return page_lib.table(
    [
      "rule",
      "tokens a rollout",
      "mixed prompts a step",
      "groups w/o signal",
      "rollouts w/o signal",
      "slots in use",
      "compiled late",
    ],
    rows,
    numbers=range(1, 7),
  )
