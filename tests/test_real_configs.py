"""The configurations of published runs: valid without a hub, and in miniature."""

import ast
import importlib.util
import json
import re

import pytest

from tasks import tokenizer_folders
from vigor_jax import allocation
from vigor_jax import config as config_lib
from vigor_jax.policy import families
from vigor_jax.tasks import mixture

PUBLISHED = (
  "qwen2p5_1p5b_math", "qwen2p5_3b_math", "qwen2p5_7b_math_dapo",
  "qwen3_8b_livecodebench",
)
VARIANTS = ("uniform", "vigor", "eb_widening")


def load(root, name, argument=""):
  spec = f"{root}/configs/{name}.py" + (f":{argument}" if argument else "")
  return config_lib.load_file(spec)


@pytest.mark.parametrize("allocator", VARIANTS)
@pytest.mark.parametrize("name", [*PUBLISHED, "stack_language"])
def test_every_variant_is_valid(root, name, allocator):
  config = config_lib.validate(load(root, name, allocator))
  assert config.allocation.name == allocator
  rule = allocation.make(
    allocator, config.allocation[allocator],
    prompts_per_step=config.prompts_per_step, budget=config.rollout_budget,
    seed=0, train_on="all",
  )
  assert rule.budget == config.rollout_budget


@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_differ_in_the_rule_only(root, name):
  base = load(root, name)
  for allocator in VARIANTS:
    changes = config_lib.diff(base, load(root, name, allocator))
    assert {c.path for c in changes} <= {"allocation.name"}
  assert base.allocation.name == "vigor"


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_the_published_runs(root, name):
  config = load(root, name)
  code = "livecode" in name
  prompts, longest = (64, 8192) if code else (128, 3072)
  assert (config.prompts_per_step, config.rollout_budget) == (
    prompts, 8 * prompts
  )
  assert config.sampling.max_new_tokens == longest
  assert max(config.sampling.prompt_buckets) == config.task.max_prompt_length
  assert config.task.max_prompt_length == (2048 if code else 1024)
  assert (config.sampling.temperature, config.sampling.top_p) == (1.0, 1.0)
  assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (
    1e-6, 10
  )
  assert config.policy.kl.coef == 0
  sizes = families.published(
    {"qwen2p5_1p5b_math": "qwen2.5-1.5b", "qwen2p5_3b_math": "qwen2.5-3b",
     "qwen2p5_7b_math_dapo": "qwen2.5-7b",
     "qwen3_8b_livecodebench": "qwen3-8b"}[name]
  )
  assert {key: config.model.sizes[key] for key in sizes} == sizes
  # The slice it is meant for has as many chips as the mesh, and rows split.
  x, y, *z = map(int, config.topology.split(":")[1].split("x"))
  chips = x * y * (z[0] if z else 1)
  data, fsdp, tensor = config_lib.mesh_shape(config, chips)
  assert data * fsdp * tensor == chips
  for rows in (config.policy.rows_per_microbatch, config.sampling.slots,
               config.sampling.prefill_batch):
    assert rows % (data * fsdp) == 0
  assert sizes["kv_heads"] % tensor == 0


def test_the_mixture_holds_both_sets(root):
  config = load(root, "qwen2p5_7b_math_dapo")
  assert config.task.name == "mixture"
  options = mixture.Options(**config_lib.fields.options_of(
    config.task, mixture.Options))
  assert options.names == ["math", "dapo_math"]


@pytest.mark.parametrize(
  "path", ["arithmetic", "stack_language", "smollm2_reasoning_gym", *PUBLISHED]
)
def test_the_docstring_opens_with_a_command_that_is_right(root, path):
  document = ast.get_docstring(
    ast.parse((root / "configs" / f"{path}.py").read_text())
  )
  first, _, rest = document.partition("\n\n")
  assert "\n" not in first and first.endswith(".")
  command = rest.split("\n\n")[0]
  assert f"--config=configs/{path}.py" in command.replace("\\\n", " ")
  assert "--workdir=" in command
  module = re.search(r"python -m (vigor_jax\.\w+)", command)[1]
  assert importlib.util.find_spec(module)


