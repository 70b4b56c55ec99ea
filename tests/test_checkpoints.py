"""Checkpoints: equality, atomicity, damage, other layouts."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from vigor_jax import checkpoints


class _Net(nnx.Module):
  def __init__(self, seed=0, width=8):
    rngs = nnx.Rngs(seed)
    self.first = nnx.Linear(4, width, rngs=rngs)
    self.second = nnx.Linear(width, 2, rngs=rngs)


def _state(seed=0, width=8):
  _, params = nnx.split(_Net(seed, width))
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
  opt_state = optimizer.init(params)
  gradients = jax.tree.map(jnp.ones_like, params)
  _, opt_state = optimizer.update(gradients, opt_state, params)
  return params, opt_state


def _assert_equal(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(np.testing.assert_array_equal, left, right)


HOST = {
  "step": 7,
  "counters": {"rollouts": 1792, "tokens": 2**40, "seconds": 0.1 + 0.2},
  "allocator": {"counts": [[1, 2], [3, 4]], "prior": [1e-17, 0.25]},
  "stream": {"position": 3, "returned": []},
  "name": None,
}


def test_restores_bit_for_bit(tmp_path):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path)
  assert store.latest() is None
  assert store.save(7, params, opt_state, HOST)
  store.close()

  again = checkpoints.Checkpoints(tmp_path)
  assert again.latest() == 7
  blank = _state(seed=1)
  restored = again.restore(7, *map(checkpoints.targets_of, blank))
  again.close()
  _assert_equal(restored[0], params)
  _assert_equal(restored[1], opt_state)
  assert restored[2] == HOST


def test_paths_do_not_name_library_classes():
  params, opt_state = _state()
  assert sorted(checkpoints.flatten(params)) == [
    "first/bias", "first/kernel", "second/bias", "second/kernel"
  ]
  assert "1/0/mu/first/kernel" in checkpoints.flatten(opt_state)


def test_saved_arrays_may_be_donated_at_once(tmp_path):
  step_up = jax.jit(lambda x: x + 1, donate_argnums=0)
  array = step_up(jnp.zeros((512, 512)))
  store = checkpoints.Checkpoints(tmp_path)
  store.save(1, {"w": array}, {"n": jnp.zeros(1)}, {})
  for _ in range(20):
    array = step_up(array)
  jax.block_until_ready(array)
  target = {"w": jnp.zeros((512, 512))}
  restored, _, _ = store.restore(1, target, {"n": jnp.zeros(1)})
  store.close()
  assert np.all(np.asarray(restored["w"]) == 1)
  assert array[0, 0] == 21


def test_keeps_the_last_and_ignores_a_step_it_has(tmp_path):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path, keep=2)
  for step in (1, 2, 3, 4):
    assert store.save(step, params, opt_state, {"step": step})
  assert not store.save(4, params, opt_state, {"step": "again"})
  store.wait()
  assert store.steps() == [3, 4]
  assert store.restore(4, params, opt_state)[2] == {"step": 4}
  store.close()


def test_nan_in_host_state_is_refused(tmp_path):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path)
  with pytest.raises(ValueError, match="JSON compliant"):
    store.save(1, params, opt_state, {"seconds": float("nan")})
  store.close()
  assert store.latest() is None


def test_restore_params_takes_a_run_or_a_step(tmp_path):
  store = checkpoints.Checkpoints(tmp_path)
  for step in (3, 10):
    params, opt_state = _state(seed=step)
    store.save(step, params, opt_state, {"step": step})
  store.close()
  target = checkpoints.targets_of(_state()[0])
  for path, step in (
    (tmp_path, 10),
    (tmp_path / "checkpoints", 10),
    (tmp_path / "checkpoints" / "3", 3),
  ):
    assert checkpoints.step_of(str(path)) == step
    params, host = checkpoints.restore_params(str(path), target)
    assert host == {"step": step}
    again = checkpoints.at_step(str(path), step)
    assert again == str(tmp_path / "checkpoints" / str(step))
  gone = str(tmp_path / "checkpoints" / "4")
  with pytest.raises(checkpoints.CheckpointError, match=r"of step 4.*\[3, 10\]"):
    checkpoints.restore_params(gone, target)
    _assert_equal(params, _state(seed=step)[0])


def test_errors_name_what_is_missing(tmp_path):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path)
  store.save(5, params, opt_state, {})
  with pytest.raises(checkpoints.CheckpointError, match=r"no step 6.*\[5\]"):
    store.restore(6, params, opt_state)
  wider = _state(width=16)[0]
  with pytest.raises(
    checkpoints.CheckpointError, match=r"first/bias.*\(8,\).*\(16,\)"
  ):
    store.restore(5, wider, opt_state)
  with pytest.raises(checkpoints.CheckpointError, match="has no 'third'"):
    store.restore(5, {"third": jnp.zeros(2)}, opt_state)
  flat = checkpoints.flatten(params)
  flat.pop("first/bias")
  with pytest.raises(checkpoints.CheckpointError, match="'first/bias'"):
    store.restore(5, flat, opt_state)
  store.close()
  with pytest.raises(checkpoints.CheckpointError, match="no checkpoint"):
    checkpoints.restore_params(str(tmp_path / "nowhere"), params)


@pytest.mark.parametrize(
  "item, part",
  [("host", "metadata"), ("params", "manifest.ocdbt"), ("params", "d"),
   ("opt_state", "d"), ("params", "_METADATA"), ("host", "")],
)
def test_damage_is_reported_with_its_folder(tmp_path, item, part):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path)
  store.save(5, params, opt_state, {})
  store.close()
  victim = tmp_path / "checkpoints" / "5" / item / part
  files = [victim] if victim.is_file() else [
    file for file in victim.rglob("*") if file.is_file()
  ]
  if victim.name == "d":
    # The data may lie in either of two folders of orbax's layout.
    files += list((tmp_path / "checkpoints" / "5" / item).rglob("d/*"))
  for file in set(files):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
  again = checkpoints.Checkpoints(tmp_path)
  with pytest.raises(
    checkpoints.CheckpointError, match=r"checkpoints/5: cannot be restored"
  ):
    again.restore(5, params, opt_state)
  again.close()


def test_the_latest_step_may_be_replaced_while_it_is_read(tmp_path, monkeypatch):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path, keep=1)
  store.save(1, params, opt_state, {"step": 1})
  store.wait()
  restore, steps = checkpoints._restore, []

  def slow(manager, step, *rest):
    steps.append(step)
    if step == 1:
      store.save(2, params, opt_state, {"step": 2})
      store.close()
      shutil.rmtree(tmp_path / "checkpoints" / "1", ignore_errors=True)
    return restore(manager, step, *rest)

  monkeypatch.setattr(checkpoints, "_restore", slow)
  found = checkpoints.restore_params(str(tmp_path), params)
  assert steps == [1, 2] and found[1] == {"step": 2}
  # A step that was asked for by its number is that one or none.
  with pytest.raises(checkpoints.CheckpointError, match="no whole checkpoint"):
    checkpoints.restore_params(str(tmp_path / "checkpoints" / "1"), params)


def test_a_half_written_step_is_never_latest_and_can_be_saved(tmp_path):
  params, opt_state = _state()
  store = checkpoints.Checkpoints(tmp_path)
  store.save(1, params, opt_state, {"step": 1})
  store.close()
  # What a save that was killed leaves behind.
  whole = tmp_path / "checkpoints" / "1"
  half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
  (half / "params.orbax-checkpoint-tmp").mkdir(parents=True)
  (half / "_CHECKPOINT_METADATA").write_bytes(
    (whole / "_CHECKPOINT_METADATA").read_bytes()
  )
  again = checkpoints.Checkpoints(tmp_path)
  assert again.latest() == 1
  assert again.save(2, params, opt_state, {"step": 2})
  again.wait()
  assert again.latest() == 2
  assert again.restore(2, params, opt_state)[2] == {"step": 2}
  again.close()


def test_a_save_that_finds_no_room_is_named_and_can_be_repeated(
  tmp_path, caplog
):
  params, opt_state = {"w": jnp.ones((300, 300))}, {"m": jnp.zeros(3)}
  store = checkpoints.Checkpoints(tmp_path)
  store.save(1, params, opt_state, {"step": 1})
  store.wait()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # Stands for a full disk: the array's file cannot grow to its size.
  params = {"w": jax.random.normal(jax.random.key(0), (300, 300))}
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
  logger = logging.getLogger("absl")
  logger.addHandler(caplog.handler)
  try:
    with pytest.raises(
      checkpoints.CheckpointError,
      match=f"{tmp_path}.*could not be saved .File too large.;",
    ):
      store.save(2, params, opt_state, {"step": 2})
      store.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.removeHandler(caplog.handler)
  # The message is all that is seen: no traceback of a saving thread.
  assert not [record for record in caplog.records if record.exc_info]
  again = checkpoints.Checkpoints(tmp_path)
  assert again.latest() == 1
  assert again.save(2, params, opt_state, {"step": 2})
  again.close()
  assert checkpoints.restore_params(str(tmp_path), params)[1] == {"step": 2}


def _run(code, *arguments, **options):
  return subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
    stdout=subprocess.PIPE, text=True, cwd=os.getcwd(), **options,
  )


def test_kills_during_saves_lose_nothing(tmp_path):
  """Kills a process that only saves; what it finished stays restorable."""
  saver = """
    import sys, jax.numpy as jnp
    from vigor_jax import checkpoints
    store = checkpoints.Checkpoints(sys.argv[1], keep=2)
    step = store.latest() or 0
    if step:
      target = {"w": jnp.zeros((512, 512))}
      params, opt, host = store.restore(step, target, {"m": jnp.zeros(3)})
      assert (params["w"] == step).all() and host == {"step": step}, step
    print(step, flush=True)
    while True:
      step += 1
      arrays = {"w": jnp.full((512, 512), float(step))}
      store.save(step, arrays, {"m": jnp.zeros(3)}, {"step": step})
      print(step - 1, flush=True)  # This save waited for the one before.
  """
  rng = np.random.default_rng(0)
  whole = 0
  for _ in range(4):
    process = _run(saver, tmp_path)
    first = int(process.stdout.readline())
    assert first >= whole
    for _ in range(3):
      process.stdout.readline()
    time.sleep(0.2 * rng.random())
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    whole = max([first + 2, *map(int, output.split())])


def test_saved_on_eight_devices_restored_on_one_two_and_four(tmp_path):
  code = """
    import sys, json, jax, jax.numpy as jnp, numpy as np
    from vigor_jax import checkpoints
    workdir, count = sys.argv[1], int(sys.argv[2])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("fsdp",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    store = checkpoints.Checkpoints(workdir)
    if count == 8:
      w = jnp.arange(64 * 3, dtype=jnp.float32).reshape(64, 3)
      params = {"w": jax.device_put(w, rows)}
      opt = {"n": jax.device_put(jnp.int32(5), whole)}
      store.save(1, params, opt, {"devices": 8})
    else:
      target = ({"w": jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=rows)},
                {"n": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)})
      params, opt, host = store.restore(1, *target)
      assert params["w"].sharding == rows
      assert (np.asarray(params["w"]).ravel() == np.arange(192)).all()
      print(json.dumps([int(opt["n"]), host["devices"]]))
    store.close()
  """
  for count in (8, 1, 2, 4):
    environment = dict(
      os.environ, JAX_PLATFORMS="cpu",
      XLA_FLAGS=f"--xla_force_host_platform_device_count={count}",
    )
    process = _run(code, tmp_path, count, env=environment)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    if count != 8:
      assert json.loads(output.strip().splitlines()[-1]) == [5, 8]
