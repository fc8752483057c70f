# test_my_functions.py
from types import SimpleNamespace

import my_functions
import numpy as np
import torch


def test_the_reward():
    episode = SimpleNamespace(reward=1.0, response_ids=[0] * 26)
    assert my_functions.brief(episode) == 0.9


def test_the_filter():
    rewards = {"a": [0, 0], "b": [0, 1], "c": [1, 1]}
    episodes = [SimpleNamespace(reward=r, group_id=g) for g in rewards for r in rewards[g]]
    assert my_functions.learnable(episodes) == episodes[2:4]


def test_the_advantage():
    rewards = np.array([0.0, 1.0, 1.0, 3.0, 5.0, 2.0])
    index = np.array([*"aaaabb"], dtype=object)
    expected = []
    for i in range(6):
        others = [rewards[j] for j in range(6) if index[j] == index[i] and j != i]
        expected.append(np.sign(rewards[i] - others).mean())
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]] * 3)
    token_level_rewards = torch.zeros(6, 3)
    token_level_rewards[:, 0] = torch.tensor(rewards)
    advantages, _ = my_functions.ranks(token_level_rewards, mask, index)
    np.testing.assert_allclose(advantages, np.array(expected)[:, None] * mask.numpy(), atol=1e-6)


def test_the_loss_and_its_gradient():
    old, new, advantages = torch.randn(3, 2, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    batch_info = {"dp_size": 1, "batch_num_tokens": 4, "global_batch_size": 2}
    config = SimpleNamespace(global_batch_info=batch_info)
    new.requires_grad_()
    loss, _ = my_functions.quadratic(old, new, advantages, mask, "token-mean", config)
    loss.backward()
    d, a, m = (new.detach() - old).numpy(), advantages.numpy(), mask.numpy()
    np.testing.assert_allclose(loss.item(), (m * (-a * np.exp(d) + 0.05 * d**2)).sum() / 4)
    np.testing.assert_allclose(new.grad, m * (-a * np.exp(d) + 0.1 * d) / 4)
