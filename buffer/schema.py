"""The tables of the buffer's store. docs/buffer.md explains them with queries. Used by `buffer.store`.

Where a group stands is derived, never stored: see the view `ledger`.
"""

SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
  number INTEGER PRIMARY KEY,        -- order of leasing
  group_id TEXT NOT NULL UNIQUE,     -- epoch-prompt_index
  epoch INTEGER NOT NULL,
  prompt_index INTEGER NOT NULL,
  size INTEGER NOT NULL,             -- scored members wanted
  spare INTEGER NOT NULL,            -- started beyond that; the first `size` to be scored are kept
  seed INTEGER NOT NULL,
  leased_version INTEGER NOT NULL,
  leased_at REAL NOT NULL,           -- unix seconds, as every *_at
  expiries INTEGER NOT NULL DEFAULT 0,
  late_puts INTEGER NOT NULL DEFAULT 0,  -- acked but not stored: duplicates, or the group was closed
  closed_at REAL,
  outcome TEXT,                      -- NULL while running, 'complete' or the reason of the drop
  version_min INTEGER,               -- over all sampled tokens, set when closed
  version_max INTEGER,
  step INTEGER REFERENCES batches (step),
  pruned INTEGER NOT NULL DEFAULT 0  -- 1: its payloads are gone
);
CREATE UNIQUE INDEX IF NOT EXISTS groups_by_prompt ON groups (epoch, prompt_index);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step, number) WHERE step IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_open ON groups (number)
  WHERE outcome IS NULL OR (outcome = 'complete' AND step IS NULL);
CREATE INDEX IF NOT EXISTS groups_unpruned ON groups (number) WHERE outcome IS NOT NULL AND pruned = 0;
CREATE TABLE IF NOT EXISTS skips (   -- prompts that an epoch left out because they rested
  epoch INTEGER NOT NULL,
  prompt_index INTEGER NOT NULL,
  PRIMARY KEY (epoch, prompt_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (
  lease_id TEXT PRIMARY KEY,
  group_id TEXT NOT NULL REFERENCES groups (group_id),
  actor TEXT NOT NULL,
  members TEXT NOT NULL,             -- JSON array of indices
  granted_at REAL NOT NULL,
  ended_at REAL,
  ended_by TEXT                      -- 'done', 'expired', 'returned' or 'closed'
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_open ON leases (group_id) WHERE ended_at IS NULL;
CREATE INDEX IF NOT EXISTS leases_by_group ON leases (group_id);
CREATE TABLE IF NOT EXISTS trajectories (
  number INTEGER PRIMARY KEY,        -- order of arrival
  trajectory_id TEXT GENERATED ALWAYS AS (group_id || '/' || member) VIRTUAL,
  group_id TEXT NOT NULL REFERENCES groups (group_id),
  member INTEGER NOT NULL,           -- index in the group
  lease_id TEXT NOT NULL,
  actor TEXT NOT NULL,
  task TEXT NOT NULL,
  stop_reason TEXT NOT NULL,
  reward REAL,                       -- NULL: unscorable, see error
  error TEXT,
  prompt_tokens INTEGER NOT NULL,
  action_tokens INTEGER NOT NULL,    -- sampled by the policy
  tokens INTEGER NOT NULL,
  turns INTEGER NOT NULL,
  version_min INTEGER,               -- over sampled tokens; NULL if there are none
  version_max INTEGER,
  put_at REAL NOT NULL,
  payload BLOB,                      -- buffer.codec.decode_trajectory; NULL once pruned
  UNIQUE (group_id, member)
);
CREATE TABLE IF NOT EXISTS evaluations (  -- during training, by eval.every_steps
  step INTEGER PRIMARY KEY,          -- after which it was opened
  version INTEGER NOT NULL,          -- newest then: what it measures
  prompts INTEGER NOT NULL,
  opened_at REAL NOT NULL,
  closed_at REAL
);
CREATE TABLE IF NOT EXISTS held_out (  -- a held-out prompt leased by an evaluation
  step INTEGER NOT NULL REFERENCES evaluations (step),
  prompt_index INTEGER NOT NULL,     -- among the evaluation's prompts
  actor TEXT NOT NULL,
  grants INTEGER NOT NULL,           -- leases of it so far
  put_at REAL,                       -- NULL: running, or dropped if the evaluation is closed
  task TEXT,
  success REAL,                      -- NULL: unscored, see error
  reward REAL,
  stop_reason TEXT,
  error TEXT,
  action_tokens INTEGER,
  version_min INTEGER,               -- over sampled tokens
  version_max INTEGER,
  PRIMARY KEY (step, prompt_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
  step INTEGER PRIMARY KEY,
  version INTEGER NOT NULL,          -- newest when its step is trained
  mask_below INTEGER,                -- tokens of older versions are masked when handed out; NULL: none
  bound_at REAL NOT NULL,
  committed_at REAL,
  committed_version INTEGER,         -- newest after the commit
  published INTEGER NOT NULL DEFAULT 0  -- 1 if the commit brought a new version
);
CREATE VIEW IF NOT EXISTS ledger AS
  SELECT group_id, number,
    CASE WHEN outcome IS NULL THEN 'running'
         WHEN outcome <> 'complete' THEN 'dropped_' || outcome
         WHEN step IS NULL THEN 'ready'
         WHEN committed_at IS NULL THEN 'bound'
         ELSE 'trained' END AS place
  FROM groups LEFT JOIN batches USING (step);
"""