def test_what_is_not_known_is_said(root):
  for name in PUBLISHED:
    text = " ".join((root / "configs" / f"{name}.py").read_text().split())
    assert "Expected:" in text and "has not run it" in text, name
  assert "Phi-4-mini" in (
    root / "configs" / "qwen2p5_7b_math_dapo.py"
  ).read_text()


def test_phi_is_refused_by_name():
  config = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
  with pytest.raises(families.UnsupportedModel, match="phi3"):
    families.read_config(config, "x", dtype="float32", param_dtype="float32")


# In miniature: the same configuration on a tiny checkpoint and made data.


def _checkpoint(folder):
  """A tiny Qwen2.5 with a tokenizer and a chat template of its kind."""
  from vigor_jax.policy import transformer
  from vigor_jax.policy import weights

  tokenizer = tokenizer_folders.qwen_like(folder / "tokenizer")
  sizes = transformer.Sizes(
    layers=1, width=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=340,
    qkv_bias=True, qk_norm=False, tied=True, rope_theta=1e4, rope_scaling=(),
    norm_eps=1e-6, dtype="float32", param_dtype="float32",
  )
  _, params = transformer.create(sizes, 0)
  weights.to_folder(
    params, sizes, str(folder / "model"), dtype="float32",
    config=families.write_config(sizes, 2048), tokenizer=tokenizer,
  )
  return str(folder / "model")


def _sets(folder):
  """MATH, DAPO-Math and AIME as their publishers lay them out, a few each."""
  def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

  problem = lambda i: {"problem": f"What is {i}+{i}?",
                       "solution": f"\\boxed{{{2 * i}}}",
                       "answer": str(2 * i), "level": "Level 2"}
  write(folder / "math/train/a.jsonl", map(problem, range(40)))
  write(folder / "math/test/a.jsonl", map(problem, range(50, 56)))
  write(folder / "dapo_math/train/a.jsonl", (
    {"prompt": f"Sum of {i} and 1?", "solution": str(i + 1)}
    for i in range(60)))
  write(folder / "aime24/test/a.jsonl", (
    {"problem": f"Find {i}.", "answer": str(i)} for i in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2p5_3b_math", "qwen2p5_7b_math_dapo"])
def test_a_step_in_miniature(root, tmp_path, name):
  from vigor_jax import evaluate
  from vigor_jax import train

  _sets(tmp_path / "sets")
  config = load(root, name, "vigor")
  config.topology = ""
  config.mesh.update(fsdp=1, tensor=1)
  config.model.sizes = config_lib.default_config().model.sizes
  config.model.dtype = "float32"
  config.model.checkpoint = _checkpoint(tmp_path)
  config.task.folder = str(tmp_path / "sets") + (
    "" if config.task.name == "mixture" else "/math"
  )
  config.task.held_out_share = 0.2
  config.update(prompts_per_step=8, rollout_budget=64, total_steps=1)
  config.optimizer.warmup_steps = 1
  config.policy.update(row_length=512, rows_per_microbatch=4)
  config.sampling.update(slots=16, chunk=4, prompt_buckets=(256, 480),
                         max_new_tokens=8, prefill_batch=4)
  config.task.max_prompt_length = 480
  config.reward.workers = 1
  config.evaluation.update(suite="math, aime24(samples=2)", num_prompts=6,
                           every_steps=1,
                           suite_folder=str(tmp_path / "sets"))
  summary = train.train(config_lib.validate(config), str(tmp_path / "run"),
                        quiet=True)
  assert summary["rollouts"] == 64
  last = summary["curve"][-1]
  assert {"eval/accuracy", "eval/math/accuracy", "eval/aime24/pass@2",
          "eval/aime24/cons@2", "eval/accuracy_weighted"} <= set(last)
  samples = [json.loads(line)
             for line in (tmp_path / "run/samples.jsonl").read_text().split("\n")
             if line]
  prompt = samples[-1]["samples"][0]["prompt"]
  assert prompt.startswith("<|im_start|>system\nPlease reason step by step")
  assert prompt.endswith("<|im_start|>assistant\n")
  # The checkpoint's folder alone, by the same configuration.
  assert evaluate._with_config(
    ["evaluate", f"--checkpoint={config.model.checkpoint}"]
  )[-1].startswith("--checkpoint")
