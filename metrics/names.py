"""Every metric's name, in one place. `role/what_unit`; counters are window sums since the last report.

Used by whoever records (actors, buffer, learner, weightsync) and by the progress picture.
"""

# actor, per report window
ACTOR_TRAJECTORIES = "actor/trajectories"  # put in the window
ACTOR_REWARD_SUM = "actor/reward_sum"  # over scored trajectories
ACTOR_SCORED = "actor/scored"
ACTOR_SUCCESS = "actor/success"  # trajectories whose task.success held
ACTOR_ERRORS = "actor/errors"  # unscored or failed
ACTOR_TOKENS = "actor/tokens_sampled"
ACTOR_PROMPT_TOKENS = "actor/tokens_prompt"  # prefilled, prefix-cache hits included
ACTOR_CACHED_TOKENS = "actor/tokens_cached"  # of those, served from the prefix cache
ACTOR_WINDOW_S = "actor/window_s"  # length of the window
ACTOR_IN_FLIGHT = "actor/in_flight"  # trajectories now
ACTOR_IDLE_S = "actor/idle_s"  # no trajectory in flight: waiting for a lease
ACTOR_PAUSED_S = "actor/paused_s"  # engine paused for new weights
TASK_PREFIX = "task/"  # task/<task>/<trajectories|success|scored|reward_sum>
REWARD_PREFIX = "reward/"  # reward/<component>_<sum|count>, unweighted, over trajectories that have it
JUDGE_CALLS = "judge/calls"  # requests answered
JUDGE_CACHED = "judge/cached"  # verdicts that an equal request had already got
JUDGE_FAILURES = "judge/failures"  # requests refused, and verdicts that could not be read
JUDGE_SECONDS = "judge/seconds"  # summed, retries included
JUDGE_TOKENS_IN = "judge/tokens_in"
JUDGE_TOKENS_OUT = "judge/tokens_out"
JUDGE_COST = "judge/cost"  # by the price in the judge's options
ACTOR_TOOL_PAUSED_S = "actor/tool_paused_s"  # no leases because a tool is down
TOOL_CALLS = "tool/calls"
TOOL_FAILURES = "tool/failures"  # outcomes other than ok
TOOL_SECONDS = "tool/seconds"  # summed latency of calls
TOOL_PREFIX = "tool/"  # of each tool, tool/<name>/ and then, over the window:
TOOL_EACH_CALLS = "calls"
TOOL_EACH_FAILURES = "failures"  # outcomes other than ok
TOOL_EACH_INFRASTRUCTURE = "infrastructure"  # of those, because what is behind the tool is gone
TOOL_EACH_TIMEOUTS = "timeouts"
TOOL_EACH_LATENCY = {0.5: "latency_p50_s", 0.95: "latency_p95_s", 0.99: "latency_p99_s"}  # of calls that ran
TOOL_EACH_QUEUED_P95_S = "queued_p95_s"  # waiting for a slot
TOOL_EACH_RUNNING_MAX = "running_max"  # at once
TOOL_EACH_CACHE_HITS = "cache_hits"
TOOL_EACH_CACHE_AGE_S = "cache_age_s"  # mean age of the results served
TOOL_EACH_BLOCKED_S = "blocked_s"  # seconds in which it blocked the event loop

# learner, once per step
STEP = "learner/step"
STEP_S = "learner/step_s"  # whole step, waits included
WAIT_S = "learner/wait_batch_s"  # of it, waiting for the batch
TRAIN_S = "learner/train_s"  # forward, backward, optimizer
PUBLISH_S = "learner/publish_s"  # copying the weights for the publisher
TOKENS_TRAINED = "learner/tokens_action"  # masked-in tokens of the batch
TOKENS_PACKED = "learner/tokens_packed"  # tokens computed after prefix sharing, in all ppo_epochs
TOKENS_UNPACKED = "learner/tokens_unpacked"  # what they would be without sharing or packing's gain
IMBALANCE = "learner/imbalance"  # what the dearest rank computes beyond the mean, over the mean
LOSS = "learner/loss"
GRAD_NORM = "learner/grad_norm"  # of the step's last update, before clipping
LR = "learner/lr"
ENTROPY = "learner/entropy"
KL_REF = "learner/kl_ref"
CLIP_FRACTION = "learner/clip_fraction"
RATIO_MEAN = "learner/ratio_mean"
IMPORTANCE_MEAN = "learner/importance_mean"  # off-policy weight of a token
IMPORTANCE_ZERO = "learner/importance_zero"  # fraction of tokens that a mask of rollout_is left out
VALUE_LOSS = "learner/value_loss"  # the critic's, with adv_estimator gae
MISMATCH_KL = "learner/mismatch_kl"  # k3 of behaviour against learner logprobs, before the update
LOGPROB_GAP_MEAN = "learner/logprob_gap_mean"
LOGPROB_GAP_MAX = "learner/logprob_gap_max"
DISAGREE = "learner/engine_disagrees"  # 1 where the mean gap is above learner.logprob_gap_warn
REWARD_MEAN = "learner/reward_mean"  # of the batch
REWARD_STD = "learner/reward_std"
STALENESS_MEAN = "learner/staleness_mean"  # versions, over action tokens
STALENESS_MAX = "learner/staleness_max"
SKIPPED_STEPS = "learner/skipped_steps"  # NaN or Inf in loss or gradients

# weightsync
SYNC_VERSION = "weightsync/version"
SYNC_TRANSFER_S = "weightsync/transfer_s"
SYNC_PAUSE_S = "weightsync/pause_s"
SYNC_BYTES = "weightsync/bytes"
SYNC_SWAPPED_AT = "weightsync/swapped_at"  # unix time at which an actor's engine went on with new weights
SYNC_PROBE = "weightsync/probe_difference"  # mean |logprob of the engine - of the learner|, fixed sequence
SYNC_SKIPPED = "weightsync/versions_skipped"

# buffer
BUFFER_READY = "buffer/ready_groups"
BUFFER_RUNNING = "buffer/running_groups"
BUFFER_PUT_MS = "buffer/put_ms_p50"
BUFFER_REFUSED = "buffer/frames_refused"  # also by reason: buffer/frames_refused/<reason>
BUFFER_SKIPPED = "buffer/skipped_by_curriculum"  # visits to resting prompts passed over, since the run began
BUFFER_RESTING = "buffer/resting_prompts"  # whose last group taught nothing
BUFFER_LATE_PUTS = "buffer/late_puts"  # duplicates, or their group was closed: acked, not stored
BUFFER_LEDGER_PREFIX = "buffer/ledger_"  # buffer/ledger_<leased|trained|bound|ready|running|dropped_*>
# evaluations during training (eval.every_steps), once each, when it is closed
EVAL_PREFIX = "eval/"  # with several tasks also eval/<task>/success
EVAL_STEP = "eval/step"  # after which it was opened
EVAL_VERSION = "eval/version"  # newest then: the weights that it measures
EVAL_VERSION_MIN = "eval/version_min"  # oldest and newest weights that sampled its tokens
EVAL_VERSION_MAX = "eval/version_max"
EVAL_SUCCESS = "eval/success"  # greedy, over scored prompts
EVAL_LOW = "eval/success_low"  # 95 % interval
EVAL_HIGH = "eval/success_high"
EVAL_REWARD = "eval/reward"
EVAL_PROMPTS = "eval/prompts"  # scored
EVAL_UNSCORED = "eval/unscored"
EVAL_MISSING = "eval/missing"  # not put when it was closed
