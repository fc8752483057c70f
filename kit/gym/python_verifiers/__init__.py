"""Verify rows with Python functions or environment classes, without a Gym server.

    env:
      verifier: my_reward.py:compute_score  # for all rows of files without another verifier
      train_files:
        - data/sums.jsonl
        - {path: data/games.jsonl, verifier: my_game.py:Game}
        - {path: data/mcqa.jsonl, server: mcqa}  # a Gym server
        - {path: data/gsm8k.jsonl, verifier: {function: my_reward.py:compute_score, strict: true}}

With `env.verifier`, the kit starts only the Gym servers that a file names. Further keys of a
verifier, such as `strict`, are its settings, except `raw_text` (see solution_str). `verl` is verl's
default_compute_score (verl_scorer.py has its settings).

A function gets these keyword arguments, as from verl. It returns a finite number, or a dict with a
finite number `score`. A bool, a Decimal, a 0-d array and a 0-d tensor are numbers, too. Other
numbers in the dict become metrics, and everything else is saved in the rollouts.
    data_source     of the row, otherwise the name of the function
    solution_str    the answer in the policy's last turn: the text after the thought, with calls;
                    with `raw_text: true` the whole turn, without special tokens, as in verl
    ground_truth    of the row, unchanged: reward_model.ground_truth, answer, ... or None
                    (kit/data/ground_truths.py)
    extra_info      of the row, with verl's num_turns and rollout_reward_scores, and the whole row
                    as `row`

A class is instantiated for each episode. It has two methods:
    reset(row)      returns the first observation, or None
    step(text)      gets the text of the policy's turn, returns (observation, reward, done)

Functions and methods may be async. They run in separate processes. Each verifier has
env.verifier_pool.processes, and each process runs one call at a time, for timeout_s at most. An
environment is pickled after each call, so its next step may run in another process. If a process is
lost, only the episode of that call fails, and the next call starts a new process.

A failed call is a GymError, so its episode fails without a reward (docs/guides/verifier.md has the
reasons). settings.py reads the recipe, pool.py starts the processes, and process.py and calls.py
run in them.
"""
