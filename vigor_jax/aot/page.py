"""Preflight's tables: as text for the console, as a page to keep."""

from __future__ import annotations

import html

from vigor_jax.aot import estimate

GIB = 2**30
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;
margin:2em auto;padding:0 1em;color:#222}table{border-collapse:collapse;
margin:1em 0}th,td{padding:.3em .8em;border-bottom:1px solid #ddd;
text-align:right}th:first-child,td:first-child{text-align:left}
.bad{color:#b00020;font-weight:600}.good{color:#1b7837;font-weight:600}
small{color:#666}"""
_HEAD = ("program", "calls a step", "GiB a chip", "TFLOP", "HBM GB",
         "wire GB", "ms: FLOPs", "HBM", "wire", "schedule", "binds")


def verdict(report: estimate.Report) -> str:
  """One sentence: fits or not, and how full."""
  full = (f"{report.peak / GIB:.2f} of {report.limit / GIB:.2f} GiB a chip at "
          "the fullest moment")
  if report.fits:
    return f"fits on {report.topology}: {full}"
  return (f"does not fit on {report.topology}: {full}; the largest part is "
          f"{report.culprit}")


def speed(report: estimate.Report) -> str:
  """One sentence: seconds, rollouts, tokens and, with a price, dollars."""
  text = (f"a step: about {report.seconds:.1f} s, {report.rollouts} rollouts, "
          f"{report.tokens:.0f} generated tokens "
          f"({report.tokens / max(report.seconds, 1e-9):.0f} a second)")
  if report.price:
    per = report.rollouts / max(report.dollars, 1e-12)
    text += f"; ${report.dollars:.3f} a step, {per:.0f} rollouts a dollar"
  return text


def rows(report: estimate.Report) -> list[tuple[str, ...]]:
  """Cells of the table of programs."""
  made = []
  for r in report.results:
    if not r.fits:
      made.append((r.name, f"{r.calls:.3g}", r.error, *[""] * 8))
      continue
    ms = [f"{1e3 * s:.3g}" for s in
          (r.compute_s, r.hbm_s, r.wire_s, r.model_s)]
    made.append((
        r.name, f"{r.calls:.3g}", f"{r.peak / GIB:.2f}",
        f"{r.flops / 1e12:.3g}", f"{r.hbm_bytes / 1e9:.3g}",
        f"{r.wire_bytes / 1e9:.3g}", *ms, r.binds))
  return made


def collectives(report: estimate.Report) -> list[tuple[str, ...]]:
  """(program, kind, bytes) of one call, the most bytes of a program first."""
  return [(r.name, kind, f"{size / 1e9:.3g}")
          for r in report.results
          for kind, size in sorted(r.wire.items(), key=lambda item: -item[1])]


def text(report: estimate.Report) -> str:
  """The report for a console."""
  table = [_HEAD, *rows(report)]
  widths = [max(len(row[i]) for row in table) for i in range(len(_HEAD))]
  lines = ["  ".join([row[0].ljust(widths[0]), *(
      cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
           for row in table]
  if found := collectives(report):
    lines += ["", "GB that leave a chip in a call, by collective:"]
    lines += [f"  {size:>6}  {kind} of {name}" for name, kind, size in found]
  lines += ["", "GiB a chip at the fullest moment:"]
  lines += [f"  {size / GIB:6.2f}  {name}" for name, size in occupied(report)]
  return "\n".join([*lines, verdict(report), speed(report)])


def occupied(report: estimate.Report) -> list[tuple[str, float]]:
  """(what, bytes) of the fullest moment, the largest first."""
  return sorted(report.parts.items(), key=lambda part: -part[1])


def page(reports: list[estimate.Report], command: str) -> str:
  """The reports as one HTML page without outside references."""
  out = ["<!doctype html><html lang=en><meta charset=utf-8>"
         f"<title>Preflight</title><style>{_STYLE}</style>"
         f"<h1>Preflight</h1><p><code>{html.escape(command)}</code></p>"]
  for report in reports:
    kind = "good" if report.fits else "bad"
    mesh = ", ".join(f"{k} {v}" for k, v in report.mesh.items())
    out.append(
        f"<h2>{html.escape(report.topology)}, {html.escape(report.flags)}"
        f"</h2><p class={kind}>{html.escape(verdict(report))}.</p>"
        f"<p>{html.escape(speed(report))}.</p><p>Mesh: {mesh}.</p>")
    out.append(_table(_HEAD, rows(report)))
    if found := collectives(report):
      out.append("<h3>Collectives of one call</h3>" + _table(
          ("program", "kind", "GB that leave a chip"), found))
    out.append("<h3>Memory at the fullest moment</h3>" + _table(
        ("part", "GiB a chip"),
        [(k, f"{v / GIB:.2f}") for k, v in occupied(report)]))
    out.append("<h3>Largest arrays</h3>" + _table(
        ("program", "arrays"),
        [(r.name, "; ".join(r.biggest)) for r in report.results if r.biggest]))
    assumed = ", ".join(f"{k} {v:g}" for k, v in report.workload.items())
    out.append(
        f"<p><small>Assumed of a step: {html.escape(assumed)}. FLOPs are those "
        "of matrix products; bytes and collectives are counted in the "
        "optimised program with trip counts; <i>schedule</i> is the "
        "compiler's own estimate, which sees no waiting for the wire. Nothing "
        "was run.</small></p>")
  return "\n".join(out) + "\n</html>\n"


def _table(head, body) -> str:
  cells = lambda tag, row: "".join(
      f"<{tag}>{html.escape(str(c))}</{tag}>" for c in row)
  return ("<table><tr>" + cells("th", head) + "</tr>" + "".join(
      f"<tr>{cells('td', row)}</tr>" for row in body) + "</table>")
