# my_credit.py
import torch

from templates.advantages import turn_grpo

# Two episodes of two turns. Each turn has two tokens; -1 marks an observed token.
turn = torch.tensor([[0, 0, -1, 1, 1], [0, 0, -1, 1, 1]])
# The first episode earns 1 in its first turn, the second one in its second turn.
rewards = torch.tensor([[0, 1.0, 0, 0, 0], [0, 0, 0, 0, 1.0]])
mask = (turn >= 0).float()
advantages, _ = turn_grpo(rewards, mask, turn, index=["row 1", "row 1"])  # one group
for row in advantages.tolist():
    print([round(value, 2) for value in row])
