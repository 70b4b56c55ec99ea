"""Configuration: what is refused, with which words, and what is kept."""

import ast
import dataclasses
import json
import os
import resource
import subprocess
import sys

import pytest

from vigor_jax import allocation
from vigor_jax import config as config_lib
from vigor_jax import tasks
from vigor_jax.config import fields
from vigor_jax.config import legal

ConfigError = config_lib.ConfigError


@pytest.fixture
def example(root):
  return f"--config={root}/configs/arithmetic.py"


def _parse(*arguments):
  return config_lib.parse(["train", *arguments], needs_workdir=False).config


def _refused(*arguments):
  with pytest.raises(ConfigError) as caught:
    _parse(*arguments)
  return str(caught.value)


def _file(tmp_path, body):
  path = tmp_path / "mine.py"
  path.write_text(
    "from vigor_jax.config import default_config\n\n"
    "def get_config():\n  config = default_config()\n"
    f"  {body}\n  return config\n"
  )
  return f"--config={path}"


# Modules of one's own.

_RULES = """
from vigor_jax import allocation
from vigor_jax.allocation import uniform

class Mine(uniform.Uniform):
  name = "imported_rule"

allocation.REGISTRY["imported_rule"] = Mine
"""


def test_imported_modules_register_themselves_first(
  example, tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(allocation, "REGISTRY", dict(allocation.REGISTRY))
  (tmp_path / "imported_rules.py").write_text(_RULES)
  config = _parse(
    example, "--config.allocation.name=imported_rule",
    "--config.imports=imported_rules",
  )
  assert config.allocation.name == "imported_rule"
  assert config.imports == ("imported_rules",)
  # Another process has only what is recorded.
  del allocation.REGISTRY["imported_rule"]
  sys.modules.pop("imported_rules")
  again = config_lib.from_json(config_lib.to_json(config))
  assert again.to_dict() == config.to_dict()
  sys.modules.pop("imported_rules")
  plain = _parse(example, "--config.imports=imported_rules")
  assert [str(d) for d in config_lib.check_resume(_parse(example), plain)] == [
    "imports: () -> ('imported_rules',)"
  ]
  sys.modules.pop("imported_rules")


def test_imports_that_fail_are_named(example, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "failing_import.py").write_text("x = 1\n1 / 0\n")
  message = _refused(example, "--config.imports=failing_import")
  for word in ("failing_import", "ZeroDivisionError", "line 2"):
    assert word in message
  message = _refused(example, "--config.imports=not_there_at_all")
  assert "not_there_at_all" in message and "PYTHONPATH" in message


# Overrides of the command line.


def test_overrides_keep_their_types(example):
  config = _parse(
    example, "--config.seed=3", "--config.optimizer.learning_rate=2e-5",
    "--config.model.sizes.tied=False", "--config.policy.remat=true",
    "--config.sampling.prompt_buckets=8,16", "--config.profile_steps=(3, 4)",
    "--config.optimizer.eps=1", "--config.allocation.name", "uniform",
  )
  assert config.seed == 3 and type(config.seed) is int
  assert config.optimizer.learning_rate == 2e-5
  assert config.model.sizes.tied is False and config.policy.remat is True
  assert config.sampling.prompt_buckets == (8, 16)
  assert config.profile_steps == (3, 4)
  assert type(config.optimizer.eps) is float
  assert config.allocation.name == "uniform"


@pytest.mark.parametrize(
  "override, names",
  [
    ("allocation.nmae=uniform", ["'allocation.nmae'", "'allocation.name'"]),
    ("rounds=3", ["'rounds'", "top level", "'allocation.vigor.rounds'"]),
    ("learning_rate=1", ["'optimizer.learning_rate'"]),
    ("kl=0.1", ["'policy.kl.coef'"]),
    ("polcy.kl.coef=0", ["no section 'polcy.kl'", "'policy.kl.coef'"]),
    ("policy.kl=0.1", ["section", "policy.kl.coef, policy.kl.form"]),
    ("task.difficlty=plain", ["section 'task'", "'task.difficulty'"]),
    ("allocation.vigor.variance.x=1", ["'allocation.vigor.variance'"]),
    ("seed=1.5", ["seed: expected int", "'1.5'"]),
    ("seed=1e3", ["seed: expected int", "'1e3'"]),
    ("seed=True", ["seed: expected int"]),
    ("seed=three", ["seed: expected int"]),
    ("seed=", ["seed: expected int", "''"]),
    ("seed=99999999999999999999", ["seed: must lie in [-2147483647, 21474"]),
    ("seed=" + "9" * 5000, ["seed: must lie in", "of 5000 characters"]),
    ("rollout_budget=99999999", ["rollout_budget: must lie in [1, 65536]"]),
    ("model.sizes.tied=0", ["model.sizes.tied: expected bool", "true or false"]),
    ("model.sizes.tied=yes", ["model.sizes.tied: expected bool"]),
    ("optimizer.learning_rate=fast", ["learning_rate: expected float"]),
    ("optimizer.learning_rate=nan", ["learning_rate: must be finite"]),
    ("optimizer.learning_rate=inf", ["learning_rate: must be finite"]),
    ("sampling.prompt_buckets=16,x", ["prompt_buckets: expected tuple"]),
    ("sampling.prompt_buckets=16,32.5", ["prompt_buckets[1]: expected int"]),
  ],
)
def test_wrong_names_levels_and_types(example, override, names):
  message = _refused(example, f"--config.{override}")
  for name in names:
    assert name in message


def test_rewards_may_be_combined(example):
  name = "0.8*exact + 0.2*vigor_jax.rewards.exact:verify"
  assert _parse(example, f"--config.reward.name={name}").reward.name == name


def test_the_named_allocators_own_field_is_the_nearest(example):
  message = _refused(
    example, "--config.allocation.name=eb_widening", "--config.rounds=3"
  )
  assert "did you mean 'allocation.eb_widening.rounds'" in message


@pytest.mark.parametrize(
  "override, names",
  [
    ("policy.loss=grop", ["policy.loss", "'grop'", "'gspo'", "mean 'grpo'"]),
    ("stage=train", ["stage", "'rl', 'sft'"]),
    ("allocation.name=vigr", ["allocation.name", "mean 'vigor'"]),
    ("allocation.train_on=none", ["allocation.train_on", "'survivors'"]),
    ("task.name=arithmetics", ["task.name", "'arithmetic'"]),
    ("task.difficulty=easy", ["difficulty", "'easy'", "sparse_signal"]),
    ("total_steps=0", ["total_steps: must be at least 1, got 0"]),
    ("sampling.top_p=0", ["sampling.top_p: must lie in (0, 1]"]),
    ("optimizer.eps=0", ["optimizer.eps: must be more than 0"]),
    ("sampling.slots=-1", ["sampling.slots: must lie in [0, 65536]"]),
    ("sampling.memory=-1", ["sampling.memory: must be at least 0"]),
    ("sampling.memory=2", ["sampling.memory=2.0", "sampling.slots=64", "=0"]),
    ("sampling.prompt_buckets=32,16", ["prompt_buckets", "(32, 16)"]),
    ("sampling.prompt_buckets=()", ["prompt_buckets", "()"]),
    ("sampling.temperature=0", ["sampling.temperature", "more than 0"]),
    ("sampling.max_new_tokens=49", ["policy.row_length", "57 or more"]),
    ("policy.row_buckets=16,8", ["policy.row_buckets: (16, 8)",
                                 "policy.row_length"]),
    ("policy.row_length=60 policy.row_buckets=16",
     ["policy.row_buckets: (16,)", "2, 3, 4, 5, 6, 10, 12, 15, 20, 30"]),
    ("policy.minibatches=257", ["policy.minibatches", "rollout_budget=256"]),
    (
      "policy.minibatches=4 policy.update_rollouts=3",
      ["policy.update_rollouts: 3", "policy.minibatches=4"],
    ),
    (
      "policy.kl.coef=0.1 policy.update_rollouts=32",
      ["policy.update_rollouts: 32", "policy.kl.coef=0"],
    ),
    ("policy.update_rollouts=-1", ["policy.update_rollouts", "-1"]),
    (
      "policy.kl.coef=0.1 policy.update_noise=1.0",
      ["policy.update_noise: 1.0", "policy.kl.coef=0"],
    ),
    ("policy.update_noise=-0.5", ["policy.update_noise", "-0.5"]),
    ("policy.rollout_is_cap=0.5", ["policy.rollout_is_cap", "at least 1"]),
    ("policy.clip_low=-0.2", ["policy.clip_low: must be -1", "-0.2"]),
    ("policy.clip_high=-0.5", ["policy.clip_high: must be -1", "-0.5"]),
    ("optimizer.weight_decay=0.1", ["weight_decay=0.1", "'adam'", "'adamw'"]),
    ("optimizer.warmup_steps=101", ["warmup_steps", "total_steps=100"]),
    ("sft.warmup_steps=100000", ["sft.warmup_steps", "sft.steps"]),
    ("evaluation.fresh_rollouts=1", ["fresh_rollouts", "at least 2"]),
    ("model.sizes.kv_heads=3", ["kv_heads", "[1, 2, 4]"]),
    ("model.sizes.head_dim=15", ["head_dim", "even"]),
    ("model.family=qwen3", ["model.sizes.qk_norm", "'qwen3'", "True"]),
    ("mesh.data=0", ["mesh.data"]),
    ("topology=v5e-16", ["topology", "v5e:4x4"]),
    ("profile_steps=0,", ["profile_steps: 0", "1 to total_steps=100"]),
    ("reward.name=exat", ["reward.name: 'exat'", "module:function", "'exact'"]),
    ("reward.name=nowhere:score", ["no module named 'nowhere'"]),
    ("reward.noise=0.7", ["reward.noise"]),
    ("stage=sft", ["init_from", "'auto'"]),
    ("sft.steps=0", ["sft."]),
    ("model.checkpoint=/", ["model.checkpoint", "config.json", "init_from"]),
    ("model.sizes.rope_scaling=yarn:a", ["rope_scaling", "llama3:FACTOR"]),
    ("init_from=/nowhere/at/all", ["init_from", "does not exist"]),
  ],
)
def test_values_that_cannot_be_run(example, override, names):
  message = _refused(
    example, *(f"--config.{one}" for one in override.split(" "))
  )
  for name in names:
    assert name in message


def test_a_path_of_a_checkpoint_has_a_nearest(example, tmp_path):
  (tmp_path / "warm_start").mkdir()
  message = _refused(example, f"--config.init_from={tmp_path}/warm_strt")
  assert f"did you mean '{tmp_path}/warm_start'" in message
  config = _parse(example, f"--config.init_from={tmp_path}/warm_start")
  assert config.init_from.endswith("warm_start")


def test_schedules_that_cannot_spend_the_budget(example):
  message = _refused(example, "--config.rollout_budget=250")
  assert message.startswith("allocation.vigor: rounds=4")
  assert "prompts_per_step=32 with budget=256" in message
  message = _refused(example, "--config.allocation.vigor.rounds=9")
  assert "rounds=4" in message
  message = _refused(
    example, "--config.allocation.name=uniform", "--config.rollout_budget=100"
  )
  assert "allocation.uniform" in message and "budget" in message


def test_options_of_another_allocator_have_no_effect(example):
  message = _refused(example, "--config.allocation.eb_widening.rounds=4")
  assert "allocation.eb_widening.rounds=4 has no effect" in message
  assert "allocation.name='vigor'" in message
  config = _parse(
    example, "--config.allocation.eb_widening.rounds=4",
    "--config.allocation.name=eb_widening",
  )
  assert config.allocation.eb_widening.rounds == 4


@pytest.mark.parametrize(
  "arguments, names",
  [
    (["--confg=x"], ["--confg", "--config"]),
    (["--seed=1"], ["--seed", "--config.seed"]),
    (["--config.seed"], ["--config.seed", "value is missing"]),
    (["extra"], ["'extra'"]),
    ([], ["--config is missing"]),
    (["--config=configs/arithmetc.py"], ["no file", "configs/arithmetic.py"]),
    (["--config=nowhere/x.py"], ["no file", "nowhere"]),
    (["--config=configs/arithmetic.py:plane"], ["'plane'", "plain"]),
  ],
)
def test_wrong_flags_and_files(monkeypatch, root, arguments, names):
  monkeypatch.chdir(root)
  message = _refused(*arguments)
  for name in names:
    assert name in message


def test_programs_add_flags(example, tmp_path):
  def define(values):
    config_lib.cli.flags.DEFINE_list(
      "allocators", [], "rules to compare", flag_values=values
    )

  argv = ["compare", example, "--allocators=uniform,vigor:rounds=4"]
  with pytest.raises(ConfigError, match="--workdir is missing"):
    config_lib.parse(argv, define)
  args = config_lib.parse([*argv, f"--workdir={tmp_path}"], define)
  assert args.flags.allocators == ["uniform", "vigor:rounds=4"]
  assert args.workdir == str(tmp_path)
  with pytest.raises(ConfigError, match="--alocators.*--allocators"):
    config_lib.parse([*argv, "--alocators=x"], define)
  (tmp_path / "file").touch()
  with pytest.raises(ConfigError, match="is a file"):
    config_lib.parse([*argv, f"--workdir={tmp_path}/file"], define)
  with pytest.raises(ConfigError, match="file/a/b' cannot be made: .*is a file"):
    config_lib.parse([*argv, f"--workdir={tmp_path}/file/a/b"], define)


def test_a_place_without_permission_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(os, "access", lambda path, mode: False)  # Root may all.
  with pytest.raises(ConfigError, match="--workdir: .*no permission.*write"):
    config_lib.check_place("--workdir", str(tmp_path / "a" / "b"))
  config_lib.check_place("--workdir", "gs://bucket/run")


# Config files.


@pytest.mark.parametrize(
  "body, names",
  [
    ("config.allocation.vigr.rounds = 4", ["line 5", "'allocation.vigor'"]),
    ("config.policy.cliplow = 1.0", ["line 5", "'policy.clip_low'"]),
    ("config.seed = '3'", ["line 5", "'seed': expected int, got str"]),
    ("config.seed = True", ["seed: expected int"]),
    ("config.seed = 1.5", ["line 5", "'seed': expected int, got float"]),
    ("config.model.sizes.tied = 'False'", ["'tied': expected bool"]),
    ("config = {'sed': 1}", ["'sed'", "'seed'"]),
    ("config = {3: 1}", ["3 is no field's name"]),
    ("config = {'task': {'name': []}}", ["task.name: expected str, got []"]),
    ("raise SystemExit(4)", ["line 5", "ends the program"]),
    ("config = 3", ["returned a int", "ConfigDict"]),
    ("raise ValueError('my own words')", ["line 5", "my own words"]),
    ("config = (", ["line", "was never closed"]),
  ],
)
def test_errors_in_files_name_file_and_line(tmp_path, body, names):
  message = _refused(_file(tmp_path, body))
  assert "mine.py" in message
  for name in names:
    assert name in message


def test_a_file_needs_get_config_and_its_argument(tmp_path):
  path = tmp_path / "empty.py"
  path.write_text("x = 1\n")
  assert "no get_config" in _refused(f"--config={path}")
  path.write_text("get_config = 3\n")
  assert "must be a function, got 3" in _refused(f"--config={path}")
  (tmp_path / "notes.txt").touch()
  assert "neither a Python" in _refused(f"--config={tmp_path}/notes.txt")
  message = _refused(_file(tmp_path, "pass") + ":arg")
  assert "takes no argument" in message


@pytest.mark.parametrize(
  "content, words",
  [
    (b"[]", "expected an object.*list"),
    (b'"seed"', "expected an object.*str"),
    (b"", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"optimizer": {"eps": NaN}}', "optimizer.eps: must be finite"),
    (b'{"seed": {"a": 1}}', "no section 'seed'"),
    (b'{"seed": "1"}', "seed: expected int"),
    (b'{"sed": 1}', "unknown field 'sed'.*'seed'"),
    (b"\xff\xfe", "cannot be read"),
  ],
)
def test_json_that_is_no_configuration(tmp_path, content, words):
  path = tmp_path / "config.json"
  path.write_bytes(content)
  with pytest.raises(ConfigError, match=f"config.json: .*{words}"):
    config_lib.load_file(str(path))


def test_the_reward_of_a_task_of_records_is_checked_too():
  config = config_lib.default_config("jsonl")
  config.task.path = "nowhere.jsonl"
  for name, words in [
    ("exat", "task.reward: 'exat'.*'exact'"),
    ("nowhere:score", "task.reward: .*no module named 'nowhere'"),
    ("", "task.reward: "),
  ]:
    config.task.reward = name
    with pytest.raises(ConfigError, match=words):
      config_lib.validate(config)
  config.task.reward = "exact"
  config_lib.validate(config)


def test_a_file_may_give_only_what_it_changes(tmp_path):
  spec = _file(tmp_path, "config = {'seed': 4, 'optimizer': {'eps': 1}}")
  config = _parse(spec)
  assert config.seed == 4 and config.optimizer.eps == 1.0
  assert config.total_steps == config_lib.default_config().total_steps


def test_the_example_takes_its_stream_as_argument(example):
  assert _parse(example).task.difficulty == "sparse_signal"
  assert _parse(example + ":plain").task.difficulty == "plain"


def test_naming_a_task_brings_its_fields(example):
  other = next(n for n in sorted(tasks.REGISTRY) if n != "arithmetic")
  own = {f.name for f in dataclasses.fields(tasks.REGISTRY[other].options)}
  config = config_lib.default_config(other)
  assert set(config.task) == {"name", *own}
  config = config_lib.default_config()
  config_lib.loading.apply_overrides(config, [("task.name", other)], True)
  assert set(config.task) == {"name", *own}


# The whole.


def test_every_allocator_has_a_section_with_its_defaults():
  config = config_lib.default_config()
  for name, allocator in allocation.REGISTRY.items():
    assert dict(config.allocation[name]) == dataclasses.asdict(
      allocator.Options()
    )


def test_defaults_are_locked_and_valid():
  config = config_lib.default_config()
  assert config_lib.validate(config) is config
  with pytest.raises(AttributeError):
    config.new_field = 1


def test_every_choice_and_range_names_a_field():
  known = fields.flatten(config_lib.default_config())
  assert set(legal.CHOICES) | set(legal.RANGES) <= set(known)
  numbers = {
    path for path, value in known.items()
    if type(value) in (int, float)
    and not path.startswith(("task.", "allocation."))
  }
  assert numbers == set(legal.RANGES)


def test_every_field_is_read_somewhere(root):
  """A field that no module reads cannot change anything."""
  read = set()
  for path in (root / "vigor_jax").rglob("*.py"):
    if path.parent.name != "config":
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
          read.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
          read.add(node.value)
  # These act through a function of the configuration package, or by refusal.
  through = {
    "mesh.data": "mesh_shape", "mesh.fsdp": "mesh_shape",
    "mesh.tensor": "mesh_shape", "topology": "mesh_shape",
  }
  names = {
    path for path in fields.flatten(config_lib.default_config())
    if through.get(path, path.split(".")[-1]) not in read
  }
  # One refuses sizes that contradict it, one acts before there is a config.
  assert names <= {"model.family", "imports"}


def test_json_round_trip(example):
  config = _parse(example, "--config.sampling.prompt_buckets=8,16")
  text = config_lib.to_json(config)
  again = config_lib.from_json(text)
  assert again == config
  assert again.sampling.prompt_buckets == (8, 16)
  assert config_lib.to_json(again) == text
  with pytest.raises(ConfigError, match="config.json: unknown field 'sed'"):
    config_lib.from_json(json.dumps({"sed": 1}))
  with pytest.raises(ConfigError, match="not JSON"):
    config_lib.from_json("{")


def test_what_may_change_in_a_used_workdir(example):
  old = _parse(example)
  new = _parse(
    example, "--config.total_steps=200", "--config.evaluation.every_steps=5",
    "--config.checkpoint.keep=9",
  )
  changes = config_lib.check_resume(old, new)
  assert [str(change) for change in changes] == [
    "checkpoint.keep: 3 -> 9",
    "evaluation.every_steps: 10 -> 5",
    "total_steps: 100 -> 200",
  ]
  assert config_lib.fingerprint(old) == config_lib.fingerprint(new)
  other = _parse(
    example, "--config.seed=5", "--config.total_steps=7",
    "--config.policy.loss=gspo",
  )
  with pytest.raises(ConfigError) as caught:
    config_lib.check_resume(old, other, "runs/x")
  message = str(caught.value)
  assert "runs/x" in message
  assert "policy.loss: 'grpo' -> 'gspo'" in message
  assert "seed: 0 -> 5" in message
  assert "total_steps:" not in message
  assert config_lib.fingerprint(old) != config_lib.fingerprint(other)
  assert config_lib.check_resume(old, _parse(example)) == []


def test_slots_that_a_run_chose_are_continued(example):
  old = _parse(example, "--config.sampling.slots=0", "--config.sampling.memory=2")
  first = old.copy_and_resolve_references()
  old.sampling.slots = 48  # As the run stores it.
  assert config_lib.check_resume(old, first) == []
  # Its own config.json: the slots themselves.
  own = old.copy_and_resolve_references()
  own.sampling.memory = 0.0
  assert config_lib.check_resume(old, own) == []
  for field, value in (("memory", 3.0), ("slots", 32)):
    other = first.copy_and_resolve_references()
    other.sampling[field] = value
    with pytest.raises(ConfigError, match=f"sampling.{field}: "):
      config_lib.check_resume(old, other)


def test_another_task_differs_by_its_fields(example):
  old = _parse(example)
  other = next(n for n in sorted(tasks.REGISTRY) if n != "arithmetic")
  paths = [
    d.path for d in config_lib.diff(old, config_lib.default_config(other))
  ]
  assert "task.name" in paths


def test_overrides_of_a_comparison(example):
  base = _parse(example, "--config.allocation.vigor.ties=random")
  row = config_lib.with_overrides(
    base, {"allocation.name": "uniform", "prompts_per_step": "64"}
  )
  assert row.prompts_per_step == 64 and row.allocation.name == "uniform"
  assert base.prompts_per_step == 32 and base.allocation.name == "vigor"
  row = config_lib.with_overrides(base, {"rounds": 2, "keep": "0.25",
                                         "growth": 4.0, "initial_rollouts": 4})
  assert dict(row.allocation.vigor)["keep"] == 0.25
  assert config_lib.validate(row).allocation.vigor.rounds == 2
  # Options of the rule that was named before do not linger.
  uniform = config_lib.with_overrides(row, {"allocation.name": "uniform"})
  assert config_lib.validate(uniform).allocation.vigor.rounds == 4
  assert row.allocation.vigor.rounds == 2
  with pytest.raises(ConfigError, match="'round'.*'rounds'"):
    config_lib.with_overrides(base, {"round": 2})
  with pytest.raises(ConfigError, match="allocation.vigor.rounds: expected int"):
    config_lib.with_overrides(base, {"rounds": "2.5"})


def test_pretty_shows_what_is_used(example):
  text = config_lib.pretty(_parse(example))
  assert "allocation.vigor.rounds" in text
  assert "eb_widening" not in text


def test_brief_shows_what_was_chosen(example):
  config = _parse(example)
  config.sampling.prompt_buckets = (8, 16)
  lines = config_lib.brief(config, "runs/a/config.json").splitlines()
  assert len(lines) < 20 and max(map(len, lines)) <= 80
  fields = " ".join(lines).split()
  for shown in ("seed=0", "name=arithmetic", "name=vigor", "vigor.rounds=4",
                "difficulty=sparse_signal", "init_from=auto",
                "prompt_buckets=8,16"):
    assert shown in fields
  assert "clip_norm" not in " ".join(fields)
  # What it leaves out are exactly the fields at their defaults.
  left = int(lines[0].split("; ")[1].split()[0])
  count = len(config_lib.pretty(config).splitlines())
  assert left == count - sum("=" in field for field in fields)
  others = config_lib.rest(config).splitlines()
  assert max(map(len, others)) <= 80
  assert "optimizer" in " ".join(others) and "clip_norm=" in " ".join(others)
  assert left == sum(word.count("=") for line in others for word in line.split())


@pytest.mark.parametrize(
  "mesh, devices, shape",
  [((-1, 1, 1), 8, (8, 1, 1)), ((-1, 4, 1), 8, (2, 4, 1)),
   ((2, 2, 2), 8, (2, 2, 2)), ((-1, 8, 1), 8, (1, 8, 1))],
)
def test_mesh_shape(mesh, devices, shape):
  config = config_lib.default_config()
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
  assert config_lib.mesh_shape(config, devices) == shape


def test_a_mesh_that_does_not_fit_is_refused():
  config = config_lib.default_config()
  config.mesh.fsdp, config.mesh.tensor = 3, 2
  with pytest.raises(ConfigError, match=r"8 devices.*\(4, 1, 2\)"):
    config_lib.mesh_shape(config, 8)


def test_a_run_meant_for_another_topology_is_refused():
  config = config_lib.default_config()
  config.topology = "v5e:2x4"
  assert config_lib.mesh_shape(config, 8) == (8, 1, 1)
  assert config_lib.mesh_shape(config, 16) == (16, 1, 1)
  with pytest.raises(ConfigError, match="v5e:2x4 has 8 chips, but 1 dev"):
    config_lib.mesh_shape(config, 1)


# As a program.


def _program(root, *arguments):
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, "-m", "vigor_jax.config", *arguments],
    cwd=root, capture_output=True, text=True, timeout=300,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  # Of the processor: others may be at work beside.
  return done, (after.ru_utime + after.ru_stime
                - before.ru_utime - before.ru_stime)


def test_a_typo_ends_within_five_seconds_without_a_traceback(root):
  done, seconds = _program(
    root, "--config=configs/arithmetic.py", "--config.allocation.nmae=uniform"
  )
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.startswith("error: unknown field 'allocation.nmae'")
  assert "Traceback" not in done.stderr
  assert seconds < 5


def test_a_right_one_is_printed_resolved(root):
  done, _ = _program(
    root, "--config=configs/arithmetic.py:plain", "--config.seed=9"
  )
  assert done.returncode == 0 and done.stderr == ""
  lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
  assert lines["seed"] == "9" and lines["task.difficulty"] == "'plain'"


def test_help_lists_every_field(root):
  done, _ = _program(root, "--help")
  assert done.returncode == 0
  assert "--config.allocation.vigor.rounds=4" in done.stdout
  assert "--workdir" in done.stdout


def test_importing_the_configuration_is_light(root):
  code = (
    "import sys, vigor_jax.config; "
    "heavy = {'jax', 'tensorflow', 'seqio', 'flax', 'matplotlib'}; "
    "sys.exit(len(heavy & set(sys.modules)))"
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=300)
  assert done.returncode == 0
