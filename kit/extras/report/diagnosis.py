"""What is wrong with a run, in words: from its metrics and its recipe alone, with what shows it and what to do next.

Each rule is a function of a run's folder that gives findings or none; `RULES` has them in the order in which a cause
comes before what follows from it. Thresholds are constants, with where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from kit.data.episodes import FAILED_AS_0
from kit.extras.report.metric_docs import of_status
from kit.extras.report.run_data import Folder

FAILED = 0.02  # of all episodes
CUT, NEARLY_ALL = (
    0.25,
    0.9,
)  # of the answers: a cause where whole ones earn more, or where there are hardly any
UNIFORM = 0.7  # of the groups: the rest is too small a batch to learn from
SIGMAS = 2.5  # by which two parts of a run differ before it is said that they do
BROKEN = 4.0  # factor by which the entropy leaves where it was, without a reward for it
FAR, SHIFT = 0.5, 0.05  # nats a token: from the reference, and within a step
APART = 0.05  # in probability: the same for sampler and trainer
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Finding(NamedTuple):
    """what: is wrong, with numbers. shown: metrics or files that show it. todo: the next thing to do."""

    what: str
    shown: list[str]
    todo: str


def findings(run: Folder) -> list[Finding]:
    """What stands out in a run, causes first; of a run without a step what its episodes say."""
    return [finding for rule in RULES for finding in rule(run)]


def failures(run: Folder) -> Iterator[Finding]:
    """Episodes that failed: how many, why, of which server, in which steps."""
    failed = run.column("rollout/failed_frac") * run.column("rollout/episodes")
    total, every = failed.sum(), run.column("rollout/episodes").sum()
    if not every or total < FAILED * every:
        return
    prefix, suffix = "rollout/failed/", "/failed_frac"
    reasons = {
        name.removeprefix(prefix): run.steps[name].sum()
        for name in run.steps
        if name.startswith(prefix)
    }
    first = max(reasons, key=lambda reason: reasons[reason], default="")
    told = ", ".join(
        f"{count:.0f} {reason}"
        for reason, count in sorted(reasons.items(), key=lambda r: -r[1])[:4]
    )
    by_server = [
        name
        for name in run.steps
        if name.startswith("rollout/") and name.endswith(suffix) and name.count("/") == 2
    ]
    servers = {
        name.split("/")[1]: frac for name in by_server if (frac := run.steps[name].mean()) > 0
    }
    server = max(servers, key=lambda name: servers[name], default="")
    where = f", {'all' if len(servers) == 1 else 'most'} of the server {server}" if server else ""
    bad = run.trained.index[
        (failed / run.column("rollout/episodes")).reindex(run.trained.index) > FAILED
    ]
    when = "in every step" if len(bad) == len(run.trained) else f"in {ranges(list(bad))}"
    what, todo = of_status(first)
    yield Finding(
        f"{total / every:.0%} of the episodes failed ({told}){where}, {when}: they have no reward, and taught nothing. "
        f"{first}: {what}.",
        [
            f"{prefix}{first}",
            f"rollout/{server}{suffix}" if server else "rollout/failed_frac",
            "failures.jsonl",
        ],
        todo,
    )


def unread(run: Folder) -> Iterator[Finding]:
    """Files that a kill cut short, which a resumed run writes again."""
    if len(run.steps) + len(run.records) and run.broken:  # which are read by then
        yield Finding(
            f"not all could be read: {'; '.join(run.broken[:3])}",
            run.broken[:1],
            "the rest is below",
        )


def damaged(run: Folder) -> Iterator[Finding]:
    """Steps that were left out: numbers that are not finite, or nothing to train on."""
    bad = run.column("training/skipped_nonfinite_steps") > 0
    if bad.any():
        yield Finding(
            f"{bad.sum()} steps had numbers that are not finite and taught nothing, {ranges([*run.steps.index[bad]])}",
            ["training/skipped_nonfinite_steps", "damaged/"],
            f"lower {ACTOR}.optim.lr or {ACTOR}.optim.clip_grad; in half precision try another",
        )
    learned = run.column("actor/loss").notna() | run.column("actor/grad_norm").notna()
    late = [step for step in run.trained.index if step > warmup(run)] if learned.any() else []
    skipped = [step for step in late if not learned[step] and not bad.get(step, False)]
    if skipped:
        yield Finding(
            f"{len(skipped)} of {len(run.trained)} steps were skipped, {ranges(skipped)}: no group was left",
            ["rollout/groups_dropped", "rollout/filtered/*", "rollout/failed_frac"],
            "see which of failures, filters and rollout_correction took them",
        )


def broken_policy(run: Folder) -> Iterator[Finding]:
    """The distribution went to pieces: entropy far from where it was, or the reward gone, early and unpaid."""
    entropy, reward = measured(run, "actor/entropy"), measured(run, "rollout/reward/mean")
    if len(entropy) < 3 or len(reward) < 3:
        return
    first, last = entropy.iloc[0], entropy.iloc[-third(entropy) :].median()
    part = third(reward)
    before, best, after = (
        reward.iloc[:part].mean(),
        smooth(reward).max(),
        reward.iloc[-part:].mean(),
    )
    error = noise(reward) * np.sqrt(2 / part)
    paid = after > before + SIGMAS * error or after > near_top(run)
    ratio = max(last, 1e-6) / max(first, 1e-6)
    moved = max(ratio, 1 / ratio)
    lost = best - after > max(0.3 * spread(run), SIGMAS * error) and not curriculum(run)
    harder = curriculum(run) and ratio < 1  # pays no more, and is well
    two_steps = (
        np.log(entropy.clip(lower=1e-6)).diff(2).where(entropy.shift(2) > first / 2).abs().max()
    )
    abrupt = two_steps > np.log(BROKEN) and after < near_top(run)  # whatever that happens to pay
    if (moved > BROKEN and not paid and not harder) or (moved > 2 and lost) or abrupt:
        rate = value(run, f"{ACTOR}.optim.lr")
        gradient = measured(run, "actor/grad_norm")
        norm = (
            f", gradients up to {gradient.max():.3g} before they are clipped"
            if len(gradient)
            else ""
        )
        yield Finding(
            f"the policy went to pieces: entropy {first:.3g} -> {last:.3g} nats, reward {before:.3g} -> {after:.3g} "
            f"(at best {best:.3g}){norm}. The learning rate, {rate:.3g}, is too high, or nothing holds the policy.",
            ["actor/entropy", "rollout/reward/mean", "actor/grad_norm"],
            f"{ACTOR}.optim.lr a tenth of it, from the start or from a checkpoint before; if it comes again, "
            f"{ACTOR}.use_kl_loss=true",
        )


def cut_answers(run: Folder) -> Iterator[Finding]:
    """Answers that reach the longest length, and earn less for it."""
    cut = measured(run, "rollout/ended/length_frac", fill=0.0)
    if not len(cut) or (late := cut.iloc[-third(cut) :].mean()) <= CUT:
        return
    most = value(run, "data.max_response_length")
    of = run.episodes[(run.episodes.status == "ok") & run.episodes.file.str.startswith("step")]
    paid = of.groupby(of.ended == "length")["reward"].agg(["mean", "sem"])
    both = len(paid) == 2 and not paid.isna().any(axis=None)
    if late < NEARLY_ALL and not (
        both and paid["mean"][False] - paid["mean"][True] > SIGMAS * paid["sem"].max()
    ):
        return
    worth = (
        f" They earn {paid['mean'][True]:.3g}, whole ones {paid['mean'][False]:.3g}."
        if both
        else ""
    )
    yield Finding(
        f"{late:.0%} of the answers are cut at data.max_response_length={most:g}.{worth}",
        ["rollout/ended/length_frac", "response_length/mean"],
        f"raise data.max_response_length (now {most:g}), ask for shorter answers in the prompt, or leave cut ones out "
        "(a filter, templates/filters.py)",
    )


def equal_groups(run: Folder) -> Iterator[Finding]:
    """Groups whose answers all earn the same: no advantage, no gradient."""
    uniform = measured(run, "rollout/zero_variance_groups", fill=0.0)
    if not len(uniform) or (n := value(run, f"{ROLLOUT}.n")) < 2:
        return
    verified = run.trained["rollout/episodes"] * (1 - run.trained["rollout/failed_frac"])
    frac = (uniform / (verified / n).clip(lower=1)).clip(upper=1)
    if (late := frac.iloc[-third(frac) :].mean()) <= UNIFORM or not compares(run):
        return
    trained = run.episodes[(run.episodes.status == "ok") & run.episodes.file.str.startswith("step")]
    usual = trained[trained.step >= frac.index[-third(frac)]].reward.round(3).mode()
    worth = usual.iloc[0] if len(usual) else float("nan")
    lowest, highest = trained.reward.min(), trained.reward.max()
    if worth < highest or (lowest == highest and not worth > 0):
        hard = "The task is too hard for this policy"
        kind = hard if worth <= lowest else "The verifier pays the same for most answers"
        todo = (
            "easier rows first (docs/guides/curriculum.md), examples to imitate (`--config sft`), a reward for parts "
            f"of the way, or more answers to each prompt ({ROLLOUT}.n, now {n:g})"
        )
    else:
        kind, todo = "The task is solved, or too easy", "harder rows, or stop here"
    if not run.setting("algorithm.filter_groups.enable"):
        todo += "; algorithm.filter_groups.enable=true (`--config dapo`) samples more until the batch is full"
    yield Finding(
        f"in {late:.0%} of the groups all answers earn the same, mostly {worth:.3g}: no advantage, nothing to learn. "
        f"{kind}.",
        ["rollout/zero_variance_groups", "rollout/reward/mean", "actor/grad_norm"],
        todo,
    )


def flat_reward(run: Folder) -> Iterator[Finding]:
    """A reward that has not moved, or falls; of rows that get harder nobody can tell."""
    name = "critic/rewards/mean" if shaped(run) else "rollout/reward/mean"
    reward = measured(run, name)
    if len(reward) < 12 or any(equal_groups(run)) or any(broken_policy(run)):
        return
    part = third(reward)
    early, late = reward.iloc[:part].mean(), reward.iloc[-part:].mean()
    error = SIGMAS * max(noise(reward) * np.sqrt(2 / part), 1e-9)
    rate = value(run, f"{ACTOR}.optim.lr")
    read = "the best and the worst answers: does the reward tell them apart?"
    if late < early - error and not curriculum(run):
        yield Finding(
            f"the reward falls: {early:.3g} at first, {late:.3g} now, in {len(reward)} steps",
            [name, "actor/entropy", "response_length/mean"],
            f"a lower {ACTOR}.optim.lr (now {rate:.3g}); read {read}",
        )
    elif abs(late - early) < error and late < near_top(run):
        yield Finding(
            f"the reward is flat: {early:.3g} at first, {late:.3g} now, in {len(reward)} steps",
            [name, "actor/grad_norm", "actor/lr"],
            f"if actor/grad_norm is steady, {ACTOR}.optim.lr (now {rate:.3g}) times three; read {read}",
        )


def running_kl(run: Folder) -> Iterator[Finding]:
    """A policy that runs away from the reference, or within a step from the one that sampled."""
    for name, what, todo in (
        (
            "actor/kl_loss",
            "the reference",
            f"raise {ACTOR}.kl_loss_coef, or lower {ACTOR}.optim.lr",
        ),
        ("actor/reward_kl_penalty", "the reference", "raise algorithm.kl_ctrl.kl_coef"),
        (
            "actor/ppo_kl",
            "the policy that sampled",
            f"fewer {ACTOR}.ppo_epochs, a larger ppo_mini_batch_size, or lower optim.lr",
        ),
    ):
        kl = measured(run, name).abs()
        if len(kl) < 3:
            continue
        early, late = kl.iloc[: third(kl)].median(), kl.iloc[-third(kl) :].median()
        if (late > FAR and late > 4 * early) or (late > SHIFT and name == "actor/ppo_kl"):
            yield Finding(
                f"the KL to {what} runs away: {early:.3g} -> {late:.3g} nats a token", [name], todo
            )


def sampler_apart(run: Folder) -> Iterator[Finding]:
    """A sampler that is not the trainer."""
    apart = measured(run, "training/rollout_probs_diff_mean")
    if len(apart) and (late := apart.iloc[-third(apart) :].mean()) > APART:
        yield Finding(
            f"sampler and trainer disagree by {late:.3g} in the probability of a token (rounding to bf16: below 0.02)",
            ["training/rollout_probs_diff_mean", "rollout_corr/kl"],
            "with trainer.one_step_off or a quantised sampler: `--config rollout_correction`; else vLLM's weights "
            "are not the trainer's: please report it",
        )


def collapsed(run: Folder) -> Iterator[Finding]:
    """No entropy left before the task is solved: nothing new is tried."""
    entropy, reward = measured(run, "actor/entropy"), measured(run, "rollout/reward/mean")
    if len(entropy) < 8 or any(broken_policy(run)):
        return
    late = entropy.iloc[-third(entropy) :].median()
    if (
        late < 0.03
        and late < entropy.iloc[0] / 10
        and reward.iloc[-third(reward) :].mean() < near_top(run)
    ):
        yield Finding(
            f"the answers hardly vary any more: entropy {entropy.iloc[0]:.3g} -> {late:.3g} nats, at a reward of "
            f"{reward.iloc[-1]:.3g}",
            ["actor/entropy", "rollout/zero_variance_groups"],
            f"{ACTOR}.clip_ratio_high=0.28 (DAPO), {ACTOR}.entropy_coeff=0.001, a lower {ACTOR}.optim.lr",
        )


def held_out_apart(run: Folder) -> Iterator[Finding]:
    """Held-out rows that get worse while the reward of training rises."""
    reward = measured(run, "rollout/reward/mean")
    for name in [c for c in run.steps if c.startswith("val-core/") and "/reward/mean@" in c]:
        held = run.steps[name].dropna()
        if len(held) < 3 or len(reward) < 6:
            continue
        of = run.episodes[
            (run.episodes.file == f"val_{held.index[-1]}")
            & (run.episodes.server == name.split("/")[1])
        ]
        rows, best = of.row_id.nunique(), smooth(reward).loc[: held.idxmax()]
        rises = smooth(reward).iloc[-1] > (best.max() if len(best) else reward.iloc[0]) - noise(
            reward
        )
        if (
            rows
            and rises
            and held.max() - held.iloc[-1] > SIGMAS * np.sqrt(2 * of.reward.var() / rows)
        ):
            yield Finding(
                f"held-out reward fell from {held.max():.3g} (step {held.idxmax()}) to {held.iloc[-1]:.3g}, that of "
                "training did not",
                [name, "rollout/reward/mean"],
                "read the best answers of the last steps: what does the verifier pay for? More rows; stop earlier",
            )


RULES: list[Callable[[Folder], Iterator[Finding]]] = [
    *(unread, failures, damaged, broken_policy, cut_answers, equal_groups, flat_reward),
    *(running_kl, sampler_apart, collapsed, held_out_apart),
]


def headline(run: Folder) -> str:
    """A run in one line: steps, minutes, reward, held-out scores, first to last."""
    steps, parts = run.trained[run.trained.index > 0], list[str]()
    steps = steps if len(steps) else run.steps[run.column("actor/loss").notna()]  # supervised
    if len(steps):
        between = run.column("time").diff()
        minutes = (
            between[between <= 20 * between.median()].sum() / 60
        )  # without the pause before a resume
        parts.append(f"{len(steps)} steps to {steps.index[-1]}, {minutes:.1f} min")
        if len(reward := measured(run, "rollout/reward/mean")):
            parts.append(
                f"reward {reward.iloc[0]:.3g} -> {reward.iloc[-third(reward) :].mean():.3g}"
            )
    for name in [
        c
        for c in run.steps
        if ("/acc/mean@" in c and not c.endswith(FAILED_AS_0)) or c == "val/loss"
    ]:
        if len(held := run.steps[name].dropna()):
            path = (
                f"{held.iloc[0]:.3g} -> {held.iloc[-1]:.3g}"
                if len(held) > 1
                else f"{held.iloc[-1]:.3g}"
            )
            parts.append(f"{'held-out ' * name.startswith('val')}{name.split('/', 1)[1]} {path}")
    return "; ".join(parts) or "nothing yet"


# --- numbers of a run ----------------------------------------------------------------------------


def measured(run: Folder, name: str, fill: float | None = None) -> pd.Series:
    """A metric over the steps that sampled, those without it left out, or filled."""
    found = run.column(name).reindex(run.trained.index)
    return found.dropna() if fill is None or found.isna().all() else found.fillna(fill)


def value(run: Folder, key: str) -> float:
    """A number of the recipe; NaN where it is none."""
    found = run.setting(key)
    return float(found) if isinstance(found, (int, float)) else float("nan")


def shaped(run: Folder) -> bool:
    """Whether something else than the verifier's word is trained on."""
    return any(
        run.setting(key)
        for key in ("env.reward", "reward.reward_model.enable", "distillation.enabled")
    )


