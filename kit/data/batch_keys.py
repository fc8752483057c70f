"""The names of the tensors and arrays of a step's batch, which is verl's DataProto.

verl's functions read most of these names. B training rows (one for
each episode, or several if an agent has branches), P tokens in the longest prompt, R in the
longest response. kit/recipe/user_functions.py has the types of a custom advantage or loss.

Convenience: one place says which names a batch has, and the shape of each.
"""

from __future__ import annotations

# --- batch.batch: tensors that training.build_batch makes ----------------------------------------

PROMPTS = "prompts"  # int64 [B, P], padded on the left
RESPONSES = "responses"  # int64 [B, R], padded on the right
INPUT_IDS = "input_ids"  # int64 [B, P+R]
ATTENTION_MASK = "attention_mask"  # int64 [B, P+R]: 1, or 0 for padding
POSITION_IDS = "position_ids"  # int64 [B, P+R]; [B, 4, P+R] for some models that read images
RESPONSE_MASK = "response_mask"  # int64 [B, R]: 1 = sampled, 0 = observed or padding
ROLLOUT_LOG_PROBS = "rollout_log_probs"  # float32 [B, R], by the rollout engine
SCORES = "token_level_scores"  # float32 [B, R]: the shaped reward, at the ends of turns
TURN = "turn"  # int64 [B, R]: the number of the policy's turn, -1 on other tokens
BASELINES = "reward_baselines"  # float32 [B]: the rewards of greedy responses, for ReMax

# --- batch.batch: tensors that the stages of a step add ------------------------------------------

REWARDS = "token_level_rewards"  # float32 [B, R]: SCORES minus the KL penalty
OLD_LOG_PROBS = "old_log_probs"  # float32 [B, R], by the trainer before the update
REF_LOG_PROBS = "ref_log_prob"  # float32 [B, R], by the reference or the teacher
VALUES = "values"  # float32 [B, R], by the critic
SQUARES = "sum_pi_squared"  # float32 [B, R]: the sum of p^2 over the vocabulary
WEIGHTS = "rollout_is_weights"  # float32 [B, R], of algorithm.rollout_correction
ADVANTAGES = "advantages"  # float32 [B, R], which the actor's update reads
RETURNS = "returns"  # float32 [B, R], which the critic's update reads

# --- batch.non_tensor_batch: arrays of objects ---------------------------------------------------

GROUPS = "uid"  # [B] of texts: the group of each episode
COMPONENTS = "reward_components"  # [B] of {name: value}: a verifier may choose any name
EPISODES = "episode"  # [B] of ints: the episode of each row. Its last row is the main one
IMAGES = "multi_modal_inputs"  # [B] of {name: tensor}, of a model that reads images

# --- batch.meta_info, next to kit.recipe.schedule.POSITION ---------------------------------------

TEMPERATURE = "temperature"  # float: the workers divide their logits by it
TOKEN_COUNTS = "global_token_num"  # list of B ints, for verl's throughput metrics
