r"""Spelling: one way to write what LaTeX and Unicode write in many.

Nothing here changes a value; layout commands, delimiters and look-alike
characters go, words inside \text become plain.
"""

from __future__ import annotations

import re
import unicodedata

_CHARACTERS = {
  "−": "-",
  "–": "-",
  "—": "-",
  "‐": "-",
  "‑": "-",
  "﹣": "-",
  "－": "-",
  "＋": "+",
  "×": "*",
  "✕": "*",
  "·": "*",
  "⋅": "*",
  "∙": "*",
  "∗": "*",
  "÷": "/",
  "∕": "/",
  "⁄": "/",
  "／": "/",
  "√": "\\sqrt ",
  "π": "\\pi ",
  "∞": "\\infty ",
  "≤": "<=",
  "⩽": "<=",
  "≥": ">=",
  "⩾": ">=",
  "≠": "!=",
  "±": "±",
  "∪": "\\cup ",
  "∈": "\\in ",
  "°": "\\degree ",
  "º": "\\degree ",
  "∅": "\\emptyset ",
  "θ": "\\theta ",
  "α": "\\alpha ",
  "β": "\\beta ",
  "γ": "\\gamma ",
  "δ": "\\delta ",
  "λ": "\\lambda ",
  "μ": "\\mu ",
  "φ": "\\phi ",
  "ω": "\\omega ",
  "σ": "\\sigma ",
  "（": "(",
  "）": ")",
  "，": ",",
  "、": ",",
  "；": ";",
  "：": ":",
  "＝": "=",
  "％": "%",
  "．": ".",
  "。": ".",
  "⟨": "(",
  "⟩": ")",
  "⌊": "\\lfloor ",
  "⌋": "\\rfloor ",
  "⌈": "\\lceil ",
  "⌉": "\\rceil ",
  "∨": " or ",
  "\u00a0": " ",
  "\u2009": " ",
  "\u202f": " ",
  "\u200b": "",
  "\ufeff": "",
  "\u2062": "*",
  "′": "'",
  "’": "'",
  "½": "\\frac{1}{2}",
  "⅓": "\\frac{1}{3}",
  "⅔": "\\frac{2}{3}",
  "¼": "\\frac{1}{4}",
  "¾": "\\frac{3}{4}",
  "⅕": "\\frac{1}{5}",
  "⅖": "\\frac{2}{5}",
  "⅗": "\\frac{3}{5}",
  "⅘": "\\frac{4}{5}",
  "⅙": "\\frac{1}{6}",
  "⅚": "\\frac{5}{6}",
  "⅛": "\\frac{1}{8}",
  "⅜": "\\frac{3}{8}",
  "⅝": "\\frac{5}{8}",
  "⅞": "\\frac{7}{8}",
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")

# Commands that only lay out; a following letter would make another command.
_LAYOUT = re.compile(
  r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg"
  r"|Bigg|middle|displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it"
  r"|cal|hline|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])\.?"
  r"|\\(?:tag|label|color|textcolor)\*?\{[^{}]*\}"
)
_GAPS = re.compile(
  r"\\(?:[,;:! ]|quad(?![A-Za-z])|qquad(?![A-Za-z])"
  r"|enspace(?![A-Za-z])|thinspace(?![A-Za-z])"
  r"|hspace\*?\{[^{}]*\}|phantom\{[^{}]*\})|~"
)
_STYLE = re.compile(
  r"\\(?:mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|pmb"
  r"|operatorname\*?|vec|overline|bar|hat|overrightarrow|mathbb|mathcal"
  r"|underline)\s*(?=\{)"
)
_TEXT = re.compile(
  r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|emph)"
  r"\s*\{([^{}]*)\}"
)
_COMMANDS = (
  (re.compile(r"\\(?:[dtcs]|nice)frac(?![A-Za-z])"), r"\\frac"),
  (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
  (re.compile(r"\\(?:cdot|times|ast|star)(?![A-Za-z])"), "*"),
  (re.compile(r"\\div(?![A-Za-z])|\\slash(?![A-Za-z])"), "/"),
  (re.compile(r"\\(?:leq|leqslant|le)(?![A-Za-z])"), "<="),
  (re.compile(r"\\(?:geq|geqslant|ge)(?![A-Za-z])"), ">="),
  (re.compile(r"\\lt(?![A-Za-z])"), "<"),
  (re.compile(r"\\gt(?![A-Za-z])"), ">"),
  (re.compile(r"\\(?:neq|ne)(?![A-Za-z])"), "!="),
  (re.compile(r"\\(?:pm|mp)(?![A-Za-z])"), "±"),
  (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])"), "|"),
  (re.compile(r"\\(?:lVert|rVert|Vert)(?![A-Za-z])"), r"\\|"),
  (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
  (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
  (re.compile(r"\\(?:lbrack)(?![A-Za-z])"), "["),
  (re.compile(r"\\(?:rbrack)(?![A-Za-z])"), "]"),
  (re.compile(r"\\(?:langle)(?![A-Za-z])"), "("),
  (re.compile(r"\\(?:rangle)(?![A-Za-z])"), ")"),
  (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), " or "),
  (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), " and "),
  (re.compile(r"\\colon(?![A-Za-z])"), ":"),
  (re.compile(r"\{:\}"), ":"),
  (re.compile(r"\\prime(?![A-Za-z])"), "'"),
  (re.compile(r"\\%"), "%"),
  (re.compile(r"\\\$|[$€£¥]|\\(?:pounds|euro)(?![A-Za-z])"), " "),
  (re.compile(r"\\[()\[\]](?:\[[0-9.]+(?:pt|em|ex)\])?"), " "),
  (re.compile(r"\\#"), "#"),
  (re.compile(r"\*\*"), "^"),
)
_ROOT_SIGN = re.compile(r"√\s*([0-9]+(?:\.[0-9]+)?)")
_PRIME = re.compile(r"\^\{?\s*('+)\s*\}?")
_THOUSANDS_MARK = re.compile(
  r"(?<=[0-9])(?:\{,\}|\\,|\\!,)(?=[0-9]{3}(?![0-9]))"
)
_THOUSANDS_GAP = re.compile(
  r"(?<![0-9.,/^])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]|\s*/)"
)
_DEGREES = re.compile(r"\s*(?<=[0-9}\s])degrees?\b", re.I)
_TEMPERATURE = re.compile(
  r"(?:\\degree|\^\s*\\circ|\^\s*\{\s*\\circ\s*\})[\s{]*([CF])\b\s*\}?"
)
_REPEATING = re.compile(
  r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]{1,30})\}"
)
_CONNECT_AND = re.compile(
  r"(?<![A-Za-z\\])and(?![A-Za-z])|&(?=\s*\\text)", re.I
)
_CONNECT_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])", re.I)