def compares(run: Folder) -> bool:
    """Whether the advantage compares the verifier's words on the answers to a prompt, and has nothing else."""
    estimator = str(run.setting("algorithm.adv_estimator") or "grpo")
    return not shaped(run) and any(
        name in estimator for name in ("grpo", "rloo", "opo", "gpg", "gdpo", "baseline")
    )


def curriculum(run: Folder) -> bool:
    """Whether rows may get harder."""
    files = run.setting("env.train_files") or []
    return bool(run.setting("env.sampler")) or any(
        isinstance(file, dict) and "function" in file for file in files
    )


def spread(run: Folder) -> float:
    """From the lowest to the highest reward that was ever given; 1 where no episode is there."""
    given = run.episodes.reward.dropna()
    return float(given.max() - given.min()) if len(given) else 1.0


def near_top(run: Folder) -> float:
    """A reward in the upper tenth of those that were given."""
    given = run.episodes.reward.dropna()
    return float(given.max()) - 0.1 * spread(run) if len(given) else 0.9


def warmup(run: Folder) -> float:
    """Steps in which the critic alone learns."""
    return float(run.setting("trainer.critic_warmup") or 0)


def third(series: pd.Series) -> int:
    """How many values the first, or the last, third has; at least one."""
    return max(1, len(series) // 3)


def smooth(series: pd.Series) -> pd.Series:
    """The mean of three neighbours."""
    return series.rolling(3, min_periods=1, center=True).mean()


def noise(series: pd.Series) -> float:
    """The standard deviation of one value, from the differences of neighbours, which a trend hardly touches."""
    return (
        float(series.diff().std() / np.sqrt(2))
        if len(series) > 3
        else float("inf")
        if len(series) < 2
        else 0.0
    )


def ranges(steps: list[int]) -> str:
    """[1, 2, 3, 7] -> 'steps 1 to 3 and 7'."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    told = [f"{a} to {b}" if a < b else f"{a}" for a, b in parts[:4]] + ["more"] * (len(parts) > 4)
    return f"step{'s' * (len(steps) > 1)} {', '.join(told)}"
