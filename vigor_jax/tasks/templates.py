"""Prompt templates, as data: how a question becomes a prompt.

A chat template goes through the model's own conversation format; a text
template is the whole prompt, for base models and byte-level toys.
"""

import dataclasses

from vigor_jax.tasks import characters


@dataclasses.dataclass(frozen=True)
class Template:
  """One prompt template.

  Attributes:
    user: the text with {prompt} in it once; the user's turn if `chat`.
    chat: whether the model's own chat template wraps it.
    system: the system turn; empty leaves it to the model's template.
  """

  user: str = "{prompt}"
  chat: bool = False
  system: str = ""


_CODE = (
  "You will be given a programming problem. Write a correct Python program"
  " that matches the specification and passes all tests. Answer with one"
  " ```python code block.\n\n{prompt}"
)
_FUNCTION = (
  "Complete the following Python function. Answer with the whole function,"
  " imports included, in one ```python code block.\n\n```python\n{prompt}```"
)

TEMPLATES = {
  "raw": Template(),
  "plain": Template("Question: {prompt}\nAnswer:"),
  "boxed": Template(
    "Question: {prompt}\nPlease reason step by step, and put your final answer"
    " within \\boxed{{}}.\nAnswer:"
  ),
  # The wording of the Qwen2.5-Math technical report (2024).
  "qwen_boxed": Template(
    chat=True,
    system="Please reason step by step, and put your final answer within"
    " \\boxed{{}}.",
  ),
  # The wording of table 1 of DeepSeek-R1 (2025).
  "r1": Template(
    "A conversation between User and Assistant. The user asks a question, and"
    " the Assistant solves it. The assistant first thinks about the reasoning"
    " process in the mind and then provides the user with the answer. The"
    " reasoning process and answer are enclosed within <think> </think> and"
    " <answer> </answer> tags, respectively, i.e., <think> reasoning process"
    " here </think> <answer> answer here </answer>. User: {prompt}. Assistant:"
  ),
  "chat": Template(chat=True),
  "chat_boxed": Template(
    "{prompt}\nPlease reason step by step, and put your final answer within"
    " \\boxed{{}}.",
    chat=True,
  ),
  "chat_code": Template(_CODE, chat=True),
  "chat_function": Template(_FUNCTION, chat=True),
  "code": Template(_CODE + "\n"),
  "function": Template(_FUNCTION + "\n"),
}


def check(name: str) -> None:
  """Raises ValueError unless the template exists."""
  if name not in TEMPLATES:
    raise ValueError(
      f"template must be one of {sorted(TEMPLATES)}, got {name!r}"
    )


def render(
  name: str, prompt: str, vocabulary: characters.Vocabulary
) -> str:
  """The full text of a prompt, special tokens and BOS included.

  Raises:
    ValueError: a chat template for a vocabulary that has none of its own.
  """
  template = TEMPLATES[name]
  # format() reads braces in the template only, never in the question.
  text = template.user.format(prompt=prompt)
  if not template.chat:
    add_bos = getattr(vocabulary, "with_one_bos", lambda x: x)
    return add_bos(text)
  if not hasattr(vocabulary, "render_chat"):
    texts = sorted(n for n, t in TEMPLATES.items() if not t.chat)
    raise ValueError(
      f"template {name!r} is a chat template, and the byte-level vocabulary"
      f" has none: set a tokenizer, or choose one of {texts}"
    )
  messages = [{"role": "user", "content": text}]
  if template.system:
    system = template.system.format()
    messages.insert(0, {"role": "system", "content": system})
  return vocabulary.render_chat(messages)
