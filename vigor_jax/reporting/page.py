"""The report's HTML: style sheet, document, tables, figures, colophon."""

import base64
import html
import pathlib
from collections.abc import Sequence

from vigor_jax import metrics
from vigor_jax.reporting import runs as run_folders

STYLE_SHEET = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem;
  background: #fff; color: #111827; line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: 1rem;
  border-top: 1px solid #e5e7eb; }
h3 { font-size: 1.02rem; margin: 1.8rem 0 .5rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
.lead { font-size: 1.08rem; }
.quiet, figcaption, caption { color: #4b5563; font-size: .9rem; }
.figures { display: grid; gap: 1.6rem 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; break-inside: avoid; }
figure img { width: 100%; max-width: 33rem; height: auto; display: block; }
figcaption { max-width: 33rem; margin-top: .3rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; vertical-align: top;
  border-bottom: 1px solid #e5e7eb; }
caption { caption-side: bottom; text-align: left; padding-top: .4rem; }
th { font-weight: 600; color: #374151; border-bottom-color: #9ca3af; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.label { font-weight: 600; }
td.text { font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere;
  min-width: 9rem; max-width: 28rem; }
pre { background: #f9fafb; border: 1px solid #e5e7eb; padding: .7rem .9rem;
  font-size: .82rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
@media print { body { padding: 0; max-width: none; font-size: 11pt; }
  .figures { grid-template-columns: 1fr 1fr; gap: 1rem; }
  details > *:not(summary) { display: block; } }
"""


def text(value) -> str:
  return html.escape(str(value))


def document(title: str, body: str) -> str:
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{text(title)}</title><style>{STYLE_SHEET}</style></head>"
    f"<body>{body}</body></html>\n"
  )


def bullets(items: Sequence[str]) -> str:
  return "<ul>" + "".join(f"<li>{text(i)}</li>" for i in items) + "</ul>"


def table(header, rows, *, numbers=(), texts=(), caption="") -> str:
  """A table; `numbers` and `texts` are columns set right or monospaced."""

  def kind(column):
    if column in numbers:
      return ' class="number"'
    if column in texts:
      return ' class="text"'
    return ' class="label"' if column == 0 and numbers else ""

  head = "".join(
    f"<th{kind(i) if i in numbers else ''}>{text(h)}</th>"
    for i, h in enumerate(header)
  )
  lines = "".join(
    "<tr>"
    + "".join(f"<td{kind(i)}>{text(c)}</td>" for i, c in enumerate(row))
    + "</tr>"
    for row in rows
  )
  note = f"<caption>{text(caption)}</caption>" if caption else ""
  return (
    f'<div class="scroll"><table>{note}<thead><tr>{head}</tr></thead>'
    f"<tbody>{lines}</tbody></table></div>"
  )


class Pictures:
  """Draws figures, keeps them as files and hands out their HTML."""

  def __init__(self, out: pathlib.Path):
    # Here, because matplotlib takes longer to import than the rest to run.
    from vigor_jax.reporting import plots

    self.plots = plots
    self._folder = out / "plots"

  def html(self, drawn: Sequence[tuple], prefix: str = "") -> str:
    """[(name, figure or None, caption)] -> a grid of <figure> elements."""
    parts = []
    for name, figure, caption in drawn:
      if figure is None:
        continue
      data = self.plots.png(figure)
      metrics.atomic_write(str(self._folder / f"{prefix}{name}.png"), data)
      title = figure.texts[0].get_text()
      parts.append(
        f'<figure><img alt="{text(title)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}"><figcaption>{text(caption)}'
        "</figcaption></figure>"
      )
    return f'<div class="figures">{"".join(parts)}</div>' if parts else ""


def colophon(runs, record) -> str:
  """The command and the configuration."""
  parts = ["<h2>How it was produced</h2>"]
  command = (record or {}).get("command") or next(
    (r.command for r in runs if r.command), None
  )
  if command:
    parts.append(
      f"<p>The command, which also continues an unfinished one:</p>"
      f"<pre>{text(command)}</pre>"
    )
  parts.append(
    "<p class=quiet>This page is rebuilt with <code>python -m "
    "vigor_jax.report DIR</code>"
    + (
      ", and a single run has its own: <code>python -m "
      "vigor_jax.report DIR/cells/NAME</code>"
      if record
      else ""
    )
    + ".</p>"
  )
  flats = [run_folders.flatten(run.config) for run in runs]
  if flats and flats[0]:
    differing = sorted(
      k
      for k in set().union(*flats)
      if any(f.get(k) != flats[0].get(k) for f in flats)
    )
    shared = {k: v for k, v in flats[0].items() if k not in differing}
    settings = "\n".join(f"{k} = {v}" for k, v in shared.items())
    if differing:
      settings += "\n\nnot the same in all runs: " + ", ".join(differing)
    parts.append(
      "<details><summary>Configuration</summary>"
      f"<pre>{text(settings)}</pre></details>"
    )
  return "".join(parts)


def unreadable(runs) -> str:
  notes = [f"{run.folder.name}: {note}" for run in runs for note in run.notes]
  if not notes:
    return ""
  return (
    "<h2>What could not be read</h2>"
    + bullets(notes[:40])
    + (f"<p>and {len(notes) - 40} more.</p>" if len(notes) > 40 else "")
  )