def _characters(text: str) -> str:
  out = []
  for char in text:
    if char.isascii():
      out.append(char)
    elif char in _CHARACTERS:
      out.append(_CHARACTERS[char])
    elif unicodedata.category(char) == "Nd":
      out.append(str(unicodedata.digit(char)))
    elif "\uff01" <= char <= "\uff5e":  # Full-width ASCII.
      out.append(chr(ord(char) - 0xFEE0))
    else:
      out.append(char)
  return "".join(out)


def _repeating(match: re.Match[str]) -> str:
  """0.1 followed by a period of 6, as the fraction it is."""
  whole, fixed, period = match[1] or "0", match[2], match[3]
  nines = 10 ** len(period) - 1
  top = int(whole + fixed) * nines + int(period)
  return f"({top}/{nines * 10 ** len(fixed)})"


def clean(text: str) -> str:
  """Rewrites an answer into the spelling that `latex.parse` reads."""
  if not text.isascii():
    text = _SUPERSCRIPT_RUN.sub(
      lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text
    )
    text = _SUBSCRIPT_RUN.sub(
      lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text
    )
    text = _ROOT_SIGN.sub(r"\\sqrt{\1}", text)
    text = _characters(text)
  text = strip_marks(text)
  text = _THOUSANDS_MARK.sub("", text)
  text = _LAYOUT.sub(" ", text)
  # A row break before a gap: "\\ " ends a matrix row, it is not "\ ".
  text = text.replace("\\\\", "\x00")
  text = _GAPS.sub(" ", text)
  for pattern, replacement in _COMMANDS:
    text = pattern.sub(replacement, text)
  text = _TEXT.sub(r" \1 ", text)
  text = _REPEATING.sub(_repeating, text)
  text = _TEMPERATURE.sub(
    lambda m: " celsius" if m[1] == "C" else " fahrenheit", text
  )
  text = _STYLE.sub("", text)
  text = _PRIME.sub(r"\1", text)
  text = text.replace("\x00", "\\\\")
  text = _THOUSANDS_GAP.sub(lambda m: m[0].replace(" ", ""), text)
  text = _DEGREES.sub(r" \\degree ", text)
  text = _CONNECT_AND.sub(" , ", text)
  text = _CONNECT_OR.sub(" ∨ ", text)
  return strip_marks(text)


def strip_marks(text: str) -> str:
  """Without the quotes, bold stars, dollars and full stops round an answer."""
  while True:
    before = text
    text = text.strip().strip('`"“”').strip()
    text = re.sub(r"\A\*\*(?!\s*\*\*)|\*\*\Z|\A__|__\Z", "", text)
    if len(text) > 1 and text[0] == text[-1] == "*":
      text = text[1:-1]
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
      text = text.strip("$")
    if text.endswith("\\") and not text.endswith("\\\\"):
      text = text[:-1]  # Half of a "\\ " whose blank was stripped.
    if text[-1:] in (".", ",", ";", ":", "。") and text[-2:-1] != "\\":
      text = text[:-1]
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
      if text.startswith(opening) and text.endswith(closing):
        text = text[2:-2]
    if text == before:
      return text
