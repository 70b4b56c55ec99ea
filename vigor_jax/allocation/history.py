"""What an allocator remembers about prompts, keyed by uid."""

from __future__ import annotations

import numpy as np

# Streams of fresh prompts never show a uid twice; the table must not grow
# with them for ever. The oldest entries go first.
DEFAULT_LIMIT = 2**17


class History:
  """A table of floats per prompt, JSON-able, of bounded size.

  Args:
    columns: names of the columns.
    default: row of a prompt that has not been seen, one value per column.
    limit: most rows kept.
  """

  def __init__(self, columns, default, limit: int = DEFAULT_LIMIT):
    self.columns = tuple(columns)
    self.default = tuple(float(x) for x in default)
    self.limit = limit
    self.rows: dict[int, tuple[float, ...]] = {}

  def __len__(self) -> int:
    return len(self.rows)

  def get(self, uids) -> np.ndarray:
    """Rows of the uids: float64 [k, columns]."""
    rows = [self.rows.get(int(u), self.default) for u in uids]
    return np.asarray(rows, np.float64).reshape(-1, len(self.columns))

  def seen(self, uids) -> np.ndarray:
    """bool [k]: there is a row."""
    return np.array([int(u) in self.rows for u in uids], bool)

  def put(self, uids, values) -> None:
    """Sets rows, float [k, columns]; they become the newest."""
    values = np.asarray(values, np.float64).tolist()
    for uid, row in zip(np.asarray(uids).tolist(), values):
      self.rows.pop(uid, None)
      self.rows[uid] = tuple(row)
    while len(self.rows) > self.limit:
      del self.rows[next(iter(self.rows))]

  def drop(self, uids) -> None:
    """Forgets the uids."""
    for uid in np.asarray(uids).tolist():
      self.rows.pop(uid, None)

  def state_dict(self) -> dict:
    return {
      "uids": list(self.rows),
      "rows": [list(row) for row in self.rows.values()],
    }

  def load_state_dict(self, state: dict) -> None:
    self.rows = {
      int(uid): tuple(map(float, row))
      for uid, row in zip(state["uids"], state["rows"], strict=True)
    }


def merge_by_uid(uids, *values) -> tuple[np.ndarray, ...]:
  """Adds up the values of equal uids (a pool may cross an epoch's end).

  Returns:
    (distinct uids in ascending order, sums...).
  """
  distinct, index = np.unique(uids, return_inverse=True)
  sums = [np.bincount(index, v, len(distinct)) for v in values]
  return distinct, *sums
